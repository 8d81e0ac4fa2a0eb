"""Cost of a step, and the cost model, which explains the speed of a lane and predicts the fastest draft length.

c: time to draft one token, v(n): time of a target pass over n slots, both relative to a one-token pass; alpha:
probability that a draft token is accepted if its parent is. A step with k draft tokens outputs 1 + a1 + a1 a2 + ...
tokens and takes k c + v(k + 1) plus the cost of acceptance (Leviathan et al., 2211.17192, theorem 3.8, but v is
measured instead of 1, and alpha is known for every position). All terms can be read from the events of two lanes.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from statistics import fmean, linear_regression, pstdev

from specdemo.core.estimate import Estimate, t_quantile
from specdemo.core.tally import StepCounts
from specdemo.core.trace import StepEvent, step_ms
from specdemo.costs.acceptance import MIN_TRIALS, expected_tokens, measured_rates
from specdemo.costs.lengths import MAX_K, best_length
from specdemo.costs.passes import interpolate

JACKKNIFE_PARTS = 8  # parts of a run, left out one at a time for the jackknife interval

EventRuns = Sequence[Sequence[StepEvent]]  # events of one or several runs of a lane, with prefill


def predicted_speedup(tokens: float, time: float, plain_time: float) -> float:
    """Return the speed-up of a step that outputs `tokens` in `time` over plain steps of `plain_time`."""
    return tokens * plain_time / time


def break_even_rate(step_cost: float, drafted: float) -> float:
    """Return the acceptance rate, accepted / drafted tokens, below which drafting is slower than plain decoding.

    step_cost: time of a step in plain steps; drafted: draft tokens per step. Above 1: no rate is high enough.
    """
    return max(step_cost - 1.0, 0.0) / drafted if drafted else 0.0


@dataclass(frozen=True, slots=True)
class StepCost:
    """Cost of a step, in milliseconds or in plain steps: drafting, the target's pass over root and draft, the rest."""

    drafting: float
    verify: float
    overhead: float

    @property
    def total(self) -> float:
        """Return the cost of the whole step."""
        return self.drafting + self.verify + self.overhead


@dataclass(frozen=True, slots=True)
class CostModel:
    """Cost and yield of a step by draft length, times in milliseconds. Positions start at 1; the last entry of a list
    applies to all later positions."""

    plain_ms: float  # a step of plain decoding
    pass_ms: float  # its target pass, over one slot
    verify: Mapping[int, float]  # v: slots -> time of a pass over them, in units of pass_ms; v(1) is 1
    draft_ms: float  # per draft token
    draft_step_ms: float  # per step, independent of the draft length
    other_ms: float  # acceptance and commit
    alpha: Sequence[float]  # probability that the token at this position is accepted if its ancestors are
    k: int  # draft length of the measured run
    reach_rates: Sequence[float] = (1.0,)  # share of steps whose draft reaches this position
    tree_nodes: float | None = None  # mean number of nodes per tree; None: drafts are chains

    def tokens(self, k: int) -> float:
        """Return the mean accepted length at draft length k."""
        return expected_tokens(_extended(self.alpha, k))[k]

    def drafted(self, k: int) -> float:
        """Return the mean number of draft tokens per step."""
        return sum(_extended(self.reach_rates, k)) if self.tree_nodes is None else self.tree_nodes

    def cost(self, k: int) -> StepCost:
        """Return the mean cost of a step with draft length k; 0: no draft."""
        drafting = self.draft_step_ms + self.draft_ms * self.drafted(k) if k else 0.0
        if self.tree_nodes is not None:
            return StepCost(drafting, self.pass_ms * self.v(self.tree_nodes + 1.0), self.other_ms)
        reach = [1.0, *_extended(self.reach_rates, k), 0.0]
        v = sum((reach[n] - reach[n + 1]) * self.v(n + 1.0) for n in range(k + 1))
        return StepCost(drafting, self.pass_ms * v, self.other_ms)

    def speedup(self, k: int) -> float:
        """Return the speed-up over plain decoding; k = 0 means off. A tree is known at its measured depth only."""
        return predicted_speedup(self.tokens(k), self.cost(k).total, self.plain_ms) if k else 1.0

    def best_k(self, longest: int = MAX_K) -> int:
        """Return the draft length with the highest predicted speed-up, 0 for off. For a tree: its depth or 0."""
        ks = [*range(longest + 1)] if self.tree_nodes is None else [0, self.k]
        return ks[best_length(map(self.tokens, ks), (self.cost(k).total if k else self.plain_ms for k in ks))]

    def v(self, slots: float) -> float:
        """Return the time of a pass over so many slots, interpolated between the measured widths, in units of
        pass_ms."""
        return interpolate(self.verify, slots)

    def with_probe(self, ms: Mapping[int, float]) -> "CostModel":
        """Return a copy with v from isolated passes, slots -> milliseconds.

        Between drafts a wide pass takes another time than in isolation, so the probe gives the shape of v and the
        widest pass of the lane its height.
        """
        probe = replace(self, verify={n: pass_ms / ms[1] for n, pass_ms in ms.items()})
        widest = max(self.verify)
        height = self.verify[widest] / probe.v(widest) if widest > 1 else 1.0
        return replace(probe, verify={n: v * height if n > 1 else 1.0 for n, v in probe.verify.items()})


def fit_cost_model(plain: EventRuns, lane: EventRuns, k: int = 0, parallel: bool = False) -> CostModel | None:
    """Fit the cost model to the events of a plain and a drafting lane; only row 0 counts.

    k: the requested draft length, if it may be more than was ever drafted. parallel: one pass drafts all tokens. None
    if nothing was drafted or no time passed.
    """
    plain_steps = [event for run in plain for event in run[1:]]
    steps = [StepCounts.of(event) for run in lane for event in run[1:]]
    deepest = max((step.depth for step in steps), default=0)
    plain_ms = _mean(step_ms(e) for e in plain_steps)
    pass_ms = _mean(e.ms.get("verify", 0.0) for e in plain_steps)
    if not deepest or not pass_ms or not all(step.ms for step in steps):
        return None
    draft_ms, draft_step_ms = _fit_line([(step.drafted, step.draft_ms) for step in steps], parallel)
    full_steps = [step for run in lane for step in _full_steps(run, deepest)] or steps
    verify = _means([(step.drafted, step.verify_ms / pass_ms) for step in steps])
    return CostModel(
        plain_ms=plain_ms,
        pass_ms=pass_ms,
        verify={nodes + 1: v for nodes, v in verify.items()} | {1: 1.0},
        draft_ms=draft_ms,
        draft_step_ms=draft_step_ms,
        other_ms=_mean(step.ms - step.draft_ms - step.verify_ms for step in steps),
        alpha=_alpha(full_steps, deepest, exhausted=deepest < k),
        k=max(min(k, MAX_K), deepest),
        reach_rates=[fmean(s.depth >= at for s in full_steps) for at in range(1, min(max(k, deepest), MAX_K) + 1)],
        tree_nodes=_mean(s.drafted for s in steps) if any(s.drafted > s.depth for s in steps) else None,
    )


@dataclass(frozen=True, slots=True)
class DraftLengthAdvice:
    """Recommended draft length of a run. gain: its predicted speed over the measured draft length, with interval."""

    costs: CostModel
    best: int  # at most twice the measured draft length; further predictions are unreliable
    gain: Estimate

    @classmethod
    def of(
        cls, plain: Sequence[StepEvent], lane: Sequence[StepEvent], k: int, parallel: bool = False
    ) -> "DraftLengthAdvice | None":
        """Compute the advice, with a jackknife interval over parts of the run. None if nothing was drafted or no time
        passed."""
        costs = fit_cost_model([plain], [lane], k, parallel)
        if costs is None:
            return None
        best = costs.best_k(min(MAX_K, 2 * costs.k))
        gain = costs.speedup(best) / costs.speedup(costs.k)
        if best == costs.k or min(len(plain), len(lane)) <= JACKKNIFE_PARTS:
            return cls(costs, best, Estimate(gain))
        parts = [
            fit_cost_model([_without(plain, part)], [_without(lane, part)], k, parallel)
            for part in range(JACKKNIFE_PARTS)
        ]
        gains = [part.speedup(best) / part.speedup(costs.k) for part in parts if part]
        if len(gains) < JACKKNIFE_PARTS or not all(map(isfinite, gains)):
            return cls(costs, best, Estimate(gain))
        half = t_quantile(JACKKNIFE_PARTS - 1) * (JACKKNIFE_PARTS - 1) * pstdev(gains) / JACKKNIFE_PARTS**0.5
        return cls(costs, best, Estimate(gain, gain - half, gain + half))


def _without(events: Sequence[StepEvent], part: int) -> list[StepEvent]:
    """Remove one of JACKKNIFE_PARTS parts of the steps; keep the prefill."""
    steps = events[1:]
    begin, end = (len(steps) * at // JACKKNIFE_PARTS for at in (part, part + 1))
    return [*events[:1], *steps[:begin], *steps[end:]]


def _full_steps(run: Sequence[StepEvent], depth: int) -> list[StepCounts]:
    """Return the steps whose draft only the drafter can have shortened, without those at the end of the text."""
    remaining = sum(len(event.emitted[0]) for event in run)
    steps = []
    for event in run:
        if event.index and remaining > depth:
            steps.append(StepCounts.of(event))
        remaining -= len(event.emitted[0])
    return steps


def _alpha(steps: Sequence[StepCounts], deepest: int, exhausted: bool) -> list[float]:
    """Return accepted / tried per position, where there are enough tries.

    Later positions use the lower of the last value and the mean of all positions, so that chance at the end is not
    taken for a rule; 0 after the longest draft of the drafter.
    """
    measured, pooled = measured_rates((step.accepted for step in steps), deepest)
    guess = min(measured[-1], pooled) if measured else pooled
    return [*measured, *[guess] * (deepest - len(measured)), 0.0 if exhausted else guess]


def _fit_line(points: Sequence[tuple[int, float]], flat: bool) -> tuple[float, float]:
    """Fit a line through the mean times by size; return slope and intercept, both at least 0. With a single frequent
    size, the line goes through the origin, or is flat."""
    frequent = _means(points)
    sizes, times = zip(*(point for point in points if point[0] in frequent), strict=True)
    x, y = fmean(sizes), fmean(times)
    slope = linear_regression(sizes, times).slope if len(frequent) > 1 else 0.0 if flat else y / x
    if slope < 0.0:
        return 0.0, y
    return (slope, y - slope * x) if slope * x < y else (y / x, 0.0)


def _means(points: Sequence[tuple[int, float]]) -> dict[int, float]:
    """Return size -> mean. Rare sizes are left out, unless all sizes above 0 are rare."""
    groups = defaultdict[int, list[float]](list)
    for size, value in points:
        groups[size].append(value)
    frequent = {size: fmean(values) for size, values in groups.items() if len(values) >= MIN_TRIALS}
    return frequent if any(frequent) else {size: fmean(values) for size, values in groups.items()}


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return fmean(values) if values else 0.0


def _extended(values: Sequence[float], count: int) -> list[float]:
    return [*values[:count], *[values[-1]] * (count - len(values))]
