"""The card "Why is mine slow?" of the What if tab: the output of an engine, pasted or dropped, and its diagnosis.
Needs no torch.
"""

from pathlib import Path

import gradio as gr

from specdemo.analysis.diagnose import Diagnosis, diagnose
from specdemo.analysis.observation import Observation
from specdemo.analysis.readers import READERS, read_output, read_output_file
from specdemo.bench.why_report import changes, numbers
from specdemo.core.atomic_io import json_text
from specdemo.core.safe_io import PUBLIC_FILE_BYTES
from specdemo.ui import assets
from specdemo.ui.job import QUIET, Values, named

LONGEST = PUBLIC_FILE_BYTES  # characters of a pasted output


def diagnosis_view(found: Diagnosis) -> dict[str, object]:
    """Return the data of the view."""
    tone = "bad" if found.cause else "gain" if found.healthy and not found.implausible else ""
    return {
        "sentence": found.sentence,
        "tone": tone,
        "numbers": [[*row] for row in numbers(found)],
        "causes": [[cause.title, f"{cause.gain:.2f}×", cause.evidence] for cause in found.causes],
        "changes": changes(found),
        "notes": list(found.notes),
        "missing": list(found.missing),
    }


def answer(_: gr.Request, values: Values) -> Values:
    """Return the diagnosis of the visitor's output. A visitor's mistake is shown as one line."""
    try:
        observation = _observation(values)
        given = {"k": _whole(values["k"]), "plain_tokens_per_s": values["plain"] or None}
        return {"view": json_text(diagnosis_view(diagnose(observation.changed(**given))))}
    except ValueError as error:
        return {"view": json_text({"error": str(error)})}


def _observation(values: Values) -> Observation:
    """Read the pasted text, else the file. Raises ValueError with one line."""
    text, file = str(values["output"] or ""), values["file"]
    if text.strip():
        return read_output(text, PUBLIC_FILE_BYTES)
    if not file:
        raise ValueError("no output given; paste one, or drop a file")
    try:
        return read_output_file(str(file), PUBLIC_FILE_BYTES)
    except ValueError as error:
        raise ValueError(str(error).replace(str(file), Path(str(file)).name)) from None


def _whole(value: object) -> int | None:
    """Return a draft length; None if the field is empty. Raises ValueError for a fraction."""
    if not isinstance(value, int | float) or not value:
        return None
    if value != int(value) or not 1 <= value <= 1024:
        raise ValueError(f"k must be a whole number from 1 to 1024, not {value:g}")
    return int(value)


def draw() -> None:
    """Create the card, inside the current Blocks."""
    kinds = ", ".join(dict.fromkeys(reader.title.partition(",")[0] for reader in READERS))
    with gr.Accordion("Why is mine slow? Paste the output of your engine", open=False, elem_id="why-card"):
        gr.Markdown(f"Reads: {kinds}.", elem_id="why-about")
        with gr.Row():
            output = gr.Textbox(
                label="Output", lines=6, max_lines=12, max_length=LONGEST, elem_id="why-output", scale=3, min_width=260,
                placeholder="SpecDecoding metrics: Mean acceptance length: 2.16, ...",
            )  # fmt: skip
            file = gr.File(
                label="or drop a file", type="filepath", height=150, elem_id="why-file", scale=1, min_width=200
            )
        with gr.Row():
            plain = gr.Number(label="Tokens/s without speculation", minimum=0, elem_id="why-plain", value=None)
            length = gr.Number(label="Draft length k, if the output lacks it", minimum=0, elem_id="why-k", value=None)
            run = gr.Button("Diagnose", variant="primary", elem_id="why-run")
        view = assets.view("why.html", "helpers.js", "why.js", elem_id="why", later=True)
        given = {"output": output, "file": file, "plain": plain, "k": length}
        named(run.click, answer, given, {"view": view}, **QUIET)
