"""The public files of heads: names, shapes and configs of every dialect that is read or written."""

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from specdemo.models.checkpoints import Checkpoint

MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")  # as vLLM looks for it


def renamed(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """`names`: patterns, and what takes their place in the names of tensors, one after the other."""
    found = {}
    for name, tensor in tensors.items():
        for pattern, new in names.items():
            name = re.sub(pattern, new, name)
        found[name] = tensor
    return found


def numbered(names: Iterable[str], pattern: str | re.Pattern[str]) -> int:
    """How many numbers the group of `pattern` takes in the names, counted from 0."""
    found = (re.match(pattern, name) for name in names)
    return 1 + max((int(match[1]) for match in found if match), default=-1)


def absolute(d2t: Tensor) -> Tensor:
    """Offsets [W] -> ids of the target's vocabulary [W]"""
    return torch.arange(len(d2t), device=d2t.device) + d2t


def made_for(checkpoint: Checkpoint) -> str:
    """The target that its config names."""
    verifier = (checkpoint.config.get("speculators_config") or {}).get("verifier") or {}
    named = verifier.get("name_or_path") or checkpoint.config.get("base_model_name_or_path")
    return str(named) if named not in (None, "", "N/A") else "it was trained for"


def check_target(checkpoint: Checkpoint, **sizes: tuple[object, object]) -> None:
    """sizes: by what they are of, that of the target it was made for, and that of the one at hand.

    Raises ValueError where two differ, and names the target to choose.
    """
    if any(theirs != ours for theirs, ours in sizes.values()):
        asked = " and ".join(f"{what.replace('_', ' ')} {theirs}" for what, (theirs, _) in sizes.items())
        had = " and ".join(str(ours) for _, ours in sizes.values())
        raise ValueError(
            f"{checkpoint.name} is for {asked}, the target has {had}; choose the target {made_for(checkpoint)}"
        )
