"""Roofline of a forward pass with measured corrections, each with its error.

A pass launches operations, multiplies with weights, and attends to the KV cache. Reading and computing overlap, so the
slower one counts, with a smooth maximum near equality; a single CPU core overlaps them little. In CUDA graphs the
operations run back to back. In eager execution they overlap with the launches, which are a third term.

Devices without measured passes use the constants below with the errors stated there; `fit` corrects them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import exp
from typing import Literal, get_args

from specdemo.core.suggest import suggest
from specdemo.prediction.profiles import Profile
from specdemo.prediction.work import Work

Engine = Literal["recorded", "eager"]

BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0}
CACHED = 0.7
EDGE = 1e-3  # step for numerical derivatives


@dataclass(frozen=True, slots=True)
class Terms:
    """Cost terms of a device."""

    bandwidth: float  # achieved share of the profile's bandwidth
    cache_mb: float  # weights still in the cache at the next pass of the same network
    compute: float  # achieved share of the profile's matrix throughput
    attention: float  # achieved share of both in attention
    overlap: float  # of reads and products: 1: their times add up; large values: only the slower one counts
    operation_us: float  # launch of an operation
    row_us: float  # extra launch time per token
    text_us: float  # attention of one layer, per row after the first
    uneven_ns: float  # extra cost per cache entry that is written for rows of different lengths
    step_ms: float  # engine overhead per step
    check_ms: float  # extra overhead of a step that verifies drafts
    check_text_ms: float  # extra verification overhead, per row after the first
    cold_ms: float  # extra cost of a target pass after passes of another network
    draft_ms: float  # extra cost of a draft with its own KV cache, which must read the committed tokens first
    draft_text_ms: float  # the same, per row after the first
    token_ms: float  # overhead per draft token
    head_ms: float  # overhead per draft token of a head with its own KV cache


KINDS = (("gpu", "recorded"), ("gpu", "eager"), ("cpu", "eager"))
# defaults for unmeasured devices, one per entry of KINDS: (value, standard deviation of its logarithm)
CONSTANTS: dict[str, tuple[tuple[float, float], ...]] = {
    "bandwidth": ((0.8, 0.08), (0.75, 0.08), (0.9, 0.2)),
    "cache_mb": ((0.001, 0.1), (0.001, 0.1), (16.0, 0.5)),
    "compute": ((0.6, 0.25), (0.55, 0.25), (0.7, 0.3)),
    "attention": ((1.0, 0.1), (1.0, 0.1), (0.5, 0.5)),
    "overlap": ((4.0, 0.1), (4.0, 0.1), (1.3, 0.3)),
    "operation_us": ((2.0, 0.35), (50.0, 0.3), (15.0, 0.5)),
    "row_us": ((0.002, 0.5), (0.002, 0.5), (0.3, 0.7)),
    "text_us": ((0.05, 0.5), (0.05, 0.5), (15.0, 0.7)),
    "uneven_ns": ((0.001, 1.0), (0.001, 1.0), (3.0, 1.0)),
    "step_ms": ((0.3, 0.5), (0.5, 0.5), (0.1, 0.5)),
    "check_ms": ((0.7, 0.6), (2.0, 0.6), (0.1, 0.5)),
    "check_text_ms": ((0.005, 1.0), (0.05, 1.0), (0.1, 1.0)),
    "cold_ms": ((0.001, 0.1), (0.001, 0.1), (0.2, 0.7)),
    "draft_ms": ((0.05, 1.0), (0.2, 1.0), (0.2, 1.0)),
    "draft_text_ms": ((0.002, 1.0), (0.03, 1.0), (0.05, 1.0)),
    "token_ms": ((0.08, 0.6), (0.5, 0.6), (0.05, 0.5)),
    "head_ms": ((0.001, 1.0), (0.001, 1.0), (0.3, 1.0)),
}
NAMES = tuple(CONSTANTS)


@dataclass(frozen=True, slots=True)
class Device:
    """Device of a profile with a dtype and an engine."""

    profile: Profile
    dtype: str
    engine: Engine
    costs: Terms
    errors: tuple[tuple[float, ...], ...]  # covariance of the logarithms of costs
    misfit: float  # standard deviation of the residual of log(time of a pass)

    def ms(self, of: Work, batch: float = 1.0, uneven: bool = False, cold: bool = False) -> float:
        """Return the milliseconds of one pass. uneven: over rows of different lengths. cold: after another network's
        pass.
        """
        costs = self.costs
        rate = 1e9 * self.profile.bandwidth_gb_per_s.value * costs.bandwidth
        flops = 1e9 * self.peak * costs.compute
        cached = 0.0 if cold else CACHED / (1.0 + (1e-6 * of.weight_bytes / costs.cache_mb) ** 4)
        read = of.weight_bytes * (1.0 - cached)
        matrices = 1e3 * read / rate, of.flop / flops
        attention = 1e3 * of.kv_bytes / (rate * costs.attention), of.kv_flop / (flops * costs.attention)
        texts = costs.text_us * (batch - 1.0) * of.layers + 1e-3 * costs.uneven_ns * uneven * of.written
        starting = 1e-3 * (of.operations * (costs.operation_us + costs.row_us * of.rows) + texts)
        if self.engine == "eager" and self.profile.kind == "gpu":
            read, multiplied = (a + b for a, b in zip(matrices, attention, strict=True))
            return soft(costs.overlap, soft(costs.overlap, read, multiplied), starting)
        worked = soft(costs.overlap, *matrices) + soft(costs.overlap, *attention)
        return starting + worked

    @property
    def peak(self) -> float:
        """Return the profile's TFLOP/s for this dtype, or for the nearest known one."""
        known = self.profile.compute_tflop_per_s
        found = known.get(self.dtype) or known.get("float16") or next(iter(known.values()))
        return found.value

    def scaled(self, by: Mapping[str, float]) -> "Device":
        """Return the device with its cost terms multiplied by exp(by)."""
        costs = {term: getattr(self.costs, term) * exp(power) for term, power in by.items()}
        return replace(self, costs=replace(self.costs, **costs))


def known_engine(name: str) -> Engine:
    """Raises ValueError for another."""
    if name not in get_args(Engine):
        raise ValueError(f"unknown engine {name[:60]!r}; {suggest(name[:60], get_args(Engine))}")
    return "eager" if name == "eager" else "recorded"


def soft(overlap: float, one: float, other: float) -> float:
    """Return a smooth maximum: the sum at overlap 1, the larger value at large overlap."""
    if one < other:
        one, other = other, one
    return one * (1.0 + (other / one) ** overlap) ** (1.0 / overlap) if one else 0.0
