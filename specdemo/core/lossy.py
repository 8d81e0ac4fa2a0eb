"""Lossy acceptance rules: typical acceptance, FLy verification and speculative cascades.

B rows, N draft tokens, of a chain but for typical acceptance, S = N + 1 slots, V vocabulary; p target, q draft.
"""

from dataclasses import replace
from math import log
from typing import ClassVar, Self

import torch
from pydantic import model_validator
from torch import Generator, Tensor

from specdemo.core.accept import (
    AcceptResult,
    Lossless,
    accept_greedy,
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


class Typical(BaseOptions):
    """Typical acceptance of Medusa (2401.10774). Lossy: the output does not follow the target's distribution.

    A node is accepted if its parent is and p(x) > min(epsilon, delta * exp(-H(p))), with H the entropy of p at the
    parent. The longest accepted path wins, ties go to the more likely one. The final token is sampled from the full p
    after the path, so every step outputs at least one token. Greedy decoding equals the lossless rule.
    """

    epsilon: float = setting(0.09, "largest probability that a token needs", step=0.01)
    delta: float = setting(0.3, "factor of exp(-entropy), the probability that a token needs if p is flat", step=0.05)
    exact: ClassVar[bool] = False
    note: ClassVar[str] = ""

    @model_validator(mode="after")
    def _check_thresholds(self) -> Self:
        if not 0.0 < self.epsilon < 1.0 or self.delta <= 0.0:
            raise ValueError(f"epsilon must be in (0, 1) and delta above 0, not {self.epsilon} and {self.delta}")
        return self

    def __call__(self, draft: Draft, target: Tensor, rng: Generator | None) -> AcceptResult:
        if rng is None:
            return replace(accept_greedy(draft, target), changed=[0] * len(target))
        rejected = rejected_by_lossless(draft, target, coins(draft, rng))
        entropy = torch.special.entr(target).sum(-1)
        thresholds = (self.delta * torch.exp(-entropy)).clamp_max(self.epsilon).gather(1, draft.parents)
        nodes, target_probs, host_thresholds, host_rejected = read_nodes(
            draft, token_probs(target, draft.parents, draft.tokens), thresholds, rejected
        )
        path = [
            _longest_path(*row) for row in zip(nodes.tokens, nodes.parents, target_probs, host_thresholds, strict=True)
        ]
        return AcceptResult(path, draw(end_probs(target, path), rng), changed=count_changed(host_rejected, path))


def _longest_path(
    tokens: list[int], parents: list[int], target_probs: list[float], thresholds: list[float]
) -> list[int]:
    """Return one row's longest path of nodes above their thresholds. Ties go to the higher product of probabilities."""
    paths: dict[int, tuple[int, float, list[int]]] = {0: (0, 0.0, [0])}
    for node, (x, parent) in enumerate(zip(tokens, parents, strict=True)):
        if x != ABSENT and parent in paths and target_probs[node] > thresholds[node]:
            depth, likelihood, slots = paths[parent]
            paths[node + 1] = (depth + 1, likelihood + log(target_probs[node]), [*slots, node + 1])
    return max(paths.values(), key=lambda path_entry: path_entry[:2])[2]


LARGEST_WINDOW = 6


class Fly(BaseOptions):
    """Deferred verification of chains (FLy, 2511.22972), as in vLLM 0.33. Lossy.

    The lossless rule decides on every token. A rejected token is accepted all the same if the target is uncertain
    there, p(x) > 0, and the next `window` tokens of the draft are accepted by the lossless rule. The target is
    uncertain if the `top_k` largest probabilities contribute at least `threshold` nats to its entropy. The first other
    rejection ends the path. Greedy decoding measures the uncertainty at temperature 1.
    """

    window: int = setting(
        0, f"next draft tokens that the lossless rule must accept; 0: min({LARGEST_WINDOW}, draft length - 1)", 0, 15, 1
    )
    threshold: float = setting(0.3, "smallest entropy, in nats, at which a rejection is deferred", 0.0, 5.0, 0.05)
    top_k: int = setting(3, "number of largest probabilities that count for the entropy", 1, 100, 1)
    exact: ClassVar[bool] = False
    note: ClassVar[str] = ""

    def __call__(self, draft: Draft, target: Tensor, rng: Generator | None) -> AcceptResult:
        if not draft.nodes:
            return Lossless()(draft, target, rng)
        check_chain(draft, "fly")
        numbers = None if rng is None else coins(draft, rng)
        rejected = rejected_by_lossless(draft, target, numbers)
        p = target.float().softmax(-1) if rng is None else target
        entropy = torch.special.entr(p[:, :-1].topk(min(self.top_k, p.shape[-1])).values).sum(-1)
        possible = token_probs(p, draft.parents, draft.tokens) > 0.0
        deferrable = possible & (entropy >= self.threshold)
        nodes, host_rejected, host_deferrable = read_nodes(draft, rejected, deferrable)
        window = self.window or min(LARGEST_WINDOW, draft.nodes - 1)
        rows = zip(nodes.tokens, host_rejected, host_deferrable, strict=True)
        path = [list(range(_accepted(*row, window) + 1)) for row in rows]
        next_token = draw(end_probs(target, path) if rng is None else chain_residual(draft, target, path), rng)
        return AcceptResult(path, next_token, changed=count_changed(host_rejected, path))


def _accepted(tokens: list[int], rejected: list[float], deferrable: list[float], window: int) -> int:
    length = tokens.index(ABSENT) if ABSENT in tokens else len(tokens)
    for i in range(length):
        end = i + 1 + window
        deferred = deferrable[i] and window > 0 and end <= length and not any(rejected[i + 1 : end])
        if rejected[i] and not deferred:
            return i
    return length


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
