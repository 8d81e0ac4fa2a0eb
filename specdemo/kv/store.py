"""Columns of a KV cache, for a target or a head: committed lengths, storage, masks and CUDA graphs.

B rows, S new columns, K nodes of a tree level, P provisional columns, W columns of keys.

The committed columns of row b are 0 .. L_b - 1; there, column and position are equal. Provisional columns follow until
they are committed or dropped. `EagerColumns` places them with lengths on the host, `CapturedColumns` with lengths on
the device, because a CUDA graph is replayed at every length. Both place the same columns with the same masks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from specdemo.core.host_copy import pinned, to_device
from specdemo.core.protocol import UNLIMITED, GraphCapture, SharedKV, Tensors
from specdemo.core.tree import chain_parents
from specdemo.kv.cache import Cursor, SlabCache
from specdemo.kv.graphs import COLUMN_MULTIPLE, GraphCache
from specdemo.kv.masks import (
    NO_ROPE,
    Angles,
    AttentionKind,
    ChainMask,
    Columns,
    Mask,
    Masks,
    TreeMask,
    additive,
    ancestry,
    chain_mask,
    tree_mask,
)

SPARE_COLUMNS = 64  # free columns where no reserve is given
MAX_PLANNED = 64  # columns of the longest chain whose mask is cached
KEY_SPLIT = 512  # keys that torch's attention kernel for CPUs reads at once


@dataclass(frozen=True, slots=True)
class PassShape:
    """Sizes of verification passes with which kernels add in one order, so that a slot's logits are the same bits in a
    pass of every width (models/cpu_plan.py).

    slots: fewest slots of a pass; shorter ones are padded. tails: numbers of keys that a pass may read beyond a
    multiple of KEY_SPLIT, in ascending order; the mask hides those that follow the new ones. Empty: any number.
    """

    slots: int = 1
    tails: tuple[int, ...] = ()

    def columns(self, needed: int) -> int:
        """Return the number of columns that a pass reads if it needs `needed`."""
        if not self.tails:
            return needed
        splits, rest = divmod(needed - 1, KEY_SPLIT)
        return splits * KEY_SPLIT + next(tail for tail in self.tails if tail > rest)


class KVStore:
    """KV cache of one text per row, with committed and provisional columns.

    With CUDA graphs the cache is reused by the next text, because the graphs hold its addresses.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        new_cache: Callable[[int, int], SlabCache],
        capture: GraphCapture | None = None,
        *,
        angles: Angles | None = None,
        limit: int = UNLIMITED,
        min_columns: Callable[[], int] = lambda: 0,
    ) -> None:
        """new_cache: (rows, columns) -> cache. angles: rotary embeddings, if the model does not compute its own.

        limit: number of positions. Later columns, whose outputs are not used, get the last position. min_columns: size
        of a cache that CUDA graphs use.
        """
        self.device, self.dtype = device, dtype
        self.graphs = GraphCache(capture, device, dtype)
        self.masks = Masks(dtype, device)
        self.positions = torch.arange(0, device=device)  # [capacity]
        self.lengths: list[int] = []  # committed columns per row
        self.shape = PassShape()
        self._new_cache, self._angles, self._limit, self._min_columns = new_cache, angles, limit, min_columns
        self._cache: SlabCache | None = None
        self._captured_cache: SlabCache | None = None  # the cache that CUDA graphs use

    @property
    def cache(self) -> SlabCache:
        """Return the cache of the text, or without one that of the CUDA graphs."""
        cache = self._cache or self._captured_cache
        assert cache is not None
        return cache

    @property
    def capacity(self) -> int:
        """Return the number of columns that fit without a new allocation."""
        return self._cache.cursor.capacity if self._cache else 0

    @property
    def bytes(self) -> int:
        """Return the size of keys and values."""
        cache = self._cache or self._captured_cache
        return cache.bytes if cache else 0

    def start(self, rows: int, columns: int = 0) -> None:
        """Start new texts in `rows` rows. columns: allocate so many now; 0: with the first use."""
        self._cache, self.lengths = None, [0] * rows
        if not self.graphs.enabled:
            self._captured_cache = None  # before the next one is allocated
        if columns:
            self.reserve(columns)

    def release_graphs(self) -> None:
        """Free the CUDA graphs and the cache that they use."""
        self._captured_cache = None
        self.graphs.clear()

    def reserve(self, columns: int) -> None:
        """Make room for `columns` columns."""
        columns = self.shape.columns(columns)
        if self._cache is None:
            self._cache = self._allocate(columns)
        elif columns > self._cache.cursor.capacity:
            self._cache.reserve(_rounded(columns) if self.graphs.enabled else columns)
            self.graphs.clear()  # they write to memory that was freed
        if len(self.positions) != self.capacity:
            self.positions = torch.arange(self.capacity, device=self.device)
            self.masks.reserve(self.capacity)

    def _allocate(self, columns: int) -> SlabCache:
        rows = len(self.lengths)
        if not self.graphs.enabled:
            return self._new_cache(rows, columns)
        columns = _rounded(max(columns, self._min_columns()))
        cache = self._captured_cache
        if cache is None or len(cache.cursor.lengths) != rows or cache.cursor.capacity < columns:
            self.release_graphs()  # before the next one is allocated
            cache = self._captured_cache = self._new_cache(rows, columns)
        return cache

    def commit(self, path: list[list[int]]) -> None:
        """Append the accepted slots of the last tree, per row from the root down."""
        self.cache.set_lengths(self.lengths)
        self.cache.gather_accepted(path)
        self.lengths = self.cache.cursor.lengths

    def prepare(self, ends: list[int], width: int) -> Cursor:
        """Make room for `width` columns after ends[b], and let the next pass write there."""
        self._make_room(max(ends) + width)
        self.cache.write_after(ends, width)
        return self.cache.cursor

    def _make_room(self, columns: int) -> None:
        """Make room for `columns` columns, with spare ones, so that this is rarely needed."""
        if self._cache is None or columns > self.capacity:
            self.reserve(max(columns + SPARE_COLUMNS, 2 * self.capacity))

    def provisional(self, ends: list[int] | None = None) -> "EagerColumns":
        """Start provisional columns after ends[b]; None: after the committed columns."""
        return EagerColumns(self, self.lengths if ends is None else ends)

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
        if end > self._limit:
            positions, end, trailing = positions.clamp_max(self._limit - 1), self._limit, False
        rope = NO_ROPE
        if self._angles is not None:
            cos, sin = self._angles(positions, end, trailing)
            rope = cos.to(self.dtype), sin.to(self.dtype)
        return Columns(positions, make_mask, self.cache, rope, write_to=write_to)

    def shared(self, layers: Mapping[str, int], ends: Tensor | None = None) -> SharedKV:
        """Return the committed keys and values of some layers. layers: name -> layer of the cache.

        ends [B]: the lengths on the device, inside a CUDA graph, where all columns are read; None: those on the host.
        """
        width = self.capacity if ends is not None else max(self.lengths)
        masked = ends is not None or min(self.lengths) < width
        positions = (to_device(self.lengths, self.device) if ends is None else ends)[:, None]

        def mask(window: int) -> Tensor | None:
            if not masked and not 0 < window < width:
                return None
            return chain_mask(positions - 1, self.positions[:width], (window, True), self.dtype)

        def committed(slab: Tensor | None) -> Tensor:
            assert slab is not None
            return slab.narrow(2, 0, width).to(self.device)

        slabs = {name: self.cache.slabs[index] for name, index in layers.items()}
        pairs = {name: (committed(slab.keys), committed(slab.values)) for name, slab in slabs.items()}
        return SharedKV(pairs, positions, mask)

    def run_captured(
        self,
        key: Hashable,
        size: int,
        run: Callable[..., Tensors],
        numbers: list[list[int]],
        inputs: Sequence[Tensor],
        shapes: Sequence[Sequence[int]],
        *,
        columns: int,
        ends: list[int] | None = None,
    ) -> Tensors | None:
        """Run `run(provisional, *numbers, *inputs)` as a CUDA graph; return None if graphs are disabled.

        provisional: columns after ends[b], or after the committed columns if None. numbers: further lists of one number
        per row. columns: room that the graph needs after the longest row. See `GraphCache.__call__` for the rest.
        """
        ends = self.lengths if ends is None else ends
        self._make_room(max(ends) + columns + 1)
        self.cache.set_lengths(ends)

        def capture(rows: Tensor, *tensors: Tensor) -> Tensors:
            lengths, *others = rows.unbind()
            return run(CapturedColumns(self, lengths), *others, *tensors)

        def capture_longer(rows: Tensor, *tensors: Tensor) -> Tensors:
            self.cache.set_lengths([n + 1 for n in ends])
            outputs = capture(rows, *tensors)
            self.cache.set_lengths(ends)
            return outputs

        def probe() -> tuple[Callable[..., Tensors], Sequence[Tensor]]:
            # a model that reads the length as a number is captured with it, and right for this length only
            return capture_longer, (pinned([[n + 1 for n in ends], *numbers], self.device), *inputs)

        rows = pinned([ends, *numbers], self.device)
        return self.graphs(key, size, capture, (rows, *inputs), (rows.shape, *shapes), probe)


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

    def __init__(self, store: KVStore, ends: list[int]) -> None:
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
        cursor.read_columns = store.shape.columns(start + nodes + 1)
        plan = store.masks.plan(parents)
        positions = plan.depth + (start if lengths is None else lengths[:, None])
        end = start + plan.max_depth + 1
        return store.columns(
            positions, end, lambda kind: store.masks.mask(plan, kind[0], start, lengths, cursor.read_columns)
        )

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

    def __init__(self, store: KVStore, ends: Tensor) -> None:
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
        store = self._store
        if not 0 < window < len(store.positions):
            return TreeMask(self._ends, ancestors, store.positions, store.dtype)
        return tree_mask(self._ends, ancestors, store.positions, store.dtype, window, depth)


def _rounded(columns: int) -> int:
    """Round up so that mask rows are aligned."""
    return -(-columns // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
