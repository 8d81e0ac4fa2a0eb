"""Training text: a folder of `*.txt` files with documents separated by `<|endoftext|>`.

Files with `valid` in their name are for validation.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from specdemo.core.safe_io import read_text

CORPUS_BYTES = 4 << 30  # limit of one file
END = "<|endoftext|>"


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents for training and validation."""

    train: list[str]  # documents
    valid: list[str]
    sha256: str  # of all files in name order, for provenance


def check_corpus(folder: Path) -> None:
    """Raise ValueError, one line, if the folder does not exist."""
    if not folder.is_dir():
        raise ValueError(f"no corpus folder {folder}: name a folder of *.txt files with --corpus")


def read_corpus(directory: Path) -> Corpus:
    """Read every `*.txt` in `directory`; without a `*valid*` file, every 100th document is for validation.

    Raises ValueError if there is no text.
    """
    train: list[str] = []
    valid: list[str] = []
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.txt")):
        text = read_text(path, CORPUS_BYTES)
        digest.update(path.name.encode() + b"\0" + text.encode())
        documents = [d.strip() for d in text.split(END) if d.strip()]
        (valid if "valid" in path.stem else train).extend(documents)
    if not train:
        raise ValueError(f"no training text in {directory}: put *.txt files there, documents separated by {END}")
    if not valid:
        valid = train[::100]
        train = [d for i, d in enumerate(train) if i % 100]
    return Corpus(train, valid, digest.hexdigest())


def windows(stream: Tensor, length: int) -> Tensor:
    """Split [N] into [N // length, length] and drop the rest."""
    return stream[: len(stream) // length * length].view(-1, length)
