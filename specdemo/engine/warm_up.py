"""What a lane does before its clock runs."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

import torch
from torch import Tensor

from specdemo.core.accept import AcceptRule
from specdemo.core.protocol import Budget, Drafter, GenerationConfig, Target
from specdemo.engine.loop import generate, never
from specdemo.methods.base import Method
from specdemo.models.target import HFTarget

TOKENS = 12


def warm_up(
    target: Target,
    drafter: Drafter,
    prompt_ids: Tensor,
    config: GenerationConfig,
    accept: AcceptRule | None = None,
    cancelled: Callable[[], bool] = never,
) -> None:
    """Every code path and buffer of the lane: the first tokens of the same run. Where passes are recorded also those
    that later steps of the run may need, so that none is recorded while the clock runs."""
    written = 0
    config = replace(config, stop_token_ids=())
    with closing(generate(target, drafter, prompt_ids, config, accept=accept, cancelled=cancelled)) as run:
        for event in run:
            if not event.index and isinstance(target, HFTarget) and target.records:
                _rehearse(target, drafter, config.budget)
            written += len(event.emitted[0])
            if written >= TOKENS:
                break


@torch.no_grad()
def _rehearse(target: HFTarget, drafter: Drafter, budget: Budget) -> None:
    if isinstance(drafter, Method) and min(budget.depth, budget.nodes):
        drafter.rehearse(budget)
    target.rehearse(budget.depth + 1, drafter.taps)
    if budget.nodes > budget.depth:
        target.rehearse(budget.nodes + 1, drafter.taps, tree=True)
