"""Run of a preset from start to end, with the trace on disk."""

from pathlib import Path

from specdemo.core.outputs import check_output
from specdemo.core.trace import RunTrace
from specdemo.engine.session import session
from specdemo.presets.pair import comparison
from specdemo.presets.recorded import save_trace


def run(
    preset_id: str | None = None,
    prompt: str | None = None,
    out: str | Path | None = None,
    force: bool = False,
    **overrides: object,
) -> RunTrace:
    """Run the comparison and return its trace; also write it to `out` if given.

    preset_id: None for a `target` in overrides: it is raced with n-gram lookup and suffix decoding, or with `model`.
    force: overwrite a file that specdemo did not write. overrides: any setting of `Preset.with_changes` (k, method,
    max_new_tokens, temperature, seed, ...). Raises ValueError, one line with the fix.
    """
    changes = overrides if prompt is None else {**overrides, "prompt": prompt}
    spec = comparison(preset_id, changes)
    if out is not None:
        check_output(out, force)
    trace = session().run(spec)
    if out is not None:
        save_trace(trace, out)
    return trace
