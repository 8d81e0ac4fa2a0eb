"""The changes in docs/extend.md: each touches as many files as the table says, and works.

All diffs are applied to one copy of the repository, and the checks run there in one process.
"""

import json
import os
import re
import subprocess
from itertools import chain
from pathlib import Path
from shutil import copytree, ignore_patterns
from unittest.mock import patch

import pytest

from tests.processes import run

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
FILES = {name: int(count) for name, count in re.findall(r"^\| ([A-Z][^|]*) \| (\d+)", GUIDE, re.MULTILINE)}
SECTIONS = dict(re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", GUIDE, re.MULTILINE | re.DOTALL))
FOUND = {name: re.findall(r"```diff\n(.*?)```", text, re.DOTALL) for name, text in SECTIONS.items()}
DIFFS = {name: diffs for name, diffs in FOUND.items() if diffs}
LEFT_OUT = ignore_patterns("__pycache__", "embedded", "node_modules", "*.png", "*.gif")


def check_head():
    from specdemo.methods import METHODS
    from specdemo.methods.recipes import recipes
    from specdemo.testing import check_method

    assert METHODS["hydra"] == "specdemo.methods.heads.hydra:Hydra" and recipes()["hydra"] == "Hydra, 4 heads"
    check_method("hydra")


def check_engine():
    from specdemo.presets.files import preset
    from specdemo.presets.serve import serve_commands

    for command in ["run"], ["serve"], ["serve-command"]:
        assert "sglang,llama-server,mlx-lm,mlx-vlmorecho" in "".join(printed(*command, "--help").split())
    assert any("echo-server --serve stories" in line for line in serve_commands(preset("embedded-ngram"), "echo"))


def check_setting():
    import gradio as gr

    from specdemo.presets.files import load_presets, preset
    from specdemo.presets.link import from_query, to_query
    from specdemo.ui import controls, setup

    help = printed("run", "--help")
    assert "--top-a <float> 0 is off." in help and "--patience <int> Steps to wait." in help
    base = preset("embedded-ngram")
    assert (base.top_a, base.lanes[0].patience) == (0.0, 2)
    other = base.with_changes(top_a=0.25, patience=7)
    query = to_query(other, base)
    assert query == "preset=embedded-ngram&top_a=0.25&patience=7" and from_query(query, load_presets()) == (other, [])
    ignored = from_query("top_a=9", load_presets())[1]
    assert ignored == ["ignored top_a='9' from the link: top_a must be below 1.0, not 9.0"]
    assert refused(lambda: base.build(base.model_dump() | {"top_a": "hot"})) == "top_a must be a number, not 'hot'"
    assert refused(lambda: base.with_changes(top_a=1.0)) == "top_a must be below 1.0, not 1.0"
    assert refused(lambda: base.with_changes(patience=9)) == "patience must be 8 or less, not 9"
    assert setup.changed("embedded-ngram", {"top_a": 0.25, "patience": 7}, False) == other
    assert setup.from_values(setup.to_values(other)) == other
    assert setup.chips(setup.to_values(other))[-1][1] == "greedy · top-a 0.25 · 96 tokens"
    with gr.Blocks():
        drawn = controls.draw(other, False).parts
    sliders = {name: drawn[name] for name in ("top_a", "patience-1", "patience-2")}
    assert {
        name: [type(c).__name__, c.label, c.minimum, c.maximum, c.step, c.value] for name, c in sliders.items()
    } == {
        "top_a": ["Slider", "Top-a", 0, 0.99, 0.01, 0.25],
        "patience-1": ["Slider", "Patience", 1, 8, 1, 7],
        "patience-2": ["Slider", "Patience", 1, 8, 1, 2],
    }


def check_metric():
    from specdemo.core.definitions import by_key, table
    from specdemo.core.tally import summarise
    from specdemo.ui import assets
    from tests.traces import hostile_trace
    from tests.ui.stand_ins import remote_trace

    summary = summarise(hostile_trace().lanes[1])
    assert summary["rejected"] == summary["drafted"] - summary["accepted"]
    assert summarise(remote_trace().lanes[1])["rejected"] is None
    assert by_key()["rejected"] == "draft tokens that were not accepted"
    assert table() in Path("docs/measurements.md").read_text(encoding="utf-8") and table() in assets.reference()
    assert 'data-tile="rejected" data-key="rejected" data-format="count"><h2>Rejected</h2>' in assets.tiles()


def check_suite():
    from specdemo.bench.suites import Sweep, suites, swept
    from specdemo.presets.link import changed_by_query

    assert list(suites())[-1] == "openings" and swept()["openings"].title == "Prompt by prompt"
    assert "--repeats" in printed("bench", "openings", "--help")
    sweep, ignored = changed_by_query(Sweep(), "sweep=openings&preset=embedded-ngram&repeats=1&new_tokens=8")
    suite = sweep.suite().model_copy(update={"prompts": ["Once upon a time", "The dog saw a cat"]})
    result = suite.run(lambda *progress: None, lambda: False)
    assert not ignored and [row["prompt"] for row in result.rows] == [1, 1, 2, 2]


def check_rule():
    import torch

    from specdemo.core.protocol import Budget, GenerationConfig
    from specdemo.core.rules import RULES, accept_rule
    from specdemo.engine.comparison import Lane
    from specdemo.engine.loop import generate
    from specdemo.methods import load_drafter
    from specdemo.models.toy import ToyTarget
    from specdemo.presets.files import load_presets, preset
    from specdemo.presets.link import from_query, to_query

    assert set(RULES) == {"coupled", "lossless", "block", "nothing", "typical", "fly", "speculative_cascade"}
    assert "nothing (rejects everything)" in printed("run", "--help")
    changed = preset("embedded-ngram").with_changes(acceptance="nothing")
    assert changed.lanes[0] == Lane.build(changed.lanes[0].model_dump())
    assert from_query(to_query(changed, preset("embedded-ngram")), load_presets()) == (changed, [])
    target, prompt = ToyTarget(16, seed=1), torch.tensor([[3, 1, 4, 1, 5]])

    def steps(name, **rule):
        run = generate(target, load_drafter(name, target), prompt, GenerationConfig(20, budget=Budget(4, 4)), **rule)
        return [event.emitted[0] for event in run]

    rejected = steps("ngram", accept=accept_rule("nothing"))
    assert [*chain(*rejected)] == [*chain(*steps("none"))] and set(map(len, rejected)) == {1}


def check_cache():
    import torch

    from specdemo.core.protocol import Budget, GenerationConfig
    from specdemo.methods import BASELINE
    from specdemo.models.half import HalfStore
    from specdemo.models.target import HFTarget
    from specdemo.testing import make_drafter, output_tokens
    from tests.models.tiny import build, texts

    target, prompts = HFTarget(build("llama")), texts(2, 13)
    target.start(prompts)
    half, size = target.forward(texts(2, 4, seed=1), torch.tensor([[0, 0, 1], [0, 1, 2]])).logits, target.history_bytes
    with patch("specdemo.models.target.HalfStore", HalfStore.__base__):
        other = HFTarget(target.model)
    other.start(prompts)
    full = other.forward(texts(2, 4, seed=1), torch.tensor([[0, 0, 1], [0, 1, 2]])).logits
    assert other.history_bytes == 2 * size and 0 < (half - full).norm() < 0.02 * full.norm()
    target = HFTarget(build("llama"))
    plain = output_tokens(target, make_drafter(BASELINE, target), GenerationConfig(12), prompts)
    drafting = GenerationConfig(12, budget=Budget(6, 4))
    assert output_tokens(target, make_drafter("ngram", target), drafting, prompts) == plain


CHECKS = {
    "A head": check_head,
    "A serving engine": check_engine,
    "A setting": check_setting,
    "A metric in the page": check_metric,
    "A suite": check_suite,
    "An acceptance rule": check_rule,
    "Another KV cache": check_cache,
}


def printed(*command):
    """Return the output of a command, with single spaces."""
    from typer.testing import CliRunner

    from specdemo.__main__ import app

    return " ".join(CliRunner().invoke(app, command).output.split())


def refused(change):
    with pytest.raises(ValueError) as error:
        change()
    return str(error.value)


def failures():
    """Return the traceback of each failed check by the name of its change."""
    import traceback

    found = {}
    for name, check in CHECKS.items():
        try:
            check()
        except Exception:
            found[name] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    changed = tmp_path_factory.mktemp("changes")
    for folder in ("specdemo", "presets", "docs", "examples", "tests"):
        copytree(ROOT / folder, changed / folder, ignore=LEFT_OUT)
    for diff in chain.from_iterable(DIFFS.values()):
        applied = subprocess.run(["git", "apply", "-"], input=diff.encode(), cwd=changed, capture_output=True)
        assert not applied.returncode, f"{applied.stderr.decode()}\n{diff}"
    code = "import json; from tests.test_changes import failures; print(json.dumps(failures()))"
    settings = os.environ | {"SPECDEMO_MODELS": str(ROOT / "specdemo" / "models" / "embedded")}
    done = run("-c", code, cwd=changed, env=settings)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_table_lists_the_changes_with_a_diff():
    assert set(FILES) == set(DIFFS) == set(CHECKS)


@pytest.mark.parametrize("change", FILES)
def test_change_touches_the_files_of_the_table(change):
    assert len(set(re.findall(r"^diff --git a/\S+ b/(\S+)$", "".join(DIFFS[change]), re.MULTILINE))) == FILES[change]


@pytest.mark.parametrize("change", FILES)
def test_change_works(failed, change):
    assert change not in failed, failed[change]
