"""Find what pays for a model: `tune` with its stages, a bar per drafter and the costs of passes. Its job, file and view
are those of a sweep (sweep.py)."""

from collections.abc import Sequence
from functools import partial

import gradio as gr

from specdemo.bench.suites import Sweep
from specdemo.bench.tune import YOURS, Tune
from specdemo.engine.comparison import Comparison
from specdemo.models.ref import ModelRef
from specdemo.presets import limits
from specdemo.presets.files import load_presets
from specdemo.presets.pair import work_prompts
from specdemo.ui import space
from specdemo.ui.controls import Controls, look
from specdemo.ui.job import QUIET, Parts, Store, Values, named
from specdemo.ui.model_menus import page_preset, targets
from specdemo.ui.setup import from_values
from specdemo.ui.sweep import Sweeping, Sweeps, admit, draw_result

MINUTES = 2.0


def begin(values: Values, last: Sweeping | None) -> Sweeping:
    """Return the measurement that the controls describe. Raises ValueError with one line."""
    target = ModelRef(values["target"])
    base = next((one for one in load_presets().values() if one.target == target), None)
    if base is None:
        raise ValueError(f"model {target[:80]!r} is not on this page's list; start the page with --target and its name")
    admit(Sweep().changed(preset=base.id, repeats=1, new_tokens=Tune.model_fields["new_tokens"].default))
    return _measuring(base.changed(prompt=values["prompt"]), values["work"] or [], (), values["minutes"], last)


def begin_of_race(values: Values, last: Sweeping | None, allow_any_model: bool) -> Sweeping:
    """Return the measurement of the model and the prompt of a race. Raises ValueError with one line."""
    race = from_values(values, allow_any_model)
    drafts = [lane.model for lane in race.lanes if lane.model and lane.model != race.target]
    return _measuring(race, [YOURS], drafts, values["minutes"], last)


def _measuring(
    race: Comparison, work: Sequence[str], drafts: Sequence[ModelRef], minutes: float, last: Sweeping | None
) -> Sweeping:
    own = {"prompt": race.prompt if YOURS in work else "", "work": ",".join(work)}
    if minutes > _most_minutes():
        raise ValueError(f"this page measures for {_most_minutes():.0f} minutes at most, not {minutes:.0f}")
    tune = Tune.build({"target": race.target, "dtype": race.dtype, "drafts": drafts, "minutes": minutes, **own})
    tune.kinds()
    sweeping = Sweeping.measuring(race.target.label, tune.run, last)
    sweeping.models = [race.target, *drafts]
    return sweeping


def _most_minutes() -> float:
    return 0.5 * space.turn_s() / 60.0  # the other half of the time limit is for loading


def draw(form: Controls, tab: gr.Tab, of_race: gr.Button, store: Store) -> None:
    """Create the search, inside the current Blocks. Its model follows that of the race. of_race: a button that starts
    it with the model and the prompt of the race."""
    at_hand = limits.at_hand() if limits.public() else load_presets().values()
    models = [name for name in targets() if any(one.target == name for one in at_hand)]
    choices, most = [(name.short_name, name) for name in models], _most_minutes()
    kinds = [("prompt of the race", YOURS), *((kind, kind) for kind in work_prompts())]
    work = look("Measure on; all kinds of work if empty", "tune-work", 4, 260)
    with gr.Row(elem_id="tune-controls") as row:
        inputs: Parts = {
            "target": gr.Dropdown(choices, value=page_preset().target, **look("Model", "tune-target", 4, 260)),
            "work": gr.Dropdown(kinds, value=[YOURS], multiselect=True, **work),
            "minutes": gr.Slider(0.5, most, min(MINUTES, most), step=0.5, **look("Minutes", "tune-minutes", 3, 170)),
        }
    start = partial(begin_of_race, allow_any_model=form.allow_any_model)
    raced, shown = {"target": form.parts["target"]}, {"target": inputs["target"]}
    named(raced["target"].change, lambda _, values: values if values["target"] in models else {}, raced, shown, **QUIET)
    sweeps, of_form = Sweeps("tune", store), {**form.inputs, "minutes": inputs["minutes"]}
    inputs["prompt"] = form.parts["prompt"]
    starts = [([of_race.click], start, of_form)]
    parts, _ = draw_result(sweeps, row, "Find what pays", begin, inputs, *starts, page="pays.html")
    named(tab.select, lambda request, _: sweeps.recorded(request, {"sweep": Tune.name}), {}, parts, **QUIET)
