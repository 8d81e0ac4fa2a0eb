"""Key/value memory whose end is provisional: a forward writes behind the history, commit moves the kept slots up.

B rows, H key/value heads, D head size, S slots, L_b committed tokens of row b. Row b's committed keys lie in columns
0..L_b-1 of a slab [B, H, capacity, D] allocated once, so a step copies S columns, never the whole history, and a
rejected slot costs nothing: the next forward writes over it. Rows of unequal length leave no holes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from specdemo.core.host import to_device

SPARE = 64  # columns kept free when nobody said how many will follow


class KeyValues(Protocol):
    """What layers ask of a cache."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """New keys and values [B, H, S, D] of a layer -> those there are and the new ones [B, H, L, D]."""


class Cursor:
    """Where the next forward writes; shared by all layers of a cache."""

    def __init__(self, rows: int, capacity: int, device: torch.device) -> None:
        self.device = device
        self.lengths = [0] * rows
        self.capacity = capacity
        self.longest = 0
        self.each: Tensor | None = None  # [B] lengths when they differ
        self.columns: Tensor | None = None  # [B, 1, S, 1] target columns of this forward when lengths differ
        self.whole = False  # a forward reads all columns, those behind the new ones too, which its mask hides
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
        self.hold(self._slab(key_states), self._slab(value_states))

    def hold(self, keys: Tensor, values: Tensor) -> None:
        """Take keys and values [B, heads, T, D] as they are, copying nothing."""
        self.keys, self.values, self.is_initialized = keys, values, True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
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
        if cursor.whole:
            return self.keys, self.values
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

    def _slab(self, like: Tensor) -> Tensor:
        rows, heads, _, size = like.shape
        # zeros: a masked column still meets weight 0, and 0 * NaN is NaN
        return like.new_zeros(rows, heads, self.cursor.capacity, size)


class SlabCache(Cache):
    """What a model with attention alone sees as `past_key_values`."""

    def __init__(self, layers: int, rows: int, capacity: int, device: torch.device, alike: bool = False) -> None:
        """alike: all layers have keys and values of one shape; their slabs are one tensor, and move as one."""
        self.cursor = Cursor(rows, capacity, device)
        self.slabs = [SlabLayer(self.cursor) for _ in range(layers)]
        self._alike = alike
        self._block: Tensor | None = None  # [2 * layers, B, H, capacity, D]
        super().__init__(layers=list(self.slabs))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if self._alike and self._block is None:
            self._share(key_states)
        return self.slabs[layer_idx].update(key_states, value_states)

    def _share(self, like: Tensor) -> None:
        """Lay out one block for all layers, like states [B, H, S, D], and take over what the last one held."""
        before = self._block
        rows, heads, _, size = like.shape
        self._block = like.new_zeros(2 * len(self.slabs), rows, heads, self.cursor.capacity, size)
        if before is not None:
            self._block.narrow(3, 0, before.shape[3]).copy_(before)
        for layer, keys, values in zip(self.slabs, self._block[::2], self._block[1::2], strict=True):
            layer.hold(keys, values)

    @property
    def bytes(self) -> int:
        """Bytes of all layers' keys and values, filled or not."""
        return sum(slabs.nbytes for slabs in self._held())

    def reserve(self, columns: int) -> None:
        """Make room for histories of so many tokens."""
        if columns > self.cursor.capacity:
            self.cursor.capacity = columns
            if self._block is not None:
                self._share(self._block[0])
                return
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

    @contextmanager
    def whole(self, columns: Tensor) -> Iterator[None]:
        """A forward in it writes to columns [B, 1, S, 1] and reads all there are."""
        cursor = self.cursor
        before, cursor.columns, cursor.whole = cursor.columns, columns, True
        try:
            yield
        finally:
            cursor.columns, cursor.whole = before, False

    def keep(self, path: list[list[int]]) -> None:
        """The kept slots of the last forward become history."""
        cursor = self.cursor
        stray = [slots for slots in path if slots != list(range(len(slots)))]
        if stray and len(path) == 1:
            stays = next(i for i, slot in enumerate(stray[0]) if i != slot)
            source = to_device([cursor.longest + slot for slot in stray[0][stays:]], cursor.device)
            for slabs in self._held():
                kept = slabs.index_select(-2, source.to(slabs.device))
                slabs.narrow(-2, cursor.longest + stays, len(source)).copy_(kept)
        elif stray:
            width = max(map(len, path))
            start = to_device(cursor.lengths, cursor.device)[:, None]
            # slots beyond the path stay where they are; nobody reads them again
            padded = [slots + list(range(len(slots), width)) for slots in path]
            moved = to_device(padded, cursor.device) + start
            target = torch.arange(width, device=cursor.device) + start
            for slabs in self._held():
                _move(slabs, moved.to(slabs.device), target.to(slabs.device))
        self.set_lengths([n + len(slots) for n, slots in zip(cursor.lengths, path, strict=True)])

    def _held(self) -> list[Tensor]:
        """All keys and values, [.., B, H, capacity, D] each."""
        if self._block is not None:
            return [self._block]
        return [slab for layer in self.slabs for slab in (layer.keys, layer.values) if slab is not None]

    def set_lengths(self, lengths: list[int]) -> None:
        """Shorter than before forgets, longer takes over what the last forward wrote."""
        cursor = self.cursor
        cursor.lengths, cursor.longest, cursor.columns = lengths, max(lengths), None
        cursor.each = None if min(lengths) == cursor.longest else to_device(lengths, cursor.device)


def _move(slabs: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy columns source [B, A] of slabs [.., B, H, C, D] to target [B, A], row by row."""
    shape = (*slabs.shape[:-2], source.shape[-1], slabs.shape[-1])
    taken = slabs.gather(-2, source[:, None, :, None].expand(shape))
    slabs.scatter_(-2, target[:, None, :, None].expand(shape), taken)
