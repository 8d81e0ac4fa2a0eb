"""A name -> a loaded model. Safetensors only, never remote code, one clear ValueError line for whatever goes wrong.

A name is an embedded model ("stories"), a folder, or a Hugging Face id with or without @revision. Folders never touch
the network; ids are downloaded into the Hugging Face cache first (hub.py).
"""

import json
import logging
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from specdemo.core.protocol import Target
from specdemo.core.tree import chain_parents
from specdemo.core.words import suggest
from specdemo.models import hub
from specdemo.models.footprint import HEADROOM, Precision, free_bytes, free_ram, gigabytes, measure
from specdemo.models.hub import Cancelled, LoadProgress, embedded_folder, embedded_names, silent
from specdemo.models.kernels import hasten
from specdemo.models.target import HFTarget

__all__ = [
    "Cancelled",
    "LoadProgress",
    "LoadedModel",
    "check_memory",
    "embedded_folder",
    "embedded_names",
    "free_bytes",
    "load_model",
    "load_target",
    "local_folder",
    "locate",
    "outline",
    "pick_device",
    "pick_dtype",
    "placed",
    "plan",
    "resolve",
    "rounding_noise",
    "silent",
    "verify_cost",
    "verify_costs",
]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BITS = {"4bit": 4, "8bit": 8}
KERNELS = ("auto", "transformers")
VERIFY_TOKENS = 5
VERIFY_LIMIT = 1.2  # times a one-token pass: above, speculation cannot pay
SAMPLED = 4096  # numbers of each tensor that are looked at for NaN


@dataclass
class LoadedModel:
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str


def resolve(name: str) -> str:
    """An embedded name -> its folder; a path -> itself; anything else is a hub id and comes back unchanged."""
    folder = embedded_folder() / name
    if re.fullmatch(r"[\w.-]+", name) and (folder / "config.json").is_file():
        return str(folder)
    return str(Path(name).expanduser()) if _is_path(name) else name


def load_target(
    name_or_model: str | PreTrainedModel | LoadedModel,
    dtype: str = "auto",
    device: str = "auto",
    quantization: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: LoadProgress | None = None,
    kernels: str = "auto",
) -> HFTarget:
    """A name, a loaded transformers model or a LoadedModel -> a target. The options apply to names only."""
    if isinstance(name_or_model, PreTrainedModel):
        return HFTarget(name_or_model, tokenizer)
    loaded = name_or_model
    if not isinstance(loaded, LoadedModel):
        loaded = load_model(str(loaded), dtype, device, quantization, progress, kernels)
    return HFTarget(loaded.model, tokenizer or loaded.tokenizer, loaded.name)


def load_model(
    name: str,
    dtype: str = "auto",
    device: str = "auto",
    quantization: str | None = None,
    progress: LoadProgress | None = None,
    kernels: str = "auto",
) -> LoadedModel:
    """dtype: auto, float32, bfloat16, float16; device: auto, cpu, cuda, cuda:N; quantization: 4bit, 8bit; kernels: auto
    (models/kernels.py) or transformers (its own layers, which can be trained and saved).

    dtype auto is float32 on a CPU and bfloat16 on a GPU. What one GPU cannot hold is spread over all, and the rest put
    into main memory. `progress` may raise to stop. Raises ValueError with one line that names the cure.
    """
    if kernels not in KERNELS:
        raise ValueError(f"unknown kernels {kernels!r}; {suggest(kernels, KERNELS)}")
    report = progress or silent
    where, precision = plan(dtype, device, quantization)
    if where.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # on small passes two threads gain little and collapse as soon as anything else runs
    report(0.0, f"looking for {name}")
    source = locate(name)
    spread = check_memory(name, measure(source, precision).weights, where, precision)
    folder = str(_checked(_folder(source, report), name))
    report(0.6, f"reading {name}")
    with _one_line(name), _quiet():
        tokenizer = _tokenizer(folder)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=precision.dtype,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            **_placement(where, precision, spread),
        )
    model, info = loaded
    _check_weights(name, model, info["missing_keys"])
    if precision.bits == 4 and where.type == "cpu":
        _check_four_bits(model, name)
    if not precision.bits and not spread:
        nn.Module.to(model, where)
    model.requires_grad_(False)
    if kernels == "auto":
        hasten(model)
    if where.type == "cpu" and precision.dtype != torch.float32:
        _check_verify_cost(model, name, dtype)
    report(1.0, f"{name} is ready")
    return LoadedModel(model, tokenizer, name)


def plan(dtype: str = "auto", device: str = "auto", quantization: str | None = None) -> tuple[torch.device, Precision]:
    """Where a model goes and what it is held in. Raises ValueError with one line for what is not to be had here."""
    where = pick_device(device)
    return where, Precision(pick_dtype(dtype, where), _bits(quantization))


def outline(name: str) -> HFTarget:
    """The model without its weights, on the meta device, with its tokenizer: what can be told from config files alone.

    Raises ValueError with one line.
    """
    folder = str(_described(name))
    with _one_line(name), _quiet():
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        return HFTarget(model, _tokenizer(folder), name)


def placed(model: PreTrainedModel) -> str:
    """Which of its parts are where, if not all in one place: `cuda:0: embed_tokens, layers 0-20; cpu: lm_head`."""
    devices: dict[str, list[str]] = {}
    for part, device in getattr(model, "hf_device_map", {}).items():
        devices.setdefault(f"cuda:{device}" if isinstance(device, int) else str(device), []).append(part)
    return "; ".join(f"{device}: {_listed(parts)}" for device, parts in devices.items()) if len(devices) > 1 else ""


def _listed(parts: Sequence[str]) -> str:
    """Names without their path; numbered layers in runs."""
    ends = [part.rpartition(".")[2] for part in parts]
    numbers = sorted(int(end) for end in ends if end.isdigit())
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    layers = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ", ".join([*(end for end in ends if not end.isdigit()), *(f"layers {run}" for run in layers)])


def verify_cost(target: HFTarget, slots: int = VERIFY_TOKENS, repeats: int = 5) -> tuple[float, float]:
    """Milliseconds of a one-token pass and of one that verifies `slots` tokens."""
    times = verify_costs(target, (1, slots), repeats)
    return times[1], times[slots]


def verify_costs(target: Target, widths: Sequence[int], repeats: int = 5) -> dict[int, float]:
    """Slots -> milliseconds of a pass over a chain of that many; medians, interleaved."""
    prompt = torch.arange(1, 33, device=target.device)[None] % target.vocab_size
    times: dict[int, list[float]] = {width: [] for width in widths}
    target.start(prompt)
    for repeat in range(repeats + 1):
        for width, measured in times.items():
            tokens = torch.arange(width, device=target.device)[None] % target.vocab_size
            begin = time.perf_counter()
            target.forward(tokens, chain_parents(1, width - 1, target.device))
            if target.device.type == "cuda":
                torch.cuda.synchronize(target.device)
            if repeat:  # the first round warms up
                measured.append(1000.0 * (time.perf_counter() - begin))
    target.release()
    return {width: median(measured) for width, measured in times.items()}


def rounding_noise(target: HFTarget, tokens: Tensor, slots: int = VERIFY_TOKENS) -> float:
    """How far the logits of one-token passes and of one pass over the same `slots` tokens, the last of tokens [1, T],
    lie apart: kernels for other widths add in another order. 0.0 for a text too short to tell."""
    if tokens.shape[1] <= slots:
        return 0.0
    last = tokens[:, -slots:]
    target.start(tokens[:, :-slots])
    together = target.forward(last, torch.arange(slots - 1, device=tokens.device)[None]).logits.float()
    alone = []
    for token in last.split(1, 1):
        alone.append(target.forward(token, token[:, 1:]).logits.float())
        target.commit([[0]])
    target.release()
    return float((torch.cat(alone, 1) - together).abs().max())


@torch.no_grad()
def _check_four_bits(model: PreTrainedModel, name: str) -> None:
    """bitsandbytes finds out in the first pass which widths its kernels for CPUs take."""
    try:
        model(torch.zeros(1, 1, dtype=torch.int64), use_cache=False)
    except (AssertionError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{name} does not run in 4 bit on this CPU ({reason}); use 8bit or none") from None


def _check_verify_cost(model: PreTrainedModel, name: str, dtype: str) -> None:
    one, several = verify_cost(HFTarget(model))
    ratio = several / one
    if ratio > VERIFY_LIMIT:
        raise ValueError(
            f"{name} in {dtype} on this CPU: checking {VERIFY_TOKENS} tokens takes {ratio:.2f} times as long as one "
            f"(limit {VERIFY_LIMIT}), so speculation cannot pay; use dtype 'float32'"
        )


def _is_path(name: str) -> bool:
    several = hub.split(name)[0].count("/") > 1
    return name.startswith((".", "/", "~")) or os.sep * 2 in name or several or Path(name).exists()


def pick_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        where = torch.device(device)
    except RuntimeError:
        raise ValueError(f"unknown device {device!r}; use auto, cpu, cuda or cuda:0") from None
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"there is no device {device!r} here, {torch.cuda.device_count()} GPUs; use device 'auto'")
    return where


def pick_dtype(dtype: str, where: torch.device) -> torch.dtype:
    if dtype == "auto":
        return torch.bfloat16 if where.type == "cuda" else torch.float32
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; {suggest(dtype, ['auto', *DTYPES])}")
    return DTYPES[dtype]


def _bits(quantization: str | None) -> int | None:
    if quantization is None:
        return None
    if quantization not in BITS:
        raise ValueError(f"unknown quantization {quantization!r}; {suggest(quantization, list(BITS))}")
    if find_spec("bitsandbytes") is None or find_spec("accelerate") is None:
        raise ValueError(f"quantization {quantization!r} needs bitsandbytes; run: pip install bitsandbytes accelerate")
    return BITS[quantization]


def local_folder(name: str, report: LoadProgress = silent, pickled: Sequence[str] = ()) -> str:
    """A folder, an embedded name or a hub id -> the local folder with its config and weights, downloaded if need be.

    pickled: patterns of weights that will do where there are no safetensors; with them the folder is not checked.
    Raises ValueError with one line that names the cure.
    """
    folder = _folder(locate(name, pickled), report)
    return str(folder if pickled else _checked(folder, name))


def locate(name: str, pickled: Sequence[str] = ()) -> Path | hub.Repository:
    """The folder of a model, or what the hub holds under its name; nothing is downloaded. Raises ValueError."""
    path = resolve(name)
    folder = Path(path)
    if not name.strip():
        raise ValueError("name a model: a folder, a Hugging Face id or one that ships with the project")
    if folder.is_file():
        raise ValueError(f"{name} is a file; give the folder it is in")
    if folder.is_dir():
        return folder
    if _is_path(name):
        raise ValueError(f"there is no folder {name}")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?", path):
        raise ValueError(f"{name!r} is neither a folder nor a Hugging Face id (organisation/model, or with @revision)")
    if hub.offline():
        return hub.cached(path)
    found = hub.look(path, pickled)
    if not pickled and "config.json" not in found.files:
        raise ValueError(f"{name} has no config.json; it is not a transformers model")
    if not found.weights:
        raise ValueError(f"{name} holds no .safetensors weights; choose a model that does")
    return found


def _folder(source: Path | hub.Repository, report: LoadProgress) -> Path:
    if isinstance(source, Path):
        return source
    return hub.fetch(source, lambda share, what: report(0.05 + 0.5 * share, what))


def _described(name: str) -> Path:
    """The folder with the config and the tokenizer of a model."""
    source = locate(name)
    return source if isinstance(source, Path) else hub.describe(source)


def _checked(folder: Path, name: str) -> Path:
    if not (folder / "config.json").is_file():
        raise ValueError(f"{name} has no config.json; it is not a Hugging Face model folder")
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"{name} holds no .safetensors weights; convert it with model.save_pretrained(folder)")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        with _one_line(name):
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        absent = sorted(shard for shard in shards if not (folder / shard).is_file())
        if absent:
            raise ValueError(f"{name} lacks {absent[0]} of {len(shards)} files of weights; fetch it again")
    return folder


class Incomplete(ValueError):
    """The files lack tensors of the model that their config describes."""


def _check_weights(name: str, model: PreTrainedModel, missing: set[str]) -> None:
    """Raise Incomplete when a tensor is absent, ValueError when a sample of one holds what is no number."""
    if missing:
        first = min(missing)
        raise Incomplete(f"{name} lacks {len(missing)} tensors ({first} is the first); fetch the whole model again")
    for part, tensor in model.named_parameters():
        if tensor.is_floating_point() and tensor.device.type != "meta":
            flat = tensor.detach().flatten()
            if not torch.isfinite(flat[:: 1 + len(flat) // SAMPLED]).all():
                raise ValueError(f"{name} holds NaN or infinity in {part}; fetch it again, or take another revision")


@contextmanager
def _one_line(name: str) -> Iterator[None]:
    """Whatever the libraries raise while loading -> one ValueError line."""
    try:
        yield
    except Exception as error:
        raise ValueError(_explained(name, error)) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' own progress bars and reports: what matters in them is checked here."""
    log = transformers.utils.logging
    bars, verbosity = log.is_progress_bar_enabled(), log.get_verbosity()
    log.disable_progress_bar()
    log.set_verbosity_error()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()


def _explained(name: str, error: Exception) -> str:
    line = next((s for s in str(error).splitlines() if s.strip()), "")
    if "trust_remote_code" in str(error):
        return f"{name} needs code from its repository, which is never run here; choose a model transformers knows"
    if isinstance(error, SafetensorError):
        return f"a file of {name} is damaged or cut short ({line}); delete it and fetch it again"
    return line if line.startswith(name) else f"{name} cannot be loaded: {line or type(error).__name__}"


def check_memory(name: str, needed: int, where: torch.device, precision: Precision) -> bool:
    """True when the model has to be spread over several devices. Raises ValueError when it fits nowhere."""
    frees = free_bytes(where)
    if HEADROOM * needed <= frees[0]:
        return False
    if where.type == "cuda" and where.index is None and not precision.bits:
        frees = [*frees, free_ram()]  # bitsandbytes computes on one kind of device
    if HEADROOM * needed <= sum(frees):
        return True
    cure = "a smaller model" if precision.bits == 4 else "quantization 4bit or a smaller model"
    raise ValueError(
        f"{name} needs about {gigabytes(HEADROOM * needed)} in {precision}, this machine has {gigabytes(sum(frees))} "
        f"free on {where}; choose {cure}"
    )


def _placement(where: torch.device, precision: Precision, spread: bool) -> dict[str, Any]:
    placement: dict[str, Any] = {"device_map": "auto"} if spread else {}
    if precision.bits:
        placement.setdefault("device_map", {"": where if where.index is not None or where.type == "cpu" else 0})
        placement["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=precision.bits == 4,
            load_in_8bit=precision.bits == 8,
            # outliers are kept in 16 bits for all tokens of a pass where one has them, so what a token gives would
            # depend on those it is verified with
            llm_int8_threshold=0.0,
            bnb_4bit_compute_dtype=precision.dtype,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
        )
        # it says at every product of every layer that it casts what it multiplies
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    return placement


def _tokenizer(folder: str) -> PreTrainedTokenizerBase | None:
    """None when the folder has none: a drafter can do without."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    if not any((Path(folder) / name).is_file() for name in names):
        return None
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        folder, trust_remote_code=False, local_files_only=True
    )
    return tokenizer
