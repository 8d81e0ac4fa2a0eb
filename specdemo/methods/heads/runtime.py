"""What a head has read, as keys and values, and what it drafts behind that.

B rows, A columns that wait, S new columns, K of them on one level of a tree, W columns of keys, D features, E size of
an attention head.

Row b's read columns are 0 .. L_b - 1 of its slabs, where column and position are one. What is observed waits until it
is read (`catch_up`). Drafted columns stand behind (`ahead`), level by level, and vanish with the next `catch_up`.
Heads say what runs over new columns; where these stand, what they see and how a pass is started is said here.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdemo.core.protocol import Progress
from specdemo.models.cache import SPARE, Cursor, KeyValues, SlabCache
from specdemo.models.masks import additive
from specdemo.models.target import UNLIMITED

Rope = tuple[Tensor, Tensor]  # cos, and sin with its first half negated, [B or 1, S, 1, E]
Kind = tuple[int, bool]  # of attention: its window in positions (0: none), and whether a slot is blind to later ones
FULL: Kind = (0, True)
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
    _masks: dict[Kind, Tensor | None] = field(default_factory=dict)

    def run(self, network: Callable[..., Said], *inputs: Tensor) -> Said:
        """`network(*inputs, columns)`: the one place where a pass is started, and so the one to replay a recording."""
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


def unrolled_mask(columns: Tensor, step: int, window: int = 0) -> Tensor:
    """The mask [1, 1, S, W] of unrolled step `step` (from 0): columns [A] from `step` on, keys of all steps in turn.

    A draft of `step` tokens ends in column a: what is before it are observed columns, of step 0, as many as `window`
    (0: all); of each later step it sees the one column that is its own ancestor, and itself.
    """
    queries = columns[step:, None]
    seen = [(columns <= queries - step) & (columns > queries - step - (window or len(columns)))]
    seen += [columns[i:] == queries - step + i for i in range(1, step + 1)]
    return torch.cat(seen, 1)[None, None]


class HeadHistory:
    """Keys and values of one head."""

    def __init__(
        self, layers: int, dtype: torch.dtype, device: torch.device, angles: Angles, limit: int = UNLIMITED
    ) -> None:
        """limit: positions there are; slots beyond, which nobody reads, stand on the last one."""
        self._layers, self._dtype, self._device = layers, dtype, device
        self._angles, self._limit = angles, limit
        self._every = torch.arange(0, device=device)
        self.start(0)

    def start(self, rows: int) -> None:
        """An empty history of so many rows."""
        self._cache: SlabCache | None = None
        self._waiting: list[Waiting] = []
        self._read = [0] * rows  # columns that stay
        self._tips = [0] * rows  # behind them those that are read again
        self._ends = [0] * rows  # and behind these the drafted ones
        self._above: Tensor | None = None  # [B, K, drafted columns] what the frontier of a tree sees of it
        self._depth = 0  # levels of the tree

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
        return self._cache.bytes if self._cache else 0

    def observe(self, lengths: list[int], *columns: Tensor) -> None:
        """Columns [B, A, ..], of which lengths[b] are real, are to be read."""
        self._waiting.append((lengths, columns))

    def catch_up(self, again: int = 0) -> Columns | None:
        """Drop what was drafted, and place all that waits: its pass is to follow. None where nothing waits. The last
        `again` columns of every row are read again the next time."""
        self._above, self._ends = None, self._tips
        if not self._waiting:
            return None
        lengths, inputs = _joined(self._waiting)
        stay = [max(n - again, 0) for n in lengths]
        left = [n - s for n, s in zip(lengths, stay, strict=True)]
        self._waiting = [(left, tuple(_from(x, stay, max(left)) for x in inputs))] if again else []
        self._ends = self._read
        columns = self._place(inputs[0].shape[1])
        self._tips = self._ends = [old + n for old, n in zip(self._read, lengths, strict=True)]
        self._read = [old + s for old, s in zip(self._read, stay, strict=True)]
        columns.inputs = inputs
        if min(lengths) < inputs[0].shape[1]:
            columns.ends = torch.tensor([max(n - 1, 0) for n in lengths], device=self._device)
        return columns

    def ahead(self, width: int = 1, parents: Tensor | None = None) -> Columns:
        """`width` columns behind all others, that follow each other. parents [B, K]: K instead, a level of a tree, each
        below that node of the level before it (0 for the first), which sees no others but those above it."""
        if parents is None:
            columns = self._place(width)
        else:
            width = parents.shape[1]
            columns = self._level(parents)
        self._ends = [n + width for n in self._ends]
        return columns

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
            self._depth, self._above = 0, torch.ones(rows, 1, 0, dtype=torch.bool, device=self._device)
            self._ends = [max(self._tips)] * rows
        above = self._above[torch.arange(rows, device=self._device)[:, None], parents]
        themselves = torch.eye(width, dtype=torch.bool, device=self._device).expand(rows, -1, -1)
        self._above = torch.cat([above, themselves], 2)
        self._prepared(width)
        longest = max(self._tips)
        position, alike = longest + self._depth, min(self._tips) == longest
        self._depth += 1
        positions, tips = self._every[None, position : position + 1], self._every[None, longest : longest + 1]
        if not alike:
            tips = torch.tensor(self._tips, device=self._device)[:, None]
            positions = tips + (position - longest)
        visible = F.pad(self._above, (longest, 0), value=True)
        if not alike:
            visible[:, :, :longest] &= (self._every[:longest] < tips)[:, None]

        def see(kind: Kind) -> Tensor | None:
            """Of what was observed, as far back as the last of it sees, however deep the level."""
            near, window = visible, kind[0]
            if 0 < window < longest:
                near = visible.clone()
                near[:, :, :longest] &= (self._every[:longest] >= tips - window)[..., None, :]
            elif alike and width == 1:
                return None
            return additive(near, self._dtype)[:, None]

        return self._columns(positions, position + 1, see)

    def _columns(self, positions: Tensor, beyond: int, see: Callable[[Kind], Tensor | None]) -> Columns:
        inside = beyond <= self._limit
        if not inside:
            positions, beyond = positions.clamp_max(self._limit - 1), self._limit
        cos, sin = self._angles(positions, beyond, inside and len(positions) == 1)
        return Columns(positions, (cos.to(self._dtype), sin.to(self._dtype)), see, self._cache)

    def _prepared(self, width: int) -> Cursor:
        """With room for `width` columns behind all others."""
        if self._cache is None:
            self._cache = SlabCache(self._layers, self.rows, width + SPARE, self._device)
        self._cache.set_lengths(self._ends)
        self._cache.prepare(width)
        cursor = self._cache.cursor
        if len(self._every) < cursor.capacity:
            self._every = torch.arange(cursor.capacity, device=self._device)
        return cursor

    def _mask(self, kind: Kind, positions: Tensor, total: int) -> Tensor | None:
        """[B or 1, 1, S or 1, W] for columns that follow each other."""
        (window, causal), slots = kind, positions.shape[1]
        near = not 0 < window < total
        if near and len(positions) == 1 and (not causal or slots in (1, total)):
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
    width = max(map(len, places))
    index = torch.tensor([row + [0] * (width - len(row)) for row in places], device=columns.device)
    return columns[torch.arange(len(places), device=columns.device)[:, None], index]


def at_last(progress: Progress, columns: Tensor) -> Tensor:
    """columns [B, A, ..] -> [B, ..] at every row's last real column; any column of a finished row"""
    last = torch.tensor([max(n - 1, 0) for n in progress.lengths], device=columns.device)
    return columns[torch.arange(len(last), device=columns.device), last]
