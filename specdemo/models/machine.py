"""Facts about the machine and the software, stored with every measured or trained result."""

import ctypes
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache, partial
from math import inf
from pathlib import Path
from typing import Any

import torch
import transformers

from specdemo.models.devices import device_kind, now
from specdemo.models.packed import bfloat16_pays

SM_CLOCK = 1  # NVML_CLOCK_SM
THROTTLE_REASONS = {0x04: "its power limit", 0x08: "the hardware", 0x20: "heat", 0x40: "heat", 0x80: "its power supply"}
CLOCK_TOLERANCE = 0.05  # relative change of the clock
THREADS = "/proc/self/task"
RAPL = Path("/sys/class/powercap")
ALL_S = 0.25  # seconds between two readings of all threads
COMPUTES = 0.1  # share of that time in which a thread that computes runs


def uses_thread_time(device: torch.device) -> bool:
    """Return True if all work on a device runs in the calling thread, unless a target has several (`TargetFacts`). The
    CPU time of that thread then measures it."""
    return device_kind(device).host and sys.platform != "win32"


def clock(device: torch.device, wall_time: bool = False) -> Callable[[], float]:
    """Return the clock of lanes on a device, in seconds: thread time if all work runs in the calling thread."""
    return time.thread_time if uses_thread_time(device) and not wall_time else partial(now, device)


class ThreadTimes:
    """Reads the times of the threads of this process.

    A page has dozens of threads, and the readings before and after every step are part of a lane's time: they took 0.25
    of 9 ms (SmolLM2, Q4_K_M). So all are read now and then, and in between those that compute.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._files: dict[str, int] = {}  # thread -> its open file, since opening takes most of the time of reading
        self._all: dict[str, tuple[float, float]] = {}  # the last reading of all threads
        self._read_all = -inf  # time of that reading
        self._computing: list[str] = []

    def __call__(self) -> dict[str, tuple[float, float]]:
        """Return threads with the milliseconds that each ran, and that it waited for a core although it could run.

        Those that compute are among them. Empty where the system does not count that: it is Linux's scheduler's.
        """
        passed = self._now() - self._read_all
        if passed < ALL_S:
            return self._read(self._computing)
        with suppress(OSError):
            names = [thread.name for thread in Path(THREADS).iterdir()]
            for gone in self._files.keys() - names:
                os.close(self._files.pop(gone))
            before, self._all = self._all, self._read(names)
            least = COMPUTES * 1000.0 * passed if passed < 2 * ALL_S else -inf  # else nothing is known of this time
            self._computing = [
                name for name, (ran, _) in self._all.items() if ran - before.get(name, (0.0,))[0] >= least
            ]
            self._read_all = self._now()
        return self._all

    def _read(self, names: Iterable[str]) -> dict[str, tuple[float, float]]:
        times = {}
        for name in names:
            with suppress(OSError, ValueError):  # it may have ended
                if name not in self._files:
                    self._files[name] = os.open(f"{THREADS}/{name}/schedstat", os.O_RDONLY)
                ran, waited, _ = os.pread(self._files[name], 64, 0).split()
                times[name] = int(ran) / 1e6, int(waited) / 1e6
        return times


thread_times = ThreadTimes()


def device_name(device: torch.device) -> str:
    """Return the name of the GPU or the processor."""
    return device_kind(device).name(device) or _processor()


def versions() -> dict[str, str]:
    """Return the versions that results depend on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


class GpuClock:
    """Monitor of a GPU's clock through NVML. Without NVML nothing is reported. It is not queried while a lane
    computes."""

    def __init__(self, device: torch.device) -> None:
        self._handle = _handle(device) if device_kind(device).nvml else None
        self._before = self._mhz()

    def reasons(self) -> list[str]:
        """Return why measurements since the start may not be repeatable."""
        before, after = self._before, self._mhz()
        limits = _nvml_value("nvmlDeviceGetCurrentClocksThrottleReasons", self._handle, ctypes.c_ulonglong())
        causes = sorted({words for bit, words in THROTTLE_REASONS.items() if limits and limits & bit})
        messages = [f"the GPU is throttled by {' and '.join(causes)}"] if causes else []
        if before and after and abs(after / before - 1.0) > CLOCK_TOLERANCE:
            messages.append(f"the GPU's clock went from {before} to {after} MHz")
        return messages

    def _mhz(self) -> int | None:
        return _nvml_value("nvmlDeviceGetClockInfo", self._handle, SM_CLOCK, ctypes.c_uint())


class EnergyMeter:
    """Counter of the energy of a device: of a GPU by NVML, of a CPU by RAPL, which counts whole packages, other
    programs included."""

    def __init__(self, device: torch.device) -> None:
        self._handle = _handle(device) if device_kind(device).nvml else None
        zones = sorted(RAPL.glob("intel-rapl:*")) if device_kind(device).host else ()
        self._zones = [zone for zone in zones if _text(zone / "name").startswith("package")]  # psys contains them
        self._last = self._read()

    def joules(self) -> float | None:
        """Return the energy since the last call or the start; None if it cannot be read."""
        last, self._last = self._last, self._read()
        if not last or len(last) != len(self._last):
            return None
        used = [now - before + most * (now < before) for (before, most), (now, _) in zip(last, self._last, strict=True)]
        return None if min(used) < 0 else sum(used) / 1e6  # below 0: a counter was reset

    def _read(self) -> list[tuple[int, int]]:
        """Return microjoules, and where the counter starts anew; empty if a counter cannot be read."""
        energy = _nvml_value("nvmlDeviceGetTotalEnergyConsumption", self._handle, ctypes.c_ulonglong())
        if energy is not None:
            return [(1000 * energy, 0)]
        texts = [(_text(zone / "energy_uj"), _text(zone / "max_energy_range_uj")) for zone in self._zones]
        with suppress(ValueError):
            return [(int(energy), int(most)) for energy, most in texts]
        return []


def _text(file: Path) -> str:
    """Return the text of a file, an empty one if it cannot be read, as RAPL's by most users."""
    with suppress(OSError, ValueError):
        return file.read_text(encoding="ascii").strip()
    return ""


@lru_cache(maxsize=1)
def commit() -> str | None:
    """Return the git commit of this checkout; None outside a checkout."""
    checkout = Path(__file__).parents[2]
    if not (checkout / ".git").exists():  # installed, maybe inside another repository
        return None
    try:
        result = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=checkout)
    except OSError:  # no git
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def matmul_dtype(device: torch.device) -> torch.dtype:
    """Return the fastest dtype of matrix products for training: bfloat16 on a GPU and on a CPU with bf16
    instructions."""
    return torch.bfloat16 if not device_kind(device).host or bfloat16_pays() else torch.float32


@lru_cache(maxsize=1)
def _processor() -> str:
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text(encoding="utf-8").splitlines() if listing.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        return library if library.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):
        return None


def _handle(device: torch.device) -> ctypes.c_void_p | None:
    """Find the device by its UUID; CUDA may number devices differently."""
    library, handle = _library(), ctypes.c_void_p()
    if library is None:
        return None
    name = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
    return handle if library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)) == 0 else None


def _nvml_value(function: str, handle: ctypes.c_void_p | None, *arguments: Any) -> int | None:
    """Call a function that writes its result into its last argument."""
    library, value = _library(), arguments[-1]
    if library is None or handle is None:
        return None
    code = library[function](handle, *arguments[:-1], ctypes.byref(value))
    return int(value.value) if code == 0 else None
