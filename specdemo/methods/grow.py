"""Shapes of draft trees. B rows, K frontier nodes, N draft nodes, V vocabulary.

A `TreeShape` is static and places ranks of heads at nodes (Medusa, 2401.10774, section 2.3.3). `grow_tree` builds a
dynamic tree from the drafter's probabilities (EAGLE-2, 2406.16858, section 4).
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from specdemo.core.protocol import Budget
from specdemo.core.tree import Draft

Path = tuple[int, ...]  # ranks from the root down
Expand = Callable[[Tensor, Tensor], Tensor]  # tokens [B, K], parents [B, K] -> log q [B, K, V]


@dataclass(frozen=True, slots=True)
class TreeShape:
    """A static tree: node i has parent slot `parents[i]`, level `levels[i]` (1: below the root), rank `ranks[i]`."""

    parents: tuple[int, ...]
    levels: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def width(self) -> int:
        """Number of ranks needed from a head."""
        return 1 + max(self.ranks, default=-1)

    @property
    def depth(self) -> int:
        """Levels below the root."""
        return max(self.levels, default=0)

    @property
    def last_children(self) -> tuple[bool, ...]:
        """True for nodes that are the last child of their slot."""
        last = {parent: node for node, parent in enumerate(self.parents)}
        return tuple(last[parent] == node for node, parent in enumerate(self.parents))

    @staticmethod
    def from_paths(paths: Sequence[Path]) -> "TreeShape":
        """Build the shape from paths in any order. Raises ValueError when the parent of a path is missing."""
        ordered = sorted(set(paths), key=lambda path: (len(path), path))
        slot = {(): 0} | {path: i + 1 for i, path in enumerate(ordered)}
        for path in ordered:
            if path[:-1] not in slot:
                raise ValueError(f"the tree has {path} but not its parent {path[:-1]}")
        return TreeShape(tuple(slot[p[:-1]] for p in ordered), tuple(map(len, ordered)), tuple(p[-1] for p in ordered))

    def paths(self) -> list[Path]:
        """Return the path of every node."""
        all_paths: list[Path] = [()]
        for parent, rank in zip(self.parents, self.ranks, strict=True):
            all_paths.append((*all_paths[parent], rank))
        return all_paths[1:]


@lru_cache(maxsize=256)
def clip_shape(shape: TreeShape, budget: Budget) -> TreeShape:
    """Cut a shape to a budget. Nodes of low rank are kept first."""
    paths = [path for path in shape.paths() if len(path) <= budget.depth]
    paths.sort(key=lambda path: (sum(path), len(path)))  # a parent comes before its children
    return TreeShape.from_paths(paths[: budget.nodes])


def chain(depth: int) -> TreeShape:
    """Return the shape of a chain."""
    return TreeShape(tuple(range(depth)), tuple(range(1, depth + 1)), (0,) * depth)


def optimal_shape(rates: Sequence[Sequence[float]], nodes: int) -> TreeShape:
    """Return the tree of `nodes` nodes with the largest expected accepted length.

    rates[i][r]: probability that rank r of head i is correct. Heads are assumed independent, as in Medusa's appendix:
    the gain of a node is the product along its path, so greedy selection is optimal.
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
    """Draft the `budget.nodes` most likely nodes of a dynamic tree.

    root_log_probs [B, V]: log q of the root. `expand` reads the tokens of a frontier, whose parents are indices into
    the previous frontier, and returns log q of each. The score of a node is the log-probability of its path. The
    `top_k` best nodes of a level are expanded; the best nodes of all levels are drafted. Nothing is sampled, so probs
    is None.
    """
    batch, vocabulary = root_log_probs.shape
    if budget.depth < 1 or budget.nodes < 1:
        return Draft.empty(batch, root_log_probs.device)
    width = min(top_k, vocabulary)
    scores, tokens = root_log_probs.topk(width)  # the frontier: [B, K]
    frontier = torch.arange(width, device=root_log_probs.device).expand(batch, -1)  # indices into all nodes
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
    parent_slots = torch.cat(all_parents, 1) + 1  # slot 0 is the root
    scored = torch.cat(all_scores, 1), torch.cat(all_log_probs, 1).exp().clamp_max(1.0)
    return prune_tree(torch.cat(all_tokens, 1), parent_slots, *scored, budget.nodes)


def prune_tree(tokens: Tensor, parents: Tensor, scores: Tensor, confidence: Tensor, nodes: int) -> Draft:
    """Keep the `nodes` best nodes of a tree [B, N]. A parent slot must not score lower than its children."""
    # a stable sort prefers the earlier of two equal scores, so a parent is kept before its child
    best = torch.argsort(scores, dim=1, descending=True, stable=True)[:, :nodes].sort(1).values
    slots = torch.zeros(len(tokens), tokens.shape[1] + 1, dtype=torch.int64, device=tokens.device)
    slots.scatter_(1, best + 1, torch.arange(1, best.shape[1] + 1, device=tokens.device).expand_as(best))
    new_parents = slots.gather(1, parents.gather(1, best))
    return Draft(tokens.gather(1, best), new_parents, confidence=confidence.gather(1, best))
