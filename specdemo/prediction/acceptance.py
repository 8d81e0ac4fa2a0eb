"""How many tokens a pass emits: from the chance that each position is kept, or by replaying what a run kept.

A run says for every pass how many tokens were drafted and how many of them were kept. A draft model that is greedy
guesses the same token at the same place wherever its draft began, so what it would have kept with shorter drafts can be
played again, pass by pass. One thing no run tells: whether the draft would have guessed the token that the target added
behind a draft that was kept whole. Where a shorter draft would have had to, both answers are followed.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import sqrt
from operator import mul
from pathlib import Path
from statistics import fmean, variance

from specdemo.core.estimate import Estimate, t_quantile
from specdemo.core.tally import Step
from specdemo.core.trace import LaneTrace
from specdemo.presets.recorded import load_trace

LONGEST = 64
BLOCKS = 8  # of the passes of a run, for the interval of a mean
FEW = 4  # a position tried less often is not believed

Kept = tuple[int, int]  # of a pass: tokens kept and drafted


@dataclass(frozen=True, slots=True)
class Acceptance:
    """rates: the chance that the token at a position is kept where all before it are; past its end the last goes on.

    passes: those of a recorded run of chains, in order; `exact` where they can be replayed at other draft lengths.
    nodes: of a tree; its rates are by depth, and hold for a tree of that size alone.
    """

    rates: tuple[float, ...]
    passes: tuple[Kept, ...] = ()
    exact: bool = False
    nodes: int = 0

    def __post_init__(self) -> None:
        if not self.rates or len(self.rates) > LONGEST or not all(0.0 <= rate <= 1.0 for rate in self.rates):
            raise ValueError(f"acceptance is 1 to {LONGEST} chances between 0 and 1, one for each position")

    @property
    def longest(self) -> int | None:
        """The draft length that was recorded; None: no run stands behind it."""
        return max((drafted for _, drafted in self.passes), default=None)

    def tokens(self, k: int) -> Estimate:
        """What a pass emits that checks k drafted tokens, the target's own included."""
        longest = self.longest
        if longest is None:
            return Estimate(self.expected(k))
        if k > longest:
            return _scaled(self.tokens(longest), self.expected(k) / self.expected(longest))
        spread = _mean([1.0 + min(kept, k) for kept, _ in self.passes])
        if not self.exact:
            return spread
        low, value, high = replayed(self.passes, k, self.rates[min(k, len(self.rates)) - 1])
        share = spread.width
        if share is None:
            return Estimate(value)
        return Estimate(value, min(low, value * (1.0 - share)), max(high, value * (1.0 + share)))

    def expected(self, k: int) -> float:
        """1 + a1 + a1 a2 + ... up to k (2211.17192, equation 1, with a chance for every position)."""
        longer = (self.rates[-1],) * (k - len(self.rates))
        kept: Iterator[float] = accumulate((*self.rates[:k], *longer), mul)
        return 1.0 + sum(kept)

    def whole(self, k: int, batch: int = 1) -> float:
        """The chance that at least one of so many texts keeps all of a draft."""
        return 1.0 - (1.0 - (self.expected(k) - self.expected(k - 1))) ** batch

    def longest_of(self, k: int, batch: int) -> float:
        """What the text of a batch that keeps most emits in a pass: as wide is what all of them read."""
        return 1.0 + sum(self.whole(length, batch) for length in range(1, k + 1))


def replayed(passes: Sequence[Kept], k: int, chance: float) -> tuple[float, float, float]:
    """Tokens a pass with drafts of k, where `passes` drafted at least as many: the fewest, the expected and the most.

    chance: that a guess nobody recorded would have been kept. The three are equal where no such guess is needed.
    """
    guesses: list[bool | None] = []  # of every token: would the draft have guessed it? None: nobody knows
    for kept, drafted in passes:
        guesses += [True] * kept + [None if kept >= drafted else False]
    if not guesses:
        raise ValueError("this run has no passes to replay; record one with drafts")
    steps = _steps(guesses, k, chance)
    most, value, fewest = (len(guesses) / count for count in steps)
    return fewest, value, most


def _steps(guesses: Sequence[bool | None], k: int, chance: float) -> tuple[float, float, float]:
    """The fewest, the expected and the most passes from every token on, from the last to the first."""
    end = len(guesses)
    found: list[tuple[float, float, float]] = [(0.0, 0.0, 0.0)] * (end + k + 1)
    for begin in reversed(range(end)):
        low, mean, high, alive = float(end), 0.0, 0.0, 1.0
        for place in range(begin, begin + k + 1):  # the pass ends with the token here
            guess = guesses[place] if place < min(end, begin + k) else False
            ends = 1.0 if guess is False else 0.0 if guess else 1.0 - chance
            few, some, many = found[place + 1]
            if guess is not True:
                low, high, mean = min(low, few), max(high, many), mean + alive * ends * some
            alive *= 1.0 - ends
            if guess is False:
                break
        found[begin] = (1.0 + low, 1.0 + mean, 1.0 + high)
    return found[0]


def of_passes(passes: Iterable[Kept], exact: bool = False, nodes: int = 0) -> Acceptance:
    """Raises ValueError where nothing was drafted."""
    known = tuple(passes)
    deepest = max((drafted for _, drafted in known), default=0)
    if not deepest:
        raise ValueError("this run drafted nothing, so it says nothing of acceptance; choose another lane")
    whole = [kept for kept, drafted in known if drafted == deepest] or [kept for kept, _ in known]
    kept = [sum(n >= position for n in whole) for position in range(deepest + 1)]
    tried = [i for i in range(1, deepest + 1) if kept[i - 1] >= FEW] or [1]
    rates = tuple(kept[i] / max(kept[i - 1], 1) for i in tried)
    return Acceptance(rates[:LONGEST], () if nodes else known, exact, nodes)


def from_mean(tokens: float, k: int) -> Acceptance:
    """Of drafts of k, or trees as deep, of which a mean is all that is known: one chance at every position."""
    if not 1.0 <= tokens <= k + 1.0:
        raise ValueError(f"a pass over a draft of {k} emits 1 to {k + 1} tokens, not {tokens:g}")
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2.0
        low, high = (middle, high) if Acceptance((middle,)).expected(k) < tokens else (low, middle)
    return Acceptance((high,) * k)


def of_lane(lane: LaneTrace) -> Acceptance:
    """What a lane of a trace kept, all rows of its batch together. Raises ValueError where that is not known."""
    if lane.remote is not None:
        rates = [rate for rate in lane.remote.accept_by_position if rate]
        if not rates:
            raise ValueError(f"lane {lane.name!r} ran on a server that did not tell what it kept; name --acceptance")
        return Acceptance(tuple(min(b / a, 1.0) for a, b in zip([1.0, *rates], rates, strict=False)))
    rows = range(len(lane.events[0].path)) if lane.events else range(0)
    steps = [Step.of(event, row) for row in rows for event in lane.events[1:] if event.emitted[row]]
    nodes = max((step.drafted for step in steps if step.drafted > step.depth), default=0)
    greedy = lane.method == "draft_model"  # heads guess less well the further they are from the target's own states
    return of_passes(((step.kept, step.depth) for step in steps), greedy and len(rows) == 1, nodes)


def drafting_lane(path: str | Path) -> LaneTrace:
    """The first lane of a stored run that drafts. Raises ValueError with one line."""
    for lane in load_trace(path).lanes:
        if lane.method != "none":
            return lane
    raise ValueError(f"{path} has no lane that drafts; record one with specdemo run PRESET --out {path}")


def _scaled(known: Estimate, times: float) -> Estimate:
    low, high = (None if end is None else end * times for end in (known.low, known.high))
    return Estimate(known.value * times, low, high)


def _mean(values: Sequence[float]) -> Estimate:
    """With Student's interval over blocks of passes."""
    value = fmean(values)
    if len(values) < 2 * BLOCKS:
        return Estimate(value)
    size = len(values) / BLOCKS
    blocks = [fmean(values[int(i * size) : int((i + 1) * size)]) for i in range(BLOCKS)]
    half = t_quantile(BLOCKS - 1) * sqrt(variance(blocks, value) / BLOCKS)
    return Estimate(value, value - half, value + half)
