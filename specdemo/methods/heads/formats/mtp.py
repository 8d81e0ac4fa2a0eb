"""Checkpoints of multi-token prediction.

L layers of the target, D modules, E experts. Sequential modules are read in four formats, often from the target's own
files: `model.layers.{L + i}.*` with `eh_proj` (DeepSeek, GLM; also written by `save`), `mtp.*` (Qwen),
`model.mtp_layers.{i}.*` (MiMo; eh_proj reads the hidden state first) and `mtp_layers.{i}.*` (speculators; the embedding
first). Parallel heads are `extra_heads.{i}.*` under Meta's Llama names, with `n_future_tokens` in params.json; the
target is the trunk `layers` of the file, n_layers - n_future_tokens + 1 layers.

No file specifies whether states are normed before they are read and passed on; under MiMo's names, without a model
family in the config, the order of eh_proj's inputs is open too. Such files get several conventions, the most likely
first.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig

from specdemo.core.protocol import Target
from specdemo.core.safe_io import JsonObject
from specdemo.methods.heads.formats import check_target, count_numbered
from specdemo.models.checkpoints import Checkpoint, check_weights

Tensors = dict[str, Tensor]

NUMBERED = re.compile(r"(?:model\.)?(?:language_model\.)?layers\.(\d+)\.(.+)")
MIMO = re.compile(r"(?:model\.)?mtp_layers\.(\d+)\.(.+)")
QWEN = re.compile(r"(?:model\.)?mtp\.(?:layers\.(\d+)\.)?(.+)")
PARALLEL = re.compile(r"extra_heads\.(\d+)\.(.+)")
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
COUNT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")  # of modules
COPIES = ("embed_tokens.", "shared_head.head.", "rotary_emb.", "self_attn.rotary_emb.")

# part of a module -> its names in files, of which `save` writes the first; all else belongs to the decoder layer
PARTS = {
    "enorm": ("enorm", "token_layernorm", "pre_fc_norm_embedding"),
    "hnorm": ("hnorm", "hidden_layernorm", "pre_fc_norm_hidden"),
    "eh_proj": ("eh_proj", "input_proj", "fc"),
    "norm": ("shared_head.norm", "final_layernorm", "norm"),
}
META = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
ROTATED = {"self_attn.q_proj", "self_attn.k_proj"}
UNNORMED_OUTPUT_FAMILIES = ("glm", "step", "ernie", "pangu")  # substrings of model_type
NORMED_INPUT_KEY, NORMED_OUTPUT_KEY = "mtp_reads_normed", "mtp_hands_on_normed"  # config keys written by this project


@dataclass(frozen=True, slots=True)
class MTPConvention:
    """Convention of a checkpoint."""

    normed_input: bool = True  # the target's state is read after the target's final norm
    normed_output: bool = True  # a module passes its state on after its own norm
    hidden_first: bool = False  # eh_proj reads [hidden; embedding], not [embedding; hidden]

    def __str__(self) -> str:
        words = {True: "normed", False: "plain"}
        order = ", hidden state before embedding" if self.hidden_first else ""
        return f"{words[self.normed_input]} input states, {words[self.normed_output]} output states{order}"


def select_heads(checkpoint: Checkpoint, target: Target) -> Checkpoint:
    """Drop the tensors that do not belong to heads. Raises ValueError if none remain."""
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if is_head_tensor(name, target)}
    if not tensors:
        raise ValueError(
            f"{checkpoint.name} has no multi-token prediction for {target.num_layers} layers; copies of a model often "
            "omit it, so choose the original upload of the target"
        )
    selected = replace(checkpoint, tensors=tensors)
    check_weights(selected)
    return selected


def is_head_tensor(name: str, target: Target) -> bool:
    """Return whether a tensor of the target's files or of others belongs to heads."""
    numbered = NUMBERED.fullmatch(name)
    if numbered:
        return int(numbered[1]) >= target.num_layers
    return any(pattern.fullmatch(name) for pattern in (MIMO, QWEN, PARALLEL))


def read_sequential(checkpoint: Checkpoint, target: Target) -> tuple[Tensors, int, tuple[MTPConvention, ...]]:
    """Return the tensors of sequential modules, the number of modules and the possible conventions.

    Raises ValueError if hidden size or vocabulary differ from the target's.
    """
    check_target(checkpoint, vocabulary=(checkpoint.config.get("vocab_size", target.vocab_size), target.vocab_size))
    tensors = _stack_experts(dict(_rename(checkpoint.tensors, target.num_layers)))
    joined = tensors.get("layers.0.eh_proj.weight")
    if joined is not None and joined.shape != (target.hidden_size, 2 * target.hidden_size):
        check_target(checkpoint, hidden_size=(joined.shape[0], target.hidden_size))
    return tensors, count_numbered(tensors, r"layers\.(\d+)\."), _conventions(checkpoint)


def _conventions(checkpoint: Checkpoint) -> tuple[MTPConvention, ...]:
    """Return the possible conventions, following vLLM. Only speculators' files and our own are unambiguous."""
    config = checkpoint.config
    if NORMED_INPUT_KEY in config:
        return (MTPConvention(config[NORMED_INPUT_KEY], config[NORMED_OUTPUT_KEY]),)
    if "speculators_model_type" in config:
        return (MTPConvention(),)
    family = str(config.get("model_type"))
    normed_output = not any(name in family for name in UNNORMED_OUTPUT_FAMILIES)
    orders = [False]
    if any(MIMO.fullmatch(name) for name in checkpoint.tensors):
        orders = [True] if "mimo" in family else [True, False]
    return tuple(
        MTPConvention(*combination)
        for combination in product((True, False), (normed_output, not normed_output), orders)
    )


def _rename(tensors: Mapping[str, Tensor], layers: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors under common names. Tensors that Qwen shares between modules are repeated."""
    count = 1 + max((int(m[1]) for m in map(QWEN.fullmatch, tensors) if m and m[1]), default=0)
    for name, tensor in tensors.items():
        qwen, numbered = QWEN.fullmatch(name), NUMBERED.fullmatch(name)
        if qwen and qwen[1] is None:
            for i in range(count):
                yield f"layers.{i}.{_part_name(qwen[2])}", tensor
        else:
            match = qwen or numbered or MIMO.fullmatch(name)
            assert match
            if not match[2].startswith(COPIES):
                index = int(match[1]) - (layers if numbered else 0)
                yield f"layers.{index}.{_part_name(match[2])}", tensor


def _part_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    part = next((part for part, names in PARTS.items() if stem in names), None)
    return f"{part}.{kind}" if part else f"block.{name}"


def _stack_experts(tensors: Tensors) -> Tensors:
    """Stack separate experts as transformers does: gate_up_proj [E, 2 I, H] and down_proj [E, H, I]."""
    experts: dict[str, dict[str, dict[int, Tensor]]] = {}
    for name in list(tensors):
        match = EXPERT.fullmatch(name)
        if match:
            kinds = experts.setdefault(match[1], {"gate": {}, "up": {}, "down": {}})
            kinds[match[3]][int(match[2])] = tensors.pop(name)
    for name, kinds in experts.items():
        gate, up, down = (torch.stack([kinds[kind][i] for i in sorted(kinds[kind])]) for kind in ("gate", "up", "down"))
        tensors |= {f"{name}.gate_up_proj": torch.cat([gate, up], 1), f"{name}.down_proj": down}
    return tensors


def count_parallel_heads(checkpoint: Checkpoint, target: Target) -> int:
    """Return the number of parallel heads. Raises ValueError if they are for another target."""
    params, heads = checkpoint.config, count_numbered(checkpoint.tensors, PARALLEL)
    check_target(checkpoint, layers=(params.get("n_layers", heads) - heads, target.num_layers))
    check_target(checkpoint, hidden_size=(params.get("dim", target.hidden_size), target.hidden_size))
    if params.get("vocab_size", -1) != -1:  # -1: Meta takes it from the tokenizer
        check_target(checkpoint, vocabulary=(params["vocab_size"], target.vocab_size))
    return heads


def read_parallel(checkpoint: Checkpoint, config: LlamaConfig) -> Tensors:
    """Return the tensors of parallel heads under the names of a Llama layer."""
    return _convert(checkpoint.tensors, "layers", META, (int(config.head_dim or 0) // 2, 2))


def _convert(tensors: Tensors, prefix: str, names: Mapping[str, str], pairs: tuple[int, int]) -> Tensors:
    """Rename the tensors of parallel heads. Permute the rows of q_proj and k_proj between the RoPE layouts of Meta,
    pairs (E / 2, 2), and transformers, pairs (2, E / 2).
    """
    converted: Tensors = {}
    for name, tensor in tensors.items():
        _, index, part = name.removesuffix(".weight").split(".", 2)
        new = names.get(part, part)
        if ROTATED & {part, new}:
            tensor = tensor.view(-1, *pairs, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        converted[f"{prefix}.{index}.{new}.weight"] = tensor
    return converted


def sequential_to_checkpoint(
    tensors: Tensors, convention: MTPConvention, config: PretrainedConfig, layers: int, target_name: str
) -> tuple[dict[str, object], Tensors]:
    """Return config.json and tensors under DeepSeek's names. layers: of the target."""
    if convention.hidden_first:
        raise ValueError("DeepSeek's format cannot store modules that join [hidden; embedding]; train a new head")
    named = {}
    for name, tensor in tensors.items():
        _, index, part, kind = name.split(".", 3)
        inside = kind if part == "block" else f"{PARTS[part][0]}.{kind}"
        named[f"model.layers.{layers + int(index)}.{inside}"] = tensor
    saved_config = config.to_dict() | {
        "_name_or_path": target_name,  # transformers would write a local folder
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": count_numbered(tensors, r"layers\.(\d+)\."),
        "base_model_name_or_path": target_name,
        NORMED_INPUT_KEY: convention.normed_input,
        NORMED_OUTPUT_KEY: convention.normed_output,
    }
    return saved_config, named


def parallel_to_checkpoint(
    tensors: Tensors, heads: int, config: LlamaConfig, layers: int, target_name: str
) -> tuple[JsonObject, Tensors]:
    """Return params.json, also used as config.json, and tensors under Meta's names. layers: of the target."""
    names = {hf_name: meta_name for meta_name, hf_name in META.items()}
    named = _convert(tensors, "extra_heads", names, (2, int(config.head_dim or 0) // 2))
    params = {
        "dim": config.hidden_size,
        "n_layers": layers + heads,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "vocab_size": config.vocab_size,
        "norm_eps": config.rms_norm_eps,
        "n_future_tokens": heads + 1,
        "base_model_name_or_path": target_name,
    }
    return params, named
