"""Sizes of a model, from its config.json, and its memory.

A model consists of matrices that every pass reads, experts of which a batch activates some, an output head, and a
per-row cache: keys and values, a compressed latent, or a state of fixed size. Counts are numbers of parameters; their
size in bytes depends on the storage format.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from specdemo.core.suggest import short_repr, suggest

CHAIN = 12  # operations of a dense layer with fused projections
EXPERTS = 6  # extra operations of a layer with experts
ENDS = 6  # operations before the first layer and after the last
PLAIN_MLP = ("opt", "gpt2", "gptj", "gpt_neox", "bloom", "falcon", "phi")  # two matrices where others have three
# bits per weight, including group scales
STORED = {"gptq": 4.25, "awq": 4.25, "mxfp4": 4.25, "fp8": 8.0, "fbgemm_fp8": 8.0}
# bits per weight of bitsandbytes, including its share of the scales (4 bits: double quantisation)
QUANTIZED_BITS = {"4bit": 4.13, "8bit": 8.03}

LARGEST = 1 << 24  # upper limit of every size of a model
MOST_BITS = 64
# What reading a config.json raises if a value has another type than expected or sizes contradict each other.
UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError)

KNOWN = Path(__file__).with_name("known.json")

HEADROOM = 1.1  # factor of the memory of weights and caches, for activations, buffers and fragmentation

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of a model in bytes, without activations: compare `HEADROOM` times the bytes with the free memory. A text
    may be a lane, or a row of a batch."""

    weights: int
    per_token: int  # keys and values per token of a text
    per_text: int = 0  # buffers of a text, whatever its length
    state: int = 0  # recurrent states of a text

    def bytes(self, tokens: int, texts: int = 1) -> int:
        """Return the size of the weights and of the caches of `texts` texts of so many tokens."""
        return self.weights + texts * (tokens * self.per_token + self.per_text + self.state)


@dataclass(frozen=True, slots=True)
class Memory:
    """Cache of some layers for one row."""

    layers: int
    numbers: int  # cache entries per token and layer
    operations: int  # per input token, context token and layer
    window: int = 0  # tokens in the cache; 0: all
    state: int = 0  # entries that do not grow with the text, per row and layer


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model. bits: storage of the matrices except embedding and lm_head; None: in the dtype."""

    name: str
    layers: int
    hidden: int
    vocabulary: int
    dense: int  # weights that every pass reads, without embedding and lm_head
    head: int  # weights of lm_head
    embedding: int = 0  # 0 if tied with lm_head
    expert: int = 0  # weights of one expert of one layer
    experts: int = 0
    experts_per_token: int = 0
    expert_layers: int = 0
    memory: tuple[Memory, ...] = ()
    bits: float | None = None
    head_bits: float | None = None  # storage of embedding and lm_head; None: in the dtype
    operations: int = 0  # launched by a pass
    layer: Config = field(default_factory=dict, hash=False, compare=False)  # config, for heads with such layers

    def __post_init__(self) -> None:
        """Raise ValueError for sizes that contradict each other."""
        counts = (self.layers, self.dense, self.head, self.expert_layers, *(memory.layers for memory in self.memory))
        if min(counts) < 0 or (self.experts and self.experts_per_token > self.experts):
            raise ValueError("its sizes contradict each other")

    @property
    def parameters(self) -> int:
        """Return the total number of parameters."""
        return self.dense + self.head + self.embedding + self.expert * self.experts * self.expert_layers

    def touched(self, tokens: float) -> float:
        """Return the expected number of experts per layer that so many tokens activate with uniform random routing."""
        return self.experts * (1.0 - (1.0 - self.experts_per_token / self.experts) ** tokens) if self.experts else 0.0

    def width(self, dtype_bytes: float) -> float:
        """Return the bytes per weight of the matrices."""
        return dtype_bytes if self.bits is None else self.bits / 8.0

    def head_width(self, dtype_bytes: float) -> float:
        """Return the bytes per weight of embedding and lm_head."""
        return dtype_bytes if self.head_bits is None else self.head_bits / 8.0

    def weight_bytes(self, dtype_bytes: float) -> float:
        """Return the bytes of all weights."""
        quantised = self.parameters - self.head - self.embedding
        return quantised * self.width(dtype_bytes) + (self.head + self.embedding) * self.head_width(dtype_bytes)

    def kv_bytes(self, context: int, dtype_bytes: float) -> float:
        """Return the bytes of the cache of one row."""
        kv_numbers = (m.layers * (m.numbers * (min(context, m.window) if m.window else context)) for m in self.memory)
        return sum(kv_numbers) * dtype_bytes + sum(m.layers * m.state for m in self.memory) * 4.0

    def footprint(self, context: int, dtype_bytes: float) -> Footprint:
        """Return the memory of a model that reads `context` tokens per text, of which windows keep the last ones
        only."""
        return Footprint(int(self.weight_bytes(dtype_bytes)), 0, int(self.kv_bytes(context, dtype_bytes)))


@lru_cache(maxsize=1)
def reference_configs() -> dict[str, Config]:
    """Return the sizes in configs of well-known models by hub id."""
    configs: dict[str, Config] = json.loads(KNOWN.read_text(encoding="utf-8"))
    return configs


def shape_of(config: Config, name: str = "", quantization: str | None = None) -> Shape:
    """Return the sizes of the model that a config describes. Raises ValueError, one line, for a config without them.

    quantization: 4bit or 8bit, as `run` takes it; None: as the config says.
    """
    if quantization is not None and quantization not in QUANTIZED_BITS:
        raise ValueError(f"unknown quantization {quantization!r:.60}; {suggest(quantization[:60], QUANTIZED_BITS)}")
    try:
        part = language_part(config)
        return _shape(config, part, name, QUANTIZED_BITS[quantization] if quantization else stored_bits(config, part))
    except UNREADABLE as error:
        why = f": {error}" if type(error) is ValueError else ""
        raise ValueError(
            f"the config.json of {name or 'this model'} lacks the sizes of a language model{why}"
        ) from None


def language_part(config: Config) -> Config:
    """Return the part of a config that has the sizes of layers, which multimodal models and heads may nest."""
    return config.get("text_config") or config.get("transformer_layer_config") or config


def number(config: Config, *names: str, default: int | None = None, low: int = 0) -> int:
    """Return the first of these sizes that a config has.

    Raises ValueError for a value that is no whole number from `low` to `LARGEST`, KeyError without one.
    """
    name = next((name for name in names if config.get(name) is not None), names[0])
    value = config.get(name)
    if value is None and default is not None:
        return default
    if value is None:
        raise KeyError(name)
    integer = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if not integer or not low <= value <= LARGEST:
        raise ValueError(f"{name} must be a whole number from {low} to {LARGEST:,}, not {short_repr(value)}")
    return int(value)


def _shape(outer_config: Config, config: Config, name: str, bits: float | None) -> Shape:
    reader = ConfigReader(config)
    layers, hidden, vocabulary = reader.layers, reader.hidden, number(config, "vocab_size", low=1)
    sparse = reader.expert_layers
    linear = reader.count("linear_attention")
    dense = (layers - linear) * reader.attention + linear * reader.linear_attention + (layers - sparse) * reader.mlp
    tied = bool(
        config.get("tie_word_embeddings", outer_config.get("tie_word_embeddings", reader.family in ("gpt2", "opt")))
    )
    return Shape(
        name=name or str(outer_config.get("_name_or_path") or reader.family),
        layers=layers,
        hidden=hidden,
        vocabulary=vocabulary,
        dense=dense + sparse * reader.shared,
        head=vocabulary * hidden,
        embedding=0 if tied else vocabulary * hidden,
        expert=reader.expert,
        experts=reader.experts if sparse else 0,
        experts_per_token=reader.experts_per_token if sparse else 0,
        expert_layers=sparse,
        memory=tuple(reader.memory()),
        bits=bits,
        head_bits=bits if "mean_bits" in (outer_config.get("quantization_config") or ()) else None,
        operations=layers * CHAIN + sparse * EXPERTS + ENDS,
        layer=config,
    )


def stored_bits(outer_config: Config, config: Config) -> float | None:
    """Return the bits in which a config says that its matrices are stored; None: as everything else.

    Raises ValueError for a number of bits that no format has.
    """
    stored = outer_config.get("quantization_config") or config.get("quantization_config")
    if not isinstance(stored, dict):
        return None
    if "mean_bits" in stored:  # of a GGUF file, whose matrices have different types
        return float(stored["mean_bits"])
    method = str(stored.get("quant_method"))
    if method == "bitsandbytes":
        return QUANTIZED_BITS["4bit" if stored.get("load_in_4bit") else "8bit"]
    if method == "compressed-tensors":
        groups = stored.get("config_groups") or {}
        stored = next(({"bits": g["weights"]["num_bits"]} for g in groups.values() if g.get("weights")), {})
    if not isinstance(stored.get("bits"), int):
        return STORED.get(method)
    bits = number(stored, "bits", low=1)
    if bits > MOST_BITS:
        raise ValueError(f"bits must be {MOST_BITS} at most, not {bits}")
    return bits + (0.25 if bits < 8 else 0.0)


class ConfigReader:
    """Sizes in a config, with the key names of all families."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.family = str(config.get("model_type", ""))
        self.layers = self._number("num_hidden_layers", "n_layer", "n_layers", "num_layers", low=1)
        self.hidden = self._number("hidden_size", "n_embd", "dim", "d_model", low=1)
        self.heads = self._number("num_attention_heads", "n_head", "n_heads", low=1)
        self.kv_heads = self._number("num_key_value_heads", "n_kv_heads", default=self.heads, low=1)
        if config.get("multi_query"):
            self.kv_heads = 1
        self.head_dim = self._number("head_dim", default=self.hidden // self.heads)
        self.experts = self._number("n_routed_experts", "num_local_experts", "num_experts", default=0)
        self.experts_per_token = self._number("num_experts_per_tok", "num_experts_per_token", default=1)

    def _number(self, *names: str, default: int | None = None, low: int = 0) -> int:
        return number(self._config, *names, default=default, low=low)

    @property
    def latent(self) -> int:
        """Return the cache entries per token of latent attention (DeepSeek-V2, 2405.04434, section 2.1); 0: other
        attention.
        """
        rank = self._number("kv_lora_rank", default=0)
        return rank and rank + self._number("qk_rope_head_dim")

    @property
    def kv_numbers(self) -> int:
        """Return the cache entries per token of a layer with keys and values, which transformers stores instead of a
        latent, too."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def attention(self) -> int:
        """Return the weights of attention in one layer."""
        if not self.latent:
            queries = self.hidden * self.heads * self.head_dim
            gated = self.family.startswith(("qwen3_next", "qwen3_5"))
            gate = queries if self._config.get("attn_output_gate", gated) else 0
            return 2 * queries + gate + 2 * self.hidden * self.kv_heads * self.head_dim
        rank, rope = self._number("kv_lora_rank"), self._number("qk_rope_head_dim")
        nope, value = self._number("qk_nope_head_dim"), self._number("v_head_dim")
        down = self._number("q_lora_rank", default=0)
        query_width = self.heads * (nope + rope)
        queries = down * (self.hidden + query_width) if down else self.hidden * query_width
        kv_width = self.hidden * (rank + rope) + rank * self.heads * (nope + value)
        return queries + kv_width + self.heads * value * self.hidden

    @property
    def linear_attention(self) -> int:
        """Return the weights of a layer with linear attention (gated delta net of Qwen3-Next)."""
        keys, values = self._linear_sizes()
        gates = 2 * self._number("linear_num_value_heads", default=0)
        return self.hidden * (2 * keys + 3 * values + gates)

    def _linear_sizes(self) -> tuple[int, int]:
        keys = self._number("linear_num_key_heads", default=0) * self._number("linear_key_head_dim", default=0)
        values = self._number("linear_num_value_heads", default=0) * self._number("linear_value_head_dim", default=0)
        return keys, values

    @property
    def mlp(self) -> int:
        """Return the weights of a dense layer's MLP."""
        inner = self._number("intermediate_size", "ffn_dim", "n_inner", default=4 * self.hidden)
        return (2 if self.family in PLAIN_MLP else 3) * self.hidden * inner

    @property
    def expert(self) -> int:
        """Return the weights of one expert."""
        return 3 * self.hidden * self._number("moe_intermediate_size", "intermediate_size", default=0)

    @property
    def shared(self) -> int:
        """Return the parameters that every token of a mixture-of-experts layer reads: shared experts and router."""
        inner = self._number("shared_expert_intermediate_size", default=0)
        inner = inner or self._number("n_shared_experts", default=0) * self._number("moe_intermediate_size", default=0)
        return 3 * self.hidden * inner + self.hidden * self.experts

    @property
    def expert_layers(self) -> int:
        """Return the number of layers with experts."""
        if not self.experts:
            return 0
        dense = self._number("first_k_dense_replace", default=0) + len(self._config.get("mlp_only_layers") or ())
        return (self.layers - dense) // self._number("decoder_sparse_step", "moe_layer_freq", default=1)

    def count(self, kind: str) -> int:
        """Return the number of layers with a kind of attention."""
        return list(self._config.get("layer_types") or [])[: self.layers].count(kind)

    @property
    def attention_layers(self) -> int:
        """Return the number of layers with keys and values."""
        kinds = list(self._config.get("layer_types") or [])[: self.layers]
        return sum("attention" in kind and "linear" not in kind for kind in kinds) if kinds else self.layers

    def memory(self) -> list[Memory]:
        """Return the cache by groups of layers."""
        linear, window = self.count("linear_attention"), self._number("sliding_window", default=0)
        sliding = self.count("sliding_attention")
        pattern = self._number("sliding_window_pattern", default=0)
        if window and pattern and not sliding:
            sliding = self.layers - self.layers // pattern
        numbers = self.latent or self.kv_numbers
        operations = 2 * self.heads * (2 * self.latent if self.latent else 2 * self.head_dim)
        keys, values = self._linear_sizes()
        heads = self._number("linear_num_key_heads", default=1)
        parts = [
            Memory(self.attention_layers - sliding, numbers, operations),
            Memory(sliding, numbers, operations, window),
            Memory(linear, 0, 0, state=keys // max(heads, 1) * values),
        ]
        return [memory for memory in parts if memory.layers]


def with_layers(shape: Shape, layers: int) -> Shape:
    """Return the shape of the first layers with the same output head, as layer skip uses it."""
    share = layers / shape.layers
    memory = tuple(replace(m, layers=round(m.layers * share)) for m in shape.memory)
    return replace(
        shape,
        layers=layers,
        dense=int(shape.dense * share),
        expert_layers=round(shape.expert_layers * share),
        memory=memory,
        operations=int((shape.operations - ENDS) * share) + ENDS,
    )
