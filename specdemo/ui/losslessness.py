"""The Lab's test of losslessness: the suite of that name with the visitor's sampling, shown as a sweep is."""

from typing import Any

import gradio as gr

from specdemo.bench.base import ROWS
from specdemo.bench.suites import suite
from specdemo.presets.schema import LIMITS, load_presets, preset
from specdemo.ui import assets, space
from specdemo.ui.controls import ACCEPTANCE, whole_number
from specdemo.ui.sweep import Sweeping, Sweeps, draw_result

DRAWS = 1024
START = "embedded-sampling"


def most_draws() -> int:
    return ROWS * space.limits().sweep_repeats


def begin(preset_id: str, acceptance: str, temperature: Any, top_p: Any, draws: Any) -> Sweeping:
    """The test the controls describe. Raises ValueError with one line."""
    base = space.fit(preset(preset_id))
    if not base.embedded:
        raise ValueError(f"losslessness is tested on the models that ship with the project, not on {base.target[:80]}")
    chosen = base.with_changes(acceptance=acceptance, temperature=temperature, top_p=top_p)
    space.admit(chosen)
    draws = whole_number("continuations", draws)
    if not ROWS <= draws <= most_draws():
        raise ValueError(f"continuations must be {ROWS} to {most_draws()} on this page, not {draws}")
    return Sweeping(f"Losslessness, {chosen.id}", suite("losslessness", preset=chosen, repeats=draws // ROWS).run)


def draw(page: gr.Blocks) -> None:
    """The block, inside the current Blocks."""
    gr.Markdown(assets.text("losslessness.md"), elem_id="losslessness-about")
    presets = [(p.title, p.id) for p in load_presets().values() if p.embedded]
    with gr.Row(elem_id="losslessness-controls"):
        inputs = [
            gr.Dropdown(
                presets, value=START, label="Preset: target and lane", elem_id="tested", scale=2, min_width=220
            ),
            gr.Dropdown(
                ACCEPTANCE, value="lossless", label="Acceptance", elem_id="tested-acceptance", scale=1, min_width=140
            ),
            gr.Slider(
                0, LIMITS.temperature, 0.8, step=0.05, label="Temperature", info="0: greedy", scale=2, min_width=185
            ),
            gr.Slider(0.01, 1, 1, step=0.01, label="Top-p", info="1: off", scale=2, min_width=185),
            gr.Slider(
                ROWS,
                most_draws(),
                min(DRAWS, most_draws()),
                step=ROWS,
                label="Continuations",
                info="of each kind",
                scale=2,
                min_width=185,
                elem_id="continuations",
            ),
        ]
        with gr.Column(scale=2, min_width=180):
            run = gr.Button("Test", variant="primary", size="lg", elem_id="losslessness-run")
            stop = gr.Button("Stop", interactive=False, elem_id="losslessness-stop")
    draw_result(page, Sweeps(begin), inputs, run, stop, "losslessness")
