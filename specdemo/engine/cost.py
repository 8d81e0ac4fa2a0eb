"""Cost model: explains the speed of a lane and predicts the fastest draft length.

c: time to draft one token, v(n): time of a target pass over n slots, both relative to a one-token pass; alpha:
probability that a draft token is accepted if its parent is. A step with k draft tokens outputs 1 + a1 + a1 a2 + ...
tokens and takes k c + v(k + 1) plus the cost of acceptance (Leviathan et al., 2211.17192, theorem 3.8, but v is
measured instead of 1, and alpha is known for every position). All terms can be read from the events of two lanes.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from math import isfinite
from operator import itemgetter, mul
from statistics import fmean, linear_regression, pstdev
from typing import Any

from specdemo.core.estimate import Estimate, t_quantile
from specdemo.core.tally import Step, summarise
from specdemo.core.trace import LaneTrace, RunTrace, StepEvent, estimates, step_ms

LONGEST = 16  # largest draft length to consider
FEW = 4  # with fewer steps a mean is not used
PARTS = 8  # parts of a run, left out one at a time for the jackknife interval
WIDTHS = (1, 2, 3, 5, 9, 17)

Runs = Sequence[Sequence[StepEvent]]  # events of one or several runs of a lane, with prefill


@dataclass(frozen=True, slots=True)
class Costs:
    """Time and yield of a step, times in milliseconds. Positions start at 1; the last entry of a list applies to all
    later positions."""

    plain_ms: float  # a step of plain decoding
    pass_ms: float  # its target pass, over one slot
    verify: Mapping[int, float]  # v: slots -> time of a pass over them, in units of pass_ms; v(1) is 1
    draft_ms: float  # per draft token
    draft_step_ms: float  # per step, independent of the draft length
    other_ms: float  # acceptance and commit
    alpha: Sequence[float]  # probability that the token at this position is accepted if its ancestors are
    k: int  # draft length of the measured run
    reach: Sequence[float] = (1.0,)  # share of steps whose draft reaches this position
    tree_nodes: float | None = None  # mean number of nodes per tree; None: drafts are chains

    def tokens(self, k: int) -> float:
        """Return the mean accepted length at draft length k."""
        kept: Iterator[float] = accumulate(_first(self.alpha, k), mul)
        return 1.0 + sum(kept)

    def drafted(self, k: int) -> float:
        """Return the mean number of draft tokens per step."""
        return sum(_first(self.reach, k)) if self.tree_nodes is None else self.tree_nodes

    def verify_ms(self, k: int) -> float:
        """Return the time of the target's pass over root and draft."""
        if self.tree_nodes is not None:
            return self.pass_ms * self.v(self.tree_nodes + 1.0)
        reach = [1.0, *_first(self.reach, k), 0.0]
        return self.pass_ms * sum((reach[n] - reach[n + 1]) * self.v(n + 1.0) for n in range(k + 1))

    def drafting_ms(self, k: int) -> float:
        """Return the time to draft k tokens."""
        return self.draft_step_ms + self.draft_ms * self.drafted(k) if k else 0.0

    def step_ms(self, k: int) -> float:
        """Return the time of a step with draft length k."""
        return self.drafting_ms(k) + self.verify_ms(k) + self.other_ms

    def speedup(self, k: int) -> float:
        """Return the speed-up over plain decoding; k = 0 means off. A tree is known at its measured depth only."""
        return self.tokens(k) * self.plain_ms / self.step_ms(k) if k else 1.0

    def best_k(self, longest: int = LONGEST) -> int:
        """Return the draft length with the highest predicted speed-up, 0 for off. For a tree: its depth or 0."""
        ks: Iterable[int] = range(1, longest + 1) if self.tree_nodes is None else [self.k]
        return max([0, *ks], key=self.speedup)

    def v(self, slots: float) -> float:
        """Interpolate v linearly between the measured widths; extrapolate with the last slope, but never downwards."""
        known = sorted(self.verify)
        above = next((n for n in known if n >= slots), known[-1])
        below = max((n for n in known if n < above), default=above)
        if below == above:
            return self.verify[above]
        slope = (self.verify[above] - self.verify[below]) / (above - below)
        return self.verify[above] + (max(slope, 0.0) if slots > above else slope) * (slots - above)

    def terms(self) -> dict[str, float]:
        """Return the overheads of a step beyond a one-slot pass, as shares of its time. Rejected tokens carry their
        part of drafting and of the wider pass."""
        step, drafted = self.step_ms(self.k), self.drafted(self.k)
        kept = min((self.tokens(self.k) - 1.0) / drafted, 1.0) if drafted else 0.0
        drafting = self.drafting_ms(self.k) / step
        wider = max(self.verify_ms(self.k) - self.pass_ms, 0.0) / step
        return {
            "drafting accepted tokens": drafting * kept,
            "verifying more than one token": wider * kept,
            "rejected draft tokens": (drafting + wider) * (1.0 - kept),
            "overhead": self.other_ms / step,
        }

    def probed(self, ms: Mapping[int, float]) -> "Costs":
        """Return a copy with v from isolated passes, slots -> milliseconds.

        Between drafts a wide pass takes another time than in isolation, so the probe gives the shape of v and the
        widest pass of the lane its height.
        """
        alone = replace(self, verify={n: taken / ms[1] for n, taken in ms.items()})
        widest = max(self.verify)
        height = self.verify[widest] / alone.v(widest) if widest > 1 else 1.0
        return replace(alone, verify={n: v * height if n > 1 else 1.0 for n, v in alone.verify.items()})


def observed(plain: Runs, lane: Runs, k: int = 0) -> Costs | None:
    """Fit the cost model to the events of a plain and a drafting lane; only row 0 counts.

    k: the requested draft length, if it may be more than was ever drafted. None if nothing was drafted or no time
    passed.
    """
    plain_steps = [event for run in plain for event in run[1:]]
    steps = [Step.of(event) for run in lane for event in run[1:]]
    deepest = max((step.depth for step in steps), default=0)
    plain_ms = _mean(step_ms(e) for e in plain_steps)
    pass_ms = _mean(e.ms.get("verify", 0.0) for e in plain_steps)
    if not deepest or not pass_ms or not all(step.ms for step in steps):
        return None
    draft_ms, draft_step_ms = _line([(step.drafted, step.draft_ms) for step in steps])
    whole = [step for run in lane for step in _whole(run, deepest)] or steps
    verify = _means([(step.drafted, step.verify_ms / pass_ms) for step in steps])
    return Costs(
        plain_ms=plain_ms,
        pass_ms=pass_ms,
        verify={nodes + 1: v for nodes, v in verify.items()} | {1: 1.0},
        draft_ms=draft_ms,
        draft_step_ms=draft_step_ms,
        other_ms=_mean(step.ms - step.draft_ms - step.verify_ms for step in steps),
        alpha=_alpha(whole, deepest, exhausted=deepest < k),
        k=max(min(k, LONGEST), deepest),
        reach=[fmean(s.depth >= at for s in whole) for at in range(1, min(max(k, deepest), LONGEST) + 1)],
        tree_nodes=_mean(s.drafted for s in steps) if any(s.drafted > s.depth for s in steps) else None,
    )


def prediction(trace: RunTrace) -> list[dict[str, Any]]:
    """Return one entry per speculative lane: lane, predicted_speedup (as it ran), best_k (0: off), best_speedup,
    sentence.

    The numbers are None if too little was decoded.
    """
    lanes = zip(trace.lanes[1:], estimates(trace), strict=True)
    return [_predicted(trace.lanes[0], lane, speed) for lane, speed in lanes]


def _predicted(plain: LaneTrace, lane: LaneTrace, speed: Estimate | None) -> dict[str, object]:
    numbers, outside = summarise(lane), bool(plain.remote or lane.remote)
    sentence = _from_outside(speed, numbers) if outside and speed else explain(numbers, speed)
    sentence += _server_says(plain) + _server_says(lane)
    if lane.remote and lane.remote.source:
        sentence += f" {lane.remote.source}."
    known: dict[str, object] = dict.fromkeys(("predicted_speedup", "best_k", "best_speedup"))
    asked = lane.options.get("k")
    with suppress(ArithmeticError, ValueError):  # a stored trace may contain any times
        k = asked if isinstance(asked, int) else 0
        foreseen = None if outside or speed is None else Foreseen.of(plain.events, lane.events, k)
        if foreseen is not None:
            costs, best = foreseen.costs, foreseen.best
            sentence = explain(numbers, speed, foreseen)
            speedups = round(costs.speedup(costs.k), 4), round(costs.speedup(best), 4)
            known = {"predicted_speedup": speedups[0], "best_k": best, "best_speedup": speedups[1]}
    return {"lane": lane.name, **known, "sentence": sentence}


@dataclass(frozen=True, slots=True)
class Foreseen:
    """Recommended draft length of a run. gain: its predicted speed over the measured draft length, with interval."""

    costs: Costs
    best: int  # at most twice the measured draft length; further predictions are unreliable
    gain: Estimate

    @classmethod
    def of(cls, plain: Sequence[StepEvent], lane: Sequence[StepEvent], k: int) -> "Foreseen | None":
        """Compute the advice, with a jackknife interval over parts of the run. None if nothing was drafted or no time
        passed."""
        costs = observed([plain], [lane], k)
        if costs is None:
            return None
        best = costs.best_k(min(LONGEST, 2 * costs.k))
        gain = costs.speedup(best) / costs.speedup(costs.k)
        if best == costs.k or min(len(plain), len(lane)) <= PARTS:
            return cls(costs, best, Estimate(gain))
        parts = [observed([_without(plain, part)], [_without(lane, part)], k) for part in range(PARTS)]
        gains = [part.speedup(best) / part.speedup(costs.k) for part in parts if part]
        if len(gains) < PARTS or not all(map(isfinite, gains)):
            return cls(costs, best, Estimate(gain))
        half = t_quantile(PARTS - 1) * (PARTS - 1) * pstdev(gains) / PARTS**0.5
        return cls(costs, best, Estimate(gain, gain - half, gain + half))


def _without(events: Sequence[StepEvent], part: int) -> list[StepEvent]:
    """Remove one of JACKKNIFE_PARTS parts of the steps; keep the prefill."""
    steps = events[1:]
    begin, end = (len(steps) * at // PARTS for at in (part, part + 1))
    return [*events[:1], *steps[:begin], *steps[end:]]


def explain(lane: Mapping[str, Any], speed: Estimate | None, foreseen: Foreseen | None = None) -> str:
    """Explain a lane's speed-up in one sentence, from its summary (core.tally.summarise). With advice, also name the
    largest overhead and a faster draft length."""
    if speed is None or not lane["steps"]:
        return "Too few tokens to say."
    cost = round(lane["tokens_per_step"] / speed.value, 2)
    length = lane["tokens_per_step"]
    sentence = f"{_said(speed)}: a step costs {cost:.2f}x a plain token and yields {length:.2f} tokens"
    if not lane["drafted"]:
        return sentence + "; nothing was drafted."
    sentence += f"; {lane['acceptance_rate']:.0%} of the draft tokens were accepted"
    if foreseen is None:
        return sentence + "."
    extra = "a step takes no extra time"
    if cost > 1.0:
        name, share = max(foreseen.costs.terms().items(), key=itemgetter(1))
        extra = f"most of the extra time goes into {name} ({share:.0%} of a step)"
    return f"{sentence}; {extra}; {_advice(foreseen, speed)}."


def _said(speed: Estimate) -> str:
    return f"{speed.word.capitalize()} ({speed.told()})"


def _from_outside(speed: Estimate, lane: Mapping[str, object]) -> str:
    """Return the sentence for a lane on a server, whose time cannot be split."""
    said = f"{_said(speed)}: whole requests, timed from outside"
    rate, length = lane["acceptance_rate"], lane["tokens_per_step"]
    kept = [] if rate is None else [f"{rate:.0%} of the draft tokens were accepted"]
    emitted = [] if length is None else [f"a pass yielded {length:.2f} tokens"]
    return "; ".join([said, *kept, *emitted]) + "."


def _server_says(lane: LaneTrace) -> str:
    """Return the server's own times of the last request, if it sends them."""
    times = lane.remote.times if lane.remote else {}
    if len(times) < 2:
        return ""
    first, decoding = times["ttft_ms"], times["decode_ms"]
    return (
        f" By its server's clock, {lane.name} took {first:.0f} ms to its first token and {decoding:.0f} ms to decode."
    )


def _advice(foreseen: Foreseen, speed: Estimate) -> str:
    if not foreseen.best and speed.word == "slower":
        return "turn it off: no draft length is predicted to beat plain decoding"
    if foreseen.best and foreseen.gain.word == "faster":
        return f"k = {foreseen.best} is predicted to be {foreseen.gain.told()} as fast as k = {foreseen.costs.k}"
    return f"no other k is predicted to be clearly faster than k = {foreseen.costs.k}"


def _whole(run: Sequence[StepEvent], depth: int) -> list[Step]:
    """Return the steps whose draft only the drafter can have shortened, without those at the end of the text."""
    left = sum(len(event.emitted[0]) for event in run)
    steps = []
    for event in run:
        if event.index and left > depth:
            steps.append(Step.of(event))
        left -= len(event.emitted[0])
    return steps


def _alpha(steps: Sequence[Step], deepest: int, exhausted: bool) -> list[float]:
    """Return accepted / tried per position, where there are enough tries.

    Later positions use the lower of the last value and the mean of all positions, so that chance at the end is not
    taken for a rule; 0 after the longest draft of the drafter.
    """
    kept = [sum(step.kept >= position for step in steps) for position in range(deepest + 1)]
    known = [kept[i] / kept[i - 1] for i in range(1, deepest + 1) if kept[i - 1] >= FEW]
    together = sum(kept[1:]) / max(sum(kept[:-1]), 1)
    guess = min(known[-1], together) if known else together
    return [*known, *[guess] * (deepest - len(known)), 0.0 if exhausted else guess]


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Fit a line through the mean times by size; return slope and intercept, both at least 0. With a single frequent
    size, the line goes through the origin."""
    frequent = _means(points)
    sizes, times = zip(*(point for point in points if point[0] in frequent), strict=True)
    x, y = fmean(sizes), fmean(times)
    slope = linear_regression(sizes, times).slope if len(frequent) > 1 else y / x
    if slope < 0.0:
        return 0.0, y
    return (slope, y - slope * x) if slope * x < y else (y / x, 0.0)


def _means(points: Sequence[tuple[int, float]]) -> dict[int, float]:
    """Return size -> mean. Rare sizes are left out, unless all sizes above 0 are rare."""
    groups = defaultdict[int, list[float]](list)
    for size, value in points:
        groups[size].append(value)
    frequent = {size: fmean(values) for size, values in groups.items() if len(values) >= FEW}
    return frequent if any(frequent) else {size: fmean(values) for size, values in groups.items()}


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return fmean(values) if values else 0.0


def _first(values: Sequence[float], count: int) -> list[float]:
    return [*values[:count], *[values[-1]] * (count - len(values))]
