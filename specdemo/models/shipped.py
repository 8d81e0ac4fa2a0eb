"""Models shipped with the package, in the folder `embedded`."""

import hashlib
import os
from functools import lru_cache
from pathlib import Path

SUMS = "SHA256SUMS"
EMBEDDED = tuple(
    "stories stories-draft-wide stories-draft-deep stories-draft-other stories-medusa stories-mlp-speculator "
    "stories-eagle-1 stories-eagle-3 stories-mtp stories-dflash stories-bytes stories-bytes-heads "
    "code code-draft code-eagle-1 smollm2-eagle-3 smollm2-mlp-speculator".split()
)


def embedded_folder() -> Path:
    """Return the folder of the embedded models; SPECDEMO_MODELS overrides it."""
    return Path(os.environ.get("SPECDEMO_MODELS") or Path(__file__).parent / "embedded")


def is_embedded(folder: str | Path) -> bool:
    """Return True for the folder of an embedded model."""
    return Path(folder).resolve().is_relative_to(embedded_folder().resolve())


def embedded_models() -> list[str]:
    """Return the names of the embedded models that can be a target or a draft model: those with a tokenizer."""
    return sorted(folder.name for folder in _folders() if (folder / "tokenizer.json").is_file())


def embedded_heads() -> list[str]:
    """Return the names of the embedded heads."""
    return sorted(folder.name for folder in _folders() if not (folder / "tokenizer.json").is_file())


def _folders() -> list[Path]:
    return [config.parent for config in embedded_folder().glob("*/config.json")]


def check_embedded(folder: Path) -> None:
    """Raise ValueError, one line, if a weight file of an embedded model does not match its checksum in SHA256SUMS.

    Other folders pass. Every file is read once per process. To update the checksums after training, run `sha256sum
    */*.safetensors >SHA256SUMS` in the folder of the embedded models.
    """
    root = embedded_folder().resolve()
    if folder.resolve().parent != root or not (root / SUMS).is_file():
        return
    for line in (root / SUMS).read_text(encoding="ascii").splitlines():
        digest, _, name = line.partition("  ")
        file = root / name
        if file.parent.name == folder.resolve().name and file.is_file():
            info = file.stat()
            if _digest(file, info.st_size, info.st_mtime_ns) != digest:
                raise ValueError(
                    f"the checksum of {file} is not that in {SUMS}; fetch the file again, or update {SUMS}"
                )


@lru_cache(maxsize=256)
def _digest(file: Path, size: int, changed_ns: int) -> str:
    """Return the SHA-256 of a file. size, changed_ns: cache keys, so that a changed file is read again."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
