"""Loss of a head against its target. R rows, A positions, V vocabulary."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F


def argmax_targets(targets: Tensor) -> Tensor:
    """Return tokens [...] of probabilities [..., V]; tokens are returned unchanged."""
    return targets.argmax(-1) if targets.is_floating_point() else targets


def token_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean cross-entropy in nats and the top-1 agreement of logits [R, A, V].

    targets: probabilities [R, A, V] or tokens [R, A].
    """
    logits = logits.float()
    nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(0, 1))
    return nats, (logits.argmax(-1) == argmax_targets(targets)).float().mean()


def steps_loss(steps: Iterable[tuple[Tensor, Tensor]], weights: Iterable[float]) -> tuple[Tensor, dict[str, float]]:
    """Return the weighted sum of the losses of all draft steps, and agree_1, agree_2, .. as metrics."""
    total, metrics = torch.zeros(()), {}
    for i, ((nats, agreed), weight) in enumerate(zip(steps, weights, strict=False), start=1):
        total = weight * nats if i == 1 else total + weight * nats  # the first term sets the device
        metrics[f"agree_{i}"] = float(agreed)
    return total, metrics
