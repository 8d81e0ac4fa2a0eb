"""Acceptance rules. B rows, N draft nodes, S = N + 1 slots, V vocabulary; p target, q draft.

A rule walks a draft tree from the root down with the target's distribution at every slot. It returns the accepted path
and one more token, sampled from what remains of p. Rules are pure: no model, no cache, no global random state. They
draw one uniform number per node, used or not, then the noise of the final token, so two rules with equal generators see
equal numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import log
from typing import Any, ClassVar, Protocol

import torch
from torch import Generator, Tensor

from specdemo.core.host_copy import to_device
from specdemo.core.sampling import draw
from specdemo.core.suggest import suggest
from specdemo.core.tree import ABSENT, Draft, is_chain


@dataclass(frozen=True, slots=True)
class AcceptResult:
    """Result of an acceptance rule."""

    path: list[list[int]]  # per row: accepted slots from the root down, starts with 0
    next_token: Tensor  # [B] int64, the correction or bonus token after the path
    output_tokens: list[list[int]] | None = None  # per row: accepted tokens and the next token, if they are on the host


class AcceptRule(Protocol):
    """Protocol of an acceptance rule."""

    @property
    def exact(self) -> bool:
        """Return True if the output follows the target's distribution for every draft."""

    @property
    def note(self) -> str:
        """Return why the rule fell back to another one; empty if it did not."""

    def __call__(self, draft: Draft, target: Tensor, rng: Generator | None) -> AcceptResult:
        """Accept a path of the draft.

        target: probabilities [B, S, V] after each slot. rng None: greedy decoding. Then target may be any scores with
        the same argmax, such as logits.
        """


class Lossless:
    """Multi-round rejection sampling on any tree (SpecInfer, 2305.09781; on a chain 2211.17192, algorithm 1).

    The children of a slot are tried in order. Child x, sampled from q, is accepted if `coin * q(x) < p(x)`. The
    inequality is strict, so a token with p = 0 is never accepted. After a rejection p becomes norm(max(p - q, 0)) for
    the next child and, after the last child, for the final token.

    The rule is lossless if every node was sampled from its own q given the nodes before it: each round outputs min(p,
    q) and passes the rest of p on. Siblings may be sampled i.i.d. with replacement from one q (all report that q; a
    repeated token meets p = 0, because a rejection means q >= p there), or without replacement (each reports the q that
    remained for it). Whether a node exists must not depend on its own token; whether it has children may. `probs` None
    means a one-hot q: a rejection removes the token from p, which is exact for every draft.
    """

    exact: ClassVar[bool] = True
    note: ClassVar[str] = ""

    def __call__(self, draft: Draft, target: Tensor, rng: Generator | None) -> AcceptResult:
        if rng is None:
            return _accept_greedy(draft, target)
        if not draft.nodes:
            return AcceptResult([[0] for _ in range(len(target))], draw(target[:, 0], rng))
        thresholds = _coins(draft, rng)
        target_probs = _token_probs(target, draft.parents, draft.tokens)
        if draft.probs is not None:
            thresholds = thresholds * draft.probs.gather(-1, draft.tokens.clamp_min(0)[..., None])[..., 0]
        nodes, host_thresholds, host_probs = _read(draft, thresholds, target_probs)
        residuals = None
        if draft.probs is not None and any(len(set(row)) < len(row) for row in nodes.parents):
            residuals = _residuals_after_siblings(draft, draft.probs, target, nodes)
            host_probs = residuals.gather(-1, draft.tokens.clamp_min(0)[..., None])[..., 0].tolist()
        rows = zip(nodes.tokens, nodes.parents, host_thresholds, host_probs, strict=True)
        path = [_walk(*row, one_hot=draft.probs is None) for row in rows]
        return AcceptResult(path, draw(_final_probs(draft, target, residuals, nodes, path), rng))


def lossless_reference(draft: Draft, target: Tensor, rng: Generator | None) -> AcceptResult:
    """Apply `Lossless` row by row and node by node, normalising every residual. Slow; the reference for tests."""
    coins = torch.zeros(draft.tokens.shape) if rng is None else _coins(draft, rng)
    path, residuals = [], []
    for row in range(len(target)):
        slots, p = [0], target[row, 0]
        for node in range(draft.nodes):
            x = int(draft.tokens[row, node])
            if x == ABSENT or int(draft.parents[row, node]) != slots[-1]:
                continue
            q = _one_hot(x, p) if draft.probs is None else draft.probs[row, node]
            if coins[row, node] * q[x] < p[x]:  # strict: a zero-probability token is never accepted
                slots.append(node + 1)
                p = target[row, node + 1]
            else:
                p = _residual(p, q)
        path.append(slots)
        residuals.append(_or_target(p, target[row, slots[-1]]))
    return AcceptResult(path, draw(torch.stack(residuals), rng))


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
        coins, present = _coins(draft, rng), draft.tokens != ABSENT
        p, q = (x.gather(-1, draft.tokens.clamp_min(0)[..., None])[..., 0] for x in (target[:, :-1], draft.probs))
        joint = _joint_probs(p / q.clamp_min(torch.finfo(q.dtype).tiny))
        residual_mass = (joint[:, :-1, None] * target[:, 1:-1] - draft.probs[:, 1:]).clamp_min_(0.0).sum(-1)
        accept_probs = torch.where(present[:, 1:], _share_or_one(residual_mass, 1.0 - joint[:, :-1]), joint[:, :-1])
        accepted = present & (coins < torch.cat([accept_probs, joint[:, -1:]], 1))
        lengths = (accepted * torch.arange(1, draft.nodes + 1, device=accepted.device)).amax(1)
        scale = torch.cat([torch.ones_like(joint[:, :1]), joint], 1).gather(1, lengths[:, None])
        end_probs = target[torch.arange(len(target), device=target.device), lengths]
        next_token = draw(_or_target(_block_residual(draft, draft.probs, lengths, scale * end_probs), end_probs), rng)
        return AcceptResult([list(range(n + 1)) for n in lengths.tolist()], next_token)


def block_reference(draft: Draft, target: Tensor, rng: Generator) -> AcceptResult:
    """Apply `Block` to a sampled chain row by row. Slow; the reference for tests."""
    assert draft.probs is not None
    coins, path, residuals = _coins(draft, rng), [], []
    for row, (p, q) in enumerate(zip(target, draft.probs, strict=True)):
        tokens = [x for x in draft.tokens[row].tolist() if x != ABSENT]
        joint = [torch.ones(())]
        for i, x in enumerate(tokens):
            joint.append((joint[i] * p[i, x] / q[i, x].clamp_min(torch.finfo(q.dtype).tiny)).clamp_max(1.0))
        accepted = 0
        for i in range(1, len(tokens) + 1):
            accept_prob = joint[i]
            if i < len(tokens):
                accept_prob = _share_or_one((joint[i] * p[i] - q[i]).clamp_min(0.0).sum(), 1.0 - joint[i])
            if coins[row, i - 1] < accept_prob:  # a later success overrides earlier failures
                accepted = i
        path.append(list(range(accepted + 1)))
        scaled = joint[accepted] * p[accepted]
        residuals.append(
            _or_target((scaled - q[accepted]).clamp_min(0.0) if accepted < len(tokens) else scaled, p[accepted])
        )
    return AcceptResult(path, draw(torch.stack(residuals), rng))


@dataclass(frozen=True, slots=True)
class Typical:
    """Typical acceptance of Medusa (2401.10774). Lossy: the output does not follow the target's distribution.

    A node is accepted if its parent is and p(x) > min(epsilon, delta * exp(-H(p))), with H the entropy of p at the
    parent. The longest accepted path wins, ties go to the more likely one. The final token is sampled from the full p
    after the path, so every step outputs at least one token. Greedy decoding equals the lossless rule.
    """

    epsilon: float = 0.09
    delta: float = 0.3
    exact: ClassVar[bool] = False
    note: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if not 0.0 < self.epsilon < 1.0 or self.delta <= 0.0:
            raise ValueError(f"epsilon must be in (0, 1) and delta above 0, not {self.epsilon} and {self.delta}")

    def __call__(self, draft: Draft, target: Tensor, rng: Generator | None) -> AcceptResult:
        if rng is None:
            return _accept_greedy(draft, target)
        entropy = torch.special.entr(target).sum(-1)
        thresholds = (self.delta * torch.exp(-entropy)).clamp_max(self.epsilon).gather(1, draft.parents)
        nodes, target_probs, host_thresholds = _read(
            draft, _token_probs(target, draft.parents, draft.tokens), thresholds
        )
        path = [
            _longest_path(*row) for row in zip(nodes.tokens, nodes.parents, target_probs, host_thresholds, strict=True)
        ]
        return AcceptResult(path, draw(_end_probs(target, path), rng))


@dataclass(frozen=True, slots=True)
class SyntheticAcceptance:
    """Accepts tokens of a chain at random, independent of their values. Lossy: simulates a drafter with given
    acceptance rates. vLLM has the same option (config/speculative.py, 0.32).

    rates: probability that the token at a position is accepted if all before it are; the last entry repeats. The final
    token comes from the target. coins: own random generator, since greedy decoding has none.
    """

    rates: tuple[float, ...]
    coins: Generator
    exact: ClassVar[bool] = False
    note: ClassVar[str] = ""

    def __call__(self, draft: Draft, target: Tensor, rng: Generator | None) -> AcceptResult:
        rates = [*self.rates, *self.rates[-1:] * (draft.nodes - len(self.rates))][: draft.nodes]
        accept_probs = to_device(rates, draft.tokens.device, torch.float32)
        accepted = (_coins(draft, self.coins) < accept_probs) & (draft.tokens != ABSENT)
        path = [list(range(n + 1)) for n in accepted.int().cumprod(1).sum(1).tolist()]
        return AcceptResult(path, draw(_end_probs(target, path), rng))


RULES: dict[str, Callable[[], AcceptRule]] = {"lossless": Lossless, "block": Block, "typical": Typical}


def accept_rule(name: str) -> AcceptRule:
    """Return the rule of that name with default options. Raises ValueError for an unknown name."""
    if name not in RULES:
        raise ValueError(f"unknown acceptance rule {name!r}; {suggest(name, RULES)}")
    return RULES[name]()


@dataclass(frozen=True, slots=True)
class _Nodes:
    """Copy of a draft's tokens and parents on the host."""

    tokens: list[list[int]]
    parents: list[list[int]]

    def children(self, row: int, slot: int) -> list[int]:
        pairs = zip(self.tokens[row], self.parents[row], strict=True)
        return [node for node, (x, parent) in enumerate(pairs) if parent == slot and x != ABSENT]


def _read(draft: Draft, *numbers: Tensor) -> tuple[Any, ...]:
    """Copy the nodes, and numbers [B, N] as float32, to the host in one synchronisation."""
    columns = [draft.tokens.int(), draft.parents.int(), *(x.float().view(torch.int32) for x in numbers)]
    tokens, parents, *host_numbers = torch.cat(columns, 1).cpu().chunk(len(columns), 1)
    return _Nodes(tokens.tolist(), parents.tolist()), *(
        x.contiguous().view(torch.float32).tolist() for x in host_numbers
    )


def _coins(draft: Draft, rng: Generator) -> Tensor:
    return torch.rand(draft.tokens.shape, generator=rng, device=draft.tokens.device)


def _token_probs(target: Tensor, parents: Tensor, tokens: Tensor) -> Tensor:
    """Return the probability [B, N] of each node's token after its parent, from target [B, S, V]. Undefined where
    ABSENT."""
    rows = torch.arange(len(tokens), device=tokens.device)[:, None]
    return target[rows, parents, tokens.clamp_min(0)]


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


def _one_hot(x: int, like: Tensor) -> Tensor:
    return torch.zeros_like(like).index_fill_(0, torch.tensor([x], device=like.device), 1.0)


def _residual(p: Tensor, q: Tensor) -> Tensor:
    """Return norm(max(p - q, 0)) for p, q [..., V]; all zeros where nothing remains, never NaN."""
    residual = (p - q).clamp_min_(0.0)
    return residual / residual.sum(-1, keepdim=True).clamp_min(torch.finfo(residual.dtype).tiny)


def _or_target(residual: Tensor, p: Tensor) -> Tensor:
    """Return p where the residual is empty. Rounding can cause that when q == p up to the last bit."""
    return torch.where(residual.sum(-1, keepdim=True) > 0.0, residual, p)


def _accept_greedy(draft: Draft, target: Tensor) -> AcceptResult:
    """Follow the argmax: the test `coin * q(x) < p(x)` for a one-hot p."""
    best = target.argmax(-1)
    n = draft.nodes
    if not n:
        return AcceptResult([[0] for _ in range(len(best))], best[:, 0])
    path, output_tokens = [], []
    for row in torch.cat([draft.tokens, draft.parents, best], 1).tolist():
        slots, expected = [0], row[2 * n]
        for node in range(n):
            if row[node] == expected and row[n + node] == slots[-1]:
                slots.append(node + 1)
                expected = row[2 * n + node + 1]
        path.append(slots)
        output_tokens.append([*(row[slot - 1] for slot in slots[1:]), expected])
    if len(path) == 1:
        return AcceptResult(path, best[:, path[0][-1]], output_tokens)
    ends = to_device([[slots[-1]] for slots in path], best.device)
    return AcceptResult(path, best.gather(1, ends)[:, 0], output_tokens)


def _walk(
    tokens: list[int], parents: list[int], thresholds: list[float], target_probs: list[float], one_hot: bool
) -> list[int]:
    """Return the accepted slots of one row. thresholds: coin * q(x). target_probs: p(x) after the rejection of earlier
    siblings.

    For a one-hot q, target_probs are the original p(x). The probability of rejected tokens is then missing from `mass`,
    which avoids work over the vocabulary.
    """
    slots, mass = [0], 1.0
    rejected: set[int] = set()
    for node, (x, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent != slots[-1] or x == ABSENT or x in rejected:
            continue
        if thresholds[node] * mass < target_probs[node]:
            slots.append(node + 1)
            rejected, mass = set(), 1.0
        elif one_hot:
            rejected.add(x)
            mass = max(mass - target_probs[node], 0.0)  # a negative mass would accept a zero-probability token
    return slots


def _residuals_after_siblings(draft: Draft, probs: Tensor, target: Tensor, nodes: _Nodes) -> Tensor:
    """Return [B, N, V]: what remains of p for each node after its earlier siblings were rejected.

    Independent of the coins, so the k-th children of all slots in all rows are computed together.
    """
    rows = torch.arange(len(target), device=target.device)[:, None]
    residuals = target[rows, draft.parents]
    for pairs in _generations(nodes):
        row, elder, node = to_device(pairs, target.device).T
        residuals[row, node] = _residual(residuals[row, elder], probs[row, elder])
    return residuals


def _generations(nodes: _Nodes) -> list[list[tuple[int, int, int]]]:
    """Return (row, earlier sibling, node) for every present node with an earlier sibling; entry k has all children
    number k + 1."""
    generations: list[list[tuple[int, int, int]]] = []
    for row, parents in enumerate(nodes.parents):
        for slot in set(parents):
            siblings = nodes.children(row, slot)
            generations += [[] for _ in range(len(siblings) - 1 - len(generations))]
            for k, (elder, node) in enumerate(pairwise(siblings)):
                generations[k].append((row, elder, node))
    return generations


def _end_probs(target: Tensor, path: list[list[int]]) -> Tensor:
    """Return the target's distribution [B, V] after each row's path."""
    if len(path) == 1:
        return target[:, path[0][-1]]
    end = to_device([slots[-1] for slots in path], target.device)
    return target[torch.arange(len(path), device=target.device), end]


def _final_probs(
    draft: Draft, target: Tensor, residuals: Tensor | None, nodes: _Nodes, path: list[list[int]]
) -> Tensor:
    """Return what remains of p [B, V] after each row's path and the rejection of all children there."""
    p = _end_probs(target, path)
    rejected = [(row, node) for row, slots in enumerate(path) for node in nodes.children(row, slots[-1])]
    if not rejected:
        return p
    if draft.probs is None:
        row, node = to_device(rejected, target.device).T
        residual = p.clone()
        residual[row, draft.tokens[row, node]] = 0.0
    else:
        row, node = to_device(list(dict(rejected).items()), target.device).T  # the last child of each row
        last_probs = p[row] if residuals is None else residuals[row, node]
        residual = p.clone()
        residual[row] = _residual(last_probs, draft.probs[row, node])
    return _or_target(residual, p)


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
