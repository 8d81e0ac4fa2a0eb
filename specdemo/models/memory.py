"""Placement, precision and memory of models before they are loaded or downloaded, and the free memory.

Weights are counted from the headers of safetensors files or from the hub's metadata; keys and values from the config.
Both leave out overheads; compare them with free memory divided by `costs.shapes.HEADROOM`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from specdemo.core.safe_io import TOO_LARGE
from specdemo.core.suggest import suggest
from specdemo.costs.shapes import (
    HEADROOM,
    QUANTIZED_BITS,
    Config,
    ConfigReader,
    Footprint,
    language_part,
    reference_configs,
)
from specdemo.models.devices import DEVICE_KINDS, best_device, device_kind, pick_device, pick_dtype, same_kind
from specdemo.models.gguf_files import is_here, local_header, stored_bytes
from specdemo.models.llamacpp import CACHE_BYTES, LlamaCppSettings, cache_type_of, library
from specdemo.models.ref import ModelRef
from specdemo.models.sources import (
    PICKLED,
    LoadProgress,
    Repository,
    fetch_config,
    locate,
    no_progress,
    read_config,
    size_text,
)

STORED_BITS = {"I64": 64, "I32": 32, "I16": 16, "I8": 8, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F4": 4}
# parts of names of matrices that bitsandbytes does not quantise
UNQUANTISED = ("embed", "lm_head", "wte", "wpe", "experts")
BITS = {"4bit": 4, "8bit": 8}
ABSENT = 1.5  # config weights / stored weights; above it the files lack tensors, like those of heads
NUMBERS_PER_ENTRY = 8  # 4-bit weights per stored entry
SHORT_CONTEXT = 256  # tokens; a shorter context is no advice
STATE_BYTES = 4  # of a number in a recurrent state
OUTPUTS = 256  # rows of logits that llama.cpp allocates per context, one for each sequence


@dataclass(frozen=True, slots=True)
class Precision:
    """Precision of weights: `dtype`, and `bits` for quantised matrices."""

    dtype: torch.dtype
    bits: int | None = None

    @property
    def width(self) -> int:
        """Return the bits per number of this dtype."""
        return 8 * self.dtype.itemsize

    @property
    def matrix_width(self) -> float:
        """Return the bits per number of matrices that bitsandbytes can quantise."""
        return QUANTIZED_BITS[f"{self.bits}bit"] if self.bits else self.width

    def __str__(self) -> str:
        return f"{self.bits} bits" if self.bits else str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Needs:
    """Memory of a target and its drafters in bytes.

    tokens: expected length of a lane. lanes: number of KV caches of the target; each drafter has one.
    """

    name: str
    target: Footprint
    drafters: Sequence[Footprint]
    tokens: int
    lanes: int

    @property
    def weights(self) -> int:
        """Return the size of all weights."""
        return self.target.weights + sum(drafter.weights for drafter in self.drafters)

    @property
    def per_token(self) -> int:
        """Return the size of one token in all caches."""
        return self.lanes * self.target.per_token + sum(drafter.per_token for drafter in self.drafters)

    @property
    def states(self) -> int:
        """Return the size of the recurrent states of all contexts."""
        return self.lanes * self.target.state + sum(drafter.state for drafter in self.drafters)

    @property
    def bytes(self) -> int:
        """Return the size of weights, caches, states and buffers."""
        return self.target.bytes(self.tokens, self.lanes) + self.of_drafters

    @property
    def of_drafters(self) -> int:
        """Return the size of the drafters with their caches, states and buffers."""
        return sum(drafter.bytes(self.tokens) for drafter in self.drafters)

    @property
    def buffers(self) -> int:
        """Return the size of states and buffers, which do not grow with the text."""
        return self.bytes - self.weights - self.tokens * self.per_token

    def fits(self, free: int) -> bool:
        """Return whether so many free bytes are enough."""
        return HEADROOM * (self.weights + self.tokens * self.per_token) + self.buffers <= free

    def check_llamacpp(self, free: int) -> None:
        """Raise ValueError if they do not fit, with a context that fits or the advice to choose smaller weights."""
        if self.fits(free):
            return
        weights, cache = HEADROOM * self.weights, HEADROOM * self.tokens * self.per_token
        context = int((free - weights - self.buffers) / HEADROOM / max(self.per_token, 1))
        fix = f"at most {context:,} tokens of prompt and output, or " if context >= SHORT_CONTEXT else ""
        other = size_text(cache + self.buffers)
        raise ValueError(
            f"{self.name} needs {size_text(weights)} for weights and {other} for the KV cache and buffers, this "
            f"machine has {size_text(free)} free; choose {fix}a smaller quantisation such as Q4_K_M"
        )

    def describe(self) -> str:
        """Return what each part needs, and the context that the drafters displace."""
        parts = {
            "target": self.target.weights,
            "drafter": self.weights - self.target.weights,
            f"KV cache of {self.tokens:,} tokens": self.tokens * self.per_token,
            "recurrent state": self.states,
            "buffers": self.buffers - self.states,
        }
        words = ", ".join(f"{part} {size_text(size)}" for part, size in parts.items() if size)
        lost = self.of_drafters // self.target.per_token if self.target.per_token else 0
        return f"{words}; the drafter takes the memory of {lost:,} tokens of context" if lost else words

    def verdict(self, free: int) -> str:
        """Return what each part needs, and whether so many free bytes are enough; a model without weights, whose name
        states no size, leaves that open."""
        fits, has_sizes = self.fits(free), all(size.weights for size in (self.target, *self.drafters))
        whether = ("fits" if has_sizes else "may fit") if fits else "does not fit"
        unknown = "" if has_sizes else "the size of a model is unknown until it is downloaded"
        parts = (self.describe(), unknown, f"{whether} into the free {size_text(free)}")
        return "; ".join(filter(None, parts))


def resolve_placement(
    dtype: str = "auto", device: str = "auto", quantization: str | None = None
) -> tuple[torch.device, Precision]:
    """Return device and precision. Raises ValueError with one line for a choice that is not available."""
    torch_device = pick_device(device)
    return torch_device, Precision(pick_dtype(dtype, torch_device), _quantized_bits(quantization, torch_device))


def _quantized_bits(quantization: str | None, device: torch.device) -> int | None:
    if quantization is None:
        return None
    if quantization not in BITS:
        raise ValueError(f"unknown quantization {quantization!r}; {suggest(quantization, list(BITS))}")
    if find_spec("bitsandbytes") is None or find_spec("accelerate") is None:
        raise ValueError(f"quantization {quantization!r} needs bitsandbytes; run: pip install bitsandbytes accelerate")
    if not device_kind(device).quantised:
        raise ValueError(f"bitsandbytes has no kernels for {device}; omit quantization {quantization!r}")
    return BITS[quantization]


def footprint(
    name: ModelRef, precision: Precision, settings: LlamaCppSettings, progress: LoadProgress | None
) -> Footprint:
    """Return the memory of a model. progress None: does not ask the hub, and returns about the memory, by its name, of
    a model that is not on this machine. Raises ValueError, one line."""
    if progress is None and not is_here(name):
        return _expected_footprint(name, precision)
    if name.gguf:
        return gguf_footprint(name, settings)
    return estimate_footprint(locate(name, PICKLED, progress or no_progress), precision)


def estimate_footprint(source: Path | Repository, precision: Precision) -> Footprint:
    """Estimate the memory of a model. Raises ValueError for a damaged file or an unreachable repository."""
    folder = fetch_config(source) if isinstance(source, Repository) else source
    stored = read_config(folder)
    _check_stored(str(source.name), stored)
    config = language_part(stored)
    try:
        per_token, state = _per_token(config, precision)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ValueError(f"the config.json of {folder} is damaged ({error}); fetch it again") from None
    if isinstance(source, Repository):
        return Footprint(_from_hub_metadata(source, precision, config), per_token, state=state)
    return Footprint(weight_bytes(folder, precision), per_token, state=state)


def _expected_footprint(name: ModelRef, precision: Precision) -> Footprint:
    """Return about the memory of a model by its name, without the hub. Its cache counts if its config is known."""
    config, stored = reference_configs().get(name.repository, {}), 1.0 if name.gguf else precision.width / 16.0
    return Footprint(int(stored * name.estimated_bytes[0]), _per_token(config, precision)[0])


def _check_stored(name: str, config: Config) -> None:
    """Raise ValueError if transformers would silently load 4-bit weights in 16 bits."""
    stored = config.get("quantization_config")
    missing = [package for package in ("kernels", "triton") if find_spec(package) is None]
    if isinstance(stored, dict) and stored.get("quant_method") == "mxfp4" and missing:
        raise ValueError(f"{name} is stored in MXFP4, which needs other packages; run: pip install {' '.join(missing)}")


def check_config_size(name: str, folder: Path, model: PreTrainedModel) -> None:
    """Raise ValueError if a config describes more numbers than the files hold. model: on the meta device."""
    files = list(folder.glob("*.safetensors"))
    stored = sum(prod(shape) for _, shape, _ in headers(files))
    trained = sum(parameter.numel() for parameter in model.parameters())
    expected = trained + sum(buffer.numel() for buffer in model.buffers())
    quantized = getattr(model.config, "quantization_config", None)
    if files and (expected > NUMBERS_PER_ENTRY * stored or (trained > ABSENT * stored and not quantized)):
        raise ValueError(
            f"the config of {name} describes {expected:,} weights, its files contain {stored:,}; fetch it again"
        )


def weight_bytes(folder: Path, precision: Precision) -> int:
    """Return the size of a folder's safetensors, or of its other weight files. Raises ValueError for a damaged file."""
    files = list(folder.glob("*.safetensors"))
    if not files:
        return sum(f.stat().st_size for kind in PICKLED for f in folder.glob(kind))
    bits = sum(prod(shape) * _bits(name, len(shape), stored, precision) for name, shape, stored in headers(files))
    return int(bits) // 8


def headers(files: list[Path]) -> Iterator[tuple[str, list[int], str]]:
    """Yield name, shape and stored dtype of every tensor. Raises ValueError for a damaged file."""
    for file in files:
        try:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    tensor = opened.get_slice(name)
                    yield name, tensor.get_shape(), tensor.get_dtype()
        except (SafetensorError, OSError):
            raise ValueError(f"{file} is damaged or cut short; delete it and fetch it again") from None
        except (MemoryError, RuntimeError):  # the entire file is mapped
            raise ValueError(f"{file} {TOO_LARGE}") from None


def free_bytes(device: torch.device) -> list[int]:
    """Return the free memory of the device, then of other devices of its kind that a model may be spread over."""
    return [*map(device_kind(device).free, same_kind(device))]


def check_memory(name: str, needed: int, device: torch.device, precision: Precision) -> bool:
    """Return True if the model must be spread over several devices. Raises ValueError if it does not fit."""
    free = free_bytes(device)
    if HEADROOM * needed <= free[0]:
        return False
    if device_kind(device).separate_memory and device.index is None and not precision.bits:
        free = [*free, DEVICE_KINDS["cpu"].free(device)]  # bitsandbytes computes on one kind of device
    if HEADROOM * needed <= sum(free):
        return True
    hint = "a smaller model" if precision.bits == 4 else "quantization 4bit or a smaller model"
    raise ValueError(
        f"{name} needs about {size_text(HEADROOM * needed)} in {precision}, this machine has {size_text(sum(free))} "
        f"free on {device}; choose {hint}"
    )


def _bits(name: str, dimensions: int, stored: str, precision: Precision) -> float:
    """Return the bits per number after loading. Integers and numbers below 16 bits stay as stored."""
    if stored in STORED_BITS:
        return STORED_BITS[stored]
    matrix = dimensions == 2 and not any(part in name for part in UNQUANTISED)
    return precision.matrix_width if matrix else precision.width


def _from_hub_metadata(repository: Repository, precision: Precision, config: Config) -> int:
    """Return the weight size from the hub's metadata, or the size of the files."""
    if not repository.numbers:
        return sum(repository.files[file] for file in repository.weights)
    unquantised = 0
    if precision.bits:
        tables = 1 if config.get("tie_word_embeddings") else 2
        unquantised = tables * int(config.get("vocab_size", 0)) * int(config.get("hidden_size", 0))
    bits = sum(count * STORED_BITS.get(stored, precision.matrix_width) for stored, count in repository.numbers.items())
    return int(bits + unquantised * (precision.width - precision.matrix_width)) // 8


def _per_token(config: Config, precision: Precision) -> tuple[int, int]:
    """Return the bytes of keys and values per token, and of recurrent states; zeros for a config without such sizes, as
    some heads have."""
    try:
        sizes = ConfigReader(config)
    except KeyError:
        return 0, 0
    states = sum(part.layers * part.state for part in sizes.memory()) * STATE_BYTES
    return sizes.attention_layers * sizes.kv_numbers * precision.dtype.itemsize, states


def gguf_footprint(name: ModelRef, settings: LlamaCppSettings) -> Footprint:
    """Return the memory of a model's weights, of its KV cache per token and of its buffers: 0 before the download.

    Raises ValueError for another kind of file.
    """
    header = local_header(name)
    if header is None:
        return Footprint(stored_bytes(name), 0)
    if header.architecture in ("eagle3", "dflash"):  # runs in PyTorch, in fp32
        return Footprint(4 * header.weights, 0)
    per_token = header.cache_bytes(CACHE_BYTES[cache_type_of(header, settings.cache_type)])
    return Footprint(stored_bytes(name), per_token, OUTPUTS * header.tokens * 4, header.lane_bytes)


def free_memory() -> int:
    """Return the free memory that llama.cpp can use: main memory, and that of GPUs if it was built for them."""
    gpu = best_device()
    separate = device_kind(gpu).separate_memory and library().llama_supports_gpu_offload()
    return DEVICE_KINDS["cpu"].free(torch.device("cpu")) + (sum(free_bytes(gpu)) if separate else 0)
