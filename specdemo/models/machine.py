"""What ran, and on what: the facts that stand beside every measured or trained result."""

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, partial
from pathlib import Path

import torch
import transformers

from specdemo.models.devices import kind, now


@contextmanager
def threads(count: int) -> Iterator[None]:
    """torch's threads for the work inside; afterwards there are as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def one_thread(device: torch.device) -> AbstractContextManager[None]:
    """On a CPU `threads(1)`, unless OMP_NUM_THREADS says how many: on small passes two gain little and collapse as soon
    as anything else runs."""
    return threads(1) if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ else nullcontext()


def thread_time(device: torch.device) -> bool:
    """Whether all of the work on a device is the calling thread's, so that its own time is that of the work."""
    with one_thread(device):
        return device.type == "cpu" and torch.get_num_threads() == 1 and sys.platform != "win32"


def clock(device: torch.device) -> Callable[[], float]:
    """Seconds as lanes count them: on a CPU those that the thread ran, where it does all of the work."""
    return time.thread_time if thread_time(device) else partial(now, device)


def device_name(device: torch.device) -> str:
    """The GPU's or the processor's own name."""
    return kind(device).name(device) or _processor()


def versions() -> dict[str, str]:
    """The versions that results depend on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


@lru_cache(maxsize=1)
def commit() -> str | None:
    """The git commit this code was checked out at; None outside a checkout."""
    here = Path(__file__).parents[2]
    if not (here / ".git").exists():  # installed, perhaps into some other repository
        return None
    try:
        asked = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=here)
    except OSError:  # no git
        return None
    return asked.stdout.strip() if asked.returncode == 0 else None


def matmul_dtype(device: torch.device) -> torch.dtype:
    """What matrix products are fastest in for training: bf16 on a GPU and on a CPU with bf16 instructions."""
    return torch.bfloat16 if device.type != "cpu" or _cpu_likes_bf16() else torch.float32


@lru_cache(maxsize=1)
def _cpu_likes_bf16() -> bool:
    """Measured, not asked: processors without bf16 instructions emulate them, up to fifteen times as slowly."""
    best = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.ones(256, 256, dtype=dtype), torch.ones(256, 1024, dtype=dtype)
        times = []
        for _ in range(5):
            start = time.perf_counter()
            a @ b
            times.append(time.perf_counter() - start)
        best[dtype] = min(times)
    return best[torch.bfloat16] < best[torch.float32]


@lru_cache(maxsize=1)
def _processor() -> str:
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text(encoding="utf-8").splitlines() if listing.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
