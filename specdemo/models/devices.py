"""Device kinds, one row each in DEVICE_KINDS. Other code asks a row for what it needs to know of a device: timing,
memory, dtypes, attention kernels, CUDA graphs."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from types import ModuleType

import psutil
import torch
from torch import Tensor, nn

from specdemo.core.generation import SHORT, dtype_name
from specdemo.core.suggest import DEVICES, suggest
from specdemo.kv.graphs import BYTES_PER_OWNER, GraphCapture, new_capture

QUERY_BLOCK = 32  # rows that torch's attention kernel for CPUs takes at once; a rest of one row adds in another order
EXACT_SLOTS = 16  # of a GPU: passes over up to so many slots cost about what one costs; wider ones round differently
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """A device kind; the defaults are those of a CPU. Sizes are in bytes, for the device in the argument."""

    title: str = "CPU"
    host: bool = True  # the processor itself: passes run in threads of this process, on its memory
    timing: str = "wall clock"  # how the parts of a step are timed
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")  # the first is dtype `auto`
    attention: str = "flash or math"  # kernels of scaled dot product attention
    quantised: bool = True  # bitsandbytes has kernels for it
    cuda_graphs: bool = False  # forward passes run as CUDA graphs
    triton: bool = False  # runs kernels that Triton compiled
    nvml: bool = False  # NVIDIA's library may know its clock
    row_sequences: bool = False  # its attention kernels read the keys of a row, of all heads, as one sequence
    exact_slots: int = QUERY_BLOCK  # the widest pass that may give the same bits as one over a single token
    separate_memory: bool = False  # has its own memory; main memory can hold layers that do not fit
    tested: bool = False  # on hardware

    def count(self) -> int:
        """Return the number of available devices of this kind."""
        return 1

    def problem(self, device: torch.device) -> str:
        """Return why the device cannot be used, as a clause; empty if it can."""
        return ""

    def default_dtype(self, device: torch.device) -> str:
        """Return dtype `auto` of the device."""
        return self.dtypes[0]

    def name(self, device: torch.device) -> str:
        """Return the name of the device; empty if torch does not know it."""
        return ""

    def synchronize(self, device: torch.device) -> None:
        """Wait until all work on the device is done."""

    def free(self, device: torch.device) -> int:
        """Return the free memory."""
        return int(psutil.virtual_memory().available)  # without swap

    def total(self, device: torch.device) -> int:
        """Return the total memory."""
        return int(psutil.virtual_memory().total)

    def allocated(self, device: torch.device) -> int:
        """Return the memory used by tensors; 0 if unknown."""
        return 0

    def peak(self, device: torch.device) -> int:
        """Return the peak memory used by tensors since `reset_peak`; 0 if unknown."""
        return 0

    def reset_peak(self, device: torch.device) -> None:
        """Reset the peak."""

    def empty_cache(self) -> None:
        """Return cached memory of the allocator to the device."""

    def prepare(self) -> None:
        """Set up the device before the first pass of a model."""

    def describe(self) -> str:
        """Return the row as a sentence."""
        graphs = "CUDA graphs" if self.cuda_graphs else "no CUDA graphs"
        quantised = "4bit and 8bit" if self.quantised else "neither 4bit nor 8bit"
        words = [", ".join(self.dtypes), quantised, f"time by {self.timing}", f"attention {self.attention}", graphs]
        return "; ".join(words if self.tested else [*words, "untested on hardware"])


@dataclass(frozen=True, slots=True)
class Discrete(DeviceKind):
    """A GPU for which torch has a module like torch.cuda."""

    separate_memory: bool = True
    exact_slots: int = EXACT_SLOTS
    module: ModuleType = torch.cuda

    def count(self) -> int:
        return int(self.module.device_count()) if self.module.is_available() else 0

    def name(self, device: torch.device) -> str:
        return str(self.module.get_device_name(device))

    def synchronize(self, device: torch.device) -> None:
        self.module.synchronize(device)

    def free(self, device: torch.device) -> int:
        return int(self.module.mem_get_info(device)[0])

    def total(self, device: torch.device) -> int:
        return int(self.module.get_device_properties(device).total_memory)

    def allocated(self, device: torch.device) -> int:
        return int(self.module.memory_allocated(device))

    def peak(self, device: torch.device) -> int:
        return int(self.module.max_memory_allocated(device))

    def reset_peak(self, device: torch.device) -> None:
        self.module.reset_peak_memory_stats(device)

    def empty_cache(self) -> None:
        self.module.empty_cache()

    def prepare(self) -> None:
        # CUDA prefers cuDNN attention on Hopper and later; it builds a new plan for every text length, in 23 to 37 ms
        torch.backends.cuda.enable_cudnn_sdp(False)


@dataclass(frozen=True, slots=True)
class Cuda(Discrete):
    """An NVIDIA or AMD GPU."""

    cuda_graphs: bool = True
    triton: bool = True
    nvml: bool = True
    row_sequences: bool = True

    def problem(self, device: torch.device) -> str:
        architectures = torch.cuda.get_arch_list()
        # ROCm names its architectures differently, and rejects unknown ones itself
        if torch.version.hip or not architectures or _has_kernels(architectures, capability(device)):
            return ""
        number = "".join(map(str, capability(device)))
        return f"PyTorch {torch.__version__} has no kernels for {self.name(device)} (sm_{number})"

    def default_dtype(self, device: torch.device) -> str:
        # older GPUs, such as a T4, emulate bfloat16 several times slower than float16
        return self.dtypes[0] if torch.version.hip or capability(device) >= (8, 0) else "float16"


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a CUDA device."""
    major, minor = torch.cuda.get_device_capability(device)
    return major, minor


def _has_kernels(architectures: list[str], capability: tuple[int, int]) -> bool:
    """Return whether a build with these architectures, such as sm_80 and compute_120, runs on a GPU of this capability.

    Machine code (sm) runs on GPUs of the same major version and at least the same minor one, PTX (compute) on all later
    ones.
    """
    for architecture in architectures:
        kind, _, number = architecture.partition("_")
        if number.isdigit():
            version = int(number) // 10, int(number) % 10
            if version <= capability and (kind == "compute" or version[0] == capability[0]):
                return True
    return False


class Mps(DeviceKind):
    """An Apple GPU, which uses main memory."""

    def count(self) -> int:
        return int(torch.backends.mps.is_available())

    def name(self, device: torch.device) -> str:
        return "Apple GPU"

    def synchronize(self, device: torch.device) -> None:
        torch.mps.synchronize()

    def free(self, device: torch.device) -> int:
        left = torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
        return min(left, int(psutil.virtual_memory().available))

    def total(self, device: torch.device) -> int:
        return int(torch.mps.recommended_max_memory())

    def empty_cache(self) -> None:
        torch.mps.empty_cache()


EVENTS, SYNCHRONISING = "events", "synchronising"
HALF = ("bfloat16", "float16", "float32")
DEVICE_KINDS: dict[str, DeviceKind] = {  # the best first
    "cuda": Cuda("NVIDIA or AMD GPU", False, EVENTS, HALF, "flash, efficient or math", tested=not torch.version.hip),
    "xpu": Discrete("Intel GPU", False, SYNCHRONISING, HALF, "flash, oneDNN or math", module=torch.xpu),
    "mps": Mps("Apple GPU", False, SYNCHRONISING, HALF, "Metal", quantised=False, exact_slots=EXACT_SLOTS),
    "cpu": DeviceKind(tested=True),
}


def device_kind(device: torch.device) -> DeviceKind:
    """Return the row of a device; an unknown kind is treated as a CPU."""
    return DEVICE_KINDS.get(device.type, DEVICE_KINDS["cpu"])


def same_kind(device: torch.device) -> list[torch.device]:
    """Return the device, or without a number all devices of its kind that have numbers."""
    row = device_kind(device)
    if device.index is not None or not row.separate_memory:
        return [device]
    return [torch.device(device.type, index) for index in range(max(row.count(), 1))]


def capture_for(device: torch.device) -> GraphCapture | None:
    """Return the capture function of a device; None: no graphs."""
    return new_capture(device) if device_kind(device).cuda_graphs else None


def graph_bytes(device: torch.device, owners: int) -> int:
    """Return the expected memory of the graphs of `owners` owners."""
    return owners * BYTES_PER_OWNER if capture_for(device) else 0


def runs_triton(x: Tensor) -> bool:
    """Return True if kernels that Triton compiled can read a tensor. Asked in every layer of every pass."""
    return x.is_cuda


def mixed_precision(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Return a context in which matrix products run in `dtype`."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def best_device() -> torch.device:
    """Return the device for `auto`: the first one that can be used, of the first available kind."""
    for name, row in DEVICE_KINDS.items():
        usable = (i for i in range(row.count()) if not row.problem(torch.device(name, i)))
        if (index := next(usable, None)) is not None:
            return torch.device(name, index) if index else torch.device(name)
    return torch.device("cpu")


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


def device_map_summary(model: nn.Module) -> str:
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


def now(device: torch.device) -> float:
    """Return seconds on a clock, read after all work on the device is done."""
    device_kind(device).synchronize(device)
    return time.perf_counter()
