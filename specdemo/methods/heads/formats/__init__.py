"""Checkpoint formats of heads: tensor names, shapes and configs."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor

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
ARCHITECTURE = re.compile(
    "act$|activation|adapter|anchor|attention|attn|bias|block|capping|causal|clamp|conv|embed|experts|factor|fuse|fusion|"
    "gate|gated|head|hidden|jacobi|kernel|layer|logit|markov|mask|memory|mixer|mlp|moe|multiplier|norm|passes|position|"
    "proj|rank|refine|residual|rope|rotary|scale|scaling|selector|shift|sink|slot|softcap|swa|topk|top_k|window"
)
HARMLESS = re.compile(  # of training, of other models, and of how the authors' code runs
    "accept|anchors|backend|base_model|compile|confidence|consistency|cross_attention|dataset|decay|dpace|dropout|eval_|"
    "feed_forward|freeze|gamma|implementation|init|loss|max_valid|num_labels|num_target|output_attentions|"
    "output_hidden_states|requires_grad|schedule|speculative|target_model|teacher|tie_|train|valid_mask|verifier"
)
# understood by every reader of decoder layers, decided by the tensors, or without effect in the layers that they build
LAYER_KEYS = frozenset(
    """add_full_attention_sink_bias add_swa_attention_sink_bias attention_bias attention_head_dim attention_mode
    attention_sink_bias bias cla_share_factor draft_num_hidden_layers has_lm_head head_dim hidden_act hidden_size
    intermediate_size layer_types max_position_embeddings max_window_layers mlp_bias num_attention_heads
    num_hidden_layers num_key_value_heads original_max_position_embeddings qk_norm qkv_bias rms_norm_eps
    rope_parameters rope_scaling rope_theta sliding_window use_qk_norm use_sliding_window""".split()
)

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


def check_keys(checkpoint: Checkpoint, known: Collection[str]) -> None:
    """Raise ValueError that names the first unknown key which could change the forward pass. known: what is read."""
    for key, value in _entries(checkpoint.config):
        if key in USUAL_VALUES:
            if value is not None and value != USUAL_VALUES[key]:
                raise ValueError(
                    f"{checkpoint.name} has {key} {value!r:.60}, which is not supported; choose a drafter without it"
                )
        elif key not in known and ARCHITECTURE.search(key) and not HARMLESS.search(key) and not _is_off(key, value):
            raise ValueError(
                f"{checkpoint.name} has {key} {value!r:.60} in its config, which is not supported and could change the "
                "forward pass; choose another drafter, or remove the key if it has no effect"
            )


def _entries(config: Config) -> Iterator[tuple[str, object]]:
    for key, value in config.items():
        if key in PARTS and isinstance(value, Mapping):
            yield from _entries(value)
        elif not isinstance(value, Mapping):
            yield key, value


def _is_off(key: str, value: object) -> bool:
    """Return whether a value means that the feature is not used."""
    neutral = ("scale" in key or "scaling" in key or "factor" in key or "multiplier" in key) and value == 1
    return neutral or not value
