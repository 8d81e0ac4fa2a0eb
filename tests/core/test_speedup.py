"""Formulas of the cost model; advice, adaptive lengths and predictions agree on them."""

import pytest

from specdemo.analysis.acceptance import Acceptance, of_passes
from specdemo.analysis.predict import predict
from specdemo.core.speedup import (
    DEFAULT_LENGTH,
    best_length,
    expected_tokens,
    interpolate,
    measured_rates,
    pooled_rate,
    predicted_speedup,
    usual_length,
)
from specdemo.engine.cost import CostModel
from specdemo.methods.adaptive import Goodput, StepOutcome


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


def test_unknown_times_are_not_chosen():
    assert best_length([1.0, 1.5, 1.9], [1.0, 0.0, 1.2]) == 2
    assert best_length([1.0, 1.5], [0.0, 0.0]) == 0
    assert predicted_speedup(1.5, 2.0, 1.0) == 0.75


def test_values_lie_on_lines_between_the_measured_sizes():
    rising = {1: 1.0, 3: 1.4, 5: 1.5}
    sizes = sorted(rising)
    assert [interpolate(rising, sizes, n) for n in (0.5, 1, 2, 2.5, 4, 7)] == pytest.approx(
        [1.0, 1.0, 1.2, 1.3, 1.45, 1.6]
    )
    assert interpolate({1: 1.0, 3: 1.4, 5: 1.2}, sizes, 9) == 1.2
    assert interpolate({4: 2.0}, [4], 9) == 2.0 and interpolate({}, [], 3) == 0.0


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
    assert plan.seconds == pytest.approx([model.step_ms(k) for k in range(5)])
    assert plan.best == model.best_k(4)
    found = predict("llama-8b", method="eagle", acceptance=rates, device="l4")
    tokens, times = ([1.0, *(r.tokens.value for r in found.rows)], [found.plain_ms, *(r.step_ms for r in found.rows)])
    assert found.best_k == best_length(tokens, times)
    assert [row.speedup.value for row in found.rows[:4]] == pytest.approx(
        [predicted_speedup(model.tokens(k), found.rows[k - 1].step_ms, found.plain_ms) for k in range(1, 5)]
    )


def test_recorded_rates_are_those_of_the_cost_model():
    accepted = [3, 3, 2, 3, 0, 1, 3, 2, 3, 1]
    assert list(of_passes([(n, 3) for n in accepted]).rates) == measured_rates(accepted, 3)[0]
