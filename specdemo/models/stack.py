"""Parallel layers of heads, computed together.

N layers, B rows, S slots, K key/value heads, D head size, L columns of the cache.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from specdemo.kv.cache import KeyValues
from specdemo.models.fused import SingleLayerCache, close, is_plain, probe_input, signed_sin


class Stack:
    """Llama layers with the same input, each operation run once for all layers.

    The layers' weights become views of the stack's tensors, so that they use no extra memory and can still be used one
    by one. A deep copy is None, because a copy may be trained.
    """

    def __init__(self, layers: Any) -> None:
        first = layers[0].self_attn
        self.head_dim, self.scaling, self.act = first.head_dim, first.scaling, layers[0].mlp.act_fn
        self.heads = first.q_proj.out_features // self.head_dim
        self.kv_heads = first.k_proj.out_features // self.head_dim
        self.eps = layers[0].input_layernorm.variance_epsilon
        self.before_attention = _stack_parameters([layer.input_layernorm.weight] for layer in layers)[:, None]
        self.before_mlp = _stack_parameters([layer.post_attention_layernorm.weight] for layer in layers)[:, None]
        attention = [layer.self_attn for layer in layers]
        self.qkv = _stack_parameters([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight] for a in attention)
        self.out = _stack_parameters([a.o_proj.weight] for a in attention)
        self.gate_up = _stack_parameters([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight] for layer in layers)
        self.down = _stack_parameters([layer.mlp.down_proj.weight] for layer in layers)

    def __call__(
        self, x: Tensor, ends: Tensor, count: int, angles: tuple[Tensor, Tensor], mask: Tensor | None, cache: KeyValues
    ) -> Tensor:
        """Return [B, count, hidden]: the outputs of the first `count` layers at column ends[b] of x [B, S, hidden].

        angles: cos and sin [B, S, D]. mask: [B or 1, 1, S, L], None: causal. Keys and values of all layers go into the
        first layer of the cache.
        """
        rows, slots, _ = x.shape
        row_ids, (cos, sin) = torch.arange(rows, device=x.device), angles
        normed = self._normed(x).flatten(0, 1) * self.before_attention
        qkv = _matmul(self.qkv, normed).unflatten(-1, (-1, self.head_dim)).unflatten(1, (rows, slots))
        qk, value = qkv.split([self.heads + self.kv_heads, self.kv_heads], 3)  # [N, B, S, heads, D]
        qk = torch.addcmul(qk * cos[:, :, None], qk.roll(self.head_dim // 2, -1), signed_sin(sin)[:, :, None])
        query, key = qk.split([self.heads, self.kv_heads], 3)
        key, value = cache.update(_merge_layers(key), _merge_layers(value), 0)
        query = query[:count, row_ids, ends].transpose(0, 1).flatten(1, 2)[:, :, None]
        kv_used = count * self.kv_heads
        out = F.scaled_dot_product_attention(
            query,
            key[:, :kv_used],
            value[:, :kv_used],
            _row_mask(ends, slots, mask),
            scale=self.scaling,
            enable_gqa=self.heads > self.kv_heads,
        )
        out = out.reshape(rows, count, -1).transpose(0, 1)
        state = x[row_ids, ends] + _matmul(self.out[:count], out)
        gate, up = _matmul(self.gate_up[:count], self._normed(state) * self.before_mlp[:count]).chunk(2, -1)
        return (state + _matmul(self.down[:count], self.act(gate) * up)).transpose(0, 1)

    def _normed(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], None, self.eps).to(x.dtype)

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        return None


@torch.no_grad()
def stack_layers(layers: nn.ModuleList, rotary: nn.Module) -> Stack | None:
    """Return the layers as one stack. None if they are of another kind or the outputs differ."""
    linears = [m for layer in layers for m in layer.modules() if isinstance(m, nn.Linear)]
    supported = all(type(layer) is LlamaDecoderLayer and is_plain(layer) for layer in layers)
    if not supported or any(linear.bias is not None for linear in linears):
        return None
    weight = linears[0].weight
    x, positions = probe_input(weight, linears[0].in_features)
    angles = rotary(x, positions)
    expected = torch.cat([layer(x, position_embeddings=angles)[:, -1:] for layer in layers], 1).float()
    stack = Stack(layers)
    last = positions[:, -1]
    output = stack(x, last, len(layers), angles, None, SingleLayerCache()).float()
    return stack if close(output, expected, weight.dtype) else None


def _stack_parameters(groups: Iterable[list[nn.Parameter]]) -> Tensor:
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
    """Reshape [N, B, S, K, D] to [B, N * K, S, D]."""
    return states.permute(1, 0, 3, 2, 4).flatten(1, 2)


def _row_mask(ends: Tensor, slots: int, mask: Tensor | None) -> Tensor | None:
    """Return the mask [B, 1, 1, L] of column ends[b] of S slots; None: nothing is masked."""
    if mask is not None:
        return mask.expand(len(ends), -1, -1, -1)[torch.arange(len(ends), device=ends.device), :, ends][:, :, None]
    if slots == 1:
        return None
    return (torch.arange(slots, device=ends.device) <= ends[:, None])[:, None, None]
