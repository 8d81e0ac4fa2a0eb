"""Attention masks of the columns of a KV cache: chains, and draft trees after a history.

B rows, N draft nodes, S = N + 1 slots, L committed tokens, C longest supported history, W = L + S columns.

The committed tokens of row b occupy columns 0..L_b-1 of its cache, so their column equals their position. The S new
slots follow in columns L_b..L_b+S-1, at positions L_b + depth. Windows count positions, not columns. Masks are computed
from lengths on the device, so that a CUDA graph computes them again in every replay.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from specdemo.core.host_copy import on_host

ALIGNMENT = 16  # elements; with other row strides the GPU kernels copy the mask in every layer


@dataclass(frozen=True)
class TreeMask:
    """Mask [B, 1, S, W] of the slots of a tree or chain, see `tree_mask`.

    A kernel that reads lengths and ancestors from tensors needs no matrix, and reads visible columns only.
    """

    ends: Tensor
    ancestors: Tensor
    keys: Tensor
    dtype: torch.dtype

    @cached_property
    def matrix(self) -> Tensor:
        """The additive mask [B, 1, S, W]."""
        return tree_mask(self.ends, self.ancestors, self.keys, self.dtype)


AttentionMask = Tensor | TreeMask | None | dict[str, Tensor | None]  # a dict has one mask per layer kind


def ancestry(parents: Tensor) -> Tensor:
    """Return [R, S, S] from parents [R, N]: 1.0 where slot t is slot s or an ancestor of it.

    Doubles the path length in each of log2(S) matrix products, instead of one step per node.
    """
    rows, nodes = parents.shape
    ancestors = torch.eye(nodes + 1, device=parents.device).repeat(rows, 1, 1)
    if nodes:
        ancestors[:, 1:].scatter_(2, parents[..., None], 1.0)
    for _ in range(nodes.bit_length()):
        ancestors = (ancestors @ ancestors).clamp_max_(1.0)
    return ancestors


def tree_shape(parents: Tensor) -> tuple[Tensor, Tensor]:
    """Return which slots a slot sees, bool [B, S, S], and depths [B, S], from parents [B, N]. A CPU keeps recent
    trees."""
    if on_host(parents.device):
        return _known_shape(tuple(map(tuple, parents.tolist())))
    ancestors = ancestry(parents)
    return ancestors > 0, ancestors.sum(-1).long() - 1


@lru_cache(maxsize=32)
def _known_shape(parents: tuple[tuple[int, ...], ...]) -> tuple[Tensor, Tensor]:
    ancestors = ancestry(torch.tensor(parents))
    return ancestors > 0, ancestors.sum(-1).long() - 1


def chain_mask(positions: Tensor, keys: Tensor, kind: tuple[int, bool], dtype: torch.dtype) -> Tensor:
    """Return the mask [B or 1, 1, S, W] of consecutive columns at positions [B or 1, S] over keys [W].

    kind: window in positions (0: full), and whether a column sees only earlier ones. Only uses device tensors, so that
    a CUDA graph computes the mask again in every replay.
    """
    window, causal = kind
    visible = keys <= (positions if causal else positions[:, -1:])[..., None]
    if 0 < window < len(keys):
        visible = visible & ((positions[..., None] - keys).abs() < window)
    return additive(visible, dtype)[:, None]


def tree_mask(
    ends: Tensor, ancestors: Tensor, keys: Tensor, dtype: torch.dtype, window: int = 0, depth: Tensor | None = None
) -> Tensor:
    """Return the mask [B, 1, S, W] of S slots of a tree over keys [W], after ends[b] committed columns.

    ancestors [B or 1, S, P] bool: which of the P provisional columns a slot sees. depth [B or 1, S]: the window ends at
    each slot's own position; None: at the root, for all levels. Only uses device tensors, like `chain_mask`.
    """
    rows, (slots, provisional) = max(len(ends), len(ancestors)), ancestors.shape[1:]
    offsets = keys - ends[:, None]  # [B or 1, W]
    index = offsets.clamp(0, provisional - 1)
    new = offsets == index
    above = ancestors.expand(rows, -1, -1).gather(2, index[:, None].expand(rows, slots, -1))
    visible = torch.where(new[:, None], above, (offsets < 0)[:, None])
    if window and depth is None:
        visible = visible & (offsets >= -window)[:, None]
    elif window and depth is not None:
        key_positions = keys + new * (depth.expand(rows, -1).gather(1, index.expand(rows, -1)) - index)
        positions = (ends[:, None] + depth)[..., None]
        visible = visible & (positions - key_positions[:, None] < window)
    return additive(visible, dtype)[:, None]


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert visible [..., W] to additive values: 0 where True, else the lowest number of `dtype`."""
    return aligned(torch.where(visible, 0.0, torch.finfo(dtype).min).to(dtype))


def aligned(mask: Tensor) -> Tensor:
    """Align the row stride of a mask on a GPU, as the memory-efficient attention kernels require."""
    if on_host(mask.device):
        return mask
    width = mask.shape[-1]
    buffer = mask.new_empty(*mask.shape[:-1], -(-width // ALIGNMENT) * ALIGNMENT)
    return buffer[..., :width].copy_(mask)


AttentionKind = tuple[int, bool]  # window in positions (0: full), and whether a column sees only earlier ones
FULL: AttentionKind = (0, True)
Mask = Tensor | TreeMask
Rope = tuple[Tensor, Tensor]  # cos, and sin with its first half negated, [B or 1, S, 1, E]
NO_ROPE: Rope = (torch.empty(0), torch.empty(0))
# (positions [B or 1, S], end, trailing) -> cos and sin. All positions are below `end`; trailing: end - S .. end - 1
Angles = Callable[..., Rope]
