"""What a model will take, before it is loaded or even downloaded, and what there is to take it from.

Weights are counted from the headers of safetensors files, or from what the hub says of them; keys and values from the
config. Both leave out what a library adds on top, so compare them with `HEADROOM`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from specdemo.core.reading import read_json
from specdemo.models.devices import KINDS, kind
from specdemo.models.hub import Repository, describe

HEADROOM = 1.1  # times: activations, buffers, what the allocator cannot reuse
STORED_BITS = {"I64": 64, "I32": 32, "I16": 16, "I8": 8, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F4": 4}
WHOLE = ("embed", "lm_head", "wte", "wpe", "experts")  # parts of names that bitsandbytes leaves in 16 bits
PACKED = 8  # numbers of 4 bits in one of those that a file counts
LARGEST = 1 << 24
LARGEST_TREE = 1 << 12
WIDTHS = "top_k_tokens_per_head"
MOST = {  # that a config may say, several times what any public model does
    **dict.fromkeys("num_hidden_layers n_layer n_layers num_layers n_predict n_future_tokens".split(), 512),
    **dict.fromkeys("num_nextn_predict_layers num_heads num_medusa_layers num_layers".split(), 512),
    **dict.fromkeys("medusa_num_heads medusa_num_layers hydra_num_heads hydra_num_layers block_size".split(), 512),
    **dict.fromkeys("num_attention_heads num_key_value_heads n_head n_heads n_kv_heads".split(), 4096),
    **dict.fromkeys("num_experts num_local_experts n_routed_experts num_experts_per_tok".split(), 4096),
    **dict.fromkeys("dim n_embd n_inner d_model n_positions n_ctx sliding_window selector_top_k".split(), LARGEST),
    "max_position_embeddings": LARGEST,
    "mscale_all_dim": 0,  # of YaRN: no size, any number
    WIDTHS: LARGEST_TREE,
}
SIZES = ("_size", "_dim")
NESTED = ("text_config", "transformer_layer_config", "eagle_config", "dflash_config", "speculators_config")
SCALES = {4: 4.13, 8: 8.03}  # bits of one number and its share of the scales (4: doubly quantised)


@dataclass(frozen=True, slots=True)
class Precision:
    """What weights are held in: `dtype`, but for the matrices that are quantised to `bits`."""

    dtype: torch.dtype
    bits: int | None = None

    @property
    def width(self) -> int:
        """Bits a number of this type takes."""
        return 8 * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.bits} bits" if self.bits else str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes."""

    weights: int
    per_token: int  # keys and values that one token of one lane adds

    def of(self, tokens: int) -> int:
        """With a history of so many tokens, all lanes together."""
        return self.weights + self.per_token * tokens


def measure(source: Path | Repository, precision: Precision) -> Footprint:
    """Raises ValueError for a damaged file, and for a repository that is out of reach."""
    folder = describe(source) if isinstance(source, Repository) else source
    config = read_config(folder)
    _check_stored(str(source.name), config)
    config = config.get("text_config") or config.get("transformer_layer_config") or config
    weights = (
        _announced(source, precision, config) if isinstance(source, Repository) else weight_bytes(folder, precision)
    )
    try:
        return Footprint(weights, _per_token(config, precision))
    except (TypeError, ArithmeticError) as error:
        raise ValueError(f"the config.json of {folder} is damaged ({error}); fetch it again") from None


def _check_stored(name: str, config: Mapping[str, Any]) -> None:
    """Raise ValueError where transformers would quietly hold in 16 bits what is stored, and counted, in 4."""
    stored = config.get("quantization_config")
    wanting = [package for package in ("kernels", "triton") if find_spec(package) is None]
    if isinstance(stored, dict) and stored.get("quant_method") == "mxfp4" and wanting:
        raise ValueError(f"{name} is stored in MXFP4, which needs other packages; run: pip install {' '.join(wanting)}")


def read_config(folder: Path, *names: str) -> dict[str, Any]:
    """config.json, or the first file of these names; empty without one. Raises ValueError when it is no JSON object or
    names a size that no model has."""
    described = next((path for path in map(folder.joinpath, names or ("config.json",)) if path.is_file()), None)
    config = read_json(described) if described else {}
    problem = next(_oversized(config), None)
    if problem:
        raise ValueError(f"{described}: {problem}; fetch it again or choose another model")
    return config


def _oversized(config: Mapping[str, object]) -> Iterator[str]:
    """What no module can be made of, or none in any time or memory."""
    for key, value in config.items():
        limit = MOST.get(key, LARGEST if key.endswith(SIZES) else 0)
        for number in value if isinstance(value, list) else [value]:
            if (limit and isinstance(number, float | str)) or (isinstance(number, int) and number > limit > 0):
                yield f"{key} must be a whole number of {limit:,} at most, not {number!r:.40}"
        if key in NESTED and not isinstance(value, dict | None):
            yield f"{key} must be an object"
        if key == WIDTHS and isinstance(value, list) and prod(value) > LARGEST_TREE:
            yield f"{key} is a tree of more than {LARGEST_TREE:,} paths"
        yield from _oversized(value) if isinstance(value, dict) else ()


def check_described(name: str, folder: Path, model: nn.Module) -> None:
    """Raise ValueError when a model, made from its config on the meta device, is more than its files could hold."""
    files = list(folder.glob("*.safetensors"))
    held = sum(prod(shape) for _, shape, _ in headers(files))
    described = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    if files and described > PACKED * held:
        raise ValueError(f"{name} describes {described:,} numbers and its files hold {held:,}; fetch it again")


def weight_bytes(folder: Path, precision: Precision) -> int:
    """Of a folder's safetensors, or else of whatever files of weights it has. Raises ValueError for a damaged one."""
    files = list(folder.glob("*.safetensors"))
    if not files:
        return sum(f.stat().st_size for kind in ("*.pt", "*.bin", "*.pth") for f in folder.glob(kind))
    bits = sum(prod(shape) * _bits(name, len(shape), stored, precision) for name, shape, stored in headers(files))
    return int(bits) // 8


TOO_LARGE = "does not fit into the memory that this process may have; choose a smaller model"


def headers(files: list[Path]) -> Iterator[tuple[str, list[int], str]]:
    """Name, shape and stored precision of every tensor. Raises ValueError for a damaged file."""
    for file in files:
        try:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    tensor = opened.get_slice(name)
                    yield name, tensor.get_shape(), tensor.get_dtype()
        except (SafetensorError, OSError):
            raise ValueError(f"{file} is damaged or cut short; delete it and fetch it again") from None
        except (MemoryError, RuntimeError):  # it is mapped whole
            raise ValueError(f"{file} {TOO_LARGE}") from None


def free_bytes(where: torch.device) -> list[int]:
    """Free memory of the device, first, and of the others of its kind that a model may be spread over."""
    row = kind(where)
    if not row.apart:
        return [row.free(where)]
    every = range(row.count()) if where.index is None else [where.index]
    return [row.free(torch.device(where.type, index)) for index in every]


def free_ram() -> int:
    """Bytes that can be had without swapping."""
    return KINDS["cpu"].free(torch.device("cpu"))


def gigabytes(count: float) -> str:
    """Bytes for people, in GB of 10^9."""
    return f"{count / 1e9:.1f} GB"


def _bits(name: str, dimensions: int, stored: str, precision: Precision) -> float:
    """Numbers stored in fewer than 16 bits, or as integers, stay as they are."""
    if stored in STORED_BITS:
        return STORED_BITS[stored]
    if precision.bits is None or dimensions != 2 or any(part in name for part in WHOLE):
        return precision.width
    return SCALES[precision.bits]


def _announced(found: Repository, precision: Precision, config: Mapping[str, Any]) -> int:
    """What the hub says there is; where it does not know, the size of the files."""
    if not found.numbers:
        return sum(found.files[file] for file in found.weights)
    whole = 0  # numbers that are not quantised
    if precision.bits:
        tables = 1 if config.get("tie_word_embeddings") else 2
        whole = tables * int(config.get("vocab_size", 0)) * int(config.get("hidden_size", 0))
    per_number = SCALES[precision.bits] if precision.bits else precision.width
    bits = sum(count * STORED_BITS.get(stored, per_number) for stored, count in found.numbers.items())
    return int(bits + whole * (precision.width - per_number)) // 8


def _per_token(config: Mapping[str, Any], precision: Precision) -> int:
    """Keys and values of every layer of attention."""
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if not heads or not hidden:
        return 0
    kinds = config.get("layer_types") or ["attention"] * int(config.get("num_hidden_layers") or 0)
    layers = sum("attention" in kind and "linear" not in kind for kind in kinds)
    head_dim = config.get("head_dim") or hidden // heads
    return int(2 * layers * (config.get("num_key_value_heads") or heads) * head_dim * precision.dtype.itemsize)
