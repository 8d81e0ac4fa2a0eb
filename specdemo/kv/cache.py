"""Static KV cache whose last columns are provisional: a forward pass writes after the history, a commit moves the
accepted slots up.

B rows, H key/value heads, D head size, S slots, L_b committed tokens of row b. The keys of row b occupy columns
0..L_b-1 of a slab [B, H, capacity, D] that is allocated once. A step therefore copies at most S columns, never the
whole history, and a rejected slot costs nothing: the next pass overwrites it. Rows of unequal length leave no gaps.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from specdemo.core.host_copy import to_device

CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")  # the first since transformers 5.24


def cache_argument(forward: Callable[..., object]) -> str:
    """Return the name under which a forward method of transformers takes its cache; empty if it takes none."""
    parameters = inspect.signature(forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in parameters), "")


class Cursor:
    """Write position of the next forward pass, shared by all layers of a cache."""

    def __init__(self, rows: int, capacity: int, device: torch.device, row_sequences: bool) -> None:
        self.device, self.row_sequences = device, row_sequences
        self.lengths = [0] * rows
        self.capacity = capacity
        self.longest = 0
        self.row_lengths: Tensor | None = None  # [B] lengths, if they differ
        self.columns: Tensor | None = None  # [B, 1, S, 1] columns that this pass writes to, if lengths differ
        self.full_read = False  # the pass reads all columns; its mask hides those after the new ones
        self.read_columns = 0  # columns that this pass reads, of which its mask hides the last; 0: as many as it needs


class SlabLayer(CacheLayerMixin):
    """Keys and values of one layer."""

    is_sliding = False  # layers with a window store all columns too; the mask applies the window

    def __init__(self, cursor: Cursor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cursor = cursor

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.set_slabs(self._slab(key_states), self._slab(value_states))

    def set_slabs(self, keys: Tensor, values: Tensor) -> None:
        """Use keys and values [B, H, T, D] as storage, without a copy."""
        self.keys, self.values, self.is_initialized = keys, values, True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write S new columns after the history. Return views of the history and the new columns."""
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
        if cursor.full_read:
            return self.keys, self.values
        width = cursor.read_columns or start + slots
        return self.keys.narrow(2, 0, width), self.values.narrow(2, 0, width)

    def get_seq_length(self) -> int:
        return self.cursor.longest

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cursor.longest + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def grow(self) -> None:
        """Reallocate to the cursor's new capacity."""
        if self.keys is not None and self.values is not None:
            old_keys, old_values = self.keys, self.values
            self.keys, self.values = self._slab(old_keys), self._slab(old_values)
            self.keys.narrow(2, 0, old_keys.shape[2]).copy_(old_keys)
            self.values.narrow(2, 0, old_values.shape[2]).copy_(old_values)

    def _slab(self, like: Tensor) -> Tensor:
        rows, heads, _, size = like.shape
        return _new_slab(like, self.cursor, rows, heads, size)


class SlabCache(Cache):
    """KV cache of a model of attention layers, passed under the name of `cache_argument`."""

    def __init__(
        self,
        layers: int,
        rows: int,
        capacity: int,
        device: torch.device,
        same_shape: bool = False,
        row_sequences: bool = False,
    ) -> None:
        """same_shape: keys and values have one shape in all layers. They share one tensor, so that a commit moves them
        in one operation. row_sequences: the columns of a row are contiguous, for kernels that read them as one
        sequence."""
        self.cursor = Cursor(rows, capacity, device, row_sequences)
        self.slabs = [SlabLayer(self.cursor) for _ in range(layers)]
        self._same_shape = same_shape
        self._block: Tensor | None = None  # [2 * layers, B, H, capacity, D]
        super().__init__(layers=list(self.slabs))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if self._same_shape and self._block is None:
            self._allocate_block(key_states)
        return self.slabs[layer_idx].update(key_states, value_states)

    def _allocate_block(self, like: Tensor) -> None:
        """Allocate one block for all layers, with the shape of states [B, H, S, D], and copy the old block into it."""
        old_block = self._block
        rows, heads, _, size = like.shape
        self._block = _new_slab(like, self.cursor, 2 * len(self.slabs), rows, heads, size)
        if old_block is not None:
            self._block.narrow(3, 0, old_block.shape[3]).copy_(old_block)
        for layer, keys, values in zip(self.slabs, self._block[::2], self._block[1::2], strict=True):
            layer.set_slabs(keys, values)

    @property
    def bytes(self) -> int:
        """Return the allocated size of all keys and values."""
        return sum(slabs.nbytes for slabs in self._slab_tensors())

    def reserve(self, columns: int) -> None:
        """Make room for histories of `columns` tokens."""
        if columns > self.cursor.capacity:
            self.cursor.capacity = columns
            if self._block is not None:
                self._allocate_block(self._block[0])
                return
            for layer in self.slabs:
                layer.grow()

    def write_after(self, ends: list[int], width: int) -> None:
        """Let the next forward pass write `width` columns after ends[b]. There must be room for them."""
        self.set_lengths(ends)
        cursor = self.cursor
        if cursor.row_lengths is not None:
            cursor.columns = (cursor.row_lengths[:, None] + torch.arange(width, device=cursor.device))[:, None, :, None]

    @contextmanager
    def scatter_writes(self, columns: Tensor) -> Iterator[None]:
        """Make forward passes inside the block write to columns [B, 1, S, 1] and read all columns."""
        cursor = self.cursor
        before, cursor.columns, cursor.full_read = cursor.columns, columns, True
        try:
            yield
        finally:
            cursor.columns, cursor.full_read = before, False

    def scatter_target(self, layer: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return keys and values [B, H, capacity, D] of a layer and the columns [B, 1, S, 1] to write to.

        None outside `scatter_writes`, and before the first keys are stored.
        """
        slab, cursor = self.slabs[layer], self.cursor
        if not cursor.full_read or cursor.columns is None or slab.keys is None or slab.values is None:
            return None
        return slab.keys, slab.values, cursor.columns

    def gather_accepted(self, path: list[list[int]]) -> None:
        """Move the accepted slots of the last forward pass to the end of the history."""
        cursor = self.cursor
        moving_rows = [slots for slots in path if slots != list(range(len(slots)))]
        if moving_rows and len(path) == 1:
            prefix = next(i for i, slot in enumerate(moving_rows[0]) if i != slot)
            source = to_device([cursor.longest + slot for slot in moving_rows[0][prefix:]], cursor.device)
            for slabs in self._slab_tensors():
                accepted = slabs.index_select(-2, source.to(slabs.device))
                slabs.narrow(-2, cursor.longest + prefix, len(source)).copy_(accepted)
        elif moving_rows:
            width = max(map(len, path))
            start = to_device(cursor.lengths, cursor.device)[:, None]
            # pad with slots that stay in place; they are never read again
            padded = [slots + list(range(len(slots), width)) for slots in path]
            moved = to_device(padded, cursor.device) + start
            target = torch.arange(width, device=cursor.device) + start
            for slabs in self._slab_tensors():
                _move(slabs, moved.to(slabs.device), target.to(slabs.device))
        self.set_lengths([n + len(slots) for n, slots in zip(cursor.lengths, path, strict=True)])

    def _slab_tensors(self) -> list[Tensor]:
        """Return all keys and values, [.., B, H, capacity, D] each."""
        if self._block is not None:
            return [self._block]
        return [slab for layer in self.slabs for slab in (layer.keys, layer.values) if slab is not None]

    def set_lengths(self, lengths: list[int]) -> None:
        """Set the committed lengths. Shorter rows are cropped, longer ones include columns of the last forward pass."""
        cursor = self.cursor
        cursor.lengths, cursor.longest, cursor.columns, cursor.read_columns = lengths, max(lengths), None, 0
        cursor.row_lengths = None if min(lengths) == cursor.longest else to_device(lengths, cursor.device)


def _new_slab(like: Tensor, cursor: Cursor, *shape: int) -> Tensor:
    """Allocate zeros [.., H, capacity, D] for shape [.., H, D]. Attention multiplies masked columns by 0, and 0 * NaN
    is NaN."""
    *outer, heads, size = shape
    if cursor.row_sequences:
        return like.new_zeros(*outer, cursor.capacity, heads, size).transpose(-2, -3)
    return like.new_zeros(*outer, heads, cursor.capacity, size)


def _move(slabs: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy columns source [B, A] of slabs [.., B, H, C, D] to columns target [B, A], row by row."""
    shape = (*slabs.shape[:-2], source.shape[-1], slabs.shape[-1])
    values = slabs.gather(-2, source[:, None, :, None].expand(shape))
    slabs.scatter_(-2, target[:, None, :, None].expand(shape), values)
