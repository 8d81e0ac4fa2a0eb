"""Drafts of heads: the columns that a head has not read yet, its KV cache, and CUDA graphs.

B rows, A pending columns, S new columns, K nodes of a tree level, W columns of keys, E size of an attention head.

A head defines what runs over columns. `specdemo.kv` defines where the columns are, and `HeadRuntime` decides whether a
draft runs eagerly or as a CUDA graph.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from specdemo.core.host_copy import padded, to_device
from specdemo.core.protocol import UNLIMITED, Enough, Progress, Target
from specdemo.core.tree import Draft
from specdemo.kv.graphs import GRAPH_SPARE_COLUMNS, GraphCache, Tensors
from specdemo.kv.masks import FULL, Angles, AttentionKind
from specdemo.kv.store import KVStore
from specdemo.kv.view import View, run_captured
from specdemo.methods.heads.sampler import TokenSampler, flatten_draft, unflatten_draft
from specdemo.models.devices import device_kind
from specdemo.models.shared import capture_of

MAX_PENDING = 24  # columns that a CUDA graph reads at most; more are pending after a prompt or steps without a draft
Pending = tuple[list[int], Tensors]  # number of real columns per row, and the columns [B, A, ..]


def training_columns(
    positions: Tensor, angles: Angles, end: int, mask: Tensor | None = None, cache: Cache | None = None
) -> View:
    """Return columns for training. Those in `cache`, if given, precede them."""
    return View(positions, lambda kind: mask, cache, angles(positions, end))


def unrolled_mask(columns: Tensor, step: int, kind: AttentionKind = FULL) -> Tensor:
    """Return the mask [1, 1, S, W] of an unrolled training step (from 0). Keys are those of all steps, in order.

    Queries are columns [A] from `step` on. A query sees the columns of step 0 before its draft, within the window, its
    one ancestor in each later step, and itself.
    """
    queries = columns[step:, None]
    visible = [(columns <= queries - step) & (columns > queries - step - (kind[0] or len(columns)))]
    visible += [columns[i:] == queries - step + i for i in range(1, step + 1)]
    return torch.cat(visible, 1)[None, None]


@dataclass(frozen=True, slots=True)
class DraftPass:
    """One draft of a head. nodes: size of the tree; 0: a chain.

    view: the pending columns, whose observed tensors [B, S, ..] are `inputs`, and which draft columns follow; empty if
    nothing is pending. None: the head has no KV cache. enough: see `Budget`; None in a CUDA graph.
    """

    depth: int
    nodes: int
    sampler: TokenSampler
    view: View | None = None
    inputs: Tensors = ()
    enough: Enough | None = None

    @property
    def columns(self) -> View:
        """Return the pending columns of a head with a KV cache."""
        assert self.view is not None
        return self.view


class HeadRuntime:
    """Runs the drafts of one head, eagerly or as CUDA graphs."""

    def __init__(
        self,
        target: Target,
        dtype: torch.dtype,
        layers: int = 0,
        angles: Angles | None = None,
        limit: int = UNLIMITED,
        reread: int = 0,
    ) -> None:
        """layers: of the head's KV cache; 0: it has none. limit: number of positions, see `KVStore`. reread: the last
        columns of every row, which stay pending and are read again by the next draft."""
        self._device, self._vocab_size, capture = target.device, target.vocab_size, capture_of(target)
        self._reread = reread
        self._store: KVStore | None = None
        if layers:
            self._store = KVStore(
                target.device,
                dtype,
                layers,
                capture,
                row_sequences=device_kind(target.device).row_sequences,
                angles=angles,
                limit=limit,
                min_columns=lambda: target.capacity + GRAPH_SPARE_COLUMNS // 2,
            )
        self._graphs = self._store.graphs if self._store else GraphCache(capture, target.device, dtype)
        self._max_draft_columns = 0  # of one CUDA graph
        self.start(0)

    def start(self, rows: int) -> None:
        """Start a new text in `rows` rows."""
        self.rows = rows
        self._pending: list[Pending] = []
        self.lengths = [0] * rows  # columns in the cache that are not read again
        self._ends = [0] * rows  # all columns in the cache
        self._last_replay: tuple[list[int], Pending] | None = None  # lengths before the last replay, and what it read
        if self._store is not None:
            self._store.start(rows)

    @property
    def bytes(self) -> int:
        """Bytes of the keys and values."""
        return 0 if self._store is None else self._store.bytes

    @property
    def graph_note(self) -> str:
        """Reason why CUDA graphs were requested but are not used; empty otherwise."""
        return self._graphs.note

    def release_graphs(self) -> None:
        """Free captured CUDA graphs and the cache they use."""
        if self._store is not None:
            self._store.release_graphs()
        self._graphs.clear()

    def observe(self, lengths: list[int], *columns: Tensor) -> None:
        """Add pending columns [B, A, ..], of which the first lengths[b] are real."""
        self._pending.append((lengths, columns))

    def draft(
        self,
        draft_fn: Callable[..., Draft],
        depth: int,
        sampler: TokenSampler,
        *inputs: Tensor,
        nodes: int = 0,
        draws: int | None = None,
        max_columns: int = 0,
        enough: Enough | None = None,
    ) -> Draft:
        """Run `draft_fn(draft_pass, *inputs)` as a CUDA graph if possible, else eagerly.

        nodes: size of the tree; 0: a chain. draws: sampled tokens per row; None: all of a chain, and none of a tree
        unless it is coupled. max_columns: draft columns that it appends.
        """
        if self._graphs.enabled:
            last = self._split_prefill()
            if last is not None:
                draft_fn(self.read_pending(1, sampler, nodes), *inputs)
                self._pending.append(last)
            draws = (0 if nodes and not sampler.coupled else depth) if draws is None else draws
            outputs = self._replay(draft_fn, depth, nodes, sampler, inputs, draws, max_columns)
            if outputs is not None:
                return unflatten_draft(outputs, depth)
        return draft_fn(replace(self.read_pending(depth, sampler, nodes), enough=enough), *inputs)

    def read_pending(self, depth: int, sampler: TokenSampler, nodes: int = 0) -> DraftPass:
        """Drop the draft columns and return an eager draft pass with the pending columns, which the caller must run."""
        store = self._store
        if store is None:
            return DraftPass(depth, nodes, sampler)
        if self._last_replay is not None and not self._pending:
            self._requeue(*self._last_replay)
        self._last_replay = None
        if not self._pending:
            return DraftPass(depth, nodes, sampler, View.after(store, self._ends))
        ends, (lengths, inputs) = self._take_pending()
        return DraftPass(depth, nodes, sampler, View.after(store, ends).chain(inputs[0].shape[1], lengths), inputs)

    def _take_pending(self) -> tuple[list[int], Pending]:
        """Mark the pending columns as read; return the columns per row before, and what was pending."""
        ends = self.lengths
        lengths, inputs = _merge_pending(self._pending)
        consumed = [max(n - self._reread, 0) for n in lengths]
        remaining = [n - s for n, s in zip(lengths, consumed, strict=True)]
        self._pending = []
        if self._reread:
            self._pending = [(remaining, tuple(_slice_rows(x, consumed, max(remaining)) for x in inputs))]
        self._ends = [old + n for old, n in zip(ends, lengths, strict=True)]
        self.lengths = [old + n for old, n in zip(ends, consumed, strict=True)]
        return ends, (lengths, inputs)

    def _requeue(self, lengths: list[int], pending: Pending) -> None:
        """Put the columns of a failed replay back into the queue."""
        self.lengths, self._pending, self._last_replay = lengths, [pending], None

    def _split_prefill(self) -> Pending | None:
        """If more columns are pending than a CUDA graph reads, take the last one of every row out of the queue and
        return it. The caller must read the rest eagerly and put it back."""
        if sum(columns[0].shape[1] for _, columns in self._pending) <= MAX_PENDING:
            return None
        lengths, columns = _merge_pending(self._pending)
        if min(lengths) < columns[0].shape[1]:
            return None
        self._pending = [([n - 1 for n in lengths], tuple(x[:, :-1] for x in columns))]
        return [1] * len(lengths), tuple(x[:, -1:] for x in columns)

    def _replay(
        self,
        draft_fn: Callable[..., Draft],
        depth: int,
        nodes: int,
        sampler: TokenSampler,
        inputs: Tensors,
        draws: int,
        max_columns: int,
    ) -> Tensors | None:
        """Run the draft as a CUDA graph. None: the caller must run it eagerly. The outputs are static buffers."""
        graphs, store = self._graphs, self._store
        rows = self.rows if store else len(inputs[0])
        kind = nodes, sampler.kind, rows
        num_pending = sum(columns[0].shape[1] for _, columns in self._pending)
        nothing_to_read = store is not None and not num_pending and self._last_replay is None
        graph_depth = graphs.depth(kind, depth, cut=not nodes)
        if graph_depth is None or nothing_to_read or num_pending > MAX_PENDING:
            return None
        extra = (*inputs, *sampler.predraw_noise(rows, draws, self._vocab_size, self._device))
        extra_shapes = [x.shape for x in extra]

        def draft(extra: Tensors, *columns: Any) -> Tensors:
            draft_pass = DraftPass(graph_depth, nodes, sampler.with_noise(extra[len(inputs) :]), *columns)
            return flatten_draft(draft_fn(draft_pass, *extra[: len(inputs)]))

        if store is None:
            return graphs(kind, graph_depth, lambda *extra: draft(extra), extra, extra_shapes)
        if num_pending:
            self._last_replay = self._take_pending()
        assert self._last_replay is not None
        ends, (lengths, columns) = self._last_replay
        self._max_draft_columns = max(self._max_draft_columns, max_columns)

        def draft_over_columns(view: View, lengths: Tensor, *tensors: Tensor) -> Tensors:
            return draft(tensors[len(columns) :], view.chain(MAX_PENDING, lengths), tensors[: len(columns)])

        outputs = run_captured(
            store,
            kind,
            graph_depth,
            draft_over_columns,
            [lengths],
            (*columns, *extra),
            [*((x.shape[0], MAX_PENDING, *x.shape[2:]) for x in columns), *extra_shapes],
            columns=MAX_PENDING + self._max_draft_columns,
            ends=ends,
        )
        if outputs is None:
            self._requeue(ends, (lengths, columns))
        return outputs


def _merge_pending(pending: list[Pending]) -> Pending:
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
