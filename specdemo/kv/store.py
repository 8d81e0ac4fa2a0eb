"""Columns of a KV cache, for a target or a head: committed lengths, storage, masks and CUDA graphs.

B rows, S new columns, K nodes of a tree level, P provisional columns, W columns of keys.

The committed columns of row b are 0 .. L_b - 1; there, column and position are equal. Provisional columns follow until
they are committed or dropped. `ProvisionalColumns` places them.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specdemo.core.host_copy import pinned, to_device
from specdemo.core.protocol import UNLIMITED
from specdemo.core.tree import chain_parents
from specdemo.costs.passes import PassShape
from specdemo.kv.cache import Cursor, SlabCache
from specdemo.kv.graphs import COLUMN_MULTIPLE, GraphCache, GraphCapture, Tensors
from specdemo.kv.masks import (
    NO_ROPE,
    Angles,
    AttentionKind,
    Mask,
    TreeMask,
    View,
    additive,
    chain_mask,
    tree_mask,
    tree_shape,
)

SPARE_COLUMNS = 64  # free columns where no reserve is given


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

    def provisional(self, ends: list[int] | None = None) -> "ProvisionalColumns":
        """Start provisional columns after ends[b]; None: after the committed columns."""
        return ProvisionalColumns(self, self.lengths if ends is None else ends)

    def columns(
        self,
        positions: Tensor,
        end: int,
        make_mask: Callable[[AttentionKind], Mask | None],
        *,
        write_to: Tensor | None = None,
        trailing: bool = False,
    ) -> View:
        """Create columns at positions [B or 1, S], all below `end`. trailing: they are end - S .. end - 1."""
        if end > self._limit:
            positions, end, trailing = positions.clamp_max(self._limit - 1), self._limit, False
        rope = NO_ROPE
        if self._angles is not None:
            cos, sin = self._angles(positions, end, trailing)
            rope = cos.to(self.dtype), sin.to(self.dtype)
        return View(positions, make_mask, self.cache, rope, write_to=write_to)

    def shared(self, layers: Mapping[str, int], ends: Tensor | None = None) -> View:
        """Return the next column with the committed keys and values of some layers. layers: name -> layer of the cache.

        ends [B]: the lengths on the device, inside a CUDA graph, where all columns are read; None: those on the host.
        """
        width = self.capacity if ends is not None else max(self.lengths)
        masked = ends is not None or min(self.lengths) < width
        positions = (to_device(self.lengths, self.device) if ends is None else ends)[:, None]

        def mask(kind: AttentionKind) -> Tensor | None:
            if not masked and not 0 < kind[0] < width:
                return None
            return chain_mask(positions - 1, self.positions[:width], kind, self.dtype)

        def part(slab: Tensor | None) -> Tensor:
            assert slab is not None
            return slab.narrow(2, 0, width).to(self.device)

        slabs = {name: self.cache.slabs[index] for name, index in layers.items()}
        pairs = {name: (part(slab.keys), part(slab.values)) for name, slab in slabs.items()}
        return View(positions, mask, committed=pairs)

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
            return run(ProvisionalColumns(self, lengths), *others, *tensors)

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


class ProvisionalColumns:
    """Columns of one draft or verification, after the committed ones.

    ends: number of columns per row before them: a list, or a tensor [B] inside a CUDA graph (`captured`), which is
    replayed at every length. Lengths on the host allow to read no more columns than needed, and to leave out masks.
    """

    def __init__(self, store: KVStore, ends: list[int] | Tensor) -> None:
        self._store, self._ends = store, ends
        self._appended = 0  # columns after `ends`
        self._ancestors: Tensor | None = None  # [B, K, P] provisional columns that the last tree level sees
        self._levels = 0

    @property
    def captured(self) -> bool:
        """Return True inside a CUDA graph, where tensors computed from the columns must not be kept."""
        return isinstance(self._ends, Tensor)

    @property
    def ends(self) -> Tensor:
        """The columns [B] before the provisional ones, inside a CUDA graph."""
        assert isinstance(self._ends, Tensor)
        return self._ends

    def chain(self, width: int = 1, counts: list[int] | Tensor | None = None, *, rounded: bool = False) -> View:
        """Append `width` consecutive columns. Row b has counts[b] real ones, all if None; the rest is overwritten.
        rounded: read as many columns as `PassShape` says."""
        store, place = self._store, self._append(width, rounded)
        positions, longest, total = place.start + store.positions[:width], place.longest, len(place.keys)
        if longest is not None:
            positions = store.positions[None, longest : longest + width]
        if isinstance(self._ends, list) and isinstance(counts, list):
            self._ends = [*map(add, self._ends, counts)]
        elif isinstance(self._ends, Tensor) and isinstance(counts, Tensor):
            self._ends = self._ends + counts
        self._appended -= 0 if counts is None else width

        def make_mask(kind: AttentionKind) -> Mask | None:
            window, causal = kind
            windowed = 0 < window < total
            if longest is not None and not windowed and (not causal or (width in (1, total) and not place.hidden)):
                return None
            if self.captured and causal and not windowed:
                order = store.positions[:width]
                return TreeMask(place.start[:, 0], (order <= order[:, None])[None], place.keys, store.dtype)
            return chain_mask(positions, place.keys, kind, store.dtype)

        end = len(store.positions) if self.captured else total - place.hidden
        columns = store.columns(positions, end, make_mask, write_to=place.write_to, trailing=longest is not None)
        if isinstance(counts, Tensor):
            columns.last_real = (counts - 1).clamp_min(0)
        elif counts and min(counts) < width:
            columns.last_real = to_device([max(count - 1, 0) for count in counts], positions.device)
        return columns

    def tree(self, parents: Tensor) -> View:
        """Return columns of a complete tree with parents [B, N] in S = N + 1 slots. Nothing may be appended to it."""
        store, slots = self._store, parents.shape[1] + 1
        if not self.captured and (slots < 3 or parents is chain_parents(*parents.shape, parents.device)):
            return self.chain(slots, rounded=True)
        place = self._append(slots, rounded=True)
        ancestors, depth = tree_shape(parents)

        def make_mask(kind: AttentionKind) -> Mask:
            return self._tree_mask(place, ancestors, kind[0], depth)

        end = len(place.keys) - place.hidden
        return store.columns(place.start + depth, end, make_mask, write_to=place.write_to)

    def level(self, parents: Tensor) -> View:
        """Append a tree level with parents [B, K]: indices in the previous level, 0 for the first level.

        A node sees the committed columns, as far back as the last of them sees at any depth, and its ancestors.
        """
        store, (rows, width) = self._store, parents.shape
        place, above = self._append(width), self._ancestors
        if above is None:
            above = torch.ones(rows, 1, 0, dtype=torch.bool, device=parents.device)
            self._root, self._longest = place.start, place.longest
        inherited = above[torch.arange(rows, device=parents.device)[:, None], parents]
        self_visible = torch.eye(width, dtype=torch.bool, device=parents.device).expand(rows, -1, -1)
        ancestors = self._ancestors = torch.cat([inherited, self_visible], 2)
        longest, root = self._longest, place._replace(start=self._root, longest=self._longest)
        positions, self._levels = self._root + self._levels, self._levels + 1

        def make_mask(kind: AttentionKind) -> Mask | None:
            if longest is not None and width == 1 and not 0 < kind[0] < longest:
                return None
            return self._tree_mask(root, ancestors, kind[0])

        return store.columns(positions.expand(-1, width), len(place.keys), make_mask, write_to=place.write_to)

    def _append(self, width: int, rounded: bool = False) -> "_Place":
        """Make room for `width` columns after the last ones. Lengths on the host read no columns after them, except
        those that `rounded` passes read and the mask hides."""
        store, before = self._store, self._appended
        self._appended += width
        if isinstance(self._ends, Tensor):
            start = (self._ends + before if before else self._ends)[:, None]
            return _Place(start, store.positions, write_to=start + store.positions[:width])
        cursor = store.prepare([end + before for end in self._ends], width)
        total = cursor.longest + width
        read = store.shape.columns(total) if rounded else total
        cursor.read_columns, keys = read if rounded else 0, store.positions[:read]
        if cursor.row_lengths is not None:
            return _Place(cursor.row_lengths[:, None], keys, hidden=read - total)
        return _Place(store.positions[None, cursor.longest : cursor.longest + 1], keys, cursor.longest, read - total)

    def _tree_mask(self, place: "_Place", ancestors: Tensor, window: int, depth: Tensor | None = None) -> Mask:
        dtype, ends = self._store.dtype, place.start[:, 0]
        windowed = 0 < window < len(place.keys)
        if self.captured and not windowed:
            return TreeMask(ends, ancestors, place.keys, dtype)
        if place.longest is not None and not windowed:  # faster on a CPU, and the same values
            return additive(F.pad(F.pad(ancestors, (place.longest, 0), value=True), (0, place.hidden)), dtype)[:, None]
        return tree_mask(ends, ancestors, place.keys, dtype, window, depth)


class _Place(NamedTuple):
    """Where new columns are."""

    start: Tensor  # [B or 1, 1] columns before them
    keys: Tensor  # [W] columns that the pass reads
    longest: int | None = None  # `start` on the host, if it is known and the same in every row
    hidden: int = 0  # columns of `keys` after the new ones
    write_to: Tensor | None = None  # [B, S], inside a CUDA graph


def _rounded(columns: int) -> int:
    """Round up so that mask rows are aligned."""
    return -(-columns // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
