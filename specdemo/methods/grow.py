"""Shapes of draft trees. B rows, K frontier nodes, N draft nodes, V vocabulary.

Two ways to a tree: a `Shape` is fixed before the text is known and says which rank of which head sits where (Medusa,
2401.10774, section 2.3.3); `grow` follows the drafter's own probabilities (EAGLE-2, 2406.16858, section 4).
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from specdemo.core.protocol import Budget
from specdemo.core.tree import Draft

Path = tuple[int, ...]  # the rank chosen at every level, from the root down
Expand = Callable[[Tensor, Tensor], Tensor]  # tokens [B, K], parents [B, K] -> log q [B, K, V]


@dataclass(frozen=True, slots=True)
class Shape:
    """Node i hangs below slot `parents[i]`, is on level `levels[i]` (1: below the root) and holds rank `ranks[i]`."""

    parents: tuple[int, ...]
    levels: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def width(self) -> int:
        """How many ranks it asks of a head."""
        return 1 + max(self.ranks, default=-1)

    @property
    def depth(self) -> int:
        """Levels below the root."""
        return max(self.levels, default=0)

    @property
    def lasts(self) -> tuple[bool, ...]:
        """Of every node whether it is the last child of its slot."""
        last = {parent: node for node, parent in enumerate(self.parents)}
        return tuple(last[parent] == node for node, parent in enumerate(self.parents))

    @staticmethod
    def of(paths: Sequence[Path]) -> "Shape":
        """Paths in any order. Raises ValueError when one lacks its beginning."""
        ordered = sorted(set(paths), key=lambda path: (len(path), path))
        slot = {(): 0} | {path: i + 1 for i, path in enumerate(ordered)}
        for path in ordered:
            if path[:-1] not in slot:
                raise ValueError(f"the tree has {path} but not {path[:-1]}, which it hangs from")
        return Shape(tuple(slot[p[:-1]] for p in ordered), tuple(map(len, ordered)), tuple(p[-1] for p in ordered))

    def paths(self) -> list[Path]:
        """The way from the root to every node, as ranks among siblings."""
        found: list[Path] = [()]
        for parent, rank in zip(self.parents, self.ranks, strict=True):
            found.append((*found[parent], rank))
        return found[1:]


@lru_cache(maxsize=256)
def within(shape: Shape, budget: Budget) -> Shape:
    """What a budget leaves of a shape: its upper levels, and of these the low ranks first."""
    paths = [path for path in shape.paths() if len(path) <= budget.depth]
    paths.sort(key=lambda path: (sum(path), len(path)))  # a beginning is never after what hangs from it
    return Shape.of(paths[: budget.nodes])


def chain(depth: int) -> Shape:
    """The shape of a chain of `depth` nodes."""
    return Shape(tuple(range(depth)), tuple(range(1, depth + 1)), (0,) * depth)


def fitted(rates: Sequence[Sequence[float]], nodes: int) -> Shape:
    """The tree of `nodes` nodes that keeps most tokens when head i's rank r is right with chance rates[i][r].

    Heads are taken as independent, as in Medusa's appendix: a node's gain is the product along its path, so picking
    the best candidate again and again is optimal.
    """
    best: list[tuple[float, Path]] = []

    def offer(path: Path, chance: float) -> None:
        level = len(path)
        if level < len(rates):
            for rank, rate in enumerate(rates[level]):
                heapq.heappush(best, (-chance * rate, (*path, rank)))

    offer((), 1.0)
    chosen: list[Path] = []
    while best and len(chosen) < nodes:
        chance, path = heapq.heappop(best)
        if chance < 0.0:
            chosen.append(path)
            offer(path, -chance)
    return Shape.of(chosen)


def grow(first: Tensor, expand: Expand, budget: Budget, top_k: int) -> Draft:
    """The `budget.nodes` likeliest nodes of a tree that widens where the drafter is sure.

    first [B, V]: log q after the root. `expand` reads a frontier of K tokens, each below the node `parents` of the
    frontier before it, and says log q after each. A node's score is the log-probability of its path; the K best of a
    level are expanded, and of all nodes seen the best are drafted. They are ranked, not drawn: probs None.
    """
    batch, vocabulary = first.shape
    if budget.depth < 1 or budget.nodes < 1:
        return Draft.empty(batch, first.device)
    width = min(top_k, vocabulary)
    scores, tokens = first.topk(width)  # the frontier: [B, K]
    frontier = torch.arange(width, device=first.device).expand(batch, -1)  # its places among all nodes seen
    all_scores, all_tokens, all_chances = [scores], [tokens], [scores]
    all_parents = [torch.full_like(tokens, -1)]
    parents = torch.zeros_like(tokens)
    seen = width
    for _ in range(1, budget.depth):
        chances, children = expand(tokens, parents).topk(width)  # [B, K, K]
        paths = (scores[..., None] + chances).flatten(1)
        all_scores.append(paths)
        all_chances.append(chances.flatten(1))
        all_tokens.append(children.flatten(1))
        all_parents.append(frontier.repeat_interleave(width, 1))
        scores, best = paths.topk(width)
        parents = best // width
        tokens = children.flatten(1).gather(1, best)
        frontier = best + seen
        seen += paths.shape[1]
    above = torch.cat(all_parents, 1) + 1  # as slots; the root is 0
    scored = torch.cat(all_scores, 1), torch.cat(all_chances, 1).exp().clamp_max(1.0)
    return pruned(torch.cat(all_tokens, 1), above, *scored, budget.nodes)


def pruned(tokens: Tensor, parents: Tensor, scores: Tensor, confidence: Tensor, nodes: int) -> Draft:
    """The `nodes` best of a tree's nodes [B, N]; parents are slots and never score less than their children."""
    # stable: of equal scores the earlier, so that a parent is never left out for its child
    kept = torch.argsort(scores, dim=1, descending=True, stable=True)[:, :nodes].sort(1).values
    slots = torch.zeros(len(tokens), tokens.shape[1] + 1, dtype=torch.int64, device=tokens.device)
    slots.scatter_(1, kept + 1, torch.arange(1, kept.shape[1] + 1, device=tokens.device).expand_as(kept))
    above = slots.gather(1, parents.gather(1, kept))
    return Draft(tokens.gather(1, kept), above, confidence=confidence.gather(1, kept))
