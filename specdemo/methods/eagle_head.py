"""The network of EAGLE-1 and EAGLE-3: an fc and decoder layers of Llama's kind (2401.15077, section 4.1; 2503.01840,
section 3.1). No transformers module runs in it: for a layer this small their overhead would be what it costs.

B rows, A columns, S queries, C keys, V vocabulary, W the part of it the head drafts from, H hidden size of the target,
D of the head, E of one attention head.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdemo.core.protocol import Progress, Target
from specdemo.models.packed import RMSNorm, dtype_of, joined, packs

Names = frozenset[str]  # of the tensors a head has
Rotary = tuple[Tensor, Tensor]  # cos and signed sin, [B or 1, S, 1, E]
Mask = Tensor | None  # [B or 1, 1, S, C], True where visible; None: causal, C = S or S = 1


@dataclass(frozen=True, slots=True)
class Convention:
    """One way to read a head. Taps are those of `core.protocol`, in the order fc reads them."""

    taps: tuple[int, ...]
    norm_before_residual: bool = False  # the first residual is the feature behind hidden_norm
    norm_output: bool = False  # EAGLE-3.1: the state is fed back behind the last norm
    feature_first: bool = False  # EAGLE-1: fc reads [feature; embedding]

    def __str__(self) -> str:
        if self.taps == (-1,):
            return f"fc over {'feature and embedding' if self.feature_first else 'embedding and feature'}"
        residual = "normed" if self.norm_before_residual else "plain"
        return f"layers {', '.join(map(str, self.taps))} and the {residual} residual"


class KeyValues(Protocol):
    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """New keys and values [B, heads, S, E] -> all [B, heads, C, E]."""


def _linear(inputs: int, outputs: int, name: str, names: Names) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=f"{name}.bias" in names)


def _rotated(x: Tensor, rotary: Rotary) -> Tensor:
    """x [B, S, heads, E]"""
    cos, sin = rotary
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin).type_as(x)


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig, inputs: int, prefix: str, names: Names) -> None:
        super().__init__()
        self.head_dim = size = int(config.head_dim or 0)
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads or 0
        queries, keys = self.heads * size, self.kv_heads * size
        self.q_proj = _linear(inputs, queries, f"{prefix}.q_proj", names)
        self.k_proj = _linear(inputs, keys, f"{prefix}.k_proj", names)
        self.v_proj = _linear(inputs, keys, f"{prefix}.v_proj", names)
        self.qkv: nn.Linear | None = None
        self.o_proj = _linear(queries, config.hidden_size, f"{prefix}.o_proj", names)
        normed = f"{prefix}.q_norm.weight" in names
        self.q_norm = RMSNorm(size, config.rms_norm_eps) if normed else None
        self.k_norm = RMSNorm(size, config.rms_norm_eps) if normed else None

    def forward(self, x: Tensor, rotary: Rotary, cache: KeyValues, layer: int, mask: Mask) -> Tensor:
        """x [B, S, D] or [B, S, 2 D] -> [B, S, D]"""
        qkv = self.qkv(x) if self.qkv else torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
        qk, v = qkv.unflatten(-1, (-1, self.head_dim)).split([self.heads + self.kv_heads, self.kv_heads], 2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split([self.heads, self.kv_heads], 2)
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], 2)
        q, k = _rotated(qk, rotary).transpose(1, 2).split([self.heads, self.kv_heads], 1)
        k, v = cache.update(k, v.transpose(1, 2), layer)
        causal = mask is None and x.shape[1] > 1
        grouped = self.heads != self.kv_heads
        seen = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=grouped)
        out: Tensor = self.o_proj(seen.transpose(1, 2).flatten(2))
        return out

    def join(self) -> None:
        self.qkv = joined(self.q_proj, self.k_proj, self.v_proj)
        del self.q_proj, self.k_proj, self.v_proj


class Mlp(nn.Module):
    def __init__(self, config: LlamaConfig, prefix: str, names: Names) -> None:
        super().__init__()
        inner, size = config.intermediate_size, config.hidden_size
        self.gate_proj = _linear(size, inner, f"{prefix}.gate_proj", names)
        self.up_proj = _linear(size, inner, f"{prefix}.up_proj", names)
        self.gate_up: nn.Linear | None = None
        self.down_proj = _linear(inner, size, f"{prefix}.down_proj", names)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1) if self.gate_up else (self.gate_proj(x), self.up_proj(x))
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out

    def join(self) -> None:
        self.gate_up = joined(self.gate_proj, self.up_proj)
        del self.gate_proj, self.up_proj


class Layer(nn.Module):
    """`names` tells which norms it has: the first layer of EAGLE-1 none, that of EAGLE-3 one for each of its inputs."""

    def __init__(self, config: LlamaConfig, index: int, names: Names) -> None:
        super().__init__()
        prefix, size, eps = f"layers.{index}", config.hidden_size, config.rms_norm_eps
        self.index = index
        normed = f"{prefix}.input_layernorm.weight" in names
        self.input_layernorm = RMSNorm(size, eps) if normed else nn.Identity()
        self.hidden_norm = RMSNorm(size, eps) if f"{prefix}.hidden_norm.weight" in names else None
        self.self_attn = Attention(config, 2 * size if self.hidden_norm else size, f"{prefix}.self_attn", names)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = Mlp(config, f"{prefix}.mlp", names)

    def forward(
        self, state: Tensor, embedded: Tensor, norm_before_residual: bool, rotary: Rotary, cache: KeyValues, mask: Mask
    ) -> Tensor:
        """state [B, S, D], read together with embedded [B, S, D] by EAGLE-3's first layer -> [B, S, D]"""
        if self.hidden_norm is None:
            x = self.input_layernorm(state)
        else:
            normed = self.hidden_norm(state)
            x = torch.cat([self.input_layernorm(embedded), normed], -1)
            state = normed if norm_before_residual else state
        state = state + self.self_attn(x, rotary, cache, self.index, mask)
        out: Tensor = state + self.mlp(self.post_attention_layernorm(state))
        return out


def absolute(d2t: Tensor) -> Tensor:
    """Offsets [W] -> ids of the target's vocabulary [W]"""
    return torch.arange(len(d2t), device=d2t.device) + d2t


class EagleHead(nn.Module):
    """Tensors are named as the authors name them, except that EAGLE-3's `midlayer.` is `layers.0.`.

    `names` tells which of the optional tensors there are. The target's embedding and lm_head stand in for those that
    the head has not got itself; they are no parameters of it.
    """

    d2t: Tensor | None
    note = ""  # how an ambiguous file was read, and why

    def __init__(
        self,
        target: Target,
        config: LlamaConfig,
        convention: Convention,
        names: Names,
        d2t: Tensor | None = None,
    ) -> None:
        super().__init__()
        size, eps, taps = config.hidden_size, config.rms_norm_eps, len(convention.taps)
        self.config, self.convention = config, convention
        self.eagle1 = convention.taps == (-1,)
        read = 2 * size if self.eagle1 else taps * target.hidden_size
        drafted = config.vocab_size if d2t is None else len(d2t)
        self.fc = _linear(read, size, "fc", names)
        self.layers = nn.ModuleList(Layer(config, i, names) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(size, eps) if "norm.weight" in names else None
        self.lm_head = nn.Linear(size, drafted, bias=False) if "lm_head.weight" in names else None
        self.embed_tokens = nn.Embedding(config.vocab_size, size) if "embed_tokens.weight" in names else None
        self.input_norm = RMSNorm(read, eps) if "input_norm.weight" in names else None
        normed = range(taps if "fc_norm.0.weight" in names else 0)
        self.fc_norm = nn.ModuleList(RMSNorm(target.hidden_size, eps) for _ in normed)
        self.register_buffer("d2t", d2t)
        self._targets: tuple[Any, Any] = (target.embed, target.lm_head)  # a tuple, so that they are not registered

    @property
    def dtype(self) -> torch.dtype:
        return dtype_of(self)

    def join(self) -> "EagleHead":
        """Multiply once where several read the same states, if they are to be packed: a packed head is not saved."""
        for part in self.modules():
            if isinstance(part, Attention) and packs(part.q_proj.weight, part.k_proj.weight, part.v_proj.weight):
                part.join()
            if isinstance(part, Mlp) and packs(part.gate_proj.weight, part.up_proj.weight):
                part.join()
        return self

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens [B, S] of the target's vocabulary -> [B, S, D]"""
        embedded: Tensor = (self.embed_tokens or self._targets[0])(tokens)
        return embedded.to(self.dtype)

    def features(self, progress: Progress) -> Tensor:
        """-> [B, A, D] what stands beside the embedding in observed columns"""
        hidden = [progress.hidden[tap].to(self.dtype) for tap in self.convention.taps]
        if self.eagle1:
            return hidden[0]
        if self.fc_norm:
            hidden = [norm(h) for norm, h in zip(self.fc_norm, hidden, strict=True)]
        joined = torch.cat(hidden, -1)
        features: Tensor = self.fc(joined if self.input_norm is None else self.input_norm(joined))
        return features

    def forward(
        self, embedded: Tensor, features: Tensor, rotary: Rotary, cache: KeyValues, mask: Mask = None
    ) -> Tensor:
        """embedded and features [B, S, D] -> states [B, S, D]"""
        convention, state = self.convention, features
        if self.eagle1:
            pair = [features, embedded] if convention.feature_first else [embedded, features]
            state = self.fc(torch.cat(pair, -1))
        for layer in self.layers:
            state = layer(state, embedded, convention.norm_before_residual, rotary, cache, mask)
        return state

    def logits(self, states: Tensor) -> Tensor:
        """states [..., D] -> [..., W]"""
        normed = states if self.norm is None else self.norm(states)
        lm_head = self.lm_head or self._targets[1]
        logits: Tensor = lm_head(normed.to(dtype_of(lm_head)))
        return logits

    def fed_back(self, states: Tensor) -> Tensor:
        """What takes the feature's place below a drafted token."""
        return self.norm(states) if self.convention.norm_output and self.norm is not None else states

    @cached_property
    def tokens(self) -> Tensor | None:
        """[W] what the head's tokens are in the target's vocabulary; None: the same."""
        return None if self.d2t is None else absolute(self.d2t)

    def in_target(self, drafted: Tensor) -> Tensor:
        return drafted if self.tokens is None else self.tokens[drafted]

    def spread(self, probs: Tensor) -> Tensor:
        """probs [..., W] -> [..., V], 0 for tokens that the head has not got"""
        if self.tokens is None:
            return probs
        return probs.new_zeros(*probs.shape[:-1], self.config.vocab_size).index_copy_(-1, self.tokens, probs)

    @cached_property
    def _frequencies(self) -> tuple[Tensor, float]:
        rope = LlamaRotaryEmbedding(self.config).to(next(self.parameters()).device)
        return rope.get_buffer("inv_freq"), float(rope.attention_scaling)

    def rotary(self, positions: Tensor) -> Rotary:
        """Of columns at positions [B or 1, S]."""
        frequencies, scale = self._frequencies
        angles = positions[:, :, None, None] * frequencies
        cos, sin = angles.cos() * scale, angles.sin() * scale
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
