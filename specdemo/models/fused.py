"""Llama-like decoder layers with fewer, larger operations on the same weights.

transformers runs such a layer as about thirty small operations. `fuse_layers` replaces it in place by a layer that
multiplies by the query, key and value weights (and by gate and up) in one product, rotates queries and keys together,
and never repeats the keys of grouped queries. Each layer is compared with the original before it is used; only the
order of additions differs.

B rows, S slots, H heads, K key/value heads, D head size, L columns of the cache.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaForCausalLM
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer, MistralForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3ForCausalLM

from specdemo.kv.graphs import TOLERANCE
from specdemo.models.packed import (
    KNOWN_NORMS,
    FastRMSNorm,
    PackedHead,
    PackedLinear,
    concat_linears,
    fast_norm,
    pack_linear,
    should_pack,
)
from specdemo.models.place import device_map_summary

KNOWN_MODELS = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
KNOWN_LAYERS = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)
QUANTISED = ("Linear4bit", "Linear8bitLt")  # classes of bitsandbytes
FIXED_ROPE = ("default", "linear", "llama3", "yarn")  # RoPE types whose angles do not depend on the text's length

Layer = Any  # a decoder layer of transformers, of any model family


class FusedLayer(nn.Module):
    """Drop-in replacement for a decoder layer of `KNOWN_LAYERS`."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.origin: type[nn.Module] = type(layer)
        self.index, self.head_dim, self.scaling = attention.layer_idx, attention.head_dim, attention.scaling
        self.heads = attention.q_proj.out_features // self.head_dim
        self.kv_heads = attention.k_proj.out_features // self.head_dim
        self.attention_type = getattr(layer, "attention_type", None)
        self.before_attention, self.before_mlp = (
            fast_norm(layer.input_layernorm),
            fast_norm(layer.post_attention_layernorm),
        )
        self.q_norm, self.k_norm = (fast_norm(getattr(attention, name, None)) for name in ("q_norm", "k_norm"))
        self.qkv = _fuse_linears(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = pack_linear(attention.o_proj)
        self.gate_up = _fuse_linears(mlp.gate_proj, mlp.up_proj)
        self.down = pack_linear(mlp.down_proj)
        self.act = mlp.act_fn

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **unused: object,  # other arguments that transformers passes to a layer
    ) -> Tensor:
        assert position_embeddings is not None
        cos, sin = position_embeddings
        return self.run(hidden_states, cos[:, :, None], signed_sin(sin)[:, :, None], attention_mask, past_key_values)

    def run(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: Cache | None) -> Tensor:
        """Run the layer on x [B, S, hidden]; return the same shape.

        cos and sin are [B, S, 1, D], with the first half of sin negated. mask is additive [B or 1, 1, S, L]; None:
        causal.
        """
        rows, slots, _ = x.shape
        qkv = self.qkv(_apply_norm(self.before_attention, x)).view(rows, slots, -1, self.head_dim)
        qk, value = qkv.split([self.heads + self.kv_heads, self.kv_heads], 2)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = qk.split([self.heads, self.kv_heads], 2)
            qk = torch.cat([_apply_norm(self.q_norm, query), _apply_norm(self.k_norm, key)], 2)
        qk = torch.addcmul(qk * cos, qk.roll(self.head_dim // 2, -1), sin)
        query, key = qk.transpose(1, 2).split([self.heads, self.kv_heads], 1)
        value = value.transpose(1, 2)
        if cache is not None:
            key, value = cache.update(key, value, self.index)
        attended = attend(query, key, value, mask, mask is None and slots > 1, self.scaling)
        x = x + self.out(attended.reshape(rows, slots, -1))
        gate, up = self.gate_up(_apply_norm(self.before_mlp, x)).chunk(2, -1)
        out: Tensor = x + self.down(self.act(gate) * up)
        return out


class ConcatLinear(nn.Module):
    """Concatenated outputs of linear layers with the same input, where their weights cannot be concatenated."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([layer(x) for layer in self.layers], -1)


def _fuse_linears(*linears: nn.Linear) -> nn.Module:
    if all(type(linear) is nn.Linear for linear in linears):
        return pack_linear(concat_linears(*linears))
    return ConcatLinear(*linears)


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scaling: float | None = None
) -> Tensor:
    """Compute attention of query [B, H, S, D] over key and value [B, K, L, D]; return [B, S, H, D].

    mask is [B or 1, 1, S, L]. The queries of a group become rows of one head, so that its keys are read once.
    """
    rows, heads, slots, size = query.shape
    group = heads // key.shape[1]
    if group == 1 or causal:
        out = F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=causal, scale=scaling, enable_gqa=group > 1
        )
        return out.transpose(1, 2)
    folded = query.reshape(rows, key.shape[1], group * slots, size)
    if mask is not None:
        mask = mask.repeat(1, 1, group, 1)
    out = F.scaled_dot_product_attention(folded, key, value, mask, scale=scaling)
    return out.view(rows, heads, slots, size).transpose(1, 2)


class FusedDecoder:
    """Path from token ids to logits for a model whose layers are all fused; skips the outer modules of transformers."""

    def __init__(self, model: Layer) -> None:
        decoder = model.get_decoder()
        self._embed, self._layers, self._norm = decoder.embed_tokens, list(decoder.layers), decoder.norm
        if any(isinstance(layer.before_mlp, FastRMSNorm) for layer in self._layers):
            self._norm = fast_norm(decoder.norm)  # a copy for training keeps its own norm, whose weights may change
        self._rotary, self._lm_head = decoder.rotary_emb, model.get_output_embeddings()
        self._angles: Tensor | None = None  # [P, 2, 1, D]: cos, and sin with its first half negated

    def __call__(
        self,
        tokens: Tensor,
        cache: Cache,
        positions: Tensor,
        mask: Tensor | None,
        taps: tuple[int, ...],
        last: bool,
        layers: int | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Return logits [B, S or 1, V] and tap -> hidden state [B, S, hidden] for tokens and positions [B, S].

        layers: run only the first `layers` layers.
        """
        x = self._embed(tokens)
        cos, sin = self._rotary_at(positions, x, cache)
        hidden = {0: x} if 0 in taps else {}
        for number, layer in enumerate(self._layers[:layers], start=1):
            x = layer.run(x, cos, sin, mask, cache)
            if number in taps:
                hidden[number] = x
        x = _apply_norm(self._norm, x)
        if -1 in taps:
            hidden[-1] = x
        return self._lm_head(x[:, -1:] if last else x), hidden

    def _rotary_at(self, positions: Tensor, x: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        needed = cache.cursor.capacity + positions.shape[1]
        if self._angles is None or len(self._angles) < needed:
            positions_to_cache = torch.arange(2 * needed, device=x.device)[None]
            cos, sin = self._rotary(x, positions_to_cache)
            self._angles = torch.stack([cos[0], signed_sin(sin)[0]], 1)[:, :, None]
        cos, sin = self._angles[positions].unbind(2)
        return cos, sin


@torch.no_grad()
def fuse_layers(model: PreTrainedModel) -> None:
    """Replace layers, matrices and norms by faster equivalents, in place.

    Models spread over several devices stay as they are. So do quantised models on a CPU: only on a GPU do their many
    small operations dominate.
    """
    quantised = getattr(model, "hf_quantizer", None) is not None and model.device.type != "cuda"
    if quantised or device_map_summary(model):
        return
    decoder: object = model.get_decoder()
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not hasattr(decoder, "rotary_emb"):
        return
    for index, layer in enumerate(layers):
        layers[index] = fuse_layer(layer, decoder.rotary_emb)
    head = model.get_output_embeddings()
    if _all_fused(model) and type(head) is nn.Linear and should_pack(head.weight):
        model.set_output_embeddings(PackedHead(head))
    for parameter in model.parameters():  # a tensor that is still mapped keeps the whole file in memory
        if parameter.device.type == "cpu":
            parameter.data = parameter.data.clone()


@torch.no_grad()
def fuse_layer(layer: nn.Module, rotary: nn.Module) -> nn.Module:
    """Return the fused replacement of a layer, or the layer itself if it is unknown or its output differs."""
    if type(layer) not in KNOWN_LAYERS or not is_plain(layer, QUANTISED):
        return layer
    replacement = FusedLayer(layer)
    return replacement if _same_output(layer, replacement, rotary) else layer


def fused_decoder(model: PreTrainedModel) -> FusedDecoder | None:
    """Return a `FusedDecoder`. None unless all layers are fused and the model has no other modules between ids and
    logits."""
    supported = type(model) in KNOWN_MODELS and _all_fused(model) and model.model.rotary_emb.rope_type in FIXED_ROPE
    return FusedDecoder(model) if supported else None


def kernels(model: PreTrainedModel) -> str:
    """Return the kind of layers in words."""
    modules = list(model.modules())
    if not any(isinstance(m, FusedLayer) for m in modules):
        return "transformers"
    return "fused, packed" if any(isinstance(m, PackedLinear) for m in modules) else "fused"


def missing_kernels(config: object, device: torch.device) -> str:
    """Return a clause that names the kernels this model lacks on this device; empty if none."""
    linear = "linear_attention" in (getattr(config, "layer_types", None) or ())
    if device.type != "cuda" or not linear or find_spec("fla"):
        return ""
    return "linear attention runs without specialised kernels; for more speed run: pip install flash-linear-attention"


def layer_class(layer: nn.Module) -> type[nn.Module]:
    """Return the original class of a layer."""
    return layer.origin if isinstance(layer, FusedLayer) else type(layer)


def close(output: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Return True if `output` differs from `expected` by rounding in `dtype` only."""
    return bool((output - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max())


def is_plain(layer: Layer, extra_classes: tuple[str, ...] = ()) -> bool:
    """Return True if all matrices are `nn.Linear`, or of the named classes, and all norms are known."""
    attention, mlp = layer.self_attn, layer.mlp
    linear = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    linear += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    linears_known = all(type(m) is nn.Linear or type(m).__name__ in extra_classes for m in linear)
    return linears_known and all(type(n) in KNOWN_NORMS for n in norms)


def probe_input(like: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return six random states [1, 6, size] and their positions."""
    x = torch.randn(1, 6, size, generator=torch.Generator().manual_seed(0)).to(like.device, like.dtype)
    return x, torch.arange(6, device=x.device)[None]


class SingleLayerCache(DynamicCache):
    """Cache of a single layer; ignores the layer index."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object) -> Any:
        return super().update(key_states, value_states, 0, *args, **kwargs)


def signed_sin(sin: Tensor) -> Tensor:
    """Negate the first half of sin [..., D], for use with a state rolled by half its size."""
    first, second = sin.chunk(2, -1)
    return torch.cat([-first, second], -1)


def _apply_norm(norm: Layer, x: Tensor) -> Tensor:
    # transformers runs this as eight kernels on a GPU and rounds to 16 bits between them; one kernel rounds once
    if type(norm) in KNOWN_NORMS and (x.dtype == torch.float32 or x.device.type == "cuda"):
        return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)
    output: Tensor = norm(x)
    return output


def _same_output(layer: Layer, replacement: FusedLayer, rotary: nn.Module) -> bool:
    """Compare the outputs of both layers for five tokens and for one more token after them."""
    weight = layer.input_layernorm.weight
    x, positions = probe_input(weight, len(weight))
    outputs = []
    for module in (layer, replacement):
        cache = SingleLayerCache()
        parts = []
        for columns in (slice(0, 5), slice(5, 6)):
            angles = rotary(x, positions[:, columns])
            out = module(x[:, columns], position_embeddings=angles, past_key_values=cache, use_cache=True)
            parts.append(out if isinstance(out, Tensor) else out[0])
        outputs.append(torch.cat(parts, 1).float())
    return close(outputs[1], outputs[0], weight.dtype)


def _all_fused(model: Layer) -> bool:
    layers = getattr(model.get_decoder(), "layers", None)
    return isinstance(layers, nn.ModuleList) and all(isinstance(layer, FusedLayer) for layer in layers)
