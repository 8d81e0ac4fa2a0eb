"""Speculative cascades. B rows, N draft tokens of a chain, S = N + 1 slots, V vocabulary; p target, q draft."""

from typing import ClassVar

import torch
from torch import Generator, Tensor

from specdemo.core.accept import (
    AcceptResult,
    Lossless,
    chain_residual,
    check_chain,
    coins,
    count_changed,
    end_probs,
    read_nodes,
    rejected_by_lossless,
    token_probs,
)
from specdemo.core.sampling import draw
from specdemo.core.settings import BaseOptions, setting
from specdemo.core.tree import ABSENT, Draft

NEEDS_Q = (
    "deferral 'opt' compares the distributions of drafter and target; choose a temperature above 0 and a method that "
    "samples its draft, or deferral top_tokens"
)


class SpeculativeCascade(BaseOptions):
    """Speculative cascades on chains ("Faster Cascades via Speculative Decoding", 2405.19261). Lossy.

    Rejection sampling with a mixture of p and q as its target. `top_tokens` keeps q for the tokens with
    p(x) >= (1 - alpha) max p, and takes the rest of q's mass from p. `opt` is p where max q < max p - alpha D_TV(p, q),
    else q. alpha 0 defers most often. The token after a fully accepted chain is sampled from p.

    A draft that was not sampled has a one-hot q, for which only `top_tokens` is defined: a top token is accepted,
    others by rejection sampling from p. Greedy decoding accepts the top tokens of p at temperature 1.
    """

    deferral: str = setting("top_tokens", "when the target decides, not the drafter", choices=("top_tokens", "opt"))
    alpha: float = setting(0.5, "tolerance: 0 defers to the target most often, 1 least often", 0.0, 1.0, 0.05)
    exact: ClassVar[bool] = False
    note: ClassVar[str] = ""

    def __call__(self, draft: Draft, target: Tensor, rng: Generator | None) -> AcceptResult:
        if not draft.nodes:
            return Lossless()(draft, target, rng)
        check_chain(draft, "speculative_cascade")
        if self.deferral == "opt" and (rng is None or draft.probs is None):
            raise ValueError(NEEDS_Q)
        numbers = None if rng is None else coins(draft, rng)
        p = target.float().softmax(-1) if rng is None else target
        mixture = p if draft.probs is None else self._mixture(p, draft.probs)
        accepted = ~rejected_by_lossless(draft, target if rng is None else mixture, numbers)
        if draft.probs is None:
            accepted = accepted | (token_probs(p, draft.parents, draft.tokens) >= self._bar(p))
        accepted &= draft.tokens != ABSENT
        _, host_accepted, host_rejected = read_nodes(draft, accepted, rejected_by_lossless(draft, target, numbers))
        path = [list(range((*row, 0.0).index(0.0) + 1)) for row in host_accepted]
        last = end_probs(target, path) if rng is None else chain_residual(draft, mixture, path)
        return AcceptResult(path, draw(last, rng), changed=count_changed(host_rejected, path))

    def _bar(self, p: Tensor) -> Tensor:
        """Return the smallest probability [B, N] of a top token."""
        return (1.0 - self.alpha) * p[:, :-1].amax(-1)

    def _mixture(self, p: Tensor, q: Tensor) -> Tensor:
        """Return the distribution [B, S, V] that replaces p; p in the last slot, where nothing was drafted."""
        drafted = p[:, :-1]
        if self.deferral == "opt":
            distance = 0.5 * (drafted - q).abs().sum(-1)
            defers = q.amax(-1) < drafted.amax(-1) - self.alpha * distance
            mixture = torch.where(defers[..., None], drafted, q)
        else:
            of_drafter = q * (drafted >= self._bar(p)[..., None])
            mixture = of_drafter + drafted * (q.sum(-1) - of_drafter.sum(-1))[..., None]
        return torch.cat([mixture, p[:, -1:]], 1)
