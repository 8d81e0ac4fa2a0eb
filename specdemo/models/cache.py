"""Key/value memory whose end is provisional: a forward writes behind the history, commit moves the kept slots up.

B rows, H key/value heads, D head size, S slots, L_b committed tokens of row b. Row b's committed keys lie in columns
0..L_b-1 of a slab [B, H, capacity, D] allocated once, so a step copies S columns, never the whole history, and a
rejected slot costs nothing: the next forward writes over it. Rows of unequal length leave no holes.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

SPARE = 64  # columns kept free when nobody said how many will follow


class Cursor:
    """Where the next forward writes; shared by all layers of a cache."""

    def __init__(self, rows: int, capacity: int, device: torch.device) -> None:
        self.device = device
        self.lengths = [0] * rows
        self.capacity = capacity
        self.longest = 0
        self.each: Tensor | None = None  # [B] lengths when they differ
        self.columns: Tensor | None = None  # [B, 1, S, 1] target columns of this forward when lengths differ
        self._every = torch.empty(0, dtype=torch.int64, device=device)

    @property
    def position(self) -> Tensor:
        """[1, 1] where the next token goes, when all rows are equally long."""
        if len(self._every) <= self.longest:
            self._every = torch.arange(max(self.capacity, self.longest + 1), device=self.device)
        return self._every[None, self.longest : self.longest + 1]


class SlabLayer(CacheLayerMixin):
    """One layer's keys and values."""

    is_sliding = False  # a windowed layer keeps everything too; its mask hides what is out of the window

    def __init__(self, cursor: Cursor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cursor = cursor

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = self._slab(key_states)
        self.values = self._slab(value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write S new columns behind the history; history and new columns come back as views."""
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        cursor = self.cursor
        slots = key_states.shape[2]
        start = cursor.longest
        if cursor.columns is None:
            self.keys.narrow(2, start, slots).copy_(key_states)
            self.values.narrow(2, start, slots).copy_(value_states)
        else:
            columns = cursor.columns.to(key_states.device)
            self.keys.scatter_(2, columns.expand_as(key_states), key_states)
            self.values.scatter_(2, columns.expand_as(value_states), value_states)
        return self.keys.narrow(2, 0, start + slots), self.values.narrow(2, 0, start + slots)

    def get_seq_length(self) -> int:
        return self.cursor.longest

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cursor.longest + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def grow(self) -> None:
        """Take up the cursor's new capacity."""
        if self.keys is not None and self.values is not None:
            old_keys, old_values = self.keys, self.values
            self.keys, self.values = self._slab(old_keys), self._slab(old_values)
            self.keys.narrow(2, 0, old_keys.shape[2]).copy_(old_keys)
            self.values.narrow(2, 0, old_values.shape[2]).copy_(old_values)

    def move_together(self, source: Tensor, target: int) -> None:
        """Copy columns source [A] of every row to the A columns from target on."""
        for slab in (self.keys, self.values):
            if slab is not None:
                slab.narrow(2, target, len(source)).copy_(slab.index_select(2, source.to(slab.device)))

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy columns source [B, A] to target [B, A], row by row."""
        for slab in (self.keys, self.values):
            if slab is not None:
                shape = (-1, slab.shape[1], -1, slab.shape[3])
                taken = slab.gather(2, source.to(slab.device)[:, None, :, None].expand(shape))
                slab.scatter_(2, target.to(slab.device)[:, None, :, None].expand(shape), taken)

    @property
    def bytes(self) -> int:
        return sum(slab.numel() * slab.element_size() for slab in (self.keys, self.values) if slab is not None)

    def _slab(self, like: Tensor) -> Tensor:
        rows, heads, _, size = like.shape
        # zeros: a masked column still meets weight 0, and 0 * NaN is NaN
        return like.new_zeros(rows, heads, self.cursor.capacity, size)


class SlabCache(Cache):
    """What a model with attention alone sees as `past_key_values`."""

    def __init__(self, layers: int, rows: int, capacity: int, device: torch.device) -> None:
        self.cursor = Cursor(rows, capacity, device)
        self.slabs = [SlabLayer(self.cursor) for _ in range(layers)]
        super().__init__(layers=list(self.slabs))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self.slabs[layer_idx].update(key_states, value_states)

    @property
    def bytes(self) -> int:
        return sum(layer.bytes for layer in self.slabs)

    def reserve(self, columns: int) -> None:
        """Make room for histories of so many tokens."""
        if columns > self.cursor.capacity:
            self.cursor.capacity = columns
            for layer in self.slabs:
                layer.grow()

    def prepare(self, slots: int) -> None:
        """Make room for a forward of S slots and say where it writes."""
        cursor = self.cursor
        needed = cursor.longest + slots
        if needed > cursor.capacity:
            self.reserve(max(needed + SPARE, 2 * cursor.capacity))
        if cursor.each is not None:
            cursor.columns = (cursor.each[:, None] + torch.arange(slots, device=cursor.device))[:, None, :, None]

    def keep(self, path: list[list[int]]) -> None:
        """The kept slots of the last forward become history."""
        cursor = self.cursor
        stray = [slots for slots in path if slots != list(range(len(slots)))]
        if stray and len(path) == 1:
            stays = next(i for i, slot in enumerate(stray[0]) if i != slot)
            source = torch.tensor([cursor.longest + slot for slot in stray[0][stays:]], device=cursor.device)
            for layer in self.slabs:
                layer.move_together(source, cursor.longest + stays)
        elif stray:
            width = max(map(len, path))
            start = torch.tensor(cursor.lengths, device=cursor.device)[:, None]
            moved = torch.tensor([_padded(slots, width) for slots in path], device=cursor.device) + start
            kept = torch.arange(width, device=cursor.device) + start
            for layer in self.slabs:
                layer.move(moved, kept)
        self.set_lengths([n + len(slots) for n, slots in zip(cursor.lengths, path, strict=True)])

    def set_lengths(self, lengths: list[int]) -> None:
        """Shorter than before forgets, longer takes over what the last forward wrote."""
        cursor = self.cursor
        cursor.lengths, cursor.longest, cursor.columns = lengths, max(lengths), None
        cursor.each = None if min(lengths) == cursor.longest else torch.tensor(lengths, device=cursor.device)


def _padded(slots: list[int], width: int) -> list[int]:
    """Slots beyond the path stay where they are; nobody reads them again."""
    return slots + list(range(len(slots), width))
