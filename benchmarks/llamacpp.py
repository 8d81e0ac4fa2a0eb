"""llama.cpp as a peer, where the packages `xllamacpp` and `gguf` are installed: the same Llama weights in float32, on
the CPU, one text at a time.

Its words are `t` and a token's id, so that what it writes can be read back as token ids.
"""

import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

PACKAGES = ("xllamacpp", "gguf")
CONTEXT = 1024
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


class LlamaCpp:
    """Plain greedy decoding by llama.cpp, with as many threads as torch has."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises ValueError with one line where it cannot take part."""
        missing = [name for name in PACKAGES if find_spec(name) is None]
        if missing:
            raise ValueError(f"llama.cpp does not take part: pip install {' '.join(PACKAGES)}")
        if type(model) is not LlamaForCausalLM or model.device.type != "cpu" or model.dtype != torch.float32:
            raise ValueError("llama.cpp does not take part: it is compared on Llama in float32 on a CPU")
        library = import_module("xllamacpp")
        settings = library.CommonParams()
        settings.load_mode = library.llama_load_mode.LLAMA_LOAD_MODE_NONE  # whole, so that the file can go
        settings.n_ctx, settings.n_parallel = min(CONTEXT, model.config.max_position_embeddings), 1
        settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = torch.get_num_threads()
        settings.n_gpu_layers = 0
        settings.verbosity = -1
        with TemporaryDirectory() as folder:
            file = Path(folder) / "model.gguf"
            write_gguf(model, file)
            settings.model.path = str(file)
            self._server = library.Server(settings)

    def __call__(self, prompt: Tensor, new_tokens: int) -> list[int]:
        asked = {"prompt": prompt[0].tolist(), "n_predict": new_tokens, "temperature": 0, "ignore_eos": True}
        answer = self._server.handle_completions({**asked, "cache_prompt": False})
        return [int(number) for number in re.findall(r"t(\d+)", answer["choices"][0]["text"])]


def write_gguf(model: LlamaForCausalLM, file: Path) -> None:
    """The model in llama.cpp's own format, with words that name their ids."""
    config: Any = model.config
    writer = import_module("gguf").GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    size = config.head_dim or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(size)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"t{number}".encode() for number in range(config.vocab_size)])
    writer.add_token_scores([0.0] * config.vocab_size)
    writer.add_token_types([1] * config.vocab_size)
    for name, tensor in _tensors(model):
        writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(model: LlamaForCausalLM) -> list[tuple[str, Tensor]]:
    held, config = model.state_dict(), model.config
    found = [
        ("token_embd.weight", held["model.embed_tokens.weight"]),
        ("output_norm.weight", held["model.norm.weight"]),
    ]
    if not config.tie_word_embeddings:
        found.append(("output.weight", held["lm_head.weight"]))
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for layer in range(int(config.num_hidden_layers or 0)):
        for theirs, name in NAMES.items():
            tensor = held[f"model.layers.{layer}.{theirs}.weight"]
            if name in heads:
                tensor = _interleaved(tensor, int(heads[name] or 1))
            found.append((f"blk.{layer}.{name}.weight", tensor))
    return found


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows as llama.cpp turns them: pairs of neighbours, where transformers turns the halves of a head."""
    paired: Tensor = weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    return paired
