"""EAGLE checkpoints. Four formats are read: the authors', SpecForge's (also AngelSlim's), DeepSpec's (whose
`target_layer_ids` count layers from 0) and that of vllm-project's speculators. `to_checkpoint` writes the authors'.
P-EAGLE is an EAGLE-3 with a tensor `mask_hidden`, as in vLLM (llama_eagle3.py).

H hidden size of the target, D of the head, V vocabulary, W draft vocabulary.

The formats have almost the same tensor names, and no shape determines which layers feed the head, what the first
residual is, and which half of fc reads which input. A wrong choice raises no error, but its drafts are rejected more
often. An ambiguous file therefore gets several conventions, the documented one first.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor
from transformers import LlamaConfig

from specdemo.core.protocol import Target
from specdemo.costs.shapes import Config
from specdemo.methods.heads.formats import (
    LAYER_KEYS,
    MASK_KEYS,
    base_model,
    check_draft_vocab,
    check_mask_token,
    check_target,
    contradiction,
    count_numbered,
    d2t_to_ids,
    rename_tensors,
)
from specdemo.models.checkpoints import Checkpoint

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
FIRST_LAYER = "layers.0."
MASK_HIDDEN = "mask_hidden"  # P-EAGLE: replaces the target's hidden states in draft columns
SKIPPED = re.compile(r"t2d$|verifier_|.*inv_freq$")
KEYS = LAYER_KEYS | frozenset(
    "eagle_aux_hidden_state_layer_ids fc_norm mask_token_id norm_before_fc norm_before_residual norm_output "
    "target_hidden_size target_layer_ids use_aux_hidden_state".split()
)
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads", "head_dim")
COPIED_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings", "rms_norm_eps")
WRITTEN_KEYS = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "rms_norm_eps max_position_embeddings"
).split()


@dataclass(frozen=True, slots=True)
class EagleConvention:
    """Convention of a checkpoint. Taps are in the order in which fc reads them."""

    taps: tuple[int, ...]
    norm_before_residual: bool = False  # the first residual is the feature after hidden_norm
    norm_output: bool = False  # EAGLE-3.1: the state is fed back after the final norm
    feature_first: bool = False  # EAGLE-1: fc reads [feature; embedding]
    windows: tuple[int, ...] = ()  # attention window per layer, 0: none; empty: no windows
    mask: int | None = None  # P-EAGLE: id of the mask token

    @property
    def eagle1(self) -> bool:
        """True for EAGLE-1 and EAGLE-2, which read only the last hidden state."""
        return self.taps == (-1,)

    def __str__(self) -> str:
        if self.eagle1:
            return f"fc over {'feature and embedding' if self.feature_first else 'embedding and feature'}"
        residual = "normed" if self.norm_before_residual else "plain"
        back = ", states fed back normed" if self.norm_output else ""
        return f"layers {', '.join(map(str, self.taps))} and the {residual} residual{back}"


def default_taps(layers: int) -> tuple[int, int, int]:
    """Return the authors' taps 2, n // 2 and n - 3; for a shallow target some are equal."""
    middle = max(1, layers // 2)
    return min(2, middle), middle, max(layers - 3, middle)


def read_conventions(
    checkpoint: Checkpoint, target: Target
) -> tuple[dict[str, Tensor], LlamaConfig, tuple[EagleConvention, ...]]:
    """Return tensors, layer config and possible conventions. Raises ValueError if the checkpoint is unsupported or made
    for another target.
    """
    stored = {n: t for n, t in checkpoint.tensors.items() if not SKIPPED.match(n)}
    tensors = rename_tensors(stored, {r"^midlayer\.": FIRST_LAYER})
    if "fusion_fc.weight" in tensors:
        raise ValueError(f"{checkpoint.name} is EAGLE-1 in speculators' format, not supported; choose its EAGLE-3")
    for name in (
        "fc",
        FIRST_LAYER + "self_attn.q_proj",
        FIRST_LAYER + "self_attn.k_proj",
        FIRST_LAYER + "mlp.gate_proj",
    ):
        if f"{name}.weight" not in tensors:
            raise ValueError(f"{checkpoint.name} lacks {name}.weight; choose an EAGLE head in a format of its authors")
    if FIRST_LAYER + "hidden_norm.weight" in tensors:
        conventions = _eagle3(checkpoint.config, target)
        if "lm_head.weight" not in tensors:
            check_draft_vocab(checkpoint.name, checkpoint.config, tensors, target.vocab_size)
            if "d2t" in tensors:  # rows of the target's lm_head, see `without_lm_head`
                tensors["lm_head.weight"] = target.lm_head.get_parameter("weight")[d2t_to_ids(tensors["d2t"])]
    else:  # EAGLE-1: its embedding and lm_head are copies of the target's
        tensors = {n: t for n, t in tensors.items() if not n.startswith(("embed_tokens.", "lm_head."))}
        conventions = EagleConvention((-1,)), EagleConvention((-1,), feature_first=True)
    _check_fit(checkpoint, tensors, conventions[0], target)
    if MASK_HIDDEN in tensors or checkpoint.config_has("speculators_model_type", "peagle"):
        mask = _mask(checkpoint, tensors, target.vocab_size)
        conventions = tuple(replace(convention, mask=mask) for convention in conventions)
    return tensors, _layer_config(checkpoint, tensors, target.vocab_size), conventions


def _mask(checkpoint: Checkpoint, tensors: dict[str, Tensor], vocab_size: int) -> int:
    """Return the mask token of a P-EAGLE. Flatten its mask state, since formats differ in leading dimensions of 1."""
    config = dict(checkpoint.config) | dict(checkpoint.config.get("dflash_config") or {})
    mask = next((int(config[key]) for key in MASK_KEYS if config.get(key) is not None), None)
    if MASK_HIDDEN not in tensors or mask is None:
        missing = "mask_token_id in its config" if mask is None else MASK_HIDDEN
        raise ValueError(f"{checkpoint.name} is P-EAGLE, but lacks {missing}; fetch config.json and weights again")
    check_mask_token(checkpoint.name, mask, vocab_size)
    tensors[MASK_HIDDEN] = tensors[MASK_HIDDEN].reshape(-1)
    return mask


def _eagle3(config: Config, target: Target) -> tuple[EagleConvention, ...]:
    """Return the possible conventions of an EAGLE-3.

    Layer ids at the top level count like transformers' hidden_states, those in `eagle_config` count layers from 0. Some
    converters copied them unchanged, so both countings are possible. SpecForge never stores `norm_before_residual`, and
    its early versions trained on unnormed states despite `norm_output`.
    """
    top_ids, inner_ids = config.get(LAYER_IDS), (config.get("eagle_config") or {}).get(LAYER_IDS)
    tap_options: list[Sequence[int]] = [default_taps(target.num_layers)]
    if top_ids:
        tap_options = (
            [top_ids] if inner_ids and _plus_one(inner_ids) == list(top_ids) else [top_ids, _plus_one(top_ids)]
        )
    elif inner_ids:
        tap_options = [_plus_one(inner_ids), inner_ids]
    elif "target_layer_ids" in config:
        tap_options = [_plus_one(config["target_layer_ids"])]
    residual = config.get("norm_before_residual")
    residuals = [bool(residual)]
    norm_outputs = [bool(config.get("norm_output"))]
    if residual is None and "speculators_model_type" in config:
        residuals = [False, True]
    elif residual is None and norm_outputs[0]:
        norm_outputs = [True, False]
    valid_taps = [taps for taps in tap_options if max(taps) <= target.num_layers] or tap_options
    windows = _windows(config)
    combinations = product(valid_taps, residuals, norm_outputs)
    return tuple(EagleConvention(tuple(taps), before, back, windows=windows) for taps, before, back in combinations)


def _windows(config: Config) -> tuple[int, ...]:
    layer = config.get("transformer_layer_config") or config
    window = int(layer.get("sliding_window") or 0)
    return tuple(window if kind == "sliding_attention" else 0 for kind in layer.get("layer_types") or ())


def _plus_one(ids: Sequence[int]) -> list[int]:
    return [i + 1 for i in ids]


def _check_fit(
    checkpoint: Checkpoint, tensors: Mapping[str, Tensor], convention: EagleConvention, target: Target
) -> None:
    """Raise ValueError unless the head reads this target's hidden states, embeddings and vocabulary."""
    taps, (size, read) = convention.taps, tensors["fc.weight"].shape
    features = read - size if convention.eagle1 else read / len(taps)
    t2d, d2t = checkpoint.tensors.get("t2d"), checkpoint.tensors.get("d2t")
    vocabulary = _layer(checkpoint).get("vocab_size", target.vocab_size) if t2d is None else len(t2d)
    if d2t is not None:
        vocabulary = max(vocabulary, 1 + int(d2t_to_ids(d2t).max()))
    check_target(checkpoint, hidden_size=(f"{features:g}", f"{target.hidden_size}"))
    check_target(checkpoint, vocabulary=(vocabulary, target.vocab_size))
    if "embed_tokens.weight" not in tensors:
        check_target(checkpoint, embedding_size=(size, target.hidden_size))
    if max(taps) > target.num_layers:
        raise ValueError(
            f"{checkpoint.name} reads layer {max(taps)}, the target has {target.num_layers}; choose the target "
            f"{base_model(checkpoint)}"
        )


def _layer(checkpoint: Checkpoint) -> Config:
    """Return the config of the decoder layers, which speculators nests."""
    layer: Mapping[str, object] = checkpoint.config.get("transformer_layer_config") or checkpoint.config
    return layer


def _layer_config(checkpoint: Checkpoint, tensors: Mapping[str, Tensor], vocab_size: int) -> LlamaConfig:
    """Return the layer config, with sizes from the tensors, because published configs omit some, and the head's own
    RoPE.
    """
    config = _layer(checkpoint)
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(
            f"{checkpoint.name} has activation {config['hidden_act']}; choose a head of Llama layers (silu)"
        )
    if "num_attention_heads" not in config:
        raise ValueError(f"{checkpoint.name} lacks num_attention_heads; add it to its config.json")
    heads = int(config["num_attention_heads"])
    head_dim = len(tensors[FIRST_LAYER + "self_attn.q_proj.weight"]) // heads
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=len(tensors["fc.weight"]),
        intermediate_size=len(tensors[FIRST_LAYER + "mlp.gate_proj.weight"]),
        num_hidden_layers=count_numbered(tensors, r"layers\.(\d+)\."),
        num_attention_heads=heads,
        num_key_value_heads=len(tensors[FIRST_LAYER + "self_attn.k_proj.weight"]) // head_dim,
        head_dim=head_dim,
        **{key: config[key] for key in COPIED_KEYS if config.get(key) is not None},
    )


def remarks(
    checkpoint: Checkpoint, tensors: Mapping[str, Tensor], config: LlamaConfig, convention: EagleConvention
) -> str:
    """Return what the user should know of a file: sizes that its config states otherwise, and a missing lm_head."""
    sizes = {key: getattr(config, key) for key in SIZES}
    if "d2t" in tensors:
        sizes["draft_vocab_size"] = len(tensors["d2t"])
    own_head = convention.eagle1 or "lm_head.weight" in tensors
    lacking = "" if own_head else "It has no lm_head.weight, so it uses the target's."
    return " ".join(filter(None, (contradiction({**checkpoint.config, **_layer(checkpoint)}, **sizes), lacking)))


def to_checkpoint(
    tensors: dict[str, Tensor], config: LlamaConfig, convention: EagleConvention, target_name: str
) -> tuple[dict[str, object], dict[str, Tensor]]:
    """Return config.json and tensors. Layer ids are written twice, for vLLM (top level) and for SpecForge."""
    rope = dict(config.rope_parameters or {})
    saved_config = {
        "model_type": "llama",
        "hidden_act": "silu",
        **{name: value for name, value in config.to_dict().items() if name in WRITTEN_KEYS},
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope,
        "tie_word_embeddings": False,
        "torch_dtype": str(tensors["fc.weight"].dtype).removeprefix("torch."),
        "base_model_name_or_path": target_name,
    }
    if convention.eagle1:
        if convention.feature_first:
            tensors["fc.weight"] = tensors["fc.weight"].roll(config.hidden_size, 1)
        return saved_config | {"architectures": ["LlamaForCausalLM"], "bias": "fc.bias" in tensors}, tensors
    d2t = tensors.get("d2t")
    if d2t is not None:
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
        tensors["t2d"][d2t_to_ids(d2t).cpu()] = True
    saved_config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.vocab_size if d2t is None else len(d2t),
        LAYER_IDS: convention.taps,
        "eagle_config": {LAYER_IDS: [tap - 1 for tap in convention.taps], "use_aux_hidden_state": True},
        "norm_before_residual": convention.norm_before_residual,
        "norm_output": convention.norm_output,
    }
    if convention.mask is not None:
        saved_config["mask_token_id"] = convention.mask
    if any(convention.windows):
        kinds = ["sliding_attention" if window else "full_attention" for window in convention.windows]
        saved_config |= {"layer_types": kinds, "sliding_window": max(convention.windows)}
    return saved_config, rename_tensors(tensors, {f"^{FIRST_LAYER}": "midlayer."})
