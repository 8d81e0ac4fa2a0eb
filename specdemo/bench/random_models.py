"""Models of real shapes with random weights, created on the device without files. Their output is noise; the time of a
pass is realistic.
"""

import logging
from importlib import import_module
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers import GenerationConfig as HFGenerationConfig

from specdemo.analysis.configs import config_of

STD = 0.02
MAX_POSITIONS = 40_960  # positions


DRAFT_SHAPES = {  # target -> shape of its draft model
    "llama-tiny": "qwen3-tiny",
    "qwen3-tiny": "qwen3-tiny",
    "llama-100m": "llama-7m",
    "llama-7m": "llama-1m",
    "llama-8b": "llama-1b",
    "qwen3-8b": "qwen3-0.6b",
    "qwen3-32b": "qwen3-0.6b",
}


@torch.no_grad()
def random_model(name: str, device: torch.device, dtype: torch.dtype, bits: int | None = None) -> PreTrainedModel:
    """Create a model with the same weights every time on one kind of device.

    bits: 4 or 8, quantised by bitsandbytes as in `load_model`. Peak memory is the model plus one matrix. Raises
    ImportError without bitsandbytes.
    """
    tokens: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = AutoConfig.for_model(**config_of(name), max_position_embeddings=MAX_POSITIONS, **tokens)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    head, decoder = model.get_output_embeddings(), model.get_decoder()
    if bits:
        for name, linear in list(model.named_modules()):
            if type(linear) is nn.Linear and linear is not head:
                model.set_submodule(name, _quantised(linear, _drawn(linear.weight, device, name), bits, dtype))
    _fill(model, device)
    with device:  # RoPE angles are buffers, which the code above did not fill
        decoder.rotary_emb = type(decoder.rotary_emb)(model.config)
    model.tie_weights()
    model.generation_config = HFGenerationConfig(pad_token_id=0)
    network: PreTrainedModel = model.eval().requires_grad_(False)
    return network


def _fill(model: nn.Module, device: torch.device) -> None:
    for name, module in model.named_modules():
        for own, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                weights = _drawn(parameter, device, f"{name}.{own}")
                module.register_parameter(own, nn.Parameter(weights, requires_grad=False))


def _drawn(like: Tensor, device: torch.device, name: str) -> Tensor:
    """Initialise matrices from a normal distribution and vectors with ones, as for norms."""
    tensor = torch.empty(like.shape, dtype=like.dtype, device=device)
    if tensor.ndim < 2:
        return tensor.fill_(1.0)
    rng = torch.Generator(device).manual_seed(crc32(name.encode()))
    return tensor.normal_(0.0, STD, generator=rng)


def _quantised(linear: nn.Linear, weight: Tensor, bits: int, dtype: torch.dtype) -> nn.Module:
    bnb: Any = import_module("bitsandbytes.nn")  # partly untyped

    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)  # it logs every product that casts
    layer: nn.Module
    sizes = linear.in_features, linear.out_features
    with torch.device("meta"):
        if bits == 4:
            layer = bnb.Linear4bit(*sizes, bias=False, compute_dtype=dtype, quant_type="nf4")
        else:
            layer = bnb.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False, threshold=0.0)
    if bits == 4:
        packed = bnb.Params4bit(weight, requires_grad=False, quant_type="nf4", compress_statistics=True)
    else:  # only a move from main memory quantises
        packed = bnb.Int8Params(weight.cpu(), requires_grad=False, has_fp16_weights=False)
    layer.weight = packed.to(weight.device)
    return layer
