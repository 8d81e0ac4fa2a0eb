"""A preset from end to end, and its trace on disk."""

from pathlib import Path

from specdemo.core.bounds import FILE
from specdemo.core.files import check_writable, write_text
from specdemo.core.reading import read
from specdemo.core.trace import RunTrace, from_json, to_json
from specdemo.engine.session import session
from specdemo.presets.files import preset


def run(preset_id: str, prompt: str | None = None, out: str | Path | None = None, **overrides: object) -> RunTrace:
    """Run the comparison and return its trace, also written to `out` when given.

    overrides: any setting of `Preset.with_changes` (k, method, max_new_tokens, temperature, seed, ...).
    Raises ValueError with one line that names the cure.
    """
    changes = overrides if prompt is None else {**overrides, "prompt": prompt}
    spec = preset(preset_id).with_changes(**changes).checked()
    if out is not None:
        check_writable(out)
    trace = session().run(spec)
    if out is not None:
        save_trace(trace, out)
    return trace


def save_trace(trace: RunTrace, out: str | Path) -> None:
    """Raises ValueError, one line, when it cannot be written."""
    write_text(out, to_json(trace) + "\n")


def load_trace(path: str | Path) -> RunTrace:
    """Read and check a stored trace. Raises ValueError with one line."""
    try:
        content = read(path, FILE)
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(
            f"cannot read {path}: {reason}; record a trace with specdemo run PRESET --out {path}"
        ) from None
    try:
        return from_json(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; record it again with specdemo run PRESET --out {path}") from None
