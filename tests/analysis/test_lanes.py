"""Predictions and sentences about the lanes of a run."""

import random

import pytest

from specdemo.analysis.lanes import break_even, explain, prediction
from specdemo.core.estimate import Estimate
from specdemo.core.tally import summarise
from specdemo.core.trace import estimates
from tests.simulated_runs import chain, prefill, simulated, speed, trace


def test_no_events_give_no_prediction():
    empty = prediction(trace(("stopped", [prefill()])))
    assert empty == [
        {
            "lane": "stopped",
            "predicted_speedup": None,
            "best_k": None,
            "best_speedup": None,
            "sentence": "Too few tokens for an explanation.",
        }
    ]


@pytest.mark.parametrize("ms", [0.0, 5e-324, 1.7e308])
def test_impossible_times_are_handled(ms):
    lane = [prefill(), *(chain(i, 3, 1, ms, ms) for i in range(1, 9))]
    (entry,) = prediction(trace(("lane", lane), options={"k": 10**9}))
    assert isinstance(entry["sentence"], str)


def test_the_prediction_of_a_run_agrees_with_its_own_measurement():
    lane = simulated(random.Random(2), [0.7] * 4, 4, 400)
    (entry,) = prediction(trace(("lane", lane)))
    assert entry["predicted_speedup"] == pytest.approx(speed(lane) * 10.0, rel=0.02)
    assert entry["best_speedup"] >= entry["predicted_speedup"]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"c": 12.0, "alphas": [0.95] * 4}, "drafting is too slow"),
        (
            {"v": lambda n: 10.0 + 11.0 * (n - 1), "c": 0.1, "alphas": [0.95] * 4},
            "verifying several tokens costs much more than one",
        ),
        ({"alphas": [0.2] * 4}, "the acceptance rate is too low for the cost of the draft"),
        ({"other": 60.0, "alphas": [0.95] * 4}, "overhead of the engine in every step"),
    ],
)
def test_main_cause_is_named(changes, word):
    (entry,) = prediction(trace(("lane", simulated(random.Random(3), k=4, steps=200, **changes))))
    assert f"; main cause: {word}; " in entry["sentence"]


def test_a_step_that_costs_less_than_a_plain_token_has_no_extra_time():
    quick = simulated(random.Random(3), [0.3] * 4, 4, 200, v=lambda n: 8.0, c=0.1, fixed=0.0, other=0.1)
    (entry,) = prediction(trace(("lane", quick)))
    assert (
        entry["sentence"].startswith("Faster (")
        and ": a step takes as long as plain decoding of 0." in entry["sentence"]
    )
    assert "; no extra cost over plain decoding; no other k is predicted" in entry["sentence"]
    assert "main cause" not in entry["sentence"]


@pytest.mark.parametrize(
    ("speed", "words"),
    [
        (Estimate(0.8, 0.7, 0.9), "Slower (0.80x, 0.70 to 0.90)"),
        (Estimate(1.05, 0.99, 1.11), "No clear difference (1.05x, 0.99 to 1.11)"),
        (Estimate(7.5), "No clear difference (7.50x)"),
        (Estimate(1.97, 1.86, 2.07), "Faster (1.97x, 1.86 to 2.07)"),
    ],
)
def test_faster_and_slower_only_where_the_interval_leaves_out_one(speed, words):
    lane = {"tokens_per_step": 1.0, "steps": 9, "drafted": 0, "ms_draft": 1.0}
    assert explain(lane, speed).startswith(f"{words}: ")


def test_hopeless_lane_gets_advice_to_turn_off():
    (entry,) = prediction(trace(("lane", simulated(random.Random(4), [0.05] * 4, 4, 200, c=3.0))))
    assert entry["best_k"] == 0
    assert entry["sentence"].startswith("Slower (") and ": a step takes as long as " in entry["sentence"]
    assert entry["sentence"].endswith("; not worth it here: no draft length is predicted to beat plain decoding.")


def test_a_better_length_is_named():
    lane = simulated(random.Random(5), [0.8] * 8, 8, 400, c=3.0, fixed=0.0)
    (entry,) = prediction(trace(("lane", lane), options={"k": 8}))
    assert 0 < entry["best_k"] < 8
    assert f"; k = {entry['best_k']} is predicted to be faster than k = 8 (1.26x, " in entry["sentence"]


def test_summaries_alone_give_the_measured_half():
    found = trace(("lane", simulated(random.Random(6), [0.5] * 4, 4, 100)))
    sentence = explain(summarise(found.lanes[1]), estimates(found)[0])
    assert sentence.endswith("% would break even.")
    assert sentence.startswith(("Faster (", "Slower (")) and ": a step takes as long as " in sentence


def test_other_k_is_advised_only_if_significant():
    """One more token would be faster for both lanes, but only the long lane has enough steps for certainty."""
    few, many = (
        prediction(trace(("lane", simulated(random.Random(4), [0.8] * 8, 2, steps)), options={"k": 2}))[0]
        for steps in (20, 2500)
    )
    assert many["best_k"] > 2 and f"; k = {many['best_k']} is predicted to be faster than k = 2 (" in many["sentence"]
    assert few["best_k"] != 2 and few["sentence"].endswith("no other k is predicted to be clearly faster than k = 2.")


def test_the_break_even_rate_is_the_rate_of_a_lane_as_fast_as_plain_decoding():
    lane = {"tokens_per_step": 2.2, "drafted": 400, "steps": 100, "acceptance_rate": 0.3}
    assert break_even(lane, Estimate(1.0)) == pytest.approx(0.3)
    assert break_even(lane, Estimate(0.5)) == pytest.approx(0.85)
    assert break_even(lane, Estimate(3.0)) == 0.0
    assert break_even(lane | {"drafted": 0}, Estimate(1.0)) is break_even(lane, None) is None
    assert "30 % of the draft tokens were accepted, 85 % would break even" in explain(lane, Estimate(0.5))
    assert "not even 100 % would break even" in explain(lane, Estimate(0.1))
