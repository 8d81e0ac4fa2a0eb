"""Storage of a text's state between forward passes of a target.

`KVHistory` serves models of attention layers only: it can commit any path of a draft tree by moving columns of a
`SlabCache`. `SnapshotHistory` serves all other models (recurrent layers, or positions and windows counted in columns).
It runs the rows one by one on the cache of transformers, copies the state before each provisional pass, and runs a
partly accepted pass again from that copy. It verifies chains only.

B rows, S slots, T prompt tokens.
"""

from collections import deque
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from specdemo.core.host_copy import to_device
from specdemo.core.protocol import DraftFunction, DraftPlan, Forward, Tensors
from specdemo.core.tree import ABSENT, chain_parents
from specdemo.models.cache import SlabCache
from specdemo.models.graphs import GraphCache
from specdemo.models.masks import MaskPlan, Masks, ancestry, mask_from_tensors
from specdemo.models.runner import AttentionMask, Runner

SNAPSHOTS = 24  # snapshots per row: so many commits can be cropped without reading the text again


ForwardFunction = Callable[..., Forward]  # one call of the model, see `Runner`


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

    windows: layer kind -> attention window, 0 for full attention. With one kind the model gets a single mask, with
    several a dict of masks.
    """

    def __init__(
        self,
        run: Runner,
        cache: SlabCache,
        windows: Mapping[str, int],
        masks: Masks,
        limit: int,
        graphs: GraphCache | None = None,
    ) -> None:
        self._run, self._cache, self._windows, self._masks, self._limit = run, cache, windows, masks, limit
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
            forward = self._forward_at(self._run.for_capture, lengths, tokens, parents, taps)
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


@dataclass
class _RowState:
    """State of one row."""

    cache: DynamicCache
    tokens: list[int]
    provisional: list[int]  # provisional tokens, in the cache after `tokens`
    snapshots: deque[tuple[int, list[dict[str, Any]]]]  # (length, state of every layer), oldest first


class SnapshotHistory:
    """History of any other model, restored from snapshots.

    multi_token: the model continues a cache with several tokens in one pass correctly.
    """

    def __init__(self, run: ForwardFunction, config: Any, multi_token: bool, device: torch.device) -> None:
        self._run, self._config, self._multi_token, self._device = run, config, multi_token, device
        self._rows: list[_RowState] = []

    @property
    def lengths(self) -> list[int]:
        return [len(row.tokens) for row in self._rows]

    @property
    def bytes(self) -> int:
        return sum(_tensor_bytes(vars(layer)) for row in self._rows for layer in row.cache.layers)

    def extend(self, tokens: Tensor, taps: tuple[int, ...], reserve: int = 0) -> Forward:
        if not self._rows:
            self._rows = [_RowState(self._empty(), row, [], deque(maxlen=SNAPSHOTS)) for row in tokens.tolist()]
            return _concat([self._run_tokens(row.cache, row.tokens, taps, first=True) for row in self._rows], 0)
        forwards = [
            self._forward_row(row, new, taps, last=True) for row, new in zip(self._rows, tokens.tolist(), strict=True)
        ]
        self.commit([list(range(tokens.shape[1]))] * len(tokens))
        return _concat([forward for forward in forwards if forward is not None], 0)

    def forward(self, tokens: Tensor, parents: Tensor, taps: tuple[int, ...]) -> Forward:
        forwards = [self._forward_row(row, ids, taps) for row, ids in zip(self._rows, tokens.tolist(), strict=True)]
        reference = next(forward for forward in forwards if forward is not None)
        return _concat([_pad_slots(forward, reference, tokens.shape[1]) for forward in forwards], 0)

    def commit(self, path: list[list[int]]) -> None:
        for row, slots in zip(self._rows, path, strict=True):
            accepted = row.provisional[: len(slots)]
            if len(accepted) < len(row.provisional):
                self._restore(row, len(row.tokens))
                if accepted:
                    self._run_tokens(row.cache, accepted, ())
            row.tokens += accepted
            row.provisional = []

    def crop(self, lengths: list[int]) -> None:
        for row, length in zip(self._rows, lengths, strict=True):
            if length < len(row.tokens):
                self._restore(row, length)
                del row.tokens[length:]

    def max_crop(self, length: int) -> int:
        """Return 0 for a model that continues one token at a time: a new prefill is a single pass."""
        (row,) = self._rows
        ends = [len(row.tokens), *(marked for marked, _ in row.snapshots)] if self._multi_token else []
        return max((end for end in ends if end <= length), default=0)

    def drop_snapshots(self, length: int) -> None:
        (row,) = self._rows
        row.snapshots = deque((m for m in row.snapshots if m[0] == length or m is row.snapshots[-1]), maxlen=SNAPSHOTS)

    def _forward_row(
        self, row: _RowState, tokens: list[int], taps: tuple[int, ...], last: bool = False
    ) -> Forward | None:
        """Return None for a row without tokens."""
        if row.provisional:
            self._restore(row, len(row.tokens))
        row.provisional = [token for token in tokens if token != ABSENT]
        if not row.provisional:
            return None
        row.snapshots.append((len(row.tokens), [_copy_state(vars(layer)) for layer in row.cache.layers]))
        return self._run_tokens(row.cache, row.provisional, taps, last=last)

    def _restore(self, row: _RowState, length: int) -> None:
        """Restore the row's cache to its first `length` tokens, from the nearest snapshot or from an empty cache."""
        while row.snapshots and row.snapshots[-1][0] > length:
            row.snapshots.pop()
        row.provisional = []
        start = 0
        row.cache = self._empty()
        if row.snapshots:
            start, state = row.snapshots[-1]
            for layer, layer_state in zip(row.cache.layers, state, strict=True):
                vars(layer).update(_copy_state(layer_state))
        if start < length:
            self._run_tokens(row.cache, row.tokens[start:length], (), first=not start)

    def _run_tokens(
        self, cache: DynamicCache, tokens: list[int], taps: tuple[int, ...], first: bool = False, last: bool = False
    ) -> Forward:
        """Run one row.

        first: the cache is empty. last: only the logits of the last token are needed, as they are for a prefill.
        """
        ids = torch.tensor([tokens], device=self._device)
        if first or self._multi_token or len(tokens) == 1:
            return self._run(ids, cache, taps=taps, last=first or last)
        return _concat([self._run(one, cache, taps=taps) for one in ids.split(1, 1)], 1)

    def _empty(self) -> DynamicCache:
        return DynamicCache(config=self._config)


def supports_multi_token(run: ForwardFunction, config: Any, vocab_size: int, device: torch.device) -> bool:
    """Return True if several tokens after a cached prefix give the same logits as one at a time.

    Some recurrent layers restart instead. Raises ValueError for a model that cannot continue its cache after another
    text was read.
    """
    tokens = torch.arange(1, 9, device=device)[None] % vocab_size
    expected = run(tokens, DynamicCache(config=config)).logits[:, 5:].float()

    def resumed(width: int) -> Tensor:
        cache = DynamicCache(config=config)
        run(tokens[:, :5], cache)
        run(tokens.flip(1), DynamicCache(config=config))
        return torch.cat([run(part, cache).logits for part in tokens[:, 5:].split(width, 1)], 1).float()

    exact = expected.dtype == run(tokens[:, :1], DynamicCache(config=config)).logits.dtype
    tolerance = (1e-3 if exact else 3e-2) * float(expected.std())
    multi_token, single_token = (bool((resumed(width) - expected).abs().max() <= tolerance) for width in (3, 1))
    if not multi_token and not single_token:
        raise ValueError(
            f"a {config.model_type} model cannot be continued from its cache (it stores its history elsewhere, or "
            "the installed transformers has a bug); choose another model"
        )
    return multi_token


def _copy_state(state: dict[str, object]) -> dict[str, object]:
    """Copy a layer's state. Keys and values are replaced in every pass and never written in place, so they need no
    copy."""
    return {name: value if name in ("keys", "values") else deepcopy(value) for name, value in state.items()}


def _tensor_bytes(state: dict[Any, object]) -> int:
    tensors = [v for v in state.values() if isinstance(v, Tensor)]
    inner = [v for v in state.values() if isinstance(v, dict)]
    return sum(t.numel() * t.element_size() for t in tensors) + sum(map(_tensor_bytes, inner))


def _concat(parts: list[Forward], dim: int) -> Forward:
    if len(parts) == 1:
        return parts[0]
    hidden = {tap: torch.cat([p.hidden[tap] for p in parts], dim) for tap in parts[0].hidden}
    return Forward(torch.cat([p.logits for p in parts], dim), hidden)


def _pad_slots(forward: Forward | None, like: Forward, width: int) -> Forward:
    """Pad to `width` slots with zeros, for rows that ran fewer tokens or none."""
    slots = 0 if forward is None else forward.logits.shape[1]
    source = like if forward is None else forward
    if slots == width:
        return source

    def pad(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x[:, :slots], (0, 0, 0, width - slots))

    return Forward(pad(source.logits), {tap: pad(h) for tap, h in source.hidden.items()})
