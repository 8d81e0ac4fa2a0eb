"""The cost model: numbers computed by hand, a simulated run, and the sentence about a run."""

import random

import pytest
import torch

from specdemo.core.estimate import Estimate
from specdemo.core.protocol import Budget, GenerationConfig
from specdemo.core.tally import summarise
from specdemo.core.trace import LaneTrace, RunTrace, StepEvent, estimates
from specdemo.engine.cost import CostModel, explain, fit_cost_model, prediction
from specdemo.engine.loop import generate
from specdemo.methods import load_drafter
from specdemo.models.pass_cost import median_times, pass_times
from specdemo.models.toy import ToyTarget


def costs(**changes):
    usual = {"plain_ms": 10.0, "pass_ms": 10.0, "verify": {1: 1.0}, "draft_ms": 1.0, "draft_step_ms": 0.0}
    return CostModel(**usual | {"other_ms": 0.0, "alpha": [0.6], "k": 4} | changes)


def chain(index, drafted, accepted, draft_ms, verify_ms, other_ms=0.0):
    nodes = [100 + i for i in range(drafted)]
    probs = [[None] * drafted]
    ms = {"draft": draft_ms, "verify": verify_ms, "accept": other_ms}
    parents = [list(range(drafted))]
    return StepEvent(index, [nodes], parents, [list(range(accepted + 1))], [[*nodes[:accepted], 7]], probs, probs, ms)


def prefill():
    return StepEvent(0, [[]], [[]], [[0]], [[7]], [[]], [[]], {"prefill": 20.0})


def plain_run(steps=40, ms=10.0):
    return [prefill(), *(chain(i, 0, 0, 0.0, ms) for i in range(1, steps + 1))]


def simulated(rng, alphas, k, steps=2500, v=None, c=1.0, fixed=0.5, other=0.25):
    """Return events of a lane with known costs and acceptance."""
    v = v or (lambda n: 10.0 + n)
    events = [prefill()]
    for index in range(1, steps + 1):
        accepted = next((i for i in range(k) if rng.random() >= alphas[i]), k)
        events.append(chain(index, k, accepted, fixed + c * k, v(k + 1), other))
    return events


def speed(events):
    return sum(len(e.emitted[0]) for e in events[1:]) / sum(sum(e.ms.values()) for e in events[1:])


def trace(*lanes, options=None):
    traces = []
    for name, events in (("Baseline", plain_run()), *lanes):
        ids = [t for e in events for t in e.emitted[0]]
        pieces = ["x"] * len(ids)
        traces.append(
            LaneTrace(name, "any", options or {}, True, [1], ids, "".join(pieces), "length", events, {}, pieces)
        )
    return RunTrace("p", {"temperature": 0.0}, {}, "race", traces)


@pytest.mark.parametrize(("cost", "best"), [(0.01, 7), (0.02, 6), (0.05, 4), (0.1, 3)])
def test_the_published_best_lengths(cost, best):
    """Best k at acceptance rate 0.6 with free verification (Leviathan et al., and the table in OSD)."""
    assert costs(plain_ms=1.0, pass_ms=1.0, draft_ms=cost).best_k() == best


def test_a_step_by_hand():
    one = costs(verify={1: 1.0, 3: 1.4}, draft_step_ms=0.5, other_ms=0.3, alpha=[0.8, 0.5])
    assert one.tokens(2) == pytest.approx(1.0 + 0.8 + 0.4)
    assert one.tokens(3) == pytest.approx(1.0 + 0.8 + 0.4 + 0.2)
    assert one.step_ms(2) == pytest.approx(0.5 + 2.0 + 14.0 + 0.3)
    assert one.speedup(2) == pytest.approx(2.2 * 10.0 / 16.8)
    assert one.speedup(0) == 1.0


def test_verification_lies_on_lines_between_the_measured_widths():
    one = costs(verify={1: 1.0, 3: 1.4, 5: 1.5})
    assert [one.v(n) for n in (1, 2, 3, 4, 7)] == pytest.approx([1.0, 1.2, 1.4, 1.45, 1.6])
    assert costs(verify={1: 1.0, 3: 1.4, 5: 1.2}).v(9) == pytest.approx(1.2)
    assert costs().v(9) == 1.0


def test_off_is_best_without_acceptance_or_with_costly_drafts():
    assert costs(alpha=[0.1], draft_ms=5.0).best_k() == 0
    assert costs(alpha=[0.0], draft_ms=0.0, verify={1: 1.0, 2: 1.01}).best_k() == 0


def test_drafter_that_often_drafts_nothing_pays_only_for_its_drafts():
    one = costs(verify={1: 1.0, 3: 1.4}, reach_rates=[0.5, 0.25])
    assert one.drafted(2) == 0.75
    assert one.verify_ms(2) == pytest.approx(10.0 * (0.5 * 1.0 + 0.25 * 1.2 + 0.25 * 1.4))


def test_the_costs_of_a_simulated_run_are_found_again():
    found = fit_cost_model([plain_run()], [simulated(random.Random(0), [0.8, 0.6, 0.5], 3)])
    assert found.alpha[:3] == pytest.approx([0.8, 0.6, 0.5], abs=0.04)
    assert found.verify == pytest.approx({1: 1.0, 4: 1.4})
    assert found.step_ms(3) == pytest.approx(0.5 + 3.0 + 14.0 + 0.25)
    assert found.other_ms == pytest.approx(0.25)
    assert (found.k, found.tree_nodes) == (3, None)


def test_a_run_at_one_length_predicts_the_others():
    rng, alphas = random.Random(1), [0.8, 0.75, 0.7, 0.65, 0.6, 0.6]
    seen = fit_cost_model([plain_run()], [simulated(rng, alphas, 6, fixed=0.0)])
    seen = seen.with_probe({n: 2.0 * (10.0 + n) for n in range(1, 8)})
    for k in range(1, 7):
        measured = speed(simulated(rng, alphas, k, fixed=0.0)) * 10.0
        assert seen.speedup(k) == pytest.approx(measured, rel=0.06)


def test_the_fixed_part_of_drafting_is_found_where_lengths_differ():
    steps = [chain(i, n, 0, 0.5 + 2.0 * n, 10.0) for i, n in enumerate([1, 3, 1, 3] * 10, start=1)]
    found = fit_cost_model([plain_run()], [[prefill(), *steps]])
    assert (found.draft_ms, found.draft_step_ms) == pytest.approx((2.0, 0.5))


def test_the_end_of_the_text_does_not_count_as_a_refusal():
    steps = [chain(i, 4, 4, 1.0, 10.0) for i in range(1, 9)] + [chain(9, 1, 1, 1.0, 10.0)]
    found = fit_cost_model([plain_run()], [[prefill(), *steps]])
    assert found.tokens(4) == pytest.approx(5.0)
    assert found.drafted(4) == pytest.approx(4.0)


def test_a_length_that_was_never_reached_is_not_promised():
    events = [prefill(), *(chain(i, 2, 2, 1.0, 10.0) for i in range(1, 30))]
    found = fit_cost_model([plain_run()], [events], k=6)
    assert found.tokens(6) == found.tokens(2) == pytest.approx(3.0)
    assert found.best_k() == 2


def test_tree_is_predicted_at_its_size():
    ms = {"draft": 1.0, "verify": 12.0}
    star = StepEvent(1, [[4, 5, 6]], [[0, 0, 1]], [[0, 2]], [[5, 7]], [[None] * 3], [[None] * 3], ms)
    found = fit_cost_model([plain_run()], [[prefill(), *[star] * 20]])
    assert (found.k, found.tree_nodes) == (2, 3.0)
    assert found.tokens(2) == pytest.approx(2.0)
    assert found.best_k() == 2
    assert found.speedup(2) == pytest.approx(20.0 / 13.0)


def test_no_events_give_no_prediction():
    assert fit_cost_model([plain_run()], [[prefill()]]) is None
    assert fit_cost_model([plain_run()], [plain_run()]) is None
    assert fit_cost_model([[prefill()]], [simulated(random.Random(0), [0.5] * 2, 2, 10)]) is None
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
        ({"c": 4.0, "alphas": [0.95] * 4}, "drafting accepted tokens"),
        ({"v": lambda n: 10.0 + 3.0 * (n - 1), "c": 0.1, "alphas": [0.95] * 4}, "verifying more than one token"),
        ({"alphas": [0.2] * 4}, "rejected draft tokens"),
        ({"other": 9.0, "alphas": [0.95] * 4}, "overhead"),
    ],
)
def test_largest_cost_is_named(changes, word):
    (entry,) = prediction(trace(("lane", simulated(random.Random(3), k=4, steps=200, **changes))))
    assert f"largest extra cost: {word}" in entry["sentence"]


def test_a_step_that_costs_less_than_a_plain_token_has_no_extra_time():
    quick = simulated(random.Random(3), [0.3] * 4, 4, 200, v=lambda n: 8.0, c=0.1, fixed=0.0, other=0.1)
    (entry,) = prediction(trace(("lane", quick)))
    assert entry["sentence"].startswith("Faster (") and ": a step takes as long as 0." in entry["sentence"]
    assert "; no extra cost over plain decoding; no other k is predicted" in entry["sentence"]
    assert "largest extra cost" not in entry["sentence"]


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
    assert sentence.endswith("% of the draft tokens were accepted.")
    assert sentence.startswith(("Faster (", "Slower (")) and ": a step takes as long as " in sentence


def test_other_k_is_advised_only_if_significant():
    """One more token would be faster for both lanes, but only the long lane has enough steps for certainty."""
    few, many = (
        prediction(trace(("lane", simulated(random.Random(4), [0.8] * 8, 2, steps)), options={"k": 2}))[0]
        for steps in (20, 2500)
    )
    assert many["best_k"] > 2 and f"; k = {many['best_k']} is predicted to be faster than k = 2 (" in many["sentence"]
    assert few["best_k"] != 2 and few["sentence"].endswith("no other k is predicted to be clearly faster than k = 2.")


def test_a_measurement_takes_a_target_and_a_drafter():
    target, config = ToyTarget(), GenerationConfig(64, budget=Budget(3, 3), stop_token_ids=())
    plain, lane = (
        list(generate(target, load_drafter(name, target), torch.tensor([[1, 2, 1, 2, 1]]), config))
        for name in ("none", "ngram")
    )
    found = fit_cost_model([plain], [lane], 3).with_probe(median_times(pass_times(target, (1, 2, 4))))
    assert set(found.verify) == {1, 2, 4}
    assert found.speedup(3) > 0.0


def test_the_probe_measures_every_width():
    assert set(pass_times(ToyTarget(), (1, 4, 40), repeats=1)) == {1, 4, 40}
