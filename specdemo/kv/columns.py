"""New columns of a KV cache: where they are written, their positions and their attention masks.

B rows, S new columns, K nodes of a tree level, P provisional columns, W columns of keys, E size of an attention head.

The committed columns of row b are 0 .. L_b - 1; there, column and position are equal. Provisional columns follow until
they are committed or dropped. `EagerColumns` places them with lengths on the host, `CapturedColumns` with lengths on
the device, because a CUDA graph is replayed at every length. Both place the same columns with the same masks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from specdemo.core.host_copy import to_device
from specdemo.core.tree import chain_parents
from specdemo.kv.cache import Cursor, KeyValues, SlabCache
from specdemo.kv.masks import ChainMask, Masks, TreeMask, additive, ancestry, chain_mask, tree_mask

AttentionKind = tuple[int, bool]  # window in positions (0: full), and whether a column sees only earlier ones
FULL: AttentionKind = (0, True)
Mask = Tensor | ChainMask | TreeMask
MAX_PLANNED = 64  # columns of the longest chain whose mask is cached
Rope = tuple[Tensor, Tensor]  # cos, and sin with its first half negated, [B or 1, S, 1, E]
NO_ROPE: Rope = (torch.empty(0), torch.empty(0))
Result = TypeVar("Result")


class Angles(Protocol):
    def __call__(self, positions: Tensor, end: int, trailing: bool = False) -> Rope:
        """Return cos and sin of positions [B or 1, S], all below `end`. trailing: they are end - S .. end - 1."""


@dataclass(slots=True)
class Columns:
    """New columns with positions and masks."""

    positions: Tensor  # [B or 1, S]
    make_mask: Callable[[AttentionKind], Mask | None] | None = None
    cache: KeyValues | None = None
    rope: Rope = NO_ROPE  # rotary embeddings, unless the model computes its own
    last_real: Tensor | None = None  # [B] last column of each row that is not padding; None: the last one
    write_to: Tensor | None = None  # [B, S] columns of the cache to write to, inside a CUDA graph
    _masks: dict[AttentionKind, Mask | None] = field(default_factory=dict)

    def run(self, network: Callable[..., Result], *inputs: Tensor) -> Result:
        """Run `network(*inputs, self)`."""
        if self.write_to is None or not isinstance(self.cache, SlabCache):
            return network(*inputs, self)
        with self.cache.scatter_writes(self.write_to[:, None, :, None]):
            return network(*inputs, self)

    def mask(self, kind: AttentionKind = FULL) -> Tensor | None:
        """Return the attention mask [B or 1, 1, S, W], additive or boolean (True: visible).

        None: no mask is needed, except a causal one if S = W.
        """
        mask = self.visible(kind)
        return mask.matrix if isinstance(mask, ChainMask | TreeMask) else mask

    def visible(self, kind: AttentionKind = FULL) -> Mask | None:
        """Return the mask, without a matrix where lengths are enough."""
        if self.make_mask is not None and kind not in self._masks:
            self._masks[kind] = self.make_mask(kind)
        return self._masks.get(kind)

    def last(self, states: Tensor) -> Tensor:
        """Return the states [B, 1, D] of the last real column of every row."""
        if self.last_real is None:
            return states[:, -1:]
        return states[torch.arange(len(states), device=states.device), self.last_real][:, None]


class Placement(Protocol):
    """Protocol of a store, as far as new columns need it; see `kv.store.KVStore`."""

    dtype: torch.dtype
    positions: Tensor
    masks: Masks

    def prepare(self, ends: list[int], width: int) -> Cursor:
        """Make room for `width` columns after ends[b], and let the next pass write there."""

    def columns(
        self,
        positions: Tensor,
        end: int,
        make_mask: Callable[[AttentionKind], Mask | None],
        *,
        write_to: Tensor | None = None,
        trailing: bool = False,
    ) -> Columns:
        """Create columns at positions [B or 1, S], all below `end`. trailing: they are end - S .. end - 1."""


class ProvisionalColumns(ABC):
    """Columns of one draft or verification, after the committed ones.

    captured: the columns belong to a CUDA graph, so that tensors computed from them must not be kept.
    """

    captured: bool
    _ancestors: Tensor | None = None  # [B, K, P] provisional columns that the last tree level sees
    _levels = 0  # tree levels so far

    @abstractmethod
    def chain(self, width: int = 1, counts: list[int] | None = None) -> Columns:
        """Append `width` consecutive columns. Row b has counts[b] real ones, all if None; the rest is overwritten."""

    @abstractmethod
    def tree(self, parents: Tensor) -> Columns:
        """Return columns of a complete tree with parents [B, N] in S = N + 1 slots. Nothing may be appended to it."""

    @abstractmethod
    def level(self, parents: Tensor) -> Columns:
        """Append a tree level with parents [B, K]: indices in the previous level, 0 for the first level.

        A node sees the committed columns, as far back as the last of them sees at any depth, and its ancestors.
        """

    def _extend_ancestors(self, parents: Tensor) -> Tensor:
        """Add a tree level; return the provisional columns [B, K, P] visible to its nodes, including themselves."""
        rows, width = parents.shape
        device = parents.device
        before = self._ancestors
        if before is None:
            before = torch.ones(rows, 1, 0, dtype=torch.bool, device=device)
        inherited = before[torch.arange(rows, device=device)[:, None], parents]
        self_visible = torch.eye(width, dtype=torch.bool, device=device).expand(rows, -1, -1)
        self._ancestors = torch.cat([inherited, self_visible], 2)
        self._levels += 1
        return self._ancestors


class EagerColumns(ProvisionalColumns):
    """Provisional columns after ends[b], with lengths on the host."""

    captured = False

    def __init__(self, store: Placement, ends: list[int]) -> None:
        self._store, self._ends = store, ends

    def chain(self, width: int = 1, counts: list[int] | None = None) -> Columns:
        store = self._store
        cursor = store.prepare(self._ends, width)
        start, lengths = cursor.longest, cursor.row_lengths
        total = start + width
        if lengths is None:
            positions = store.positions[None, start:total]
        else:
            positions = lengths[:, None] + store.positions[:width]
        counts = counts or [width] * len(self._ends)
        self._ends = [end + count for end, count in zip(self._ends, counts, strict=True)]

        def make_mask(kind: AttentionKind) -> Tensor | None:
            window, causal = kind
            full = lengths is None and not 0 < window < total
            if full and (not causal or width in (1, total)):
                return None
            if not causal or width > MAX_PLANNED:
                return chain_mask(positions, store.positions[:total], kind, store.dtype)
            plan = store.masks.plan(chain_parents(1, width - 1, positions.device))
            return store.masks.mask(plan, window, start, lengths)

        columns = store.columns(positions, total, make_mask, trailing=lengths is None)
        if min(counts) < width:
            columns.last_real = to_device([max(count - 1, 0) for count in counts], positions.device)
        return columns

    def tree(self, parents: Tensor) -> Columns:
        store, nodes = self._store, parents.shape[1]
        if not nodes:
            return self.chain()
        cursor = store.prepare(self._ends, nodes + 1)
        start, lengths = cursor.longest, cursor.row_lengths
        plan = store.masks.plan(parents)
        positions = plan.depth + (start if lengths is None else lengths[:, None])
        end = start + plan.max_depth + 1
        return store.columns(positions, end, lambda kind: store.masks.mask(plan, kind[0], start, lengths))

    def level(self, parents: Tensor) -> Columns:
        store, width = self._store, parents.shape[1]
        if self._ancestors is None:  # all rows use the same columns, after the longest row
            self._root_ends, self._ends = self._ends, [max(self._ends)] * len(self._ends)
        depth, ancestors = self._levels, self._extend_ancestors(parents)
        store.prepare(self._ends, width)
        self._ends = [end + width for end in self._ends]
        longest = max(self._root_ends)
        same_lengths = min(self._root_ends) == longest
        positions = store.positions[None, longest + depth : longest + depth + 1]
        ends = store.positions[None, longest : longest + 1]
        if not same_lengths:
            ends = to_device(self._root_ends, positions.device)[:, None]
            positions = ends + depth

        def make_mask(kind: AttentionKind) -> Tensor | None:
            windowed = 0 < kind[0] < longest
            if same_lengths and width == 1 and not windowed:
                return None
            visible = F.pad(ancestors, (longest, 0), value=True)
            if not same_lengths:
                visible[:, :, :longest] &= (store.positions[:longest] < ends)[:, None]
            if windowed:
                visible[:, :, :longest] &= (store.positions[:longest] >= ends - kind[0])[..., None, :]
            return additive(visible, store.dtype)[:, None]

        return store.columns(positions, longest + depth + 1, make_mask, trailing=same_lengths)


class CapturedColumns(ProvisionalColumns):
    """Provisional columns inside a CUDA graph, after ends [B] on the device."""

    captured = True

    def __init__(self, store: Placement, ends: Tensor) -> None:
        self._store, self._ends = store, ends
        self._appended = 0  # provisional columns after `ends`

    @property
    def ends(self) -> Tensor:
        """The columns [B] before the provisional ones."""
        return self._ends

    def chain(self, width: int = 1, counts: list[int] | None = None) -> Columns:
        start = self._ends + self._appended if self._appended else self._ends
        self._appended += width
        return self._consecutive(start, width)

    def inputs(self, width: int, counts: Tensor) -> Columns:
        """Append `width` columns of input tokens, of which counts[b] [B] are real."""
        columns = self._consecutive(self._ends, width)
        columns.last_real = (counts - 1).clamp_min(0)
        self._ends = self._ends + counts
        return columns

    def _consecutive(self, start: Tensor, width: int) -> Columns:
        store = self._store
        positions = start[:, None] + store.positions[:width]

        def make_mask(kind: AttentionKind) -> Mask:
            window, causal = kind
            if causal and not 0 < window < len(store.positions):
                return ChainMask(positions, store.positions, store.dtype)
            return chain_mask(positions, store.positions, kind, store.dtype)

        return store.columns(positions, len(store.positions), make_mask, write_to=positions)

    def tree(self, parents: Tensor) -> Columns:
        store = self._store
        ancestors = ancestry(parents)
        depth = ancestors.sum(-1).long() - 1

        def make_mask(kind: AttentionKind) -> Mask:
            return self._tree_mask(ancestors > 0, kind[0], depth)

        write_to = self._ends[:, None] + store.positions[: depth.shape[1]]
        return store.columns(self._ends[:, None] + depth, len(store.positions), make_mask, write_to=write_to)

    def level(self, parents: Tensor) -> Columns:
        store, width = self._store, parents.shape[1]
        depth, start = self._levels, self._ends + self._appended
        self._appended += width
        ancestors = self._extend_ancestors(parents)

        def make_mask(kind: AttentionKind) -> Mask:
            return self._tree_mask(ancestors, kind[0])

        positions = (self._ends + depth)[:, None].expand(-1, width)
        return store.columns(
            positions, len(store.positions), make_mask, write_to=start[:, None] + store.positions[:width]
        )

    def _tree_mask(self, ancestors: Tensor, window: int, depth: Tensor | None = None) -> Mask:
        """See `kv.masks.tree_mask`."""
        store = self._store
        if not 0 < window < len(store.positions):
            return TreeMask(self._ends, ancestors, store.positions, store.dtype)
        return tree_mask(self._ends, ancestors, store.positions, store.dtype, window, depth)
