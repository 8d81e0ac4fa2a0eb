"""Precision of a model at dtype `auto`: bfloat16 on a GPU. On a CPU float32, and for a model in bfloat16 what fits into
the free memory, then the faster one, measured on its own weights.

Processors without bf16 instructions emulate products, or do them in float32, with weights in float16 or where memory
allows a second copy (models/packed.py). The faster dtype of plain decoding may be the slower one of verification; dtype
`auto` takes the faster plain decoding.
"""

from dataclasses import replace
from math import isinf
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from specdemo.costs.shapes import HEADROOM
from specdemo.models.cpu_threads import threads
from specdemo.models.gguf_files import is_here
from specdemo.models.memory import Precision, estimate_footprint, resolve_placement
from specdemo.models.packed import PADDED_ROWS, SAMPLE_BYTES, WIDE_ROWS, layout_seconds, make_linear, possible_forms
from specdemo.models.ref import ModelRef
from specdemo.models.sources import PICKLED, LoadProgress, Repository, fetch_config, locate, no_progress, read_config

MATRIX_BYTES = SAMPLE_BYTES // 4  # of a matrix in float32 that are measured
LEAST_SIZE = 64  # inputs and outputs of a matrix that is measured
DTYPES = torch.float32, torch.bfloat16
ROWS = 1, PADDED_ROWS, WIDE_ROWS


def placement(
    name: ModelRef, dtype: str, device: str, quantization: str | None, free: int, progress: LoadProgress | None
) -> tuple[torch.device, Precision]:
    """Return the device and the precision of a target, as `load_model` chooses it with so many free bytes. progress
    None: does not ask the hub. Raises ValueError, one line."""
    torch_device, precision = resolve_placement(dtype, device, quantization)
    if dtype == "auto" and not name.gguf and (progress or is_here(name)):
        precision = fitting_precision(locate(name, PICKLED, progress or no_progress), precision, free)
    return torch_device, precision


def fitting_precision(source: Path | Repository, precision: Precision, free: int) -> Precision:
    """Return bfloat16 for a model that may be in it and does not fit into the free bytes in float32; else the
    precision."""
    if not _may_be_half(source, precision) or HEADROOM * estimate_footprint(source, precision).weights <= free:
        return precision
    return replace(precision, dtype=torch.bfloat16)


def stored_dtype(source: Path | Repository) -> torch.dtype | None:
    """Return the dtype that the config of a model states; None if it states none."""
    config = read_config(fetch_config(source) if isinstance(source, Repository) else source)
    parts = (config.get("text_config") or {}, config)  # multimodal models may state it for all their parts at once
    name = next((str(dtype) for part in parts for key in ("dtype", "torch_dtype") if (dtype := part.get(key))), "")
    return getattr(torch, name.removeprefix("torch."), None) if name else None


def _may_be_half(source: Path | Repository, precision: Precision) -> bool:
    """Return True for a model that is stored in bfloat16, where dtype auto is float32 so far."""
    return precision.dtype == torch.float32 and not precision.bits and stored_dtype(source) == torch.bfloat16


def is_measured(source: Path | Repository, precision: Precision, weights: int) -> bool:
    """Return whether `faster_precision` decides: not for a model that fits into a cache, where its measurement does not
    apply."""
    return weights > SAMPLE_BYTES and _may_be_half(source, precision)


def faster_precision(folder: Path, precision: Precision, padded: bool) -> tuple[Precision, str]:
    """Return the precision in which plain decoding of a model is faster on this CPU, and a sentence that says why.

    padded: only packed products with PADDED_ROWS rows count, as `bit_exact` needs them, if this CPU has any.
    """
    matrices = _sample(folder)
    if not matrices:
        return precision, ""
    one, wide = {}, {}
    for dtype in DTYPES:
        linears = [make_linear(matrix.to(dtype), None) for matrix in matrices]
        forms = possible_forms(linears)
        with torch.no_grad(), threads(1):  # whose CPU time does not include other programs
            seconds = layout_seconds(linears, ROWS, forms)
        rows = {("packed", PADDED_ROWS)}
        if not padded:
            rows |= {("plain", 1), *((form, 1) for form in forms)}
        one[dtype] = min((seconds[key] for key in rows if key in seconds), default=float("inf"))
        wide[dtype] = min(s for (_, count), s in seconds.items() if count == WIDE_ROWS)
    fast, slow = sorted(DTYPES, key=one.__getitem__)
    names = [str(dtype).removeprefix("torch.") for dtype in (fast, slow)]
    if isinf(one[slow]):
        return faster_precision(folder, precision, padded=False)
    why = (
        f"dtype auto is {names[0]}: on this CPU its matrix products for one token take about "
        f"{one[fast] / one[slow]:.1f} of the time in {names[1]}, for {WIDE_ROWS} tokens {wide[fast] / wide[slow]:.1f}"
    )
    return replace(precision, dtype=fast), why


def _sample(folder: Path) -> list[Tensor]:
    """Return the first matrices of the layers in the files of a model, in float32, that together exceed a cache."""
    matrices: list[Tensor] = []
    size = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                stored = opened.get_slice(name)
                shape = stored.get_shape()
                if len(shape) != 2 or min(shape) < LEAST_SIZE or "embed" in name:
                    continue
                # a part of a large head, whose name may be the first, so that layers are measured too
                matrices.append(stored[: max(LEAST_SIZE, MATRIX_BYTES // (4 * shape[1]))].float())
                size += matrices[-1].nbytes
                if size > SAMPLE_BYTES:
                    return matrices
    return matrices
