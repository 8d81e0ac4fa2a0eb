"""A new setting: one line in engine/comparison.py adds it to files, links, command line, API and page."""

import json
from pathlib import Path
from shutil import copytree, ignore_patterns

from tests.processes import run

ROOT = Path(__file__).parents[2]
FULL = '    warmth: Annotated[float, Setting("A throwaway.", label="Warmth", step=0.5)] = Field(1.0, ge=0.5, lt=3.0)\n'
OF_LANE = '    vigour: Annotated[int, Setting("One of a lane.", label="Vigour", step=1)] = Field(2, ge=1, le=8)\n'
LOOK = """
import json
import gradio as gr
from typer.testing import CliRunner
from specdemo.__main__ import app
from specdemo.presets.files import load_presets, preset
from specdemo.presets.link import from_query, to_query
from specdemo.ui import controls, setup

base = preset("embedded-ngram")
warm = base.with_changes(warmth=2.5, vigour=7)
query = to_query(warm, base)
def refused(change):
    try:
        change()
    except ValueError as error:
        return str(error)
with gr.Blocks():
    drawn = controls.draw(warm, False).parts
shown = {name: drawn[name] for name in ("warmth", "vigour-1", "vigour-2")}
print(json.dumps({
    "help": " ".join(CliRunner().invoke(app, ["run", "--help"]).output.split()),
    "default": [base.warmth, base.lanes[0].vigour],
    "query": query,
    "opened": from_query(query, load_presets()) == (warm, []),
    "note": from_query("warmth=9", load_presets())[1],
    "file": refused(lambda: base.build(base.model_dump() | {"warmth": "hot"})),
    "refused": [refused(lambda: base.with_changes(warmth=3.0)), refused(lambda: base.with_changes(vigour=9))],
    "overrides": setup.changed("embedded-ngram", {"warmth": 2.5, "vigour": 7}, False) == warm,
    "controls": {n: [type(c).__name__, c.label, c.minimum, c.maximum, c.step, c.value] for n, c in shown.items()},
    "summary": setup.summary(setup.to_values(warm), ["Prompt lookup"]),
    "from the page": setup.from_values(setup.to_values(warm)) == warm,
}))
"""


def test_a_setting_is_added_in_one_place(tmp_path):
    copytree(ROOT / "specdemo", tmp_path / "specdemo", ignore=ignore_patterns("__pycache__", "embedded"))
    copytree(ROOT / "presets", tmp_path / "presets", ignore=ignore_patterns("recorded"))
    declared = tmp_path / "specdemo" / "engine" / "comparison.py"
    text = declared.read_text(encoding="utf-8")
    for after, line in (("    top_p: ", FULL), ("    acceptance: ", OF_LANE)):
        assert text.count(after) == 1
        text = text.replace(after, line + after)
    declared.write_text(text, encoding="utf-8")
    done = run("-c", LOOK, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert "--warmth <float> A throwaway." in seen["help"] and "--vigour <int> One of a lane." in seen["help"]
    assert seen["default"] == [1.0, 2]
    assert seen["query"] == "preset=embedded-ngram&warmth=2.5&vigour=7" and seen["opened"]
    assert seen["note"] == ["ignored warmth='9' from the link: warmth must be below 3.0, not 9.0"]
    assert seen["file"] == "warmth must be a number, not 'hot'"
    assert seen["refused"] == ["warmth must be below 3.0, not 3.0", "vigour must be 8 or less, not 9"]
    assert seen["overrides"] and seen["from the page"]
    assert seen["summary"] == "stories + Prompt lookup · k 8 · greedy · warmth 2.5 · 96 tokens"
    assert seen["controls"] == {
        "warmth": ["Slider", "Warmth", 0.5, 2.5, 0.5, 2.5],
        "vigour-1": ["Slider", "Vigour", 1, 8, 1, 7],
        "vigour-2": ["Slider", "Vigour", 1, 8, 1, 2],
    }
