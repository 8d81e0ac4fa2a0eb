"""Stored runs: traces written by `specdemo run PRESET --out`. The page shows those in `presets/recorded/` before the
first run, and where no run is possible. Needs neither torch nor a model.
"""

from functools import lru_cache
from pathlib import Path

from specdemo.core.atomic_io import write_text
from specdemo.core.safe_io import FILE_BYTES, read_limited
from specdemo.core.suggest import program
from specdemo.core.trace import RunTrace, from_json, to_json
from specdemo.presets.files import FOLDER


def save_trace(trace: RunTrace, out: str | Path) -> None:
    """Write a trace. Raises ValueError, one line, if that fails."""
    write_text(out, to_json(trace) + "\n")


def load_trace(path: str | Path) -> RunTrace:
    """Read and check a stored trace. Raises ValueError with one line."""
    advice = f"with {program()} run PRESET --out FILE"
    try:
        content = read_limited(path, FILE_BYTES)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}; record a trace {advice}") from None
    try:
        return from_json(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; record it again {advice}") from None


def is_recorded(preset_id: str) -> bool:
    """Return whether there is a recorded run of a preset."""
    return _recording(preset_id).is_file()


@lru_cache
def recorded(preset_id: str) -> RunTrace | None:
    """Return the recorded run of a preset; None if there is none. Raises ValueError for a damaged file."""
    return load_trace(_recording(preset_id)) if is_recorded(preset_id) else None


def _recording(preset_id: str) -> Path:
    return FOLDER / "recorded" / f"{preset_id}.json"
