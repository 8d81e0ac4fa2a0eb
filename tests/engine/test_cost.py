"""The cost model: numbers computed by hand, and a simulated run."""

import random

import pytest
import torch

from specdemo.core.protocol import Budget, GenerationConfig
from specdemo.core.trace import StepEvent
from specdemo.engine.cost import CostModel, fit_cost_model
from specdemo.engine.loop import generate
from specdemo.methods import load_drafter
from specdemo.models.pass_cost import median_times, pass_times
from specdemo.models.toy import ToyTarget
from tests.simulated_runs import chain, plain_run, prefill, simulated, speed


def costs(**changes):
    usual = {"plain_ms": 10.0, "pass_ms": 10.0, "verify": {1: 1.0}, "draft_ms": 1.0, "draft_step_ms": 0.0}
    return CostModel(**usual | {"other_ms": 0.0, "alpha": [0.6], "k": 4} | changes)


def test_a_step_by_hand():
    one = costs(verify={1: 1.0, 3: 1.4}, draft_step_ms=0.5, other_ms=0.3, alpha=[0.8, 0.5])
    assert one.tokens(2) == pytest.approx(1.0 + 0.8 + 0.4)
    assert one.tokens(3) == pytest.approx(1.0 + 0.8 + 0.4 + 0.2)
    assert one.step_ms(2) == pytest.approx(0.5 + 2.0 + 14.0 + 0.3)
    assert one.speedup(2) == pytest.approx(2.2 * 10.0 / 16.8)
    assert one.speedup(0) == 1.0


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
