"""Files that specdemo writes: written to a temporary file, flushed to disk, renamed.

A full disk leaves the old file and raises one line. A killed process leaves the old file and at worst a `*.part` file.
Output paths are checked before the work starts, so that no file of the user is overwritten.
"""

import errno
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from specdemo.core.safe_io import FILE_BYTES, read_json
from specdemo.core.signals import defer_signals

TRACE, RESULT = {"preset", "schedule", "lanes"}, {"suite", "repeats", "rows"}
PROFILE = {"kind", "bandwidth_gb_per_s", "compute_tflop_per_s"}
PAGE = b"<title>specdemo bench "  # a plot of `bench --html`
PROVENANCE = {"versions", "commit", "step", "evaluations"}
SECTIONS, SECTION = {"environment", "sections"}, {"title", "state", "tries"}  # of `bench gpu`
MARKER = ".specdemo-training"  # in a folder of `train` until its provenance is written
HEAD = 1000  # bytes


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path to write to; it replaces `path` at the end of the block. A device or a pipe is written
    directly.

    Raises ValueError, one line, for any error in the block; `path` is unchanged then.
    """
    path = Path(path)
    part = path if _is_stream(path) else _part_path(path)
    try:
        yield part
        if part != path:
            _flush(part)
            part.replace(path.resolve())  # a symbolic link stays one
    except Exception as error:  # writers in other languages raise their own exception types
        raise ValueError(_error_line(path, error)) from error
    finally:
        if part != path:
            part.unlink(missing_ok=True)


@contextmanager
def atomic_folder(folder: Path, old_pattern: str, last_name: str) -> Iterator[Path]:
    """Yield a temporary folder to fill; at the end of the block its files move to `folder`, and files that match
    `old_pattern` are deleted from there.

    `last_name` is the file that makes the others valid. It is deleted first and written last, so that old and new files
    are never taken for one set. Raises ValueError, one line, for any error.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(suffix=".part", dir=folder) as staging:
            yield Path(staging)
            files = sorted(Path(staging).iterdir(), key=lambda file: file.name == last_name)
            for file in files:
                _flush(file)
            with defer_signals():
                for stale in (folder / last_name, *folder.glob(old_pattern)):
                    stale.unlink(missing_ok=True)
                for file in files:
                    file.replace(folder / file.name)
    except Exception as error:
        raise ValueError(_error_line(folder, error)) from error


def write_text(path: str | Path, text: str) -> None:
    """Write a text file. Raises ValueError, one line, if it cannot be written; `path` is unchanged then."""
    with atomic_path(path) as part:
        part.write_text(text, encoding="utf-8")


def json_text(value: object, **layout: Any) -> str:
    """Return `value` as JSON. All JSON of the package is written by this function, so none contains NaN.

    layout: keyword arguments of `json.dumps`. Raises ValueError, one line, for NaN, Infinity and other unknown values.
    """
    try:
        return json.dumps(value, allow_nan=False, **layout)
    except (ValueError, TypeError) as error:
        raise ValueError(f"cannot write this as JSON: {error}") from None


def finite(value: object) -> object:
    """Return a measured JSON value with null in place of NaN and Infinity, so that no result is lost."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def check_writable(path: str | Path) -> None:
    """Raise ValueError, before any work is done, if `write_text` would fail."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file in it")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"the folder {path.parent} does not exist; create it first")
    try:
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if not _is_stream(path):
            _part_path(path).touch()
            _part_path(path).unlink()
    except OSError as error:
        raise ValueError(_error_line(path, error)) from None


def _is_stream(path: Path) -> bool:
    """Return True for an existing path that stores nothing: `/dev/null`, a pipe."""
    return path.exists() and not path.is_file()


def _part_path(path: Path) -> Path:
    path = path.resolve()
    return path.with_name(f"{path.name}.{os.getpid()}.part")  # two processes may write one file


def _flush(file: Path) -> None:
    with file.open("rb+") as opened:
        os.fsync(opened.fileno())


def _error_line(path: Path, error: Exception) -> str:
    cause: BaseException | None = error
    while cause and not isinstance(cause, OSError):  # torch.save wraps the error of the disk
        cause = cause.__context__
    reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(error).partition("\n")[0]
    return f"cannot write {path}: {reason}; free disk space or choose another path"


def cache_folder() -> Path:
    """Return the folder of what specdemo keeps on this machine."""
    system = {"win32": os.environ.get("LOCALAPPDATA", ""), "darwin": "~/Library/Caches"}.get(sys.platform, "")
    return Path(os.environ.get("XDG_CACHE_HOME") or system or "~/.cache").expanduser() / "specdemo"


def check_output(path: str | Path | None, force: bool = False) -> None:
    """Raise ValueError unless `path` can be written and is new, empty or written by specdemo. None: nothing is written.

    force: overwrite any file.
    """
    if path is None:
        return
    path = Path(path)
    check_writable(path)
    if force or not path.is_file() or not path.stat().st_size:
        return
    if not _is_page(path) and not any(kind <= _keys(path) for kind in (TRACE, RESULT, PROFILE)):
        raise ValueError(f"{path} exists and was not written by specdemo; name another file or add --force")


def check_output_folder(folder: Path, force: bool = False) -> None:
    """Raise ValueError unless `folder` can be made and is new, empty or was made by `train` or `bench`.

    force: accept any that can be made.
    """
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        with TemporaryDirectory(dir=nearest):
            pass
    except OSError as error:
        raise ValueError(f"cannot make the folder {folder}: {error.strerror}; name another with --out") from None
    if force or not folder.is_dir() or not any(folder.iterdir()) or (folder / MARKER).is_file():
        return
    keys = [_keys(folder / name) for name in ("provenance.json", "results.json")]
    if not any(kind <= names for names in keys for kind in (PROVENANCE, SECTIONS, SECTION, RESULT)):
        raise ValueError(f"{folder} is not empty and was not made by specdemo; name another with --out or add --force")


def make_folder(folder: Path) -> None:
    """Make the folder of a training run. An empty one is marked, so that a killed run may continue in it."""
    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.iterdir()):
        write_text(folder / MARKER, "")


def _is_page(path: Path) -> bool:
    with path.open("rb") as file:
        return PAGE in file.read(HEAD)


def _keys(path: Path) -> set[str]:
    """Return the keys of a JSON object; none for a missing or any other file, or for one larger than a trace."""
    try:
        return set(read_json(path, FILE_BYTES))
    except ValueError:
        return set()
