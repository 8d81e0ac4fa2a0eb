"""Speculator checkpoints: open one, write one. Whose it is, formats and their traps: see the methods' own files.

Weights are safetensors. Where a public family has nothing else (Medusa-1, Hydra, MLPSpeculator, EAGLE-1), a `.pt` or
`.bin` is read with `torch.load(weights_only=True)`, which runs no code from the file.
"""

import json
import pickle
from collections.abc import Mapping, Sequence
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
from specdemo.models.load import LoadProgress, local_folder, locate, silent

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
