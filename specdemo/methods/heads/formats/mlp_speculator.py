"""Files of MLPSpeculators: `ibm-ai-platform/*-accelerator`, tensors `speculator.{emb,proj,head,ln}.{i}.*`. Of tied
tensors a file may hold one copy or all; one is written, as transformers does.
"""

import re

from torch import Tensor, nn

from specdemo.core.protocol import Target
from specdemo.models.checkpoints import Checkpoint

PADDED_TO = 512  # rows are added to a vocabulary until it is a multiple of this at most


def recognises(checkpoint: Checkpoint) -> bool:
    """Whether the files are of an MLPSpeculator."""
    return checkpoint.says("model_type", "mlp_speculator")


def check_fit(checkpoint: Checkpoint, target: Target) -> None:
    """Raise ValueError unless it reads the target's states and vocabulary; both vocabularies may be padded."""
    config = checkpoint.config
    missing = [key for key in ("emb_dim", "n_predict", "vocab_size") if not config.get(key)]
    if missing:
        raise ValueError(f"{checkpoint.name}: config.json does not say {missing[0]}; fetch the whole speculator again")
    smaller, larger = sorted((config["vocab_size"], target.vocab_size))
    if config["emb_dim"] != target.hidden_size or larger > -(-smaller // PADDED_TO) * PADDED_TO:
        base = config.get("base_model_name_or_path") or "it was trained for"
        raise ValueError(
            f"{checkpoint.name} is for hidden size {config['emb_dim']} and vocabulary {config['vocab_size']}, "
            f"the target has {target.hidden_size} and {target.vocab_size}; choose the target {base}"
        )


def named(checkpoint: Checkpoint, speculator: nn.Module, vocab_size: int) -> dict[str, Tensor]:
    """The tensors, tied ones by each of their names in `speculator`, without padding rows that the target lacks."""
    stored = {
        name: tensor[:vocab_size] if re.match(r"(emb|head)\.", name) else tensor
        for name, tensor in (checkpoint.take("speculator.") or checkpoint.tensors).items()
    }
    wanted = speculator.state_dict(keep_vars=True)
    first = {id(p): stored[name] for name, p in reversed(wanted.items()) if name in stored}
    return stored | {name: first[id(p)] for name, p in wanted.items() if id(p) in first}
