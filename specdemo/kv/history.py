"""Storage of a text's state between forward passes of a target.

`KVHistory` serves models of attention layers only: it can commit any path of a draft tree by moving columns of a
`SlabCache`. All other models need `kv.snapshots.SnapshotHistory`.

B rows, S slots, T prompt tokens.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from specdemo.core.host_copy import to_device
from specdemo.core.protocol import DraftFunction, DraftPlan, Forward, Tensors
from specdemo.core.tree import chain_parents
from specdemo.kv.cache import SlabCache
from specdemo.kv.graphs import GraphCache
from specdemo.kv.masks import AttentionMask, MaskPlan, Masks, ancestry, mask_from_tensors

ForwardFunction = Callable[..., Forward]  # one call of the model, see `models.runner.Runner`


class History(Protocol):
    """Protocol of a target's state, one row per row of the batch."""

    @property
    def lengths(self) -> list[int]:
        """Return the number of committed tokens per row."""

    @property
    def bytes(self) -> int:
        """Return the size of the stored tensors."""

    def extend(self, tokens: Tensor, taps: tuple[int, ...], reserve: int = 0) -> Forward:
        """Read tokens [B, T] after rows of equal length, which may be 0. Return logits of the last position only.

        reserve: number of tokens that will follow.
        """

    def forward(self, tokens: Tensor, parents: Tensor, taps: tuple[int, ...]) -> Forward:
        """Read tokens [B, S] with parents [B, N] provisionally."""

    def commit(self, path: list[list[int]]) -> None:
        """Commit the accepted slots of the last `forward`, per row."""

    def crop(self, lengths: list[int]) -> None:
        """Shorten every row to its entry in `lengths`."""

    def max_crop(self, length: int) -> int:
        """Return how many of the first `length` tokens `crop` can keep without reading them again. Single row only."""

    def drop_snapshots(self, length: int) -> None:
        """Drop all snapshots except the one at `length` and the newest one. Single row only."""


class KVHistory:
    """History of a model of attention layers, in a `SlabCache`.

    run_for_capture: the same model, as a CUDA graph captures it. windows: layer kind -> attention window, 0 for full
    attention. With one kind the model gets a single mask, with several a dict of masks.
    """

    def __init__(
        self,
        run: ForwardFunction,
        run_for_capture: ForwardFunction,
        cache: SlabCache,
        windows: Mapping[str, int],
        masks: Masks,
        limit: int,
        graphs: GraphCache | None = None,
    ) -> None:
        self._run, self._run_for_capture = run, run_for_capture
        self._cache, self._windows, self._masks, self._limit = cache, windows, masks, limit
        # graphs hold the addresses of a cache of this capacity
        self._graphs, self._captured_capacity = graphs, cache.cursor.capacity
        self._single_window = next(iter(windows.values())) if len(windows) == 1 else None
        masks.reserve(cache.cursor.capacity)

    @property
    def lengths(self) -> list[int]:
        return self._cache.cursor.lengths

    @property
    def bytes(self) -> int:
        return self._cache.bytes

    def extend(self, tokens: Tensor, taps: tuple[int, ...], reserve: int = 0) -> Forward:
        rows, slots = tokens.shape
        cursor = self._cache.cursor
        length = cursor.longest
        self._cache.reserve(length + slots + reserve)
        self._masks.reserve(cursor.capacity)
        positions = torch.arange(length, length + slots, device=tokens.device).expand(rows, -1)
        mask, dtype = None, self._masks.dtype
        if length:
            depth = positions[:1] - length
            mask = self._masks_by_kind(
                lambda window: mask_from_tensors(positions[:1, 0], depth, None, length + slots, window, dtype)
            )
        forward = self._run(tokens, self._cache, positions, mask, taps, last=True)
        self._cache.set_lengths([length + slots] * rows)
        return forward

    def forward(self, tokens: Tensor, parents: Tensor, taps: tuple[int, ...]) -> Forward:
        graph_output = self._forward_graph(self._graphs, tokens, parents, taps) if self._graphs else None
        return graph_output or self._forward(self._run, tokens, parents, taps)

    def _forward_graph(
        self, graphs: GraphCache, tokens: Tensor, parents: Tensor, taps: tuple[int, ...]
    ) -> Forward | None:
        """Run the pass as a CUDA graph. Return None if it cannot be captured."""
        rows, slots = tokens.shape
        chain = slots < 3 or parents is chain_parents(rows, slots - 1, parents.device)
        kind = taps, chain
        width = graphs.width(kind, slots)
        if width is None:
            return None
        self._make_room(width)

        def run(tokens: Tensor, lengths: Tensor, parents: Tensor | None = None) -> Tensors:
            forward = self._forward_at(self._run_for_capture, lengths, tokens, parents, taps)
            return forward.logits, *(forward.hidden[tap] for tap in taps)

        inputs = [tokens, to_device(self.lengths, tokens.device)] + [parents] * (not chain)
        shapes = [(rows, width), (rows,), (rows, width - 1)][: len(inputs)]
        outputs = graphs(kind, width, run, inputs, shapes)
        if outputs is None:
            return None
        logits, *hidden = (x[:, :slots].clone() for x in outputs)
        return Forward(logits, dict(zip(taps, hidden, strict=True)))

    def draft(
        self,
        run: ForwardFunction,
        tokens: Tensor,
        counts: list[int],
        write: DraftFunction,
        extra: Tensors,
        plan: DraftPlan,
    ) -> Tensors | None:
        """See `Target.draft`."""
        if self._graphs is None:
            return None
        depth = self._graphs.depth(plan.kind, plan.depth, cut=True)
        if depth is None:
            return None
        lengths, rows, room = self.lengths, len(tokens), plan.room
        self._make_room(room + depth)

        def draft_pass(tokens: Tensor, at: Tensor, *extra: Tensor) -> Tensors:
            lengths, ends = at.unbind()

            def read(chain: Tensor | None) -> Tensor:
                nonlocal ends
                if chain is None:
                    logits = self._forward_at(run, lengths, tokens, None, ()).logits
                    return logits[torch.arange(rows, device=logits.device), ends - 1]
                logits, ends = self._forward_at(run, lengths + ends, chain, None, ()).logits, ends + 1
                return logits[:, -1]

            return write(read, depth, *extra)

        inputs = (tokens, to_device([lengths, counts], tokens.device), *extra)
        shapes = [(rows, room), (2, rows), *(x.shape for x in extra)]
        outputs = self._graphs(plan.kind, depth, draft_pass, inputs, shapes)
        if outputs is not None and plan.commits:
            self._cache.set_lengths([n + c + plan.depth - 1 for n, c in zip(lengths, counts, strict=True)])
        return outputs

    def _make_room(self, slots: int) -> None:
        self._cache.prepare(slots)
        if self._graphs and self._cache.cursor.capacity != self._captured_capacity:  # graphs write to freed memory
            self._graphs.clear()
            self._captured_capacity = self._cache.cursor.capacity

    def _forward_at(
        self, run: ForwardFunction, lengths: Tensor, tokens: Tensor, parents: Tensor | None, taps: tuple[int, ...]
    ) -> Forward:
        """Run a pass after histories of lengths [B] on the device, so that one graph serves every length. parents None:
        a chain."""
        columns, offsets = self._cache.cursor.capacity, torch.arange(tokens.shape[1], device=tokens.device)
        ancestors = None if parents is None else ancestry(parents)
        depth = offsets[None] if ancestors is None else ancestors.sum(-1).long() - 1
        mask = self._masks_by_kind(
            lambda window: mask_from_tensors(lengths, depth, ancestors, columns, window, self._masks.dtype)
        )
        positions = (lengths[:, None] + depth).clamp_max(self._limit - 1)
        with self._cache.scatter_writes((lengths[:, None] + offsets)[:, None, :, None]):
            return run(tokens.clamp_min(0), self._cache, positions, mask, taps)

    @property
    def capacity(self) -> int:
        """Return the number of columns that fit without a new allocation."""
        return self._cache.cursor.capacity

    def fits(self, rows: int, columns: int) -> bool:
        """Return True if texts of this size fit without a new allocation."""
        return len(self.lengths) == rows and self._cache.cursor.capacity >= columns

    def forward_after_draft(self, run: ForwardFunction, tokens: Tensor, columns: int) -> Forward:
        """Run another pass over tokens [B, 1] as if `columns` columns after the history were committed."""
        lengths = self.lengths
        self._cache.set_lengths([n + columns for n in lengths])
        try:
            return self._forward(run, tokens, tokens[:, 1:], ())
        finally:
            self._cache.set_lengths(lengths)

    def _forward(self, run: ForwardFunction, tokens: Tensor, parents: Tensor, taps: tuple[int, ...]) -> Forward:
        rows, slots = tokens.shape
        cursor = self._cache.cursor
        self._cache.prepare(slots)
        # one token after one row: nothing to mask
        if rows == slots == 1 and self._single_window == 0 and cursor.longest < self._limit:
            return run(tokens, self._cache, cursor.position, None, taps)
        self._masks.reserve(cursor.longest)
        plan = self._masks.plan(parents)
        positions = plan.depth + (cursor.longest if cursor.row_lengths is None else cursor.row_lengths[:, None])
        if cursor.longest + plan.max_depth >= self._limit:
            positions = positions.clamp_max(self._limit - 1)  # slots of finished rows, whose logits are unused
        if rows > 1:
            positions = positions.expand(rows, -1)
        tokens = tokens.clamp_min(0)  # absent slots have no descendants, so no slot attends to them
        mask = self._masks_by_kind(lambda window: self._mask(plan, window))
        return run(tokens, self._cache, positions, mask, taps)

    def commit(self, path: list[list[int]]) -> None:
        self._cache.gather_accepted(path)

    def crop(self, lengths: list[int]) -> None:
        self._cache.set_lengths([min(old, new) for old, new in zip(self.lengths, lengths, strict=True)])

    def max_crop(self, length: int) -> int:
        return min(length, *self.lengths)

    def drop_snapshots(self, length: int) -> None:
        pass

    def _masks_by_kind(self, mask: Callable[[int], Tensor | None]) -> AttentionMask:
        """Return the mask of every layer kind, by its window."""
        if self._single_window is not None:
            return mask(self._single_window)
        return {kind: mask(window) for kind, window in self._windows.items()}

    def _mask(self, plan: MaskPlan, window: int) -> Tensor | None:
        cursor = self._cache.cursor
        if cursor.row_lengths is None:
            return self._masks.shared_mask(plan, window, cursor.longest)
        return self._masks.ragged_mask(plan, window, cursor.row_lengths, cursor.longest)
