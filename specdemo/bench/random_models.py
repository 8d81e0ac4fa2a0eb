"""Models of real shapes with random weights, made on the device without a file: what they write is noise, what a pass
costs is true."""

import logging
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal
from zlib import crc32

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3Config
from transformers import GenerationConfig as HFGenerationConfig

from specdemo.core.words import suggest

STD = 0.02
CONTEXT = 8192


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a public model; the comment beside it says which."""

    family: Literal["llama", "qwen3"]
    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = False  # one matrix is embedding and head
    draft: str = ""  # the shape of a draft model beside it

    @property
    def config(self) -> LlamaConfig | Qwen3Config:
        """The shape as transformers describes it."""
        sizes: dict[str, Any] = {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.feed_forward,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": CONTEXT,
            "tie_word_embeddings": self.tied,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        return LlamaConfig(**sizes) if self.family == "llama" else Qwen3Config(**sizes)

    @property
    def parameters(self) -> int:
        """The weights, the embedding included."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        layers = self.layers * (attention + 3 * self.hidden * self.feed_forward)
        return layers + self.vocabulary * self.hidden * (1 if self.tied else 2)

    def bytes(self, dtype: torch.dtype, bits: int | None = None) -> int:
        """Of its weights; quantised are all matrices but embedding and head."""
        whole = self.vocabulary * self.hidden * (1 if self.tied else 2)
        width = dtype.itemsize if bits is None else bits / 8.0 * (1.06 if bits == 4 else 1.01)  # scales
        return int((self.parameters - whole) * width) + whole * dtype.itemsize


SHAPES = {
    "llama-tiny": Shape("llama", 2, 64, 192, 4, 2, 16, 512, draft="qwen3-tiny"),  # none: for trying out
    "qwen3-tiny": Shape("qwen3", 2, 64, 192, 4, 2, 16, 512, True, draft="qwen3-tiny"),  # none
    "llama-100m": Shape("llama", 12, 768, 2048, 12, 12, 64, 8192, draft="llama-7m"),  # none: for a CPU
    "llama-7m": Shape("llama", 8, 192, 512, 3, 3, 64, 8192),  # none: a draft for it
    "llama-1b": Shape("llama", 16, 2048, 8192, 32, 8, 64, 128256, True),  # Llama-3.2-1B
    "llama-8b": Shape("llama", 32, 4096, 14336, 32, 8, 128, 128256, draft="llama-1b"),  # Llama-3.1-8B
    "llama-34b": Shape("llama", 60, 7168, 20480, 56, 8, 128, 64000),  # Yi-34B
    "qwen3-0.6b": Shape("qwen3", 28, 1024, 3072, 16, 8, 128, 151936, True),
    "qwen3-1.7b": Shape("qwen3", 28, 2048, 6144, 16, 8, 128, 151936, True),
    "qwen3-8b": Shape("qwen3", 36, 4096, 12288, 32, 8, 128, 151936, draft="qwen3-0.6b"),
    "qwen3-32b": Shape("qwen3", 64, 5120, 25600, 64, 8, 128, 151936, draft="qwen3-0.6b"),
}


def shape(name: str) -> Shape:
    """Raises ValueError with the nearest name."""
    if name not in SHAPES:
        raise ValueError(f"unknown shape {name!r}; {suggest(name, SHAPES)}")
    return SHAPES[name]


@torch.no_grad()
def random_model(of: Shape, device: torch.device, dtype: torch.dtype, bits: int | None = None) -> PreTrainedModel:
    """The same weights every time on one kind of device. bits: 4 or 8, quantised by bitsandbytes as `load_model` does.

    Never larger than the model itself and one matrix. Raises ImportError without bitsandbytes.
    """
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(of.config, dtype=dtype)
    head, decoder = model.get_output_embeddings(), model.get_decoder()
    if bits:
        for name, linear in list(model.named_modules()):
            if type(linear) is nn.Linear and linear is not head:
                model.set_submodule(name, _quantised(linear, _drawn(linear.weight, device, name), bits, dtype))
    _fill(model, device)
    with device:  # angles are no weights, so nothing above has filled them
        decoder.rotary_emb = type(decoder.rotary_emb)(model.config)
    model.tie_weights()
    model.generation_config = HFGenerationConfig(pad_token_id=0)
    made: PreTrainedModel = model.eval().requires_grad_(False)
    return made


def _fill(model: nn.Module, device: torch.device) -> None:
    for name, module in model.named_modules():
        for own, parameter in list(module.named_parameters(recurse=False)):
            if parameter.device.type == "meta":
                drawn = _drawn(parameter, device, f"{name}.{own}")
                module.register_parameter(own, nn.Parameter(drawn, requires_grad=False))


def _drawn(like: Tensor, device: torch.device, name: str) -> Tensor:
    """Matrices are normal, vectors are ones, as norms begin."""
    made = torch.empty(like.shape, dtype=like.dtype, device=device)
    if made.ndim < 2:
        return made.fill_(1.0)
    rng = torch.Generator(device).manual_seed(crc32(name.encode()))
    return made.normal_(0.0, STD, generator=rng)


def _quantised(linear: nn.Linear, weight: Tensor, bits: int, dtype: torch.dtype) -> nn.Module:
    bnb: Any = import_module("bitsandbytes.nn")  # some of it is typed, some not

    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)  # at every product that it casts
    made: nn.Module
    with torch.device("meta"):
        if bits == 4:
            made = bnb.Linear4bit(
                linear.in_features, linear.out_features, bias=False, compute_dtype=dtype, quant_type="nf4"
            )
        else:
            made = bnb.Linear8bitLt(
                linear.in_features, linear.out_features, bias=False, has_fp16_weights=False, threshold=0.0
            )
    if bits == 4:
        packed = bnb.Params4bit(weight, requires_grad=False, quant_type="nf4", compress_statistics=True)
    else:  # quantised on its way from main memory alone
        packed = bnb.Int8Params(weight.cpu(), requires_grad=False, has_fp16_weights=False)
    made.weight = packed.to(weight.device)
    return made
