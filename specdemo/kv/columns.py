"""New columns of a KV cache: positions, rotary embeddings and attention masks.

B rows, S new columns, W columns of keys, D size of a state, E size of an attention head.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from specdemo.kv.cache import SlabCache
from specdemo.kv.masks import ChainMask, TreeMask

AttentionKind = tuple[int, bool]  # window in positions (0: full), and whether a column sees only earlier ones
FULL: AttentionKind = (0, True)
Mask = Tensor | ChainMask | TreeMask
Rope = tuple[Tensor, Tensor]  # cos, and sin with its first half negated, [B or 1, S, 1, E]
NO_ROPE: Rope = (torch.empty(0), torch.empty(0))
Result = TypeVar("Result")


class Angles(Protocol):
    def __call__(self, positions: Tensor, end: int, trailing: bool = False) -> Rope:
        """Return cos and sin of positions [B or 1, S], all below `end`. trailing: they are end - S .. end - 1."""


@dataclass(slots=True)
class Columns:
    """New columns with positions and masks."""

    positions: Tensor  # [B or 1, S]
    make_mask: Callable[[AttentionKind], Mask | None] | None = None
    cache: Cache | None = None
    rope: Rope = NO_ROPE  # rotary embeddings, unless the model computes its own
    last_real: Tensor | None = None  # [B] last column of each row that is not padding; None: the last one
    write_to: Tensor | None = None  # [B, S] columns of the cache to write to, inside a CUDA graph
    _masks: dict[AttentionKind, Mask | None] = field(default_factory=dict)

    def run(self, network: Callable[..., Result], *inputs: Tensor) -> Result:
        """Run `network(*inputs, self)`."""
        if self.write_to is None or not isinstance(self.cache, SlabCache):
            return network(*inputs, self)
        with self.cache.scatter_writes(self.write_to[:, None, :, None]):
            return network(*inputs, self)

    def mask(self, kind: AttentionKind = FULL) -> Tensor | None:
        """Return the attention mask [B or 1, 1, S, W], additive or boolean (True: visible).

        None: no mask is needed, except a causal one if S = W.
        """
        mask = self.visible(kind)
        return mask.matrix if isinstance(mask, ChainMask | TreeMask) else mask

    def visible(self, kind: AttentionKind = FULL) -> Mask | None:
        """Return the mask, without a matrix where lengths are enough."""
        if self.make_mask is not None and kind not in self._masks:
            self._masks[kind] = self.make_mask(kind)
        return self._masks.get(kind)

    def last(self, states: Tensor) -> Tensor:
        """Return the states [B, 1, D] of the last real column of every row."""
        if self.last_real is None:
            return states[:, -1:]
        return states[torch.arange(len(states), device=states.device), self.last_real][:, None]
