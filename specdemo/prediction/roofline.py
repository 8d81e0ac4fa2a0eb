"""What a pass takes on a device: a roofline with measured corrections, each with its error.

A pass starts operations, reads weights and what is remembered of the texts, and multiplies. Reading and multiplying
overlap, so that the slower of the two counts, softly where they are alike. Where an engine records its passes its
operations run one after the other; where it starts them from Python they run while the next ones are started, so that
starting them is a third thing that overlaps.

Of a device whose passes nobody measured the constants below are taken, with the errors beside them. Measured passes
correct them, all at once: least squares in the logarithms, in which the constants count as one more measurement each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import exp, log, sqrt
from typing import Literal

from specdemo.core.words import suggest
from specdemo.prediction.profiles import Profile
from specdemo.prediction.shapes import Work, shape, work

Engine = Literal["recorded", "eager"]

BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0}
SHARPNESS = 4.0  # of the edge between reading and multiplying
NOISE = 0.04  # of a measured pass, as a share
ROUNDS = 12
UNMEASURED = 0.08  # what such a roofline is off by in itself
LARGEST_STEP = 1.0
EDGE = 1e-3  # for slopes


@dataclass(frozen=True, slots=True)
class Constant:
    """What is taken where nobody measured. error: standard deviation of its logarithm."""

    value: float
    error: float


@dataclass(frozen=True, slots=True)
class Terms:
    """One thing for each term; values of a device, or the errors of their logarithms."""

    bandwidth: float  # share of the profile's that reading reaches
    compute: float  # share of the profile's that multiplying reaches
    operation_us: float  # starting one
    row_us: float  # more of it for every token in it
    text_us: float  # attention of one layer for one text beside the first
    step_ms: float  # what an engine does at every step beside passes
    check_ms: float  # more at a step that checks drafts
    token_ms: float  # beside the pass that drafts a token


NAMES = tuple(field.name for field in fields(Terms))
DEFAULT: dict[tuple[str, Engine], dict[str, Constant]] = {
    ("gpu", "recorded"): {
        "bandwidth": Constant(0.8, 0.08),
        "compute": Constant(0.6, 0.25),
        "operation_us": Constant(2.0, 0.35),
        "row_us": Constant(0.002, 0.5),
        "text_us": Constant(0.05, 0.5),
        "step_ms": Constant(0.3, 0.5),
        "check_ms": Constant(0.7, 0.6),
        "token_ms": Constant(0.08, 0.6),
    },
    ("gpu", "eager"): {
        "bandwidth": Constant(0.75, 0.08),
        "compute": Constant(0.55, 0.25),
        "operation_us": Constant(50.0, 0.3),
        "row_us": Constant(0.002, 0.5),
        "text_us": Constant(0.05, 0.5),
        "step_ms": Constant(0.5, 0.5),
        "check_ms": Constant(2.0, 0.6),
        "token_ms": Constant(0.5, 0.6),
    },
    ("cpu", "eager"): {
        "bandwidth": Constant(0.9, 0.2),
        "compute": Constant(0.7, 0.3),
        "operation_us": Constant(15.0, 0.5),
        "row_us": Constant(0.3, 0.7),
        "text_us": Constant(15.0, 0.7),
        "step_ms": Constant(0.1, 0.5),
        "check_ms": Constant(0.1, 0.5),
        "token_ms": Constant(0.05, 0.5),
    },
}


@dataclass(frozen=True, slots=True)
class Device:
    """A profile's device at a precision, in an engine."""

    profile: Profile
    dtype: str
    engine: Engine
    costs: Terms
    errors: tuple[tuple[float, ...], ...]  # covariance of the logarithms of costs
    misfit: float  # standard deviation of the logarithm of a pass's time about all this

    def ms(self, of: Work, batch: float = 1.0) -> float:
        """Of one pass."""
        costs = self.costs
        rate = 1e9 * self.profile.bandwidth_gb_per_s.value * costs.bandwidth
        reading = 1e3 * (of.weight_bytes + of.other_bytes) / rate
        multiplying = 1e3 * of.flop / (1e12 * self.peak * costs.compute)
        texts = costs.text_us * (batch - 1.0) * of.layers
        starting = 1e-3 * (of.operations * (costs.operation_us + costs.row_us * of.rows) + texts)
        if self.engine == "eager" and self.profile.kind == "gpu":
            return soft(reading, multiplying, starting)
        return starting + soft(reading, multiplying)

    @property
    def peak(self) -> float:
        """TFLOP/s of the profile, at this precision or the nearest that it knows."""
        known = self.profile.compute_tflop_per_s
        found = known.get(self.dtype) or known.get("float16") or next(iter(known.values()))
        return found.value

    def shifted(self, term: str, by: float) -> "Device":
        """With one cost exp(by) times as much."""
        costs = {name: getattr(self.costs, name) for name in NAMES}
        return replace(self, costs=Terms(**(costs | {term: costs[term] * exp(by)})))


def soft(*parts: float) -> float:
    """The largest, and somewhat more where others come near."""
    most = max(parts)
    return most * sum((part / most) ** SHARPNESS for part in parts) ** (1.0 / SHARPNESS) if most else 0.0


def device_of(profile: Profile, dtype: str, engine: Engine) -> Device:
    """With what the profile's passes and steps correct. Raises ValueError for a precision that nobody knows."""
    if dtype not in BYTES:
        raise ValueError(f"unknown dtype {dtype[:60]!r}; {suggest(dtype[:60], BYTES)}")
    start = DEFAULT["cpu" if profile.kind == "cpu" else "gpu", "eager" if profile.kind == "cpu" else engine]
    errors = [start[name].error for name in NAMES]
    prior = tuple(tuple(e * e if i == j else 0.0 for j in range(len(errors))) for i, e in enumerate(errors))
    guess = Device(profile, dtype, engine, Terms(**{name: start[name].value for name in NAMES}), prior, UNMEASURED)
    seen = _measured(profile, dtype)
    return _fitted(guess, seen) if seen else guess


Seen = tuple[Work, float, float]  # a pass, its texts and its milliseconds


def _measured(profile: Profile, dtype: str) -> list[Seen]:
    found = []
    for passes in profile.passes:
        if passes.dtype == dtype:
            of = shape(passes.model)
            for batch, row in passes.ms.items():
                found += [(work(of, n, batch, passes.context, BYTES[dtype]), float(batch), ms) for n, ms in row.items()]
    return found


def _fitted(start: Device, seen: Sequence[Seen]) -> Device:
    """Gauss-Newton from the constants, which hold each term as tightly as their errors say."""
    size, at, device = len(NAMES), [0.0] * len(NAMES), start
    weight = 1.0 / NOISE**2
    for _ in range(ROUNDS):
        off = [log(ms / device.ms(of, batch)) for of, batch, ms in seen]
        slopes = _slopes(device, seen)
        normal = [
            [weight * sum(row[i] * row[j] for row in slopes) + (i == j) / start.errors[i][i] for j in range(size)]
            for i in range(size)
        ]
        right = [weight * sum(row[i] * o for row, o in zip(slopes, off, strict=True)) for i in range(size)]
        right = [r - at[i] / start.errors[i][i] for i, r in enumerate(right)]
        inverse = _inverse(normal)
        step = [sum(inverse[i][j] * right[j] for j in range(size)) for i in range(size)]
        at = [a + max(min(s, LARGEST_STEP), -LARGEST_STEP) for a, s in zip(at, step, strict=True)]
        device = start
        for name, by in zip(NAMES, at, strict=True):
            device = device.shifted(name, by)
    left = [log(ms / device.ms(of, batch)) for of, batch, ms in seen]
    misfit = sqrt(sum(o * o for o in left) / len(left))
    return replace(device, errors=tuple(map(tuple, inverse)), misfit=max(misfit, NOISE))


def _slopes(device: Device, seen: Sequence[Seen]) -> list[list[float]]:
    """Of the logarithm of every pass's time, by the logarithm of every term."""
    moved = [(device.shifted(name, EDGE), device.shifted(name, -EDGE)) for name in NAMES]
    return [[log(up.ms(of, batch) / down.ms(of, batch)) / (2.0 * EDGE) for up, down in moved] for of, batch, _ in seen]


def _inverse(matrix: Sequence[Sequence[float]]) -> list[list[float]]:
    """Of a symmetric positive matrix, by Gauss and Jordan."""
    size = len(matrix)
    rows = [[*row, *(float(i == j) for j in range(size))] for i, row in enumerate(matrix)]
    for i in range(size):
        rows[i] = [value / rows[i][i] for value in rows[i]]
        for j in range(size):
            if j != i:
                rows[j] = [a - rows[j][i] * b for a, b in zip(rows[j], rows[i], strict=True)]
    return [row[size:] for row in rows]
