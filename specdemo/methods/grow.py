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
class TreeShape:
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
    def last_children(self) -> tuple[bool, ...]:
        """Of every node whether it is the last child of its slot."""
        last = {parent: node for node, parent in enumerate(self.parents)}
        return tuple(last[parent] == node for node, parent in enumerate(self.parents))

    @staticmethod
    def from_paths(paths: Sequence[Path]) -> "TreeShape":
        """Paths in any order. Raises ValueError when one lacks its beginning."""
        ordered = sorted(set(paths), key=lambda path: (len(path), path))
        slot = {(): 0} | {path: i + 1 for i, path in enumerate(ordered)}
        for path in ordered:
            if path[:-1] not in slot:
                raise ValueError(f"the tree has {path} but not {path[:-1]}, which it hangs from")
        return TreeShape(tuple(slot[p[:-1]] for p in ordered), tuple(map(len, ordered)), tuple(p[-1] for p in ordered))

    def paths(self) -> list[Path]:
        """The way from the root to every node, as ranks among siblings."""
        all_paths: list[Path] = [()]
        for parent, rank in zip(self.parents, self.ranks, strict=True):
            all_paths.append((*all_paths[parent], rank))
        return all_paths[1:]


@lru_cache(maxsize=256)
def clip_shape(shape: TreeShape, budget: Budget) -> TreeShape:
    """What a budget leaves of a shape: its upper levels, and of these the low ranks first."""
    paths = [path for path in shape.paths() if len(path) <= budget.depth]
    paths.sort(key=lambda path: (sum(path), len(path)))  # a beginning is never after what hangs from it
    return TreeShape.from_paths(paths[: budget.nodes])


def chain(depth: int) -> TreeShape:
    """The shape of a chain of `depth` nodes."""
    return TreeShape(tuple(range(depth)), tuple(range(1, depth + 1)), (0,) * depth)


def optimal_shape(rates: Sequence[Sequence[float]], nodes: int) -> TreeShape:
    """The tree of `nodes` nodes that keeps most tokens when head i's rank r is right with chance rates[i][r].

    Heads are taken as independent, as in Medusa's appendix: a node's gain is the product along its path, so picking
    the best candidate again and again is optimal.
    """
    best: list[tuple[float, Path]] = []

    def push_children(path: Path, prob: float) -> None:
        level = len(path)
        if level < len(rates):
            for rank, rate in enumerate(rates[level]):
                heapq.heappush(best, (-prob * rate, (*path, rank)))

    push_children((), 1.0)
    chosen: list[Path] = []
    while best and len(chosen) < nodes:
        neg_prob, path = heapq.heappop(best)
        if neg_prob < 0.0:
            chosen.append(path)
            push_children(path, -neg_prob)
    return TreeShape.from_paths(chosen)


def grow_tree(root_log_probs: Tensor, expand: Expand, budget: Budget, top_k: int) -> Draft:
    """The `budget.nodes` likeliest nodes of a tree that widens where the drafter is sure.

    first [B, V]: log q after the root. `expand` reads a frontier of K tokens, each below the node `parents` of the
    frontier before it, and says log q after each. A node's score is the log-probability of its path; the K best of a
    level are expanded, and of all nodes seen the best are drafted. They are ranked, not drawn: probs None.
    """
    batch, vocabulary = root_log_probs.shape
    if budget.depth < 1 or budget.nodes < 1:
        return Draft.empty(batch, root_log_probs.device)
    width = min(top_k, vocabulary)
    scores, tokens = root_log_probs.topk(width)  # the frontier: [B, K]
    frontier = torch.arange(width, device=root_log_probs.device).expand(batch, -1)  # its places among all nodes seen
    all_scores, all_tokens, all_log_probs = [scores], [tokens], [scores]
    all_parents = [torch.full_like(tokens, -1)]
    parents = torch.zeros_like(tokens)
    num_seen = width
    for _ in range(1, budget.depth):
        log_probs, children = expand(tokens, parents).topk(width)  # [B, K, K]
        paths = (scores[..., None] + log_probs).flatten(1)
        all_scores.append(paths)
        all_log_probs.append(log_probs.flatten(1))
        all_tokens.append(children.flatten(1))
        all_parents.append(frontier.repeat_interleave(width, 1))
        scores, best = paths.topk(width)
        parents = best // width
        tokens = children.flatten(1).gather(1, best)
        frontier = best + num_seen
        num_seen += paths.shape[1]
    parent_slots = torch.cat(all_parents, 1) + 1  # as slots; the root is 0
    scored = torch.cat(all_scores, 1), torch.cat(all_log_probs, 1).exp().clamp_max(1.0)
    return prune_tree(torch.cat(all_tokens, 1), parent_slots, *scored, budget.nodes)


def prune_tree(tokens: Tensor, parents: Tensor, scores: Tensor, confidence: Tensor, nodes: int) -> Draft:
    """The `nodes` best of a tree's nodes [B, N]; parents are slots and never score less than their children."""
    # stable: of equal scores the earlier, so that a parent is never left out for its child
    best = torch.argsort(scores, dim=1, descending=True, stable=True)[:, :nodes].sort(1).values
    slots = torch.zeros(len(tokens), tokens.shape[1] + 1, dtype=torch.int64, device=tokens.device)
    slots.scatter_(1, best + 1, torch.arange(1, best.shape[1] + 1, device=tokens.device).expand_as(best))
    new_parents = slots.gather(1, parents.gather(1, best))
    return Draft(tokens.gather(1, best), new_parents, confidence=confidence.gather(1, best))
