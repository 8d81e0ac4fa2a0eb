"""How near a head's guesses are to what its target says. R rows, A positions, V vocabulary."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F


def likeliest(said: Tensor) -> Tensor:
    """[..., V] probabilities or [...] tokens -> tokens [...]"""
    return said.argmax(-1) if said.is_floating_point() else said


def compare(logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """logits [R, A, V]; wanted [R, A, V] probabilities or [R, A] tokens -> mean nats, and the share that agrees."""
    logits = logits.float()
    nats = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1))
    return nats, (logits.argmax(-1) == likeliest(wanted)).float().mean()


def steps_loss(steps: Iterable[tuple[Tensor, Tensor]], weights: Iterable[float]) -> tuple[Tensor, dict[str, float]]:
    """What `compare` says of every step of a draft -> the weighted sum of the nats, and agree_1, agree_2, .."""
    total, metrics = torch.zeros(()), {}
    for i, ((nats, agreed), weight) in enumerate(zip(steps, weights, strict=False), start=1):
        total = weight * nats if i == 1 else total + weight * nats  # on one device from the first: it may be a lent one
        metrics[f"agree_{i}"] = float(agreed)
    return total, metrics
