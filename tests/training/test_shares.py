"""Minutes of a training: what fits, what is refused, and that measuring changes nothing."""

from pathlib import Path

import pytest
import torch

from specdemo.methods.recipes import HEAD_RECIPES, race_command, share_minutes, untrained_drafter
from specdemo.models.target import HFTarget
from specdemo.training.collect import Plan
from specdemo.training.shares import MIN_STEPS, Costs, Shares, TooShort, divide, measure_costs
from tests.models.tiny import build
from tests.training.test_fit import ticking

PLAN = Plan(text_rows=960, sampled_rows=320, rows_per_shard=32, context=256, taps=(-1,))
FAST = Costs(token=0.01, row=0.05, update=0.1, trained=0.0001, saving=4.0)
SLOW = Costs(token=0.4, row=1.0, update=0.5, trained=0.015, saving=20.0)  # a model of 135 M weights on two cores


@pytest.mark.parametrize("costs", [FAST, SLOW])
@pytest.mark.parametrize("minutes", [1, 20, 600])
@pytest.mark.parametrize("generated", [True, False])
@pytest.mark.parametrize("collected", [True, False])
def test_all_parts_fit_into_the_minutes(costs: Costs, minutes: int, generated: bool, collected: bool) -> None:
    try:
        shares = divide(60.0 * minutes, costs, PLAN, generated, collected, 4096)
    except TooShort as short:
        assert short.needed > 60.0 * minutes
        shares = divide(short.needed, costs, PLAN, generated, collected, 4096)
        minutes = short.needed / 60.0
    collecting = 0.0 if collected else costs.collecting(shares.plan, generated)
    assert shares.batch_tokens is not None and 256 <= shares.batch_tokens <= 4096
    assert MIN_STEPS <= shares.steps <= shares.seconds / costs.step(shares.batch_tokens)
    assert collecting + shares.seconds + costs.saving == pytest.approx(60.0 * minutes)
    assert shares.plan.text_rows == 32 or (shares.plan.text_rows <= 960 and collecting <= 30.0 * minutes)


def test_too_few_minutes_name_what_would_fit_and_what_is_needed(tmp_path: Path) -> None:
    target = HFTarget(build("llama"), name="tiny")
    drafter = untrained_drafter(HEAD_RECIPES["medusa"], target)
    pattern = r"^0\.001 minutes are too few to train medusa on tiny: only [\d,]+ tokens of text and \d+ training steps "
    with pytest.raises(ValueError, match=pattern + r"would fit, and 50 steps are needed; --minutes [\d.]+ is enough$"):
        share_minutes("medusa", drafter, target, 0.001, tmp_path / "cache", tmp_path)
    (tmp_path / "checkpoint.pt").touch()  # of a run that goes on
    assert share_minutes("medusa", drafter, target, 0.001, tmp_path / "cache", tmp_path).seconds == 0.0


@pytest.mark.parametrize("recipe", HEAD_RECIPES)
def test_measuring_costs_changes_neither_head_nor_random_numbers(recipe: str) -> None:
    target = HFTarget(build("llama"), name="tiny")
    drafter = untrained_drafter(HEAD_RECIPES[recipe], target)
    before = {name: tensor.clone() for name, tensor in drafter.head.state_dict().items()}
    state = torch.get_rng_state()
    costs = measure_costs(drafter, target, Plan(32, 8, 8, 32, 16, drafter.taps), ticking())
    assert (costs.token, costs.row, costs.step(32)) == (1 / 8, 1.0, 1.0)
    assert torch.equal(torch.get_rng_state(), state)
    after = drafter.head.state_dict()
    assert all(torch.equal(after[name], tensor.float()) for name, tensor in before.items())


def test_the_command_that_races_a_head_quotes_its_folder() -> None:
    command = race_command("eagle-3", "my target", Path("runs/a b"))
    assert command.endswith("run embedded-draft --target 'my target' --method eagle --model 'runs/a b'")
    assert str(Shares(PLAN, 1.0, None, 1200)) == "327,680 tokens of text and 1,200 training steps"
