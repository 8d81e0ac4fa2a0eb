"""Presets that this machine can run, and replacements for those that it cannot.

Sizes are those stated in a preset; the sizes of files are checked when they are loaded.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec

from huggingface_hub import get_token

from specdemo.presets.files import Preset, load_presets


@dataclass(frozen=True, slots=True)
class Machine:
    gpu_gb: float  # memory of all GPUs together
    logged_in: bool  # to the Hugging Face hub
    ram_gb: float = 0.0
    llamacpp: bool = False  # it is installed


@lru_cache(maxsize=1)
def this_machine() -> Machine:
    import torch

    from specdemo.models.devices import DEVICE_KINDS, best_device, device_kind

    name = best_device().type
    row = device_kind(best_device())
    gpus = [torch.device(name, i) for i in range(row.count())] if name != "cpu" else []
    ram = DEVICE_KINDS["cpu"].total(torch.device("cpu")) / 1e9
    llamacpp = find_spec("llama_cpp") is not None
    return Machine(sum(map(row.total, gpus)) / 1e9, get_token() is not None, ram, llamacpp)


def why_not(preset: Preset, machine: Machine | None = None) -> str:
    """Return a clause that explains why a preset cannot run on the machine (default: this one); empty if it can."""
    if preset.memory_gb is None:
        return ""
    machine = machine or this_machine()
    if preset.group and preset.group.endswith("RAM"):
        return _why_not_without_gpu(preset, preset.memory_gb, machine)
    if not machine.gpu_gb:
        return f"it needs a GPU with about {preset.memory_gb:g} GB, and this machine has none"
    if machine.gpu_gb < preset.memory_gb:
        return f"it needs about {preset.memory_gb:g} GB of GPU memory, and this machine has {machine.gpu_gb:.0f}"
    if preset.gated and not machine.logged_in:
        return f"{preset.target.repository} is gated: accept its licence on huggingface.co, then run hf auth login"
    return ""


def _why_not_without_gpu(preset: Preset, memory_gb: float, machine: Machine) -> str:
    if machine.ram_gb < memory_gb:
        return f"it needs about {memory_gb:g} GB of memory, and this machine has {machine.ram_gb:.0f}"
    if preset.target.gguf and not machine.llamacpp:
        return "it needs llama.cpp: pip install llama-cpp-python gguf"
    return ""


def nearest_runnable(preset: Preset, machine: Machine | None = None, failed: bool = False) -> Preset:
    """Return the runnable preset with most of the same methods, then the same target, then fewest other methods, then
    the most similar title.

    failed: the preset could not be loaded. Then its model in another form comes first, of presets that need no
    download.
    """
    local = [other for other in load_presets().values() if other.server is None]
    able = [other for other in local if not why_not(other, machine)]
    if failed:
        able = [other for other in able if other.here and other.target != preset.target]

    def likeness(other: Preset) -> tuple[int, int, bool, int, int, float]:
        mine, its = {*preset.methods}, {*other.methods}
        shared, words = len(mine & its), len(_words(preset.title) & _words(other.title))
        same = preset.target == other.target
        return failed * words, shared, same, -len(its - mine), words, other.memory_gb or 0.0

    return max(able, key=likeness)


def _words(title: str) -> set[str]:
    return set(re.findall(r"[\w.-]{4,}", title.lower()))
