"""A device as its measured profile says: passes and steps correct the constants of the roofline, all at once, by least
squares in the logarithms, in which the constants count as one more measurement each.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import log, sqrt

from specdemo.core.suggest import suggest
from specdemo.prediction.acceptance import from_mean
from specdemo.prediction.drafts import drafting
from specdemo.prediction.profiles import Passes, Profile
from specdemo.prediction.profiles import Step as Measured
from specdemo.prediction.roofline import BYTES, DEFAULT, EDGE, NAMES, Device, Engine, Terms
from specdemo.prediction.shapes import Work, known, shape, work
from specdemo.prediction.steps import Load, step_of

NOISE = 0.04  # of a measured pass, as a share
DISTURBED = 0.15
ROUNDS = 12
UNMEASURED = 0.12  # what such a roofline is off by in itself, as published results say (docs/what-if.md)
LARGEST_STEP = 1.0
LAPS = {"draft", "verify", "accept", "commit", "observe"}
FITTED = ("none", "draft_model", "eagle")  # methods whose sizes in a profile are known


def device_of(profile: Profile, dtype: str, engine: Engine) -> Device:
    """With what the profile's passes and steps correct. Raises ValueError for a precision that nobody knows."""
    if dtype not in BYTES:
        raise ValueError(f"unknown dtype {dtype[:60]!r}; {suggest(dtype[:60], BYTES)}")
    engine = "eager" if profile.kind == "cpu" else engine
    start = DEFAULT[profile.kind, engine]
    errors = [start[name].error for name in NAMES]
    prior = tuple(tuple(e * e if i == j else 0.0 for j in range(len(errors))) for i, e in enumerate(errors))
    guess = Device(profile, dtype, engine, Terms(**{name: start[name].value for name in NAMES}), prior, UNMEASURED)
    seen = _measured(profile, dtype)
    return _fitted(guess, seen) if seen else guess


@dataclass(frozen=True, slots=True)
class Seen:
    """Something that was measured: what a device would take for it, the milliseconds it took."""

    what: Callable[[Device], float]
    ms: float


def _measured(profile: Profile, dtype: str) -> list[Seen]:
    """Passes, and the laps of steps: drafting, checking, and what is done beside."""
    passes = [seen for one in profile.passes if one.dtype == dtype for seen in _passes(one)]
    steps = [seen for one in profile.steps if one.dtype == dtype and _told(one) for seen in _laps(one)]
    return [seen for seen in (*passes, *steps) if seen.ms > 0.0]


def _passes(measured: Passes) -> Iterator[Seen]:
    of = shape(measured.model)
    for uneven, found in ((False, measured.ms), (True, measured.uneven)):
        for batch, row in found.items():
            for n, ms in row.items():
                one = work(of, n, batch, measured.context, BYTES[measured.dtype])
                yield Seen(_pass(one, batch, uneven), ms)


def _pass(of: Work, batch: int, uneven: bool) -> Callable[[Device], float]:
    return lambda device: device.ms(of, batch, uneven)


def _told(step: Measured) -> bool:
    """Whether it says all that a step is made of."""
    return not set(step.ms) - LAPS and bool(step.k or not step.drafted)


def _laps(measured: Measured) -> Iterator[Seen]:
    """Of a step the pass that checks, what is done beside, and drafting."""
    target, k = shape(measured.model), measured.k
    draft = drafting(
        measured.method if measured.method in FITTED else "none",
        target,
        known()[measured.draft] if measured.draft else None,
        {},
    )
    kept = from_mean(1.0 + min(measured.kept, k), k) if k else from_mean(1.0, 1)
    step = step_of(target, draft, kept, k, Load(measured.batch, measured.context, BYTES[measured.dtype]))
    laps = measured.ms
    yield Seen(step.check_ms, laps.get("verify", 0.0))
    yield Seen(step.beside_ms, laps.get("accept", 0.0) + laps.get("commit", 0.0))
    if step.drafts:
        yield Seen(step.draft_ms, laps.get("draft", 0.0) + laps.get("observe", 0.0))


def _fitted(start: Device, seen: Sequence[Seen]) -> Device:
    """Gauss-Newton from the constants, which hold each term as tightly as their errors say."""
    size, at, device = len(NAMES), [0.0] * len(NAMES), start
    for _ in range(ROUNDS):
        off = [log(one.ms / one.what(device)) for one in seen]
        weighed = [(_weight(o) / NOISE**2, o, row) for o, row in zip(off, _slopes(device, seen), strict=True)]
        normal = [
            [sum(w * row[i] * row[j] for w, _, row in weighed) + (i == j) / start.errors[i][i] for j in range(size)]
            for i in range(size)
        ]
        right = [sum(w * row[i] * o for w, o, row in weighed) for i in range(size)]
        right = [r - at[i] / start.errors[i][i] for i, r in enumerate(right)]
        inverse = _inverse(normal)
        step = [sum(inverse[i][j] * right[j] for j in range(size)) for i in range(size)]
        at = [a + max(min(s, LARGEST_STEP), -LARGEST_STEP) for a, s in zip(at, step, strict=True)]
        device = start
        for name, by in zip(NAMES, at, strict=True):
            device = device.shifted(name, by)
    left = [log(one.ms / one.what(device)) for one in seen]
    counted = [_weight(o) for o in left]
    misfit = sqrt(sum(w * o * o for w, o in zip(counted, left, strict=True)) / sum(counted))
    return replace(device, errors=tuple(map(tuple, inverse)), misfit=max(misfit, NOISE))


def _weight(off: float) -> float:
    """Of something measured that far off: what another program disturbed shall not bend the rest."""
    return 1.0 / (1.0 + (off / DISTURBED) ** 2)


def _slopes(device: Device, seen: Sequence[Seen]) -> list[list[float]]:
    """Of the logarithm of every pass's time, by the logarithm of every term."""
    moved = [(device.shifted(name, EDGE), device.shifted(name, -EDGE)) for name in NAMES]
    return [[log(one.what(up) / one.what(down)) / (2.0 * EDGE) for up, down in moved] for one in seen]


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
