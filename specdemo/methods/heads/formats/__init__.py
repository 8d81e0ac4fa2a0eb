"""Checkpoint formats of heads: tensor names, shapes and configs."""

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from specdemo.models.checkpoints import Checkpoint

MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")  # as vLLM looks for it


def rename_tensors(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Rename tensors. names: regular expressions and their replacements, applied in order."""
    result = {}
    for name, tensor in tensors.items():
        for pattern, new in names.items():
            name = re.sub(pattern, new, name)
        result[name] = tensor
    return result


def count_numbered(names: Iterable[str], pattern: str | re.Pattern[str]) -> int:
    """Return 1 + the largest number that the group of `pattern` matches in the names."""
    matches = (re.match(pattern, name) for name in names)
    return 1 + max((int(match[1]) for match in matches if match), default=-1)


def d2t_to_ids(d2t: Tensor) -> Tensor:
    """Convert offsets [W] to target ids [W]."""
    return torch.arange(len(d2t), device=d2t.device) + d2t


def base_model(checkpoint: Checkpoint) -> str:
    """Return the target named in the config."""
    verifier = (checkpoint.config.get("speculators_config") or {}).get("verifier") or {}
    named = verifier.get("name_or_path") or checkpoint.config.get("base_model_name_or_path")
    return str(named) if named not in (None, "", "N/A") else "it was trained for"


def check_target(checkpoint: Checkpoint, **sizes: tuple[object, object]) -> None:
    """Check sizes, each a pair (in the checkpoint, in the target).

    Raises ValueError if any differ; the message names the target to choose.
    """
    if any(in_file != in_target for in_file, in_target in sizes.values()):
        expected = " and ".join(f"{what.replace('_', ' ')} {in_file}" for what, (in_file, _) in sizes.items())
        actual = " and ".join(str(in_target) for _, in_target in sizes.values())
        raise ValueError(
            f"{checkpoint.name} is for {expected}, the target has {actual}; choose the target {base_model(checkpoint)}"
        )
