"""Choice between float32 and bfloat16 for a model on a CPU, measured on its own weights.

Processors without bf16 instructions read half the bytes for one token, but emulate products over several tokens, or do
them in float32 where memory allows a second copy (models/packed.py). So the faster dtype of plain decoding may be the
slower one of verification; dtype `auto` takes the faster plain decoding.
"""

from dataclasses import replace
from math import isinf
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from specdemo.models.cpu_threads import threads
from specdemo.models.memory import Precision
from specdemo.models.packed import PADDED_ROWS, SAMPLE_BYTES, WIDE_ROWS, layout_seconds, make_linear

MATRIX_BYTES = SAMPLE_BYTES // 4  # of a matrix in float32 that are measured
LEAST_SIZE = 64  # inputs and outputs of a matrix that is measured
DTYPES = torch.float32, torch.bfloat16
ROWS = 1, PADDED_ROWS, WIDE_ROWS


def faster_precision(folder: Path, precision: Precision, padded: bool) -> tuple[Precision, str]:
    """Return the precision in which plain decoding of a model is faster on this CPU, and a sentence that says why.

    padded: only packed products with PADDED_ROWS rows count, as `bit_exact` needs them, if this CPU has any.
    """
    matrices = _sample(folder)
    if not matrices:
        return precision, ""
    one, wide = {}, {}
    for dtype in DTYPES:
        with torch.no_grad(), threads(1):  # whose CPU time does not include other programs
            seconds = layout_seconds([make_linear(matrix.to(dtype), None) for matrix in matrices], ROWS)
        rows = {("packed", PADDED_ROWS)} if padded else {("plain", 1), ("packed", 1), ("packed", PADDED_ROWS)}
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
