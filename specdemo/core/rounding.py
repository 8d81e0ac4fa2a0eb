"""Difference between two computations of the same logits, judged by the model's own rounding on this machine.

A number that fits one processor refuses a sound model on another. So a difference is compared with what the model's own
layers show on the same text in passes of other widths, and with the spacing of its numbers.

N positions, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LIKELY = 8  # tokens of a position whose logits are compared
BEYOND = 3.0  # a difference is more than rounding from so many times the own one on
LEAST_EPS = 1e-4  # of logits in float32: sums over thousands of products lose digits, in TF32 too
QUANTISED_EPS = 1 / 127  # activations are rounded to 8 bits


@dataclass(frozen=True, slots=True)
class Difference:
    """Logits against the expected ones.

    moved: largest share of the probability of a position that is on other tokens. gap: largest change of the gap
    between two likely tokens. limit: largest such change that is rounding. wrong: positions with another best token,
    whose expected logit is lower by more than `limit`.
    """

    moved: float
    gap: float
    limit: float
    wrong: list[int]

    @property
    def is_rounding(self) -> bool:
        """Return whether the model's own rounding explains the difference."""
        return self.gap <= self.limit


def gap_change(expected: Tensor, logits: Tensor) -> float:
    """Return the largest change of the gap between two likely tokens, at any position of logits [N, V]."""
    likely = expected.topk(min(LIKELY, expected.shape[-1])).indices
    change = (expected.float() - logits.float()).gather(-1, likely)
    return float((change.amax(-1) - change.amin(-1)).max())


def moved_share(expected: Tensor, logits: Tensor) -> float:
    """Return the largest share of the probability that is on other tokens, at any position of logits [N, V]."""
    return float((expected.float().softmax(-1) - logits.float().softmax(-1)).abs().sum(-1).max()) / 2


def difference(
    expected: Tensor, logits: Tensor, own: Sequence[tuple[Tensor, Tensor]], eps: float, layers: int
) -> Difference:
    """Compare logits [N, V] with the expected ones.

    own: pairs of logits that the model's own layers computed for one text in two ways. eps: relative spacing of the
    model's numbers, see `spacing`. layers: of the model, each of which rounds.
    """
    best = logits.argmax(-1)
    lower = (expected.amax(-1) - expected.gather(-1, best[:, None])[:, 0]).float()
    # the median, because the best logits may be near 0; not the largest, because a model may mask tokens with -1e4
    size = max(expected.topk(min(LIKELY, expected.shape[-1])).values.abs().max(), expected.abs().median())
    limit = max(eps * layers**0.5 * float(size), BEYOND * max((gap_change(*pair) for pair in own), default=0.0))
    wrong = (lower > limit).nonzero()[:, 0].tolist()
    return Difference(moved_share(expected, logits), gap_change(expected, logits), limit, wrong)


def spacing(dtype: torch.dtype, quantised: bool = False) -> float:
    """Return the relative spacing of the logits of a model in a dtype."""
    return max(torch.finfo(dtype).eps, QUANTISED_EPS if quantised else LEAST_EPS)
