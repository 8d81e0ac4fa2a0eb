"""KV cache of a head: committed and draft columns, their masks, and CUDA graphs.

B rows, A pending columns, S new columns, K nodes of a tree level, W columns of keys, D features, E size of an attention
head.

Row b has its committed columns at 0 .. L_b - 1, where column and position are equal. Observed columns are pending until
the head reads them (`flush_pending`). Draft columns follow (`draft_columns`), level by level, until the next
`flush_pending` drops them. Heads define what runs over columns; this module defines their positions and masks.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdemo.core.host_copy import padded, to_device
from specdemo.core.protocol import Progress, Target, Tensors
from specdemo.kv.cache import SPARE_COLUMNS, Cursor, KeyValues, SlabCache
from specdemo.kv.graphs import COLUMN_MULTIPLE, GRAPH_SPARE_COLUMNS, GraphCache
from specdemo.kv.masks import additive
from specdemo.models.target import NO_LENGTH_LIMIT

Rope = tuple[Tensor, Tensor]  # cos, and sin with its first half negated, [B or 1, S, 1, E]
AttentionKind = tuple[int, bool]  # window in positions (0: none), causal
FULL: AttentionKind = (0, True)
MAX_PENDING = 24  # pending columns that a CUDA graph reads; a prompt, or steps without a draft, leave more
Pending = tuple[list[int], tuple[Tensor, ...]]  # real columns per row, and the columns
Result = TypeVar("Result")


class Angles(Protocol):
    def __call__(self, positions: Tensor, end: int, trailing: bool = False) -> Rope:
        """Return cos and sin of positions [B or 1, S], all below `end`. trailing: they are end - S .. end - 1."""


class Rotary:
    """Rotary embeddings from a table that grows on demand."""

    def __init__(self, config: LlamaConfig | Qwen3Config, device: torch.device) -> None:
        with device:
            rope = LlamaRotaryEmbedding(cast(LlamaConfig, config))
        self._frequencies, self._scale = rope.get_buffer("inv_freq"), float(rope.attention_scaling)
        self._table = torch.empty(0)  # [P, 2, 1, E]

    def __call__(self, positions: Tensor, end: int, trailing: bool = False) -> Rope:
        if len(self._table) < end:
            angles = torch.arange(2 * end, device=positions.device)[:, None, None] * self._frequencies
            cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
            self._table = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], 1)
        part = self._table[None, end - positions.shape[1] : end] if trailing else self._table[positions]
        cos, sin = part.unbind(2)
        return cos, sin


@dataclass(slots=True)
class Columns:
    """New columns of a KV cache with positions and masks. inputs: observed tensors, [B, S, ..] each."""

    positions: Tensor  # [B or 1, S]
    rope: Rope
    make_mask: Callable[[AttentionKind], Tensor | None] | None = None
    cache: KeyValues | None = None
    inputs: tuple[Tensor, ...] = ()
    ends: Tensor | None = None  # [B] last real column per row; None: the last column
    cache_columns: Tensor | None = None  # [B, S] indices into the cache; in CUDA graphs only
    _masks: dict[AttentionKind, Tensor | None] = field(default_factory=dict)

    def run(self, network: Callable[..., Result], *inputs: Tensor) -> Result:
        """Run `network(*inputs, self)`."""
        if self.cache_columns is None or not isinstance(self.cache, SlabCache):
            return network(*inputs, self)
        with self.cache.scatter_writes(self.cache_columns[:, None, :, None]):
            return network(*inputs, self)

    def mask(self, kind: AttentionKind = FULL) -> Tensor | None:
        """Return the attention mask [B or 1, 1, S, W], additive or boolean (True: visible).

        None: no mask is needed, except a causal one if S = W.
        """
        if self.make_mask is not None and kind not in self._masks:
            self._masks[kind] = self.make_mask(kind)
        return self._masks.get(kind)

    def last(self, states: Tensor) -> Tensor:
        """Return the states [B, 1, D] of the last real column of every row."""
        if self.ends is None:
            return states[:, -1:]
        return states[torch.arange(len(states), device=states.device), self.ends][:, None]


def training_columns(
    positions: Tensor, angles: Angles, end: int, mask: Tensor | None = None, cache: KeyValues | None = None
) -> Columns:
    """Return columns for training. Those in `cache`, if given, precede them."""
    return Columns(positions, angles(positions, end), lambda kind: mask, cache)


def unrolled_mask(columns: Tensor, step: int, kind: AttentionKind = FULL) -> Tensor:
    """Return the mask [1, 1, S, W] of an unrolled training step (from 0). Keys are those of all steps, in order.

    Queries are columns [A] from `step` on. A query sees the columns of step 0 before its draft, within the window, its
    one ancestor in each later step, and itself.
    """
    queries = columns[step:, None]
    visible = [(columns <= queries - step) & (columns > queries - step - (kind[0] or len(columns)))]
    visible += [columns[i:] == queries - step + i for i in range(1, step + 1)]
    return torch.cat(visible, 1)[None, None]


@dataclass(slots=True)
class GraphOffsets:
    """Positions of columns in a CUDA graph, as tensors, because a graph is replayed at every length."""

    start: Tensor  # [B] committed columns before the pending ones
    num_new: Tensor  # [B] pending columns that are real
    drafted: int = 0  # draft columns so far
    depth: int = 0  # tree levels so far


class HeadHistory:
    """KV cache of one head.

    With CUDA graphs it has the target's capacity from the start and is reused by the next generation.
    """

    def __init__(
        self, target: Target, layers: int, dtype: torch.dtype, angles: Angles, limit: int = NO_LENGTH_LIMIT
    ) -> None:
        """limit: number of positions. Later columns, whose outputs are not used, get the last position."""
        self._layers, self._dtype, self._device = layers, dtype, target.device
        self._target, self._angles, self._limit = target, angles, limit
        self._positions = torch.arange(0, device=target.device)
        capture = target.new_graph_capture()
        self.graph_cache = GraphCache(capture, dtype) if capture else None
        self._persistent_cache: SlabCache | None = None  # used by CUDA graphs
        self._max_draft_columns = 0  # of any CUDA graph
        self.start(0)

    def start(self, rows: int) -> None:
        """Begin a new generation with this number of rows."""
        self._cache: SlabCache | None = None
        self._offsets: GraphOffsets | None = None  # during capture only
        # lengths before, and columns read by, the last replay
        self._last_replay: tuple[list[int], Pending] | None = None
        self._pending: list[Pending] = []
        self._read_lengths = [0] * rows  # permanent columns per row
        self._committed_ends = [0] * rows  # end of the observed columns, including those to be read again
        self._draft_ends = [0] * rows  # end of the draft columns
        self._ancestors: Tensor | None = None  # [B, K, draft columns] True: visible to a node of the frontier
        self._tree_depth = 0

    def release_graphs(self) -> None:
        """Free captured CUDA graphs and their cache."""
        self._persistent_cache = None
        if self.graph_cache is not None:
            self.graph_cache.clear()

    @property
    def rows(self) -> int:
        """Batch size."""
        return len(self._read_lengths)

    @property
    def lengths(self) -> list[int]:
        """Permanent columns per row."""
        return self._read_lengths

    @property
    def bytes(self) -> int:
        """Bytes of the keys and values."""
        cache = self._cache or self._persistent_cache
        return cache.bytes if cache else 0

    def observe(self, lengths: list[int], *columns: Tensor) -> None:
        """Add pending columns [B, A, ..], of which the first lengths[b] are real."""
        self._pending.append((lengths, columns))

    def flush_pending(self, reread: int = 0) -> Columns | None:
        """Drop the draft columns and return the pending ones, which the caller must run. None if there are none.

        The last `reread` columns of every row stay pending and are read again next time.
        """
        if self._last_replay is not None and not self._pending:
            self._requeue(*self._last_replay)
        self._ancestors, self._draft_ends, self._last_replay = None, self._committed_ends, None
        if not self._pending:
            return None
        read_before, (lengths, inputs) = self._consume_pending(reread)
        self._draft_ends = read_before
        columns = self._next_columns(inputs[0].shape[1])
        self._draft_ends, columns.inputs = self._committed_ends, inputs
        if min(lengths) < inputs[0].shape[1]:
            columns.ends = to_device([max(n - 1, 0) for n in lengths], self._device)
        return columns

    def _consume_pending(self, reread: int) -> tuple[list[int], Pending]:
        """Mark the pending columns as read; return the lengths before, and the columns."""
        read_before = self._read_lengths
        lengths, inputs = _merge_pending(self._pending)
        consumed = [max(n - reread, 0) for n in lengths]
        remaining = [n - s for n, s in zip(lengths, consumed, strict=True)]
        self._pending = [(remaining, tuple(_slice_rows(x, consumed, max(remaining)) for x in inputs))] if reread else []
        self._committed_ends = [old + n for old, n in zip(read_before, lengths, strict=True)]
        self._read_lengths = [old + s for old, s in zip(read_before, consumed, strict=True)]
        return read_before, (lengths, inputs)

    def _requeue(self, read_before: list[int], pending: Pending) -> None:
        """Put the columns of a draft back into the queue."""
        self._read_lengths, self._pending, self._last_replay = read_before, [pending], None

    def prefill_overflow(self, reread: int) -> Columns | None:
        """If more columns are pending than a CUDA graph reads, return all but the last of every row.

        The caller must run them eagerly first.
        """
        pending = self._pending
        if sum(columns[0].shape[1] for _, columns in pending) <= MAX_PENDING:
            return None
        lengths, columns = _merge_pending(pending)
        if min(lengths) < columns[0].shape[1]:
            return None
        self._pending = [([n - 1 for n in lengths], tuple(x[:, :-1] for x in columns))]
        overflow = self.flush_pending(reread)
        self._pending.append(([1] * len(lengths), tuple(x[:, -1:] for x in columns)))
        return overflow

    def draft(
        self,
        key: Hashable,
        depth: int,
        draft_fn: Callable[..., Tensors],
        extra_inputs: Tensors,
        truncatable: bool,
        max_columns: int,
        reread: int,
    ) -> Tensors | None:
        """Run `draft_fn(depth, columns, *extra_inputs)` on the pending columns by CUDA graph replay.

        The graph drafts at least `depth` levels in at most `max_columns` columns. The outputs are static buffers: copy
        them before the next replay. None: the caller must run the draft eagerly.
        """
        num_pending = sum(columns[0].shape[1] for _, columns in self._pending)
        if self.graph_cache is None or num_pending > MAX_PENDING or not (num_pending or self._last_replay):
            return None
        graph_depth = self.graph_cache.depth(key, depth, truncatable)
        if graph_depth is None:
            return None
        self._last_replay = read_before, (lengths, columns) = (
            self._consume_pending(reread) if num_pending else cast(Any, self._last_replay)
        )
        self._max_draft_columns = max(self._max_draft_columns, max_columns)
        cache = self._reserve_cache(max(read_before) + MAX_PENDING + self._max_draft_columns)

        def run(offsets: Tensor, *tensors: Tensor) -> Tensors:
            start, num_new = offsets.unbind()
            self._ancestors, self._offsets = None, GraphOffsets(start, num_new)
            try:
                new_columns = self._columns_from(self._offsets.start, MAX_PENDING)
                new_columns.inputs, new_columns.ends = tensors[: len(columns)], (self._offsets.num_new - 1).clamp_min(0)
                return draft_fn(graph_depth, new_columns, *tensors[len(columns) :])
            finally:
                self._ancestors, self._offsets = None, None

        inputs = (to_device([read_before, lengths], self._device), *columns, *extra_inputs)
        shapes = [
            inputs[0].shape,
            *((x.shape[0], MAX_PENDING, *x.shape[2:]) for x in columns),
            *(x.shape for x in extra_inputs),
        ]
        cache.set_lengths(read_before)
        outputs = self.graph_cache(key, graph_depth, run, inputs, shapes)
        if outputs is None:
            self._requeue(read_before, (lengths, columns))
        return outputs

    def _reserve_cache(self, columns: int) -> SlabCache:
        """Return the cache with room for this number of columns."""
        cache = self._ensure_cache(columns)
        if columns > cache.cursor.capacity and self.graph_cache:
            cache.reserve(-(-2 * columns // COLUMN_MULTIPLE) * COLUMN_MULTIPLE)
            self.graph_cache.clear()
        if len(self._positions) != cache.cursor.capacity:
            self._positions = torch.arange(cache.cursor.capacity, device=self._device)
        return cache

    def _ensure_cache(self, columns: int) -> SlabCache:
        if self._cache is None:
            if self.graph_cache is None or self.graph_cache.disabled_reason:
                self._cache = SlabCache(self._layers, self.rows, columns, self._device)
                return self._cache
            columns = (
                -(-max(columns, self._target.capacity + GRAPH_SPARE_COLUMNS // 2) // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
            )
            cache = self._persistent_cache
            if cache is None or len(cache.cursor.lengths) != self.rows or cache.cursor.capacity < columns:
                self.graph_cache.clear()
                cache = self._persistent_cache = SlabCache(self._layers, self.rows, columns, self._device)
            self._cache = cache
        return self._cache

    def draft_columns(self, width: int = 1, parents: Tensor | None = None) -> Columns:
        """Append draft columns: `width` consecutive ones, or with `parents` [B, K] a tree level of K nodes.

        parents: index in the previous level (0 for the first level). A node sees its ancestors only.
        """
        if self._offsets is not None:
            return self._graph_draft_columns(self._offsets, width, parents)
        if parents is None:
            columns = self._next_columns(width)
        else:
            width = parents.shape[1]
            columns = self._tree_columns(parents)
        self._draft_ends = [n + width for n in self._draft_ends]
        return columns

    def _graph_draft_columns(self, offsets: GraphOffsets, width: int, parents: Tensor | None) -> Columns:
        """Append draft columns inside a CUDA graph."""
        ends, drafted_before = offsets.start + offsets.num_new, offsets.drafted
        width = width if parents is None else parents.shape[1]
        offsets.drafted += width
        if parents is None:
            return self._columns_from(ends + drafted_before, width)
        ancestors = self._extend_ancestors(parents)
        distance = self._positions - ends[:, None]  # [B, W]
        index = distance.clamp(0, offsets.drafted - 1)
        drafted = ancestors.gather(2, index[:, None].expand(-1, width, -1)) & (distance == index)[:, None]
        positions = (ends + offsets.depth)[:, None].expand(-1, width)
        offsets.depth += 1

        def make_mask(kind: AttentionKind) -> Tensor:
            # a window counts from the last observed column, as in `_tree_columns`
            observed = (distance < 0) & (distance >= -kind[0]) if kind[0] else distance < 0
            return additive(drafted | observed[:, None], self._dtype)[:, None]

        return self._make_columns(
            positions, len(self._positions), make_mask, (ends + drafted_before)[:, None] + self._positions[:width]
        )

    def _columns_from(self, start: Tensor, width: int) -> Columns:
        """Return consecutive columns that begin at start [B]."""
        positions = start[:, None] + self._positions[:width]
        end = len(self._positions)
        return self._make_columns(positions, end, lambda kind: self._mask(kind, positions, end), positions)

    def _extend_ancestors(self, parents: Tensor) -> Tensor:
        """Add a tree level [B, K]; return the draft columns visible to its nodes, including themselves."""
        rows, width = parents.shape
        if self._ancestors is None:
            self._ancestors = torch.ones(rows, 1, 0, dtype=torch.bool, device=self._device)
        ancestors = self._ancestors[torch.arange(rows, device=self._device)[:, None], parents]
        own = torch.eye(width, dtype=torch.bool, device=self._device).expand(rows, -1, -1)
        self._ancestors = torch.cat([ancestors, own], 2)
        return self._ancestors

    def _next_columns(self, width: int) -> Columns:
        cursor = self._prepare(width)
        total = cursor.longest + width
        if cursor.row_lengths is None:
            positions = self._positions[None, cursor.longest : total]
        else:
            positions = cursor.row_lengths[:, None] + self._positions[:width]
        return self._make_columns(positions, total, lambda kind: self._mask(kind, positions, total))

    def _tree_columns(self, parents: Tensor) -> Columns:
        """Return the columns of a tree level. All rows use the same columns, after the longest row."""
        rows, width = parents.shape
        if self._ancestors is None:
            self._tree_depth, self._draft_ends = 0, [max(self._committed_ends)] * rows
        ancestors = self._extend_ancestors(parents)
        self._prepare(width)
        longest = max(self._committed_ends)
        position, same_lengths = longest + self._tree_depth, min(self._committed_ends) == longest
        self._tree_depth += 1
        positions, ends = self._positions[None, position : position + 1], self._positions[None, longest : longest + 1]
        if not same_lengths:
            ends = to_device(self._committed_ends, self._device)[:, None]
            positions = ends + (position - longest)

        def make_mask(kind: AttentionKind) -> Tensor | None:
            # the window counts from the last observed column at every level
            windowed = 0 < kind[0] < longest
            if same_lengths and width == 1 and not windowed:
                return None
            visible = F.pad(ancestors, (longest, 0), value=True)
            if not same_lengths:
                visible[:, :, :longest] &= (self._positions[:longest] < ends)[:, None]
            if windowed:
                visible[:, :, :longest] &= (self._positions[:longest] >= ends - kind[0])[..., None, :]
            return additive(visible, self._dtype)[:, None]

        return self._make_columns(positions, position + 1, make_mask)

    def _make_columns(
        self,
        positions: Tensor,
        end: int,
        make_mask: Callable[[AttentionKind], Tensor | None],
        cache_columns: Tensor | None = None,
    ) -> Columns:
        inside = end <= self._limit
        if not inside:
            positions, end = positions.clamp_max(self._limit - 1), self._limit
        cos, sin = self._angles(positions, end, inside and len(positions) == 1 and cache_columns is None)
        return Columns(
            positions, (cos.to(self._dtype), sin.to(self._dtype)), make_mask, self._cache, cache_columns=cache_columns
        )

    def _prepare(self, width: int) -> Cursor:
        """Make room for `width` columns after the draft columns."""
        cache = self._ensure_cache(width + SPARE_COLUMNS)
        old_capacity, cursor = cache.cursor.capacity, cache.cursor
        cache.set_lengths(self._draft_ends)
        cache.prepare(width)
        if self.graph_cache and cursor.capacity != old_capacity:
            self.graph_cache.clear()
        if len(self._positions) < cursor.capacity:
            self._positions = torch.arange(cursor.capacity, device=self._device)
        return cursor

    def _mask(self, kind: AttentionKind, positions: Tensor, total: int) -> Tensor | None:
        """Return the mask [B or 1, 1, S or 1, W] of consecutive columns, or None if all keys are visible."""
        (window, causal), slots = kind, positions.shape[1]
        unwindowed = not 0 < window < total
        if self._offsets is None and unwindowed and len(positions) == 1 and (not causal or slots in (1, total)):
            return None
        keys = self._positions[:total]
        visible = keys <= (positions if causal else positions[:, -1:])[..., None]
        if not unwindowed:
            visible = visible & ((positions[..., None] - keys).abs() < window)
        return additive(visible, self._dtype)[:, None]


def _merge_pending(pending: list[Pending]) -> Pending:
    """Concatenate the real columns per row."""
    if len(pending) == 1:
        return pending[0]
    lengths = [sum(counts) for counts in zip(*(lengths for lengths, _ in pending), strict=True)]
    inputs = tuple(torch.cat(parts, 1) for parts in zip(*(columns for _, columns in pending), strict=True))
    if min(lengths) == inputs[0].shape[1]:
        return lengths, inputs
    starts = list(accumulate((columns[0].shape[1] for _, columns in pending), initial=0))
    indices = [
        [start + i for start, (lengths, _) in zip(starts, pending, strict=False) for i in range(lengths[row])]
        for row in range(len(lengths))
    ]
    return lengths, tuple(_pick_columns(columns, indices) for columns in inputs)


def _slice_rows(columns: Tensor, starts: list[int], width: int) -> Tensor:
    """Return columns [B, width, ..] from starts[b] on, padded with the last column."""
    if min(starts) == max(starts):
        return columns[:, starts[0] : starts[0] + width]
    last = columns.shape[1] - 1
    return _pick_columns(columns, [[min(start + i, last) for i in range(width)] for start in starts])


def _pick_columns(columns: Tensor, indices: list[list[int]]) -> Tensor:
    """Gather columns [B, A, ..] at indices[b]; shorter rows are padded."""
    rows = torch.arange(len(indices), device=columns.device)[:, None]
    return columns[rows, padded(indices, columns.device, 0)]


def last_columns(progress: Progress, columns: Tensor) -> Tensor:
    """Return the last real column [B, ..] of every row of columns [B, A, ..]; any column for finished rows."""
    if min(progress.lengths) == columns.shape[1]:
        return columns[:, -1]
    last = to_device([max(n - 1, 0) for n in progress.lengths], columns.device)
    return columns[torch.arange(len(last), device=columns.device), last]
