"""The Llama-like decoder layer of fused targets and of heads. Its modules have the names of transformers.

transformers runs such a layer as about thirty small operations. Here query, key and value weights (and gate and up) can
be one product, queries and keys are rotated together, and the keys of grouped queries are never repeated.

B rows, S columns, W columns of keys, H heads, K key/value heads, D hidden size, E size of an attention head.
"""

from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdemo.core.protocol import Target
from specdemo.kv.masks import FULL, AttentionKind, Mask, Rope, TreeMask, additive
from specdemo.kv.store import KVStore
from specdemo.kv.view import View
from specdemo.models.devices import device_kind, runs_triton
from specdemo.models.operations import apply_rope, use_kernel
from specdemo.models.packed import RMSNorm, concat_linears

FOLDED_ROWS = 32
TensorNames = Container[str]  # names of the tensors in a checkpoint, such as self_attn.q_proj.bias


def linear(inputs: int, outputs: int, name: str, names: TensorNames) -> nn.Linear:
    """Return a linear layer, with a bias if the checkpoint has one."""
    return nn.Linear(inputs, outputs, bias=f"{name}.bias" in names)


def strip_prefix(names: Iterable[str], prefix: str) -> frozenset[str]:
    """Return the names with this prefix, without it."""
    return frozenset(name.removeprefix(prefix) for name in names if name.startswith(prefix))


def llama_config_like(target: Target) -> LlamaConfig:
    """Return the config of one Llama layer with the target's sizes and the default RoPE, as in published heads."""
    target_config = target.layer_config
    heads = target_config.get("num_attention_heads") or max(1, target.hidden_size // 64)
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target_config.get("intermediate_size") or 4 * target.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=target_config.get("num_key_value_heads") or heads,
        head_dim=target_config.get("head_dim") or target.hidden_size // heads,
        max_position_embeddings=target.max_length,
    )


class Rotary:
    """Rotary embeddings from a table that grows on demand."""

    def __init__(self, module: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        """module: the rotary embedding of a Llama-like model, whose frequencies do not depend on the text's length."""
        self._frequencies = module.get_buffer("inv_freq").float()
        self._scale, self._dtype = float(module.attention_scaling), dtype  # type: ignore[arg-type]
        self._table = torch.empty(0)  # [P, 2, 1, E]

    @classmethod
    def of_config(cls, config: Any, device: torch.device) -> "Rotary":
        """Return the rotary embeddings that the config of a Llama-like model describes."""
        with device:
            return cls(LlamaRotaryEmbedding(config))

    def __call__(self, positions: Tensor, end: int, trailing: bool = False) -> Rope:
        """Return cos and sin, see `Angles`."""
        if len(self._table) < end:
            angles = torch.arange(2 * end, device=positions.device)[:, None, None] * self._frequencies
            cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
            table = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], 1)
            self._table = table.to(self._dtype)
        part = self._table[None, end - positions.shape[1] : end] if trailing else self._table[positions]
        cos, sin = part.unbind(2)
        return cos, sin


def signed_sin(sin: Tensor) -> Tensor:
    """Negate the first half of sin [..., E], for use with a state rolled by half its size."""
    first, second = sin.chunk(2, -1)
    return torch.cat([-first, second], -1)


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, causal: bool, scaling: float | None = None
) -> Tensor:
    """Compute attention of query [B, H, S, E] over key and value [B, K, W, E]; return [B, S, H, E].

    mask is [B or 1, 1 or H, 1 or S, W], folded (see `fold_mask`), or a `TreeMask`. With one mask for all heads, the
    queries of a group become rows of one head: its keys are read once, and some GPUs have no fast kernel for grouped
    queries with a mask.
    """
    rows, heads, slots, size = query.shape
    group = heads // key.shape[1]
    if isinstance(mask, TreeMask):
        if reads_trees(query, key, value):
            return attend_tree(query, key, value, mask, scaling)
        mask = mask.matrix
    if causal or not folds(query.device, group, slots) or (mask is not None and mask.shape[1] > 1):
        out = F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=causal, scale=scaling, enable_gqa=group > 1
        )
        return out.transpose(1, 2)
    folded = query.reshape(rows, key.shape[1], group * slots, size)
    if mask is not None and mask.shape[2] == slots:
        mask = fold_mask(mask, group)
    out = F.scaled_dot_product_attention(folded, key, value, mask, scale=scaling)
    if out.is_contiguous():
        return out.view(rows, heads, slots, size).transpose(1, 2)
    # kernels of GPUs return [B, G S, K, E] in memory, which makes one copy necessary
    return out.view(rows, -1, group, slots, size).permute(0, 3, 1, 2, 4).flatten(2, 3)


def folds(device: torch.device, group: int, slots: int) -> bool:
    """Return whether the queries of a group of heads should become rows of one head. torch's kernel for CPUs takes rows
    by FOLDED_ROWS; with more of them it adds in another order."""
    return group > 1 and (not device_kind(device).host or group * slots <= FOLDED_ROWS)


def fold_mask(mask: Tensor, group: int) -> Tensor:
    """Repeat a mask [B or 1, 1, S, W] for the queries of a group of heads: [B or 1, 1, group S, W]."""
    return mask if mask.shape[2] == 1 or not folds(mask.device, group, mask.shape[2]) else mask.repeat(1, 1, group, 1)


def shared_mask(mask: Mask | None, attention: "Attention", x: Tensor) -> Mask | None:
    """Return the form of a mask that all layers like `attention` can use for x [B, S, D] without work of their own."""
    if isinstance(mask, TreeMask):
        if use_kernel("tree_attention", x):
            return mask
        mask = mask.matrix
    return None if mask is None else fold_mask(mask, attention.heads // attention.kv_heads)


def reads_trees(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether `attend_tree` works for these tensors."""
    same = key.stride() == value.stride() and query.dtype == key.dtype == value.dtype and query.stride(-1) == 1
    return same and use_kernel("tree_attention", query)


def attend_tree(query: Tensor, key: Tensor, value: Tensor, mask: TreeMask, scaling: float | None = None) -> Tensor:
    """Compute attention as `attend` does, with a kernel that reads visible columns only."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out: Tensor = torch.ops.specdemo.tree_attention(
        query, key, value, mask.ends.contiguous(), mask.ancestors.contiguous(), scale
    )
    return out


def add_norm(norm: nn.Module, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return x + delta and its norm, for x and delta [B, S, D]. delta None: zero."""
    if delta is None:
        return x, norm(x)
    if runs_triton(x) and _fits_kernel(norm, x, delta):
        assert isinstance(norm, RMSNorm)
        x, normed = torch.ops.specdemo.add_rms_norm(x.contiguous(), delta.contiguous(), norm.weight, norm.eps)
        return x, normed
    x = x + delta
    return x, norm(x)


def _fits_kernel(norm: nn.Module, x: Tensor, delta: Tensor) -> bool:
    same = type(norm) is RMSNorm and x.dtype == delta.dtype == norm.weight.dtype
    return same and use_kernel("add_rms_norm", x)


class ConcatLinear(nn.Module):
    """Concatenated outputs of linear layers with the same input, where their weights cannot be concatenated."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([layer(x) for layer in self.layers], -1)


def fuse_linears(*linears: nn.Linear) -> nn.Module:
    """Return one layer for the concatenated outputs of several: one product, except for quantised weights."""
    if all(type(linear) is nn.Linear for linear in linears):
        return concat_linears(*linears)
    return ConcatLinear(*linears)


class Attention(nn.Module):
    """Self-attention with rotary embeddings."""

    def __init__(
        self, config: PreTrainedConfig, index: int, names: TensorNames, inputs: int = 0, kind: AttentionKind = FULL
    ) -> None:
        """index: layer of the KV cache. inputs: input features, 0: D."""
        super().__init__()
        size, self.index, self.kind = config.hidden_size, index, kind
        self.heads = config.num_attention_heads
        self.kv_heads = int(config.num_key_value_heads or self.heads)
        self.head_dim = int(getattr(config, "head_dim", None) or size // self.heads)
        self.scaling: float | None = None  # None: 1 / sqrt(E)
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = linear(inputs or size, queries, "self_attn.q_proj", names)
        self.k_proj = linear(inputs or size, keys, "self_attn.k_proj", names)
        self.v_proj = linear(inputs or size, keys, "self_attn.v_proj", names)
        self.qkv: nn.Module | None = None  # replaces the three after `fuse`
        self.o_proj = linear(queries, size, "self_attn.o_proj", names)
        normed = "self_attn.q_norm.weight" in names
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if normed else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if normed else None
        sink = "self_attn.attention_sink_bias" in names
        self.attention_sink_bias = nn.Parameter(torch.zeros(self.heads)) if sink else None

    def forward(self, x: Tensor, rope: Rope, mask: Mask | None, cache: Cache | None) -> Tensor:
        """x [B, S, D or inputs] -> [B, S, D]. mask: see `attend`."""
        qkv = self.qkv(x) if self.qkv else torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
        qkv = self._split_heads(qkv)
        by_kernel = self._write_by_kernel(qkv, rope, cache) if runs_triton(qkv) else None
        q, k, v = by_kernel or self._write(qkv, rope, cache)
        causal = mask is None and self.kind[1] and x.shape[1] > 1
        if self.attention_sink_bias is not None:
            matrix = mask.matrix if isinstance(mask, TreeMask) else mask
            k, v, mask, causal = *self._add_sink(k, v, matrix, causal, x.shape[1]), False
        out: Tensor = self.o_proj(attend(q, k, v, mask, causal, self.scaling).flatten(2))
        return out

    def _write(self, qkv: Tensor, rope: Rope, cache: Cache | None) -> tuple[Tensor, Tensor, Tensor]:
        """Normalise and rotate queries and keys of qkv [B, S, H + 2 K, E], and update the cache.

        Return queries [B, H, S, E] and all keys and values [B, K, W, E].
        """
        qk, v = qkv.split([self.heads + self.kv_heads, self.kv_heads], 2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split([self.heads, self.kv_heads], 2)
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], 2)
        q, k = apply_rope(qk, rope).transpose(1, 2).split([self.heads, self.kv_heads], 1)
        v = v.transpose(1, 2)
        return (q, k, v) if cache is None else (q, *cache.update(k, v, self.index))

    def _write_by_kernel(self, qkv: Tensor, rope: Rope, cache: Cache | None) -> tuple[Tensor, Tensor, Tensor] | None:
        """Do what `_write` does by one kernel, in a captured pass. Return None where this is impossible."""
        slots = cache.scatter_target(self.index) if isinstance(cache, KVStore) else None
        norms = self.q_norm, self.k_norm
        if slots is None or not all(norm is None or type(norm) is RMSNorm for norm in norms):
            return None
        keys, values, columns = slots
        tensors = [qkv, keys, values, *rope, *(norm.weight for norm in norms if norm is not None)]
        same_strides = rope[0].stride() == rope[1].stride() and keys.stride() == values.stride()
        if not same_strides or len({x.dtype for x in tensors}) > 1 or not use_kernel("norm_rope_write", qkv):
            return None
        weights = (None if norm is None else norm.weight for norm in norms)
        eps = 0.0 if norms[0] is None else norms[0].eps
        query = torch.ops.specdemo.norm_rope_write(
            qkv.contiguous(), *weights, eps, *rope, keys, values, columns.contiguous()
        )
        return query.transpose(1, 2), keys, values

    def _add_sink(self, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, width: int) -> tuple[Tensor, ...]:
        """Append a zero key and value, with the sink logit of each head; return k, v and an additive mask."""
        assert self.attention_sink_bias is not None
        if mask is None:
            visible = torch.ones(1, 1, width, k.shape[2], dtype=torch.bool, device=k.device)
            mask = visible.tril() if causal else visible
        mask = additive(mask, k.dtype) if mask.dtype == torch.bool else mask
        sink = self.attention_sink_bias.to(k.dtype).view(1, -1, 1, 1)
        rows = len(mask), self.heads, mask.shape[2]
        wide_mask = torch.cat([mask.expand(*rows, -1), sink.expand(*rows, 1)], -1)
        return F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1)), wide_mask

    def cache_keys_values(self, x: Tensor, columns: View) -> None:
        """Write the keys and values of x [B, S, D] to the cache, without attention."""
        assert columns.cache is not None
        k, v = self._split_heads(self.k_proj(x)), self._split_heads(self.v_proj(x))
        if self.k_norm is not None:
            k = self.k_norm(k)
        columns.cache.update(apply_rope(k, columns.rope).transpose(1, 2), v.transpose(1, 2), self.index)

    def _split_heads(self, states: Tensor) -> Tensor:
        heads: Tensor = states.unflatten(-1, (-1, self.head_dim))
        return heads

    def fuse(self) -> None:
        """Replace q_proj, k_proj and v_proj by one product."""
        self.qkv = fuse_linears(self.q_proj, self.k_proj, self.v_proj)
        del self.q_proj, self.k_proj, self.v_proj


class MLP(nn.Module):
    """Gated MLP."""

    def __init__(self, size: int, inner: int, activation: str, names: TensorNames = ()) -> None:
        super().__init__()
        self.gate_proj = linear(size, inner, "mlp.gate_proj", names)
        self.up_proj = linear(size, inner, "mlp.up_proj", names)
        self.gate_up: nn.Module | None = None  # replaces the two after `fuse`
        self.down_proj = linear(inner, size, "mlp.down_proj", names)
        self.act_fn = ACT2FN[activation]
        self._silu = activation == "silu"

    def forward(self, x: Tensor) -> Tensor:
        gate_up = self.gate_up
        if gate_up and self._silu and use_kernel("silu_mul", x):
            product: Tensor = self.down_proj(torch.ops.specdemo.silu_mul(gate_up(x)))
            return product
        gate, up = gate_up(x).chunk(2, -1) if gate_up else (self.gate_proj(x), self.up_proj(x))
        out: Tensor = self.down_proj(self.act_fn(gate) * up)
        return out

    def fuse(self) -> None:
        """Replace gate_proj and up_proj by one product."""
        self.gate_up = fuse_linears(self.gate_proj, self.up_proj)
        del self.gate_proj, self.up_proj


class DecoderLayer(nn.Module):
    """A Llama decoder layer. names: tensors of the checkpoint without the prefix of the layer."""

    def __init__(
        self, config: PreTrainedConfig, index: int, names: TensorNames = (), inputs: int = 0, kind: AttentionKind = FULL
    ) -> None:
        """config: of a Llama-like model of transformers. The other arguments are those of `Attention`."""
        super().__init__()
        self.input_layernorm: nn.Module = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, index, names, inputs, kind)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, config.hidden_act, names)

    def forward(self, x: Tensor, columns: View) -> Tensor:
        """x [B, S, D] -> [B, S, D]"""
        return self.run(x, columns.rope, columns.visible(self.self_attn.kind), columns.cache)

    def run(self, x: Tensor, rope: Rope, mask: Mask | None, cache: Cache | None) -> Tensor:
        """x [B, S, D] -> [B, S, D]. mask: see `attend`."""
        x, delta = self.run_residual(x, None, rope, mask, cache)
        return x + delta

    def run_residual(
        self, x: Tensor, delta: Tensor | None, rope: Rope, mask: Mask | None, cache: Cache | None
    ) -> tuple[Tensor, Tensor]:
        """Run the layer on x + delta [B, S, D]; return two tensors whose sum is the result.

        The next layer adds them in one kernel with its norm.
        """
        x, normed = add_norm(self.input_layernorm, x, delta)
        x, normed = add_norm(self.post_attention_layernorm, x, self.self_attn(normed, rope, mask, cache))
        return x, self.mlp(normed)

    def attention(self, x: Tensor, columns: View) -> Tensor:
        """Run attention alone on normed x [B, S, D or inputs] -> [B, S, D]."""
        out: Tensor = self.self_attn(x, columns.rope, columns.visible(self.self_attn.kind), columns.cache)
        return out

    def fuse(self) -> None:
        """Fuse projections with the same input. The layer cannot be saved afterwards."""
        self.self_attn.fuse()
        self.mlp.fuse()
