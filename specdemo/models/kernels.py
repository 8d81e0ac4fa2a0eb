"""The same weights, run with fewer and larger kernels.

transformers runs a Llama-like layer as some thirty small operations. `hasten` replaces such a layer, in place, by one
that multiplies by query, key and value (and by gate and up) at once, turns queries and keys together and never repeats
the keys of grouped queries. On a CPU it also lays weights out in blocks for oneDNN: five rows then cost little more
than one, which is what verification lives on. Every layer is first compared with the one it replaces. The weights are
the model's own; only the order of additions changes.

B rows, S slots, H heads, K key/value heads, D head size, L columns of the cache.
"""

import time
from collections.abc import Iterable
from copy import deepcopy
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer, MistralForCausalLM, MistralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2ForCausalLM, Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3ForCausalLM, Qwen3RMSNorm

from specdemo.models.cache import KeyValues

Module = TypeVar("Module", bound=nn.Module)

KNOWN_MODELS = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
KNOWN_LAYERS = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)
KNOWN_NORMS = (LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm)
PACKED_ROWS = 5  # the blocks suit a pass over so many tokens; one token is no slower for it
PACKED_SIZE = 100_000  # smaller matrices stay in the cache, where a plain product is faster
STEADY_ROPE = ("default", "linear", "llama3", "yarn")  # kinds of angles that do not depend on the text's length
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 4e-2, torch.float16: 5e-3}  # of the largest output


class PackedLinear(nn.Module):
    """y = x W^T + b with W in oneDNN's blocked layout, which is its only copy. A deep copy is a plain, trainable
    `nn.Linear`."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        # no buffer: a blocked tensor can be neither moved nor saved
        self._blocks = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().contiguous(), PACKED_ROWS)
        self._bias = None if linear.bias is None else linear.bias.detach()
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._blocks.dtype
        return dtype

    @property
    def bytes(self) -> int:
        bias = 0 if self._bias is None else self._bias.numel() * self._bias.element_size()
        return int(self.out_features * self.in_features * self._blocks.element_size()) + bias

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = self._multiply(x, self._blocks, self._bias, "none", [], "")
        return product

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Linear:
        return _linear(self._blocks.to_dense(), None if self._bias is None else self._bias.clone())


class PackedHead(nn.Module):
    """An lm_head that keeps its `weight`, which embedding and heads may share, beside the blocks."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self._packed = (PackedLinear(linear),)  # in a tuple: not a part of its own

    @property
    def bytes(self) -> int:
        """Beside `weight`."""
        return self._packed[0].bytes

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad):
            return F.linear(x, self.weight, self.bias)  # what a head learns through
        product: Tensor = self._packed[0](x)
        return product

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Linear:
        return _linear(deepcopy(self.weight, memo), deepcopy(self.bias, memo))


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in the precision of its weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps)


class QuickNorm(nn.Module):
    """An RMS norm of n features in fp32 on a CPU, for which torch has no kernel of its own: as x * sqrt(n) w /
    sqrt(|x|^2 + n eps) it takes half the time. A deep copy is the norm it stands for, which can be trained."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight
        self._norm = (norm,)  # in a tuple: not a part of its own
        size = norm.weight.numel()
        eps = norm.eps if isinstance(norm, RMSNorm) else norm.variance_epsilon
        self._scaled = norm.weight.detach() * size**0.5
        self._least = torch.tensor((size * eps) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or x.dtype != torch.float32:
            normed: Tensor = self._norm[0](x)
        else:
            length: Tensor = torch.linalg.vector_norm(x, 2, -1, True)
            normed = (x * self._scaled).div_(length.hypot_(self._least))
        return normed

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        made: nn.Module = deepcopy(self._norm[0], memo)
        return made


class FusedLayer(nn.Module):
    """A decoder layer of `KNOWN_LAYERS` that can stand in its place."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.origin: type[nn.Module] = type(layer)
        self.index, self.head_dim, self.scaling = attention.layer_idx, attention.head_dim, attention.scaling
        self.heads = attention.q_proj.out_features // self.head_dim
        self.kv_heads = attention.k_proj.out_features // self.head_dim
        self.attention_type = getattr(layer, "attention_type", None)
        self.before_attention, self.before_mlp = _quick(layer.input_layernorm), _quick(layer.post_attention_layernorm)
        self.q_norm, self.k_norm = (_quick(getattr(attention, name, None)) for name in ("q_norm", "k_norm"))
        self.qkv = _packed(joined(attention.q_proj, attention.k_proj, attention.v_proj))
        self.out = _packed(attention.o_proj)
        self.gate_up = _packed(joined(mlp.gate_proj, mlp.up_proj))
        self.down = _packed(mlp.down_proj)
        self.act = mlp.act_fn

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **unused: Any,  # whatever else transformers hands to a layer
    ) -> Tensor:
        assert position_embeddings is not None
        cos, sin = position_embeddings
        return self.run(hidden_states, cos[:, :, None], _turning(sin)[:, :, None], attention_mask, past_key_values)

    def run(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: Cache | None) -> Tensor:
        """x [B, S, hidden] -> the same shape. cos and sin [B, S, 1, D], the first half of sin negated; mask additive
        [B or 1, 1, S, L], None: causal."""
        rows, slots, _ = x.shape
        qkv = self.qkv(_normed(self.before_attention, x)).view(rows, slots, -1, self.head_dim)
        qk, value = qkv.split([self.heads + self.kv_heads, self.kv_heads], 2)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = qk.split([self.heads, self.kv_heads], 2)
            qk = torch.cat([_normed(self.q_norm, query), _normed(self.k_norm, key)], 2)
        qk = torch.addcmul(qk * cos, qk.roll(self.head_dim // 2, -1), sin)
        query, key = qk.transpose(1, 2).split([self.heads, self.kv_heads], 1)
        value = value.transpose(1, 2)
        if cache is not None:
            key, value = cache.update(key, value, self.index)
        x = x + self.out(self._attend(query, key, value, mask).reshape(rows, slots, -1))
        gate, up = self.gate_up(_normed(self.before_mlp, x)).chunk(2, -1)
        out: Tensor = x + self.down(self.act(gate) * up)
        return out

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """query [B, H, S, D], key and value [B, K, L, D] -> [B, S, H, D]. The queries of a group become rows of one
        head, so that its keys are read once."""
        rows, heads, slots, size = query.shape
        causal = mask is None and slots > 1
        group = heads // self.kv_heads
        if group == 1 or causal:
            out = F.scaled_dot_product_attention(
                query, key, value, mask, is_causal=causal, scale=self.scaling, enable_gqa=group > 1
            )
            return out.transpose(1, 2)
        folded = query.reshape(rows, self.kv_heads, group * slots, size)
        if mask is not None:
            mask = mask.repeat(1, 1, group, 1)
        out = F.scaled_dot_product_attention(folded, key, value, mask, scale=self.scaling)
        return out.view(rows, heads, slots, size).transpose(1, 2)


class Stack:
    """Llama layers that read the same states, each operation run once for all of them: of heads that work side by side.

    N layers. Their weights become views of the stack's, so that they take no more memory and can still be used one by
    one. A deep copy is None, since what it copies may be trained.
    """

    def __init__(self, layers: Any) -> None:
        first = layers[0].self_attn
        self.head_dim, self.scaling, self.act = first.head_dim, first.scaling, layers[0].mlp.act_fn
        self.heads = first.q_proj.out_features // self.head_dim
        self.kv_heads = first.k_proj.out_features // self.head_dim
        self.eps = layers[0].input_layernorm.variance_epsilon
        self.before_attention = _stacked([layer.input_layernorm.weight] for layer in layers)[:, None]
        self.before_mlp = _stacked([layer.post_attention_layernorm.weight] for layer in layers)[:, None]
        attention = [layer.self_attn for layer in layers]
        self.qkv = _stacked([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight] for a in attention)
        self.out = _stacked([a.o_proj.weight] for a in attention)
        self.gate_up = _stacked([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight] for layer in layers)
        self.down = _stacked([layer.mlp.down_proj.weight] for layer in layers)

    def __call__(
        self, x: Tensor, ends: Tensor, count: int, angles: tuple[Tensor, Tensor], mask: Tensor | None, cache: KeyValues
    ) -> Tensor:
        """x [B, S, hidden] -> [B, count, hidden]: what the first `count` layers make of column ends[b].

        angles: cos and sin [B, S, D]; mask as for a layer, [B or 1, 1, S, L], None: causal. Keys and values of all
        layers go into the first layer of the cache.
        """
        rows, slots, _ = x.shape
        each, (cos, sin) = torch.arange(rows, device=x.device), angles
        normed = self._normed(x).flatten(0, 1) * self.before_attention
        qkv = _times(self.qkv, normed).unflatten(-1, (-1, self.head_dim)).unflatten(1, (rows, slots))
        qk, value = qkv.split([self.heads + self.kv_heads, self.kv_heads], 3)  # [N, B, S, heads, D]
        qk = torch.addcmul(qk * cos[:, :, None], qk.roll(self.head_dim // 2, -1), _turning(sin)[:, :, None])
        query, key = qk.split([self.heads, self.kv_heads], 3)
        key, value = cache.update(_side_by_side(key), _side_by_side(value), 0)
        query = query[:count, each, ends].transpose(0, 1).flatten(1, 2)[:, :, None]
        used = count * self.kv_heads
        out = F.scaled_dot_product_attention(
            query,
            key[:, :used],
            value[:, :used],
            _seen_from(ends, slots, mask),
            scale=self.scaling,
            enable_gqa=self.heads > self.kv_heads,
        )
        out = out.reshape(rows, count, -1).transpose(0, 1)
        state = x[each, ends] + _times(self.out[:count], out)
        gate, up = _times(self.gate_up[:count], self._normed(state) * self.before_mlp[:count]).chunk(2, -1)
        return (state + _times(self.down[:count], self.act(gate) * up)).transpose(0, 1)

    def _normed(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], None, self.eps).to(x.dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None


class FusedDecoder:
    """What runs between token ids and logits, where every layer is fused: without the outer layers of transformers."""

    def __init__(self, model: Any) -> None:
        decoder = model.get_decoder()
        self._embed, self._layers, self._norm = decoder.embed_tokens, list(decoder.layers), decoder.norm
        if any(
            isinstance(layer.before_mlp, QuickNorm) for layer in self._layers
        ):  # else a copy, and its weights may change
            self._norm = _quick(decoder.norm)
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
        """tokens and positions [B, S] -> logits [B, S or 1, V] and tap -> hidden state [B, S, hidden]. layers: so many
        of them alone."""
        x = self._embed(tokens)
        cos, sin = self._at(positions, x, cache)
        hidden = {0: x} if 0 in taps else {}
        for number, layer in enumerate(self._layers[:layers], start=1):
            x = layer.run(x, cos, sin, mask, cache)
            if number in taps:
                hidden[number] = x
        x = _normed(self._norm, x)
        if -1 in taps:
            hidden[-1] = x
        return self._lm_head(x[:, -1:] if last else x), hidden

    def _at(self, positions: Tensor, x: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        needed = cache.cursor.capacity + positions.shape[1]
        if self._angles is None or len(self._angles) < needed:
            every = torch.arange(2 * needed, device=x.device)[None]
            cos, sin = self._rotary(x, every)
            self._angles = torch.stack([cos[0], _turning(sin)[0]], 1)[:, :, None]
        cos, sin = self._angles[positions].unbind(2)
        return cos, sin


@torch.no_grad()
def hasten(model: PreTrainedModel) -> None:
    """Replace what can be replaced, in place. Models that are quantised or spread over devices stay as they are."""
    if getattr(model, "hf_quantizer", None) is not None or getattr(model, "hf_device_map", None):
        return
    decoder: Any = model.get_decoder()
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not hasattr(decoder, "rotary_emb"):
        return
    for index, layer in enumerate(layers):
        layers[index] = fused(layer, decoder.rotary_emb)
    head = model.get_output_embeddings()
    if _all_fused(model) and type(head) is nn.Linear and packs(head.weight):
        model.set_output_embeddings(PackedHead(head))
    for parameter in model.parameters():  # one that is still the file's keeps the whole file in memory
        if parameter.device.type == "cpu":
            parameter.data = parameter.data.clone()


@torch.no_grad()
def fused(layer: nn.Module, rotary: nn.Module) -> nn.Module:
    """The layer fused, which is to replace it; the layer itself where that is unknown or says something else."""
    if type(layer) not in KNOWN_LAYERS or not _plain(layer):
        return layer
    replacement = FusedLayer(layer)
    return replacement if _alike(layer, replacement, rotary) else layer


@torch.no_grad()
def stacked(layers: nn.ModuleList, rotary: nn.Module) -> Stack | None:
    """Layers that are to read the same states as one stack; None where they are of another kind or it differs."""
    linears = [m for layer in layers for m in layer.modules() if isinstance(m, nn.Linear)]
    known = all(type(layer) is LlamaDecoderLayer and _plain(layer) for layer in layers)
    if not known or any(linear.bias is not None for linear in linears):
        return None
    weight = linears[0].weight
    x, positions = _sample(weight, linears[0].in_features)
    angles = rotary(x, positions)
    expected = torch.cat([layer(x, position_embeddings=angles)[:, -1:] for layer in layers], 1).float()
    stack = Stack(layers)
    last = positions[:, -1]
    said = stack(x, last, len(layers), angles, None, _OneLayer()).float()
    return stack if close(said, expected, weight.dtype) else None


@torch.no_grad()
def pack(head: Module) -> Module:
    """Pack the linear layers of a head that is only read from now on, and quicken its norms: it can no longer be saved,
    and trained only as a deep copy."""
    made: dict[nn.Module, nn.Module] = {}
    for name, layer in list(head.named_modules(remove_duplicate=False)):
        if layer not in made:
            made[layer] = _packed(layer) if type(layer) is nn.Linear else _quick(layer)
        if made[layer] is not layer:
            head.set_submodule(name, made[layer])
    return head


def fused_decoder(model: PreTrainedModel) -> FusedDecoder | None:
    """None unless every layer of the model is fused and nothing else stands between ids and logits."""
    steady = type(model) in KNOWN_MODELS and _all_fused(model) and model.model.rotary_emb.rope_type in STEADY_ROPE
    return FusedDecoder(model) if steady else None


def kernels(model: PreTrainedModel) -> str:
    """What runs its weights, in words."""
    modules = list(model.modules())
    if not any(isinstance(m, FusedLayer) for m in modules):
        return "transformers"
    return "fused, packed" if any(isinstance(m, PackedLinear) for m in modules) else "fused"


def layer_class(layer: nn.Module) -> type[nn.Module]:
    """The class a layer came as."""
    return layer.origin if isinstance(layer, FusedLayer) else type(layer)


def dtype_of(module: nn.Module) -> torch.dtype:
    """Of its weights, packed or not. Raises ValueError for a module without any."""
    for part in module.modules():
        if isinstance(part, PackedLinear):
            return part.dtype
        for parameter in part.parameters(recurse=False):
            return parameter.dtype
    raise ValueError(f"{type(module).__name__} has no weights")


def packed_bytes(model: nn.Module) -> int:
    """What packed weights take besides the model's parameters."""
    return sum(m.bytes for m in model.modules() if isinstance(m, PackedLinear | PackedHead))


@lru_cache(maxsize=4)
def packing_pays(dtype: torch.dtype) -> bool:
    """Measured: whether one token and five together are cheaper with blocked weights on this CPU."""
    if dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():
        return False
    linear = _linear(torch.randn(768, 512, generator=torch.Generator().manual_seed(0)).to(dtype), None)
    try:
        packed = PackedLinear(linear)
        seconds = {kind: sum(_seconds(kind, rows, dtype) for rows in (1, PACKED_ROWS)) for kind in (linear, packed)}
    except (AttributeError, RuntimeError, NotImplementedError):  # private operations: they may be missing or differ
        return False
    return seconds[packed] < seconds[linear]


@torch.no_grad()
def _seconds(kind: nn.Module, rows: int, dtype: torch.dtype, repeats: int = 30) -> float:
    x = torch.ones(1, rows, 512, dtype=dtype)
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        kind(x)
        times.append(time.perf_counter() - begin)
    return min(times)


def _all_fused(model: Any) -> bool:
    layers = getattr(model.get_decoder(), "layers", None)
    return isinstance(layers, nn.ModuleList) and all(isinstance(layer, FusedLayer) for layer in layers)


def _plain(layer: Any) -> bool:
    """Whether its matrices are ordinary linear layers and its norms the ones known here."""
    attention, mlp = layer.self_attn, layer.mlp
    linear = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    linear += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    return all(type(m) is nn.Linear for m in linear) and all(type(n) in KNOWN_NORMS for n in norms)


def _alike(layer: Any, replacement: FusedLayer, rotary: nn.Module) -> bool:
    """Whether both say the same of five tokens and of one behind them."""
    weight = layer.input_layernorm.weight
    x, positions = _sample(weight, len(weight))
    outputs = []
    for module in (layer, replacement):
        cache = _OneLayer()
        parts = []
        for columns in (slice(0, 5), slice(5, 6)):
            angles = rotary(x, positions[:, columns])
            out = module(x[:, columns], position_embeddings=angles, past_key_values=cache, use_cache=True)
            parts.append(out if isinstance(out, Tensor) else out[0])
        outputs.append(torch.cat(parts, 1).float())
    return close(outputs[1], outputs[0], weight.dtype)


def _sample(like: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Six states [1, 6, size] and their positions."""
    x = torch.randn(1, 6, size, generator=torch.Generator().manual_seed(0)).to(like)
    return x, torch.arange(6, device=x.device)[None]


def close(said: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether what was worked out in `dtype` differs by rounding alone."""
    return bool((said - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max())


class _OneLayer(DynamicCache):
    """The cache of whichever layer asks."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        return super().update(key_states, value_states, 0, *args, **kwargs)


def _stacked(groups: Iterable[list[nn.Parameter]]) -> Tensor:
    """Per layer parameters [.., size] -> [N, all their rows, size] or, of vectors, [N, size]; they become its views."""
    groups = list(groups)
    stack = torch.stack([torch.cat([p.detach() for p in group]) for group in groups])
    for whole, group in zip(stack, groups, strict=True):
        for parameter, part in zip(group, whole.split([len(p) for p in group]), strict=True):
            parameter.data = part
    return stack


def _times(weights: Tensor, states: Tensor) -> Tensor:
    """weights [N, out, in], states [N, S, in] -> [N, S, out]. The few states stand on the right: that is what a CPU
    multiplies faster."""
    return torch.bmm(weights, states.mT).mT


def _side_by_side(states: Tensor) -> Tensor:
    """[N, B, S, K, D] -> [B, N * K, S, D]"""
    return states.permute(1, 0, 3, 2, 4).flatten(1, 2)


def _seen_from(ends: Tensor, slots: int, mask: Tensor | None) -> Tensor | None:
    """What column ends[b] of S slots sees, [B, 1, 1, L]; None: all there is."""
    if mask is not None:
        return mask.expand(len(ends), -1, -1, -1)[torch.arange(len(ends), device=ends.device), :, ends][:, :, None]
    if slots == 1:
        return None
    return (torch.arange(slots, device=ends.device) <= ends[:, None])[:, None, None]


def _turning(sin: Tensor) -> Tensor:
    """[..., D] with its first half negated: what a state rolled by half its size is multiplied by."""
    first, second = sin.chunk(2, -1)
    return torch.cat([-first, second], -1)


def _quick(norm: Any) -> Any:
    """The norm for states in fp32 on a CPU; whatever else comes is returned."""
    known = type(norm) in (RMSNorm, *KNOWN_NORMS)
    return QuickNorm(norm) if known and (norm.weight.device.type, norm.weight.dtype) == ("cpu", torch.float32) else norm


def _normed(norm: Any, x: Tensor) -> Tensor:
    if x.dtype == torch.float32 and type(norm) in KNOWN_NORMS:  # elsewhere transformers rounds in between
        return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)
    normed: Tensor = norm(x)
    return normed


def joined(*linears: nn.Linear) -> nn.Linear:
    """One layer with the outputs of several."""
    weight, bias = torch.cat([linear.weight.detach() for linear in linears]), None
    if any(linear.bias is not None for linear in linears):
        none = [weight.new_zeros(linear.out_features) for linear in linears]
        bias = torch.cat([n if m.bias is None else m.bias.detach() for m, n in zip(linears, none, strict=True)])
    return _linear(weight, bias)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Parameters are taken as they are."""
    outputs, inputs = weight.shape
    made = nn.Linear(inputs, outputs, bias=False, device="meta")
    made.weight = _frozen(weight)
    if bias is not None:
        made.bias = _frozen(bias)
    return made


def _frozen(tensor: Tensor) -> nn.Parameter:
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor.detach(), requires_grad=False)


def _packed(linear: nn.Linear) -> nn.Module:
    return PackedLinear(linear) if packs(linear.weight) else linear


def packs(*weights: Tensor) -> bool:
    """Whether `pack` would take it, or several joined to one."""
    size = sum(weight.numel() for weight in weights)
    return weights[0].device.type == "cpu" and size >= PACKED_SIZE and packing_pays(weights[0].dtype)
