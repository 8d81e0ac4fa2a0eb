"""Draft trees. B rows, N draft nodes, S = N + 1 slots, V vocabulary.

Slot 0 is the root: the last output token, which is not in the target's cache yet. Node i sits in slot i + 1 and has a
parent slot <= i, so parents come first. A chain has `parents = arange(N)`, a star `zeros(N)`, plain decoding `N = 0`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

from specdemo.core.host_copy import padded

ABSENT = -1


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposal of a drafter for one step.

    `probs` may be set only if node i was sampled from q_i given its predecessors. Any other proposal (n-gram, argmax, a
    ranking) has None, a one-hot q, which is lossless for every draft.
    """

    tokens: Tensor  # [B, N] int64, ABSENT where a row drafted fewer; absent nodes have no present descendants
    parents: Tensor  # [B, N] int64, parent slot of node i, always <= i
    probs: Tensor | None = None  # [B, N, V] distribution that node i was sampled from; None: one-hot
    confidence: Tensor | None = None  # [B, N] the drafter's probability of node i; shown only, not used for acceptance
    notes: Mapping[str, float] = field(default_factory=dict)
    # the drafter's distribution [B, N, V] for a one-hot chain, from which a grammar takes the best allowed token
    ranking: Callable[[], Tensor] | None = None
    forced: Sequence[list[int]] = ()  # [B][...] slots of tokens that a grammar forced

    @property
    def nodes(self) -> int:
        """Return N, the number of nodes per row, including absent ones."""
        return self.tokens.shape[1]

    @staticmethod
    def empty(batch: int, device: torch.device | str = "cpu") -> "Draft":
        """Return a draft without nodes for `batch` rows."""
        none = torch.empty(batch, 0, dtype=torch.int64, device=device)
        return Draft(none, none)

    @staticmethod
    def chain(tokens: Tensor, probs: Tensor | None = None, confidence: Tensor | None = None) -> "Draft":
        """Return tokens [B, N] as a chain below the root."""
        return Draft(tokens, chain_parents(*tokens.shape, tokens.device), probs, confidence)


@lru_cache(maxsize=256)
def chain_parents(batch: int, nodes: int, device: torch.device) -> Tensor:
    """Return the parents [B, N] of a chain. There is one tensor per shape, so that a chain is recognised by identity,
    without a device read."""
    return torch.arange(nodes, device=device).expand(batch, nodes)


def clamp_ids(draft: Draft, rows: int, vocab_size: int) -> Draft:
    """Clamp ids and parents to a range that is safe for indexing, without a device read; call `validate_ids` later.

    Raises ValueError for tensors of other shapes or dtypes than a draft of `rows` rows has.
    """
    tokens, parents = draft.tokens, draft.parents
    if not tokens.numel():
        return draft
    shape = rows, tokens.shape[-1] if tokens.ndim else 0
    fits = tokens.shape == parents.shape == shape and tokens.dtype == parents.dtype == torch.int64
    if not fits or (draft.probs is not None and draft.probs.shape != (*shape, vocab_size)):
        actual = ", ".join(f"{list(t.shape)} {t.dtype}" for t in (tokens, parents, draft.probs) if t is not None)
        expected = f"int64 ids and parents [{rows}, N], with or without q [{rows}, N, {vocab_size}]"
        raise ValueError(f"a draft must have {expected}, not {actual}")
    chain = chain_parents(*shape, parents.device)
    if parents is not chain:
        parents = torch.minimum(parents, chain).clamp_min_(0)
    return replace(draft, tokens=tokens.clamp(ABSENT, vocab_size - 1), parents=parents, ranking=None)


def validate_ids(tokens: list[list[int]], parents: list[list[int]], vocab_size: int) -> None:
    """Raise ValueError for ids outside the vocabulary and for a node that does not come after its parent."""
    for ids, parent_slots in zip(tokens, parents, strict=True):
        if ids and not ABSENT <= min(ids) <= max(ids) < vocab_size:
            invalid = next(x for x in ids if not ABSENT <= x < vocab_size)
            raise ValueError(f"the draft has token {invalid}; the vocabulary has 0 to {vocab_size - 1}")
        for node, slot in enumerate(parent_slots):
            if not 0 <= slot <= node:
                raise ValueError(f"node {node} of the draft has parent slot {slot}, which does not come before it")


def depths(parents: Tensor) -> Tensor:
    """Return the distance [B, S] from the root for parents [B, N]; the root has depth 0."""
    batch, nodes = parents.shape
    depth = torch.zeros(batch, nodes + 1, dtype=torch.int64, device=parents.device)
    rows = torch.arange(batch, device=parents.device)
    for node in range(nodes):
        depth[:, node + 1] = depth[rows, parents[:, node]] + 1
    return depth


def is_chain(parents: Tensor) -> bool:
    """Return True if the parent of every node is the slot before it."""
    if not parents.shape[1] or parents is chain_parents(*parents.shape, parents.device):
        return True
    return bool((parents == torch.arange(parents.shape[1], device=parents.device)).all())


def select_nodes(draft: Draft, index: Tensor) -> Draft:
    """Return the nodes at index [B, M]. It ascends and includes the parents of its nodes."""
    slots = index.new_zeros(len(index), draft.nodes + 1)
    slots.scatter_(1, index + 1, torch.arange(1, index.shape[1] + 1, device=index.device).expand_as(index))
    parents, probs = slots.gather(1, draft.parents.gather(1, index)), draft.probs
    if probs is not None:
        probs = probs.gather(1, index[..., None].expand(-1, -1, probs.shape[-1]))
    confidence = None if draft.confidence is None else draft.confidence.gather(1, index)
    return Draft(draft.tokens.gather(1, index), parents, probs, confidence, draft.notes, draft.ranking)


def first_branch(draft: Draft) -> Draft:
    """Return the path of first children as a chain, for a target that cannot verify trees."""
    picked: list[list[int]] = []
    for tokens, parents in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
        slot, branch = 0, []
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if parent == slot and token != ABSENT:
                branch.append(node)
                slot = node + 1
        picked.append(branch)
    index = padded(picked, draft.tokens.device, 0)
    lengths = torch.tensor([[len(branch)] for branch in picked], device=index.device)
    real = torch.arange(index.shape[1], device=index.device) < lengths
    nodes = select_nodes(draft, index)
    chain = Draft.chain(nodes.tokens.masked_fill(~real, ABSENT), nodes.probs, nodes.confidence)
    return replace(chain, notes=draft.notes)
