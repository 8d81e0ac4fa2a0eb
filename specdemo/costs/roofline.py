"""Roofline of a forward pass and of a step, with five cost terms.

A pass launches operations, multiplies with weights, and attends to the KV cache. Reading and computing overlap on a
GPU, so the slower one counts; on a single CPU core their times add up. In CUDA graphs the operations run back to back.
In eager execution on a GPU they overlap with the launches. A step adds the engine's overhead.

The terms are constants, or are fitted to the passes and steps of a measured profile.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from math import log
from statistics import median
from typing import Literal, get_args

from specdemo.core.suggest import suggest
from specdemo.costs.acceptance import Acceptance, from_mean
from specdemo.costs.drafting import Drafting, draft_model, eagle, no_passes
from specdemo.costs.profiles import MeasuredStep, Profile
from specdemo.costs.shapes import Shape, reference_configs, shape_of
from specdemo.costs.step import StepCost

Engine = Literal["recorded", "eager"]

BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0}
BRANCHES = 10  # nodes per level that are expanded, in a tree that grows by levels
# methods whose sizes are known from a profile
FITTED = {"draft_model": draft_model, "eagle": eagle}
FACTORS = (1.5, 1.1, 1.02)  # by which the fit changes a term
ROUNDS = 100  # maximum of the fit


@dataclass(frozen=True, slots=True)
class Work:
    """Work of a pass."""

    bytes: float  # read: weights, keys, values and states
    flop: float  # of matrix products and attention
    operations: float  # launched


def work(
    shape: Shape, tokens: float, batch: float, context: int, dtype_bytes: float, heads: float | None = None
) -> Work:
    """Return the work of a pass over `tokens` of each of `batch` rows after `context` tokens.

    heads: tokens of each row for which the output head runs; None: all.
    """
    rows, output_rows = tokens * batch, (tokens if heads is None else heads) * batch
    expert = shape.expert * shape.expert_layers
    width = shape.width(dtype_bytes)
    head = shape.head * shape.head_width(dtype_bytes) if output_rows else 0.0
    weights = (shape.dense + expert * shape.touched(rows)) * width + head
    flop = 2.0 * rows * (shape.dense + expert * shape.experts_per_token) + 2.0 * output_rows * shape.head
    for memory in shape.memory:
        reach = min(context, memory.window) if memory.window else context
        flop += rows * memory.layers * (memory.operations * reach + 2.0 * memory.state)
    return Work(weights + batch * shape.kv_bytes(context, dtype_bytes), flop, shape.operations)


@dataclass(frozen=True, slots=True)
class Terms:
    """Cost terms of a device."""

    bandwidth: float  # achieved share of the profile's bandwidth
    compute: float  # achieved share of the profile's matrix throughput
    operation_us: float  # launch of an operation
    step_ms: float  # engine overhead per step
    draft_ms: float  # further overhead of a step that drafts


CONSTANTS = {
    ("gpu", "recorded"): Terms(0.8, 0.6, 2.0, 0.3, 1.0),
    ("gpu", "eager"): Terms(0.75, 0.55, 50.0, 0.5, 4.0),
    ("cpu", "eager"): Terms(0.9, 0.7, 15.0, 0.1, 0.5),
}
PASS_TERMS = [field.name for field in fields(Terms)][:3]


@dataclass(frozen=True, slots=True)
class Device:
    """Device of a profile with a dtype and an engine."""

    profile: Profile
    dtype: str
    engine: Engine
    costs: Terms

    def ms(self, of: Work) -> float:
        """Return the milliseconds of one pass."""
        costs, gpu = self.costs, self.profile.kind == "gpu"
        read = of.bytes / (1e6 * self.profile.bandwidth_gb_per_s.value * costs.bandwidth)
        multiplied = of.flop / (1e9 * self.peak * costs.compute)
        started = 1e-3 * of.operations * costs.operation_us
        worked = max(read, multiplied) if gpu else read + multiplied
        return max(worked, started) if gpu and self.engine == "eager" else worked + started

    @property
    def peak(self) -> float:
        """Return the profile's TFLOP/s for this dtype, or for the nearest known one."""
        rates = self.profile.compute_tflop_per_s
        rate = rates.get(self.dtype) or rates.get("float16") or next(iter(rates.values()))
        return rate.value

    def changed(self, **terms: float) -> "Device":
        """Return the device with other cost terms."""
        return replace(self, costs=replace(self.costs, **terms))


def step_cost(
    device: Device,
    target: Shape,
    draft: Drafting,
    acceptance: Acceptance,
    k: int,
    batch: int,
    context: int,
    nodes: int = 0,
) -> StepCost:
    """Return the milliseconds of a step; k 0: plain decoding. nodes: size of the draft tree; 0: a chain."""
    passes = _drafts(draft, acceptance, k, batch, context, BYTES[device.dtype], nodes) if k else []
    verify = device.ms(work(target, (nodes or k) + 1 if k else 1, batch, context, BYTES[device.dtype]))
    drafting = sum(count * device.ms(of) for of, count in passes)
    return StepCost(drafting, verify, device.costs.step_ms + device.costs.draft_ms * (k > 0))


def _drafts(
    draft: Drafting, acceptance: Acceptance, k: int, batch: int, context: int, size: float, nodes: int
) -> list[tuple[Work, float]]:
    """Return the passes that draft k tokens, and the number of each."""
    if draft.first is None:
        return []
    read = acceptance.longest_of(k, batch) if draft.reads_all else 1.0 + acceptance.p_all_accepted(k, batch)
    if draft.further is None:
        return [(work(draft.first, read + k, batch, context, size, k), 1.0)]
    drafts = [(work(draft.first, read, batch, context, size, 1.0), 1.0)]
    if k > 1:
        rows = min(BRANCHES, nodes) if nodes else 1
        drafts.append((work(draft.further, rows, batch, context, size), k - 1.0))
    return drafts


def known_engine(name: str) -> Engine:
    """Raises ValueError for another."""
    if name not in get_args(Engine):
        raise ValueError(f"unknown engine {name[:60]!r}; {suggest(name[:60], get_args(Engine))}")
    return "eager" if name == "eager" else "recorded"


def device_of(profile: Profile, dtype: str, engine: Engine) -> Device:
    """Return the device, with terms fitted to its measurements. Raises ValueError for an unknown precision."""
    if dtype not in BYTES:
        raise ValueError(f"unknown dtype {dtype[:60]!r}; {suggest(dtype[:60], BYTES)}")
    engine = "eager" if profile.kind == "cpu" else engine
    device = Device(profile, dtype, engine, CONSTANTS[profile.kind, engine])
    passes = [*_measured_passes(profile, dtype)]
    return _with_overhead(_fitted(device, passes)) if passes else device


def _measured_passes(profile: Profile, dtype: str) -> Iterator[tuple[Work, float]]:
    for passes in (p for p in profile.passes if p.dtype == dtype):
        of = _measured_shape(passes.model)
        for batch, row in passes.ms.items():
            yield from ((work(of, n, batch, passes.context, BYTES[dtype]), ms) for n, ms in row.items())


def _measured_shape(name: str) -> Shape:
    """Return the shape of a model that a profile names. Raises ValueError with one line."""
    if name not in reference_configs():
        raise ValueError(f"unknown model {name[:60]!r} in a profile; {suggest(name[:60], reference_configs())}")
    return shape_of(reference_configs()[name], name)


def _fitted(device: Device, passes: Sequence[tuple[Work, float]]) -> Device:
    """Fit the terms of a pass by coordinate descent on the sum of absolute log errors, which outliers hardly move."""

    def loss(candidate: Device) -> float:
        return sum(abs(log(ms / candidate.ms(of))) for of, ms in passes)

    for factor in FACTORS:
        for _ in range(ROUNDS):
            now = [getattr(device.costs, name) for name in PASS_TERMS]
            moves = [
                (name, value * by) for name, value in zip(PASS_TERMS, now, strict=True) for by in (factor, 1.0 / factor)
            ]
            best = min((device.changed(**{name: value}) for name, value in moves), key=loss)
            if loss(best) >= loss(device):
                break
            device = best
    return device


def _with_overhead(device: Device) -> Device:
    """Return the device with the overhead of the profile's steps, as far as they were measured."""
    steps = [step for step in device.profile.steps if step.dtype == device.dtype and _is_usable(step)]
    plain = [_rest(step, device) for step in steps if not step.k]
    device = device.changed(step_ms=max(median(plain), 0.0)) if plain else device
    drafting = [_rest(step, device) - device.costs.step_ms for step in steps if step.k]
    return device.changed(draft_ms=max(median(drafting), 0.0)) if drafting else device


def _is_usable(step: MeasuredStep) -> bool:
    return step.method in FITTED if step.k else not step.drafted


def _rest(step: MeasuredStep, device: Device) -> float:
    """Return the milliseconds of a measured step that its passes do not explain."""
    target = _measured_shape(step.model)
    passes = FITTED[step.method] if step.k else no_passes
    draft = passes(target, reference_configs()[step.draft] if step.draft else {}, {})
    acceptance = from_mean(1.0 + min(step.kept, step.k), step.k) if step.k else Acceptance((0.0,))
    cost = step_cost(device, target, draft, acceptance, step.k, step.batch, step.context)
    return sum(step.ms.values()) - cost.drafting - cost.verify
