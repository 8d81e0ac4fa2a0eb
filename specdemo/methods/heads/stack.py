"""Parallel decoder layers, computed together.

N layers, B rows, S columns, K key/value heads, D hidden size, E size of an attention head, W columns of the cache.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specdemo.kv.columns import Columns
from specdemo.models.layers import DecoderLayer, attend
from specdemo.models.operations import apply_rope


class Stack:
    """Layers with the same input, each operation run once for all layers.

    The layers' weights become views of the stack's tensors, so that they use no extra memory and can still be used one
    by one. A deep copy is None, because a copy may be trained.
    """

    def __init__(self, layers: Sequence[DecoderLayer]) -> None:
        attention, mlp = [layer.self_attn for layer in layers], [layer.mlp for layer in layers]
        self.head_dim, self.act = attention[0].head_dim, mlp[0].act_fn
        self.heads, self.kv_heads = attention[0].heads, attention[0].kv_heads
        self.eps = layers[0].post_attention_layernorm.eps
        self.before_attention = _stack_parameters([layer.input_layernorm.weight] for layer in layers)[:, None]
        self.before_mlp = _stack_parameters([layer.post_attention_layernorm.weight] for layer in layers)[:, None]
        self.qkv = _stack_parameters([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight] for a in attention)
        self.out = _stack_parameters([a.o_proj.weight] for a in attention)
        self.gate_up = _stack_parameters([m.gate_proj.weight, m.up_proj.weight] for m in mlp)
        self.down = _stack_parameters([m.down_proj.weight] for m in mlp)

    def __call__(self, x: Tensor, columns: Columns, count: int) -> Tensor:
        """Return [B, count, D]: the outputs of the first `count` layers at the last real column of every row of
        x [B, S, D]. Keys and values of all layers go into the first layer of the cache."""
        assert columns.cache is not None
        rows = len(x)
        normed = self._normed(x).flatten(0, 1) * self.before_attention
        qkv = _matmul(self.qkv, normed).unflatten(-1, (-1, self.head_dim)).unflatten(1, x.shape[:2])
        qk, value = qkv.split([self.heads + self.kv_heads, self.kv_heads], 3)  # [N, B, S, heads, E]
        query, key = apply_rope(qk, columns.rope).split([self.heads, self.kv_heads], 3)
        key, value = columns.cache.update(_merge_layers(key), _merge_layers(value), 0)
        row_ids, ends = torch.arange(rows, device=x.device), _last_columns(x, columns)
        query = query[:count, row_ids, ends].transpose(0, 1).flatten(1, 2)[:, :, None]
        used = count * self.kv_heads
        out = attend(query, key[:, :used], value[:, :used], _last_mask(columns, ends, x.shape[1]), False)
        state = x[row_ids, ends] + _matmul(self.out[:count], out.reshape(rows, count, -1).transpose(0, 1))
        gate, up = _matmul(self.gate_up[:count], self._normed(state) * self.before_mlp[:count]).chunk(2, -1)
        return (state + _matmul(self.down[:count], self.act(gate) * up)).transpose(0, 1)

    def _normed(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], None, self.eps).to(x.dtype)

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        return None


def _stack_parameters(groups: Iterable[Sequence[Any]]) -> Tensor:
    """Stack the parameters of all layers, [N, rows, size] or for vectors [N, size]. The parameters become views of the
    result."""
    groups = list(groups)
    stack = torch.stack([torch.cat([p.detach() for p in group]) for group in groups])
    for weights, group in zip(stack, groups, strict=True):
        for parameter, part in zip(group, weights.split([len(p) for p in group]), strict=True):
            parameter.data = part
    return stack


def _matmul(weights: Tensor, states: Tensor) -> Tensor:
    """Multiply weights [N, out, in] by states [N, S, in]; return [N, S, out]. A CPU is faster with the few states on
    the right."""
    return torch.bmm(weights, states.mT).mT


def _merge_layers(states: Tensor) -> Tensor:
    """Reshape [N, B, S, K, E] to [B, N * K, S, E]."""
    return states.permute(1, 0, 3, 2, 4).flatten(1, 2)


def _last_columns(x: Tensor, columns: Columns) -> Tensor:
    """Return the last real column [B] of every row of x [B, S, D]."""
    if columns.last_real is not None:
        return columns.last_real
    return torch.full((len(x),), x.shape[1] - 1, device=x.device)


def _last_mask(columns: Columns, ends: Tensor, width: int) -> Tensor | None:
    """Return the mask [B, 1, 1, W] of column ends[b] of `width` new columns; None: nothing is masked."""
    mask = columns.mask()
    if mask is not None:
        return mask.expand(len(ends), -1, -1, -1)[torch.arange(len(ends), device=ends.device), :, ends][:, :, None]
    if width == 1:
        return None
    return (torch.arange(width, device=ends.device) <= ends[:, None])[:, None, None]
