"""The Lab's test of losslessness: the suite of that name with the visitor's sampling, shown as a sweep is."""

from typing import Any

import gradio as gr

from specdemo.bench.base import ROWS
from specdemo.bench.suites import suite
from specdemo.engine.comparison import Comparison, Lane
from specdemo.presets import limits
from specdemo.presets.files import load_presets, preset
from specdemo.ui import assets
from specdemo.ui.controls import draw_setting, whole_number
from specdemo.ui.job import QUIET, Store, Values, named
from specdemo.ui.lazy_imports import live
from specdemo.ui.sweep import Sweeping, Sweeps, draw_result

DRAWS = 1024
START = "embedded-sampling"


def most_draws() -> int:
    """The most draws this host allows."""
    return ROWS * limits.here().sweep_repeats


def begin(values: Values, last: Sweeping | None) -> Sweeping:
    """The test the controls describe. Raises ValueError with one line."""
    live()  # brings torch along, under its lock; a preset's methods are checked here
    base = limits.fit(preset(values["preset"]))
    if not base.embedded:
        raise ValueError(f"losslessness is tested on the models that ship with the project, not on {base.target[:80]}")
    chosen = limits.admit(base.with_changes(**{name: values[name] for name in ("acceptance", "temperature", "top_p")}))
    draws = whole_number("continuations", values["draws"])
    if not ROWS <= draws <= most_draws():
        raise ValueError(f"continuations must be {ROWS} to {most_draws()} on this page, not {draws}")
    title = f"Losslessness, {chosen.id}"
    return Sweeping.measuring(title, suite("losslessness", preset=chosen, repeats=draws // ROWS).run, last)


def draw(tab: gr.Tab, store: Store) -> None:
    """The block, inside the current Blocks."""
    assets.heading("lossless", assets.text("losslessness.md"), elem_id="losslessness-about")
    presets = [(p.title, p.id) for p in load_presets().values() if p.embedded]
    with gr.Row(elem_id="losslessness-controls"):
        heat: dict[str, Any] = {"scale": 2, "min_width": 230}
        inputs: dict[str, object] = {
            "preset": gr.Dropdown(
                presets, value=START, label="Preset: target and lane", elem_id="tested", scale=3, min_width=330
            ),
            "acceptance": draw_setting(
                Lane, "acceptance", "lossless", elem_id="tested-acceptance", scale=2, min_width=190
            ),
            "temperature": draw_setting(Comparison, "temperature", 0.8, **heat),
            "top_p": draw_setting(Comparison, "top_p", 1, **heat),
            "draws": gr.Slider(
                ROWS,
                most_draws(),
                min(DRAWS, most_draws()),
                step=ROWS,
                label="Continuations",
                info="of each kind",
                elem_id="continuations",
                **heat,
            ),
        }
        with gr.Column(scale=2, min_width=180):
            run = gr.Button("Test", variant="primary", size="lg", elem_id="losslessness-run")
            stop = gr.Button("Stop", interactive=False, elem_id="losslessness-stop")
    tests = Sweeps(begin, "losslessness", store)
    parts = draw_result(tests, inputs, run, stop, "losslessness")
    named(tab.select, lambda request, _: tests.recorded(request, {"sweep": "losslessness"}), {}, parts, **QUIET)
