"""The kinds of devices, one row each in KINDS: how time is taken, what memory is left, which precisions and attention
kernels hold, what is recorded. Whoever wants to know asks here and not for a name.
"""

import time
from dataclasses import dataclass
from types import ModuleType

import psutil
import torch


@dataclass(frozen=True, slots=True)
class Kind:
    """A CPU, but for what a row says of another. Bytes are of the device that is asked for."""

    title: str = "CPU"
    timing: str = "wall clock"  # how the laps of a step are taken
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")  # the first is dtype `auto`
    attention: str = "flash or math"  # kernels of scaled dot product attention
    quantised: bool = True  # bitsandbytes has kernels for it
    records: bool = False  # passes are recorded and replayed
    apart: bool = False  # its memory is not the main memory, which may hold what it cannot
    tested: bool = False  # on hardware

    def count(self) -> int:
        """The devices of this kind that are here."""
        return 1

    def name(self, device: torch.device) -> str:
        """Its own; empty where torch does not know it."""
        return ""

    def wait(self, device: torch.device) -> None:
        """Until all that was started there is done."""

    def free(self, device: torch.device) -> int:
        """What could be taken now."""
        return int(psutil.virtual_memory().available)  # without swapping

    def total(self, device: torch.device) -> int:
        """All there is."""
        return int(psutil.virtual_memory().total)

    def allocated(self, device: torch.device) -> int:
        """What tensors take; 0 where nobody counts."""
        return 0

    def peak(self, device: torch.device) -> int:
        """The most that tensors took since `forget_peak`; 0 where nobody counts."""
        return 0

    def forget_peak(self, device: torch.device) -> None:
        """Count the peak anew from now on."""

    def empty(self) -> None:
        """Give back what no tensor uses: until then it is no free memory."""

    def prepare(self) -> None:
        """Before the first pass of a model."""

    def told(self) -> str:
        """The row in words."""
        recorded = "passes recorded" if self.records else "passes not recorded"
        quantised = "4bit and 8bit" if self.quantised else "neither 4bit nor 8bit"
        words = [", ".join(self.dtypes), quantised, f"time by {self.timing}", f"attention {self.attention}", recorded]
        return "; ".join(words if self.tested else [*words, "untested on hardware"])


@dataclass(frozen=True, slots=True)
class Discrete(Kind):
    """A GPU of which torch has a module like torch.cuda."""

    module: ModuleType = torch.cuda

    def count(self) -> int:
        return int(self.module.device_count()) if self.module.is_available() else 0

    def name(self, device: torch.device) -> str:
        return str(self.module.get_device_name(device))

    def wait(self, device: torch.device) -> None:
        self.module.synchronize(device)

    def free(self, device: torch.device) -> int:
        return int(self.module.mem_get_info(device)[0])

    def total(self, device: torch.device) -> int:
        return int(self.module.get_device_properties(device).total_memory)

    def allocated(self, device: torch.device) -> int:
        return int(self.module.memory_allocated(device))

    def peak(self, device: torch.device) -> int:
        return int(self.module.max_memory_allocated(device))

    def forget_peak(self, device: torch.device) -> None:
        self.module.reset_peak_memory_stats(device)

    def empty(self) -> None:
        self.module.empty_cache()

    def prepare(self) -> None:
        # which CUDA prefers on Hopper and later, and which plans anew for every length of the text, 23 to 37 ms each
        torch.backends.cuda.enable_cudnn_sdp(False)


class Mps(Kind):
    """An Apple GPU, on the machine's own memory."""

    def count(self) -> int:
        return int(torch.backends.mps.is_available())

    def name(self, device: torch.device) -> str:
        return "Apple GPU"

    def wait(self, device: torch.device) -> None:
        torch.mps.synchronize()

    def free(self, device: torch.device) -> int:
        left = torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
        return min(left, int(psutil.virtual_memory().available))

    def total(self, device: torch.device) -> int:
        return int(torch.mps.recommended_max_memory())

    def empty(self) -> None:
        torch.mps.empty_cache()


EVENTS, WAITS = "events", "synchronising"
HALF = ("bfloat16", "float16", "float32")
KINDS: dict[str, Kind] = {  # the best first
    "cuda": Discrete("NVIDIA or AMD GPU", EVENTS, HALF, "flash, efficient or math", records=True, apart=True),
    "xpu": Discrete("Intel GPU", WAITS, HALF, "flash, oneDNN or math", apart=True, module=torch.xpu),
    "mps": Mps("Apple GPU", WAITS, HALF, "Metal", quantised=False),
    "cpu": Kind(tested=True),
}


def kind(device: torch.device) -> Kind:
    """Its row; a kind that is not in the table is treated as a CPU."""
    return KINDS.get(device.type, KINDS["cpu"])


def best() -> torch.device:
    """What `auto` is: the first kind that is here."""
    return torch.device(next(name for name, row in KINDS.items() if row.count()))


def now(device: torch.device) -> float:
    """Seconds on a clock, read when all that was started on the device is done."""
    kind(device).wait(device)
    return time.perf_counter()
