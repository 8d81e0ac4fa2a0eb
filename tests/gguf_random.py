"""Random GGUF files of any architecture from metadata: llama.cpp calls back with name and shape of each tensor."""

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy
from numpy.typing import NDArray

from specdemo.models.llamacpp import library

VOCABULARY, WIDTH, HEADS, KV_HEADS, HEAD, EPSILON, ROPE_BASE = 256, 64, 4, 2, 16, 1e-6, 1e4
BASE: Mapping[str, Any] = {
    "context_length": 4096,
    "embedding_length": WIDTH,
    "feed_forward_length": 128,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.key_length": HEAD,
    "attention.value_length": HEAD,
    "rope.freq_base": ROPE_BASE,
    "attention.layer_norm_rms_epsilon": EPSILON,
    "attention.layer_norm_epsilon": EPSILON,
}
DELTA = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 64,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 4,
    "ssm.group_count": 2,
    "full_attention_interval": 4,
    "rope.dimension_count": 8,
    "rope.dimension_sections": [2, 1, 1, 0],
}
EXPERTS = {
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 32,
    "expert_shared_feed_forward_length": 32,
}
MAMBA = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 128,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 8,
    "ssm.group_count": 2,
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "lfm2": {"block_count": 5, "attention.head_count_kv": [0, 0, 2, 0, 2], "shortconv.l_cache": 3},
    "qwen35": {"block_count": 4, **DELTA},
    "qwen35moe": {"block_count": 4, **DELTA, **EXPERTS},
    "nemotron_h": {
        "block_count": 5,
        **MAMBA,
        "attention.head_count_kv": [0, 0, 2, 0, 0],
        "feed_forward_length": [0, 128, 0, 0, 128],
    },
    "qwen3next": {"block_count": 4, **DELTA, **EXPERTS},
    "granitehybrid": {"block_count": 4, **MAMBA, "attention.head_count_kv": [0, 0, 2, 0], "rope.dimension_count": 16},
    "falcon-h1": {"block_count": 3, **MAMBA, "rope.dimension_count": 16},
    "mamba2": {"block_count": 3, **MAMBA},
    "mamba": {
        "block_count": 3,
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 128,
        "ssm.state_size": 16,
        "ssm.time_step_rank": 4,
    },
    "glm4moe": {
        "block_count": 3,
        **EXPERTS,
        "rope.dimension_count": 8,
        "leading_dense_block_count": 1,
        "expert_shared_count": 1,
        "expert_weights_scale": 1.0,
        "expert_weights_norm": True,
    },
}
SMALL = ("attn_output", "ssm_out", "ffn_down", "ffn_down_exps", "ffn_down_shexp")
Tensors = dict[str, NDArray[numpy.float32]]


class _InitParameters(ctypes.Structure):  # struct gguf_init_params
    _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p)]


def shape_of(architecture: str, prediction: bool = False) -> dict[str, Any]:
    """Return the metadata of a small model. prediction: with a prediction layer, which block_count counts too."""
    shape = {**BASE, **SHAPES[architecture]}
    more = {"block_count": shape["block_count"] + 1, "nextn_predict_layers": 1} if prediction else {}
    return shape | more


def write_random(path: Path, architecture: str, shape: Mapping[str, Any], seed: int = 0) -> Tensors:
    """Write a random F32 file; return its tensors. With a prediction layer its text follows mostly from the last token,
    so that this layer is often right. llama.cpp ends the process at impossible sizes."""
    rng, tensors = numpy.random.default_rng(seed), {}
    for name, size in _tensor_shapes(path.with_suffix(".meta"), architecture, shape).items():
        values = rng.standard_normal(size[::-1]).astype(numpy.float32)
        if "norm" in name:
            values = 1 + 0.05 * values
        elif "ssm_a" in name and "alpha" not in name:
            values = -numpy.abs(values) - 0.1  # a decay
        elif "eh_proj" in name:
            values = numpy.eye(WIDTH, 2 * WIDTH) + 0.05 * values
        elif "embd" not in name:
            values = 0.3 * values
        small = 0.015 if name.split(".")[-2] in SMALL and "nextn_predict_layers" in shape else 1.0
        tensors[name] = numpy.asarray(small * values, numpy.float32)
    write_tensors(path, architecture, shape, tensors)
    return tensors


def write_tensors(
    path: Path,
    architecture: str,
    shape: Mapping[str, Any],
    tensors: Mapping[str, Any],
    size: int = VOCABULARY,
    mask: int | None = None,
) -> None:
    """Write a file with a vocabulary of `size` tokens."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in shape.items():
        kinds = {list: writer.add_array, bool: writer.add_bool, float: writer.add_float32, int: writer.add_uint32}
        kinds[type(value)](f"{architecture}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{number}" for number in range(size)])
    writer.add_token_types([1] * size)
    writer.add_token_merges(["t1 t2"])
    writer.add_eos_token_id(0)
    if mask is not None:
        writer.add_mask_token_id(mask)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()


def _tensor_shapes(path: Path, architecture: str, shape: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the dimensions of each tensor that llama.cpp wants for metadata, the fastest first."""
    folder = Path(llama_cpp.__file__).parent / "lib"
    base = ctypes.CDLL(str(next(file for file in folder.iterdir() if "ggml-base" in file.name)))
    base.gguf_init_from_file.argtypes = [ctypes.c_char_p, _InitParameters]
    base.gguf_init_from_file.restype = ctypes.c_void_p
    base.ggml_get_name.argtypes, base.ggml_get_name.restype = [ctypes.c_void_p], ctypes.c_char_p
    write_tensors(path, architecture, shape, {})
    shapes: dict[str, list[int]] = {}

    def note(tensor: int, _: object) -> None:  # struct ggml_tensor: type, buffer, ne[4]
        shapes[base.ggml_get_name(tensor).decode()] = [*(ctypes.c_int64 * 4).from_address(tensor + 16)]

    library()  # without its log
    parameters = llama_cpp.llama_model_default_params()
    parameters.n_gpu_layers, parameters.load_mtp, parameters.use_extra_bufts = 0, True, False
    callback = llama_cpp.llama_cpp.llama_model_set_tensor_data_t(note)
    metadata = base.gguf_init_from_file(str(path).encode(), _InitParameters(True, None))
    llama_cpp.llama_model_free(llama_cpp.llama_model_init_from_user(metadata, callback, None, parameters))
    path.unlink()
    optional = ("scale", "nextn.embed_tokens.weight", "nextn.shared_head_head.weight")
    wanted = {name: size for name, size in shapes.items() if not name.endswith(optional)}
    if architecture.startswith("qwen35"):
        wanted = {name: size for name, size in wanted.items() if not (".attn_" in name and name.endswith("bias"))}
    return {
        name: size[: max((place for place, length in enumerate(size, start=1) if length > 1), default=1)]
        for name, size in wanted.items()
    }
