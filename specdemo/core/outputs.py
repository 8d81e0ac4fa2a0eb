"""Output paths: checks before the work starts, so that no file of the user is overwritten, and the cache."""

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from specdemo.core.atomic_io import check_writable, write_text
from specdemo.core.safe_io import FILE_BYTES, read_json

TRACE, RESULT = {"preset", "schedule", "lanes"}, {"suite", "repeats", "rows"}
PROFILE = {"kind", "bandwidth_gb_per_s", "compute_tflop_per_s"}
PAGE = b"<title>specdemo bench "  # a plot of `bench --html`
PROVENANCE = {"versions", "commit", "step", "evaluations"}
SECTIONS, SECTION = {"environment", "sections"}, {"title", "state", "tries"}  # of `bench gpu`
MARKER = ".specdemo-training"  # in a folder of `train` until its provenance is written
HEAD = 1000  # bytes


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
