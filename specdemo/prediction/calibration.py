"""Calibration of the roofline with the measured passes and steps of a profile.

All cost terms are fitted together by least squares in logarithms. Their default values count as one more measurement
each.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import log, sqrt
from operator import mul

from specdemo.core.suggest import suggest
from specdemo.prediction.acceptance import from_mean
from specdemo.prediction.drafts import drafting
from specdemo.prediction.profiles import MeasuredStep, Passes, Profile
from specdemo.prediction.roofline import BYTES, CONSTANTS, EDGE, KINDS, NAMES, Device, Engine, Terms
from specdemo.prediction.step_loads import step_of
from specdemo.prediction.work import known, shape, work

NOISE = 0.04  # relative error of a measured pass
DISTURBED = 0.15
ROUNDS = 16
UNMEASURED = 0.12  # error of an unfitted roofline, from published results (docs/what-if.md)
LARGEST_STEP, LEAST, CLOSE = 1.0, 0.01, 1e-2
LAPS = {"draft", "verify", "accept", "commit", "observe"}
FITTED = ("none", "draft_model", "eagle")  # methods whose sizes are known from a profile


def device_of(profile: Profile, dtype: str, engine: Engine) -> Device:
    """Return the device corrected by the profile's passes and steps. Raises ValueError for an unknown precision."""
    if dtype not in BYTES:
        raise ValueError(f"unknown dtype {dtype[:60]!r}; {suggest(dtype[:60], BYTES)}")
    engine = "eager" if profile.kind == "cpu" else engine
    column = KINDS.index((profile.kind, engine))
    values, errors = zip(*(constants[column] for constants in CONSTANTS.values()), strict=True)
    prior = tuple(tuple(e * e if i == j else 0.0 for j in range(len(errors))) for i, e in enumerate(errors))
    guess = Device(profile, dtype, engine, Terms(**dict(zip(NAMES, values, strict=True))), prior, UNMEASURED)
    seen = _measured(profile, dtype)
    return _fitted(guess, seen) if seen else guess


@dataclass(frozen=True, slots=True)
class Seen:
    """Measurement: a function that predicts it for a device, and the measured milliseconds."""

    what: Callable[[Device], float]
    ms: float


def _measured(profile: Profile, dtype: str) -> list[Seen]:
    """Return the measured passes and the parts of measured steps: drafting, verification and overhead."""
    passes = [seen for one in profile.passes if one.dtype == dtype for seen in _passes(one)]
    steps = [seen for one in profile.steps if one.dtype == dtype and _is_usable(one) for seen in _laps(one)]
    return [seen for seen in (*passes, *steps) if seen.ms > 0.0]


def _passes(measured: Passes) -> Iterator[Seen]:
    of = shape(measured.model)
    for uneven, found in ((False, measured.ms), (True, measured.uneven)):
        for batch, row in found.items():
            for n, ms in row.items():
                one = work(of, n, batch, measured.context, BYTES[measured.dtype])
                yield Seen(partial(Device.ms, of=one, batch=batch, uneven=uneven), ms)


def _is_usable(step: MeasuredStep) -> bool:
    return not set(step.ms) - LAPS and bool(step.k or not step.drafted)


def _laps(measured: MeasuredStep) -> Iterator[Seen]:
    """Yield verification, overhead and drafting of a step."""
    target, k = shape(measured.model), measured.k
    draft = drafting(
        measured.method if measured.method in FITTED else "none",
        target,
        known()[measured.draft] if measured.draft else None,
        {},
    )
    acceptance = from_mean(1.0 + min(measured.kept, k), k) if k else from_mean(1.0, 1)
    step = step_of(target, draft, acceptance, k, measured.batch, measured.context, measured.dtype)
    laps = measured.ms
    yield Seen(step.check_ms, laps.get("verify", 0.0))
    yield Seen(step.overhead_ms, laps.get("accept", 0.0) + laps.get("commit", 0.0))
    if step.drafts:
        yield Seen(step.draft_ms, laps.get("draft", 0.0) + laps.get("observe", 0.0))


def _fitted(start: Device, seen: Sequence[Seen]) -> Device:
    """Fit the terms by Gauss-Newton, regularised by the errors of the default values. A step is halved until the loss
    decreases.
    """
    size, at, device = len(NAMES), [0.0] * len(NAMES), start
    prior = [1.0 / start.errors[i][i] for i in range(size)]
    for _ in range(ROUNDS):
        off = _off(device, seen)
        columns = [*zip(*_slopes(device, seen), strict=True)]
        weights = [_weight(o) / NOISE**2 for o in off]
        weighed = [[*map(mul, weights, column)] for column in columns]
        normal = [
            [sum(map(mul, weighed[i], columns[j])) + (i == j) * prior[i] for j in range(size)] for i in range(size)
        ]
        right = [sum(map(mul, row, off)) - a * h for row, a, h in zip(weighed, at, prior, strict=True)]
        inverse = _inverse(normal)
        step = [sum(map(mul, row, right)) for row in inverse]
        before, share = _loss(off, at, prior), min(1.0, LARGEST_STEP / max(map(abs, step)))
        while share > LEAST:
            then = [a + share * s for a, s in zip(at, step, strict=True)]
            moved = start.scaled(dict(zip(NAMES, then, strict=True)))
            if _loss(_off(moved, seen), then, prior) < before:
                break
            share /= 2.0
        else:
            break
        at, device = then, moved
        if share * max(map(abs, step)) < CLOSE:
            break
    left = _off(device, seen)
    counted = [_weight(o) for o in left]
    misfit = sqrt(sum(w * o * o for w, o in zip(counted, left, strict=True)) / sum(counted))
    return replace(device, errors=tuple(map(tuple, inverse)), misfit=max(misfit, NOISE))


def _off(device: Device, seen: Sequence[Seen]) -> list[float]:
    return [log(one.ms / one.what(device)) for one in seen]


def _loss(off: Sequence[float], at: Sequence[float], prior: Sequence[float]) -> float:
    """Return Cauchy's loss, to which `_weight` belongs, plus that of the default values."""
    measured = sum(log(1.0 + (o / DISTURBED) ** 2) for o in off) * (DISTURBED / NOISE) ** 2
    return measured + sum(a * a * h for a, h in zip(at, prior, strict=True))


def _weight(off: float) -> float:
    """Return the weight of a measurement with that error, so that disturbed measurements do not bend the fit."""
    return 1.0 / (1.0 + (off / DISTURBED) ** 2)


def _slopes(device: Device, seen: Sequence[Seen]) -> list[list[float]]:
    """Return the derivatives of the logarithm of every pass's time by the logarithm of every term."""
    moved = [device.scaled({name: EDGE}) for name in NAMES]
    now = [one.what(device) for one in seen]
    return [[log(one.what(up) / ms) / EDGE for up in moved] for one, ms in zip(seen, now, strict=True)]


def _inverse(matrix: Sequence[Sequence[float]]) -> list[list[float]]:
    """Invert a symmetric positive matrix by Gauss-Jordan elimination."""
    size = len(matrix)
    rows = [[*row, *(float(i == j) for j in range(size))] for i, row in enumerate(matrix)]
    for i in range(size):
        rows[i] = [value / rows[i][i] for value in rows[i]]
        for j in range(size):
            if j != i:
                rows[j] = [a - rows[j][i] * b for a, b in zip(rows[j], rows[i], strict=True)]
    return [row[size:] for row in rows]
