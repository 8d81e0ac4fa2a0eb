"""DFlash checkpoints: configs of all formats, and tensors under common names.

h the drafter's hidden size (equal to the target's), V vocabulary, r rank. Formats read:

z-lab, SpecForge   `dflash_config` and Qwen3's keys; a key may be in either place. DFlash2 has additional tensors
                   `attention_conv`, `mlp_conv` and `candidate_selector`, Domino `prefix_gru` and `embed_proj`; early
                   files have the tensors of the final stage below `logit_head.`
DeepSpec           flat, class Qwen3DSparkModel, for both DSpark and plain DFlash (Markov rank 0)
speculators        Qwen3's keys in `transformer_layer_config`; a draft vocabulary has its own lm_head and offsets `d2t`
transformers       model type muse_glimmer_assistant, tensors `encoder.*`
JetSpec            z-lab's with `causal_head` in `dflash_config`
XPress             z-lab's with tensors `xpress_head.*` (vLLM), or speculators' with `refiner_head.*`

Two conventions differ without any trace in the tensors. Slots: in DFlash slot k of a block predicts its own token, so
slot 0, the anchor, predicts nothing; in DSpark every slot predicts the next token. Layers: `target_layer_ids` counts
layer outputs from 0, `aux_hidden_state_layer_ids` counts like taps. `save` writes z-lab's format. Copies of the
target's embedding and lm_head, and DSpark's confidence head, which changes no token, are ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import Qwen3Config

from specdemo.core.protocol import Target
from specdemo.core.safe_io import JsonObject
from specdemo.costs.shapes import Config
from specdemo.kv.masks import AttentionKind
from specdemo.methods.heads.formats import (
    LAYER_KEYS,
    MASK_KEYS,
    check_draft_vocab,
    check_mask_token,
    check_target,
    contradiction,
    count_numbered,
)
from specdemo.models.checkpoints import MASK_TOKEN, Checkpoint

Tensors = Mapping[str, Tensor]
BODY_KEYS = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_act "
    "rms_norm_eps attention_bias max_position_embeddings rope_parameters"
).split()
OLD_ROPE = ("rope_theta", "rope_scaling")  # rope_parameters before transformers 5
NAMES = {
    r"^model\.": "",
    r"^midlayer\.": "layers.0.",
    r"^encoder\.fc\.": "fc.",
    r"^encoder\.output_norm_enc\.": "hidden_norm.",
    r"^logit_head\.": "",
    r"^prefix_gru\.": "domino.prefix_gru.",
    r"^embed_proj\.": "domino.embed_proj.",
    r"^refiner_head\.token_embed\.": "xpress_head.w1.",
    r"^refiner_head\.readout\.": "xpress_head.w2.",
    r"^refiner_head\.mlp_(gate|up|down)\.": r"xpress_head.mlp.\1_proj.",
    r"^refiner_head\.mix_l$": "xpress_head.mix.L",
    r"^refiner_head\.": "xpress_head.",
}
XPRESS = "xpress_head.w1.weight"
CODEBOOK = "candidate_selector.predecessor_codebook"
# config key of the layer ids -> offset from id to tap
TAP_OFFSETS = {
    **dict.fromkeys(("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids", "layer_ids"), 0),
    **dict.fromkeys(("target_layer_ids", "dspark_target_layer_ids"), 1),
}
KNOWN_FAMILIES = ("dflash", "dspark", "domino", "museglimmer", "xpress")  # families with a documented slot convention
KEYS = LAYER_KEYS | frozenset(
    """aux_hidden_state_layer_ids block_size causal causal_head conv_group_size conv_kernel_size
    dspark_target_layer_ids emb_dim eagle_aux_hidden_state_layer_ids final_logit_softcapping
    gru_hidden_dim has_own_lm_head input_embedding_scale is_causal layer_ids markov_head_type markov_rank
    mask_token_id output_multiplier projector_type pure_draft_prefix_len sample_from_anchor selector_rank
    selector_top_k shift_label sliding_window_non_causal swa_window_size target_hidden_size target_layer_ids
    use_swa num_jacobi_passes xpress_block_size xpress_candidate_topc xpress_compile_head xpress_fused_kernel
    xpress_mlp_hidden xpress_mlp_ratio xpress_num_passes xpress_rank xpress_topc""".split()
)
UNUSED = ("embed_tokens.", "lm_head.", "t2d", "verifier_", "confidence_head.")


@dataclass(frozen=True, slots=True)
class Design:
    """Properties of a drafter that its tensors do not determine: layer config and conventions."""

    body: Qwen3Config
    taps: tuple[int, ...]
    block_size: int  # slots of a block, including the anchor
    mask_token_id: int
    vocab_size: int
    attention_kinds: tuple[AttentionKind, ...]  # one per layer
    from_anchor: bool = False  # every slot predicts the next token
    embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    softcap: float = 0.0  # of the logits; 0: none
    candidates: int = 16  # DFlash2
    uncorrected_slots: int = 0  # Domino: first slots without correction
    passes: int = 6  # XPress
    shortlist: int = 0  # XPress: most likely tokens of a slot that it corrects; 0: all

    def __str__(self) -> str:
        return f"{'every slot' if self.from_anchor else 'the slots after the anchor'} and layers {self.taps}"

    @property
    def first_slot(self) -> int:
        """The first slot that predicts a token."""
        return 0 if self.from_anchor else 1

    @property
    def num_drafts(self) -> int:
        """Tokens drafted per block."""
        return self.block_size - self.first_slot


def read_designs(checkpoint: Checkpoint, target: Target) -> tuple[Tensors, tuple[Design, ...]]:
    """Return the tensors, and the possible designs. Raises ValueError for another kind of checkpoint or another
    target.
    """
    name, tensors, config = checkpoint.name, checkpoint.tensors, _flatten_config(checkpoint.config)
    if config.get("has_own_lm_head") and "lm_head.weight" in tensors:  # over the target's vocabulary
        tensors = {"d2t": torch.zeros(len(tensors["lm_head.weight"]), dtype=torch.int64)} | tensors
    own_head = "d2t" in tensors
    tensors = {n: t for n, t in tensors.items() if not n.startswith(UNUSED) or (own_head and n == "lm_head.weight")}
    _check(checkpoint, config, tensors, target)
    layers, kinds = count_numbered(tensors, r"layers\.(\d+)\."), config.get("layer_types")
    if kinds and len(kinds) == layers:
        config = {**config, "num_hidden_layers": layers}
    elif kinds and len(kinds) != config["num_hidden_layers"]:
        raise ValueError(
            f"the config of {name} states {len(kinds)} layer_types and num_hidden_layers "
            f"{config['num_hidden_layers']}, its file has {layers} layers; fetch config and weights of one revision"
        )
    tensors.pop(MASK_TOKEN, None)
    names = config.get("speculators_model_type"), config.get("projector_type"), *(config.get("architectures") or ())
    family = " ".join(map(str, names)).lower()
    from_anchor = config.get("sample_from_anchor", config.get("shift_label", "dspark" in family))
    design = Design(
        body=_body(config),
        taps=_taps(name, config, tensors, target),
        block_size=int(config.get("block_size", 8 if "transformer_layer_config" in config else 16)),
        mask_token_id=int(config["mask_token_id"]),
        vocab_size=target.vocab_size,
        attention_kinds=_attention_kinds(config),
        from_anchor=bool(from_anchor),
        embedding_scale=float(config.get("input_embedding_scale", 1.0)),
        output_multiplier=float(config.get("output_multiplier", 1.0)),
        softcap=float(config.get("final_logit_softcapping", 0.0)),
        candidates=int(config.get("selector_top_k", 16)),
        uncorrected_slots=int(config.get("pure_draft_prefix_len", 0)),
        passes=int(config.get("xpress_num_passes", config.get("num_jacobi_passes", 6))),
        shortlist=int(config.get("xpress_topc", config.get("xpress_candidate_topc", 0))),
    )
    if {"sample_from_anchor", "shift_label"} & config.keys() or any(word in family for word in KNOWN_FAMILIES):
        return tensors, (design,)
    tap_options = [taps for shift in (0, 1) if min(taps := tuple(tap - shift for tap in design.taps)) >= 0]
    return tensors, tuple(replace(design, taps=t, from_anchor=a) for t in tap_options for a in (False, True))


def remarks(config: Config, design: Design) -> str:
    """Return a sentence about the number of layers if the config states another one than the file has."""
    return contradiction(_flatten_config(config), num_hidden_layers=design.body.num_hidden_layers)


def to_config(design: Design, tensors: Tensors, target_name: str, target_layers: int) -> JsonObject:
    """Return the config.json of a drafter in z-lab's format."""
    body, windows = design.body, [window for window, _ in design.attention_kinds]
    (span, groups), rank = convolution_sizes(tensors), tensors[CODEBOOK].shape[1] if CODEBOOK in tensors else 0
    usual = tuple((window, bool(window)) for window in windows)
    kind = "DFlash2DraftModel" if span or rank else "DFlashDraftModel"
    xpress = XPRESS in tensors
    optional = {  # key -> (value, default)
        "causal": (design.attention_kinds[0][1] if design.attention_kinds != usual else None, None),
        "sample_from_anchor": (design.from_anchor, False),
        "input_embedding_scale": (design.embedding_scale, 1.0),
        "output_multiplier": (design.output_multiplier, 1.0),
        "final_logit_softcapping": (design.softcap, 0.0),
        "conv_kernel_size": (span, 0),
        "conv_group_size": (body.hidden_size // groups if groups else 0, 0),
        "selector_rank": (rank, 0),
        "selector_top_k": (design.candidates if rank else 0, 0),
        "pure_draft_prefix_len": (design.uncorrected_slots, 0),
        "xpress_block_size": (design.block_size if xpress else 0, 0),
        "xpress_num_passes": (design.passes if xpress else None, None),
        "xpress_topc": (design.shortlist, 0),
    }
    return {
        "architectures": ["Qwen3XPressModel" if xpress else kind],
        "model_type": "qwen3",
        "base_model_name_or_path": target_name,
        **{key: value for key, value in body.to_dict().items() if key in BODY_KEYS},
        "rope_theta": dict(body.rope_parameters or {})["rope_theta"],
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
        "sliding_window": max(windows) or None,
        "use_sliding_window": any(windows),
        "vocab_size": design.vocab_size,
        "tie_word_embeddings": False,
        "num_target_layers": target_layers,
        "block_size": design.block_size,
        "dflash_config": {
            "mask_token_id": design.mask_token_id,
            "target_layer_ids": [tap - 1 for tap in design.taps],
            **{key: value for key, (value, usually) in optional.items() if value != usually},
        },
    }


def convolution_sizes(tensors: Tensors) -> tuple[int, int]:
    """Return DFlash2's convolution span in slots and its channel groups; 0, 0 without convolutions."""
    base = tensors.get("layers.0.attention_conv.base_kernel")
    if base is None:
        return 0, 0
    span = base.shape[1]
    return span, tensors["layers.0.attention_conv.kernel_projection.weight"].shape[0] // (2 * span)


def spread_taps(layers: int, points: int) -> tuple[int, ...]:
    """Return z-lab's default taps: outputs of layers 1 to layers - 3 (from 0), evenly spaced, without duplicates."""
    ids = [layers // 2] if points == 1 else [round(1 + i * (layers - 4) / (points - 1)) for i in range(points)]
    return tuple(sorted({min(max(i + 1, 0), layers - 1) for i in ids}))


def _flatten_config(config: Config) -> Config:
    """Merge the levels of a config; inner keys take precedence."""
    parts = config.get("transformer_layer_config"), config, config.get("dflash_config")
    flat = {key: value for part in parts for key, value in (part or {}).items() if value is not None}
    mask = next((flat[key] for key in MASK_KEYS if key in flat), None)
    return flat if mask is None else flat | {"mask_token_id": mask}


def _check(checkpoint: Checkpoint, config: Config, tensors: Tensors, target: Target) -> None:
    """Raise ValueError if the checkpoint is unsupported, incomplete or made for another target."""
    name, vocab_size = checkpoint.name, target.vocab_size
    if config.get("target_hidden_size", config.get("hidden_size")) != config.get("hidden_size"):
        raise ValueError(
            f"{name} has a hidden_dim_adapter (target_hidden_size {config['target_hidden_size']}), but it uses the "
            "target's embedding, whose size must be its own; choose a drafter without it"
        )
    if any("lilicorr" in part.lower() for part in (*tensors, *map(str, config.get("architectures") or ()))):
        raise ValueError(f"{name} is a LiLiCorr drafter, which is not supported; choose a DFlash drafter")
    if "mask_hidden" in tensors:
        raise ValueError(f"{name} has a tensor mask_hidden, which is not supported; choose a DFlash drafter")
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "mask_token_id"):
        if key not in config:
            raise ValueError(f"the config of {name} lacks {key!r}; fetch the config.json of its authors")
    check_draft_vocab(name, config, tensors, vocab_size)
    mask, token = int(config["mask_token_id"]), tensors.get(MASK_TOKEN)
    if token is not None and int(token) != mask:
        raise ValueError(
            f"the mask embedding of {name} is for token {int(token)}, its config has {mask}; fetch both of one revision"
        )
    check_target(checkpoint, hidden_size=(config["hidden_size"], target.hidden_size))
    check_target(checkpoint, vocabulary=(config.get("vocab_size", vocab_size), vocab_size))
    check_target(checkpoint, layers=(config.get("num_target_layers", target.num_layers), target.num_layers))
    if "mask_embedding" not in tensors:
        check_mask_token(name, mask, vocab_size)


def _taps(name: str, config: Config, tensors: Tensors, target: Target) -> tuple[int, ...]:
    if "fc.weight" not in tensors:
        raise ValueError(f"{name} has no tensor fc.weight, so it is not a DFlash drafter; choose another method")
    count = tensors["fc.weight"].shape[1] // target.hidden_size
    key = next((key for key in TAP_OFFSETS if key in config), None)
    taps = tuple(int(i) + TAP_OFFSETS[key] for i in config[key]) if key else spread_taps(target.num_layers, count)
    if len(taps) * target.hidden_size != tensors["fc.weight"].shape[1]:
        raise ValueError(
            f"{name} names {len(taps)} layers of its target, but its fc.weight reads {count}; fix its config"
        )
    if not all(0 <= tap < target.num_layers for tap in taps):
        raise ValueError(
            f"{name} reads layers {taps} of its target; they must be between 0 and {target.num_layers - 1}, because "
            "engines disagree on the output of the last layer"
        )
    return taps


def _body(config: Config) -> Qwen3Config:
    sizes = {key: config[key] for key in (*BODY_KEYS, *OLD_ROPE) if key in config}
    sizes.setdefault("head_dim", sizes["hidden_size"] // sizes["num_attention_heads"])
    sizes.setdefault("num_key_value_heads", sizes["num_attention_heads"])
    return Qwen3Config(**sizes)


def _attention_kinds(config: Config) -> tuple[AttentionKind, ...]:
    """Return window and causality per layer. Sliding-window layers are causal unless the config or transformers' class
    sets otherwise. `use_swa` without sliding layers gives all layers a window.
    """
    layers, window = (
        int(config["num_hidden_layers"]),
        int(config.get("swa_window_size", config.get("sliding_window", 0))),
    )
    causal = next((config[key] for key in ("is_causal", "causal", "causal_head") if key in config), None)
    if config.get("sliding_window_non_causal"):
        causal = False
    if config.get("model_type") == "muse_glimmer_assistant":
        causal, window = False, window + 1  # its window is a distance
    sliding = ["sliding" in kind for kind in config.get("layer_types") or ["full_attention"] * layers]
    causal_layers = [slides if causal is None else bool(causal) for slides in sliding]
    windowed = [True] * layers if config.get("use_swa") and not any(sliding) else sliding
    return tuple(
        (window if slides else 0, is_causal) for slides, is_causal in zip(windowed, causal_layers, strict=True)
    )
