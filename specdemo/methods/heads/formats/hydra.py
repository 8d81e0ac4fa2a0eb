"""Files of Hydra heads: `hydra_lm_head.pt`, with `hydra_mlp.{i}.*` and `hydra_lm_head.{i}.*`; the same tensors are
written, but as safetensors. In Hydra++ dropouts shift the numbers in the names. Blocks 1.. of a head are one and the
same.
"""

import re
from typing import NamedTuple

from torch import Tensor

from specdemo.models.checkpoints import Checkpoint

USED = ("hydra_mlp.", "hydra_lm_head.", "prefix_embeding_layer.layers.", "prefix_embeding_layer.norm.")


class Sizes(NamedTuple):
    vocab_size: int
    hidden_size: int
    layers: int  # of a head
    prefixed: bool


def recognises(checkpoint: Checkpoint) -> bool:
    """Whether the files are of Hydra heads."""
    return "hydra_lm_head.pt" in checkpoint.files or "hydra_num_heads" in checkpoint.config


def parts(checkpoint: Checkpoint) -> tuple[dict[str, Tensor], Sizes]:
    """Raises ValueError for other kinds of Hydra heads."""
    tensors = {n: t for n, t in checkpoint.tensors.items() if n.startswith(USED) and not n.endswith("inv_freq")}
    prefixed = any(name.startswith("prefix") for name in tensors)
    lm_head, first = ("hydra_lm_head.0.1", "hydra_mlp.0.1") if prefixed else ("hydra_lm_head.0", "hydra_mlp.0.0")
    if f"{lm_head}.weight" not in tensors or f"{first}.res_connection.weight" not in tensors:
        arch = checkpoint.config.get("hydra_head_arch", "unknown")
        raise ValueError(
            f"{checkpoint.name} holds {arch} heads; choose grounded heads of kind mlp or prefix-mlp (Hydra++)"
        )
    layers = sum(bool(re.fullmatch(r"hydra_mlp\.0\.\d+\.linear\.weight", name)) for name in tensors)
    vocab_size, hidden_size = tensors[f"{lm_head}.weight"].shape
    return tensors, Sizes(vocab_size, hidden_size, layers, prefixed)
