"""Files of multi-token prediction.

L layers of the target, D modules, E experts. Sequential modules are read from four families, often out of the target's
own files, of which nothing else is read: `model.layers.{L + i}.*` with `eh_proj` (DeepSeek, GLM; this is also written),
`mtp.*` (Qwen), `model.mtp_layers.{i}.*` (MiMo; eh_proj reads the hidden state first) and `mtp_layers.{i}.*`
(speculators; the embedding first). Parallel heads are `extra_heads.{i}.*` in the names of Meta's Llama, beside a
params.json with `n_future_tokens`; their target is made of the file's `layers`, of which there are
n_layers - n_future_tokens + 1.

What no file says is whether states are read and handed on behind a norm, and in MiMo's names what eh_proj reads first,
where the config names no family: several conventions, the likeliest first.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple, NoReturn

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig

from specdemo.core.protocol import Target
from specdemo.models.checkpoints import Checkpoint, check_weights
from specdemo.models.configs import read_config
from specdemo.models.hub import LoadProgress
from specdemo.models.resolve import fetched, locate

Tensors = dict[str, Tensor]

NUMBERED = re.compile(r"(?:model\.)?(?:language_model\.)?layers\.(\d+)\.(.+)")
MIMO = re.compile(r"(?:model\.)?mtp_layers\.(\d+)\.(.+)")
QWEN = re.compile(r"(?:model\.)?mtp\.(?:layers\.(\d+)\.)?(.+)")
PARALLEL = re.compile(r"extra_heads\.(\d+)\.(.+)")
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
COPIES = ("embed_tokens.", "shared_head.head.", "rotary_emb.", "self_attn.rotary_emb.")

# a part of a module in a file -> ours; everything else belongs to the decoder layer
PARTS = {
    "enorm": "enorm",
    "hnorm": "hnorm",
    "eh_proj": "eh_proj",
    "shared_head.norm": "norm",
    "token_layernorm": "enorm",
    "hidden_layernorm": "hnorm",
    "input_proj": "eh_proj",
    "final_layernorm": "norm",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "fc": "eh_proj",
    "norm": "norm",
}
WRITTEN = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "shared_head.norm"}
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
HAND_ON_PLAIN = ("glm", "step", "ernie", "pangu")  # in the model_type of those that hand their state on as it is
READS, HANDS_ON = "mtp_reads_normed", "mtp_hands_on_normed"  # config keys of this project


@dataclass(frozen=True, slots=True)
class Convention:
    """Whether a module reads the target's state behind the target's final norm, and hands on its own behind its own;
    and whether eh_proj reads [hidden; embedding] instead of [embedding; hidden]."""

    reads_normed: bool = True
    hands_on_normed: bool = True
    hidden_first: bool = False

    def __str__(self) -> str:
        words = {True: "normed", False: "plain"}
        order = ", the state before the embedding" if self.hidden_first else ""
        return f"{words[self.reads_normed]} states in, {words[self.hands_on_normed]} states on{order}"


class Modules(NamedTuple):
    """Sequential modules: their tensors, how many, and the conventions they may follow."""

    tensors: Tensors
    number: int
    conventions: tuple[Convention, ...]


def recognises(checkpoint: Checkpoint) -> bool:
    """Whether the files hold modules or heads of multi-token prediction."""
    family = checkpoint.config.get("speculators_model_type")
    if family:
        return bool(family == "mtp")
    return checkpoint.has("mtp.", "mtp_layers.", "eh_proj") or "n_future_tokens" in checkpoint.config


def wanted(checkpoint: Checkpoint, target: Target) -> Checkpoint:
    """Without what else it holds. Raises ValueError when nothing is left."""
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if _wanted(name, target)}
    if not tensors:
        raise ValueError(
            f"{checkpoint.name} holds no multi-token prediction for {target.num_layers} layers; copies often leave it "
            "out, so choose the original upload of the target"
        )
    left = replace(checkpoint, tensors=tensors)
    check_weights(left)
    return left


def is_parallel(checkpoint: Checkpoint) -> bool:
    """Whether the heads are parallel ones (Gloeckle et al. 2404.19737) and not modules in sequence."""
    return any(PARALLEL.match(name) for name in checkpoint.tensors)


def opened(source: str, target: Target, progress: LoadProgress) -> Checkpoint:
    """The config, and of the tensors those of the heads alone."""
    folder = fetched(locate(source, ("*.pth",)), progress)
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as held:
            tensors |= {name: held.get_tensor(name) for name in held.keys() if _wanted(name, target)}  # noqa: SIM118
    for file in sorted(folder.glob("*.pth")):
        stored = torch.load(file, "cpu", weights_only=True, mmap=True)
        tensors |= {name: tensor for name, tensor in stored.items() if _wanted(name, target)}
    return Checkpoint(source, read_config(folder, "params.json", "config.json"), tensors)


def _wanted(name: str, target: Target) -> bool:
    numbered = NUMBERED.fullmatch(name)
    if numbered:
        return int(numbered[1]) >= target.num_layers
    return any(pattern.fullmatch(name) for pattern in (MIMO, QWEN, PARALLEL))


def sequential(checkpoint: Checkpoint, target: Target) -> Modules:
    """Raises ValueError when they belong on a target of another width."""
    tensors = _fused(dict(_named(checkpoint.tensors, target.num_layers)))
    joined = tensors.get("layers.0.eh_proj.weight")
    if joined is not None and joined.shape != (target.hidden_size, 2 * target.hidden_size):
        _refuse(checkpoint, "hidden size", joined.shape[0], target.hidden_size)
    count = 1 + max(int(name.split(".")[1]) for name in tensors)
    return Modules(tensors, count, _conventions(checkpoint))


def _conventions(checkpoint: Checkpoint) -> tuple[Convention, ...]:
    """As vLLM reads the families; what speculators trained and what was written here is sure."""
    config = checkpoint.config
    if READS in config:
        return (Convention(config[READS], config[HANDS_ON]),)
    if "speculators_model_type" in config:
        return (Convention(),)
    family = str(config.get("model_type"))
    hands_on = not any(name in family for name in HAND_ON_PLAIN)
    orders = [False]
    if any(MIMO.fullmatch(name) for name in checkpoint.tensors):
        orders = [True] if "mimo" in family else [True, False]
    return tuple(Convention(*way) for way in product((True, False), (hands_on, not hands_on), orders))


def _named(tensors: Mapping[str, Tensor], layers: int) -> Iterator[tuple[str, Tensor]]:
    """Tensors by our names; what Qwen has once for all modules is given to each."""
    count = 1 + max((int(m[1]) for m in map(QWEN.fullmatch, tensors) if m and m[1]), default=0)
    for name, tensor in tensors.items():
        qwen, numbered = QWEN.fullmatch(name), NUMBERED.fullmatch(name)
        if qwen and qwen[1] is None:
            for i in range(count):
                yield f"layers.{i}.{_part(qwen[2])}", tensor
        else:
            match = qwen or numbered or MIMO.fullmatch(name)
            assert match
            if not match[2].startswith(COPIES):
                index = int(match[1]) - (layers if numbered else 0)
                yield f"layers.{index}.{_part(match[2])}", tensor


def _part(name: str) -> str:
    part, _, kind = name.rpartition(".")
    return f"{PARTS[part]}.{kind}" if part in PARTS else f"block.{name}"


def _fused(tensors: Tensors) -> Tensors:
    """Experts stored one by one -> as transformers keeps them, gate_up_proj [E, 2 I, H] and down_proj [E, H, I]."""
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


def _refuse(checkpoint: Checkpoint, what: str, theirs: int, ours: int) -> NoReturn:
    raise ValueError(
        f"{checkpoint.name} is for {what} {theirs}, the target has {ours}; "
        f"choose the target {checkpoint.config.get('base_model_name_or_path') or 'it came with'}"
    )


def parallel_heads(checkpoint: Checkpoint, target: Target) -> int:
    """How many. Raises ValueError when they belong on another target."""
    params = checkpoint.config
    future, below = params.get("n_future_tokens"), params.get("n_layers", 0)
    if future is None or below - future + 1 != target.num_layers:
        raise ValueError(
            f"{checkpoint.name} belongs on a model of {below - (future or 1) + 1} layers, its own `layers`, the target "
            f"has {target.num_layers}; choose the target {params.get('base_model_name_or_path') or 'it came with'}"
        )
    if params.get("dim", target.hidden_size) != target.hidden_size:
        _refuse(checkpoint, "hidden size", params["dim"], target.hidden_size)
    if params.get("vocab_size", -1) not in (-1, target.vocab_size):  # -1: Meta's for a tokenizer to say
        _refuse(checkpoint, "vocabulary", params["vocab_size"], target.vocab_size)
    return int(future) - 1


def parallel(checkpoint: Checkpoint, config: LlamaConfig) -> Tensors:
    """The tensors of parallel heads under the names of a Llama layer."""
    tensors: Tensors = {}
    for name, tensor in checkpoint.tensors.items():
        match = PARALLEL.fullmatch(name)
        assert match
        part = META.get(match[2].removesuffix(".weight"), match[2])
        tensors[f"layers.{match[1]}.{part}.weight"] = _halves(part, tensor, config)
    return tensors


def _halves(part: str, weight: Tensor, config: LlamaConfig) -> Tensor:
    """Rows of queries and keys: angles of neighbours, as Meta has them -> of halves, as transformers has them."""
    if not part.endswith(("q_proj", "k_proj")):
        return weight
    size = int(config.head_dim or 0)
    return weight.view(-1, size // 2, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _neighbours(part: str, weight: Tensor, config: LlamaConfig) -> Tensor:
    """The inverse of `_halves`."""
    if not part.endswith(("q_proj", "k_proj")):
        return weight
    size = int(config.head_dim or 0)
    return weight.view(-1, 2, size // 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def written_sequential(
    tensors: Tensors, modules: Modules, config: PretrainedConfig, layers: int, target_name: str
) -> tuple[dict[str, object], Tensors]:
    """config.json and tensors in DeepSeek's names, behind so many layers of the target."""
    (convention,) = modules.conventions
    if convention.hidden_first:
        raise ValueError("modules that join [hidden; embedding] have no place in DeepSeek's format; train a fresh head")
    named = {}
    for name, tensor in tensors.items():
        _, index, part, kind = name.split(".", 3)
        inside = kind if part == "block" else f"{WRITTEN[part]}.{kind}"
        named[f"model.layers.{layers + int(index)}.{inside}"] = tensor
    said = config.to_dict() | {
        "_name_or_path": target_name,  # transformers' own is a folder of this machine
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": modules.number,
        "base_model_name_or_path": target_name,
        READS: convention.reads_normed,
        HANDS_ON: convention.hands_on_normed,
    }
    return said, named


def written_parallel(
    tensors: Tensors, heads: int, config: LlamaConfig, layers: int, target_name: str
) -> tuple[dict[str, Any], Tensors]:
    """params.json, which is config.json too, and tensors in Meta's names, behind so many layers of the target."""
    names, named = {ours: theirs for theirs, ours in META.items()}, {}
    for name, tensor in tensors.items():
        _, index, part = name.removesuffix(".weight").split(".", 2)
        named[f"extra_heads.{index}.{names[part]}.weight"] = _neighbours(part, tensor, config)
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
