"""Estimates with confidence intervals: how they are computed and printed. Needs no torch.

A repeated run decodes the same tokens, so runs differ in time only. Each step of a lane is compared with the mean time
of a step of its shape (a straight line over the number of draft nodes). The residuals are summed over blocks of time
that are long enough to be nearly independent (batch means). The interval is Student's t on these sums, linearised: ln S
changes by (P - E[P]) / P of plain decoding minus (L - E[L]) / L of the lane.

Interleaved lanes share each moment, so a block contains both, and a slowdown of both cancels. Sequential lanes have
separate blocks, and the interval is widened by the effect of a steady drift, as seen in their steps, between the middle
of one lane and the middle of the other. With many runs, each run is one block.

Steps during which other programs took the cores are missing data: each counts with the mean time of its shape among the
other steps, so that its tokens stay, and the interval widens with their share. Where too few others are left, all times
count as they are, without an interval.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import exp, inf, log, pi, sqrt, tan
from statistics import NormalDist, fmean, stdev

SHARED_BLOCKS = 8  # per run of interleaved lanes
SEPARATE_BLOCKS = 6  # per run of a sequential lane
RUNS_AS_BLOCKS = 4  # with this many runs, each run is one block
MIN_STEPS = 6  # minimum for several blocks per run
MIN_RUNS = 3  # minimum for an interval if runs have fewer steps
INCONCLUSIVE = "no clear difference"
COLD_CACHE_COST = 0.05  # largest relative cost of cold caches, for a thread that waited almost all the time
CONFIDENCE = 0.95
MAX_HALF_WIDTH = 5.0  # half width of ln S above which there is no interval


@dataclass(frozen=True, slots=True)
class Estimate:
    """Value with a 95 % interval. low, high: None if too little was measured. reasons: why it is `noisy` and should be
    measured again."""

    value: float
    low: float | None = None
    high: float | None = None
    reasons: tuple[str, ...] = ()

    @property
    def noisy(self) -> bool:
        """Return True if it should be measured again."""
        return bool(self.reasons)

    @property
    def width(self) -> float | None:
        """Return half of the interval, relative to the value."""
        return None if self.low is None or self.high is None else (self.high - self.low) / (2.0 * self.value)

    @property
    def label(self) -> str:
        """Return the result of a speed-up: faster, slower or no clear difference."""
        if self.low is None or self.high is None or self.low <= 1.0 <= self.high:
            return INCONCLUSIVE
        return "faster" if self.low > 1.0 else "slower"

    def format(self, unit: str = "x", digits: int = 2) -> str:
        """Format as `1.97x, 1.86 to 2.07`."""
        value = f"{self.value:.{digits}f}{unit}"
        return f"{value}, {self.interval(digits)}" if self.interval() else value

    def interval(self, digits: int = 2) -> str:
        """Format the interval as `1.86 to 2.07`; empty if there is none."""
        return "" if self.low is None or self.high is None else f"{self.low:.{digits}f} to {self.high:.{digits}f}"


@dataclass(frozen=True, slots=True)
class RunTiming:
    """Decode time of one lane in one run: steps as (nodes drafted, milliseconds), and tokens emitted.

    first_ms: time before the steps, if it counts. waited_ms: additional time waiting for the processor; None: unknown.
    disturbed: indices of steps during which other programs took the cores. On a server a step is a piece of text, and
    its first number the tokens in it.
    """

    steps: Sequence[tuple[int, float]]
    tokens: int
    first_ms: float = 0.0
    waited_ms: float | None = None
    disturbed: frozenset[int] = frozenset()

    @property
    def ms(self) -> float:
        """Return the total time."""
        return self.first_ms + self.steps_ms

    @property
    def steps_ms(self) -> float:
        """Return the time of the steps."""
        return sum(ms for _, ms in self.steps)

    @property
    def undisturbed_steps(self) -> list[tuple[int, float]]:
        """Return the steps during which no other program took the cores."""
        return [step for index, step in enumerate(self.steps) if index not in self.disturbed]

    def midpoints(self) -> Iterator[float]:
        """Yield the midpoint of every step, on the lane's own clock."""
        for end, (_, ms) in zip(accumulate(ms for _, ms in self.steps), self.steps, strict=True):
            yield end - ms / 2.0


Runs = Sequence[RunTiming]


def rate(runs: Runs) -> Estimate | None:
    """Return tokens per second of a lane over all runs. None if no time passed."""
    filled = with_mean_times(runs)
    value = _tokens_per_s(filled or runs)
    if value is None:
        return None
    if filled is None or not _has_interval(filled):
        return Estimate(value)
    blocks = _blocks([(1, filled)], shared=False)
    return _from_log_interval(value, _half_width(blocks, lost_freedom=1))


def speedup(plain: Runs, lane: Runs, shared: bool) -> Estimate | None:
    """Return the ratio of a lane's rate to plain decoding's. None if no time passed.

    The two lanes ran together in each run; shared: they were interleaved.
    """
    filled_plain, filled_lane = with_mean_times(plain), with_mean_times(lane)
    if filled_plain is not None and filled_lane is not None:
        plain, lane = filled_plain, filled_lane
    lane_rate, plain_rate = _tokens_per_s(lane), _tokens_per_s(plain)
    if lane_rate is None or not plain_rate:
        return None
    value = lane_rate / plain_rate
    if filled_plain is None or filled_lane is None or not (_has_interval(plain) and _has_interval(lane)):
        return Estimate(value)
    blocks = _blocks([(1, plain), (-1, lane)], shared)
    same_time = shared or _run_is_block(plain, lane)
    drift = 0.0 if same_time else fmean(_drift(*pair) for pair in zip(plain, lane, strict=True))
    cold_cost = COLD_CACHE_COST * max(waited_share(runs) or 0.0 for runs in (plain, lane))
    return _from_log_interval(value, _half_width(blocks, lost_freedom=1 if same_time else 2) + abs(drift) + cold_cost)


def with_mean_times(runs: Runs) -> Runs | None:
    """Return the runs with the mean time of its shape, among the other steps, as the time of every step during which
    other programs took the cores. None if fewer than MIN_STEPS others are left."""
    others = [step for run in runs for step in run.undisturbed_steps]
    if not any(run.disturbed for run in runs):
        return runs
    if len(others) < MIN_STEPS:
        return None
    mean_of, shortest = _mean_time(others), min(ms for _, ms in others)

    def times(run: RunTiming) -> list[tuple[int, float]]:
        steps = enumerate(run.steps)
        return [(n, max(mean_of(n), shortest) if index in run.disturbed else ms) for index, (n, ms) in steps]

    return [replace(run, steps=times(run)) for run in runs]


def _tokens_per_s(runs: Runs) -> float | None:
    tokens, ms = sum(run.tokens for run in runs), sum(run.ms for run in runs)
    return 1000.0 * tokens / ms if tokens and 0.0 < ms < inf else None


def over_repeats(values: Sequence[float]) -> Estimate:
    """Return the geometric mean of repeated measurements, with Student's t on the logarithms, rounded to four places.
    If one is zero, or there are fewer than MIN_RUNS, their arithmetic mean without interval."""
    if len(values) < MIN_RUNS or min(values) <= 0.0:
        return Estimate(round(fmean(values), 4))
    logs = [log(value) for value in values]
    estimate = _from_log_interval(exp(fmean(logs)), t_quantile(len(logs) - 1) * stdev(logs) / sqrt(len(logs)))
    low, high = (None if end is None else round(end, 4) for end in (estimate.low, estimate.high))
    return Estimate(round(estimate.value, 4), low, high)


def over_runs(estimates: Sequence[Estimate]) -> Estimate:
    """Return the geometric mean of independent estimates of one value, without interval where one has none."""
    value = round(exp(fmean(log(each.value) for each in estimates)), 4)
    ends = [(each.low, each.high) for each in estimates if each.low and each.high]
    if len(ends) < len(estimates):
        return Estimate(value)
    half = sqrt(sum(log(high / low) ** 2 for low, high in ends)) / (2 * len(ends))
    return Estimate(value, round(value * exp(-half), 4), round(value * exp(half), 4))


def over_kinds(groups: Iterable[Sequence[float]]) -> Estimate:
    """Return the geometric mean over kinds of the means over their prompts. The interval takes the spread within a kind
    as equal in all of them, so that few prompts of each are enough. groups: positive values of each kind."""
    logs = [[*map(log, values)] for values in groups]
    value, freedom = round(exp(fmean(map(fmean, logs))), 4), sum(map(len, logs)) - len(logs)
    if freedom < max(len(logs), 2):
        return Estimate(value)
    spread = sum((x - fmean(kind)) ** 2 for kind in logs for x in kind) / freedom
    half = t_quantile(freedom) * sqrt(spread * sum(1 / len(kind) for kind in logs)) / len(logs)
    return Estimate(value, round(value * exp(-half), 4), round(value * exp(half), 4))


def fastest(speeds: Sequence[Estimate]) -> list[int]:
    """Return the index of the greatest value, then those of all estimates whose intervals overlap its interval.

    They are sorted by value, greatest first. An estimate without an interval overlaps every other one.
    """
    top, *others = sorted(range(len(speeds)), key=lambda index: -speeds[index].value)
    low = speeds[top].low
    highs = ((index, speeds[index].high) for index in others)
    return [top, *(index for index, high in highs if low is None or high is None or high >= low)]


def waited_share(runs: Runs) -> float | None:
    """Return the share of the wall time in which the lane's thread did not run. None: unknown."""
    waited = [run.waited_ms for run in runs if run.waited_ms is not None]
    wall = sum(waited) + sum(run.steps_ms for run in runs)
    return round(sum(waited) / wall, 4) if waited and wall else None


def t_quantile(degrees_of_freedom: int) -> float:
    """Return the two-sided quantile of Student's t at CONFIDENCE: exact for 1 and 2 degrees of freedom, else Abramowitz
    & Stegun 26.7.5."""
    if degrees_of_freedom < 3:
        return tan(pi * CONFIDENCE / 2.0) if degrees_of_freedom < 2 else CONFIDENCE * sqrt(2.0 / (1.0 - CONFIDENCE**2))
    z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2.0)
    series = (
        (z**3 + z) / 4.0,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96.0,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384.0,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160.0,
    )
    return float(z + sum(term / degrees_of_freedom**power for power, term in enumerate(series, start=1)))


def _from_log_interval(value: float, half_width: float) -> Estimate:
    if not half_width < MAX_HALF_WIDTH:  # a stored trace may contain any times
        return Estimate(value)
    return Estimate(value, value * exp(-half_width), value * exp(half_width))


def _half_width(blocks: Sequence[float], lost_freedom: int) -> float:
    degrees_of_freedom = len(blocks) - lost_freedom
    if degrees_of_freedom < 1:
        return inf
    return t_quantile(degrees_of_freedom) * sqrt(
        sum(score * score for score in blocks) * len(blocks) / degrees_of_freedom
    )


def _has_interval(runs: Runs) -> bool:
    return len(runs) >= MIN_RUNS or min(len(run.steps) for run in runs) >= MIN_STEPS


def _run_is_block(*lanes: Runs) -> bool:
    """Return True if a run is one block: there are many runs, or one is too short for several blocks."""
    return len(lanes[0]) >= RUNS_AS_BLOCKS or min(len(run.steps) for runs in lanes for run in runs) < MIN_STEPS


def _blocks(lanes: Sequence[tuple[int, Runs]], shared: bool) -> list[float]:
    scores: dict[tuple[int, int, int], float] = defaultdict(float)  # by run, block in it, and lane
    run_is_block = _run_is_block(*(runs for _, runs in lanes))
    spans = [max(run.steps_ms for run in runs) or 1.0 for runs in zip(*(runs for _, runs in lanes), strict=True)]
    for sign, runs in lanes:
        # disturbed steps add nothing, so the others stand for them
        total = sum(run.first_ms + sum(ms for _, ms in run.undisturbed_steps) for run in runs)
        for index, (run, excess) in enumerate(zip(runs, _excess(runs), strict=True)):
            length = spans[index] / SHARED_BLOCKS if shared else (run.steps_ms or 1.0) / SEPARATE_BLOCKS
            for place, (midpoint, ms) in enumerate(zip(run.midpoints(), excess, strict=True)):
                block = (index, 0, 0) if run_is_block else (index, int(midpoint / length), 0 if shared else sign)
                if place not in run.disturbed:
                    scores[block] += sign * ms / total
    return [*scores.values()]


def _excess(runs: Runs) -> list[list[float]]:
    """Return the milliseconds of every step beyond the mean of its shape."""
    mean_of = _mean_time([step for run in runs for step in run.undisturbed_steps])
    return [[ms - mean_of(n) for n, ms in run.steps] for run in runs]


def _mean_time(steps: Sequence[tuple[int, float]]) -> Callable[[int], float]:
    """Return a function from the nodes of a step to its mean time: a straight line through `steps`."""
    size, time = fmean(n for n, _ in steps), fmean(ms for _, ms in steps)
    spread = sum((n - size) ** 2 for n, _ in steps)
    slope = sum((n - size) * (ms - time) for n, ms in steps) / spread if spread else 0.0
    return lambda nodes: time + slope * (nodes - size)


def _drift(plain: RunTiming, lane: RunTiming) -> float:
    """Return the error of ln S if both lanes, one after the other, slowed down as steadily as their steps show."""
    weighted_excess = weight = 0.0
    centers = []
    for run in (plain, lane):
        (excess,) = _excess([run])
        steps = [(midpoint, ms) for midpoint, (_, ms) in zip(run.midpoints(), run.steps, strict=True)]
        center = sum(midpoint * ms for midpoint, ms in steps) / (run.steps_ms or 1.0)
        weighted_excess += sum((midpoint - center) * ms for (midpoint, _), ms in zip(steps, excess, strict=True))
        weight += sum((midpoint - center) ** 2 * ms for midpoint, ms in steps)
        centers.append(center)
    return weighted_excess / weight * (plain.ms + centers[1] - centers[0]) if weight else 0.0
