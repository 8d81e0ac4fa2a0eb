"""Environment of the page: a private machine, a public machine, or ZeroGPU of Hugging Face.

On ZeroGPU SPACES_ZERO_GPU is set. A function decorated with `on_zero_gpu` runs in a forked process with a GPU. Its
results are pickled, and models must be loaded in the parent process before.
"""

import time
from collections.abc import Callable
from importlib import import_module
from math import ceil
from typing import TypeVar

import psutil

from specdemo.analysis.configs import config_of, drafting, shape
from specdemo.core.deployment import zero_gpu as zero_gpu
from specdemo.core.safe_io import FILE_BYTES, PUBLIC_FILE_BYTES
from specdemo.costs.acceptance import Acceptance
from specdemo.costs.profiles import profile
from specdemo.costs.roofline import device_of, step_cost
from specdemo.engine.comparison import Comparison, Lane
from specdemo.engine.session import session
from specdemo.methods import BASELINE, facts_of
from specdemo.models.devices import best_device, device_kind
from specdemo.presets import limits

# docs/deploy.md has the source of every number
GPU, SHARE = "rtx-pro-6000", 0.5  # of ZeroGPU, and the part of it that a call gets
DAY_S = 120  # GPU time of a visitor without an account; a call that asks for more than is left gets no GPU
FORK_S, BYTES_PER_S = 2.0, 7.7e9  # until a process has a GPU, and then for the weights of all models
CURVE_S = 2.0  # for the costs of passes, which every process measures
LANE_START_S = 4.0  # until a lane of a large model is warm
EMBEDDED_MS = 1000.0 / 60.0  # a step of an embedded model, limited by the host
BACK_S = 2.0  # a run ends this long before the GPU is taken away
CONTEXT = 1024  # tokens, about as many as the longest prompt of a public page
POOLED = 3  # runs of a repeat

Function = TypeVar("Function", bound=Callable[..., object])


def turn_s() -> float:
    """Return the time limit of one run, sweep or test in seconds; a public machine is shared."""
    return 120.0 if limits.public() else 1800.0


def no_gpu(spec: Comparison) -> str:
    """Return why an external model may be too large for this machine; "" if there is a GPU."""
    needless = spec.target.embedded or spec.all_remote or not device_kind(best_device()).host
    return "" if needless else f"{spec.target} needs a GPU and this machine has none"


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
    """Return the duration to declare for a run with loaded models. Raises ValueError if no visitor may run that long.

    `spaces` multiplies it by the GPU's factor before it asks for a GPU.
    """
    needed = needed_s(spec)
    if needed > DAY_S:
        more = "choose fewer new tokens, lanes or repeats"
        raise ValueError(f"this run needs up to {needed:.0f} s of GPU time, and this page lends {DAY_S} s; {more}")
    return ceil(needed / _factor())


def _asked_s(spec: Comparison) -> float:
    """Return what `spaces` asks for."""
    return ceil(needed_s(spec) / _factor()) * _factor()


def needed_s(spec: Comparison) -> float:
    """Return the longest time that a run needs a GPU, from the process that gets it to the end of the last lane."""
    weights = sum(size for _, size in session().loaded())
    lanes = sum(_step_ms(spec, lane) for lane in spec.all_lanes) * spec.max_new_tokens / 1000.0
    warm = 0.0 if spec.target.embedded else LANE_START_S * len(spec.all_lanes)  # EMBEDDED_MS includes it
    return FORK_S + weights / BYTES_PER_S + CURVE_S + warm + spec.repeats * lanes + BACK_S


_waits = True  # for the weights


def left_s(spec: Comparison) -> float:
    """Return the time limit of a run in the process that has the GPU: the first one there waited for the weights."""
    global _waits
    waited = time.time() - psutil.Process().create_time() if _waits else 0.0
    _waits = False
    return needed_s(spec) - BACK_S - waited


def pooled_runs(spec: Comparison) -> int:
    """Return how many runs a repeat makes; with the first run they fit into a day. Raises ValueError for one."""
    if not zero_gpu():
        return POOLED
    left = DAY_S - _asked_s(spec)
    runs = next((n for n in range(POOLED, 1, -1) if _asked_s(spec.model_copy(update={"repeats": n})) <= left), 0)
    if not runs:
        raise ValueError(f"a repeat does not fit into {DAY_S} s of GPU time; choose fewer new tokens or lanes")
    return runs


def gpu_time(spec: Comparison) -> str:
    """Return a sentence on the GPU time that a run and its repeat may take; empty where no GPU is lent."""
    if not zero_gpu():
        return ""
    try:
        repeat = f"a repeat makes {pooled_runs(spec)} runs"
    except ValueError:
        repeat = "a repeat does not fit"
    return f"A run asks for {_asked_s(spec):.0f} s of GPU time; a day has {DAY_S} s without an account, so {repeat}."


def _step_ms(spec: Comparison, lane: Lane) -> float:
    """Return the predicted time of a step that accepts nothing. Weights in 4 bits count as 16, because they are no
    faster here, and a method that chooses at run time counts as its draft model."""
    target, method = shape(spec.target), lane.method
    k = lane.k or (0 if method == BASELINE else limits.PUBLIC.k)
    if facts_of(method).cost is None:
        method = "draft_model" if lane.model else "none"
    draft = drafting(method, target, config_of(lane.model) if lane.model else None, {})
    device, nodes = device_of(profile(GPU), "bfloat16", "recorded"), lane.tree_nodes
    cost = step_cost(device, target, draft, Acceptance((0.0,)), k, 1, CONTEXT, nodes)
    return max(cost.total / SHARE, EMBEDDED_MS)


def _factor() -> float:
    """Return what `spaces` multiplies a duration by on this GPU; 1 in a release that does not say."""
    try:
        return float(import_module("spaces.zero.config").get_config()["duration_factor"])
    except (ImportError, AttributeError, KeyError):
        return 1.0
