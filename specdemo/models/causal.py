"""Checks that a model generates text token by token, as a causal language model does."""

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
)

from specdemo.core.safe_io import is_out_of_memory
from specdemo.models.errors import first_line

# How much a token may change the logits before it, as a share of how much it changes its own. In a causal model only
# rounding changes them. Encoders with random weights of scale 0.2 reach 0.3 to 2, of scale 0.02 0.004 to 0.01.
LEAK = 2e-3  # in float32
LEAK_LOW_PRECISION = 0.1


def check_config(name: str, config: PreTrainedConfig) -> None:
    """Raise ValueError for an encoder, an encoder-decoder, and a model that generates no text."""
    kind = config.model_type
    if config.is_encoder_decoder:
        raise ValueError(
            f"{name} is an encoder-decoder model ({kind}), and specdemo runs decoder-only models; choose one of these, "
            "such as a Llama or Qwen3"
        )
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and getattr(config, "is_decoder", True) is False:
        raise _encoder(name, kind)


def check_class(name: str, config: PreTrainedConfig) -> None:
    """Raise ValueError where transformers has no class that generates text for the config of a folder."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise ValueError(
            f"{name} does not generate text: transformers has no causal language model of type {config.model_type}; "
            "choose a model that has one, such as a Llama or Qwen3"
        )


@torch.no_grad()
def check_model(name: str, model: PreTrainedModel) -> None:
    """Raise ValueError unless a forward pass of the model works, and its logits do not depend on later tokens."""
    embed: Any = model.get_input_embeddings()
    if model.get_output_embeddings() is None:
        kind = type(model).__name__
        raise ValueError(f"{name} has no language-model head ({kind}); load it with AutoModelForCausalLM")
    device = embed.weight.device
    tokens = torch.tensor([[1, 2], [1, 3]], device="cpu" if device.type == "meta" else device)
    try:
        logits = model(tokens % embed.weight.shape[0]).logits.float()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ValueError(
            f"{name} cannot generate: transformers fails in a forward pass of this {model.config.model_type} model "
            f"({first_line(error)[:200]}); choose another model"
        ) from error
    first, second = (logits[0] - logits[1]).abs().amax(-1).tolist()
    exact = model.dtype == torch.float32 and not getattr(model, "is_quantized", False)
    if first > (LEAK if exact else LEAK_LOW_PRECISION) * second:
        raise _encoder(name, model.config.model_type)


def _encoder(name: str, kind: str) -> ValueError:
    return ValueError(
        f"{name} is an encoder ({kind}): its predictions depend on later tokens, so it cannot generate text; choose a "
        "causal language model, such as a Llama or Qwen3"
    )
