"""The training loop: its schedule, checkpoints, signals and optimizers."""

import itertools
import json
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from specdemo.core.signals import sigterm_as_exit
from specdemo.methods.recipes import HEAD_RECIPES, race_command, share_minutes, untrained_drafter
from specdemo.models.target import HFTarget
from specdemo.training import fit as fitting
from specdemo.training.collect import Plan
from specdemo.training.fit import (
    Muon,
    Schedule,
    TrainHistory,
    TrainRun,
    optimizers,
    orthogonal,
    run_with_progress,
    train_steps,
    write_provenance,
)
from specdemo.training.shares import MIN_STEPS, Costs, Shares, TooShort, divide, measure_costs
from tests.models.tiny import build


class Bigram(nn.Module):
    """A model that predicts the next token from one token."""

    def __init__(self, size=8):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(size, 16)
        self.hidden = nn.Linear(16, 16, bias=False)
        self.norm = nn.LayerNorm(16)

    def forward(self, tokens):
        return F.linear(self.norm(self.embed(tokens) + self.hidden(self.embed(tokens))), self.embed.weight)


def batches(progress, step):
    start = torch.randint(0, 8, (4, 1), generator=torch.Generator().manual_seed(step))
    return ((start + torch.arange(6)) % 8,)  # the text counts up, so it can be learned


def loss_of(module):
    def loss(tokens):
        return F.cross_entropy(module(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return loss


def ticking():
    """Return a clock on which everything takes one second."""
    return itertools.count().__next__


def run(module, folder, minutes, of=batches):
    ticks = train_steps(
        module,
        of,
        loss_of(module),
        lambda: {"seen": 1.0},
        Schedule(minutes, warmup_steps=1),
        folder / "checkpoint.pt",
        evaluate_every_seconds=20,
        clock=ticking(),
    )
    return run_with_progress(ticks, minutes, folder.name)


def test_a_run_uses_its_minutes_and_learns(tmp_path):
    module = Bigram()
    history = run(module, tmp_path, 1.0)
    assert (history.step, history.tokens, history.seconds) == (60, 60 * 24, 60.0)
    assert [e["seconds"] for e in history.evaluations] == [20, 40, 60]
    assert history.evaluations[-1]["train_loss"] < history.evaluations[0]["train_loss"] / 2
    assert not module.training


def test_killed_run_is_resumed_exactly(tmp_path, monkeypatch):
    monkeypatch.setattr(fitting, "CHECKPOINT_SECONDS", 7.0)
    reference = Bigram()
    expected = run(reference, tmp_path / "whole", 1.0)

    class Interrupted(Exception):
        pass

    def dying(progress, step):
        if step == 40:
            raise Interrupted
        return batches(progress, step)

    first, second = Bigram(), Bigram()
    with pytest.raises(Interrupted):
        run(first, tmp_path, 1.0, dying)
    resumed = run(second, tmp_path, 1.0)
    assert (resumed.step, resumed.tokens, resumed.seconds) == (expected.step, expected.tokens, expected.seconds)
    assert resumed.evaluations == expected.evaluations
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(second.state_dict()[name], value, rtol=0, atol=0)


def test_a_finished_run_is_not_run_again(tmp_path):
    first = run(Bigram(), tmp_path, 0.2)
    assert run(Bigram(), tmp_path, 0.2) == first


@pytest.mark.parametrize("workers", [0, 2])
def test_micro_batches_add_up_to_the_batch(workers):
    reference, pieces = Bigram(), Bigram()
    schedule = Schedule(1.0)
    with ThreadPoolExecutor(workers) if workers else nullcontext() as pool:
        for module, micro in ((reference, 1000), (pieces, 5)):
            run = TrainRun(module, optimizers(module, schedule), TrainHistory(), pool)
            run.step(batches(0.0, 0), loss_of(module), 1.0, micro)
    for a, b in zip(reference.parameters(), pieces.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)


def test_the_schedule_warms_up_holds_and_falls():
    schedule = Schedule(10.0, warmup_steps=4, decay_from=0.5, floor=0.1)
    assert [schedule.scale(s, 0.0) for s in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert schedule.scale(100, 0.5) == 1.0
    assert schedule.scale(100, 0.75) == pytest.approx(0.55)
    assert schedule.scale(100, 1.0) == pytest.approx(0.1)


def test_muon_updates_only_hidden_matrices():
    module = Bigram()
    muon, adamw = optimizers(module, Schedule(1.0))
    assert [p is module.hidden.weight for g in muon.param_groups for p in g["params"]] == [True]
    rest = {id(p) for g in adamw.param_groups for p in g["params"]}
    assert rest == {id(p) for p in module.parameters()} - {id(module.hidden.weight)}


def test_provenance_names_the_run(tmp_path):
    history = TrainHistory(step=3, tokens=72, seconds=3.0, evaluations=[{"step": 3, "loss": 0.5}])
    write_provenance(tmp_path, history, recipe="r", data_sha256="abc")
    facts = json.loads((tmp_path / "provenance.json").read_text(encoding="utf-8"))
    assert facts["recipe"] == "r" and facts["data_sha256"] == "abc"
    assert facts["versions"]["torch"] == torch.__version__
    assert (facts["step"], facts["tokens"], facts["evaluations"]) == (3, 72, [{"step": 3, "loss": 0.5}])
    assert "commit" in facts
    write_provenance(tmp_path, TrainHistory(step=1, evaluations=[{"valid_loss": float("nan")}]))  # a diverged run
    assert '"valid_loss": null' in (tmp_path / "provenance.json").read_text(encoding="utf-8")


def test_first_checkpoint_is_early(tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr(TrainRun, "save", lambda run, path: saved.append(run.history.seconds))
    run(Bigram(), tmp_path, 5.0)
    assert saved == [fitting.FIRST_CHECKPOINT_SECONDS, 130.0, 250.0, 300.0]


def cut(path):
    path.write_bytes(path.read_bytes()[:-500])


def foreign(path):
    torch.save(torch.load(path, weights_only=True) | {"module": Bigram(9).state_dict()}, path)


@pytest.mark.parametrize("spoil", [cut, foreign])
def test_damaged_checkpoint_is_replaced_by_the_previous_one(spoil, tmp_path, caplog):
    path = tmp_path / "checkpoint.pt"
    first = TrainRun(Bigram(), [], TrainHistory(step=1))
    first.save(path)
    first.history.step = 2
    first.save(path)
    spoil(path)
    again = TrainRun(Bigram(), [], TrainHistory())
    again.resume(path)
    assert again.history.step == 1 and len(caplog.records) == 1
    assert caplog.messages == [f"{path} is damaged or belongs to another run; renamed it to checkpoint.pt.unusable"]
    spoilt = TrainRun(Bigram(), [], TrainHistory())
    (tmp_path / "checkpoint.pt.previous").write_bytes(b"x")
    before = {name: value.clone() for name, value in spoilt.module.state_dict().items()}
    spoilt.resume(path)
    assert spoilt.history.step == 0
    assert all(torch.equal(value, before[name]) for name, value in spoilt.module.state_dict().items())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_a_run_after_saving_a_step(number, tmp_path):
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]

    def signalled(progress, step):
        if step == 5:
            signal.raise_signal(number)
        return batches(progress, step)

    with pytest.raises((KeyboardInterrupt, SystemExit)), sigterm_as_exit():
        run(Bigram(), tmp_path, 1.0, signalled)
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["history"]["step"] == 6
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_a_thread_trains_without_handlers(tmp_path):
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run, Bigram(), tmp_path, 0.2).result().seconds == 12.0


def test_the_update_is_nearly_orthogonal():
    torch.manual_seed(0)
    for shape in ((12, 40), (40, 12), (16, 16)):
        singular = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
        assert float(singular.min()) > 0.3 and float(singular.max()) < 1.3


def test_steps_are_those_of_torch():
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(24, 8)), nn.Parameter(torch.randn(8, 24))]
    reference = [nn.Parameter(p.detach().clone()) for p in parameters]
    a = Muon(parameters, lr=0.02, weight_decay=0.1, momentum=0.95)
    b = torch.optim.Muon(reference, lr=0.02, weight_decay=0.1, momentum=0.95)
    for _ in range(4):
        for mine, other in zip(parameters, reference, strict=True):
            mine.grad = torch.randn(mine.shape)
            other.grad = mine.grad.clone()
        a.step()
        b.step()
    for mine, other in zip(parameters, reference, strict=True):
        torch.testing.assert_close(mine, other, atol=3e-3, rtol=3e-2)  # torch's Muon multiplies in bf16


PLAN = Plan(text_rows=960, sampled_rows=320, rows_per_shard=32, context=256, taps=(-1,))
FAST = Costs(token=0.01, row=0.05, update=0.1, trained=0.0001, saving=4.0)
SLOW = Costs(token=0.4, row=1.0, update=0.5, trained=0.015, saving=20.0)  # a model of 135 M weights on two cores


@pytest.mark.parametrize("costs", [FAST, SLOW])
@pytest.mark.parametrize("minutes", [1, 20, 600])
@pytest.mark.parametrize("generated", [True, False])
@pytest.mark.parametrize("collected", [True, False])
def test_all_parts_fit_into_the_minutes(costs, minutes, generated, collected):
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


def test_too_few_minutes_name_what_would_fit_and_what_is_needed(tmp_path):
    target = HFTarget(build("llama"), name="tiny")
    drafter = untrained_drafter(HEAD_RECIPES["medusa"], target)
    pattern = r"^--minutes 0\.001 is too short for medusa on tiny: only [\d,]+ tokens of text and \d+ training steps "
    pattern += r"would fit, and 50 steps are needed; --minutes ([\d.]+) is enough$"
    with pytest.raises(ValueError, match=pattern) as error:
        share_minutes("medusa", drafter, target, 0.001, tmp_path / "cache", tmp_path)
    assert float(re.search(pattern, str(error.value))[1]) > 0.001
    assert not (tmp_path / "cache").exists()  # nothing was collected before
    (tmp_path / "checkpoint.pt").touch()  # of a run that goes on
    assert share_minutes("medusa", drafter, target, 0.001, tmp_path / "cache", tmp_path).seconds == 0.0


@pytest.mark.parametrize("recipe", HEAD_RECIPES)
def test_measuring_costs_changes_neither_head_nor_random_numbers(recipe):
    target = HFTarget(build("llama"), name="tiny")
    drafter = untrained_drafter(HEAD_RECIPES[recipe], target)
    before = {name: tensor.clone() for name, tensor in drafter.head.state_dict().items()}
    state = torch.get_rng_state()
    costs = measure_costs(drafter, target, Plan(32, 8, 8, 32, 16, drafter.taps), ticking())
    assert (costs.token, costs.row, costs.step(32)) == (1 / 8, 1.0, 1.0)
    assert torch.equal(torch.get_rng_state(), state)
    after = drafter.head.state_dict()
    assert all(torch.equal(after[name], tensor.float()) for name, tensor in before.items())


def test_the_command_that_races_a_head_quotes_its_folder():
    command = race_command("eagle-3", "my target", Path("runs/a b"))
    assert command.endswith("run embedded-draft --target 'my target' --method eagle --model 'runs/a b'")
    assert str(Shares(PLAN, 1.0, None, 1200)) == "327,680 tokens of text and 1,200 training steps"
