"""FLy verification. B rows, N draft tokens of a chain, S = N + 1 slots, V vocabulary; p target, q draft."""

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
