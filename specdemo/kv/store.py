"""Columns of a KV cache, for a target or a head: committed lengths, storage, masks and CUDA graphs."""

from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch import Tensor

from specdemo.core.host_copy import pinned, to_device
from specdemo.core.protocol import UNLIMITED, GraphCapture, SharedKV, Tensors
from specdemo.kv.cache import Cursor, SlabCache
from specdemo.kv.columns import NO_ROPE, Angles, AttentionKind, CapturedColumns, Columns, EagerColumns, Mask
from specdemo.kv.graphs import COLUMN_MULTIPLE, GraphCache
from specdemo.kv.masks import Masks, chain_mask

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
        self.graphs = GraphCache(capture, device, dtype) if capture else None
        self.masks = Masks(dtype, device)
        self.positions = torch.arange(0, device=device)  # [capacity]
        self.lengths: list[int] = []  # committed columns per row
        self._new_cache, self._angles, self._limit, self._min_columns = new_cache, angles, limit, min_columns
        self._cache: SlabCache | None = None
        self._captured_cache: SlabCache | None = None  # the cache that CUDA graphs use

    @property
    def uses_graphs(self) -> bool:
        """Return True if CUDA graphs are enabled."""
        return self.graphs is not None and not self.graphs.disabled_reason

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
        if not self.uses_graphs:
            self._captured_cache = None  # before the next one is allocated
        if columns:
            self.reserve(columns)

    def release_graphs(self) -> None:
        """Free the CUDA graphs and the cache that they use."""
        self._captured_cache = None
        if self.graphs is not None:
            self.graphs.clear()

    def reserve(self, columns: int) -> None:
        """Make room for `columns` columns."""
        if self._cache is None:
            self._cache = self._allocate(columns)
        elif columns > self._cache.cursor.capacity:
            self._cache.reserve(_rounded(columns) if self.uses_graphs else columns)
            if self.graphs is not None:  # they write to memory that was freed
                self.graphs.clear()
        self._resize_tables()

    def _allocate(self, columns: int) -> SlabCache:
        rows = len(self.lengths)
        if not self.uses_graphs:
            return self._new_cache(rows, columns)
        columns = _rounded(max(columns, self._min_columns()))
        cache = self._captured_cache
        if cache is None or len(cache.cursor.lengths) != rows or cache.cursor.capacity < columns:
            self.release_graphs()  # before the next one is allocated
            cache = self._captured_cache = self._new_cache(rows, columns)
        return cache

    def _resize_tables(self) -> None:
        if len(self.positions) != self.capacity:
            self.positions = torch.arange(self.capacity, device=self.device)
            self.masks.reserve(self.capacity)

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

    def provisional(self, ends: list[int] | None = None) -> EagerColumns:
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
        assert self.graphs is not None
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


def _rounded(columns: int) -> int:
    """Round up so that mask rows are aligned."""
    return -(-columns // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
