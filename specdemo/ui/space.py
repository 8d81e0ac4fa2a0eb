"""Where the page runs: at home, on a public machine, on GPUs that Hugging Face lends by the call (ZeroGPU).

SPACES_ZERO_GPU is set where a GPU is lent: the function marked by `lent` runs in a forked process that has it, what it
yields is pickled, and models have to be in place in the first process before.
"""

import os
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from math import ceil
from typing import TypeVar

from specdemo.core.json_limits import FILE_LIMITS, PUBLIC_FILE_LIMITS, JsonLimits
from specdemo.engine.comparison import Comparison
from specdemo.presets import limits
from specdemo.presets.files import EMBEDDED

START_S = 10  # until a lent GPU has the weights and every lane is warm
BACK_S = 2  # a run ends itself so long before the GPU is taken away
LEND_S = 120  # longer calls are refused
EMBEDDED_RATE, RATE = 60, 20  # tokens a second of one lane, at the least

Function = TypeVar("Function", bound=Callable[..., object])


def zero_gpu() -> bool:
    """True where a GPU is lent by the call."""
    asked = os.environ.get("SPACES_ZERO_GPU", "").lower() in ("1", "t", "true")  # as `spaces` reads it
    return asked and find_spec("spaces") is not None


def turn_s() -> float:
    """Wall clock that one run, sweep or test may take; a public machine is shared."""
    return 120.0 if limits.public() else 1800.0


def bounds() -> JsonLimits:
    """Of a file that a visitor opens."""
    return PUBLIC_FILE_LIMITS if limits.public() else FILE_LIMITS


def lent(duration: Callable[..., int]) -> Callable[[Function], Function]:
    """A decorator: the generator runs where a GPU is lent, for `duration(its arguments)` seconds; else as it is."""
    if not zero_gpu():
        return lambda function: function
    decorator: Callable[[Function], Function] = import_module("spaces").GPU(duration=duration)
    return decorator


def seconds(spec: Comparison) -> int:
    """What a run may take at the most, loaded models given: the shorter the estimate, the sooner a GPU is lent."""
    rate = EMBEDDED_RATE if spec.target in EMBEDDED else RATE
    return min(LEND_S, START_S + ceil(spec.repeats * (len(spec.lanes) + 1) * spec.max_new_tokens / rate))
