"""Predictions against measurements: counts from a run."""

import pytest

from benchmarks.what_if import Ran, row_of, verdict
from specdemo.core.trace import StepEvent
from specdemo.prediction.acceptance import from_mean
from specdemo.prediction.predict import predict


def event(index, drafted, accepted, emitted, ms):
    rows = range(len(emitted))
    probs = [[None] * len(d) for d in drafted]
    return StepEvent(
        index=index,
        drafted=drafted,
        parents=[list(range(len(d))) for d in drafted],
        path=[list(range(accepted[row] + 1)) for row in rows],
        emitted=emitted,
        draft_probs=probs,
        target_probs=probs,
        ms={"verify": ms},
    )


def test_a_batch_is_timed_while_all_its_rows_go_on():
    prefill = event(0, [[], []], [0, 0], [[1], [1]], 5.0)
    steps = [
        event(1, [[2, 3], [4, 5]], [2, 0], [[2, 3, 7], [9]], 2.0),
        event(2, [[2], [4]], [0, 1], [[8], [4, 6]], 1.0),
    ]
    later = [event(3, [[2], [4]], [0, 0], [[8], [4]], 1.0), event(4, [[2], []], [0, 0], [[8], []], 1.0)]
    ran = Ran()
    ran.add([prefill, *steps, *later])
    assert (ran.tokens, ran.ms) == (7, 3.0)  # the last step may be cut, so it is left out
    assert ran.passes == ((2, 2), (0, 1), (0, 2), (1, 1))


def test_a_verdict_counts_what_is_inside():
    target, acceptance = "lmsys/vicuna-7b-v1.3", from_mean(4.36, 6)
    guess = predict(target, device="rtx-3090", method="eagle", acceptance=acceptance, ks=(6,)).rows[0]
    rows = [row_of("a", "eagle", 6, 1, guess.speedup.value, guess), row_of("b", "eagle", 6, 1, 9.0, guess)]
    assert [row["inside"] for row in rows] == [True, False]
    assert rows[0]["error"] == pytest.approx(0.0, abs=1e-3)
    assert "2 cases" in verdict(rows)[0] and "50% inside" in verdict(rows)[0]
