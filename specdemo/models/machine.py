"""What ran, and on what: the facts that stand beside every measured or trained result."""

import platform
import subprocess
from functools import lru_cache
from pathlib import Path

import torch
import transformers


def device_name(device: torch.device) -> str:
    """The GPU's or the processor's own name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


@lru_cache(maxsize=1)
def commit() -> str | None:
    """The git commit this code was checked out at; None outside a checkout."""
    here = Path(__file__).parent
    try:
        asked = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=here)
    except OSError:  # no git
        return None
    return asked.stdout.strip() if asked.returncode == 0 else None


@lru_cache(maxsize=1)
def _processor() -> str:
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text(encoding="utf-8").splitlines() if listing.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
