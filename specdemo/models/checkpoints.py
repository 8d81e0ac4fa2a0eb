"""Speculator checkpoints: open one, write one. Whose it is, formats and their traps: see the methods' own files.

Weights are safetensors. Where a public family has nothing else (Medusa-1, Hydra, MLPSpeculator, EAGLE-1), a `.pt` or
`.bin` is read with `torch.load(weights_only=True)`, which runs no code from the file.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
from torch import Tensor

from specdemo.core.files import replacing_all, write_text
from specdemo.core.reading import TOO_LARGE, lacks_memory
from specdemo.models.configs import read_config
from specdemo.models.footprint import headers
from specdemo.models.hub import MASK, Cancelled, LoadProgress, describe, remote_headers, silent
from specdemo.models.resolve import fetched, locate

PICKLED = ("*.pt", "*.bin")
SHARD = "9MB"
NUMBERED = 2048  # layers, heads or experts; each number in a tensor's name is below it
TABLE = 1 << 24  # integers in the largest table that an outline holds
MASK_TOKEN = "mask_embedding.token"  # the id that the file of the mask token's embedding says
SHARDS = "model*.safetensors*"  # as they are written here


@dataclass(frozen=True)
class Checkpoint:
    """config.json and every tensor, on the CPU and in the stored precision."""

    name: str
    config: Mapping[str, Any]
    tensors: dict[str, Tensor]
    files: tuple[str, ...] = ()

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
    folder = fetched(locate(source, PICKLED), progress)
    pickled = (f for kind in PICKLED for f in folder.glob(kind) if f.name != MASK)
    files = sorted(folder.glob("*.safetensors")) or sorted(pickled)
    if not files:
        raise ValueError(f"{source} holds no weights (*.safetensors, *.pt or *.bin); name the folder of a speculator")
    tensors: dict[str, Tensor] = {}
    for done, file in enumerate(files):
        progress(done / len(files), f"reading {file.name}")
        loaded = _loaded(file)
        if not isinstance(loaded, Mapping) or not all(isinstance(t, Tensor) for t in loaded.values()):
            raise ValueError(f"{file} holds more than tensors; convert it to safetensors")
        tensors |= loaded
    return Checkpoint(source, read_config(folder), tensors | _mask(folder), tuple(f.name for f in files))


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
    return Checkpoint(source, read_config(folder), shapes | _mask(folder), tuple(names))


def _stand_in(shape: Sequence[int], stored: str) -> Tensor:
    if stored[0] in "IUB" and stored != "BF16" and prod(shape) <= TABLE:
        return torch.zeros(list(shape), dtype=torch.bool if stored == "BOOL" else torch.int64)
    return torch.empty(list(shape), device="meta")


def _loaded(file: Path) -> object:
    try:
        return load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
    except Exception as error:  # a damaged pickle raises anything
        wrong = TOO_LARGE if lacks_memory(error) else "is damaged or not plain weights; fetch it again"
        raise ValueError(f"{file} {wrong}") from None


def _mask(folder: Path) -> dict[str, Tensor]:
    """What `mask_embedding.pt` holds, as MiMo's drafters have it and vLLM reads it (qwen3_dflash.py): the embedding of
    the mask token, alone or beside the token's id."""
    file = folder / MASK
    if not file.is_file():
        return {}
    said = _loaded(file)
    named = said if isinstance(said, Mapping) else {"embedding": said}
    row, token = named.get("embedding"), named.get("mask_token_id")
    if not isinstance(row, Tensor) or not (token is None or (isinstance(token, int) and 0 <= token < TABLE)):
        raise ValueError(f"{file} holds no embedding of a mask token; fetch it again")
    return {"mask_embedding": row.reshape(-1)} | ({} if token is None else {MASK_TOKEN: torch.tensor(token)})


def write_checkpoint(folder: Path, config: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
    """config.json and safetensors in shards below 10 MB, all at once in the place of those that are there.

    Raises ValueError, one line, when they cannot be written."""
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing_all(folder, SHARDS, "config.json") as beside:
        save_torch_state_dict(state, beside, max_shard_size=SHARD)
        write_text(beside / "config.json", json.dumps(dict(config), indent=2) + "\n")


def check_weights(checkpoint: Checkpoint) -> None:
    """Raise ValueError unless a head's weights are of floating point, numbered as modules can be, and of layers that a
    head here can have."""
    if checkpoint.has(".layer_scalar"):
        raise ValueError(
            f"{checkpoint.name} is of Gemma 4's own layers, not read here; choose a drafter of Qwen3's layers"
        )
    for name, tensor in checkpoint.tensors.items():
        if name.endswith((".weight", ".bias")) and not tensor.is_floating_point():
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ValueError(f"{checkpoint.name} holds {name} as {kind}; choose a head that is not quantised")
        if any(len(number) > 4 or int(number) >= NUMBERED for number in re.findall(r"\d+", name)):
            raise ValueError(f"{checkpoint.name} holds {name[:80]}, numbered beyond {NUMBERED}; choose another head")


@contextmanager
def readable(name: str) -> Iterator[None]:
    """Whatever a head's files make Python and its libraries raise -> one ValueError line."""
    try:
        yield
    except Cancelled:
        raise
    except Exception as error:
        if lacks_memory(error):
            raise ValueError(f"{name} {TOO_LARGE}") from error
        line = str(error).partition("\n")[0] or type(error).__name__
        told = isinstance(error, ValueError)
        raise ValueError(line if told else f"{name} cannot be read ({line}); fetch it again") from error
