"""Results of all suites as table, Markdown, JSON and page: the recorded ones, and short runs of the other suites."""

import json
from dataclasses import replace

import pytest
import torch

import benchmarks
from benchmarks import fairness, floor, peers
from benchmarks.gpu import run
from benchmarks.pairs import Size, random_pair
from specdemo.__main__ import main
from specdemo.bench import sweeps
from specdemo.bench.plot import write_page
from specdemo.bench.report import bench_report, markdown
from specdemo.bench.result import recorded_suite, to_json, write_result
from specdemo.bench.suites import suite, suites
from specdemo.engine.loop import never_cancelled

RECORDED = ("k", "methods", "batch", "prompt", "temperature", "losslessness")
SHORT = {"repeats": 1, "new_tokens": 4}
TINY = Size(layers=2, hidden=32, feed_forward=48, heads=2, kv_heads=1, vocabulary=97, draft_layers=1)


def silent(share, what, so_far=None):
    assert 0.0 <= share <= 1.0


def short(name, **options):
    return suite(name, **{"repeats": 1, **options}).run(silent, never_cancelled)


def pair():
    return random_pair("tiny", TINY, torch.device("cpu"), torch.float32, texts=1)


def fairness_result(patch, folder):
    patch.setattr(fairness, "NEW_TOKENS", 4)
    patch.setattr(fairness, "STALL_MS", 1.0)
    patch.setattr(fairness, "PROMPTS", fairness.PROMPTS[:1])
    return short("race-fairness")


MAKERS = {
    "peers": lambda *_: peers.compete(pair(), 1, 6, silent, never_cancelled),
    "floor": lambda *_: floor.floor(pair(), 1, 6, silent, never_cancelled),
    "race-fairness": fairness_result,
    "gpu": lambda _, folder: run.measure(folder / "gpu", "cpu", 0.0, 1, silent, never_cancelled),
}


def no_constant(name):
    raise AssertionError(f"{name} is no JSON")


def test_every_suite_is_rendered():
    assert {*RECORDED, *MAKERS, "thinking", "load", "models"} == {*suites()}  # the last three have tests of their own
    assert {suite.name for suite in benchmarks.SUITES} <= {*MAKERS, "models"}


@pytest.mark.parametrize("name", [*RECORDED, *MAKERS])
def test_a_result_is_rendered_in_every_form(name, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sweeps, "PROBES", 1)
    result = MAKERS[name](monkeypatch, tmp_path) if name in MAKERS else recorded_suite(name)
    assert result.suite == name and result.rows
    report = bench_report(result).split("\n")
    assert all(report[2 : len(result.rows) + 3]) and not report[len(result.rows) + 3]  # one line per row
    table = [line for line in markdown(result).splitlines() if line.startswith("|")]
    assert len(table) >= 3 and len({line.replace("\\|", "").count("|") for line in table}) == 1
    assert json.loads(to_json(result), parse_constant=no_constant)["suite"] == name
    assert bench_report(replace(result, rows=[], remarks=["too short"])).endswith("\n\ntoo short")
    # a kind of work is named by a file of prompts
    assert "\x1b" not in bench_report(replace(result, remarks=["For \x1b[31mmine decode plainly."]))
    write_result(result, tmp_path / "result.json")
    assert main(["replay", str(tmp_path / "result.json")]) == 0 and capsys.readouterr().out == "\n".join([*report, ""])
    write_page(result, tmp_path / "page.html")
    assert f"<h1>specdemo bench {name}</h1>" in (tmp_path / "page.html").read_text(encoding="utf-8")
