"""Choice of devices and precision for a model, limited by the free memory."""

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import groupby

import torch
import transformers
from transformers import PreTrainedModel

from specdemo.core.dtypes import SHORT, dtype_name
from specdemo.core.suggest import DEVICES, suggest
from specdemo.models.devices import KINDS, best, kind
from specdemo.models.footprint import HEADROOM, Precision, free_bytes, gigabytes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BITS = {"4bit": 4, "8bit": 8}


def plan(dtype: str = "auto", device: str = "auto", quantization: str | None = None) -> tuple[torch.device, Precision]:
    """Return device and precision. Raises ValueError with one line for a choice that is not available."""
    where = pick_device(device)
    return where, Precision(pick_dtype(dtype, where), _bits(quantization, where))


def pick_device(device: str) -> torch.device:
    """Return the device of a name or `auto`. Raises ValueError, one line, if it is not available."""
    if device == "auto":
        return best()
    try:
        where = torch.device(device)
    except RuntimeError:
        raise ValueError(f"unknown device {device!r}; use {DEVICES}") from None
    if where.type not in KINDS:
        raise ValueError(f"nothing runs on device {device!r}; use {DEVICES}")
    if (where.index or 0) >= KINDS[where.type].count():
        raise ValueError(f"there is no device {device!r} here; use device 'auto'")
    return where


def pick_dtype(dtype: str, where: torch.device) -> torch.dtype:
    """Return the dtype of a name, a short name or `auto`. Raise ValueError for an unknown one."""
    if dtype == "auto":
        return DTYPES[kind(where).dtypes[0]]
    name = dtype_name(dtype)
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; {suggest(dtype, ['auto', *DTYPES, *SHORT])}")
    return DTYPES[name]


def _bits(quantization: str | None, where: torch.device) -> int | None:
    if quantization is None:
        return None
    if quantization not in BITS:
        raise ValueError(f"unknown quantization {quantization!r}; {suggest(quantization, list(BITS))}")
    if find_spec("bitsandbytes") is None or find_spec("accelerate") is None:
        raise ValueError(f"quantization {quantization!r} needs bitsandbytes; run: pip install bitsandbytes accelerate")
    if not kind(where).quantised:
        raise ValueError(f"bitsandbytes has no kernels for {where.type}; leave quantization {quantization!r} out")
    return BITS[quantization]


def check_memory(name: str, needed: int, where: torch.device, precision: Precision) -> bool:
    """Return True if the model must be spread over several devices. Raises ValueError if it does not fit."""
    frees = free_bytes(where)
    if HEADROOM * needed <= frees[0]:
        return False
    if kind(where).apart and where.index is None and not precision.bits:
        frees = [*frees, KINDS["cpu"].free(where)]  # bitsandbytes computes on one kind of device
    if HEADROOM * needed <= sum(frees):
        return True
    cure = "a smaller model" if precision.bits == 4 else "quantization 4bit or a smaller model"
    raise ValueError(
        f"{name} needs about {gigabytes(HEADROOM * needed)} in {precision}, this machine has {gigabytes(sum(frees))} "
        f"free on {where}; choose {cure}"
    )


def placement(where: torch.device, precision: Precision, spread: bool) -> dict[str, object]:
    """Return the arguments of transformers' `from_pretrained` for devices and bitsandbytes."""
    placement: dict[str, object] = {"device_map": "auto"} if spread else {}
    if precision.bits:
        placement.setdefault("device_map", {"": where if where.index is not None or where.type == "cpu" else 0})
        placement["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=precision.bits == 4,
            load_in_8bit=precision.bits == 8,
            # above 0, outlier columns run in 16 bits for all tokens of a pass, so that the logits of a token would
            # depend on the tokens it is verified with
            llm_int8_threshold=0.0,
            bnb_4bit_compute_dtype=precision.dtype,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
        )
        # bitsandbytes logs a cast at every product of every layer
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    return placement


def placed(model: PreTrainedModel) -> str:
    """Return which parts are on which device, if there are several: `cuda:0: embed_tokens, layers 0-20; cpu:
    lm_head`."""
    devices: dict[str, list[str]] = {}
    for part, device in getattr(model, "hf_device_map", {}).items():
        devices.setdefault(f"cuda:{device}" if isinstance(device, int) else str(device), []).append(part)
    return "; ".join(f"{device}: {_listed(parts)}" for device, parts in devices.items()) if len(devices) > 1 else ""


def _listed(parts: Sequence[str]) -> str:
    """Return names without paths, with layer numbers as ranges."""
    ends = [part.rpartition(".")[2] for part in parts]
    numbers = sorted(int(end) for end in ends if end.isdigit())
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    layers = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ", ".join([*(end for end in ends if not end.isdigit()), *(f"layers {run}" for run in layers)])
