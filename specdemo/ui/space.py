"""Environment of the page: a private machine, a public machine, or ZeroGPU of Hugging Face.

On ZeroGPU SPACES_ZERO_GPU is set. A function decorated with `on_zero_gpu` runs in a forked process with a GPU. Its
results are pickled, and models must be loaded in the parent process before.
"""

from collections.abc import Callable
from importlib import import_module
from math import ceil
from typing import TypeVar

from specdemo.core.deployment import zero_gpu as zero_gpu
from specdemo.core.safe_io import FILE_BYTES, PUBLIC_FILE_BYTES
from specdemo.engine.comparison import Comparison
from specdemo.presets import limits
from specdemo.presets.files import EMBEDDED

START_S, LANE_START_S = 10, 3  # until the weights are on the GPU, and until a lane of a large model is warm
BACK_S = 2  # a run ends this long before the GPU is taken away
LEND_S = 120  # longer calls are rejected
EMBEDDED_RATE, RATE = 60, 20  # minimum tokens/s of one lane

Function = TypeVar("Function", bound=Callable[..., object])


def turn_s() -> float:
    """Return the time limit of one run, sweep or test in seconds; a public machine is shared."""
    return 120.0 if limits.public() else 1800.0


def bounds() -> int:
    """Return the limits of a file that a visitor opens."""
    return PUBLIC_FILE_BYTES if limits.public() else FILE_BYTES


def on_zero_gpu(duration: Callable[..., int]) -> Callable[[Function], Function]:
    """Return a decorator that runs a generator on ZeroGPU for `duration(*args)` seconds, or unchanged elsewhere."""
    if not zero_gpu():
        return lambda function: function
    decorator: Callable[[Function], Function] = import_module("spaces").GPU(duration=duration)
    return decorator


def seconds(spec: Comparison) -> int:
    """Return the longest possible duration of a run with loaded models. Shorter estimates get a GPU sooner."""
    rate, lane_start = (EMBEDDED_RATE, 0) if spec.target in EMBEDDED else (RATE, LANE_START_S)
    start = START_S + lane_start * (len(spec.lanes) + 1)
    return min(LEND_S, start + ceil(spec.repeats * (len(spec.lanes) + 1) * spec.max_new_tokens / rate))
