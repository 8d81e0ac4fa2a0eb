"""The weights that ship with the project are what was shipped.

`SHA256SUMS` beside them lists every file. Where one is trained again, in the folder of the shipped models:
`sha256sum */*.safetensors >SHA256SUMS`.
"""

import hashlib
from functools import lru_cache
from pathlib import Path

from specdemo.models.hub import embedded_folder

SUMS = "SHA256SUMS"


def check_shipped(folder: Path) -> None:
    """Raises ValueError, one line, when a file of weights of a shipped model is not the one listed.

    Other folders pass. Every file is read for this once in a process.
    """
    root = embedded_folder().resolve()
    if folder.resolve().parent != root or not (root / SUMS).is_file():
        return
    for line in (root / SUMS).read_text(encoding="ascii").splitlines():
        digest, _, name = line.partition("  ")
        file = root / name
        if file.parent.name == folder.resolve().name and file.is_file():
            there = file.stat()
            if _digest(file, there.st_size, there.st_mtime_ns) != digest:
                raise ValueError(f"{file} is not the file that was shipped; fetch it again, or renew {SUMS} beside it")


@lru_cache(maxsize=256)
def _digest(file: Path, size: int, changed_ns: int) -> str:
    """size, changed_ns: a file that changes is read again."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
