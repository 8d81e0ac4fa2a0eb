"""Choice of devices and precision for a model, limited by the free memory."""

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import groupby

import torch
import transformers
from transformers import PreTrainedModel

from specdemo.core.dtypes import SHORT, dtype_name
from specdemo.core.shapes import HEADROOM
from specdemo.core.suggest import DEVICES, suggest
from specdemo.models.devices import DEVICE_KINDS, best_device, device_kind
from specdemo.models.sizes import Precision, free_bytes, gigabytes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BITS = {"4bit": 4, "8bit": 8}


def resolve_placement(
    dtype: str = "auto", device: str = "auto", quantization: str | None = None
) -> tuple[torch.device, Precision]:
    """Return device and precision. Raises ValueError with one line for a choice that is not available."""
    torch_device = pick_device(device)
    return torch_device, Precision(pick_dtype(dtype, torch_device), _bits(quantization, torch_device))


def pick_device(device: str) -> torch.device:
    """Return the device of a name or `auto`. Raises ValueError, one line, if it is not available."""
    if device == "auto":
        return best_device()
    try:
        torch_device = torch.device(device)
    except RuntimeError:
        raise ValueError(f"unknown device {device!r}; use {DEVICES}") from None
    if torch_device.type not in DEVICE_KINDS:
        raise ValueError(f"device {device!r} is not supported; use {DEVICES}")
    if (torch_device.index or 0) >= DEVICE_KINDS[torch_device.type].count():
        raise ValueError(f"this machine has no device {device!r}; use device 'auto'")
    problem = device_kind(torch_device).problem(torch_device)
    if problem:
        raise ValueError(f"{problem}; use device 'auto', or install a PyTorch build for this GPU")
    return torch_device


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Return the dtype of a name, a short name or `auto`. Raise ValueError for an unknown one."""
    if dtype == "auto":
        return DTYPES[device_kind(device).default_dtype(device)]
    name = dtype_name(dtype)
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; {suggest(dtype, ['auto', *DTYPES, *SHORT])}")
    return DTYPES[name]


def _bits(quantization: str | None, device: torch.device) -> int | None:
    if quantization is None:
        return None
    if quantization not in BITS:
        raise ValueError(f"unknown quantization {quantization!r}; {suggest(quantization, list(BITS))}")
    if find_spec("bitsandbytes") is None or find_spec("accelerate") is None:
        raise ValueError(f"quantization {quantization!r} needs bitsandbytes; run: pip install bitsandbytes accelerate")
    if not device_kind(device).quantised:
        raise ValueError(f"bitsandbytes has no kernels for {device.type}; omit quantization {quantization!r}")
    return BITS[quantization]


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
        f"{name} needs about {gigabytes(HEADROOM * needed)} in {precision}, this machine has {gigabytes(sum(free))} "
        f"free on {device}; choose {hint}"
    )


def placement_kwargs(device: torch.device, precision: Precision, spread: bool) -> dict[str, object]:
    """Return the arguments of transformers' `from_pretrained` for devices and bitsandbytes."""
    kwargs: dict[str, object] = {"device_map": "auto"} if spread else {}
    if precision.bits:
        kwargs.setdefault("device_map", {"": device if device.index is not None or device.type == "cpu" else 0})
        kwargs["quantization_config"] = transformers.BitsAndBytesConfig(
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
    return kwargs


def device_map_summary(model: PreTrainedModel) -> str:
    """Return which parts are on which device, if there are several: `cuda:0: embed_tokens, layers 0-20; cpu:
    lm_head`."""
    devices: dict[str, list[str]] = {}
    for part, device in getattr(model, "hf_device_map", {}).items():
        devices.setdefault(f"cuda:{device}" if isinstance(device, int) else str(device), []).append(part)
    return "; ".join(f"{device}: {_part_names(parts)}" for device, parts in devices.items()) if len(devices) > 1 else ""


def _part_names(parts: Sequence[str]) -> str:
    """Return names without paths, with layer numbers as ranges."""
    ends = [part.rpartition(".")[2] for part in parts]
    numbers = sorted(int(end) for end in ends if end.isdigit())
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    layers = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ", ".join([*(end for end in ends if not end.isdigit()), *(f"layers {run}" for run in layers)])
