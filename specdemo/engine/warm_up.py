"""Warm-up of a lane before it is timed."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

import torch
from torch import Tensor

from specdemo.core.accept import AcceptRule
from specdemo.core.protocol import Budget, Drafter, GenerationConfig, Target
from specdemo.engine.loop import generate, never_cancelled

TOKENS = 12


def warm_up(
    target: Target,
    drafter: Drafter,
    prompt_ids: Tensor,
    config: GenerationConfig,
    accept: AcceptRule | None = None,
    cancelled: Callable[[], bool] = never_cancelled,
) -> None:
    """Run the first tokens of the lane's text, to execute every code path and allocate every buffer. With CUDA graphs,
    also capture those that later steps may need."""
    generated = 0
    config = replace(config, stop_token_ids=())
    with closing(generate(target, drafter, prompt_ids, config, accept=accept, cancelled=cancelled)) as run:
        for event in run:
            if not event.index and target.uses_cuda_graphs:
                _capture_graphs(target, drafter, config.budget)
            generated += len(event.emitted[0])
            if generated >= TOKENS:
                break


@torch.no_grad()
def _capture_graphs(target: Target, drafter: Drafter, budget: Budget) -> None:
    if min(budget.depth, budget.nodes):
        drafter.capture_graphs(budget)
    target.capture_graphs(budget.depth + 1, drafter.taps)
    if budget.nodes > budget.depth:
        target.capture_graphs(budget.nodes + 1, drafter.taps, tree=True)
