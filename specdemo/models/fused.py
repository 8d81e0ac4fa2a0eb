"""Replacement of Llama-like layers of transformers models by `models.layers.DecoderLayer`, on the same weights.

Each layer is compared with the original before it is used; only the order of additions differs.

B rows, S slots, D head size, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaForCausalLM
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer, MistralForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3ForCausalLM

from specdemo.kv.graphs import TOLERANCE
from specdemo.kv.masks import Mask
from specdemo.kv.store import cache_argument
from specdemo.models.cpu_plan import pack_model
from specdemo.models.devices import device_kind, device_map_summary
from specdemo.models.layers import DecoderLayer, Rotary, add_norm, shared_mask, signed_sin
from specdemo.models.packed import (
    KNOWN_NORMS,
    FastRMSNorm,
    Layout,
    PackedLinear,
    RMSNorm,
    fast_norm,
)

KNOWN_MODELS = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
KNOWN_LAYERS = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)
QUANTISED = ("Linear4bit", "Linear8bitLt")  # classes of bitsandbytes
FIXED_ROPE = ("default", "linear", "llama3", "yarn")  # RoPE types whose angles do not depend on the text's length

Layer = Any  # a decoder layer of transformers, of any model family


class FusedLayer(DecoderLayer):
    """Drop-in replacement for a decoder layer of `KNOWN_LAYERS`, on the same weights."""

    def __init__(self, layer: Layer) -> None:
        attention = layer.self_attn
        with torch.device("meta"):
            super().__init__(attention.config, attention.layer_idx, layer.state_dict())
        self.origin: type[nn.Module] = type(layer)
        self.attention_type = getattr(layer, "attention_type", None)
        self.self_attn.scaling = attention.scaling
        for name, _ in list(self.named_modules()):
            if name.count(".") or name.endswith("norm"):
                self.set_submodule(name, layer.get_submodule(name))
        self.self_attn.fuse()
        self.mlp.fuse()
        self.input_layernorm = fast_norm(self.input_layernorm)
        self.post_attention_layernorm = fast_norm(self.post_attention_layernorm)
        self.self_attn.q_norm, self.self_attn.k_norm = map(fast_norm, (self.self_attn.q_norm, self.self_attn.k_norm))

    def forward(  # type: ignore[override]  # the signature of transformers
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        past_key_values: Cache | None = None,  # `cache` before transformers 5.24
    ) -> Tensor:
        # no **kwargs: an argument that is dropped silently may be the cache
        assert position_embeddings is not None
        cos, sin = position_embeddings
        rope = cos[:, :, None], signed_sin(sin)[:, :, None]
        return self.run(hidden_states, rope, attention_mask, past_key_values if cache is None else cache)


class FusedDecoder:
    """Path from token ids to logits for a model whose layers are all fused; skips the outer modules of transformers."""

    def __init__(self, model: Layer) -> None:
        decoder = model.get_decoder()
        self._embed, self._layers, self._norm = decoder.embed_tokens, list(decoder.layers), decoder.norm
        if any(isinstance(layer.post_attention_layernorm, FastRMSNorm | RMSNorm) for layer in self._layers):
            self._norm = fast_norm(decoder.norm)  # a copy for training keeps its own norm, whose weights may change
        self._rotary = Rotary(decoder.rotary_emb, self._embed.weight.dtype)
        self._lm_head = model.get_output_embeddings()

    def __call__(
        self,
        tokens: Tensor,
        cache: Any,  # a KVStore
        positions: Tensor,
        mask: Mask | None,
        taps: tuple[int, ...],
        last: bool,
        layers: int | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Return logits [B, S or 1, V] and tap -> hidden state [B, S, hidden] for tokens and positions [B, S].

        layers: run only the first `layers` layers.
        """
        x = self._embed(tokens)
        rope = self._rotary(positions, cache.capacity + positions.shape[1])
        mask = shared_mask(mask, self._layers[0].self_attn, x)
        hidden = {0: x} if 0 in taps else {}
        delta: Tensor | None = None
        for number, layer in enumerate(self._layers[:layers], start=1):
            x, delta = layer.run_residual(x, delta, rope, mask, cache)
            if number in taps:
                hidden[number], delta = x + delta, None
                x = hidden[number]
        _, x = add_norm(self._norm, x, delta)
        if -1 in taps:
            hidden[-1] = x
        return self._lm_head(x[:, -1:] if last else x), hidden


@torch.no_grad()
def fuse_layers(model: PreTrainedModel, layout: Layout | None = None, text: Sequence[int] = ()) -> str:
    """Replace layers, matrices and norms by faster equivalents, in place. Return a sentence on what could not be
    replaced, "" without one.

    layout: of packed weights; None: the fastest. text: token ids of a text, see `pack_model`.

    Models spread over several devices stay as they are. So do quantised models on a CPU: only on a GPU do their many
    small operations dominate.
    """
    quantised = getattr(model, "hf_quantizer", None) is not None and not device_kind(model.device).triton
    if quantised or device_map_summary(model):
        return ""
    decoder: Layer = model.get_decoder()
    layers = getattr(decoder, "layers", None)
    if isinstance(layers, nn.ModuleList) and any(type(layer) in KNOWN_LAYERS for layer in layers):
        call = _first_call(decoder, layers[0])
        for index, layer in enumerate(layers):
            layers[index] = fuse_layer(layer, decoder.rotary_emb, call)
    note = pack_model(model, layout, text) if device_kind(model.device).host else ""
    for parameter in model.parameters():  # a tensor that is still mapped keeps the whole file in memory
        if device_kind(parameter.device).host:
            parameter.data = parameter.data.clone()
    return note


@torch.no_grad()
def fuse_layer(layer: nn.Module, rotary: nn.Module, call: Mapping[str, object] | None = None) -> nn.Module:
    """Return the fused replacement of a layer, or the layer itself if it is unknown or its output differs.

    call: named arguments with which the model calls its layers, if a model does.
    """
    if type(layer) not in KNOWN_LAYERS or not _is_plain(layer):
        return layer
    replacement = FusedLayer(layer)
    return replacement if _same_output(layer, replacement, rotary, call or {}) else layer


def fused_decoder(model: PreTrainedModel) -> FusedDecoder | None:
    """Return a `FusedDecoder`. None unless all layers are fused and the model has no other modules between ids and
    logits."""
    supported = type(model) in KNOWN_MODELS and _all_fused(model) and model.model.rotary_emb.rope_type in FIXED_ROPE
    return FusedDecoder(model) if supported else None


def kernels(model: PreTrainedModel) -> str:
    """Return the kind of layers in words."""
    modules = list(model.modules())
    layers = "fused" if any(isinstance(m, FusedLayer) for m in modules) else "transformers"
    return f"{layers}, packed" if any(isinstance(m, PackedLinear) for m in modules) else layers


def missing_kernels(config: object, device: torch.device) -> str:
    """Return a clause that names the kernels this model lacks on this device; empty if none."""
    linear = "linear_attention" in (getattr(config, "layer_types", None) or ())
    if not device_kind(device).triton or not linear or find_spec("fla"):
        return ""
    return "linear attention runs without specialised kernels; for more speed run: pip install flash-linear-attention"


def layer_class(layer: nn.Module) -> type[nn.Module]:
    """Return the original class of a layer."""
    return layer.origin if isinstance(layer, FusedLayer) else type(layer)


def _is_plain(layer: Layer) -> bool:
    """Return True if all matrices are `nn.Linear` or of bitsandbytes, and all norms are known."""
    attention, mlp = layer.self_attn, layer.mlp
    linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    linears_known = all(type(m) is nn.Linear or type(m).__name__ in QUANTISED for m in linears)
    return linears_known and all(type(n) in KNOWN_NORMS for n in norms)


class _SingleLayerCache(DynamicCache):
    """Cache of a single layer; ignores the layer index."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        return super().update(key_states, value_states, 0, *args, **kwargs)


def _first_call(decoder: Layer, layer: Layer) -> dict[str, object]:
    """Return the named arguments with which a decoder calls its first layer in a pass with a cache."""
    calls: list[dict[str, object]] = []
    hook = layer.register_forward_pre_hook(lambda _, inputs, named: calls.append(named), with_kwargs=True)
    cache = {cache_argument(decoder.forward): DynamicCache(config=decoder.config)}
    try:
        decoder(torch.zeros(1, 1, dtype=torch.int64, device=decoder.device), use_cache=True, **cache)
    finally:
        hook.remove()
    return calls[0]


def _same_output(layer: Layer, replacement: FusedLayer, rotary: nn.Module, call: Mapping[str, object]) -> bool:
    """Compare the outputs of both layers, called as the model does, for five tokens and for one more token after them.

    The outputs also differ if the replacement does not know an argument.
    """
    weight, generator = layer.input_layernorm.weight, torch.Generator().manual_seed(0)
    x = torch.randn(1, 6, len(weight), generator=generator).to(weight.device, weight.dtype)
    positions = torch.arange(6, device=x.device)[None]
    cache_name = next((k for k, value in call.items() if isinstance(value, Cache)), cache_argument(layer.forward))
    outputs = []
    for module in (layer, replacement):
        cache = {cache_name: _SingleLayerCache()}
        for columns in (slice(0, 5), slice(5, 6)):
            place = {"position_ids": positions[:, columns], "position_embeddings": rotary(x, positions[:, columns])}
            try:
                out = module(x[:, columns], **{**call, **place, **cache, "attention_mask": None, "use_cache": True})
            except TypeError:
                return False
            outputs.append((out if isinstance(out, Tensor) else out[0]).float())
    expected, output = torch.cat(outputs[:2], 1), torch.cat(outputs[2:], 1)
    return bool((output - expected).abs().max() <= TOLERANCE[weight.dtype] * expected.abs().max())


def _all_fused(model: Layer) -> bool:
    layers = getattr(model.get_decoder(), "layers", None)
    return isinstance(layers, nn.ModuleList) and all(isinstance(layer, FusedLayer) for layer in layers)
