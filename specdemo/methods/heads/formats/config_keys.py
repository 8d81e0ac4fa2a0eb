"""Keys of config.json that could change a forward pass and that no reader understands.

A reader that ignores such a key drafts wrong tokens without an error, so the file is rejected by the name of the key.
Keys of training, and keys with a value that switches them off, are harmless.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from specdemo.core.shapes import Config
from specdemo.models.checkpoints import Checkpoint

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


def _entries(config: Config) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if key in PARTS and isinstance(value, Mapping):
            yield from _entries(value)
        elif not isinstance(value, Mapping):
            yield key, value


def _is_off(key: str, value: object) -> bool:
    """Return whether a value means that the feature is not used."""
    neutral = ("scale" in key or "scaling" in key or "factor" in key or "multiplier" in key) and value == 1
    return neutral or not value
