"""Why a lane is as fast as it is, and which draft length would be the fastest.

c: the time of drafting one token, v(n): that of a target pass over n slots, both against a one-token pass; alpha: the
chance that a drafted token is kept where the one above it was. A step that drafts k tokens emits 1 + a1 + a1 a2 + ...
and takes k c + v(k + 1) and what accepting costs (Leviathan et al. 2211.17192, theorem 3.8, with v measured instead of
taken as 1 and alpha known for every position). All of it can be read from the events of two lanes.
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

LONGEST = 16  # tokens of the longest draft that is considered
FEW = 4  # fewer steps than this are not believed
PARTS = 8  # of a run, each left out once to see how far a prediction depends on it
WIDTHS = (1, 2, 3, 5, 9, 17)

Runs = Sequence[Sequence[StepEvent]]  # the events of one lane, one or several runs, prefill included


@dataclass(frozen=True, slots=True)
class Costs:
    """What a step costs, in milliseconds, and what it yields. Positions start at 1; past its end a list goes on with
    its last entry."""

    plain_ms: float  # a step of plain decoding
    pass_ms: float  # of it, the target's pass over one slot
    verify: Mapping[int, float]  # v: slots -> time of a pass over them, in units of pass_ms; v(1) is 1
    draft_ms: float  # drafting one token
    draft_step_ms: float  # drafting at all, however little
    other_ms: float  # accepting and committing
    alpha: Sequence[float]  # the chance that the token at this position is kept where those above it are
    k: int  # the draft length these costs were seen at
    reach: Sequence[float] = (1.0,)  # the share of steps that draft as far as this position
    tree_nodes: float | None = None  # nodes of the average tree; None: drafts are chains

    def tokens(self, k: int) -> float:
        """What a step emits that may draft k deep, the target's own token included."""
        kept: Iterator[float] = accumulate(_first(self.alpha, k), mul)
        return 1.0 + sum(kept)

    def drafted(self, k: int) -> float:
        """How many tokens it drafts."""
        return sum(_first(self.reach, k)) if self.tree_nodes is None else self.tree_nodes

    def verify_ms(self, k: int) -> float:
        """The target's pass over the root and the draft."""
        if self.tree_nodes is not None:
            return self.pass_ms * self.v(self.tree_nodes + 1.0)
        reach = [1.0, *_first(self.reach, k), 0.0]
        return self.pass_ms * sum((reach[n] - reach[n + 1]) * self.v(n + 1.0) for n in range(k + 1))

    def drafting_ms(self, k: int) -> float:
        """Milliseconds of drafting k tokens."""
        return self.draft_step_ms + self.draft_ms * self.drafted(k) if k else 0.0

    def step_ms(self, k: int) -> float:
        """Milliseconds of a whole step that drafts k tokens."""
        return self.drafting_ms(k) + self.verify_ms(k) + self.other_ms

    def speedup(self, k: int) -> float:
        """Against plain decoding; 0 stands for off. A tree is known at its own depth alone."""
        return self.tokens(k) * self.plain_ms / self.step_ms(k) if k else 1.0

    def best_k(self, longest: int = LONGEST) -> int:
        """The draft length predicted to be the fastest, 0 for off. Of a tree only: as it is, or off."""
        ks: Iterable[int] = range(1, longest + 1) if self.tree_nodes is None else [self.k]
        return max([0, *ks], key=self.speedup)

    def v(self, slots: float) -> float:
        """Linear between the measured widths; beyond them as between the last two, but never falling."""
        known = sorted(self.verify)
        above = next((n for n in known if n >= slots), known[-1])
        below = max((n for n in known if n < above), default=above)
        if below == above:
            return self.verify[above]
        slope = (self.verify[above] - self.verify[below]) / (above - below)
        return self.verify[above] + (max(slope, 0.0) if slots > above else slope) * (slots - above)

    def terms(self) -> dict[str, float]:
        """Where a step's time goes besides one pass over one slot: shares of the step. Refused drafts carry the part of
        drafting and of the wider pass that was spent on them."""
        step, drafted = self.step_ms(self.k), self.drafted(self.k)
        kept = min((self.tokens(self.k) - 1.0) / drafted, 1.0) if drafted else 0.0
        drafting = self.drafting_ms(self.k) / step
        wider = max(self.verify_ms(self.k) - self.pass_ms, 0.0) / step
        return {
            "drafting what was kept": drafting * kept,
            "checking more than one token at a time": wider * kept,
            "drafts that were refused": (drafting + wider) * (1.0 - kept),
            "overhead": self.other_ms / step,
        }

    def probed(self, ms: Mapping[int, float]) -> "Costs":
        """The same with v from a probe, slots -> milliseconds of the pass alone. Between drafts a wide pass takes
        another time than alone; so the probe gives the shape and the widest pass of the lane the height."""
        alone = replace(self, verify={n: taken / ms[1] for n, taken in ms.items()})
        widest = max(self.verify)
        height = self.verify[widest] / alone.v(widest) if widest > 1 else 1.0
        return replace(alone, verify={n: v * height if n > 1 else 1.0 for n, v in alone.verify.items()})


def observed(plain: Runs, lane: Runs, k: int = 0) -> Costs | None:
    """The costs that the events of a plain lane and of a drafting one show; rows after the first are not looked at.

    k: the draft length that was asked for, where it may be more than was ever drafted. None where nothing was drafted
    or no time passed.
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
    """One entry per speculative lane: lane, predicted_speedup (as it ran), best_k (0: off), best_speedup, sentence.
    The numbers are None where too little was decoded to say."""
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
    with suppress(ArithmeticError, ValueError):  # a stored trace may hold any times
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
    """What a run's costs say of other draft lengths. gain: of the best one over its own, with its interval."""

    costs: Costs
    best: int  # no further out than twice what was seen: there a prediction is a guess
    gain: Estimate

    @classmethod
    def of(cls, plain: Sequence[StepEvent], lane: Sequence[StepEvent], k: int) -> "Foreseen | None":
        """None where nothing was drafted or no time passed. The interval is the jackknife's over parts of the run."""
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
    """The steps but for one of PARTS stretches of them; the prefill stays."""
    steps = events[1:]
    begin, end = (len(steps) * at // PARTS for at in (part, part + 1))
    return [*events[:1], *steps[:begin], *steps[end:]]


def explain(lane: Mapping[str, Any], speed: Estimate | None, foreseen: Foreseen | None = None) -> str:
    """One sentence from a lane's summary (core.tally.summarise) and its speed-up: what that is made of. With what is
    foreseen, also what takes most of the time and what would be faster."""
    if speed is None or not lane["steps"]:
        return "Too few tokens to say."
    cost = round(lane["tokens_per_step"] / speed.value, 2)
    sentence = f"{_said(speed)}: a step costs {cost:.2f}x a plain token and yields {lane['tokens_per_step']:.2f} tokens"
    if not lane["drafted"]:
        return sentence + "; nothing was drafted."
    sentence += f"; {lane['acceptance_rate']:.0%} of the drafted tokens were kept"
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
    """The sentence where a lane ran on a server, whose time nobody here can split."""
    said = f"{_said(speed)}: whole requests, timed from outside"
    rate, length = lane["acceptance_rate"], lane["tokens_per_step"]
    kept = [] if rate is None else [f"{rate:.0%} of the drafted tokens were kept"]
    emitted = [] if length is None else [f"a pass yielded {length:.2f} tokens"]
    return "; ".join([said, *kept, *emitted]) + "."


def _server_says(lane: LaneTrace) -> str:
    """Its times of the last request, where it tells them."""
    times = lane.remote.times if lane.remote else {}
    if len(times) < 2:
        return ""
    first, decoding = times["ttft_ms"], times["decode_ms"]
    return f" By its server's clock {lane.name} took {first:.0f} ms to its first token and {decoding:.0f} ms to decode."


def _advice(foreseen: Foreseen, speed: Estimate) -> str:
    if not foreseen.best and speed.word == "slower":
        return "turn it off: no draft length is predicted to beat plain decoding"
    if foreseen.best and foreseen.gain.word == "faster":
        return f"k = {foreseen.best} is predicted to be {foreseen.gain.told()} as fast as k = {foreseen.costs.k}"
    return f"no other k is predicted to be clearly faster than k = {foreseen.costs.k}"


def _whole(run: Sequence[StepEvent], depth: int) -> list[Step]:
    """The steps in which nothing but the drafter can have cut the draft: not those at the end of the text."""
    left = sum(len(event.emitted[0]) for event in run)
    steps = []
    for event in run:
        if event.index and left > depth:
            steps.append(Step.of(event))
        left -= len(event.emitted[0])
    return steps


def _alpha(steps: Sequence[Step], deepest: int, exhausted: bool) -> list[float]:
    """Per position kept / tried, as far as there are enough tries. Behind that the lower of the last one and of all
    positions together, so that luck at the end is not taken for a rule; 0 where the drafter does not reach."""
    kept = [sum(step.kept >= position for step in steps) for position in range(deepest + 1)]
    known = [kept[i] / kept[i - 1] for i in range(1, deepest + 1) if kept[i - 1] >= FEW]
    together = sum(kept[1:]) / max(sum(kept[:-1]), 1)
    guess = min(known[-1], together) if known else together
    return [*known, *[guess] * (deepest - len(known)), 0.0 if exhausted else guess]


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Slope and height at 0 of the line through the mean times by size, neither below 0; where only one size is
    frequent, the line through the origin."""
    frequent = _means(points)
    sizes, times = zip(*(point for point in points if point[0] in frequent), strict=True)
    x, y = fmean(sizes), fmean(times)
    slope = linear_regression(sizes, times).slope if len(frequent) > 1 else y / x
    if slope < 0.0:
        return 0.0, y
    return (slope, y - slope * x) if slope * x < y else (y / x, 0.0)


def _means(points: Sequence[tuple[int, float]]) -> dict[int, float]:
    """Size -> mean; sizes met a few times only are left out, unless no size above 0 is met more often."""
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
