"""The tab Tune, which method fits: `tune` with a live table, and a heat map whose cells open races. Its job, file and
view are those of a sweep (sweep.py)."""

import gradio as gr

from specdemo.bench.base import Report, SoFar, Stop
from specdemo.bench.candidates import shareable
from specdemo.bench.result import Result
from specdemo.bench.suites import Sweep
from specdemo.bench.tune import Tune
from specdemo.presets import limits
from specdemo.presets.files import load_presets
from specdemo.presets.link import shown_name
from specdemo.presets.pair import work_prompts
from specdemo.ui import assets, space
from specdemo.ui.controls import Controls
from specdemo.ui.job import QUIET, Store, Values, named
from specdemo.ui.model_menus import live, page_preset, targets
from specdemo.ui.sweep import Sweeping, Sweeps, admit, draw_result

LONGEST = 0.5  # share of the time limit of a job; the rest is for loading


def begin(values: Values, last: Sweeping | None) -> Sweeping:
    """Return the measurement that the controls describe. Raises ValueError with one line."""
    live()  # imports torch under its lock
    target = str(values["target"])
    base = next((one for one in load_presets().values() if one.target == target), None)
    if base is None:
        raise ValueError(
            f"model {target[:80]!r} is not on this page's list; start the page with --target and this model"
        )
    work = ",".join(values["work"] or ())
    tune = Tune.build({"target": target, "dtype": base.dtype, "work": work, "minutes": values["minutes"]})
    admit(Sweep().changed(preset=base.id, repeats=1, new_tokens=tune.new_tokens))
    if tune.minutes > _most_minutes():
        raise ValueError(f"this page measures for {_most_minutes():.0f} minutes at most, not {tune.minutes:.0f}")
    tune.kinds()

    def measure(report: Report, cancelled: Stop) -> Result:
        def shown(share: float, what: str, so_far: SoFar | None = None, /) -> None:
            report(share, what, so_far and (lambda: shareable(so_far(), [target])))

        return shareable(tune.run(shown, cancelled), [target])

    return Sweeping.measuring(f"{tune.name}, {shown_name(target)}", measure, last)


def _most_minutes() -> float:
    return LONGEST * space.turn_s() / 60.0


def draw(form: Controls, store: Store) -> None:
    """Create the tab, inside the current Blocks. Its model follows that of the race."""
    gr.Markdown(assets.text("tune.md"), elem_id="tune-about")
    at_hand = limits.at_hand() if limits.public() else load_presets().values()
    models = [name for name in targets() if any(one.target == name for one in at_hand)]
    choices, most = [(shown_name(name), name) for name in models], _most_minutes()
    wide: Values = {"scale": 4, "min_width": 260}
    with gr.Row(elem_id="tune-controls"):
        inputs: dict[str, object] = {
            "target": gr.Dropdown(choices, value=page_preset().target, label="Model", elem_id="tune-target", **wide),
            "work": gr.Dropdown(
                [*work_prompts()], multiselect=True, label="Kinds of work; all if empty", elem_id="tune-work", **wide
            ),
            "minutes": gr.Slider(
                0.5, most, min(2.0, most), step=0.5, label="Minutes", elem_id="tune-minutes", scale=3, min_width=170
            ),
        }
        with gr.Column(scale=2, min_width=180):
            run = gr.Button("Run", variant="primary", size="lg", elem_id="tune-run")
            stop = gr.Button("Stop", interactive=False, elem_id="tune-stop")
    raced, shown = {"target": form.parts["target"]}, {"target": inputs["target"]}
    named(raced["target"].change, lambda _, values: values if values["target"] in models else {}, raced, shown, **QUIET)
    draw_result(Sweeps("tune", store), "tune", begin, inputs, run, stop)
