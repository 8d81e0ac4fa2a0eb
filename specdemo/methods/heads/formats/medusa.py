"""Files of Medusa heads. Read are Medusa-1, `{i}.{l}.linear.*` and `{i}.{L}.weight`; Medusa-2, the same under
`medusa_head.` in a whole model; vLLM's, `blocks.{i}.layers.{l}.*` and `lm_heads.{i}.weight`. The last is written, the
only one in safetensors that an engine of today reads as it is. Heads and layers are counted from the tensors: published
configs say two heads where the file holds five.
"""

import re
from pathlib import Path

from torch import Tensor

from specdemo.core.protocol import Target
from specdemo.models.checkpoints import Checkpoint


def recognises(checkpoint: Checkpoint) -> bool:
    """Whether the files are of Medusa heads."""
    named = any(file.startswith("medusa_lm_head.") for file in checkpoint.files) or checkpoint.says(
        "model_type", "medusa"
    )
    return named or "medusa_num_heads" in checkpoint.config or checkpoint.has("medusa_head.", "blocks.0.layers.")


def in_vllm_names(checkpoint: Checkpoint, target: Target) -> dict[str, Tensor]:
    """The heads' tensors, whichever format they are in. Raises ValueError where there are none for this target."""
    inside = checkpoint.take("medusa_head.")
    if 0 < len(inside) < len(checkpoint.tensors) and Path(target.name).name != Path(checkpoint.name).name:
        raise ValueError(f"{checkpoint.name} is a whole model trained together with its heads; make it the target too")
    stored = inside or {name.removeprefix("medusa_heads."): t for name, t in checkpoint.tensors.items()}
    tensors = {_in_vllm_name(name): tensor for name, tensor in stored.items()}
    if checkpoint.config.get("original_lm_head"):  # one for all heads
        shared = tensors.pop("lm_head.weight", tensors.get("lm_heads.0.weight"))
        if shared is not None:
            heads = count(tensors, r"blocks\.(\d+)\.")
            tensors |= {f"lm_heads.{i}.weight": shared.clone() for i in range(heads)}
    token_map = tensors.get("token_map")
    if token_map is not None:  # the file may hold the LM heads of the whole vocabulary
        for name, tensor in tensors.items():
            if name.startswith("lm_heads.") and len(tensor) > len(token_map):
                tensors[name] = tensor[token_map]
    if "lm_heads.0.weight" not in tensors:
        raise ValueError(
            f"{checkpoint.name} holds no Medusa head known here; convert it to the authors' or vLLM's format"
        )
    return tensors


def _in_vllm_name(name: str) -> str:
    name = re.sub(r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2.", name)
    return re.sub(r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight", name)


def count(tensors: dict[str, Tensor], pattern: str) -> int:
    """How many numbers the group of `pattern` takes in the names, counted from 0."""
    found = (re.match(pattern, name) for name in tensors)
    return 1 + max((int(match[1]) for match in found if match), default=-1)


def check_fit(checkpoint: Checkpoint, target: Target, hidden_size: int, vocab_size: int) -> None:
    """Raise ValueError unless heads of these sizes belong on this target."""
    if (hidden_size, vocab_size) != (target.hidden_size, target.vocab_size):
        base = checkpoint.config.get("base_model_name_or_path")
        base = base if base not in (None, "N/A") else "it was trained for"
        raise ValueError(
            f"{checkpoint.name} is for hidden size {hidden_size} and vocabulary {vocab_size}, the target has "
            f"{target.hidden_size} and {target.vocab_size}; choose the target {base}"
        )
