"""Reading and writing of speculator checkpoints. The formats are described in the files of the methods.

Weights are safetensors. Families that publish nothing else (Medusa-1, MLPSpeculator, EAGLE-1) are read from
`.pt` or `.bin` with `torch.load(weights_only=True)`, which runs no code from the file.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from torch import Tensor

from specdemo.core.atomic_io import atomic_folder, finite, json_text, write_text
from specdemo.core.safe_io import FILE_BYTES, TOO_LARGE, is_out_of_memory, read_limited
from specdemo.core.suggest import counted, short_repr
from specdemo.costs.shapes import Config
from specdemo.models.memory import headers
from specdemo.models.ref import ModelRef
from specdemo.models.sources import (
    MASK_FILE,
    PICKLED,
    LoadProgress,
    fetch_config,
    fetch_folder,
    locate,
    no_progress,
    read_config,
    remote_headers,
)

SHARD = "9MB"
MAX_NUMBER = 2048  # limit of the numbers in tensor names (layers, heads, experts)
FEW_STEPS = 500  # of training; low acceptance may come from that
MAX_TABLE = 1 << 24  # most integers in a table of a checkpoint opened without weights
LARGEST = torch.finfo(torch.float32).max
UNBOUNDED = "time_step_limit"  # of Mamba layers in a target that contains its head: up to infinity
MASK_TOKEN = "mask_embedding.token"  # tensor name of the mask token's id
SHARDS = "model*.safetensors*"  # names of the files that `write_checkpoint` writes


Wanted = Callable[[str], bool]  # name of a tensor -> whether to read it


def _every(name: str) -> bool:
    return True


@dataclass(frozen=True)
class Checkpoint:
    """config.json and all tensors, on the CPU and in the stored precision."""

    name: str
    config: Config
    tensors: dict[str, Tensor]
    files: tuple[str, ...] = ()

    def take(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors whose names start with `prefix`, with the prefix removed."""
        return {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}

    def has(self, *parts: str) -> bool:
        """Return True if any tensor name contains one of the parts."""
        return any(part in name for name in self.tensors for part in parts)

    def config_has(self, key: str, *values: str) -> bool:
        """Return True if the config entry is one of the values, or a list that contains one."""
        entry = self.config.get(key)
        return any(str(value) in values for value in (entry if isinstance(entry, list) else [entry]))


def open_checkpoint(source: str, progress: LoadProgress = no_progress, wanted: Wanted = _every) -> Checkpoint:
    """Open a folder, an embedded name or a hub id, with the tensors that are wanted.

    Raises ValueError, one line, if there is no checkpoint, if a file is damaged, or if it would run code.
    """
    folder = fetch_folder(locate(ModelRef(source), PICKLED), progress)
    pickled = (f for kind in PICKLED for f in folder.glob(kind) if f.name != MASK_FILE)
    files = sorted(folder.glob("*.safetensors")) or sorted(pickled)
    if not files:
        raise ValueError(f"{source} has no weights (*.safetensors, *.pt or *.bin); choose the folder of a speculator")
    tensors: dict[str, Tensor] = {}
    for done, file in enumerate(files):
        progress(done / len(files), f"reading {file.name}")
        loaded = _load_file(file, wanted)
        if not isinstance(loaded, Mapping) or not all(isinstance(t, Tensor) for t in loaded.values()):
            raise ValueError(f"{file} contains objects other than tensors; convert it to safetensors")
        tensors |= {name: tensor for name, tensor in loaded.items() if wanted(name)}
    return Checkpoint(source, read_config(folder), tensors | _mask_token_tensors(folder), tuple(f.name for f in files))


def open_meta_checkpoint(source: str) -> Checkpoint:
    """Open a checkpoint from the headers of its files only, with all tensors on the meta device.

    Integer tables are zeros. Raises ValueError, one line, also for a repository with pickled weights, which have no
    headers and must be downloaded first.
    """
    location = locate(ModelRef(source), PICKLED)
    if isinstance(location, Path):
        folder, files = location, sorted(location.glob("*.safetensors"))
        if not files:
            opened = open_checkpoint(source)
            tensors = {n: t.to("meta") if t.is_floating_point() else t for n, t in opened.tensors.items()}
            return Checkpoint(source, opened.config, tensors, opened.files)
        header_entries, names = headers(files), [file.name for file in files]
    else:
        pickled = [file for file in location.weights if not file.endswith(".safetensors")]
        if pickled:
            raise ValueError(f"{source} has pickled weights ({pickled[0]}); download it to inspect them")
        folder, header_entries, names = fetch_config(location), remote_headers(location), location.weights
    shapes = {name: _placeholder(shape, stored) for name, shape, stored in header_entries}
    return Checkpoint(source, read_config(folder), shapes | _mask_token_tensors(folder), tuple(names))


def _placeholder(shape: Sequence[int], stored: str) -> Tensor:
    if stored[0] in "IUB" and stored != "BF16" and prod(shape) <= MAX_TABLE:
        return torch.zeros(list(shape), dtype=torch.bool if stored == "BOOL" else torch.int64)
    return torch.empty(list(shape), device="meta")


def _load_file(file: Path, wanted: Wanted = _every) -> object:
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as reader:
                return {name: reader.get_tensor(name) for name in reader.keys() if wanted(name)}  # noqa: SIM118
        return torch.load(file, "cpu", weights_only=True, mmap=file.suffix == ".pth")  # of a complete model
    except Exception as error:  # a damaged pickle raises anything
        wrong = TOO_LARGE if is_out_of_memory(error) else "is damaged or not plain weights; fetch it again"
        raise ValueError(f"{file} {wrong}") from None


def _mask_token_tensors(folder: Path) -> dict[str, Tensor]:
    """Read `mask_embedding.pt` of MiMo's drafters, as vLLM does (qwen3_dflash.py): the embedding of the mask token,
    with or without the token's id."""
    file = folder / MASK_FILE
    if not file.is_file():
        return {}
    contents = _load_file(file)
    named = contents if isinstance(contents, Mapping) else {"embedding": contents}
    row, token = named.get("embedding"), named.get("mask_token_id")
    if not isinstance(row, Tensor) or not (token is None or (isinstance(token, int) and 0 <= token < MAX_TABLE)):
        raise ValueError(f"{file} has no embedding of a mask token; fetch it again")
    return {"mask_embedding": row.reshape(-1)} | ({} if token is None else {MASK_TOKEN: torch.tensor(token)})


def write_checkpoint(folder: Path, config: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
    """Write config.json and safetensors in shards below 10 MB, and replace the existing ones atomically.

    Raises ValueError, one line, if they cannot be written.
    """
    # copies, because tensors that share memory would be written once, and parts of a larger tensor not at all
    state = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    with atomic_folder(folder, SHARDS, "config.json") as staging:
        save_torch_state_dict(state, staging, max_shard_size=SHARD)
        write_text(staging / "config.json", json_text(finite(dict(config)), indent=2) + "\n")


def training_note(source: str) -> str:
    """Return a sentence about a head that `train` wrote and trained for FEW_STEPS at most; "" for any other."""
    try:
        facts = json.loads(read_limited(Path(source) / "provenance.json", FILE_BYTES))
        steps, seconds = int(facts["step"]), float(facts["seconds"])
    except (OSError, KeyError, TypeError, ValueError):
        return ""
    return f"This head was trained for {counted(steps, 'step')} ({seconds:.0f} s)." if steps <= FEW_STEPS else ""


def check_finite(name: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError if one of the named tensors contains NaN or infinity."""
    for part, tensor in tensors:
        if tensor.is_floating_point() and tensor.numel() and not tensor.is_meta:
            numbers = tensor.detach() if tensor.element_size() > 1 else tensor.detach().float()  # no kernels for 8 bits
            if not torch.isfinite(torch.stack(torch.aminmax(numbers))).all():
                raise ValueError(f"{name} has NaN or infinity in {part}; fetch it again or choose another revision")


def check_weights(checkpoint: Checkpoint) -> None:
    """Raise ValueError unless the weights are floating point, have plausible layer numbers, and belong to a supported
    kind of layer, and the numbers of the config are finite in 32 bits."""
    for key, number in _numbers(checkpoint.config):
        if not abs(number) <= LARGEST and key != UNBOUNDED:
            raise ValueError(
                f"{checkpoint.name} has {key} {short_repr(number)} in its config, not a finite number of 32 bits; "
                "fetch it again or choose another head"
            )
    if checkpoint.has(".layer_scalar") and not checkpoint.has("pre_projection."):  # an assistant has its own reader
        raise ValueError(
            f"{checkpoint.name} uses Gemma 4 layers, which are not supported; choose a drafter with Qwen3 layers"
        )
    for name, tensor in checkpoint.tensors.items():
        if name.endswith((".weight", ".bias")) and not tensor.is_floating_point():
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ValueError(f"{checkpoint.name} stores {name} as {kind}; choose a head that is not quantised")
        if any(len(number) > 4 or int(number) >= MAX_NUMBER for number in re.findall(r"\d+", name)):
            raise ValueError(f"{checkpoint.name} has {name[:80]}, a number above {MAX_NUMBER}; choose another head")


def _numbers(value: object, key: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a config with their keys."""
    if isinstance(value, int | float):
        yield key, value
    elif isinstance(value, Mapping):
        for name, entry in value.items():
            yield from _numbers(entry, name)
    elif isinstance(value, list):
        for entry in value:
            yield from _numbers(entry, key)
