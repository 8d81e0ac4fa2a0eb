"""Spans of columns of a KV cache: what a pass over them needs, and the spans that may follow.

B rows, S columns of the span, K nodes of a tree level, P provisional columns, W columns of keys.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import add
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache

from specdemo.core.host_copy import pinned, to_device
from specdemo.core.tree import chain_parents
from specdemo.kv.graphs import Tensors
from specdemo.kv.masks import (
    FULL,
    NO_ROPE,
    AttentionKind,
    Mask,
    Rope,
    TreeMask,
    additive,
    chain_mask,
    tree_mask,
    tree_shape,
)
from specdemo.kv.store import KVStore

Result = TypeVar("Result")


@dataclass(slots=True)
class View:
    """Span of columns, with their positions and masks, in a cache.

    ends: columns per row before the next span, less `appended`: a list, or a tensor [B] inside a CUDA graph
    (`captured`), which is replayed at every length. Lengths on the host allow to read no more columns than needed, and
    to leave out masks. A span must have been run before the next one is made.
    """

    positions: Tensor  # [B or 1, S]
    make_mask: Callable[[AttentionKind], Mask | None] | None = None  # None: that of a chain or a tree
    cache: Cache | None = None  # a `KVStore`, except in training
    rope: Rope = NO_ROPE  # rotary embeddings, unless the model computes its own
    last_real: Tensor | None = None  # [B] last column of each row that is not padding; None: the last one
    # kind of layer (see `Target.kv_shapes`) -> keys and values [B, H, W, E] before them, for drafters that only read
    committed: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    ends: list[int] | Tensor = field(default_factory=list)
    appended: int = 0
    columns: Tensor | None = None  # [B or 1, S] in the cache, of a chain and inside a CUDA graph
    start: Tensor | None = None  # [B or 1, 1] columns before the span, or before the first level of a tree
    longest: int | None = None  # `start` on the host, if it is known and the same in every row
    keys: Tensor | None = None  # [W] columns that the pass reads
    hidden: int = 0  # columns of `keys` after the span
    ancestors: Tensor | None = None  # [B, S, P] provisional columns that a slot of a tree sees
    depth: Tensor | None = None  # [B, S] of the slots of a complete tree
    levels: int = 0  # tree levels up to this one
    _masks: dict[AttentionKind, Mask | None] = field(default_factory=dict)

    @classmethod
    def after(cls, store: KVStore, ends: list[int] | Tensor | None = None) -> "View":
        """Return the empty span after ends[b] columns; None: after the committed ones."""
        return cls(store.positions[None, :0], cache=store, ends=store.lengths if ends is None else ends)

    @classmethod
    def of_committed(cls, store: KVStore, layers: Mapping[str, int], ends: Tensor | None = None) -> "View":
        """Return the next column with the committed keys and values of some layers. layers: name -> layer of the cache.

        ends [B]: the lengths on the device, inside a CUDA graph, where all columns are read; None: those on the host.
        """
        width = store.capacity if ends is not None else max(store.lengths)
        masked = ends is not None or min(store.lengths) < width
        positions = (to_device(store.lengths, store.device) if ends is None else ends)[:, None]

        def mask(kind: AttentionKind) -> Tensor | None:
            if not masked and not 0 < kind[0] < width:
                return None
            return chain_mask(positions - 1, store.positions[:width], kind, store.dtype)

        def part(slab: Tensor | None) -> Tensor:
            assert slab is not None
            return slab.narrow(2, 0, width).to(store.device)

        slabs = {name: store.slabs[index] for name, index in layers.items()}
        return cls(positions, mask, committed={name: (part(x.keys), part(x.values)) for name, x in slabs.items()})

    @property
    def captured(self) -> bool:
        """Return True inside a CUDA graph, where tensors computed from the columns must not be kept."""
        return isinstance(self.ends, Tensor)

    @property
    def store(self) -> KVStore:
        """Return the cache that the span is in."""
        assert isinstance(self.cache, KVStore)
        return self.cache

    def chain(self, width: int = 1, counts: list[int] | Tensor | None = None, *, rounded: bool = False) -> "View":
        """Return the next `width` columns. Row b has counts[b] real ones, all if None; the rest is overwritten.
        rounded: read as many columns as `PassShape` says."""
        view, positions = self._next(width, rounded), self.store.positions
        assert view.start is not None
        if view.longest is not None:
            view.columns = positions[None, view.longest : view.longest + width]
        elif view.columns is None:
            view.columns = view.start + positions[:width]
        if counts is not None:
            view.appended -= width
        if isinstance(counts, Tensor):
            assert isinstance(view.ends, Tensor)
            view.ends, view.last_real = view.ends + counts, (counts - 1).clamp_min(0)
        elif counts:
            view.ends = [*map(add, view.ends, counts)]
            if min(counts) < width:
                view.last_real = to_device([max(count - 1, 0) for count in counts], positions.device)
        return view._at(view.columns, trailing=view.longest is not None)

    def tree(self, parents: Tensor) -> "View":
        """Return columns of a complete tree with parents [B, N] in S = N + 1 slots. Nothing may follow it."""
        slots = parents.shape[1] + 1
        if not self.captured and (slots < 3 or parents is chain_parents(*parents.shape, parents.device)):
            return self.chain(slots, rounded=True)
        view = self._next(slots, rounded=True)
        view.ancestors, view.depth = tree_shape(parents)
        assert view.start is not None
        return view._at(view.start + view.depth)

    def level(self, parents: Tensor) -> "View":
        """Return the next tree level with parents [B, K]: indices in this level, 0 for the first level.

        A node sees the columns before the tree, as far back as the last of them sees at any depth, and its ancestors.
        """
        (rows, width), device, view = parents.shape, parents.device, self._next(parents.shape[1])
        above = self.ancestors
        if above is None:
            above = torch.ones(rows, 1, 0, dtype=torch.bool, device=device)
        else:
            view.start, view.longest = self.start, self.longest
        inherited = above[torch.arange(rows, device=device)[:, None], parents]
        self_visible = torch.eye(width, dtype=torch.bool, device=device).expand(rows, -1, -1)
        view.ancestors, view.levels = torch.cat([inherited, self_visible], 2), self.levels + 1
        assert view.start is not None
        return view._at((view.start + self.levels).expand(-1, width))

    def _next(self, width: int, rounded: bool = False) -> "View":
        """Make room for the next `width` columns. Lengths on the host read no columns after them, except those that
        `rounded` passes read and the mask hides."""
        store, before, appended = self.store, self.appended, self.appended + width
        if isinstance(self.ends, Tensor):
            start = (self.ends + before if before else self.ends)[:, None]
            columns = start + store.positions[:width]
            view = View(columns, None, store, ends=self.ends, appended=appended, columns=columns, start=start)
            view.keys = store.positions
            return view
        ends = [end + before for end in self.ends]
        store.make_room(max(ends) + width)
        store.place(ends, width)
        total, longest = store.longest + width, store.longest if store.row_lengths is None else None
        read = store.shape.columns(total) if rounded else total
        store.read_columns = read if rounded else 0
        start = store.positions[None, store.longest : store.longest + 1]
        if store.row_lengths is not None:
            start = store.row_lengths[:, None]
        view = View(start, None, store, ends=self.ends, appended=appended, start=start, longest=longest)
        view.keys, view.hidden = store.positions[:read], read - total
        return view

    def _at(self, positions: Tensor, trailing: bool = False) -> "View":
        """Set the positions and the rotary embeddings. trailing: the positions are the last ones of `keys` that are not
        hidden."""
        store = self.store
        assert self.keys is not None
        end = len(self.keys) - self.hidden
        if end > store.limit:
            positions, end, trailing = positions.clamp_max(store.limit - 1), store.limit, False
        self.positions = positions
        if store.angles is not None:
            cos, sin = store.angles(positions, end, trailing)
            self.rope = cos.to(store.dtype), sin.to(store.dtype)
        return self

    def run(self, network: Callable[..., Result], *inputs: Tensor) -> Result:
        """Run `network(*inputs, self)`."""
        if not self.captured:
            return network(*inputs, self)
        assert self.columns is not None
        with self.store.scatter_writes(self.columns):
            return network(*inputs, self)

    def mask(self, kind: AttentionKind = FULL) -> Tensor | None:
        """Return the attention mask [B or 1, 1, S, W], additive or boolean (True: visible).

        None: no mask is needed, except a causal one if S = W.
        """
        mask = self.visible(kind)
        return mask.matrix if isinstance(mask, TreeMask) else mask

    def visible(self, kind: AttentionKind = FULL) -> Mask | None:
        """Return the mask, without a matrix where lengths are enough."""
        if kind not in self._masks:
            self._masks[kind] = self.make_mask(kind) if self.make_mask else self._mask(kind)
        return self._masks[kind]

    def _mask(self, kind: AttentionKind) -> Mask | None:
        (window, causal), keys, start, longest = kind, self.keys, self.start, self.longest
        if keys is None or start is None:
            return None
        store, total, width, ancestors = self.store, len(keys), self.positions.shape[1], self.ancestors
        windowed = 0 < window < total
        complete = not causal or (width in (1, total) and not self.hidden)  # or causal, which needs no mask
        if ancestors is None and longest is not None and not windowed and complete:
            return None
        if self.levels and width == 1 and longest is not None and not 0 < window < longest:
            return None
        if ancestors is None and (windowed or not causal or not self.captured):
            assert self.columns is not None
            return chain_mask(self.columns, keys, kind, store.dtype)
        if ancestors is None:
            order = keys[:width]
            ancestors = (order <= order[:, None])[None]
        if self.captured and not windowed:
            return TreeMask(start[:, 0], ancestors, keys, store.dtype)
        if longest is not None and not windowed:  # faster on a CPU, and the same values
            seen = F.pad(F.pad(ancestors, (longest, 0), value=True), (0, self.hidden))
            return additive(seen, store.dtype)[:, None]
        return tree_mask(start[:, 0], ancestors, keys, store.dtype, window, self.depth)

    def last(self, states: Tensor) -> Tensor:
        """Return the states [B, 1, D] of the last real column of every row."""
        if self.last_real is None:
            return states[:, -1:]
        return states[torch.arange(len(states), device=states.device), self.last_real][:, None]


def run_captured(
    store: KVStore,
    kind: Hashable,
    size: int,
    run: Callable[..., Tensors],
    numbers: list[list[int]],
    inputs: Sequence[Tensor],
    shapes: Sequence[Sequence[int]],
    *,
    columns: int,
    ends: list[int] | None = None,
) -> Tensors | None:
    """Run `run(view, *numbers, *inputs)` as a CUDA graph; return None if graphs are disabled.

    view: the empty span after ends[b] columns, or after the committed ones if None. numbers: further lists of one
    number per row. columns: room that the graph needs after the longest row. See `GraphCache.__call__` for the rest.
    """
    ends = store.lengths if ends is None else ends
    store.make_room(max(ends) + columns + 1)
    store.place(ends)

    def capture(rows: Tensor, *tensors: Tensor) -> Tensors:
        lengths, *others = rows.unbind()
        return run(View.after(store, lengths), *others, *tensors)

    def capture_longer(rows: Tensor, *tensors: Tensor) -> Tensors:
        store.place([n + 1 for n in ends])
        outputs = capture(rows, *tensors)
        store.place(ends)
        return outputs

    def probe() -> tuple[Callable[..., Tensors], Sequence[Tensor]]:
        # a model that reads the length as a number is captured with it, and right for this length only
        return capture_longer, (pinned([[n + 1 for n in ends], *numbers], store.device), *inputs)

    rows = pinned([ends, *numbers], store.device)
    return store.graphs(kind, size, capture, (rows, *inputs), (rows.shape, *shapes), probe)
