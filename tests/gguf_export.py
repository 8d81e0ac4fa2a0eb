"""Export of a Llama model and its tokenizer to GGUF, with the package `gguf`."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from specdemo.models.gguf_files import ROPE_BASE

NORMAL, CONTROL = 1, 3  # token types of GGUF
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True, slots=True)
class GGUFVocab:
    """A byte-level vocabulary."""

    tokens: Sequence[str]
    merges: Sequence[str]
    special: frozenset[int] = frozenset()
    eos_token_id: int | None = None
    bos_token_id: int | None = None
    adds_bos: bool = False  # the tokenizer puts it before a text

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase | None, size: int) -> "GGUFVocab":
        """Read the first `size` tokens. Raises ValueError for other kinds of tokenizers."""
        fast = tokenizer if isinstance(tokenizer, PreTrainedTokenizerFast) else None
        spec = json.loads(fast.backend_tokenizer.to_str() if fast else "{}")
        if not fast or spec["model"]["type"] != "BPE" or spec["decoder"]["type"] != "ByteLevel":
            raise ValueError(
                "export to llama.cpp supports byte-level BPE tokenizers only; choose another model or engine"
            )
        names = [str(fast.convert_ids_to_tokens(number)) for number in range(min(size, len(fast)))]
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in spec["model"]["merges"]]
        padded = [*names, *(f"[unused {number}]" for number in range(len(names), size))]
        adds_bos = fast.encode("a")[0] == fast.bos_token_id
        return cls(padded, merges, frozenset(fast.all_special_ids), fast.eos_token_id, fast.bos_token_id, adds_bos)


def write_gguf(model: PreTrainedModel, vocab: GGUFVocab, file: Path) -> None:
    """Write the model in float32 or bfloat16. Raises ValueError unless it is a plain Llama.

    llama.cpp knows pre-tokenizers by name only; the one written here is close to the tokenizer's own, but not
    identical.
    """
    config = _checked(model, str(model.dtype).removeprefix("torch."))
    writer = import_module("gguf").GGUFWriter(file, "llama")
    for name, value in _shape(config).items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"llama.{name}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocab.tokens)
    writer.add_token_types([CONTROL if number in vocab.special else NORMAL for number in range(len(vocab.tokens))])
    writer.add_token_merges(vocab.merges)
    if vocab.eos_token_id is not None:
        writer.add_eos_token_id(vocab.eos_token_id)
    writer.add_add_bos_token(vocab.adds_bos)
    if vocab.bos_token_id is not None:
        writer.add_bos_token_id(vocab.bos_token_id)
    types = import_module("gguf").LlamaFileType
    writer.add_file_type(types.MOSTLY_BF16 if model.dtype == torch.bfloat16 else types.ALL_F32)
    bfloat16 = import_module("gguf").GGMLQuantizationType.BF16
    for name, tensor in _tensors(model):
        half = tensor.dtype == torch.bfloat16 and tensor.ndim > 1  # llama.cpp requires norms in float32
        raw = tensor.contiguous().view(torch.uint8) if half else tensor.float().contiguous()
        writer.add_tensor(name, raw.numpy(), raw_dtype=bfloat16 if half else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _checked(model: nn.Module, dtype: str) -> LlamaConfig:
    """Return the config of a model that can be written. Raises ValueError for another model."""
    config = model.config
    if type(model) is LlamaForCausalLM and isinstance(config, LlamaConfig) and dtype != "float16":
        scaled = (config.rope_parameters or {}).get("rope_type") != "default"
        if not (config.attention_bias or config.mlp_bias or scaled):
            return config
    raise ValueError(
        f"export to llama.cpp supports Llama models without bias and RoPE scaling, in float32 or bfloat16; this is "
        f"{type(model).__name__} in {dtype}; use a GGUF file of it, or choose another model or engine"
    )


def _shape(config: LlamaConfig) -> dict[str, int | float]:
    """Return the sizes under llama.cpp's names."""
    size = config.head_dim or config.hidden_size // config.num_attention_heads
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads or config.num_attention_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": size,
        "attention.value_length": size,
        "rope.dimension_count": size,
        "rope.freq_base": float((config.rope_parameters or {}).get("rope_theta") or ROPE_BASE),
        "vocab_size": config.vocab_size,
    }


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    state, config = model.state_dict(), model.config
    yield "token_embd.weight", state["model.embed_tokens.weight"]
    yield "output_norm.weight", state["model.norm.weight"]
    if not config.tie_word_embeddings:
        yield "output.weight", state["lm_head.weight"]
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for layer in range(int(config.num_hidden_layers or 0)):
        for hf_name, name in NAMES.items():
            tensor = state[f"model.layers.{layer}.{hf_name}.weight"]
            value = _interleaved(tensor, int(heads[name] or 1)) if name in heads else tensor
            yield f"blk.{layer}.{name}.weight", value


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Reorder rows for llama.cpp, which rotates neighbouring pairs where transformers rotates the halves of a head."""
    paired: Tensor = weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    return paired
