"""Small files that somebody else wrote, read whole or refused in one line before anything is done with them.

Regular files alone are opened: a device never ends, and a pipe that nobody writes to never begins.
"""

import json
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any

from specdemo.core.bounds import Bounds, judge

CONFIG = Bounds(4_000_000, 500_000, 150_000)  # a file of settings; the largest known is an index of weights
TOO_LARGE = "does not fit into the memory that this process may have; choose a smaller model"


def lacks_memory(error: BaseException) -> bool:
    """Whether an error says that there is no more memory: torch's allocators raise a RuntimeError with these words."""
    said = str(error)
    return isinstance(error, MemoryError) or "allocate memory" in said or "out of memory" in said


def check_regular(path: str | Path, limit: int | None = None) -> None:
    """Raise ValueError unless it is a file of at most `limit` bytes (None: of any size), OSError when there is none."""
    found = Path(path).stat()
    if not S_ISREG(found.st_mode) and not S_ISDIR(found.st_mode):  # of a folder, opening it says what is wrong
        raise ValueError(f"{path} is a device or a pipe; copy what it gives into a file first")
    if limit is not None and found.st_size > limit:
        raise ValueError(f"{path} has {found.st_size:,} bytes; {limit:,} at most are read")


def read_bytes(path: str | Path, limit: int, cure: str = "choose another file") -> bytes:
    """Raises ValueError, one line that names the file."""
    try:
        check_regular(path, limit)
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}; {cure}") from None


def read_text(path: str | Path, limit: int, cure: str = "choose another file") -> str:
    """UTF-8; line ends become \\n. Raises ValueError, one line that names the file."""
    try:
        text = read_bytes(path, limit, cure).decode()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text; convert it first") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read(path: str | Path, bounds: Bounds) -> bytes:
    """No more of a file than it takes to see that it is too large. Raises OSError, and ValueError for what is none."""
    check_regular(path)
    with Path(path).open("rb") as file:
        return file.read(bounds.bytes + 1)


def read_json(path: str | Path, bounds: Bounds = CONFIG) -> dict[str, Any]:
    """A JSON object. Raises ValueError, one line that names the file, also for one beyond the bounds."""
    text = read_text(path, bounds.bytes)
    judge(text.encode(), bounds, str(path))
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged; delete it and fetch it again")
    return value
