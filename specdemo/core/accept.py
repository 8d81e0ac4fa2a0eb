"""Acceptance rules: their interface, the lossless rule, and what rules share. core/rules.py lists all rules.

B rows, N draft nodes, S = N + 1 slots, V vocabulary; p target, q draft.

A rule walks a draft tree from the root down with the target's distribution at every slot. It returns the accepted path
and one more token, sampled from what remains of p. Rules are pure: no model, no cache, no global random state. They
draw one uniform number per node, used or not, then the noise of the final token, so two rules with equal generators see
equal numbers.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Protocol

import torch
from torch import Generator, Tensor

from specdemo.core.host_copy import to_device, to_lists
from specdemo.core.sampling import argmax, draw
from specdemo.core.tree import ABSENT, Draft, is_chain


@dataclass(frozen=True, slots=True)
class AcceptResult:
    """Result of an acceptance rule."""

    path: list[list[int]]  # per row: accepted slots from the root down, starts with 0
    next_token: Tensor  # [B] or [B, 1] int64, the correction or bonus token after the path
    output_tokens: list[list[int]] | None = None  # per row: accepted tokens and the next token, if they are on the host
    changed: list[int] | None = None  # of a lossy rule, per row: accepted tokens that the lossless rule rejects

    @property
    def root(self) -> Tensor:
        """Return the next token [B, 1] as the root of the next step."""
        return self.next_token if self.next_token.ndim == 2 else self.next_token[:, None]


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

        target: probabilities [B, S, V] after each slot. rng None: greedy decoding. Then target contains logits;
        lossless rules accept any scores with the same argmax. Raises ValueError for a draft that it cannot verify.
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
            return accept_greedy(draft, target)
        if not draft.nodes:
            return AcceptResult([[0] for _ in range(len(target))], draw(target[:, 0], rng))
        thresholds = coins(draft, rng)
        target_probs = token_probs(target, draft.parents, draft.tokens)
        if draft.probs is not None:
            thresholds = thresholds * at_tokens(draft.probs, draft.tokens)
        nodes, host_thresholds, host_probs = read_nodes(draft, thresholds, target_probs)
        residuals = None
        if draft.probs is not None and any(len(set(row)) < len(row) for row in nodes.parents):
            residuals = _residuals_after_siblings(draft, draft.probs, target, nodes)
            host_probs = at_tokens(residuals, draft.tokens).tolist()
        rows = zip(nodes.tokens, nodes.parents, host_thresholds, host_probs, strict=True)
        path = [_walk(*row, one_hot=draft.probs is None) for row in rows]
        return AcceptResult(path, draw(_final_probs(draft, target, residuals, nodes, path), rng))


@dataclass(frozen=True, slots=True)
class Nodes:
    """Copy of a draft's tokens and parents on the host."""

    tokens: list[list[int]]
    parents: list[list[int]]

    def children(self, row: int, slot: int) -> list[int]:
        """Return the present nodes below a slot."""
        pairs = zip(self.tokens[row], self.parents[row], strict=True)
        return [node for node, (x, parent) in enumerate(pairs) if parent == slot and x != ABSENT]


def read_nodes(draft: Draft, *numbers: Tensor) -> tuple[Any, ...]:
    """Copy the nodes, and numbers [B, N] as float32, to the host in one synchronisation."""
    columns = [draft.tokens.int(), draft.parents.int(), *(x.float().view(torch.int32) for x in numbers)]
    tokens, parents, *host_numbers = torch.cat(columns, 1).cpu().chunk(len(columns), 1)
    return Nodes(tokens.tolist(), parents.tolist()), *(
        x.contiguous().view(torch.float32).tolist() for x in host_numbers
    )


def coins(draft: Draft, rng: Generator) -> Tensor:
    """Draw one uniform number per node [B, N]."""
    return torch.rand(draft.tokens.shape, generator=rng, device=draft.tokens.device)


def at_tokens(probs: Tensor, tokens: Tensor) -> Tensor:
    """Return the probability [B, N] of each token [B, N] in its distribution, probs [B, N, V]. Undefined where
    ABSENT."""
    return probs.gather(-1, tokens.clamp_min(0)[..., None])[..., 0]


def token_probs(target: Tensor, parents: Tensor, tokens: Tensor) -> Tensor:
    """Return the probability [B, N] of each node's token after its parent, from target [B, S, V]. Undefined where
    ABSENT."""
    rows = torch.arange(len(tokens), device=tokens.device)[:, None]
    return target[rows, parents, tokens.clamp_min(0)]


def rejected_by_lossless(draft: Draft, target: Tensor, numbers: Tensor | None) -> Tensor:
    """Return [B, N]: nodes that the lossless rule rejects with these coins [B, N], if nothing was rejected before them.
    numbers None: greedy decoding, and target contains scores with the same argmax."""
    if numbers is None:
        return draft.tokens != target.argmax(-1).gather(1, draft.parents)
    if draft.probs is not None:
        numbers = numbers * at_tokens(draft.probs, draft.tokens)
    return numbers >= token_probs(target, draft.parents, draft.tokens)


def count_changed(rejected: list[list[float]], path: list[list[int]]) -> list[int]:
    """Return the number of accepted nodes per row among the nodes [B][N] that the lossless rule rejects."""
    return [sum(row[slot - 1] > 0 for slot in slots[1:]) for row, slots in zip(rejected, path, strict=True)]


def chain_residual(draft: Draft, target: Tensor, path: list[list[int]]) -> Tensor:
    """Return what remains of p [B, V] after each row's path in a chain: p without q of the next, rejected token, or p
    without one."""
    p = end_probs(target, path)
    following = to_device([len(slots) - 1 for slots in path], p.device)
    rows, index = torch.arange(len(path), device=p.device), following.clamp_max(draft.nodes - 1)
    token = draft.tokens[rows, index]
    if draft.probs is None:
        residual = p.scatter(1, token.clamp_min(0)[:, None], 0.0)
    else:
        residual = (p - draft.probs[rows, index]).clamp_min_(0.0)
    is_rejected = (following < draft.nodes) & (token != ABSENT)
    return or_target(torch.where(is_rejected[:, None], residual, p), p)


def check_chain(draft: Draft, rule: str) -> None:
    """Raise ValueError if the draft is a tree."""
    if not is_chain(draft.parents):
        raise ValueError(f"acceptance rule {rule!r} verifies chains only and this lane drafts trees; choose 'typical'")


def _residual(p: Tensor, q: Tensor) -> Tensor:
    """Return norm(max(p - q, 0)) for p, q [..., V]; all zeros where nothing remains, never NaN."""
    residual = (p - q).clamp_min_(0.0)
    return residual / residual.sum(-1, keepdim=True).clamp_min(torch.finfo(residual.dtype).tiny)


def or_target(residual: Tensor, p: Tensor) -> Tensor:
    """Return the residual, or p where the residual is empty. Rounding can cause that when q == p up to the last bit."""
    return torch.where(residual.sum(-1, keepdim=True) > 0.0, residual, p)


def accept_greedy(draft: Draft, target: Tensor) -> AcceptResult:
    """Follow the argmax: the test `coin * q(x) < p(x)` for a one-hot p."""
    best = argmax(target)
    if not draft.nodes:
        return AcceptResult([[0] for _ in range(len(best))], best.squeeze(1))
    path, output_tokens = [], []
    for tokens, parents, expected in zip(*to_lists(draft.tokens, draft.parents, best), strict=True):
        slots = [0]
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True), start=1):
            if parent == slots[-1] and token == expected[parent]:
                slots.append(node)
        path.append(slots)
        output_tokens.append([expected[slot] for slot in slots])
    if len(path) == 1:
        return AcceptResult(path, best.select(1, path[0][-1]), output_tokens)
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


def _residuals_after_siblings(draft: Draft, probs: Tensor, target: Tensor, nodes: Nodes) -> Tensor:
    """Return [B, N, V]: what remains of p for each node after its earlier siblings were rejected.

    Independent of the coins, so the k-th children of all slots in all rows are computed together.
    """
    rows = torch.arange(len(target), device=target.device)[:, None]
    residuals = target[rows, draft.parents]
    for pairs in _generations(nodes):
        row, elder, node = to_device(pairs, target.device).T
        residuals[row, node] = _residual(residuals[row, elder], probs[row, elder])
    return residuals


def _generations(nodes: Nodes) -> list[list[tuple[int, int, int]]]:
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


def end_probs(target: Tensor, path: list[list[int]]) -> Tensor:
    """Return the target's distribution [B, V] after each row's path."""
    if len(path) == 1:
        return target[:, path[0][-1]]
    end = to_device([slots[-1] for slots in path], target.device)
    return target[torch.arange(len(path), device=target.device), end]


def _final_probs(draft: Draft, target: Tensor, residuals: Tensor | None, nodes: Nodes, path: list[list[int]]) -> Tensor:
    """Return what remains of p [B, V] after each row's path and the rejection of all children there."""
    p = end_probs(target, path)
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
    return or_target(residual, p)
