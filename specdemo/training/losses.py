"""Losses of a head against its target, and weights of its draft positions.

B rows, S places, P places of all rows, D draft positions, V vocabulary. q are the head's probabilities, p the target's.
A draft token is accepted with probability sum_v min(p_v, q_v) = 1 - TV(p, q) (Leviathan et al., arXiv 2211.17192,
section 3). If the head has a smaller vocabulary, p sums to less than 1.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdemo.core.protocol import Progress
from specdemo.core.suggest import suggest

ETA = 3.0  # of `lk_lambda`, the paper's choice
SMOOTHING = 0.5  # of `dpace_weights`, the paper's choice
TINY = 1e-9


def argmax_targets(targets: Tensor) -> Tensor:
    """Return tokens [...] of probabilities [..., V]; tokens are returned unchanged."""
    return targets.argmax(-1) if targets.is_floating_point() else targets


def acceptance(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the probability [...] that a token sampled from softmax(logits [..., V]) is accepted.

    targets: probabilities [..., V], or tokens [...] that are accepted alone.
    """
    q = logits.softmax(-1)
    if targets.is_floating_point():
        return torch.minimum(q, targets).sum(-1)
    return q.gather(-1, targets[..., None])[..., 0]


def cross_entropy(logits: Tensor, targets: Tensor, valid: Tensor) -> Tensor:
    """Return the cross-entropy [P, D] in nats; its gradient is that of the forward KL."""
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(0, 1), reduction="none").view_as(valid)
    return losses / targets.sum(-1).clamp_min(TINY) if targets.is_floating_point() else losses


def argmax(logits: Tensor, targets: Tensor, valid: Tensor) -> Tensor:
    """Return the cross-entropy [P, D] to the target's most likely token."""
    return cross_entropy(logits, argmax_targets(targets), valid)


def total_variation(logits: Tensor, targets: Tensor, valid: Tensor) -> Tensor:
    """Return TV(p, q) [P, D], the probability of a rejection (speculators, loss `tv`)."""
    return 1.0 - acceptance(logits, targets)


def lk_alpha(logits: Tensor, targets: Tensor, valid: Tensor) -> Tensor:
    """Return -log of the acceptance rate [P, D] (LK losses, Samarin et al., arXiv 2602.23881)."""
    return -acceptance(logits, targets).clamp_min(TINY).log()


def lk_lambda(logits: Tensor, targets: Tensor, valid: Tensor) -> Tensor:
    """Return w KL(p, q) + (1 - w) TV(p, q) [P, D] (arXiv 2602.23881, section 4.2).

    w = exp(-ETA a), where a is the mean acceptance rate at a draft position and has no gradient: KL dominates while the
    head is poor, TV when it is good.
    """
    variation = total_variation(logits, targets, valid)
    accepted = ((1.0 - variation.detach()) * valid).sum(0) / valid.sum(0).clamp_min(1)
    share = torch.exp(-ETA * accepted)
    divergence = cross_entropy(logits, targets, valid)
    if targets.is_floating_point():
        p = targets / targets.sum(-1, keepdim=True).clamp_min(TINY)
        divergence = divergence + torch.xlogy(p, p).sum(-1)
    return share * divergence + (1.0 - share) * variation


# logits [P, D, V], targets [P, D, V] or tokens [P, D], valid [P, D] -> losses [P, D]
LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "cross-entropy": cross_entropy,
    "argmax": argmax,
    "tv": total_variation,
    "lk-alpha": lk_alpha,
    "lk-lambda": lk_lambda,
}
WEIGHTS = ("fixed", "dpace")


@torch.no_grad()
def dpace_weights(confidence: Tensor, valid: Tensor) -> Tensor:
    """Return D-PACE weights [..., D] of the draft positions (Wu et al., arXiv 2605.18810, equations 7 and 8).

    With c = (1 - SMOOTHING) confidence + SMOOTHING, the expected number of accepted tokens is sum_m prod_(i <= m) c_i.
    The weight of position j is its derivative by log c_j: the terms with m >= j. confidence: probability [..., D] that
    the draft token is accepted, which is the paper's q if the targets are tokens. Invalid positions have no factor, no
    term and the weight 0.
    """
    smoothed = torch.where(valid, (1.0 - SMOOTHING) * confidence + SMOOTHING, 1.0)
    lengths = smoothed.cumprod(-1) * valid
    return lengths.flip(-1).cumsum(-1).flip(-1) * valid


class StepLosses(NamedTuple):
    """Comparison of one draft position with the target."""

    losses: Tensor  # [B, S]
    confidence: Tensor  # [B, S] acceptance rates, without gradient; empty if no weight needs them
    agreement: Tensor  # share of the places where both have the same most likely token
    valid: Tensor  # [B, S] bool, places that count


@dataclass(frozen=True, slots=True)
class Objective:
    """What the training of a head minimises: a loss of `LOSSES`, and how draft positions are weighted.

    weights: `fixed`, those of the method, or `dpace`. Raises ValueError for other names.
    """

    loss: str = "cross-entropy"
    weights: str = "fixed"

    def __post_init__(self) -> None:
        for noun, name, names in (("loss", self.loss, LOSSES), ("weights", self.weights, WEIGHTS)):
            if name not in names:
                raise ValueError(f"unknown {noun} {name!r}; {suggest(name, names)}")

    def token_losses(self, logits: Tensor, targets: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Return losses and confidence [P, D] for logits [P, D, V], targets [P, D, V] or tokens [P, D]."""
        targets = argmax_targets(targets) if self.loss == "argmax" else targets
        confidence = logits.new_empty(0)
        if self.weights == "dpace":
            with torch.no_grad():
                confidence = acceptance(logits, targets)
        return LOSSES[self.loss](logits, targets, valid), confidence

    def compare(self, logits: Tensor, targets: Tensor, valid: Tensor | None = None) -> StepLosses:
        """Compare logits [B, S, V] of one draft position with targets [B, S, V] or tokens [B, S]."""
        logits = logits.float()
        valid = torch.ones(logits.shape[:2], dtype=torch.bool, device=logits.device) if valid is None else valid
        columns = (column.flatten(0, 1)[:, None] for column in (logits, targets, valid))
        losses, confidence = self.token_losses(*columns)
        agreement = (logits.argmax(-1) == argmax_targets(targets)).float().mean()
        return StepLosses(losses.view_as(valid), confidence.view(-1, *valid.shape[1:]), agreement, valid)

    def steps_loss(self, steps: Iterable[StepLosses], weights: Iterable[float]) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of all draft positions, and agree_1, agree_2, .. as metrics.

        Place s of every position belongs to the draft that starts at place s. weights: the method's, one per position.
        """
        total, metrics, compared = torch.zeros(()), {}, []
        for i, (step, weight) in enumerate(zip(steps, weights, strict=False), start=1):
            metrics[f"agree_{i}"] = float(step.agreement)
            if self.weights == "dpace":
                compared.append(step)
                continue
            nats = (step.losses * step.valid).sum() / step.valid.sum().clamp_min(1)
            total = weight * nats if i == 1 else total + weight * nats  # the first term sets the device
        return (_dpace_loss(compared) if compared else total), metrics


def _dpace_loss(steps: list[StepLosses]) -> Tensor:
    """Return the D-PACE mean of the losses of drafts that have all positions."""
    shortest = min(step.losses.shape[1] for step in steps)
    losses, confidence, valid = (
        torch.stack([column[:, :shortest] for column in columns], -1)
        for columns in zip(*((step.losses, step.confidence, step.valid) for step in steps), strict=True)
    )
    weights = dpace_weights(confidence, valid)
    return (losses * weights).sum() / weights.sum().clamp_min(TINY)


@runtime_checkable
class Trainable(Protocol):
    """Protocol of a drafter with trainable weights: a head or a draft model."""

    taps: tuple[int, ...]  # hidden states of the target that it reads
    objective: Objective  # what `loss` computes

    @property
    def head(self) -> nn.Module:
        """Return what is trained."""

    def loss(self, batch: Progress) -> tuple[Tensor, dict[str, float]]:
        """Return the loss, and metrics agree_i: agreement with the target on the i-th token ahead."""

    def measure(self, batch: Progress) -> None:
        """Measure statistics on held-out text that `save` stores with the weights."""

    def save(self, folder: Path, target_name: str) -> None:
        """Write the weights in the public format of their family."""
