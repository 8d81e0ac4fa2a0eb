"""What a head has read, as keys and values, and what it drafts behind that.

B rows, A columns that wait, S new columns, K of them on one level of a tree, W columns of keys, D features, E size of
an attention head.

Row b's read columns are 0 .. L_b - 1 of its slabs, where column and position are one. What is observed waits until it
is read (`catch_up`). Drafted columns stand behind (`ahead`), level by level, and vanish with the next `catch_up`.
Heads say what runs over new columns; where these stand, what they see and how a pass is started is said here.
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

from specdemo.core.host import padded, to_device
from specdemo.core.protocol import Progress, Target
from specdemo.models.cache import SPARE, Cursor, KeyValues, SlabCache
from specdemo.models.graphs import COLUMNS, ROOM, Tensors
from specdemo.models.masks import additive
from specdemo.models.target import UNLIMITED, HFTarget

Rope = tuple[Tensor, Tensor]  # cos, and sin with its first half negated, [B or 1, S, 1, E]
Kind = tuple[int, bool]  # of attention: its window in positions (0: none), and whether a slot is blind to later ones
FULL: Kind = (0, True)
WAITING = 24  # columns that a recorded pass reads at most; more wait behind a prompt, or steps that drafted nothing
Waiting = tuple[list[int], tuple[Tensor, ...]]  # per row how many columns are real, and the columns
Said = TypeVar("Said")


class Angles(Protocol):
    def __call__(self, positions: Tensor, beyond: int, last: bool = False) -> Rope:
        """Of positions [B or 1, S], all below `beyond`; last: they are the S last below it."""


class Rotary:
    """A table of angles, made as far as it is asked for."""

    def __init__(self, config: LlamaConfig | Qwen3Config, device: torch.device) -> None:
        with device:
            rope = LlamaRotaryEmbedding(cast(LlamaConfig, config))
        self._frequencies, self._scale = rope.get_buffer("inv_freq"), float(rope.attention_scaling)
        self._table = torch.empty(0)  # [P, 2, 1, E]

    def __call__(self, positions: Tensor, beyond: int, last: bool = False) -> Rope:
        if len(self._table) < beyond:
            angles = torch.arange(2 * beyond, device=positions.device)[:, None, None] * self._frequencies
            cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
            self._table = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], 1)
        part = self._table[None, beyond - positions.shape[1] : beyond] if last else self._table[positions]
        cos, sin = part.unbind(2)
        return cos, sin


@dataclass(slots=True)
class Columns:
    """New columns, where they stand and what they see. `inputs` are those that were observed, [B, S, ..] each."""

    positions: Tensor  # [B or 1, S]
    rope: Rope
    see: Callable[[Kind], Tensor | None] | None = None  # makes masks
    cache: KeyValues | None = None
    inputs: tuple[Tensor, ...] = ()
    ends: Tensor | None = None  # [B] each row's last real column; None: the last one
    written: Tensor | None = None  # [B, S] columns of the cache, where these are told by tensors
    _masks: dict[Kind, Tensor | None] = field(default_factory=dict)

    def run(self, network: Callable[..., Said], *inputs: Tensor) -> Said:
        """`network(*inputs, columns)`: the one place where a pass is started."""
        if self.written is None or not isinstance(self.cache, SlabCache):
            return network(*inputs, self)
        with self.cache.whole(self.written[:, None, :, None]):
            return network(*inputs, self)

    def mask(self, kind: Kind = FULL) -> Tensor | None:
        """Additive, or True where visible, [B or 1, 1, S, W]. None: nothing is hidden but, where S = W, later ones."""
        if self.see is not None and kind not in self._masks:
            self._masks[kind] = self.see(kind)
        return self._masks.get(kind)

    def last(self, states: Tensor) -> Tensor:
        """states [B, S, D] -> [B, 1, D] in every row's last real column"""
        if self.ends is None:
            return states[:, -1:]
        return states[torch.arange(len(states), device=states.device), self.ends][:, None]


def whole_rows(
    positions: Tensor, angles: Angles, beyond: int, mask: Tensor | None = None, cache: KeyValues | None = None
) -> Columns:
    """Columns that are trained on; behind those in `cache` where there are some."""
    return Columns(positions, angles(positions, beyond), lambda kind: mask, cache)


def unrolled_mask(columns: Tensor, step: int, kind: Kind = FULL) -> Tensor:
    """The mask [1, 1, S, W] of unrolled step `step` (from 0): columns [A] from `step` on, keys of all steps in turn.

    A draft of `step` tokens ends in column a: what is before it are observed columns, of step 0, as many as the window
    has; of each later step it sees the one column that is its own ancestor, and itself.
    """
    queries = columns[step:, None]
    seen = [(columns <= queries - step) & (columns > queries - step - (kind[0] or len(columns)))]
    seen += [columns[i:] == queries - step + i for i in range(1, step + 1)]
    return torch.cat(seen, 1)[None, None]


@dataclass(slots=True)
class _Told:
    """Where columns stand in a recorded pass, which is the same at every length: told by tensors, not by numbers."""

    read: Tensor  # [B] columns before those that are read
    new: Tensor  # [B] how many of these are real
    drafted: int = 0  # columns behind them
    depth: int = 0  # levels of a tree among these


class HeadHistory:
    """Keys and values of one head.

    Where passes are recorded the cache is as long as the target's from the first, and stays from text to text.
    """

    def __init__(self, target: Target, layers: int, dtype: torch.dtype, angles: Angles, limit: int = UNLIMITED) -> None:
        """limit: positions there are; slots beyond, which nobody reads, stand on the last one."""
        self._layers, self._dtype, self._device = layers, dtype, target.device
        self._target, self._angles, self._limit = target, angles, limit
        self._every = torch.arange(0, device=target.device)
        self.passes = target.passes(dtype) if isinstance(target, HFTarget) else None
        self._kept: SlabCache | None = None  # of recorded passes
        self._ahead_most = 0  # columns that one of these drafts
        self.start(0)

    def start(self, rows: int) -> None:
        """An empty history of so many rows."""
        self._cache: SlabCache | None = None
        self._told: _Told | None = None  # in a recorded pass
        self._same: tuple[list[int], Waiting] | None = None  # what the last recorded draft read, and behind how much
        self._waiting: list[Waiting] = []
        self._read = [0] * rows  # columns that stay
        self._tips = [0] * rows  # behind them those that are read again
        self._ends = [0] * rows  # and behind these the drafted ones
        self._above: Tensor | None = None  # [B, K, drafted columns] what the frontier of a tree sees of it
        self._depth = 0  # levels of the tree

    def unrecord(self) -> None:
        """Free what was recorded, and the memory that is of."""
        self._kept = None
        if self.passes is not None:
            self.passes.clear()

    @property
    def rows(self) -> int:
        """B, the rows of the batch."""
        return len(self._read)

    @property
    def lengths(self) -> list[int]:
        """Columns read, per row."""
        return self._read

    @property
    def bytes(self) -> int:
        """Bytes of its keys and values."""
        held = self._cache or self._kept
        return held.bytes if held else 0

    def observe(self, lengths: list[int], *columns: Tensor) -> None:
        """Columns [B, A, ..], of which lengths[b] are real, are to be read."""
        self._waiting.append((lengths, columns))

    def catch_up(self, again: int = 0) -> Columns | None:
        """Drop what was drafted, and place all that waits: its pass is to follow. None where nothing waits. The last
        `again` columns of every row are read again the next time."""
        if self._same is not None and not self._waiting:
            self._untake(*self._same)
        self._above, self._ends, self._same = None, self._tips, None
        if not self._waiting:
            return None
        before, (lengths, inputs) = self._taken(again)
        self._ends = before
        columns = self._place(inputs[0].shape[1])
        self._ends, columns.inputs = self._tips, inputs
        if min(lengths) < inputs[0].shape[1]:
            columns.ends = to_device([max(n - 1, 0) for n in lengths], self._device)
        return columns

    def _taken(self, again: int) -> tuple[list[int], Waiting]:
        """How many columns were read, per row, and those that wait, which are taken for read."""
        before = self._read
        lengths, inputs = _joined(self._waiting)
        stay = [max(n - again, 0) for n in lengths]
        left = [n - s for n, s in zip(lengths, stay, strict=True)]
        self._waiting = [(left, tuple(_from(x, stay, max(left)) for x in inputs))] if again else []
        self._tips = [old + n for old, n in zip(before, lengths, strict=True)]
        self._read = [old + s for old, s in zip(before, stay, strict=True)]
        return before, (lengths, inputs)

    def _untake(self, before: list[int], waiting: Waiting) -> None:
        """What a recorded draft took waits again."""
        self._read, self._waiting, self._same = before, [waiting], None

    def surplus(self, again: int) -> Columns | None:
        """Of more columns than a recorded pass can read, all but the last of every row, which are to be read first."""
        waiting = self._waiting
        if sum(columns[0].shape[1] for _, columns in waiting) <= WAITING:
            return None
        lengths, columns = _joined(waiting)
        if min(lengths) < columns[0].shape[1]:
            return None
        self._waiting = [([n - 1 for n in lengths], tuple(x[:, :-1] for x in columns))]
        at = self.catch_up(again)
        self._waiting.append(([1] * len(lengths), tuple(x[:, -1:] for x in columns)))
        return at

    def draft(
        self,
        kind: Hashable,
        depth: int,
        write: Callable[..., Tensors],
        more: Tensors,
        cut: bool,
        ahead: int,
        again: int,
    ) -> Tensors | None:
        """`write(depth, columns, *more)`: what waits is read, and drafted behind in at most `ahead` columns, as one
        recorded pass that drafts at least `depth` levels; what it says is to be copied before the next. None: it is to
        run as it is."""
        waiting = sum(columns[0].shape[1] for _, columns in self._waiting)
        if self.passes is None or waiting > WAITING or not (waiting or self._same):
            return None
        deep = self.passes.depth(kind, depth, cut)
        if deep is None:
            return None
        self._same = before, (lengths, columns) = self._taken(again) if waiting else cast(Any, self._same)
        self._ahead_most = max(self._ahead_most, ahead)
        cache = self._long_enough(max(before) + WAITING + self._ahead_most)

        def run(at: Tensor, *given: Tensor) -> Tensors:
            read, real = at.unbind()
            self._above, self._told = None, _Told(read, real)
            try:
                new = self._stand(self._told.read, WAITING)
                new.inputs, new.ends = given[: len(columns)], (self._told.new - 1).clamp_min(0)
                return write(deep, new, *given[len(columns) :])
            finally:
                self._above, self._told = None, None

        inputs = (to_device([before, lengths], self._device), *columns, *more)
        shapes = [inputs[0].shape, *((x.shape[0], WAITING, *x.shape[2:]) for x in columns), *(x.shape for x in more)]
        cache.set_lengths(before)
        said = self.passes(kind, deep, run, inputs, shapes)
        if said is None:
            self._untake(before, (lengths, columns))
        return said

    def _long_enough(self, columns: int) -> SlabCache:
        """The cache, with room for so many columns."""
        cache = self._held(columns)
        if columns > cache.cursor.capacity and self.passes:
            cache.reserve(-(-2 * columns // COLUMNS) * COLUMNS)
            self.passes.clear()
        if len(self._every) != cache.cursor.capacity:
            self._every = torch.arange(cache.cursor.capacity, device=self._device)
        return cache

    def _held(self, columns: int) -> SlabCache:
        if self._cache is None:
            if self.passes is None or self.passes.refused or not isinstance(self._target, HFTarget):
                self._cache = SlabCache(self._layers, self.rows, columns, self._device)
                return self._cache
            columns = -(-max(columns, self._target.capacity + ROOM // 2) // COLUMNS) * COLUMNS
            kept = self._kept
            if kept is None or len(kept.cursor.lengths) != self.rows or kept.cursor.capacity < columns:
                self.passes.clear()
                kept = self._kept = SlabCache(self._layers, self.rows, columns, self._device)
            self._cache = kept
        return self._cache

    def ahead(self, width: int = 1, parents: Tensor | None = None) -> Columns:
        """`width` columns behind all others, that follow each other. parents [B, K]: K instead, a level of a tree, each
        below that node of the level before it (0 for the first), which sees no others but those above it."""
        if self._told is not None:
            return self._ahead(self._told, width, parents)
        if parents is None:
            columns = self._place(width)
        else:
            width = parents.shape[1]
            columns = self._level(parents)
        self._ends = [n + width for n in self._ends]
        return columns

    def _ahead(self, told: _Told, width: int, parents: Tensor | None) -> Columns:
        """As `ahead`, in a recorded pass."""
        tips, seen = told.read + told.new, told.drafted
        width = width if parents is None else parents.shape[1]
        told.drafted += width
        if parents is None:
            return self._stand(tips + seen, width)
        above = self._seen_from(parents)
        behind = self._every - tips[:, None]  # [B, W]
        there = behind.clamp(0, told.drafted - 1)
        drafted = above.gather(2, there[:, None].expand(-1, width, -1)) & (behind == there)[:, None]
        positions = (tips + told.depth)[:, None].expand(-1, width)
        told.depth += 1

        def see(kind: Kind) -> Tensor:
            """As in `_level`: of what was observed, as far back as the last of it sees."""
            observed = (behind < 0) & (behind >= -kind[0]) if kind[0] else behind < 0
            return additive(drafted | observed[:, None], self._dtype)[:, None]

        return self._columns(positions, len(self._every), see, (tips + seen)[:, None] + self._every[:width])

    def _stand(self, start: Tensor, width: int) -> Columns:
        """Columns that follow each other from start [B] on."""
        positions = start[:, None] + self._every[:width]
        beyond = len(self._every)
        return self._columns(positions, beyond, lambda kind: self._mask(kind, positions, beyond), positions)

    def _seen_from(self, parents: Tensor) -> Tensor:
        """What a level [B, K] of a tree sees of it, itself included."""
        rows, width = parents.shape
        if self._above is None:
            self._above = torch.ones(rows, 1, 0, dtype=torch.bool, device=self._device)
        above = self._above[torch.arange(rows, device=self._device)[:, None], parents]
        themselves = torch.eye(width, dtype=torch.bool, device=self._device).expand(rows, -1, -1)
        self._above = torch.cat([above, themselves], 2)
        return self._above

    def _place(self, width: int) -> Columns:
        cursor = self._prepared(width)
        total = cursor.longest + width
        if cursor.each is None:
            positions = self._every[None, cursor.longest : total]
        else:
            positions = cursor.each[:, None] + self._every[:width]
        return self._columns(positions, total, lambda kind: self._mask(kind, positions, total))

    def _level(self, parents: Tensor) -> Columns:
        """In the same columns of all rows, behind the longest."""
        rows, width = parents.shape
        if self._above is None:
            self._depth, self._ends = 0, [max(self._tips)] * rows
        above = self._seen_from(parents)
        self._prepared(width)
        longest = max(self._tips)
        position, alike = longest + self._depth, min(self._tips) == longest
        self._depth += 1
        positions, tips = self._every[None, position : position + 1], self._every[None, longest : longest + 1]
        if not alike:
            tips = to_device(self._tips, self._device)[:, None]
            positions = tips + (position - longest)

        def see(kind: Kind) -> Tensor | None:
            """Of what was observed, as far back as the last of it sees, however deep the level."""
            near = 0 < kind[0] < longest
            if alike and width == 1 and not near:
                return None
            visible = F.pad(above, (longest, 0), value=True)
            if not alike:
                visible[:, :, :longest] &= (self._every[:longest] < tips)[:, None]
            if near:
                visible[:, :, :longest] &= (self._every[:longest] >= tips - kind[0])[..., None, :]
            return additive(visible, self._dtype)[:, None]

        return self._columns(positions, position + 1, see)

    def _columns(
        self, positions: Tensor, beyond: int, see: Callable[[Kind], Tensor | None], written: Tensor | None = None
    ) -> Columns:
        inside = beyond <= self._limit
        if not inside:
            positions, beyond = positions.clamp_max(self._limit - 1), self._limit
        cos, sin = self._angles(positions, beyond, inside and len(positions) == 1 and written is None)
        return Columns(positions, (cos.to(self._dtype), sin.to(self._dtype)), see, self._cache, written=written)

    def _prepared(self, width: int) -> Cursor:
        """With room for `width` columns behind all others."""
        cache = self._held(width + SPARE)
        before, cursor = cache.cursor.capacity, cache.cursor
        cache.set_lengths(self._ends)
        cache.prepare(width)
        if self.passes and cursor.capacity != before:
            self.passes.clear()
        if len(self._every) < cursor.capacity:
            self._every = torch.arange(cursor.capacity, device=self._device)
        return cursor

    def _mask(self, kind: Kind, positions: Tensor, total: int) -> Tensor | None:
        """[B or 1, 1, S or 1, W] for columns that follow each other."""
        (window, causal), slots = kind, positions.shape[1]
        near = not 0 < window < total
        if self._told is None and near and len(positions) == 1 and (not causal or slots in (1, total)):
            return None
        keys = self._every[:total]
        visible = keys <= (positions if causal else positions[:, -1:])[..., None]
        if not near:
            visible = visible & ((positions[..., None] - keys).abs() < window)
        return additive(visible, self._dtype)[:, None]


def _joined(waiting: list[Waiting]) -> Waiting:
    """Real columns side by side, per row."""
    if len(waiting) == 1:
        return waiting[0]
    lengths = [sum(each) for each in zip(*(lengths for lengths, _ in waiting), strict=True)]
    inputs = tuple(torch.cat(parts, 1) for parts in zip(*(columns for _, columns in waiting), strict=True))
    if min(lengths) == inputs[0].shape[1]:
        return lengths, inputs
    starts = list(accumulate((columns[0].shape[1] for _, columns in waiting), initial=0))
    places = [
        [start + i for start, (lengths, _) in zip(starts, waiting, strict=False) for i in range(lengths[row])]
        for row in range(len(lengths))
    ]
    return lengths, tuple(_picked(columns, places) for columns in inputs)


def _from(columns: Tensor, starts: list[int], width: int) -> Tensor:
    """columns [B, A, ..] -> [B, width, ..] from starts[b] on; what is beyond the last is padding."""
    if min(starts) == max(starts):
        return columns[:, starts[0] : starts[0] + width]
    last = columns.shape[1] - 1
    return _picked(columns, [[min(start + i, last) for i in range(width)] for start in starts])


def _picked(columns: Tensor, places: list[list[int]]) -> Tensor:
    """columns [B, A, ..], places[b] in them -> [B, most places, ..]"""
    rows = torch.arange(len(places), device=columns.device)[:, None]
    return columns[rows, padded(places, columns.device, 0)]


def at_last(progress: Progress, columns: Tensor) -> Tensor:
    """columns [B, A, ..] -> [B, ..] at every row's last real column; any column of a finished row"""
    if min(progress.lengths) == columns.shape[1]:
        return columns[:, -1]
    last = to_device([max(n - 1, 0) for n in progress.lengths], columns.device)
    return columns[torch.arange(len(last), device=columns.device), last]
