"""What NVIDIA's management library says of a GPU's clock. Where it is not there, or says nothing, nothing is known."""

import ctypes
from functools import lru_cache
from typing import Any

import torch

SM_CLOCK = 1  # NVML_CLOCK_SM
SLOWED = {0x04: "its power limit", 0x08: "the hardware", 0x20: "heat", 0x40: "heat", 0x80: "its power supply"}
FELL = 0.05  # of the clock


class GpuClock:
    """Watches a GPU from now on. Nothing is asked while a lane computes."""

    def __init__(self, device: torch.device) -> None:
        self._handle = _handle(device) if device.type == "cuda" else None
        self._before = self._mhz()

    def reasons(self) -> list[str]:
        """Why what was measured since then may not be confirmed."""
        before, after = self._before, self._mhz()
        limits = _asked("nvmlDeviceGetCurrentClocksThrottleReasons", self._handle, ctypes.c_ulonglong())
        slowed = sorted({words for bit, words in SLOWED.items() if limits and limits & bit})
        told = [f"the GPU is slowed by {' and '.join(slowed)}"] if slowed else []
        if before and after and abs(after / before - 1.0) > FELL:
            told.append(f"the GPU's clock went from {before} to {after} MHz")
        return told

    def _mhz(self) -> int | None:
        return _asked("nvmlDeviceGetClockInfo", self._handle, SM_CLOCK, ctypes.c_uint())


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        return library if library.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):
        return None


def _handle(device: torch.device) -> ctypes.c_void_p | None:
    """By its UUID: CUDA may number the devices otherwise."""
    library, found = _library(), ctypes.c_void_p()
    if library is None:
        return None
    name = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
    return found if library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(found)) == 0 else None


def _asked(function: str, handle: ctypes.c_void_p | None, *arguments: Any) -> int | None:
    """The number that a function writes into its last argument."""
    library, value = _library(), arguments[-1]
    if library is None or handle is None:
        return None
    code = library[function](handle, *arguments[:-1], ctypes.byref(value))
    return int(value.value) if code == 0 else None
