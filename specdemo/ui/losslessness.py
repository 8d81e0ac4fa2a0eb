"""The Lab's test of losslessness: the suite of that name with the visitor's sampling, shown as a sweep is."""

from typing import Any

import gradio as gr

from specdemo.presets.schema import DEFAULT, LIMITS, load_presets, preset
from specdemo.ui import assets, space
from specdemo.ui.controls import ACCEPTANCE, whole_number
from specdemo.ui.heavy import suite
from specdemo.ui.sweep import Sweeping, Sweeps, admit_repeats, draw_result

ROWS = 256  # continuations of a repeat, as in specdemo.bench.losslessness
DRAWS = 1024


def begin(preset_id: str, acceptance: str, temperature: float, top_p: float, draws: Any) -> Sweeping:
    """The test the controls describe. Raises ValueError with one line."""
    base = space.fit(preset(preset_id))
    if not base.embedded:
        raise ValueError(f"losslessness is tested on the models that ship with the project, not on {base.target[:80]}")
    chosen = base.with_changes(acceptance=acceptance, temperature=float(temperature), top_p=float(top_p))
    space.admit(chosen)
    repeats = whole_number("continuations", draws) // ROWS
    admit_repeats(repeats)
    bench = suite()
    name = f"Losslessness, {chosen.id}"
    return Sweeping(name, lambda report, cancelled: bench.losslessness(chosen, repeats, report, cancelled))


def draw(page: gr.Blocks) -> None:
    """The block, inside the current Blocks."""
    gr.Markdown(assets.text("losslessness.md"), elem_id="losslessness-about")
    presets = [(p.title, p.id) for p in load_presets().values() if p.embedded]
    with gr.Row(elem_id="losslessness-controls"):
        inputs = [
            gr.Dropdown(
                presets, value=DEFAULT, label="Preset: target and lane", elem_id="tested", scale=4, min_width=240
            ),
            gr.Dropdown(
                ACCEPTANCE, value="lossless", label="Acceptance", elem_id="tested-acceptance", scale=2, min_width=150
            ),
            gr.Slider(
                0, LIMITS.temperature, 0.8, step=0.05, label="Temperature", info="0: greedy", scale=2, min_width=150
            ),
            gr.Slider(0.01, 1, 1, step=0.01, label="Top-p", info="1: off", scale=2, min_width=150),
            gr.Slider(
                ROWS,
                ROWS * space.limits().sweep_repeats,
                min(DRAWS, ROWS * space.limits().sweep_repeats),
                step=ROWS,
                label="Continuations",
                info="of each kind",
                scale=2,
                min_width=150,
                elem_id="continuations",
            ),
        ]
        with gr.Column(scale=2, min_width=180):
            run = gr.Button("Test", variant="primary", size="lg", elem_id="losslessness-run")
            stop = gr.Button("Stop", interactive=False, elem_id="losslessness-stop")
    draw_result(page, Sweeps(begin), inputs, run, stop, "losslessness")
