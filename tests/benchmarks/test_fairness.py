"""The clocks of a race: a slow lane must not slow down the clock of another lane."""

import pytest

from benchmarks import RaceFairness, fairness
from benchmarks.fairness import Stalled
from specdemo.core.protocol import Budget
from specdemo.engine.loop import never_cancelled


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(fairness, "NEW_TOKENS", 8)
    monkeypatch.setattr(fairness, "STALL_MS", 100.0)
    monkeypatch.setattr(fairness, "PROMPTS", fairness.PROMPTS[:1])


def test_race_fairness_reports_both_clocks():
    result = RaceFairness(repeats=1).run(lambda share, what: None, never_cancelled)
    usual, stalled = result.rows
    assert stalled["the rival's ms/token"].value > usual["the rival's ms/token"].value
    assert result.remarks[0].startswith("The plain lane's own clock changed by ")


def test_a_stalled_drafter_waits_and_then_drafts():
    class EchoDrafter:
        taps, note = (-1,), ""

        def propose(self, budget):
            return budget

    times = iter([0.0, 0.3, 0.9, 1.1, 5.0])
    stalled = Stalled(EchoDrafter(), 1000.0, lambda: next(times))
    assert stalled.taps == (-1,)
    assert stalled.propose(Budget(2, 2)) == Budget(2, 2)
    assert next(times) == 5.0  # it polled until one second had passed
