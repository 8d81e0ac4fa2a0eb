"""Tiny random models with every kind of history, built from their configs."""

import torch
import transformers
from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from specdemo.models import packed

VOCABULARY = 61
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama():
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def qwen3():
    return Qwen3ForCausalLM(Qwen3Config(**SIZES))


def gemma3():
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, sliding_window=6, layer_types=kinds, query_pre_attn_scalar=8))


def gemma4():
    """Return a model whose last two layers share the caches of earlier ones."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    per_layer = {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": VOCABULARY}
    sizes = SIZES | {"num_hidden_layers": 5, "sliding_window": 6, "global_head_dim": 16, "num_kv_shared_layers": 2}
    return Gemma4ForCausalLM(Gemma4TextConfig(**sizes, **per_layer, layer_types=kinds))


def mistral():
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5))


def llama_dynamic():
    """Return a model whose angles follow the length of the text, so that transformers calls its layers."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    return LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=rope))


def qwen3_windows():
    """Return a model with windows in its last two layers."""
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1))


def gpt2():
    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 96}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))


def gpt_neo():
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 5}
    kinds = [[["global", "local"], 1]]
    config = GPTNeoConfig(**sizes, attention_types=kinds, max_position_embeddings=96, bos_token_id=1, eos_token_id=2)
    return GPTNeoForCausalLM(config)


def mamba():
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 3}
    return MambaForCausalLM(MambaConfig(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2))


def qwen3_next():
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    linear = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    experts["shared_expert_intermediate_size"] = 16
    config = Qwen3NextConfig(**SIZES, **linear, **experts, linear_value_head_dim=8, layer_types=kinds)
    return Qwen3NextForCausalLM(config)


def qwen3_5():
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    linear = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES, **linear, linear_value_head_dim=8, layer_types=kinds))


def mamba2():
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 3, "num_heads": 8}
    return Mamba2ForCausalLM(Mamba2Config(**sizes, head_dim=8, n_groups=2, chunk_size=4, pad_token_id=0))


def falcon_h1():
    """Return a model with attention and a state-space layer in parallel in every layer."""
    sizes = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 4}
    return FalconH1ForCausalLM(FalconH1Config(**SIZES, **sizes, mamba_n_groups=1))


def gpt_oss():
    """Return a model with experts, attention sinks, and windows in every other layer."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return GptOssForCausalLM(GptOssConfig(**SIZES, **experts, sliding_window=6, layer_types=kinds))


def dory(mode):
    """Return a looped decoder, which reads and extends its cache itself."""
    sizes = SIZES | {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}
    loop = {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1, "recurrent_kv_cache_mode": mode}
    return transformers.DoryForCausalLM(transformers.DoryConfig(**sizes, **loop))


def inkling2_loop():
    """Return a looped decoder with a cache that cannot be rolled back."""
    loop = {"loop_layer_index_start": 1, "loop_layer_index_end": 2, "n_layers_per_attn_res_block": 1, "d_rel": 4}
    heads = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "sliding_window_size": 5}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "loop_gate_rank": 4}
    sizes = {name: size for name, size in SIZES.items() if name != "intermediate_size"} | {"unpadded_vocab_size": 61}
    config = transformers.Inkling2LoopTextConfig(**sizes, **loop, **heads, **experts, rel_extent=96)
    return transformers.Inkling2LoopForCausalLM(config)


TREES = {
    "llama": llama,
    "qwen3": qwen3,
    "gemma3": gemma3,
    "gemma4": gemma4,
    "mistral": mistral,
    "gpt2": gpt2,
    "gpt_oss": gpt_oss,
}
CHAINS = {"gpt_neo": gpt_neo, "mamba": mamba, "qwen3_next": qwen3_next}
HYBRIDS = {"qwen3_5": qwen3_5, "mamba2": mamba2, "falcon_h1": falcon_h1}  # slow, and limited to chains
CALLED = {
    "llama_dynamic": llama_dynamic,
    "qwen3_windows": qwen3_windows,
}  # their fused layers are called by transformers
LOOPED = {f"dory-{mode}": lambda mode=mode: dory(mode) for mode in ("per_loop", "last_loop")}  # refused
if hasattr(transformers, "Inkling2LoopForCausalLM"):  # since transformers 5.24
    HYBRIDS["inkling2_loop"] = inkling2_loop
else:
    LOOPED = {}


def build(name):
    """Return a model with weights large enough that a wrong mask changes the output."""
    torch.manual_seed(7)
    model = {**TREES, **CHAINS, **HYBRIDS, **CALLED, **LOOPED}[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.3)
    return model.requires_grad_(False)


@torch.no_grad()
def fresh(model, tokens):
    """Return the logits after a text, from one pass without a cache."""
    return model(torch.tensor([tokens]), use_cache=False).logits[0, -1]


def texts(rows, length, seed=0):
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def force_layout(monkeypatch, layout):
    """Give all weights on a CPU this layout, without a measurement."""
    monkeypatch.setattr(packed, "LEAST_BYTES", 0)
    monkeypatch.setattr(packed.Layout, "of_weights", {})
    monkeypatch.setattr(packed, "_measured_layout", lambda *given: layout)


class Replayed:
    """A recorder that behaves like a CUDA graph where a CPU can show it: every replay writes to the same memory."""

    def __init__(self):
        self.recorded = 0
        self.replayed = 0

    def __call__(self, run):
        self.recorded += 1
        results = run()

        def replay():
            self.replayed += 1
            for into, result in zip(results, run(), strict=True):
                into.copy_(result)
            return results

        return replay


def failing(run):
    raise RuntimeError("operation not permitted when stream is capturing\nmore about it")


def forgetful(run):
    """Record a pass and replay its first result for any input."""
    result = run()
    result[0].zero_()
    return lambda: result


def without_memory(run):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 0 bytes free")
