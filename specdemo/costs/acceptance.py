"""Tokens emitted per pass, from acceptance rates by position or from the passes of a recorded run.

A run records the drafted and accepted tokens of every pass. A greedy draft model predicts the same token at the same
place wherever its draft starts, so shorter drafts can be simulated pass by pass. One case is unknown: whether the draft
would have predicted the bonus token after a fully accepted draft. If a shorter draft needs it, both cases are followed.

Drafts longer than the recorded ones are extrapolated. The interval then covers every case from none to all of the
unknown draft tokens being accepted, because the run contains no data about them.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod, sqrt
from operator import itemgetter, mul
from statistics import fmean, variance

from specdemo.core.estimate import Estimate, t_quantile
from specdemo.core.tally import StepCounts, node_depths
from specdemo.core.trace import LaneTrace, StepEvent

MAX_RATES = 64
MIN_TRIALS = 4  # with fewer trials a rate or a mean is not used
BISECTIONS = 50
BLOCKS = 8  # per run, for the interval of a mean
# Beyond the recorded positions the conditional acceptance starts at the smaller of two rates, that of the last position
# and that of all positions pooled, and decays by this factor per position. The last position alone is unusable: it has
# the fewest trials, and 12 of 12 accepted would continue as certainty. Without decay, prompt lookup and MTP at k = 16
# are overestimated by 10 %. docs/what-if.md has the comparison with runs.
DECAY = 0.97

PassCounts = tuple[int, int]  # accepted and drafted tokens of a pass


def reach_probabilities(rates: Iterable[float]) -> list[float]:
    """Return the probability that at least 1, 2, .. draft tokens are accepted."""
    return list(accumulate(rates, mul))


def expected_tokens(rates: Iterable[float]) -> list[float]:
    """Return the mean accepted length for k = 0, 1, .. draft tokens, including the correction or bonus token."""
    return list(accumulate(accumulate(rates, mul), initial=1.0))


def measured_rates(accepted: Iterable[int], depth: int) -> tuple[list[float], float]:
    """Return the acceptance rates of the positions with enough trials, and the rate of all `depth` positions pooled.

    accepted: number of accepted draft tokens per step.
    """
    counts = list(accepted)
    reached = [sum(n >= position for n in counts) for position in range(depth + 1)]
    rates = [hits / tries for tries, hits in pairwise(reached) if tries >= MIN_TRIALS]
    return rates, pooled_rate(reached)


def pooled_rate(reached: Sequence[float]) -> float:
    """Return the acceptance rate of all positions together. reached: steps, or their share, by accepted tokens."""
    return sum(reached[1:]) / (sum(reached[:-1]) or 1.0)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """rates: the chance that the token at a position is kept where all before it are. Past the end the last rate
    continues if the rates are an assumption, and `DECAY` applies if they were recorded.

    passes: those of a recorded run of chains, in order; `exact` where they can be replayed at other draft lengths.
    widths: nodes of a tree at each depth; its rates are by depth, and hold for this tree, also cut to a smaller depth.
    recorded: whether the rates were measured by a server that reports no passes.
    """

    rates: tuple[float, ...]
    passes: tuple[PassCounts, ...] = ()
    exact: bool = False
    widths: tuple[int, ...] = ()
    recorded: bool = False
    lengths: tuple[tuple[int, float], ...] = ()  # k and its mean accepted length, where a run at that k measured it

    def __post_init__(self) -> None:
        if not self.rates or len(self.rates) > MAX_RATES or not all(0.0 <= rate <= 1.0 for rate in self.rates):
            raise ValueError(f"acceptance needs 1 to {MAX_RATES} numbers between 0 and 1, one per position")

    @property
    def nodes(self) -> int:
        """Return the number of nodes of the tree; 0: chains."""
        return sum(self.widths)

    @property
    def longest(self) -> int | None:
        """Return the recorded draft length; None if the rates do not come from a run."""
        return max((drafted for _, drafted in self.passes), default=len(self.rates) if self.recorded else None)

    def extrapolates(self, k: int) -> bool:
        """Return whether drafts of k tokens are longer than the recorded ones."""
        return self.longest is not None and k > self.longest

    def rate(self, position: int) -> float:
        """Return the conditional acceptance at a position, counted from 1."""
        excess = position - len(self.rates)
        if excess <= 0:
            return self.rates[position - 1]
        if self.longest is None:
            return self.rates[-1]
        pooled = pooled_rate([1.0, *reach_probabilities(self.rates)])
        return min(self.rates[-1], pooled) * DECAY**excess

    def tokens(self, k: int) -> Estimate:
        """Return the tokens emitted by a pass that verifies k draft tokens, including the correction or bonus token."""
        longest, measured = self.longest, dict(self.lengths)
        if k in measured:
            return Estimate(measured[k])
        if longest is None:
            return Estimate(self.expected(k))
        if self.exact:
            return self._replayed(k, longest)
        if k > longest:
            return self._extrapolated(k, longest)
        return self._measured(k)

    def _measured(self, k: int) -> Estimate:
        """Return the mean over the recorded passes, each cut to k drafted tokens."""
        if not self.passes:
            return Estimate(self.expected(k))
        return _mean([1.0 + min(kept, k) for kept, _ in self.passes])

    def _replayed(self, k: int, longest: int) -> Estimate:
        """Replay the passes at k; a k beyond the recorded one replays a full draft and the passes that follow it."""
        share = self._measured(k).width
        low, value, high = _replayed_once(self.passes, k, self.rate(min(k, longest + 1)))
        if k > longest:
            share = share or 0.0
            return Estimate(value, low * (1.0 - share), min(high * (1.0 + share), k + 1.0))
        if share is None:
            return Estimate(value)
        return Estimate(value, min(low, value * (1.0 - share)), max(high, value * (1.0 + share)))

    def _extrapolated(self, k: int, longest: int) -> Estimate:
        """Add the further tokens of full drafts to the recorded mean. The interval goes from none of them to all."""
        base, extrapolated = self._measured(longest), range(longest + 1, k + 1)
        full, passes = sum(kept >= longest for kept, _ in self.passes), len(self.passes)
        chance = full / passes if passes else self.p_all_accepted(longest)
        most = (full + 1.0) / (passes + 2.0) if passes else chance  # rule of succession: 0 of n does not prove never
        value = base.value + chance * sum(reach_probabilities(map(self.rate, extrapolated)))
        low = base.value if base.low is None else base.low
        high = base.value if base.high is None else base.high
        return Estimate(value, low, min(high + max(most, chance) * len(extrapolated), k + 1.0))

    def expected(self, k: int) -> float:
        """Return the mean accepted length of drafts of k tokens, from the rates alone."""
        return expected_tokens(map(self.rate, range(1, k + 1)))[k]

    def p_all_accepted(self, k: int, batch: int = 1) -> float:
        """Return the probability that at least one row of a batch accepts the whole draft."""
        return self._in_any_row(k, batch)[-1]

    def longest_of(self, k: int, batch: int) -> float:
        """Return the expected maximum number of tokens over the rows of a batch, which sets the verification width."""
        return 1.0 + sum(self._in_any_row(k, batch))

    def _in_any_row(self, k: int, batch: int) -> list[float]:
        """Return the probability that any row accepts at least 1, 2, .., k tokens."""
        return [1.0 - (1.0 - p) ** batch for p in reach_probabilities(map(self.rate, range(1, k + 1)))]


def replayed(passes: Sequence[PassCounts], k: int, chance: float) -> tuple[float, float, float]:
    """Simulate drafts of length k from longer ones; return the lowest, expected and highest tokens per pass.

    chance: probability that a draft token without recorded outcome is accepted. The three values are equal if there is
    none.
    """
    guesses: list[bool | None] = []  # per token: whether the draft would have been accepted; None: unknown
    for kept, drafted in passes:
        guesses += [True] * kept + [None if kept >= drafted else False]
    if not guesses:
        raise ValueError("this run has no passes to replay; record a run with a drafting lane")
    steps = _steps(guesses, k, chance)
    most, value, fewest = (len(guesses) / count for count in steps)
    return fewest, value, most


_replayed_once = lru_cache(maxsize=64)(replayed)  # a prediction asks for each k at every batch size


def _steps(guesses: Sequence[bool | None], k: int, chance: float) -> tuple[float, float, float]:
    """Return the fewest, the expected and the most passes that generate all tokens, by recursion from the end."""
    end = len(guesses)
    passes: list[tuple[float, float, float]] = [(0.0, 0.0, 0.0)] * (end + k + 1)
    for begin in reversed(range(end)):
        low, mean, high, alive = float(end), 0.0, 0.0, 1.0
        for place in range(begin, begin + k + 1):  # the pass ends with this token
            guess = guesses[place] if place < min(end, begin + k) else False
            ends = 1.0 if guess is False else 0.0 if guess else 1.0 - chance
            few, some, many = passes[place + 1]
            if guess is not True:
                low, high, mean = min(low, few), max(high, many), mean + alive * ends * some
            alive *= 1.0 - ends
            if guess is False:
                break
        passes[begin] = (1.0 + low, 1.0 + mean, 1.0 + high)
    return passes[0]


def of_passes(passes: Iterable[PassCounts], exact: bool = False, widths: tuple[int, ...] = ()) -> Acceptance:
    """Compute the acceptance from passes. widths: of their draft tree. Raises ValueError if nothing was drafted."""
    pairs = tuple(passes)
    deepest = max((drafted for _, drafted in pairs), default=0)
    if not deepest:
        raise ValueError("this run drafted nothing, so its acceptance is unknown; choose another lane")
    counts = [kept for kept, drafted in pairs if drafted == deepest] or [kept for kept, _ in pairs]
    rates, _ = measured_rates(counts, deepest)
    rates = rates or [fmean(n > 0 for n in counts)]
    return Acceptance(tuple(rates[:MAX_RATES]), () if widths else pairs, exact, widths[:MAX_RATES])


def from_mean(tokens: float, k: int) -> Acceptance:
    """Return one acceptance rate for all positions from the mean accepted length of drafts of length or depth k."""
    if not 1.0 <= tokens <= k + 1.0:
        raise ValueError(f"a pass over a draft of {k} emits 1 to {k + 1} tokens, not {tokens:g}")
    rate = solve(lambda rate: Acceptance((rate,)).expected(k), tokens)
    return Acceptance((rate,) * k)


def solve(rising: Callable[[float], float], value: float) -> float:
    """Return the argument from 0 to 1 at which a rising function reaches a value, by bisection; 1: it does not."""
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if rising(middle) < value else (low, middle)
    return high


def of_lengths(lengths: Mapping[int, float]) -> Acceptance:
    """Return the acceptance of runs of one drafter at several draft lengths, from their mean accepted lengths by k.

    The mean accepted length grows from k - 1 to k by the probability that all k draft tokens are accepted; positions
    without a length of their own share one rate.
    """
    rates, before, reached, tokens = list[float](), 0, 1.0, 1.0
    for k, length in sorted(lengths.items()):
        gap = k - before
        gained = (length - tokens) / reached if reached else 0.0
        rates += from_mean(1.0 + min(max(gained, 0.0), gap), gap).rates
        before, tokens, reached = k, length, prod(rates)
    return Acceptance(tuple(rates), recorded=True, lengths=tuple(sorted(lengths.items())))


def of_lane(lane: LaneTrace) -> Acceptance:
    """Return the acceptance of a lane of a trace over all its rows. Raises ValueError if it is unknown."""
    if not lane.steps_known:
        rates = [rate for rate in lane.service.accept_by_position if rate]
        if not rates:
            raise ValueError(f"lane {lane.name!r} ran on a server that reports no accepted tokens; pass --acceptance")
        conditional = tuple(min(b / a, 1.0) for a, b in zip([1.0, *rates], rates, strict=False))
        return Acceptance(conditional, recorded=True)
    rows = range(len(lane.events[0].path)) if lane.events else range(0)
    places = [(event, row) for row in rows for event in lane.events[1:] if event.emitted[row]]
    steps = [StepCounts.of(*place) for place in places]
    trees = [(step.drafted, place) for step, place in zip(steps, places, strict=True) if step.drafted > step.depth]
    widths = _widths(*max(trees, key=itemgetter(0))[1]) if trees else ()
    greedy = lane.method == "draft_model"  # heads become less accurate with distance from the target's hidden states
    return of_passes(((step.accepted, step.depth) for step in steps), greedy and len(rows) == 1, widths)


def _widths(event: StepEvent, row: int) -> tuple[int, ...]:
    """Return the number of nodes at each depth of a row's draft tree."""
    counts = Counter(node_depths(event, row))
    return tuple(counts[depth] for depth in range(1, max(counts) + 1))


def _mean(values: Sequence[float]) -> Estimate:
    """Return the mean with Student's interval over blocks of passes."""
    value = fmean(values)
    if len(values) < 2 * BLOCKS:
        return Estimate(value)
    size = len(values) / BLOCKS
    blocks = [fmean(values[int(i * size) : int((i + 1) * size)]) for i in range(BLOCKS)]
    half = t_quantile(BLOCKS - 1) * sqrt(variance(blocks, value) / BLOCKS)
    return Estimate(value, value - half, value + half)
