"""Suites on the shipped models, short; numbers follow from the traces, the clock is a fake one where time matters."""

import json

import pytest

from specdemo.bench import suite
from specdemo.bench.report import bench_report, write_result
from specdemo.bench.suite import Spread, Stalled, compare_lanes, run_suite
from specdemo.core.protocol import Budget
from specdemo.engine.session import LaneSpec


def silent(share, what):
    assert 0.0 <= share <= 1.0
    assert what


@pytest.fixture(scope="module")
def result():
    lanes = (LaneSpec("draft_model", "stories-draft-wide", 3, name="wide"), LaneSpec("ngram", k=2, name="lookup"))
    return compare_lanes("short", "stories", lanes, ("Once upon a time",), 2, silent, new_tokens=12)


def test_a_row_per_lane_with_medians_and_quartiles(result):
    assert [row["lane"] for row in result.rows] == ["Baseline", "wide", "lookup"]
    for row in result.rows:
        spread = row["tokens/s"]
        assert 0 < spread.q1 <= spread.median <= spread.q3
    assert result.rows[0]["speed-up"] == Spread(1.0, 1.0, 1.0)
    assert result.rows[0]["tokens/pass"] == 1.0
    assert 0.0 < result.rows[1]["accepted"] <= 1.0
    assert [row["output"] for row in result.rows] == [None, "identical", "identical"]


def test_the_report_and_the_file_name_the_machine(result, tmp_path):
    text = bench_report(result)
    assert text.startswith(f"short | {result.environment['device']}, 1 thread(s), float32 | 2 repeats")
    assert len(text.splitlines()) == 2 + 4
    write_result(result, tmp_path / "r.json")
    stored = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert (stored["schema"], stored["suite"], stored["repeats"]) == (1, "short", 2)
    assert stored["environment"]["versions"]["torch"]
    assert set(stored["rows"][1]["tokens/s"]) == {"median", "q1", "q3"}


def test_the_sweep_has_a_lane_per_method_and_k(monkeypatch):
    asked = []
    monkeypatch.setattr(suite, "compare_lanes", lambda name, target, lanes, *rest: asked.extend(lanes))
    suite.embedded(1, (1, 2), silent)
    assert [(lane.method, lane.model, lane.k) for lane in asked] == [
        ("draft_model", "stories-draft-wide", 1),
        ("draft_model", "stories-draft-wide", 2),
        ("draft_model", "stories-draft-deep", 1),
        ("draft_model", "stories-draft-deep", 2),
        ("ngram", None, 1),
        ("ngram", None, 2),
    ]


def test_race_fairness_reports_both_clocks(monkeypatch):
    monkeypatch.setattr(suite, "NEW_TOKENS", 8)
    monkeypatch.setattr(suite, "STALL_MS", 200.0)
    monkeypatch.setattr(suite, "PROMPTS", suite.PROMPTS[:1])
    result = run_suite("race-fairness", 1, None, silent)
    usual, stalled = result.rows
    assert stalled["the rival's ms/token"].median > usual["the rival's ms/token"].median
    assert result.remarks[0].startswith("The plain lane's own clock changed by ")


def test_a_stalled_drafter_waits_and_then_drafts():
    class Counting:
        taps = (-1,)

        def propose(self, budget):
            return budget

    times = iter([0.0, 0.3, 0.9, 1.1, 5.0])
    stalled = Stalled(Counting(), 1000.0, lambda: next(times))
    assert stalled.taps == (-1,)
    assert stalled.propose(Budget(2, 2)) == Budget(2, 2)
    assert next(times) == 5.0  # it looked until a second had passed, and not longer


def test_spread_is_median_and_quartiles():
    assert Spread.of([4.0, 1.0, 2.0, 3.0, 5.0]) == Spread(3.0, 2.0, 4.0)
    assert Spread.of([2.0]) == Spread(2.0, 2.0, 2.0)
