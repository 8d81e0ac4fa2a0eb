"""The table of real models: what is timed, ratios to the peer of a lane, and calls that continue.
The clocks of a race: a slow lane must not slow down the clock of another lane."""

from dataclasses import replace

import pytest
import torch

from benchmarks import BusyCore, RaceFairness, busy, fairness, models
from benchmarks.fairness import Stalled
from benchmarks.models import (
    GENERATE,
    LLAMA,
    LLAMA_NGRAM,
    NGRAM,
    PLAIN,
    PROMPT_LOOKUP,
    SKIP,
    SUFFIX,
)
from specdemo.bench.result import read_result, write_result
from specdemo.bench.suites import suite
from specdemo.core.protocol import Budget
from specdemo.core.tree import Draft
from specdemo.engine.loop import never_cancelled
from specdemo.presets.pair import work_prompts


def silent(share, what, so_far=None):
    assert 0.0 <= share < 1.0


def test_times_start_with_the_first_token_and_short_answers_do_not_count(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(models.time, "perf_counter", lambda: now[0])

    def peer(seconds):
        def parts(prompt, new_tokens):
            now[0] += 100.0  # reads the prompt
            left = min(new_tokens, int(prompt))
            yield [7]
            for _ in range(left - 1):
                now[0] += seconds
                yield [7]

        return models.loop(parts)

    peers = {
        PLAIN: peer(2.0),
        NGRAM: peer(1.0),
        GENERATE: peer(4.0),
        PROMPT_LOOKUP: peer(3.0),
        SKIP: peer(9.0),
        SUFFIX: peer(2.0),
    }
    found = models.contests({}, peers, {SKIP}, [torch.tensor(n) for n in (20, 30, 5, 40)], 24)
    assert [len(timed[PLAIN].written[0]) for timed in found] == [20, 24, 24]
    assert {*found[0]} == {*peers} - {SKIP}
    assert found[0][GENERATE].tokens_per_s == 1 / 4 and found[1][NGRAM].tokens_per_s == 1.0
    rows = {row["lane"]: row for row in models.rows({"category": "edit"}, found)}
    assert rows[PLAIN]["over its peer"].value == 2.0 and rows[NGRAM]["over its peer"].value == 3.0
    assert rows[NGRAM]["speed-up"].value == 2.0
    assert rows[GENERATE]["over its peer"] is rows[SUFFIX]["over its peer"] is None
    assert {row["prompts"] for row in rows.values()} == {3} and {row["output"] for row in rows.values()} == {
        "identical"
    }


def test_a_call_continues_with_the_missing_kinds_of_work(smollm2_gguf, tmp_path, monkeypatch):
    pytest.importorskip("llama_cpp")
    monkeypatch.setattr(models, "work_prompts", lambda: {key: ["Describe birds."] for key in work_prompts()})
    monkeypatch.setattr(models, "WARM_UP_TOKENS", 2)
    settings = {"folder": tmp_path, "prompts": 3, "new_tokens": 14, "models": "Q4_1", "work": "chat"}
    chosen = suite("models", **settings)
    result = chosen.run(silent, never_cancelled)
    lanes = {row["lane"]: row for row in result.rows}
    assert {PLAIN, NGRAM, LLAMA, LLAMA_NGRAM} < {*lanes}
    assert {lanes[name]["output"] for name in (NGRAM, LLAMA)} == {"identical"}
    assert read_result(tmp_path / "results.json") == result
    monkeypatch.setattr(models, "cast_of", pytest.fail)
    assert chosen.run(silent, never_cancelled).rows == result.rows  # nothing is missing
    left = suite("models", **settings | {"work": "", "minutes": 0.0}).run(silent, never_cancelled)
    assert left.remarks == ["5 of 5 kinds of work remain; run the same command again"]
    write_result(replace(result, environment=result.environment | {"commit": "0" * 40}), tmp_path / "results.json")
    with pytest.raises(ValueError, match="has results of another commit or of other settings"):
        chosen.run(silent, never_cancelled)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(fairness, "NEW_TOKENS", 8)
    monkeypatch.setattr(fairness, "STALL_MS", 100.0)
    monkeypatch.setattr(fairness, "PROMPTS", fairness.PROMPTS[:1])


def test_race_fairness_reports_both_clocks():
    result = RaceFairness(repeats=1).run(silent, never_cancelled)
    usual, stalled = result.rows
    assert stalled["the rival's ms/token"].value > usual["the rival's ms/token"].value
    assert result.remarks[0].startswith("The plain lane's own clock changed by ")


def test_busy_core_compares_one_thread_and_all_in_quiet_and_with_a_core_taken(monkeypatch):
    started = []

    class Loop:
        def __init__(self, command):
            started.append(command[-1])

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def kill(self):
            pass

    monkeypatch.setattr(busy.subprocess, "Popen", Loop)
    monkeypatch.setattr(busy, "usable_cores", lambda: 2)
    result = BusyCore(repeats=1, target="stories", new_tokens=4).run(silent, never_cancelled)
    assert [(row["lane"], row["machine"]) for row in result.rows] == [
        (lane, machine) for lane in ("plain", "prompt lookup, k=4") for machine in ("quiet", "one core taken")
    ]
    for row in result.rows:
        one, both = row["one thread, tokens/s"].value, row["2 threads, tokens/s"].value
        assert row["2 threads / one"].value == pytest.approx(both / one, rel=1e-3)
    assert len(started) == 1
    monkeypatch.setattr(busy, "usable_cores", lambda: 1)
    with pytest.raises(ValueError, match="a core cannot be taken here; run this on Linux with two cores or more"):
        BusyCore(repeats=1).run(silent, never_cancelled)


def test_a_stalled_drafter_waits_and_then_drafts():
    class EchoDrafter:
        taps, note, name = (-1,), "", ""

        def propose(self, budget):
            return Draft.chain(torch.full((1, budget.depth), 7))

    times = iter([0.0, 0.3, 0.9, 1.1, 5.0])
    stalled = Stalled(EchoDrafter(), 1000.0, lambda: next(times))
    assert stalled.taps == (-1,)
    assert stalled.propose(Budget(2, 2)).tokens.tolist() == [[7, 7]]
    assert next(times) == 5.0  # it polled until one second had passed


def test_models_that_are_not_here_are_left_out_with_the_command_that_makes_them(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "cache", lambda: tmp_path)
    monkeypatch.setattr(models, "cast_of", pytest.fail)
    result = suite("models", folder=tmp_path, models="Qwen2.5").run(silent, never_cancelled)
    assert result.rows == [] and "SPECDEMO_LARGE_MODELS=1 python -m tests.real_models" in result.remarks[0]
