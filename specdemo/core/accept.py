"""Which drafted tokens are kept. B rows, N draft nodes, S = N + 1 slots, V vocabulary; p target, q draft.

A rule walks a draft tree from the root down with the target's distribution at every slot and ends with one token of the
target's own. It is pure: no model, no cache, no global randomness. Coins [B, N] are drawn first, one per node whether
used or not, then the noise of the bonus; two rules given equal generators therefore see equal coins.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import log
from typing import Any, ClassVar, Protocol

import torch
from torch import Generator, Tensor

from specdemo.core.host import to_device
from specdemo.core.sampling import draw
from specdemo.core.suggest import suggest
from specdemo.core.tree import ABSENT, Draft, is_chain


@dataclass(frozen=True, slots=True)
class Verdict:
    path: list[list[int]]  # per row: kept slots from the root down, starts with 0
    bonus: Tensor  # [B] int64, drawn from what is left of p after the path
    said: list[list[int]] | None = None  # per row: the kept tokens and the bonus, where the host has them already


class AcceptRule(Protocol):
    @property
    def exact(self) -> bool:
        """True: whatever the draft, the output is distributed as plain sampling from the target."""

    @property
    def note(self) -> str:
        """Why it did otherwise than its name says; empty where it did not."""

    def __call__(self, draft: Draft, target: Tensor, rng: Generator | None) -> Verdict:
        """target [B, S, V] probabilities after each slot. `rng` None says that decoding is greedy: then each is a
        one-hot, or anything else with its maximum there, such as the logits."""


class Lossless:
    """Multi-round rejection sampling on any tree (SpecInfer, 2305.09781; on a chain 2211.17192, algorithm 1).

    The children of a slot are tried in order. Child x, drawn from q, is kept when `coin * q(x) < p(x)`: strict, so a
    token with p = 0 never passes. Refused, it leaves p <- norm(max(p - q, 0)) to the next child and, after the last
    one, to the bonus.

    Exact when every node was drawn from its own q given what was drawn before it: a round puts out min(p, q) and leaves
    what is missing from p to the next. So siblings may be drawn i.i.d. with replacement from one q (each gives that q;
    a repeated token finds p = 0, since refusal means q >= p there), or without replacement (each gives the q that was
    left for it). Whether a node exists must not depend on its own token; whether it has children may. `probs` None is a
    one-hot q: refusal strikes the token out of p, exact for every draft.
    """

    exact: ClassVar[bool] = True
    note: ClassVar[str] = ""

    def __call__(self, draft: Draft, target: Tensor, rng: Generator | None) -> Verdict:
        if rng is None:
            return _greedy(draft, target)
        if not draft.nodes:
            return Verdict([[0] for _ in range(len(target))], draw(target[:, 0], rng))
        bars = _coins(draft, rng)
        chances = _pick(target, draft.parents, draft.tokens)
        if draft.probs is not None:
            bars = bars * draft.probs.gather(-1, draft.tokens.clamp_min(0)[..., None])[..., 0]
        nodes, heights, odds = _read(draft, bars, chances)
        given = None
        if draft.probs is not None and any(len(set(row)) < len(row) for row in nodes.parents):
            given = _given_elders(draft, draft.probs, target, nodes)
            odds = given.gather(-1, draft.tokens.clamp_min(0)[..., None])[..., 0].tolist()
        lists = zip(nodes.tokens, nodes.parents, heights, odds, strict=True)
        path = [_walk(*row, one_hot=draft.probs is None) for row in lists]
        return Verdict(path, draw(_left(draft, target, given, nodes, path), rng))


ONE_BY_ONE = "its draft is no chain drawn from a distribution, so its tokens are accepted one by one, not as a block"


@dataclass(slots=True)
class Block:
    """Block verification of sampled chains (Sun et al. 2403.10444): never keeps fewer tokens than `Lossless`, in
    expectation, and more where a token that q overrates is followed by one that it underrates.

    The first i tokens are weighed together, P[i] = min(1, P[i - 1] p(x) / q(x)), P[0] = 1, and kept with a chance that
    makes P[i] of it: h = R / (R + 1 - P[i]), R = sum max(P[i] p - q, 0) over what may follow, h = P[i] behind the last.
    The longest of these beginnings that its own coin keeps is the path. The bonus is drawn from max(P p - q, 0) behind
    it; behind the whole chain from p.

    Exact when every token was drawn from its q and coins and drafts are new in every step: those behind the path took
    part in choosing it. Whether there is a next token may depend on the ones before it. For a one-hot q the rule is
    that of `Lossless` in distribution, and a tree is left to it too.
    """

    note: str = ""
    exact: ClassVar[bool] = True

    def __call__(self, draft: Draft, target: Tensor, rng: Generator | None) -> Verdict:
        if rng is None or not draft.nodes:
            return Lossless()(draft, target, rng)
        if draft.probs is None or not is_chain(draft.parents):
            self.note = ONE_BY_ONE
            return Lossless()(draft, target, rng)
        coins, there = _coins(draft, rng), draft.tokens != ABSENT
        p, q = (x.gather(-1, draft.tokens.clamp_min(0)[..., None])[..., 0] for x in (target[:, :-1], draft.probs))
        joint = _joint(p / q.clamp_min(torch.finfo(q.dtype).tiny))
        left = (joint[:, :-1, None] * target[:, 1:-1] - draft.probs[:, 1:]).clamp_min_(0.0).sum(-1)
        chance = torch.where(there[:, 1:], _share(left, 1.0 - joint[:, :-1]), joint[:, :-1])
        kept = there & (coins < torch.cat([chance, joint[:, -1:]], 1))
        lengths = (kept * torch.arange(1, draft.nodes + 1, device=kept.device)).amax(1)
        scale = torch.cat([torch.ones_like(joint[:, :1]), joint], 1).gather(1, lengths[:, None])
        ends = target[torch.arange(len(target), device=target.device), lengths]
        bonus = draw(_unless_empty(_behind(draft, draft.probs, lengths, scale * ends), ends), rng)
        return Verdict([list(range(n + 1)) for n in lengths.tolist()], bonus)


@dataclass(frozen=True, slots=True)
class Typical:
    """Medusa's typical acceptance (2401.10774). Lossy: the output is not distributed as the target's.

    A node is kept when its parent is and p(x) > min(epsilon, delta * exp(-H(p))), H the entropy of p at the parent. The
    longest kept path wins, then the likelier one. The bonus is drawn from the whole p behind the path, so every
    step emits a token that no threshold can veto. Greedy, p is a one-hot and the rule the lossless one.
    """

    epsilon: float = 0.09
    delta: float = 0.3
    exact: ClassVar[bool] = False
    note: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if not 0.0 < self.epsilon < 1.0 or self.delta <= 0.0:
            raise ValueError(f"epsilon must be in (0, 1) and delta above 0, not {self.epsilon} and {self.delta}")

    def __call__(self, draft: Draft, target: Tensor, rng: Generator | None) -> Verdict:
        if rng is None:
            return _greedy(draft, target)
        entropy = torch.special.entr(target).sum(-1)
        thresholds = (self.delta * torch.exp(-entropy)).clamp_max(self.epsilon).gather(1, draft.parents)
        nodes, odds, least = _read(draft, _pick(target, draft.parents, draft.tokens), thresholds)
        path = [_longest(*row) for row in zip(nodes.tokens, nodes.parents, odds, least, strict=True)]
        return Verdict(path, draw(_ends(target, path), rng))


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Keeps the tokens of a chain by chance, whatever they and the target say. Lossy: a cost model of a draft that is
    right so often. vLLM has it under this name (config/speculative.py, 0.32).

    rates: the chance that the token at a position is kept where all before it are; past their end the last goes on.
    Behind the path stands the target's own token. coins: the chances' own noise, as greedy decoding has none.
    """

    rates: tuple[float, ...]
    coins: Generator
    exact: ClassVar[bool] = False
    note: ClassVar[str] = ""

    def __call__(self, draft: Draft, target: Tensor, rng: Generator | None) -> Verdict:
        rates = [*self.rates, *self.rates[-1:] * (draft.nodes - len(self.rates))][: draft.nodes]
        chances = to_device(rates, draft.tokens.device, torch.float32)
        kept = (_coins(draft, self.coins) < chances) & (draft.tokens != ABSENT)
        path = [list(range(n + 1)) for n in kept.int().cumprod(1).sum(1).tolist()]
        return Verdict(path, draw(_ends(target, path), rng))


RULES: dict[str, Callable[[], AcceptRule]] = {"lossless": Lossless, "block": Block, "typical": Typical}


def accept_rule(name: str) -> AcceptRule:
    """The rule of that name with its default options. Raises ValueError for an unknown name."""
    if name not in RULES:
        raise ValueError(f"unknown acceptance rule {name!r}; {suggest(name, RULES)}")
    return RULES[name]()


@dataclass(frozen=True, slots=True)
class _Nodes:
    """A draft on the host."""

    tokens: list[list[int]]
    parents: list[list[int]]

    def children(self, row: int, slot: int) -> list[int]:
        pairs = zip(self.tokens[row], self.parents[row], strict=True)
        return [node for node, (x, parent) in enumerate(pairs) if parent == slot and x != ABSENT]


def _read(draft: Draft, *numbers: Tensor) -> tuple[Any, ...]:
    """The nodes, and numbers [B, N] in fp32, on the host by one synchronisation."""
    whole = [draft.tokens.int(), draft.parents.int(), *(x.float().view(torch.int32) for x in numbers)]
    tokens, parents, *read = torch.cat(whole, 1).cpu().chunk(len(whole), 1)
    return _Nodes(tokens.tolist(), parents.tolist()), *(x.contiguous().view(torch.float32).tolist() for x in read)


def _coins(draft: Draft, rng: Generator) -> Tensor:
    return torch.rand(draft.tokens.shape, generator=rng, device=draft.tokens.device)


def _pick(target: Tensor, parents: Tensor, tokens: Tensor) -> Tensor:
    """target [B, S, V] -> [B, N] the probability of each node's token after its parent; any number where ABSENT."""
    rows = torch.arange(len(tokens), device=tokens.device)[:, None]
    return target[rows, parents, tokens.clamp_min(0)]


def _joint(ratios: Tensor) -> Tensor:
    """p / q of drawn tokens [B, N] -> [B, N] of the beginnings, 1 at most at every token."""
    joint = [ratios[:, 0].clamp_max(1.0)]
    for ratio in ratios.unbind(1)[1:]:
        joint.append((joint[-1] * ratio).clamp_max(1.0))
    return torch.stack(joint, 1)


def _share(part: Tensor, other: Tensor) -> Tensor:
    """part / (part + other), where both are zero 1"""
    whole = part + other
    return torch.where(whole > 0.0, part / whole, 1.0)


def _behind(draft: Draft, probs: Tensor, lengths: Tensor, p: Tensor) -> Tensor:
    """What the path [B] leaves of p [B, V], already scaled, to the bonus; all of it where no drafted token follows."""
    rows, following = torch.arange(len(p), device=p.device), lengths.clamp_max(draft.nodes - 1)
    drafted = (lengths < draft.nodes) & (draft.tokens[rows, following] != ABSENT)
    return torch.where(drafted[:, None], (p - probs[rows, following]).clamp_min(0.0), p)


def _residual(p: Tensor, q: Tensor) -> Tensor:
    """p, q [..., V] -> norm(max(p - q, 0)); all zero where nothing is left, never NaN."""
    left = (p - q).clamp_min_(0.0)
    return left / left.sum(-1, keepdim=True).clamp_min(torch.finfo(left.dtype).tiny)


def _unless_empty(left: Tensor, p: Tensor) -> Tensor:
    """Rounding can leave nothing of a p that was refused with q == p up to the last bit; then p itself."""
    return torch.where(left.sum(-1, keepdim=True) > 0.0, left, p)


def _greedy(draft: Draft, target: Tensor) -> Verdict:
    """Follow the argmax: the test `coin * q(x) < p(x)` on a one-hot p, whatever coin and q."""
    best = target.argmax(-1)
    n = draft.nodes
    if not n:
        return Verdict([[0] for _ in range(len(best))], best[:, 0])
    path, said = [], []
    for row in torch.cat([draft.tokens, draft.parents, best], 1).tolist():
        slots, wanted = [0], row[2 * n]
        for node in range(n):
            if row[node] == wanted and row[n + node] == slots[-1]:
                slots.append(node + 1)
                wanted = row[2 * n + node + 1]
        path.append(slots)
        said.append([*(row[slot - 1] for slot in slots[1:]), wanted])
    if len(path) == 1:
        return Verdict(path, best[:, path[0][-1]], said)
    ends = to_device([[slots[-1]] for slots in path], best.device)
    return Verdict(path, best.gather(1, ends)[:, 0], said)


def _walk(tokens: list[int], parents: list[int], bars: list[float], chances: list[float], one_hot: bool) -> list[int]:
    """One row's kept slots. bars: coin * q(x). chances: p(x) given that the elder siblings were refused.

    For a one-hot q chances are p(x) as it stands: what refused tokens had is missing from the mass, which needs no
    vocabulary-wide work.
    """
    slots, mass = [0], 1.0
    refused: set[int] = set()
    for node, (x, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent != slots[-1] or x == ABSENT or x in refused:
            continue
        if bars[node] * mass < chances[node]:
            slots.append(node + 1)
            refused, mass = set(), 1.0
        elif one_hot:
            refused.add(x)
            mass = max(mass - chances[node], 0.0)  # below zero, rounding would let a zero-probability token pass
    return slots


def _given_elders(draft: Draft, probs: Tensor, target: Tensor, nodes: _Nodes) -> Tensor:
    """-> [B, N, V] what each node finds left of p once its elder siblings were refused.

    That does not depend on the coins, so all k-th children of all slots of all rows are worked out together.
    """
    rows = torch.arange(len(target), device=target.device)[:, None]
    given = target[rows, draft.parents]
    for pairs in _generations(nodes):
        row, elder, node = to_device(pairs, target.device).T
        given[row, node] = _residual(given[row, elder], probs[row, elder])
    return given


def _generations(nodes: _Nodes) -> list[list[tuple[int, int, int]]]:
    """(row, elder, node) of every present node with an elder sibling; entry k holds all children number k + 1."""
    generations: list[list[tuple[int, int, int]]] = []
    for row, parents in enumerate(nodes.parents):
        for slot in set(parents):
            siblings = nodes.children(row, slot)
            generations += [[] for _ in range(len(siblings) - 1 - len(generations))]
            for k, (elder, node) in enumerate(pairwise(siblings)):
                generations[k].append((row, elder, node))
    return generations


def _ends(target: Tensor, path: list[list[int]]) -> Tensor:
    """-> [B, V] the target's distribution behind each row's path."""
    if len(path) == 1:
        return target[:, path[0][-1]]
    end = to_device([slots[-1] for slots in path], target.device)
    return target[torch.arange(len(path), device=target.device), end]


def _left(draft: Draft, target: Tensor, given: Tensor | None, nodes: _Nodes, path: list[list[int]]) -> Tensor:
    """-> [B, V] what is left of p behind each row's path after all children there were refused."""
    p = _ends(target, path)
    refused = [(row, node) for row, slots in enumerate(path) for node in nodes.children(row, slots[-1])]
    if not refused:
        return p
    if draft.probs is None:
        row, node = to_device(refused, target.device).T
        left = p.clone()
        left[row, draft.tokens[row, node]] = 0.0
    else:
        row, node = to_device(list(dict(refused).items()), target.device).T  # the last child of each row
        found = p[row] if given is None else given[row, node]
        left = p.clone()
        left[row] = _residual(found, draft.probs[row, node])
    return _unless_empty(left, p)


def _longest(tokens: list[int], parents: list[int], chances: list[float], thresholds: list[float]) -> list[int]:
    """One row's longest path of nodes above their thresholds, ties to the higher product of probabilities."""
    paths: dict[int, tuple[int, float, list[int]]] = {0: (0, 0.0, [0])}
    for node, (x, parent) in enumerate(zip(tokens, parents, strict=True)):
        if x != ABSENT and parent in paths and chances[node] > thresholds[node]:
            depth, likelihood, slots = paths[parent]
            paths[node + 1] = (depth + 1, likelihood + log(chances[node]), [*slots, node + 1])
    return max(paths.values(), key=lambda found: found[:2])[2]
