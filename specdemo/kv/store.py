"""Static KV cache whose last columns are provisional: a forward pass writes after the history, a commit moves the
accepted slots up.

B rows, H key/value heads, D head size, S new columns, L_b committed columns of row b.

The committed columns of row b are 0 .. L_b - 1 of slabs [B, H, capacity, D] that are allocated once; there, column and
position are equal. Provisional columns follow until they are committed or dropped. A step therefore copies at most S
columns, never the whole history, and a rejected slot costs nothing: the next pass overwrites it. Rows of unequal length
leave no gaps.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from specdemo.core.host_copy import to_device
from specdemo.core.protocol import UNLIMITED
from specdemo.costs.passes import PassShape
from specdemo.kv.graphs import COLUMN_MULTIPLE, GraphCache, GraphCapture
from specdemo.kv.masks import Angles

CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")  # the first since transformers 5.24
SPARE_COLUMNS = 64  # free columns where no reserve is given


def cache_argument(forward: Callable[..., object]) -> str:
    """Return the name under which a forward method of transformers takes its cache; empty if it takes none."""
    parameters = inspect.signature(forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in parameters), "")


class KVStore(Cache):
    """KV cache of attention layers for one text per row, passed to models under the name of `cache_argument`.

    The slabs that CUDA graphs use are reused by the next text, because the graphs hold their addresses.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        layers: int,
        capture: GraphCapture | None = None,
        *,
        same_shape: bool = False,
        row_sequences: bool = False,
        angles: Angles | None = None,
        limit: int = UNLIMITED,
        min_columns: Callable[[], int] = lambda: 0,
    ) -> None:
        """same_shape: keys and values have one shape in all layers. They share one tensor, so that a commit moves them
        in one operation. row_sequences: the columns of a row are contiguous, for kernels that read them as one
        sequence. angles: rotary embeddings, if the model does not compute its own.

        limit: number of positions. Later columns, whose outputs are not used, get the last position. min_columns: size
        of slabs that CUDA graphs use.
        """
        # layers with a window store all columns too; the mask applies the window
        self.slabs = [DynamicLayer() for _ in range(layers)]
        super().__init__(layers=list(self.slabs))
        self.device, self.dtype, self.angles, self.limit = device, dtype, angles, limit
        self.graphs = GraphCache(capture, device, dtype)
        self.shape = PassShape()
        self.lengths: list[int] = []  # committed columns per row
        self.capacity = 0  # columns that fit without a new allocation; 0 before the first ones of a text
        self.positions = torch.arange(0, device=device)  # [capacity]
        self._same_shape, self._row_sequences, self._min_columns = same_shape, row_sequences, min_columns
        self._block: Tensor | None = None  # [2 * layers, B, H, capacity, D]
        self._size = 0, 0  # rows and columns of the slabs
        # of the next pass:
        self.longest = 0  # columns before it, in the longest row
        self.row_lengths: Tensor | None = None  # [B] columns before it, if they differ
        self.write_columns: Tensor | None = None  # [B, 1, S, 1] columns that it writes to, if lengths differ
        self.read_columns = 0  # columns that it reads, of which its mask hides the last; 0: as many as it needs
        self.full_read = False  # it reads all columns; its mask hides those after the new ones

    @property
    def bytes(self) -> int:
        """Return the allocated size of all keys and values."""
        return sum(slabs.nbytes for slabs in self._slab_tensors())

    def start(self, rows: int, columns: int = 0) -> None:
        """Start new texts in `rows` rows. columns: make room for so many now; 0: with the first use."""
        self.lengths, self.capacity = [0] * rows, 0
        if not (self.graphs.enabled and self._size[1]):
            self._free()  # before the next slabs are allocated
        if columns:
            self.reserve(columns)

    def release_graphs(self) -> None:
        """Free the CUDA graphs, and the slabs unless a text uses them."""
        self.graphs.clear()
        self._size = 0, 0  # a text that is in the slabs is their last one
        if not self.capacity:
            self._free()

    def _free(self) -> None:
        self._block, self._size = None, (0, 0)
        for layer in self.slabs:
            layer.keys, layer.values, layer.is_initialized = None, None, False

    def reserve(self, columns: int) -> None:
        """Make room for `columns` columns."""
        columns = self.shape.columns(columns)
        if not self.capacity:
            columns = _rounded(max(columns, self._min_columns())) if self.graphs.enabled else columns
            if self._size[0] != len(self.lengths) or self._size[1] < columns:
                self.graphs.clear()
                self._free()
                self._size = len(self.lengths), columns
            self.capacity = self._size[1]
        elif columns > self.capacity:
            self.capacity = _rounded(columns) if self.graphs.enabled else columns
            self._size = len(self.lengths), self.capacity
            self._grow()
            self.graphs.clear()  # they write to memory that was freed
        if len(self.positions) != self.capacity:
            self.positions = torch.arange(self.capacity, device=self.device)

    def make_room(self, columns: int) -> None:
        """Make room for `columns` columns, with spare ones, so that this is rarely needed."""
        if columns > self.capacity:
            self.reserve(max(columns + SPARE_COLUMNS, 2 * self.capacity))

    def place(self, ends: list[int], width: int = 0) -> None:
        """Let the next pass write `width` columns after ends[b]. There must be room for them."""
        self.longest, self.write_columns, self.read_columns = max(ends), None, 0
        self.row_lengths = None if min(ends) == self.longest else to_device(ends, self.device)
        if width and self.row_lengths is not None:
            columns = self.row_lengths[:, None] + torch.arange(width, device=self.device)
            self.write_columns = columns[:, None, :, None]

    @contextmanager
    def scatter_writes(self, columns: Tensor) -> Iterator[None]:
        """Make passes inside the block write to columns [B, S] and read all columns."""
        before, self.write_columns, self.full_read = self.write_columns, columns[:, None, :, None], True
        try:
            yield
        finally:
            self.write_columns, self.full_read = before, False

    def scatter_target(self, layer: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return keys and values [B, H, capacity, D] of a layer and the columns [B, 1, S, 1] to write to.

        None outside `scatter_writes`, and before the first keys are stored.
        """
        slab = self.slabs[layer]
        if not self.full_read or self.write_columns is None or slab.keys is None or slab.values is None:
            return None
        return slab.keys, slab.values, self.write_columns

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write S new columns of a layer. Return views of the history and the new columns."""
        layer, slots, start = self.slabs[layer_idx], key_states.shape[2], self.longest
        if not layer.is_initialized:
            self._allocate(layer, key_states, value_states)
        keys, values = layer.keys, layer.values
        assert keys is not None and values is not None
        if self.write_columns is None:
            keys.narrow(2, start, slots).copy_(key_states)
            values.narrow(2, start, slots).copy_(value_states)
        else:
            columns = self.write_columns.to(key_states.device)
            keys.scatter_(2, columns.expand_as(key_states), key_states)
            values.scatter_(2, columns.expand_as(value_states), value_states)
        if self.full_read:
            return keys, values
        width = self.read_columns or start + slots
        return keys.narrow(2, 0, width), values.narrow(2, 0, width)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.longest

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.longest + query_length, 0

    def commit(self, path: list[list[int]]) -> None:
        """Append the accepted slots of the last tree, per row from the root down."""
        moving_rows = [slots for slots in path if slots != list(range(len(slots)))]
        if moving_rows and len(path) == 1:
            (slots,), (length,) = path, self.lengths
            prefix = next(i for i, slot in enumerate(slots) if i != slot)
            source = to_device([length + slot for slot in slots[prefix:]], self.device)
            for slabs in self._slab_tensors():
                accepted = slabs.index_select(-2, source.to(slabs.device))
                slabs.narrow(-2, length + prefix, len(source)).copy_(accepted)
        elif moving_rows:
            width = max(map(len, path))
            start = to_device(self.lengths, self.device)[:, None]
            # pad with slots that stay in place; they are never read again
            padded = [slots + list(range(len(slots), width)) for slots in path]
            moved = to_device(padded, self.device) + start
            target = torch.arange(width, device=self.device) + start
            for slabs in self._slab_tensors():
                _move(slabs, moved.to(slabs.device), target.to(slabs.device))
        self.lengths = [n + len(slots) for n, slots in zip(self.lengths, path, strict=True)]

    def _slab_tensors(self) -> list[Tensor]:
        """Return all keys and values, [.., B, H, capacity, D] each."""
        if self._block is not None:
            return [self._block]
        return [slab for layer in self.slabs for slab in (layer.keys, layer.values) if slab is not None]

    def _allocate(self, layer: DynamicLayer, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the slabs of a layer, or of all if they have one shape, for states [B, H, S, D]."""
        if self._same_shape:
            self._use_block(self._slab(key_states, 2 * len(self.slabs)))
        else:
            _use(layer, self._slab(key_states), self._slab(value_states))

    def _grow(self) -> None:
        """Copy the slabs into new ones of the new capacity."""
        if self._block is not None:
            self._use_block(_filled(self._slab(self._block[0], len(self._block)), self._block))
            return
        for layer in self.slabs:
            if layer.keys is not None and layer.values is not None:
                slabs = (_filled(self._slab(slab), slab) for slab in (layer.keys, layer.values))
                _use(layer, *slabs)

    def _use_block(self, block: Tensor) -> None:
        self._block = block
        for layer, keys, values in zip(self.slabs, block[::2], block[1::2], strict=True):
            _use(layer, keys, values)

    def _slab(self, like: Tensor, *outer: int) -> Tensor:
        """Allocate zeros [*outer, B, H, capacity, D] for states [B, H, S, D]. Attention multiplies masked columns by 0,
        and 0 * NaN is NaN."""
        rows, heads, _, size = like.shape
        if self._row_sequences:
            return like.new_zeros(*outer, rows, self.capacity, heads, size).transpose(-2, -3)
        return like.new_zeros(*outer, rows, heads, self.capacity, size)


def _use(layer: DynamicLayer, keys: Tensor, values: Tensor) -> None:
    layer.keys, layer.values, layer.is_initialized = keys, values, True


def _filled(slab: Tensor, old: Tensor) -> Tensor:
    """Copy the columns of an old slab into a longer one, and return it."""
    slab.narrow(-2, 0, old.shape[-2]).copy_(old)
    return slab


def _move(slabs: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy columns source [B, A] of slabs [.., B, H, C, D] to columns target [B, A], row by row."""
    shape = (*slabs.shape[:-2], source.shape[-1], slabs.shape[-1])
    values = slabs.gather(-2, source[:, None, :, None].expand(shape))
    slabs.scatter_(-2, target[:, None, :, None].expand(shape), values)


def _rounded(columns: int) -> int:
    """Round up so that mask rows are aligned."""
    return -(-columns // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
