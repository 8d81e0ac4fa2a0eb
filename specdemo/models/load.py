"""A name -> a loaded model. Safetensors only, never remote code, one clear ValueError line for whatever goes wrong.

A name is an embedded model ("stories"), a folder, or a Hugging Face id. Folders never touch the network; ids are
downloaded into the Hugging Face cache first (HF_HUB_OFFLINE=1 uses what is there).
"""

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from io import StringIO
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from huggingface_hub import HfApi, snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from specdemo.core.protocol import Target
from specdemo.core.tree import chain_parents
from specdemo.core.words import suggest
from specdemo.models.kernels import hasten
from specdemo.models.target import HFTarget

LoadProgress = Callable[[float, str], None]  # share done 0..1, what is being done


def silent(share: float, what: str) -> None:
    pass


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BITS = {"4bit": 4, "8bit": 8}
KERNELS = ("auto", "transformers")
FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")
STORED_BITS = {"I64": 64, "I32": 32, "I16": 16, "I8": 8, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8}
HEADROOM = 1.1  # memory besides the weights: activations and history
VERIFY_TOKENS = 5
VERIFY_LIMIT = 1.2  # times a one-token pass: above, speculation cannot pay


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


def embedded_folder() -> Path:
    """Where the shipped models are; SPECDEMO_MODELS overrules it."""
    return Path(os.environ.get("SPECDEMO_MODELS") or Path(__file__).parent / "embedded")


def embedded_names() -> list[str]:
    return sorted(config.parent.name for config in embedded_folder().glob("*/config.json"))


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

    dtype auto is float32 on a CPU and bfloat16 on a GPU. Raises ValueError with one line that names the cure.
    """
    if kernels not in KERNELS:
        raise ValueError(f"unknown kernels {kernels!r}; {suggest(kernels, KERNELS)}")
    report = progress or silent
    where = pick_device(device)
    if where.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # on small passes two threads gain little and collapse as soon as anything else runs
    bits = _bits(quantization, where)
    kind = pick_dtype(dtype, where)
    width = bits or 8 * kind.itemsize
    folder = _folder(name, report, lambda numbers: _check_memory(name, numbers * width // 8, where, kind, bits))
    report(0.6, f"reading {name}")
    spread = _check_memory(name, weight_bytes(folder, width), where, kind, bits)
    with _one_line(name), _quiet():
        tokenizer = _tokenizer(folder)
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=kind,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            **_placement(where, kind, bits, spread),
        )
    if not bits and not spread:
        nn.Module.to(model, where)
    model.requires_grad_(False)
    if kernels == "auto":
        hasten(model)
    if where.type == "cpu" and kind != torch.float32:
        _check_verify_cost(model, name, dtype)
    report(1.0, f"{name} is ready")
    return LoadedModel(model, tokenizer, name)


def weight_bytes(folder: str, bits: int) -> int:
    """Bytes the folder's weights take at `bits` per number, from the headers of its safetensors files alone.

    Numbers stored in fewer than 16 bits, or as integers, stay as they are. Raises ValueError for a damaged file.
    """
    total = 0
    for file in Path(folder).glob("*.safetensors"):
        try:
            with safe_open(file, "pt") as opened:
                tensors = [opened.get_slice(name) for name in opened.keys()]  # noqa: SIM118 - not a mapping
                total += sum(prod(t.get_shape()) * STORED_BITS.get(t.get_dtype(), bits) for t in tensors)
        except SafetensorError:
            raise ValueError(f"{file} is damaged; fetch it again") from None
    return total // 8


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


def _check_verify_cost(model: PreTrainedModel, name: str, dtype: str) -> None:
    one, several = verify_cost(HFTarget(model))
    ratio = several / one
    if ratio > VERIFY_LIMIT:
        raise ValueError(
            f"{name} in {dtype} on this CPU: checking {VERIFY_TOKENS} tokens takes {ratio:.2f} times as long as one "
            f"(limit {VERIFY_LIMIT}), so speculation cannot pay; use dtype 'float32'"
        )


def _is_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or os.sep * 2 in name or name.count("/") > 1 or Path(name).exists()


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


def _bits(quantization: str | None, where: torch.device) -> int | None:
    if quantization is None:
        return None
    if quantization not in BITS:
        raise ValueError(f"unknown quantization {quantization!r}; {suggest(quantization, list(BITS))}")
    if find_spec("bitsandbytes") is None:
        raise ValueError(f"quantization {quantization!r} needs bitsandbytes; run: pip install bitsandbytes")
    if where.type != "cuda":
        raise ValueError(f"quantization {quantization!r} needs a CUDA GPU; leave it out on {where.type}")
    return BITS[quantization]


def local_folder(name: str, report: LoadProgress = silent, extra: Sequence[str] = ()) -> str:
    """A folder, an embedded name or a hub id -> the local folder with its config and weights, downloaded if need be.

    extra: patterns of files wanted besides FILES. Raises ValueError with one line that names the cure.
    """
    return _folder(name, report, lambda numbers: None, tuple(extra))


def _folder(name: str, report: LoadProgress, fits: Callable[[int], object], extra: tuple[str, ...] = ()) -> str:
    """The local folder of a model, downloaded when it has to be; checked to hold a config and weights."""
    path = resolve(name)
    folder = Path(path)
    if folder.is_file():
        raise ValueError(f"{name} is a file; give the folder it is in")
    if folder.is_dir():
        return str(folder) if extra else _checked(folder, name)
    if _is_path(name):
        raise ValueError(f"there is no folder {name}")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path):
        raise ValueError(f"{name!r} is neither a folder nor a Hugging Face id (organisation/model)")
    found = Path(_download(path, report, fits, extra))
    return str(found) if extra else _checked(found, name)


def _checked(folder: Path, name: str) -> str:
    if not (folder / "config.json").is_file():
        raise ValueError(f"{name} has no config.json; it is not a Hugging Face model folder")
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"{name} holds no .safetensors weights; convert it with model.save_pretrained(folder)")
    return str(folder)


def _download(repository: str, report: LoadProgress, fits: Callable[[int], object], extra: tuple[str, ...] = ()) -> str:
    """Fetch the files that are needed, and no others, into the Hugging Face cache; not what will not fit."""
    report(0.0, f"looking for {repository}")
    with _one_line(repository):
        if not _offline() and not extra:
            fits(_count(repository))
        bar = _bar(report, f"downloading {repository}")
        patterns = [*FILES, *extra]
        return snapshot_download(repository, allow_patterns=patterns, local_files_only=_offline(), tqdm_class=bar)


def _bar(report: LoadProgress, what: str) -> type[Any]:
    """The downloader's progress bars, sent to `report` instead of the terminal."""

    class Bar(tqdm):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **kwargs | {"file": StringIO()})

        def update(self, n: float | None = 1) -> bool | None:
            shown: bool | None = super().update(n)
            if self.unit == "B" and self.total:
                report(0.05 + 0.5 * min(self.n / self.total, 1.0), what)
            return shown

    report(0.05, what)
    return Bar


def _offline() -> bool:
    from huggingface_hub.constants import HF_HUB_OFFLINE

    return bool(HF_HUB_OFFLINE)


def _count(repository: str) -> int:
    """How many numbers the weights are, 0 when the hub does not know. Raises ValueError for an unusable format."""
    info = HfApi().model_info(repository)
    files = [f.rfilename for f in info.siblings or []]
    if "config.json" not in files:
        raise ValueError(f"{repository} has no config.json; it is not a transformers model")
    if not any(f.endswith(".safetensors") for f in files):
        raise ValueError(f"{repository} holds no .safetensors weights; choose a model that does")
    return info.safetensors.total if info.safetensors else 0


@contextmanager
def _one_line(name: str) -> Iterator[None]:
    """Whatever the libraries raise while loading -> one ValueError line."""
    try:
        yield
    except Exception as error:  # the hub client raises its transport's own errors, which share no base with OSError
        raise ValueError(_explained(name, error)) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' own progress bars."""
    bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if bars:
            transformers.utils.logging.enable_progress_bar()


def _explained(name: str, error: Exception) -> str:
    kind, line = type(error).__name__, next((s for s in str(error).splitlines() if s.strip()), "")
    if kind in ("RepositoryNotFoundError", "HFValidationError"):
        return f"unknown model {name!r}; {suggest(name, embedded_names())}, or give a folder or a Hugging Face id"
    if kind == "GatedRepoError":
        return f"{name} is gated; accept its licence on huggingface.co and log in with: hf auth login"
    if kind in ("LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError", "ConnectionError", "ConnectTimeout"):
        return f"{name!r} is not here and huggingface.co cannot be reached; {suggest(name, embedded_names())}"
    if "trust_remote_code" in str(error):
        return f"{name} needs code from its repository, which is never run here; choose a model transformers knows"
    return line if line.startswith(name) else f"{name} cannot be loaded: {line or kind}"


def _check_memory(name: str, needed: int, where: torch.device, kind: torch.dtype, bits: int | None) -> bool:
    """True when the model has to be spread over several GPUs. Raises ValueError when it fits nowhere."""
    frees = free_bytes(where)
    if HEADROOM * needed <= frees[0]:
        return False
    if HEADROOM * needed <= sum(frees):
        return True
    precision = f"{bits} bits" if bits else str(kind).removeprefix("torch.")
    cure = "choose a smaller model" if bits or where.type == "cpu" else "choose a smaller model or quantization '4bit'"
    raise ValueError(
        f"{name} needs {HEADROOM * needed / 1e9:.1f} GB in {precision}, "
        f"{sum(frees) / 1e9:.1f} GB are free on {where}; {cure}"
    )


def free_bytes(where: torch.device) -> list[int]:
    """Free memory of the device, first, and of the other GPUs it may be spread over."""
    if where.type == "cuda":
        devices = range(torch.cuda.device_count()) if where.index is None else [where.index]
        return [torch.cuda.mem_get_info(i)[0] for i in devices]
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return [pages]
    available = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), pages)
    return [available]


def _placement(where: torch.device, kind: torch.dtype, bits: int | None, spread: bool) -> dict[str, Any]:
    placement: dict[str, Any] = {"device_map": "auto"} if spread else {}
    if bits:
        placement.setdefault("device_map", {"": where.index or 0})
        placement["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=bits == 4, load_in_8bit=bits == 8, bnb_4bit_compute_dtype=kind, bnb_4bit_quant_type="nf4"
        )
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
