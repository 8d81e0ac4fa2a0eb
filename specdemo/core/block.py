"""Block verification. B rows, N draft nodes, V vocabulary; p target, q draft."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor

from specdemo.core.accept import AcceptResult, Lossless, at_tokens, coins, or_target
from specdemo.core.sampling import draw
from specdemo.core.tree import ABSENT, Draft, is_chain

TOKEN_BY_TOKEN = "the draft is not a sampled chain, so its tokens are accepted one by one and not as a block"


@dataclass(slots=True)
class Block:
    """Block verification of sampled chains (Sun et al., 2403.10444).

    Accepts at least as many tokens as `Lossless` in expectation, and more where a token that q overrates is followed by
    one that q underrates.

    The first i tokens have the joint probability P[i] = min(1, P[i - 1] p(x) / q(x)), P[0] = 1. Prefix i passes with
    probability h = R / (R + 1 - P[i]), where R = sum max(P[i] p - q, 0) over the next token, and h = P[i] at the end of
    the chain. The longest prefix that passes is the path. The final token is sampled from max(P p - q, 0) after it, or
    from p after a fully accepted chain.

    Lossless if every token was sampled from its q, and draft and coins are new in every step: coins after the path took
    part in choosing it. Whether there is a next token may depend on the earlier ones. For one-hot drafts the rule
    equals `Lossless` in distribution; these and trees are passed on to `Lossless`.
    """

    note: str = ""
    exact: ClassVar[bool] = True

    def __call__(self, draft: Draft, target: Tensor, rng: Generator | None) -> AcceptResult:
        if rng is None or not draft.nodes:
            return Lossless()(draft, target, rng)
        if draft.probs is None or not is_chain(draft.parents):
            self.note = TOKEN_BY_TOKEN
            return Lossless()(draft, target, rng)
        numbers, present = coins(draft, rng), draft.tokens != ABSENT
        p, q = at_tokens(target[:, :-1], draft.tokens), at_tokens(draft.probs, draft.tokens)
        joint = _joint_probs(p / q.clamp_min(torch.finfo(q.dtype).tiny))
        residual_mass = (joint[:, :-1, None] * target[:, 1:-1] - draft.probs[:, 1:]).clamp_min_(0.0).sum(-1)
        accept_probs = torch.where(present[:, 1:], _share_or_one(residual_mass, 1.0 - joint[:, :-1]), joint[:, :-1])
        accepted = present & (numbers < torch.cat([accept_probs, joint[:, -1:]], 1))
        lengths = (accepted * torch.arange(1, draft.nodes + 1, device=accepted.device)).amax(1)
        scale = torch.cat([torch.ones_like(joint[:, :1]), joint], 1).gather(1, lengths[:, None])
        p_end = target[torch.arange(len(target), device=target.device), lengths]
        next_token = draw(or_target(_block_residual(draft, draft.probs, lengths, scale * p_end), p_end), rng)
        return AcceptResult([list(range(n + 1)) for n in lengths.tolist()], next_token)


def _joint_probs(ratios_pq: Tensor) -> Tensor:
    """Return the joint ratios [B, N] of all prefixes from p / q [B, N], capped at 1 after every token."""
    joint = [ratios_pq[:, 0].clamp_max(1.0)]
    for ratio in ratios_pq.unbind(1)[1:]:
        joint.append((joint[-1] * ratio).clamp_max(1.0))
    return torch.stack(joint, 1)


def _share_or_one(part: Tensor, other: Tensor) -> Tensor:
    """Return part / (part + other); 1 where both are zero."""
    total = part + other
    return torch.where(total > 0.0, part / total, 1.0)


def _block_residual(draft: Draft, probs: Tensor, lengths: Tensor, p: Tensor) -> Tensor:
    """Return what remains of the scaled p [B, V] after a path of lengths [B]: p - q of the next draft token, or p
    without one."""
    rows, following = torch.arange(len(p), device=p.device), lengths.clamp_max(draft.nodes - 1)
    drafted = (lengths < draft.nodes) & (draft.tokens[rows, following] != ABSENT)
    return torch.where(drafted[:, None], (p - probs[rows, following]).clamp_min(0.0), p)
