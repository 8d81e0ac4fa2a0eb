"""Storage of a text's state between forward passes of a target.

`KVHistory` serves models of attention layers only: it can commit any path of a draft tree by moving columns of a
`SlabCache`. `SnapshotHistory` serves all other models (recurrent layers, or positions and windows counted in columns).
It runs the rows one by one on the cache of transformers, copies the state before each provisional pass, and runs a
partly accepted pass again from that copy. It verifies chains only.

B rows, S slots, T prompt tokens.
"""

from collections import deque
from collections.abc import Callable, Hashable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from specdemo.core.host import to_device
from specdemo.core.protocol import Forward
from specdemo.core.tree import ABSENT, chain_parents
from specdemo.models.cache import SlabCache
from specdemo.models.graphs import Passes, Tensors
from specdemo.models.masks import Masks, Plan, ancestry, in_place
from specdemo.models.runner import AttentionMask, Runner

SNAPSHOTS = 24  # snapshots per row: so many commits can be cropped without reading the text again


class DraftPlan(NamedTuple):
    """A draft that runs as one CUDA graph."""

    kind: Hashable  # graphs of one kind differ in depth only
    depth: int  # draft tokens needed; the graph may produce more
    room: int  # most input tokens
    layers: int = 0  # number of layers to run; 0: all
    keeps: bool = False  # commit the input tokens and all draft tokens but the last


Read = Callable[[Tensor | None], Tensor]  # see `HFTarget.draft`
Pass = Callable[..., Forward]  # one call of the model, see `Runner`
Write = Callable[..., Tensors]  # (read, depth, *extra) -> draft tokens [B, depth] and other tensors


class History(Protocol):
    """Protocol of a target's state, one row per row of the batch."""

    @property
    def lengths(self) -> list[int]:
        """Return the number of committed tokens per row."""

    @property
    def bytes(self) -> int:
        """Return the size of the stored tensors."""

    def go_on(self, tokens: Tensor, taps: tuple[int, ...], reserve: int = 0) -> Forward:
        """Read tokens [B, T] after rows of equal length, which may be 0. Return logits of the last position only.

        reserve: number of tokens that will follow.
        """

    def forward(self, tokens: Tensor, parents: Tensor, taps: tuple[int, ...]) -> Forward:
        """Read tokens [B, S] with parents [B, N] provisionally."""

    def commit(self, path: list[list[int]]) -> None:
        """Commit the accepted slots of the last `forward`, per row."""

    def crop(self, lengths: list[int]) -> None:
        """Shorten every row to its entry in `lengths`."""

    def reach(self, length: int) -> int:
        """Return how many of the first `length` tokens `crop` can keep without reading them again. Single row only."""

    def settle(self, length: int) -> None:
        """Drop all snapshots except the one at `length` and the newest one. Single row only."""


class GatherHistory:
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
        passes: Passes | None = None,
    ) -> None:
        self._run, self._cache, self._windows, self._masks, self._limit = run, cache, windows, masks, limit
        # graphs hold the addresses of a cache of this capacity
        self._passes, self._recorded = passes, cache.cursor.capacity
        self._only = next(iter(windows.values())) if len(windows) == 1 else None
        masks.reserve(cache.cursor.capacity)

    @property
    def lengths(self) -> list[int]:
        return self._cache.cursor.lengths

    @property
    def bytes(self) -> int:
        return self._cache.bytes

    def go_on(self, tokens: Tensor, taps: tuple[int, ...], reserve: int = 0) -> Forward:
        rows, slots = tokens.shape
        cursor = self._cache.cursor
        length = cursor.longest
        self._cache.reserve(length + slots + reserve)
        self._masks.reserve(cursor.capacity)
        positions = torch.arange(length, length + slots, device=tokens.device).expand(rows, -1)
        mask, dtype = None, self._masks.dtype
        if length:
            depth = positions[:1] - length
            mask = self._by_kind(lambda window: in_place(positions[:1, 0], depth, None, length + slots, window, dtype))
        forward = self._run(tokens, self._cache, positions, mask, taps, last=True)
        self._cache.set_lengths([length + slots] * rows)
        return forward

    def forward(self, tokens: Tensor, parents: Tensor, taps: tuple[int, ...]) -> Forward:
        said = self._replayed(self._passes, tokens, parents, taps) if self._passes else None
        return said or self._forward(self._run, tokens, parents, taps)

    def _replayed(self, passes: Passes, tokens: Tensor, parents: Tensor, taps: tuple[int, ...]) -> Forward | None:
        """Run the pass as a CUDA graph. Return None if it cannot be captured."""
        rows, slots = tokens.shape
        chain = slots < 3 or parents is chain_parents(rows, slots - 1, parents.device)
        kind = taps, chain
        width = passes.width(kind, slots)
        if width is None:
            return None
        self._make_room(width)

        def run(tokens: Tensor, lengths: Tensor, parents: Tensor | None = None) -> Tensors:
            said = self._behind(self._run.recorded, lengths, tokens, parents, taps)
            return said.logits, *(said.hidden[tap] for tap in taps)

        inputs = [tokens, to_device(self.lengths, tokens.device)] + [parents] * (not chain)
        shapes = [(rows, width), (rows,), (rows, width - 1)][: len(inputs)]
        said = passes(kind, width, run, inputs, shapes)
        if said is None:
            return None
        logits, *hidden = (x[:, :slots].clone() for x in said)
        return Forward(logits, dict(zip(taps, hidden, strict=True)))

    def draft(
        self, run: Pass, tokens: Tensor, counts: list[int], write: Write, more: Tensors, plan: DraftPlan
    ) -> Tensors | None:
        """See `HFTarget.draft`."""
        if self._passes is None:
            return None
        depth = self._passes.depth(plan.kind, plan.depth, cut=True)
        if depth is None:
            return None
        lengths, rows, room = self.lengths, len(tokens), plan.room
        self._make_room(room + depth)

        def drafted(tokens: Tensor, at: Tensor, *more: Tensor) -> Tensors:
            lengths, ends = at.unbind()

            def read(chain: Tensor | None) -> Tensor:
                nonlocal ends
                if chain is None:
                    said = self._behind(run, lengths, tokens, None, ()).logits
                    return said[torch.arange(rows, device=said.device), ends - 1]
                said, ends = self._behind(run, lengths + ends, chain, None, ()).logits, ends + 1
                return said[:, -1]

            return write(read, depth, *more)

        inputs = (tokens, to_device([lengths, counts], tokens.device), *more)
        shapes = [(rows, room), (2, rows), *(x.shape for x in more)]
        said = self._passes(plan.kind, depth, drafted, inputs, shapes)
        if said is not None and plan.keeps:
            self._cache.set_lengths([n + c + plan.depth - 1 for n, c in zip(lengths, counts, strict=True)])
        return said

    def _make_room(self, slots: int) -> None:
        self._cache.prepare(slots)
        if self._passes and self._cache.cursor.capacity != self._recorded:  # graphs write to freed memory
            self._passes.clear()
            self._recorded = self._cache.cursor.capacity

    def _behind(
        self, run: Pass, lengths: Tensor, tokens: Tensor, parents: Tensor | None, taps: tuple[int, ...]
    ) -> Forward:
        """Run a pass after histories of lengths [B] on the device, so that one graph serves every length. parents None:
        a chain."""
        columns, every = self._cache.cursor.capacity, torch.arange(tokens.shape[1], device=tokens.device)
        up = None if parents is None else ancestry(parents)
        depth = every[None] if up is None else up.sum(-1).long() - 1
        mask = self._by_kind(lambda window: in_place(lengths, depth, up, columns, window, self._masks.dtype))
        positions = (lengths[:, None] + depth).clamp_max(self._limit - 1)
        with self._cache.whole((lengths[:, None] + every)[:, None, :, None]):
            return run(tokens.clamp_min(0), self._cache, positions, mask, taps)

    @property
    def capacity(self) -> int:
        """Return the number of columns that fit without a new allocation."""
        return self._cache.cursor.capacity

    def fits(self, rows: int, columns: int) -> bool:
        """Return True if texts of this size fit without a new allocation."""
        return len(self.lengths) == rows and self._cache.cursor.capacity >= columns

    def ahead(self, run: Pass, tokens: Tensor, columns: int) -> Forward:
        """Run another pass over tokens [B, 1] as if `columns` columns after the history were committed."""
        lengths = self.lengths
        self._cache.set_lengths([n + columns for n in lengths])
        try:
            return self._forward(run, tokens, tokens[:, 1:], ())
        finally:
            self._cache.set_lengths(lengths)

    def _forward(self, run: Pass, tokens: Tensor, parents: Tensor, taps: tuple[int, ...]) -> Forward:
        rows, slots = tokens.shape
        cursor = self._cache.cursor
        self._cache.prepare(slots)
        # one token after one row: nothing to mask
        if rows == slots == 1 and self._only == 0 and cursor.longest < self._limit:
            return run(tokens, self._cache, cursor.position, None, taps)
        self._masks.reserve(cursor.longest)
        plan = self._masks.plan(parents)
        positions = plan.depth + (cursor.longest if cursor.each is None else cursor.each[:, None])
        if cursor.longest + plan.deepest >= self._limit:
            positions = positions.clamp_max(self._limit - 1)  # slots of finished rows, whose logits are unused
        if rows > 1:
            positions = positions.expand(rows, -1)
        tokens = tokens.clamp_min(0)  # absent slots have no descendants, so no slot attends to them
        mask = self._by_kind(lambda window: self._mask(plan, window))
        return run(tokens, self._cache, positions, mask, taps)

    def commit(self, path: list[list[int]]) -> None:
        self._cache.keep(path)

    def crop(self, lengths: list[int]) -> None:
        self._cache.set_lengths([min(old, new) for old, new in zip(self.lengths, lengths, strict=True)])

    def reach(self, length: int) -> int:
        return min(length, *self.lengths)

    def settle(self, length: int) -> None:
        pass

    def _by_kind(self, mask: Callable[[int], Tensor | None]) -> AttentionMask:
        """Return the mask of every layer kind, by its window."""
        if self._only is not None:
            return mask(self._only)
        return {kind: mask(window) for kind, window in self._windows.items()}

    def _mask(self, plan: Plan, window: int) -> Tensor | None:
        cursor = self._cache.cursor
        if cursor.each is None:
            return self._masks.at(plan, window, cursor.longest)
        return self._masks.at_each(plan, window, cursor.each, cursor.longest)


@dataclass
class _Row:
    """State of one row."""

    cache: DynamicCache
    tokens: list[int]
    fed: list[int]  # provisional tokens, in the cache after `tokens`
    marks: deque[tuple[int, list[dict[str, Any]]]]  # (length, state of every layer), oldest first


class ReplayHistory:
    """History of any other model, restored from snapshots.

    multi_token: the model continues a cache with several tokens in one pass correctly.
    """

    def __init__(self, run: Pass, config: Any, at_once: bool, device: torch.device) -> None:
        self._run, self._config, self._at_once, self._device = run, config, at_once, device
        self._rows: list[_Row] = []

    @property
    def lengths(self) -> list[int]:
        return [len(row.tokens) for row in self._rows]

    @property
    def bytes(self) -> int:
        return sum(_tensor_bytes(vars(layer)) for row in self._rows for layer in row.cache.layers)

    def go_on(self, tokens: Tensor, taps: tuple[int, ...], reserve: int = 0) -> Forward:
        if not self._rows:
            self._rows = [_Row(self._empty(), row, [], deque(maxlen=SNAPSHOTS)) for row in tokens.tolist()]
            return _joined([self._feed(row.cache, row.tokens, taps, first=True) for row in self._rows], 0)
        forwards = [self._try(row, new, taps, last=True) for row, new in zip(self._rows, tokens.tolist(), strict=True)]
        self.commit([list(range(tokens.shape[1]))] * len(tokens))
        return _joined([forward for forward in forwards if forward is not None], 0)

    def forward(self, tokens: Tensor, parents: Tensor, taps: tuple[int, ...]) -> Forward:
        forwards = [self._try(row, fed, taps) for row, fed in zip(self._rows, tokens.tolist(), strict=True)]
        some = next(forward for forward in forwards if forward is not None)
        return _joined([_widened(forward, some, tokens.shape[1]) for forward in forwards], 0)

    def commit(self, path: list[list[int]]) -> None:
        for row, slots in zip(self._rows, path, strict=True):
            kept = row.fed[: len(slots)]
            if len(kept) < len(row.fed):
                self._rewind(row, len(row.tokens))
                if kept:
                    self._feed(row.cache, kept, ())
            row.tokens += kept
            row.fed = []

    def crop(self, lengths: list[int]) -> None:
        for row, length in zip(self._rows, lengths, strict=True):
            if length < len(row.tokens):
                self._rewind(row, length)
                del row.tokens[length:]

    def reach(self, length: int) -> int:
        """Return 0 for a model that continues one token at a time: a new prefill is a single pass."""
        (row,) = self._rows
        ends = [len(row.tokens), *(marked for marked, _ in row.marks)] if self._at_once else []
        return max((end for end in ends if end <= length), default=0)

    def settle(self, length: int) -> None:
        (row,) = self._rows
        row.marks = deque((m for m in row.marks if m[0] == length or m is row.marks[-1]), maxlen=SNAPSHOTS)

    def _try(self, row: _Row, tokens: list[int], taps: tuple[int, ...], last: bool = False) -> Forward | None:
        """Return None for a row without tokens."""
        if row.fed:
            self._rewind(row, len(row.tokens))
        row.fed = [token for token in tokens if token != ABSENT]
        if not row.fed:
            return None
        row.marks.append((len(row.tokens), [_copied(vars(layer)) for layer in row.cache.layers]))
        return self._feed(row.cache, row.fed, taps, last=last)

    def _rewind(self, row: _Row, length: int) -> None:
        """Restore the row's cache to its first `length` tokens, from the nearest snapshot or from an empty cache."""
        while row.marks and row.marks[-1][0] > length:
            row.marks.pop()
        row.fed = []
        start = 0
        row.cache = self._empty()
        if row.marks:
            start, state = row.marks[-1]
            for layer, held in zip(row.cache.layers, state, strict=True):
                vars(layer).update(_copied(held))
        if start < length:
            self._feed(row.cache, row.tokens[start:length], (), first=not start)

    def _feed(
        self, cache: DynamicCache, tokens: list[int], taps: tuple[int, ...], first: bool = False, last: bool = False
    ) -> Forward:
        """Run one row.

        first: the cache is empty. last: only the logits of the last token are needed, as they are for a prefill.
        """
        ids = torch.tensor([tokens], device=self._device)
        if first or self._at_once or len(tokens) == 1:
            return self._run(ids, cache, taps=taps, last=first or last)
        return _joined([self._run(one, cache, taps=taps) for one in ids.split(1, 1)], 1)

    def _empty(self) -> DynamicCache:
        return DynamicCache(config=self._config)


def continues_at_once(run: Pass, config: Any, vocab_size: int, device: torch.device) -> bool:
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
    at_once, one_by_one = (bool((resumed(width) - expected).abs().max() <= tolerance) for width in (3, 1))
    if not at_once and not one_by_one:
        raise ValueError(
            f"a {config.model_type} model cannot be continued from its cache (it keeps its history elsewhere, or the "
            "installed transformers continues it wrongly); choose another model"
        )
    return at_once


def _copied(held: dict[str, object]) -> dict[str, object]:
    """Copy a layer's state. Keys and values are replaced in every pass and never written in place, so they need no
    copy."""
    return {name: value if name in ("keys", "values") else deepcopy(value) for name, value in held.items()}


def _tensor_bytes(held: dict[Any, object]) -> int:
    tensors = [v for v in held.values() if isinstance(v, Tensor)]
    inner = [v for v in held.values() if isinstance(v, dict)]
    return sum(t.numel() * t.element_size() for t in tensors) + sum(map(_tensor_bytes, inner))


def _joined(parts: list[Forward], dim: int) -> Forward:
    if len(parts) == 1:
        return parts[0]
    hidden = {tap: torch.cat([p.hidden[tap] for p in parts], dim) for tap in parts[0].hidden}
    return Forward(torch.cat([p.logits for p in parts], dim), hidden)


def _widened(forward: Forward | None, like: Forward, width: int) -> Forward:
    """Pad to `width` slots with zeros, for rows that ran fewer tokens or none."""
    held = 0 if forward is None else forward.logits.shape[1]
    source = like if forward is None else forward
    if held == width:
        return source

    def widened(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x[:, :held], (0, 0, 0, width - held))

    return Forward(widened(source.logits), {tap: widened(h) for tap, h in source.hidden.items()})
