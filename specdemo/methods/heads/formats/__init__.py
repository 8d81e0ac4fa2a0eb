"""Checkpoint formats of heads: tensor names, shapes and configs."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor
from transformers import LlamaConfig

from specdemo.costs.shapes import Config
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


def contradiction(config: Config, **sizes: int) -> str:
    """Return a sentence about sizes of a file that its config states otherwise; empty without any. The file decides,
    because published configs are often copies."""
    stated = {key: number for key, number in config.items() if key in sizes and isinstance(number, int)}
    wrong = [key for key, number in stated.items() if number != sizes[key]]
    words = ", ".join(f"{key} {stated[key]} (the file has {sizes[key]})" for key in wrong)
    return f"Its config states {words}; the file decides." if wrong else ""


def d2t_to_ids(d2t: Tensor) -> Tensor:
    """Convert offsets [W] to target ids [W]."""
    return torch.arange(len(d2t), device=d2t.device) + d2t


def check_draft_vocab(name: str, config: Config, tensors: Mapping[str, Tensor], vocab_size: int) -> None:
    """Raise ValueError, one line, for a vocabulary other than the target's without the tensor that maps it."""
    if "d2t" not in tensors and config.get("draft_vocab_size", vocab_size) != vocab_size:
        raise ValueError(f"{name} has a draft vocabulary but no tensor d2t; fetch it again")


def check_mask_token(name: str, mask: int, vocab_size: int) -> None:
    """Raise ValueError, one line, for a mask token that has no embedding in the target."""
    if not 0 <= mask < vocab_size:
        raise ValueError(f"the mask token {mask} of {name} is not in a vocabulary of {vocab_size}")


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


PARTS = ("transformer_layer_config", "dflash_config", "eagle_config", "text_config")  # nested configs of heads
# understood by every reader of decoder layers, decided by the tensors, or without effect in the layers that they build
LAYER_KEYS = frozenset(
    """add_full_attention_sink_bias add_swa_attention_sink_bias attention_bias attention_head_dim attention_mode
    attention_sink_bias bias cla_share_factor draft_num_hidden_layers has_lm_head head_dim hidden_act hidden_size
    intermediate_size layer_types max_position_embeddings max_window_layers mlp_bias num_attention_heads
    num_hidden_layers num_key_value_heads original_max_position_embeddings qk_norm qkv_bias rms_norm_eps
    rope_parameters rope_scaling rope_theta sliding_window use_qk_norm use_sliding_window""".split()
)

# keys of transformers' classes, of how a file was made, and of its target, which are without effect in the layers
COMMON_KEYS = frozenset(
    [
        *MASK_KEYS,
        *LlamaConfig().to_dict(),
        *"auto_map base_model_name_or_path dropout draft_vocab_size num_anchors num_target_layers".split(),
        *"speculators_model_type speculators_version target_model_type torch_dtype".split(),
    ]
)
NAMED = 5  # unread keys in a sentence

# values that every reader implements; others are not supported
USUAL_VALUES = {
    "attention_value_scale": 1.0,
    "is_neox_style": True,
    "logit_scale": 1.0,
    "next_layer_regular": True,
    "norm_type": "rms",
    "parallel_draft_step": 1,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_rotary_pos_emb": True,
}


def check_values(checkpoint: Checkpoint) -> None:
    """Raise ValueError that names the first of `USUAL_VALUES` that is another."""
    for key, value in _entries(checkpoint.config):
        if key in USUAL_VALUES and value not in (None, USUAL_VALUES[key]):
            raise ValueError(
                f"{checkpoint.name} has {key} {value!r:.60}, which is not supported; choose a drafter without it"
            )


def unread_keys(checkpoint: Checkpoint, config_keys: Collection[str]) -> str:
    """Return a sentence about keys that no reader knows; empty without any. The target verifies every draft, so a key
    that changes the layers makes drafts worse. config_keys: keys that the method reads."""
    used = {key for key, value in _entries(checkpoint.config) if value and key.isidentifier()}
    keys = sorted(used - COMMON_KEYS - USUAL_VALUES.keys() - {*config_keys})
    names = ", ".join(key[:60] for key in keys[:NAMED]) + ", ..." * (len(keys) > NAMED)
    return f"Its config has keys that are not read: {names}. If one changes the layers, drafts are worse." * bool(keys)


def _entries(config: Config) -> Iterator[tuple[str, object]]:
    for key, value in config.items():
        if key in PARTS and isinstance(value, Mapping):
            yield from _entries(value)
        elif not isinstance(value, Mapping):
            yield key, value
