"""Safe reading of config.json: sizes that no model has are rejected. Needs no torch."""

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from specdemo.core.safe_io import read_json

MAX_SIZE = 1 << 24
MAX_TREE = 1 << 12
WIDTHS = "top_k_tokens_per_head"
MAX_VALUES = {  # limits, several times the values of public models
    **dict.fromkeys("num_hidden_layers n_layer n_layers num_layers n_predict n_future_tokens".split(), 512),
    **dict.fromkeys("num_nextn_predict_layers num_heads num_medusa_layers num_layers".split(), 512),
    **dict.fromkeys("medusa_num_heads medusa_num_layers block_size".split(), 512),
    **dict.fromkeys("num_attention_heads num_key_value_heads n_head n_heads n_kv_heads".split(), 4096),
    **dict.fromkeys("num_experts num_local_experts n_routed_experts num_experts_per_tok".split(), 4096),
    **dict.fromkeys("dim n_embd n_inner d_model n_positions n_ctx sliding_window selector_top_k".split(), MAX_SIZE),
    "max_position_embeddings": MAX_SIZE,
    "mscale_all_dim": 0,  # YaRN: not a size, any number is valid
    WIDTHS: MAX_TREE,
}
SIZES = ("_size", "_dim")
NESTED = ("text_config", "transformer_layer_config", "eagle_config", "dflash_config", "speculators_config")


def read_config(folder: Path, *names: str) -> dict[str, Any]:
    """Read config.json, or the first existing file of `names`; empty if there is none.

    Raises ValueError if it is not a JSON object or contains a size that no model has.
    """
    config_file = next((path for path in map(folder.joinpath, names or ("config.json",)) if path.is_file()), None)
    config = read_json(config_file) if config_file else {}
    problem = next(_oversized(config), None)
    if problem:
        raise ValueError(f"{config_file}: {problem}; fetch it again or choose another model")
    return config


def _oversized(config: Mapping[str, object]) -> Iterator[str]:
    """Yield entries that would need an impossible amount of time or memory."""
    for key, value in config.items():
        limit = MAX_VALUES.get(key, MAX_SIZE if key.endswith(SIZES) else 0)
        for number in value if isinstance(value, list) else [value]:
            if (limit and isinstance(number, float | str)) or (isinstance(number, int) and number > limit > 0):
                yield f"{key} must be a whole number up to {limit:,}, not {number!r:.40}"
        if key in NESTED and not isinstance(value, dict | None):
            yield f"{key} must be an object"
        if key == WIDTHS and isinstance(value, list) and prod(value) > MAX_TREE:
            yield f"{key} is a tree of more than {MAX_TREE:,} paths"
        yield from _oversized(value) if isinstance(value, dict) else ()
