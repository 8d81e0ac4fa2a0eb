"""Which method fits a model: `tune` with a live table, and a heat map whose cells open races. Its job, file and
view are those of a sweep (sweep.py)."""

import gradio as gr

from specdemo.bench.suites import Sweep
from specdemo.bench.tune import Tune
from specdemo.models.ref import ModelRef
from specdemo.presets import limits
from specdemo.presets.files import load_presets
from specdemo.presets.pair import work_prompts
from specdemo.ui import assets, space
from specdemo.ui.controls import Controls, look
from specdemo.ui.job import QUIET, Parts, Store, Values, named
from specdemo.ui.model_menus import page_preset, targets
from specdemo.ui.sweep import Sweeping, Sweeps, admit, draw_result


def begin(values: Values, last: Sweeping | None) -> Sweeping:
    """Return the measurement that the controls describe. Raises ValueError with one line."""
    target = ModelRef(values["target"])
    base = next((one for one in load_presets().values() if one.target == target), None)
    if base is None:
        raise ValueError(f"model {target[:80]!r} is not on this page's list; start the page with --target and its name")
    work = ",".join(values["work"] or ())
    tune = Tune.build({"target": target, "dtype": base.dtype, "work": work, "minutes": values["minutes"]})
    admit(Sweep().changed(preset=base.id, repeats=1, new_tokens=tune.new_tokens))
    if tune.minutes > _most_minutes():
        raise ValueError(f"this page measures for {_most_minutes():.0f} minutes at most, not {tune.minutes:.0f}")
    tune.kinds()
    sweeping = Sweeping.measuring(f"{tune.name}, {target.label}", tune.run, last)
    sweeping.models = [target]
    return sweeping


def _most_minutes() -> float:
    return 0.5 * space.turn_s() / 60.0  # the other half of the time limit is for loading


def draw(form: Controls, store: Store) -> None:
    """Create the tab, inside the current Blocks. Its model follows that of the race."""
    gr.Markdown(assets.text("tune.md"), elem_id="tune-about")
    at_hand = limits.at_hand() if limits.public() else load_presets().values()
    models = [name for name in targets() if any(one.target == name for one in at_hand)]
    choices, most = [(name.label, name) for name in models], _most_minutes()
    work = look("Kinds of work; all if empty", "tune-work", 4, 260)
    with gr.Row(elem_id="tune-controls") as row:
        inputs: Parts = {
            "target": gr.Dropdown(choices, value=page_preset().target, **look("Model", "tune-target", 4, 260)),
            "work": gr.Dropdown([*work_prompts()], multiselect=True, **work),
            "minutes": gr.Slider(0.5, most, min(2.0, most), step=0.5, **look("Minutes", "tune-minutes", 3, 170)),
        }
    raced, shown = {"target": form.parts["target"]}, {"target": inputs["target"]}
    named(raced["target"].change, lambda _, values: values if values["target"] in models else {}, raced, shown, **QUIET)
    draw_result(Sweeps("tune", store), row, "Run", begin, inputs)
