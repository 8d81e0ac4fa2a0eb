"""Synthetic acceptance: chosen acceptance rates, to measure speed. N draft nodes."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor

from specdemo.core.accept import AcceptResult, coins, end_probs
from specdemo.core.host_copy import to_device
from specdemo.core.sampling import draw
from specdemo.core.tree import ABSENT, Draft


def rates_of_length(length: float) -> tuple[float, ...]:
    """Return the conditional rates with this mean accepted length and the smallest variance, as in vLLM: always accept
    all but the last of the tokens, and that one with the fractional probability."""
    whole, share = divmod(length - 1.0, 1.0)
    return *[1.0] * int(whole), share, 0.0


@dataclass(frozen=True, slots=True)
class SyntheticAcceptance:
    """Accepts tokens of a chain at random, independent of their values. Lossy: simulates a drafter with given
    acceptance rates. vLLM has the same option (config/speculative.py, 0.32).

    rates: probability that the token at a position is accepted if all before it are; the last entry repeats. The final
    token comes from the target. generator: of its own, since greedy decoding has none.
    """

    rates: tuple[float, ...]
    generator: Generator
    exact: ClassVar[bool] = False
    note: ClassVar[str] = ""

    def __call__(self, draft: Draft, target: Tensor, rng: Generator | None) -> AcceptResult:
        rates = [*self.rates, *self.rates[-1:] * (draft.nodes - len(self.rates))][: draft.nodes]
        accept_probs = to_device(rates, draft.tokens.device, torch.float32)
        accepted = (coins(draft, self.generator) < accept_probs) & (draft.tokens != ABSENT)
        path = [list(range(n + 1)) for n in accepted.int().cumprod(1).sum(1).tolist()]
        return AcceptResult(path, draw(end_probs(target, path), rng))
