"""Speculator checkpoints: open one, tell whose it is, write one. Formats and their traps: see the methods' own files.

Weights are safetensors. Where a public family has nothing else (Medusa-1, Hydra, MLPSpeculator, EAGLE-1), a `.pt` or
`.bin` is read with `torch.load(weights_only=True)`, which runs no code from the file.
"""

import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specdemo.models.footprint import headers, read_config
from specdemo.models.hub import describe, remote_headers
from specdemo.models.load import LoadProgress, local_folder, locate, resolve, silent

PICKLED = ("*.pt", "*.bin")
SHARD = "9MB"


@dataclass(frozen=True)
class Checkpoint:
    """config.json and every tensor, on the CPU and in the stored precision."""

    name: str
    config: Mapping[str, Any]
    tensors: dict[str, Tensor]
    files: tuple[str, ...] = field(default=())

    def take(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin with `prefix`, without it."""
        return {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}

    def has(self, *parts: str) -> bool:
        """Whether the name of a tensor holds one of these."""
        return any(part in name for name in self.tensors for part in parts)

    def says(self, key: str, *values: str) -> bool:
        """Whether its config has one of these values, or holds one in a list of them."""
        said = self.config.get(key)
        return any(str(value) in values for value in (said if isinstance(said, list) else [said]))


def open_checkpoint(source: str, progress: LoadProgress = silent) -> Checkpoint:
    """A folder, an embedded name or a hub id -> its checkpoint.

    Raises ValueError, one line, when there is none, when a file is damaged or when it would have to run code.
    """
    folder = Path(local_folder(source, progress, PICKLED))
    files = sorted(folder.glob("*.safetensors")) or sorted(f for kind in PICKLED for f in folder.glob(kind))
    if not files:
        raise ValueError(f"{source} holds no weights (*.safetensors, *.pt or *.bin); name the folder of a speculator")
    tensors: dict[str, Tensor] = {}
    for done, file in enumerate(files):
        progress(done / len(files), f"reading {file.name}")
        tensors |= _read(file)
    return Checkpoint(source, read_config(folder), tensors, tuple(f.name for f in files))


def outline_checkpoint(source: str) -> Checkpoint:
    """`open_checkpoint` from the headers of its files: tensors of the right shape, on the meta device.

    Tables of integers are zeros. Raises ValueError, one line, also for a repository whose weights are pickled: these
    have no headers, so only a download shows what is in them.
    """
    found = locate(source, PICKLED)
    if isinstance(found, Path):
        folder, files = found, sorted(found.glob("*.safetensors"))
        if not files:
            opened = open_checkpoint(source)
            tensors = {n: t.to("meta") if t.is_floating_point() else t for n, t in opened.tensors.items()}
            return Checkpoint(source, opened.config, tensors, opened.files)
        described, names = headers(files), [file.name for file in files]
    else:
        pickled = [file for file in found.weights if not file.endswith(".safetensors")]
        if pickled:
            raise ValueError(f"{source} is pickled ({pickled[0]}); what is in it shows only when it is downloaded")
        folder, described, names = describe(found), remote_headers(found), found.weights
    shapes = {name: _stand_in(shape, stored) for name, shape, stored in described}
    return Checkpoint(source, read_config(folder), shapes, tuple(names))


def _stand_in(shape: Sequence[int], stored: str) -> Tensor:
    if stored[0] in "IUB" and stored != "BF16":
        return torch.zeros(list(shape), dtype=torch.bool if stored == "BOOL" else torch.int64)
    return torch.empty(list(shape), device="meta")


def _read(file: Path) -> dict[str, Tensor]:
    try:
        loaded = load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError):
        raise ValueError(f"{file} is damaged or not plain weights; fetch it again") from None
    if not isinstance(loaded, Mapping) or not all(isinstance(t, Tensor) for t in loaded.values()):
        raise ValueError(f"{file} holds more than tensors; convert it to safetensors")
    return dict(loaded)


def write_checkpoint(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """config.json and safetensors in shards below 10 MB."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_torch_state_dict(state, folder, max_shard_size=SHARD)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")


# Rules in order; the first that holds names the method that reads the checkpoint.
Rule = Callable[[Checkpoint], bool]


def _has(*parts: str) -> Rule:
    return lambda c: any(part in name for name in c.tensors for part in parts)


def _says(key: str, *values: str) -> Rule:
    return lambda c: str(c.config.get(key)) in values


def _architecture(*parts: str) -> Rule:
    return lambda c: any(part in str(name) for name in c.config.get("architectures") or () for part in parts)


KINDS: tuple[tuple[str, Rule], ...] = (
    ("eagle", _says("speculators_model_type", "eagle3", "eagle")),
    ("dflash", _says("speculators_model_type", "dflash", "dspark", "peagle")),
    ("mtp", _says("speculators_model_type", "mtp")),
    ("mlp_speculator", _says("model_type", "mlp_speculator")),
    ("hydra", lambda c: "hydra_lm_head.pt" in c.files or "hydra_num_heads" in c.config),
    ("medusa", lambda c: any(f.startswith("medusa_lm_head.") for f in c.files) or "medusa_num_heads" in c.config),
    ("medusa", lambda c: _says("model_type", "medusa")(c) or _has("medusa_head.", "blocks.0.layers.")(c)),
    ("dflash", lambda c: "dflash_config" in c.config or _architecture("DFlash", "DSpark", "PEagle")(c)),
    ("dflash", lambda c: "hidden_norm.weight" in c.tensors and "fc.weight" in c.tensors and "norm.weight" in c.tensors),
    ("dflash", _has("encoder.output_norm_enc.")),
    ("eagle", lambda c: _has("midlayer.")(c) or "fc.weight" in c.tensors),
    ("mtp", lambda c: _has("mtp.", "mtp_layers.", "eh_proj")(c) or "n_future_tokens" in c.config),
)


def kind_of(checkpoint: Checkpoint) -> str:
    """The method that reads it: a name of METHODS, or `draft_model` for a plain causal model.

    Raises ValueError when it is nothing known.
    """
    for kind, rule in KINDS:
        if rule(checkpoint):
            return kind
    if _has("embed_tokens", "wte")(checkpoint):
        return "draft_model"
    raise ValueError(f"{checkpoint.name} is no speculator known here; its tensors begin {_some(checkpoint.tensors)}")


def expect(checkpoint: Checkpoint, kind: str) -> None:
    """Raise ValueError when the checkpoint is of another family than `kind`, naming that."""
    found = kind_of(checkpoint)
    if found != kind:
        raise ValueError(f"{checkpoint.name} is a checkpoint for method {found!r}, not {kind!r}; choose that method")


def head_of(source: str) -> str | None:
    """The method whose head lies in a folder; None for whole models, for what is not here and for anything else."""
    if not Path(resolve(source)).is_dir():
        return None
    try:
        kind = kind_of(outline_checkpoint(source))
    except ValueError:
        return None
    return None if kind == "draft_model" else kind


def _some(tensors: Mapping[str, Tensor]) -> str:
    return ", ".join(list(tensors)[:3]) or "nowhere"
