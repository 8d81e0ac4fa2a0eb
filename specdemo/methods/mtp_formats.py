"""Files of multi-token prediction.

L layers of the target, D modules, E experts. Sequential modules are read from four families, often out of the target's
own files, of which nothing else is read: `model.layers.{L + i}.*` with `eh_proj` (DeepSeek, GLM; this is also written),
`mtp.*` (Qwen), `model.mtp_layers.{i}.*` (MiMo; eh_proj reads the hidden state first). Parallel heads are
`extra_heads.{i}.*` in the names of Meta's Llama, beside a params.json with `n_future_tokens`; their target is made of
the file's `layers`, of which there are n_layers - n_future_tokens + 1.

What no file says is whether states are read and handed on behind a norm: several conventions, the likeliest first.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import safe_open
from torch import Tensor

from specdemo.core.files import write_text
from specdemo.core.protocol import Target
from specdemo.methods.heads import as_target, odd_tensors
from specdemo.methods.mtp_heads import Convention, Heads, ParallelHeads, SequentialModules
from specdemo.models.checkpoints import Checkpoint, check_weights, write_checkpoint
from specdemo.models.footprint import read_config
from specdemo.models.hub import LoadProgress, silent
from specdemo.models.resolve import local_folder

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
READS, HANDS_ON = "mtp_reads_normed", "mtp_hands_on_normed"  # config keys of this project


def read_heads(source: str, target: Target, progress: LoadProgress = silent) -> tuple[Heads, tuple[Convention, ...]]:
    """The heads, frozen, where the target is and in its precision, and the conventions they may follow.

    Raises ValueError, one line, when there are none or when they belong on another target.
    """
    return heads_in(_open(source, target, progress), target)


def heads_in(checkpoint: Checkpoint, target: Target) -> tuple[Heads, tuple[Convention, ...]]:
    """`read_heads` of a checkpoint that is open; what else it holds is left out."""
    wanted = {name: tensor for name, tensor in checkpoint.tensors.items() if _wanted(name, target)}
    checkpoint = replace(checkpoint, tensors=wanted)
    check_weights(checkpoint)
    if not wanted:
        raise ValueError(
            f"{checkpoint.name} holds no multi-token prediction for {target.num_layers} layers; copies often leave it "
            "out, so choose the original upload of the target"
        )
    if any(PARALLEL.match(name) for name in checkpoint.tensors):
        return _parallel(checkpoint, target), ()
    return _sequential(checkpoint, target)


def _open(source: str, target: Target, progress: LoadProgress) -> Checkpoint:
    """The config, and of the tensors those of the heads alone."""
    folder = Path(local_folder(source, progress, ("*.pth",)))
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys() if _wanted(name, target)}  # noqa: SIM118
    for file in sorted(folder.glob("*.pth")):
        stored = torch.load(file, "cpu", weights_only=True, mmap=True)
        tensors |= {name: tensor for name, tensor in stored.items() if _wanted(name, target)}
    return Checkpoint(source, read_config(folder, "params.json", "config.json"), tensors)


def _wanted(name: str, target: Target) -> bool:
    numbered = NUMBERED.fullmatch(name)
    if numbered:
        return int(numbered[1]) >= target.num_layers
    return any(pattern.fullmatch(name) for pattern in (MIMO, QWEN, PARALLEL))


def _sequential(checkpoint: Checkpoint, target: Target) -> tuple[Heads, tuple[Convention, ...]]:
    tensors = _fused(dict(_named(checkpoint.tensors, target.num_layers)))
    hidden_first = any(MIMO.fullmatch(name) for name in checkpoint.tensors)
    count = 1 + max(int(name.split(".")[1]) for name in tensors)
    joined = tensors.get("layers.0.eh_proj.weight")
    if joined is not None and joined.shape != (target.hidden_size, 2 * target.hidden_size):
        _refuse(checkpoint, "hidden size", joined.shape[0], target.hidden_size)
    with torch.device("meta"):
        heads = SequentialModules(target, count, hidden_first)
    _fill(heads, tensors, checkpoint)
    conventions = _conventions(checkpoint)
    heads.convention = conventions[0]
    return as_target(heads, target), conventions


def _conventions(checkpoint: Checkpoint) -> tuple[Convention, ...]:
    """DeepSeek's modules hand their state on as it is, others behind their norm; what `write_heads` wrote is sure."""
    config = checkpoint.config
    if READS in config:
        return (Convention(config[READS], config[HANDS_ON]),)
    hands_on = "deepseek" not in str(config.get("model_type"))
    return tuple(Convention(*both) for both in product((True, False), (hands_on, not hands_on)))


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
                yield f"layers.{index}.{'block.' + match[2] if qwen else _part(match[2])}", tensor


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


def _parallel(checkpoint: Checkpoint, target: Target) -> Heads:
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
    with torch.device("meta"):
        heads = ParallelHeads(target, future - 1)
    tensors: Tensors = {}
    for name, tensor in checkpoint.tensors.items():
        match = PARALLEL.fullmatch(name)
        assert match
        part = META.get(match[2].removesuffix(".weight"), match[2])
        tensors[f"layers.{match[1]}.{part}.weight"] = _halves(part, tensor, heads.config)
    _fill(heads, tensors, checkpoint)
    return as_target(heads, target)


def _halves(part: str, weight: Tensor, config: Any) -> Tensor:
    """Rows of queries and keys: angles of neighbours, as Meta has them -> of halves, as transformers has them."""
    if not part.endswith(("q_proj", "k_proj")):
        return weight
    size = config.head_dim
    return weight.view(-1, size // 2, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _neighbours(part: str, weight: Tensor, config: Any) -> Tensor:
    """The inverse of `_halves`."""
    if not part.endswith(("q_proj", "k_proj")):
        return weight
    size = config.head_dim
    return weight.view(-1, 2, size // 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _fill(heads: Heads, tensors: Tensors, checkpoint: Checkpoint) -> None:
    """Give heads made on the meta device these tensors. Raises ValueError if one is odd."""
    odd = odd_tensors(heads, tensors)
    if odd:
        raise ValueError(
            f"{checkpoint.name}: {odd[0][0]} is missing, of another shape or unknown; its layers must be built "
            "like the target's and not be quantised"
        )
    heads.load_state_dict(tensors, assign=True)


def write_heads(folder: Path, heads: Heads, target_name: str) -> None:
    """Sequential modules in DeepSeek's names, parallel heads in Meta's."""
    if isinstance(heads, SequentialModules):
        _write_sequential(folder, heads, target_name)
    else:
        _write_parallel(folder, heads, target_name)


def _write_sequential(folder: Path, heads: SequentialModules, target_name: str) -> None:
    layers = heads.below
    if heads.hidden_first:
        raise ValueError("modules that join [hidden; embedding] have no place in DeepSeek's format; train a fresh head")
    tensors = {}
    for name, tensor in heads.state_dict().items():
        _, index, part, kind = name.split(".", 3)
        inside = kind if part == "block" else f"{WRITTEN[part]}.{kind}"
        tensors[f"model.layers.{layers + int(index)}.{inside}"] = tensor
    config = heads.config.to_dict() | {
        "_name_or_path": target_name,  # transformers' own is a folder of this machine
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": len(heads),
        "base_model_name_or_path": target_name,
        READS: heads.convention.reads_normed,
        HANDS_ON: heads.convention.hands_on_normed,
    }
    write_checkpoint(folder, config, tensors)


def _write_parallel(folder: Path, heads: Heads, target_name: str) -> None:
    config, names = heads.config, {ours: theirs for theirs, ours in META.items()}
    tensors = {}
    for name, tensor in heads.state_dict().items():
        _, index, part = name.removesuffix(".weight").split(".", 2)
        tensors[f"extra_heads.{index}.{names[part]}.weight"] = _neighbours(part, tensor, config)
    params = {
        "dim": config.hidden_size,
        "n_layers": heads.below + len(heads),
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "vocab_size": config.vocab_size,
        "norm_eps": config.rms_norm_eps,
        "n_future_tokens": len(heads) + 1,
        "base_model_name_or_path": target_name,
    }
    write_checkpoint(folder, params, tensors)
    write_text(folder / "params.json", json.dumps(params, indent=2) + "\n")
