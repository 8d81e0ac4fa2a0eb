"""Gumbel coupling. B rows, N draft nodes, S = N + 1 slots, V vocabulary; p target, q draft."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor

from specdemo.core.accept import AcceptResult, accept_greedy
from specdemo.core.sampling import PositionNoise
from specdemo.core.tree import Draft, depths, is_chain


@dataclass(frozen=True, slots=True)
class Coupled:
    """Gumbel coupling: speculative decoding whose text does not depend on the drafter (Daliri et al., 2408.07978).

    The target draws the token at every position by argmax p / e, with exponential noise e of that position
    (`PositionNoise`); equivalently log p plus Gumbel noise. A node is accepted if it equals this draw, so sampling is
    greedy decoding of p / e. Lossless for every draft, even one that knows the noise: the text depends on p and the
    noise only. Plain decoding and all drafters write the same text from one seed, if the logits are equal.

    A drafter that draws from q with the same noise is accepted with probability sum over x of 1 / sum over y of
    max(p(y) / p(x), q(y) / q(x)), at least (1 - TV) / (1 + TV); rejection sampling accepts with 1 - TV, the optimum.
    For a one-hot q both are p(x).
    """

    coupled: ClassVar[bool] = True
    exact: ClassVar[bool] = True
    note: ClassVar[str] = ""

    def __call__(self, draft: Draft, target: Tensor, rng: Generator | None) -> AcceptResult:
        if rng is None:
            return accept_greedy(draft, target)
        if not isinstance(rng, PositionNoise):
            raise ValueError("acceptance rule 'coupled' needs the noise of every position; choose rule 'lossless'")
        if is_chain(draft.parents):
            return accept_greedy(draft, target / rng.ahead(draft.nodes + 1))
        levels = depths(draft.parents)  # [B, S]
        noise = rng.ahead(int(levels.max()) + 1)
        return accept_greedy(draft, target / noise[torch.arange(len(noise), device=noise.device)[:, None], levels])
