"""Files appear whole or not at all: written beside, flushed to the disk, renamed.

A full disk leaves the old file and one line; so does a kill, with a `*.part` beside it at worst.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from specdemo.core.signals import held


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A path beside to write to; behind the block it takes the place of `path`. A device or a pipe is written itself.

    Raises ValueError, one line, for whatever goes wrong meanwhile; `path` is what it was then.
    """
    path = Path(path)
    part = path if _streams(path) else _part(path)
    try:
        yield part
        if part != path:
            _flush(part)
            part.replace(path.resolve())  # a link stays one
    except Exception as error:  # writers in other languages raise kinds of their own
        raise ValueError(_line(path, error)) from error
    finally:
        if part != path:
            part.unlink(missing_ok=True)


@contextmanager
def replacing_all(folder: Path, old: str, seal: str) -> Iterator[Path]:
    """A folder beside to fill; behind the block its files go into `folder`, from which those named like `old` vanish.

    The file `seal`, without which the rest is nothing, is taken away first and put there last: old and new ones are
    never taken for one whole. Raises ValueError, one line, for whatever goes wrong.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(suffix=".part", dir=folder) as beside:
            yield Path(beside)
            files = sorted(Path(beside).iterdir(), key=lambda file: file.name == seal)
            for file in files:
                _flush(file)
            with held():
                for stale in (folder / seal, *folder.glob(old)):
                    stale.unlink(missing_ok=True)
                for file in files:
                    file.replace(folder / file.name)
    except Exception as error:
        raise ValueError(_line(folder, error)) from error


def write_text(path: str | Path, text: str) -> None:
    """Raises ValueError, one line, when it cannot be written; `path` is what it was then."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def append_line(path: Path, line: str) -> None:
    """One line more at the end of a file; a kill meanwhile may tear it. Raises ValueError, one line."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
    except OSError as error:
        raise ValueError(_line(path, error)) from error


def check_writable(path: str | Path) -> None:
    """Raises ValueError when `write_text` would, as far as that can be told: before the work, not after it."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file in it")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"there is no folder {path.parent}; make it first")
    try:
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if not _streams(path):
            _part(path).touch()
            _part(path).unlink()
    except OSError as error:
        raise ValueError(_line(path, error)) from None


def _streams(path: Path) -> bool:
    """Whether it is there and keeps nothing: `/dev/null`, a pipe."""
    return path.exists() and not path.is_file()


def _part(path: Path) -> Path:
    path = path.resolve()
    return path.with_name(f"{path.name}.{os.getpid()}.part")  # two processes may write one file


def _flush(file: Path) -> None:
    with file.open("rb+") as written:
        os.fsync(written.fileno())


def _line(path: Path, error: Exception) -> str:
    cause: BaseException | None = error
    while cause and not isinstance(cause, OSError):  # torch.save tells another error than the disk's own
        cause = cause.__context__
    reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(error).partition("\n")[0]
    return f"cannot write {path}: {reason}; make room there or name another place"
