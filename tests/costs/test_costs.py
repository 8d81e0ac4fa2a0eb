"""Tokens per pass, from acceptance probabilities and by replaying a run; the cost model: numbers computed by hand, a
simulated run, and its formulas, on which advice, adaptive lengths and predictions agree."""

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdemo.analysis.predict import predict
from specdemo.core.protocol import Budget, GenerationConfig
from specdemo.core.trace import Remote, StepEvent, from_json
from specdemo.costs.acceptance import (
    Acceptance,
    expected_tokens,
    measured_rates,
    of_lane,
    of_passes,
    pooled_rate,
    replayed,
)
from specdemo.costs.lengths import DEFAULT_LENGTH, best_length, usual_length, usual_tree
from specdemo.costs.passes import interpolate
from specdemo.costs.step import CostModel, fit_cost_model, predicted_speedup
from specdemo.engine.loop import generate
from specdemo.methods import load_drafter
from specdemo.methods.adaptive import Goodput
from specdemo.methods.measurements import StepOutcome
from specdemo.models.pass_cost import median_times, pass_times
from specdemo.models.toy import ToyTarget
from specdemo.presets.files import FOLDER
from tests.simulated_runs import chain, plain_run, prefill, simulated, speed

guesses = st.lists(st.booleans(), min_size=1, max_size=60)


def decode(guessed, k):
    """Return the passes of a drafter whose guess at each position of a text is right or wrong, for any start of the
    draft.
    """
    passes, at = [], 0
    while at < len(guessed):
        drafted = min(k, len(guessed) - at - 1)
        accepted = next((i for i in range(drafted) if not guessed[at + i]), drafted)
        passes.append((accepted, drafted))
        at += accepted + 1
    return passes


@given(guesses, st.integers(1, 8), st.data())
def test_a_run_is_replayed_at_every_shorter_draft(guessed, recorded, data):
    k = data.draw(st.integers(1, recorded))
    truth = len(guessed) / len(decode(guessed, k))
    low, value, high = replayed(decode(guessed, recorded), k, 0.5)
    assert low <= value <= high
    assert low - 1e-9 <= truth <= high + 1e-9
    if not any(accepted == recorded for accepted, _ in decode(guessed, recorded)[:-1]):
        assert low == high == pytest.approx(truth)


def test_simulated_shorter_draft_is_bounded():
    low, value, high = replayed([(4, 4), (0, 4)], 3, 0.5)  # guesses: yes yes yes yes unknown, no
    assert (low, high) == (2.0, 3.0) and value == pytest.approx(6 / 2.5)  # four tokens, then two in one pass or in two


chances = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8)


@given(chances, st.integers(0, 7), st.integers(1, 16))
def test_more_acceptance_never_means_fewer_tokens(rates, place, k):
    better = [*rates]
    better[place % len(rates)] = 1.0
    assert Acceptance(tuple(better)).expected(k) >= Acceptance(tuple(rates)).expected(k)
    assert 1.0 <= Acceptance(tuple(rates)).expected(k) <= k + 1.0


@pytest.mark.parametrize("rates", [(), (1.5,), (float("nan"),), (0.5,) * 65])
def test_invalid_probabilities(rates):
    with pytest.raises(ValueError, match="acceptance needs 1 to 64 numbers between 0 and 1"):
        Acceptance(rates)


def test_run_without_drafts_has_no_acceptance():
    with pytest.raises(ValueError, match="drafted nothing"):
        of_passes([(0, 0)])


def lane_of(preset, number=1):
    return from_json((FOLDER / "recorded" / f"{preset}.json").read_bytes()).lanes[number]


def test_a_recorded_lane_of_a_draft_model_is_replayed_exactly():
    lane = lane_of("embedded-draft")
    found = of_lane(lane)
    assert found.exact and found.longest == 4
    assert found.tokens(4).value == pytest.approx(lane.summary["tokens_per_step"], rel=0.02)
    values = [found.tokens(k).value for k in (1, 2, 3, 4)]
    assert values == sorted(values) and values[0] < 2.0


def test_heads_are_known_by_position_alone_and_trees_at_their_size():
    assert not of_lane(lane_of("embedded-eagle-3")).exact
    tree = of_lane(lane_of("embedded-medusa"))
    assert tree.nodes > len(tree.rates) and tree.longest is None
    assert len(tree.widths) == len(tree.rates) == 2 and tree.expected(1) < tree.expected(2)


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=6), st.integers(1, 8), st.integers(1, 64))
def test_widest_row_sets_the_verification_width(rates, k, batch):
    acceptance = Acceptance(tuple(rates))
    assert acceptance.longest_of(k, 1) == pytest.approx(acceptance.expected(k))
    assert acceptance.longest_of(k, batch) <= acceptance.longest_of(k, batch + 1) + 1e-9 <= k + 1.0 + 1e-6
    assert 0.0 <= acceptance.p_all_accepted(k, batch) <= acceptance.p_all_accepted(k, batch + 1) + 1e-9 <= 1.0 + 1e-6


FULL = [(5, 5)] * 12 + [(0, 5), (1, 5), (2, 5), (3, 5)] * 5  # the last position was accepted 12 of 12 times


@pytest.mark.parametrize("exact", [True, False])
def test_acceptance_decays_and_the_interval_widens_after_the_recorded_k(exact):
    found = of_passes(FULL, exact)
    assert found.rates[-1] == 1.0 and found.longest == 5
    rates = [found.rate(position) for position in range(5, 17)]
    assert all(after < before for before, after in pairwise(rates))
    tokens = [found.tokens(k) for k in (5, 6, 16)]
    assert tokens[0].value < tokens[1].value < tokens[2].value < tokens[0].value + 11 * 12 / len(FULL)
    assert tokens[0].width < tokens[1].width < tokens[2].width
    for one, k in zip(tokens, (5, 6, 16), strict=True):
        assert one.low <= tokens[0].value <= one.value <= one.high <= k + 1


@given(guesses, st.integers(1, 5), st.data())
def test_interval_after_the_recorded_k_contains_the_real_run(guessed, recorded, data):
    k = data.draw(st.integers(recorded + 1, 16))
    passes = decode(guessed, recorded)
    if any(drafted == recorded for _, drafted in passes):
        found = of_passes(passes, exact=True).tokens(k)
        truth = len(guessed) / len(decode(guessed, k))
        assert found.low - 1e-9 <= truth <= found.high + 1e-9 and found.low <= found.value <= found.high


@given(st.lists(st.tuples(st.integers(0, 4), st.just(4)), min_size=1, max_size=40), st.integers(5, 16), st.booleans())
def test_a_longer_draft_never_emits_fewer_tokens(passes, k, exact):
    found = of_passes(passes, exact)
    assert found.tokens(k).value <= found.tokens(k + 1).value + 1e-9
    assert 1.0 <= found.tokens(k).low <= found.tokens(k).value <= found.tokens(k).high <= k + 1.0


def test_server_rates_alone_are_a_recording():
    lane = lane_of("embedded-draft")
    lane.remote = Remote("host:1", "m", "completions", accept_by_position=[0.9, 0.72, 0.72])
    lane.events = []
    found = of_lane(lane)
    assert found.longest == 3 and found.rates == pytest.approx((0.9, 0.8, 1.0))
    assert found.rate(4) < 0.9 and found.extrapolates(4) and not found.extrapolates(3)
    assert found.tokens(4).low == found.tokens(3).value < found.tokens(4).value < found.tokens(4).high


def test_given_rates_are_not_a_recording():
    given_rates = Acceptance((0.8, 0.5))
    assert given_rates.longest is None and not given_rates.extrapolates(9) and given_rates.rate(9) == 0.5


def costs(**changes):
    usual = {"plain_ms": 10.0, "pass_ms": 10.0, "verify": {1: 1.0}, "draft_ms": 1.0, "draft_step_ms": 0.0}
    return CostModel(**usual | {"other_ms": 0.0, "alpha": [0.6], "k": 4} | changes)


def test_a_step_by_hand():
    one = costs(verify={1: 1.0, 3: 1.4}, draft_step_ms=0.5, other_ms=0.3, alpha=[0.8, 0.5])
    assert one.tokens(2) == pytest.approx(1.0 + 0.8 + 0.4)
    assert one.tokens(3) == pytest.approx(1.0 + 0.8 + 0.4 + 0.2)
    assert one.cost(2).total == pytest.approx(0.5 + 2.0 + 14.0 + 0.3)
    assert one.speedup(2) == pytest.approx(2.2 * 10.0 / 16.8)
    assert one.speedup(0) == 1.0


def test_off_is_best_without_acceptance_or_with_costly_drafts():
    assert costs(alpha=[0.1], draft_ms=5.0).best_k() == 0
    assert costs(alpha=[0.0], draft_ms=0.0, verify={1: 1.0, 2: 1.01}).best_k() == 0


def test_drafter_that_often_drafts_nothing_pays_only_for_its_drafts():
    one = costs(verify={1: 1.0, 3: 1.4}, reach_rates=[0.5, 0.25])
    assert one.drafted(2) == 0.75
    assert one.cost(2).verify == pytest.approx(10.0 * (0.5 * 1.0 + 0.25 * 1.2 + 0.25 * 1.4))


def test_the_costs_of_a_simulated_run_are_found_again():
    found = fit_cost_model([plain_run()], [simulated(random.Random(0), [0.8, 0.6, 0.5], 3)])
    assert found.alpha[:3] == pytest.approx([0.8, 0.6, 0.5], abs=0.04)
    assert found.verify == pytest.approx({1: 1.0, 4: 1.4})
    assert found.cost(3).total == pytest.approx(0.5 + 3.0 + 14.0 + 0.25)
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


def test_drafts_of_one_pass_take_the_same_time_at_every_length():
    steps = [chain(i, 4, 2, 6.0, 10.0) for i in range(1, 30)]
    each, one = (fit_cost_model([plain_run()], [[prefill(), *steps]], 4, parallel) for parallel in (False, True))
    assert (each.cost(1).drafting, one.cost(1).drafting) == pytest.approx((1.5, 6.0))
    assert each.cost(4).drafting == one.cost(4).drafting == pytest.approx(6.0)


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


def test_no_events_give_no_cost_model():
    assert fit_cost_model([plain_run()], [[prefill()]]) is None
    assert fit_cost_model([plain_run()], [plain_run()]) is None
    assert fit_cost_model([[prefill()]], [simulated(random.Random(0), [0.5] * 2, 2, 10)]) is None


def test_a_measurement_takes_a_target_and_a_drafter():
    target, config = ToyTarget(), GenerationConfig(64, budget=Budget(3, 3), stop_token_ids=())
    plain, lane = (
        list(generate(target, load_drafter(name, target), torch.tensor([[1, 2, 1, 2, 1]]), config))
        for name in ("none", "ngram")
    )
    found = fit_cost_model([plain], [lane], 3).with_probe(median_times(pass_times(target, (1, 2, 4))))
    assert set(found.verify) == {1, 2, 4}
    assert found.speedup(3) > 0.0


@pytest.mark.parametrize("cost, best", [(0.01, 7), (0.02, 6), (0.05, 4), (0.1, 3)])
def test_best_depth_at_an_acceptance_of_six_tenths(cost, best):
    """Leviathan et al. (2211.17192) and OSD (2310.07177) list these lengths for free verification."""
    assert best_length(expected_tokens([0.6] * 20), [1.0 + cost * k for k in range(21)]) == best


def test_expected_tokens_by_position():
    assert expected_tokens([]) == [1.0]
    assert expected_tokens([0.5, 0.4, 1.0]) == pytest.approx([1.0, 1.5, 1.7, 1.9])


IN_FOURS = {1: 21.4, 2: 20.5, 3: 23.3, 4: 25.7, 5: 35.7, 6: 39.2, 7: 42.6, 8: 41.3}  # ms of Q4_K_M on llama.cpp
ROW_BY_ROW = {1: 18.1, 2: 23.2, 3: 28.8, 4: 34.4, 5: 43.6, 6: 49.4, 7: 55.0, 8: 57.2}  # of Q4_1
FLAT = {1: 40.1, 5: 41.7, 9: 42.5}  # bfloat16 with AMX


@pytest.mark.parametrize(
    "pass_ms, draft_ms, length",
    [
        (IN_FOURS, 0.0, 3),
        (IN_FOURS, 1.0, 3),
        (ROW_BY_ROW, 0.0, 2),
        (ROW_BY_ROW, 6.0, 1),
        (FLAT, 0.0, 7),
        (FLAT, 8.0, 3),
    ],
)
def test_usual_length_follows_the_measured_costs(pass_ms, draft_ms, length):
    assert usual_length(pass_ms, lambda k: k * draft_ms) == length
    assert usual_length({}, lambda k: k * draft_ms) == DEFAULT_LENGTH


@pytest.mark.parametrize(
    "pass_ms, draft_ms, depth, tree",
    [
        (FLAT, 1.0, 0, (5, 8)),
        (FLAT, 9.0, 0, (3, 8)),
        (FLAT, 1.0, 2, (2, 8)),
        (IN_FOURS, 1.0, 0, (3, 3)),
        (ROW_BY_ROW, 1.0, 0, (2, 2)),
    ],
)
def test_a_tree_has_the_size_that_the_measured_costs_allow(pass_ms, draft_ms, depth, tree):
    assert usual_tree(pass_ms, lambda k: k * draft_ms, 24, depth) == tree


def test_unknown_times_are_not_chosen():
    assert best_length([1.0, 1.5, 1.9], [1.0, 0.0, 1.2]) == 2
    assert best_length([1.0, 1.5], [0.0, 0.0]) == 0
    assert predicted_speedup(1.5, 2.0, 1.0) == 0.75


def test_values_lie_on_lines_between_the_measured_sizes():
    rising = {1: 1.0, 3: 1.4, 5: 1.5}
    assert [interpolate(rising, n) for n in (0.5, 1, 2, 2.5, 4, 7)] == pytest.approx([1.0, 1.0, 1.2, 1.3, 1.45, 1.6])
    assert interpolate({1: 1.0, 3: 1.4, 5: 1.2}, 9) == 1.2
    assert interpolate({4: 2.0}, 9) == 2.0 and interpolate({}, 3) == 0.0


def test_rates_of_positions_with_enough_trials():
    rates, pooled = measured_rates([2, 2, 1, 1, 1, 0], 3)
    assert rates == pytest.approx([5 / 6, 2 / 5]) and pooled == pytest.approx(7 / 13)
    assert measured_rates([0, 0], 2) == ([], 0.0) and pooled_rate([0.0, 0.0]) == 0.0


@pytest.mark.parametrize("rates", [[0.9, 0.8, 0.7, 0.6], [0.5] * 4, [0.1, 0.1, 0.1, 0.1]])
def test_advice_adaptive_lengths_and_predictions_agree(rates):
    widths, draft = {1: 1.0, 2: 1.1, 3: 1.15, 5: 1.3}, 0.1
    model = CostModel(1.0, 1.0, widths, draft, 0.0, 0.0, rates, k=4)
    policy = Goodput()
    policy.acceptance.rates = lambda depth: rates[:depth]
    for slots, seconds in widths.items():
        for _ in range(3):  # the first pass of a width and the first draft are not measured
            k = slots - 1
            policy.learn(StepOutcome(k, slots, [], draft_seconds=draft * k, verify_seconds=seconds))
    plan = policy._make_plan(4, 4)
    assert plan.tokens == pytest.approx([model.tokens(k) for k in range(5)])
    assert plan.tokens == pytest.approx([Acceptance(tuple(rates)).expected(k) for k in range(5)])
    assert plan.seconds == pytest.approx([model.cost(k).total for k in range(5)])
    assert plan.best == model.best_k(4)
    found = predict("llama-8b", method="eagle", acceptance=rates, device="l4")
    tokens, times = ([1.0, *(r.tokens.value for r in found.rows)], [found.plain_ms, *(r.step_ms for r in found.rows)])
    assert found.best_k == best_length(tokens, times)
    assert [row.speedup.value for row in found.rows[:4]] == pytest.approx(
        [predicted_speedup(model.tokens(k), found.rows[k - 1].step_ms, found.plain_ms) for k in range(1, 5)]
    )
