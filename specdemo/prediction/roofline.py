"""What a pass takes on a device: a roofline with measured corrections, each with its error.

A pass starts operations, reads weights and what is remembered of the texts, and multiplies. Reading and multiplying
overlap, so that the slower of the two counts, softly where they are alike. Where an engine records its passes its
operations run one after the other; where it starts them from Python they run while the next ones are started, so that
starting them is a third thing that overlaps.

Of a device whose passes nobody measured the constants below are taken, with the errors beside them. Measured passes
correct them, all at once: least squares in the logarithms, in which the constants count as one more measurement each.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from math import exp, log, sqrt
from statistics import fmean
from typing import Literal, get_args

from specdemo.core.suggest import suggest
from specdemo.prediction.drafts import Drafting, drafting
from specdemo.prediction.profiles import Profile, Step
from specdemo.prediction.shapes import Work, known, shape, work

Engine = Literal["recorded", "eager"]

BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0}
SHARPNESS = 4.0  # of the edge between reading and multiplying
NOISE = 0.04  # of a measured pass, as a share
DISTURBED = 0.15
ROUNDS = 12
UNMEASURED = 0.12  # what such a roofline is off by in itself, as published results say (docs/what-if.md)
LARGEST_STEP = 1.0
EDGE = 1e-3  # for slopes
LAPS = {"draft", "verify", "accept", "commit", "observe"}
CONTEXT = 80  # tokens before a step of a profile, on the average


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
    check_text_ms: float  # of it, for every text beside the first: each keeps another number of tokens
    token_ms: float  # beside the pass that drafts a token
    head_ms: float  # the same of a head with keys and values of its own


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
        "check_text_ms": Constant(0.005, 1.0),
        "token_ms": Constant(0.08, 0.6),
        "head_ms": Constant(0.001, 1.0),
    },
    ("gpu", "eager"): {
        "bandwidth": Constant(0.75, 0.08),
        "compute": Constant(0.55, 0.25),
        "operation_us": Constant(50.0, 0.3),
        "row_us": Constant(0.002, 0.5),
        "text_us": Constant(0.05, 0.5),
        "step_ms": Constant(0.5, 0.5),
        "check_ms": Constant(2.0, 0.6),
        "check_text_ms": Constant(0.05, 1.0),
        "token_ms": Constant(0.5, 0.6),
        "head_ms": Constant(0.001, 1.0),
    },
    ("cpu", "eager"): {
        "bandwidth": Constant(0.9, 0.2),
        "compute": Constant(0.7, 0.3),
        "operation_us": Constant(15.0, 0.5),
        "row_us": Constant(0.3, 0.7),
        "text_us": Constant(15.0, 0.7),
        "step_ms": Constant(0.1, 0.5),
        "check_ms": Constant(0.1, 0.5),
        "check_text_ms": Constant(0.1, 1.0),
        "token_ms": Constant(0.05, 0.5),
        "head_ms": Constant(0.3, 1.0),
    },
}


Curve = tuple[tuple[float, float], ...]  # rows -> what measured passes with so many take, over the roofline


@dataclass(frozen=True, slots=True)
class Device:
    """A profile's device at a precision, in an engine."""

    profile: Profile
    dtype: str
    engine: Engine
    costs: Terms
    errors: tuple[tuple[float, ...], ...]  # covariance of the logarithms of costs
    misfit: float  # standard deviation of the logarithm of a pass's time about all this
    single: Curve = ()  # of passes over one token of every text, and of wider ones
    wide: Curve = ()

    def ms(self, of: Work, batch: float = 1.0) -> float:
        """Of one pass."""
        costs = self.costs
        rate = 1e9 * self.profile.bandwidth_gb_per_s.value * costs.bandwidth
        reading = 1e3 * (of.weight_bytes + of.other_bytes) / rate
        multiplying = 1e-9 * of.flop / (self.peak * costs.compute)
        texts = costs.text_us * (batch - 1.0) * of.layers
        starting = 1e-3 * (of.operations * (costs.operation_us + costs.row_us * of.rows) + texts)
        if self.engine == "eager" and self.profile.kind == "gpu":
            return soft(reading, multiplying, starting) * self.correction(of.rows, batch)
        return (starting + soft(reading, multiplying)) * self.correction(of.rows, batch)

    def beside_ms(self, drafts: bool, batch: float) -> float:
        """What the engine does at a step beside passes and drafting."""
        costs = self.costs
        return costs.step_ms + (costs.check_ms + (batch - 1.0) * costs.check_text_ms if drafts else 0.0)

    def token_ms(self, draft: Drafting) -> float:
        """What it does for every drafting pass beside that."""
        return self.costs.token_ms + (self.costs.head_ms if draft.reads_all else 0.0)

    def correction(self, rows: float, batch: float) -> float:
        """Linear in the logarithm of the rows between those measured, and as the last one beyond."""
        curve = self.single if rows <= batch else self.wide
        if not curve:
            return 1.0
        above = next((i for i, (known, _) in enumerate(curve) if known >= rows), len(curve) - 1)
        (low, before), (high, behind) = curve[max(above - 1, 0)], curve[above]
        if high <= rows or low >= rows:
            return behind if high <= rows else before
        return before + (behind - before) * log(rows / low) / log(high / low)

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


def known_engine(name: str) -> Engine:
    """Raises ValueError for another."""
    if name not in get_args(Engine):
        raise ValueError(f"unknown engine {name[:60]!r}; {suggest(name[:60], get_args(Engine))}")
    return "eager" if name == "eager" else "recorded"


def soft(*parts: float) -> float:
    """The largest, and somewhat more where others come near."""
    most = max(parts)
    return most * sum((part / most) ** SHARPNESS for part in parts) ** (1.0 / SHARPNESS) if most else 0.0


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
    """Something that was measured: what a device would take for it, the milliseconds it took, the rows of a pass."""

    what: Callable[[Device], float]
    ms: float
    rows: float = 0.0
    single: bool = False


def _measured(profile: Profile, dtype: str) -> list[Seen]:
    """Passes, and the laps of steps: drafting, checking, and what is done beside."""
    found: list[Seen] = []
    size = BYTES[dtype]
    for passes in profile.passes:
        if passes.dtype == dtype:
            of = shape(passes.model)
            for batch, row in passes.ms.items():
                works = [(work(of, n, batch, passes.context, size), ms) for n, ms in row.items()]
                found += [Seen(_pass(one, batch), ms, one.rows, one.rows == batch) for one, ms in works]
    for step in profile.steps:
        if step.dtype == dtype and not set(step.ms) - LAPS and (step.k or not step.drafted):
            found += _laps(step, size)
    return [seen for seen in found if seen.ms > 0.0]


def _pass(of: Work, batch: float) -> Callable[[Device], float]:
    return lambda device: device.ms(of, batch)


def _laps(step: Step, size: float) -> Iterator[Seen]:
    """Of a step what is not drafting, and what is."""
    target, k, batch = shape(step.model), step.k, step.batch
    check = work(target, k + 1, batch, CONTEXT, size)
    yield Seen(lambda device: device.ms(check, batch), step.ms.get("verify", 0.0))
    yield Seen(lambda device: device.beside_ms(k > 0, batch), step.ms.get("accept", 0.0) + step.ms.get("commit", 0.0))
    if step.method not in ("draft_model", "eagle") or not k:
        return
    config = known()[step.draft] if step.draft else None
    draft = drafting(step.method, target, config, {})
    assert draft.first is not None and draft.further is not None
    first, further = (work(one, 1, batch, CONTEXT, size) for one in (draft.first, draft.further))
    yield Seen(
        lambda device: device.ms(first, batch) + (k - 1) * device.ms(further, batch) + k * device.token_ms(draft),
        step.ms.get("draft", 0.0) + step.ms.get("observe", 0.0),
    )


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
    single, wide = (_curve(device, [one for one in seen if one.single is alone]) for alone in (True, False))
    device = replace(device, single=single, wide=_smooth(wide))
    left = [log(one.ms / one.what(device)) for one in seen]
    misfit = sqrt(sum(o * o for o in left) / len(left))
    return replace(device, errors=tuple(map(tuple, inverse)), misfit=max(misfit, NOISE))


def _weight(off: float) -> float:
    """Of something measured that far off: what another program disturbed shall not bend the rest."""
    return 1.0 / (1.0 + (off / DISTURBED) ** 2)


def _curve(device: Device, seen: Sequence[Seen]) -> Curve:
    """What passes of a width have in common that no roofline says: kernels that are chosen by it."""
    widths = sorted({one.rows for one in seen if one.rows})
    off = {rows: [log(one.ms / one.what(device)) for one in seen if one.rows == rows] for rows in widths}
    means = [fmean(off[rows], [_weight(o) for o in off[rows]]) for rows in widths]
    return tuple((rows, exp(mean)) for rows, mean in zip(widths, means, strict=True))


def _smooth(curve: Curve) -> Curve:
    """Every point counts half in its neighbours, or noise would make steps of it."""
    values = [value for _, value in curve]
    padded = [*values[:1], *values, *values[-1:]]
    means = [(a + 2.0 * b + c) / 4.0 for a, b, c in zip(padded, padded[1:], padded[2:], strict=False)]
    return tuple((rows, mean) for (rows, _), mean in zip(curve, means, strict=True))


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
