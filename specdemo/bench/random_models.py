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

from specdemo.core.suggest import suggest
from specdemo.prediction.shapes import Config, known

STD = 0.02
CONTEXT = 8192


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a public model, or of one for trying out."""

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

    @classmethod
    def of(cls, name: str, said: Config) -> "Shape":
        """From the config of a well-known model."""
        return cls(
            family=said["model_type"],
            layers=said["num_hidden_layers"],
            hidden=said["hidden_size"],
            feed_forward=said["intermediate_size"],
            heads=said["num_attention_heads"],
            kv_heads=said["num_key_value_heads"],
            head_dim=said["head_dim"],
            vocabulary=said["vocab_size"],
            tied=said.get("tie_word_embeddings", False),
            draft=DRAFTS.get(name, ""),
        )

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


DRAFTS = {  # the shape of a draft model beside one
    "llama-tiny": "qwen3-tiny",
    "qwen3-tiny": "qwen3-tiny",
    "llama-100m": "llama-7m",
    "llama-7m": "llama-1m",
    "llama-8b": "llama-1b",
    "qwen3-8b": "qwen3-0.6b",
    "qwen3-32b": "qwen3-0.6b",
}
SHAPES = {name: Shape.of(name, config) for name, config in known().items() if "/" not in name}


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
