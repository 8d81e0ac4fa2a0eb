"""Draft trees. B rows, N draft nodes, S = N + 1 slots, V vocabulary.

Slot 0 is the root: the last emitted token, not yet in the target's cache. Node i sits in slot i + 1 and names a parent
slot <= i, so parents always come first. A chain is `parents = arange(N)`, a star `zeros(N)`, plain decoding `N = 0`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

ABSENT = -1


@dataclass(frozen=True, slots=True)
class Draft:
    """What a drafter proposes for one step.

    `probs` may be given only if node i really was drawn from q_i given its predecessors; any other proposal (n-gram,
    argmax, a ranking) passes None, a one-hot q, which is exact for every draft.
    """

    tokens: Tensor  # [B, N] int64, ABSENT where a row drafted fewer; absent nodes have no present descendants
    parents: Tensor  # [B, N] int64, parent slot of node i, always <= i
    probs: Tensor | None = None  # [B, N, V] what node i was drawn from; None: one-hot
    confidence: Tensor | None = None  # [B, N] the drafter's own probability of node i; for the inspector, never a test
    notes: Mapping[str, float] = field(default_factory=dict)

    @property
    def nodes(self) -> int:
        """N, the drafted nodes of a row, absent ones included."""
        return self.tokens.shape[1]

    @staticmethod
    def empty(batch: int, device: torch.device | str = "cpu") -> "Draft":
        """A draft of nothing for `batch` rows."""
        none = torch.empty(batch, 0, dtype=torch.int64, device=device)
        return Draft(none, none)

    @staticmethod
    def chain(tokens: Tensor, probs: Tensor | None = None, confidence: Tensor | None = None) -> "Draft":
        """tokens [B, N] as a chain below the root."""
        return Draft(tokens, chain_parents(*tokens.shape, tokens.device), probs, confidence)


@lru_cache(maxsize=256)
def chain_parents(batch: int, nodes: int, device: torch.device) -> Tensor:
    """The parents [B, N] of a chain; one tensor per shape, so a chain is known by identity, without reading it."""
    return torch.arange(nodes, device=device).expand(batch, nodes)


def bounded(draft: Draft, rows: int, vocab_size: int) -> Draft:
    """The draft with ids and parents that are safe to index with, whatever they were; nothing is read back for that,
    so `check` has to follow. Raises ValueError for tensors of other shapes or types than a draft of `rows` rows has."""
    tokens, parents = draft.tokens, draft.parents
    if not tokens.numel():
        return draft
    shape = rows, tokens.shape[-1] if tokens.ndim else 0
    fits = tokens.shape == parents.shape == shape and tokens.dtype == parents.dtype == torch.int64
    if not fits or (draft.probs is not None and draft.probs.shape != (*shape, vocab_size)):
        given = ", ".join(f"{list(t.shape)} {t.dtype}" for t in (tokens, parents, draft.probs) if t is not None)
        wanted = f"int64 ids and parents [{rows}, N], with or without q [{rows}, N, {vocab_size}]"
        raise ValueError(f"a draft has {wanted}, not {given}")
    chain = chain_parents(*shape, parents.device)
    if parents is not chain:
        parents = torch.minimum(parents, chain).clamp_min_(0)
    return Draft(tokens.clamp(ABSENT, vocab_size - 1), parents, draft.probs, draft.confidence, draft.notes)


def check(tokens: list[list[int]], parents: list[list[int]], vocab_size: int) -> None:
    """Raises ValueError for ids outside the vocabulary, and for a node that does not come after its parent."""
    for ids, above in zip(tokens, parents, strict=True):
        if ids and not ABSENT <= min(ids) <= max(ids) < vocab_size:
            stray = next(x for x in ids if not ABSENT <= x < vocab_size)
            raise ValueError(f"it drafted token {stray}; the vocabulary has 0 to {vocab_size - 1}")
        for node, slot in enumerate(above):
            if not 0 <= slot <= node:
                raise ValueError(f"node {node} of its draft names slot {slot} as its parent, which does not come first")


def depths(parents: Tensor) -> Tensor:
    """parents [B, N] -> [B, S] distance from the root; the root has depth 0."""
    batch, nodes = parents.shape
    depth = torch.zeros(batch, nodes + 1, dtype=torch.int64, device=parents.device)
    rows = torch.arange(batch, device=parents.device)
    for node in range(nodes):
        depth[:, node + 1] = depth[rows, parents[:, node]] + 1
    return depth


def is_chain(parents: Tensor) -> bool:
    """True when every node hangs below the slot before it."""
    if parents is chain_parents(*parents.shape, parents.device):
        return True
    return bool((parents == torch.arange(parents.shape[1], device=parents.device)).all())


def first_branch(draft: Draft) -> Draft:
    """The path that takes the first child at every level, as a chain: what a target without tree support verifies."""
    picked: list[list[int]] = []
    for tokens, parents in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
        slot, branch = 0, []
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if parent == slot and token != ABSENT:
                branch.append(node)
                slot = node + 1
        picked.append(branch)
    width = max(map(len, picked), default=0)
    index = torch.tensor([b + [0] * (width - len(b)) for b in picked], dtype=torch.int64, device=draft.tokens.device)
    index = index.view(len(picked), width)
    real = torch.arange(width, device=index.device) < torch.tensor([[len(b)] for b in picked], device=index.device)
    tokens_ = draft.tokens.gather(1, index).masked_fill(~real, ABSENT)
    probs = draft.probs
    if probs is not None:
        probs = probs.gather(1, index[..., None].expand(-1, -1, probs.shape[-1]))
    confidence = None if draft.confidence is None else draft.confidence.gather(1, index)
    return replace(Draft.chain(tokens_, probs, confidence), notes=draft.notes)
