"""Measurements of a lane's steps, from which wrappers choose who drafts and how long: times by size, and acceptance by
level. They are estimates of the next step, so that recent steps count most."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import exp
from operator import eq
from types import MappingProxyType

from specdemo.core.tree import ABSENT, Draft
from specdemo.costs.passes import interpolate

PRIOR, PRIOR_WEIGHT = 0.7, 2.0  # prior acceptance rate, and its weight in observations
START_WEIGHT = 5.0  # of a lookup's earlier texts, in observations, because texts differ
DECAY = 0.98  # decay of an observation per later one: about the last 50 count
MEASUREMENTS = 9  # per size
PREDICTOR_DECAY, RIDGE = 0.995, 0.1  # decay of the sums per observation; regularisation
MIN_WEIGHT = 0.05  # of the log-odds, so that predicted acceptance increases with confidence


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Depth, acceptance and times of one step. Finished rows are left out."""

    k: int  # requested depth
    slots: int  # verified slots, including the root
    rows: Sequence[tuple[int, int]]  # per row: drafted levels, accepted levels
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    seconds: float = 0.0  # of the whole step
    drafter: int = 0  # index of the one that drafted
    unverified: int = 0  # levels that a lookup drafted and that were not verified


def acceptance_per_row(draft: Draft, depth: int, lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Return (drafted levels, accepted levels) of a draft for every unfinished row. lengths: tokens that every row
    got."""
    drafted = [draft.nodes] * len(lengths)
    if len(drafted) > 1 and draft.nodes:
        drafted = (draft.tokens != ABSENT).sum(1).tolist()
    pairs = zip(drafted, lengths, strict=True)
    # forced tokens of a grammar may follow the draft
    return [(min(d, depth), min(length - 1, min(d, depth))) for d, length in pairs if length]


class LatencyTable:
    """Seconds by size: the median of recent measurements. Between measured sizes it follows a curve."""

    def __init__(self, initial: Mapping[int, float], curve: Mapping[int, float] = MappingProxyType({})) -> None:
        """curve: size -> milliseconds, of which only the shape counts as soon as something is measured; empty: a
        line."""
        self._recent = {size: deque([seconds], MEASUREMENTS) for size, seconds in initial.items()}
        self._median = dict(initial)  # in units of the curve
        self._unit = 0.001 if curve else 0.0
        self._curve = dict(curve) or {0: 1.0}  # a copy, because a later run may measure again

    def __len__(self) -> int:
        return len(self._median)

    def add(self, size: int, seconds: float) -> None:
        """Add a measurement."""
        seconds /= self._shape(size)
        recent = self._recent.setdefault(size, deque(maxlen=MEASUREMENTS))
        recent.append(seconds)
        # the lower median, because noise only adds time
        self._median[size] = sorted(recent)[(len(recent) - 1) // 2]

    def estimates(self, sizes: Iterable[int]) -> list[float]:
        """Return the seconds of each size; before the first measurement those of the curve, 0 without one."""
        if not self._median:
            return [self._unit * self._shape(size) for size in sizes]
        return [interpolate(self._median, size) * self._shape(size) for size in sizes]

    def _shape(self, size: int) -> float:
        return interpolate(self._curve, size)


class AcceptanceEstimator:
    """Acceptance rate per level, given that the level above was accepted, with exponential decay.

    Level 1 starts from an optimistic prior that decays like an observation. A deeper level starts from the rate of the
    level above.
    """

    copying = False

    def __init__(self) -> None:
        self._hits = [PRIOR * PRIOR_WEIGHT]
        self._tries = [PRIOR_WEIGHT]

    def start(self) -> None:
        """Begin another text."""

    def add(self, drafted: int, accepted: int) -> None:
        """Add one row of one step: drafted and accepted levels."""
        hits, tries = self._hits, self._tries
        verified = min(accepted + 1, drafted)
        while len(tries) < verified:
            hits.append(0.0)
            tries.append(0.0)
        for level in range(verified):
            hits[level] = DECAY * hits[level] + (level < accepted)
            tries[level] = DECAY * tries[level] + 1.0

    def forget(self, weight: float) -> None:
        """Let all observations together count for at most `weight`."""
        for level, tries in enumerate(self._tries):
            share = min(1.0, weight / tries)
            self._hits[level], self._tries[level] = share * self._hits[level], share * tries

    def rates(self, depth: int) -> list[float]:
        """Return the acceptance rates of levels 1 to `depth`."""
        rate, rates = self._hits[0] / self._tries[0], []
        for level in range(depth):
            if 0 < level < len(self._tries):
                rate = (self._hits[level] + PRIOR_WEIGHT * rate) / (self._tries[level] + PRIOR_WEIGHT)
            rates.append(rate)
        return rates


class LookupAcceptance(AcceptanceEstimator):
    """Acceptance of a lookup, which is right where a text is copied and hardly elsewhere: after a draft that was right,
    apart from that after others.

    A draft that is not verified counts, too, as soon as the text shows how much of it was right. From its first right
    token on the text counts as copied, the draft itself included: so where passes are dear, a lookup drafts after a
    token that it had right (the other way lost 1 to 3 % in replays). copying: the last draft was right so far; of
    several rows, the last one that drafted.
    """

    def __init__(self) -> None:
        self._parts = {copying: AcceptanceEstimator() for copying in (False, True)}
        self._unverified: dict[int, tuple[list[int], int]] = {}  # row -> draft, tokens of it that the text has

    def start(self) -> None:
        self.copying = False
        self._unverified.clear()
        for part in self._parts.values():
            part.forget(START_WEIGHT)

    def add(self, drafted: int, accepted: int) -> None:
        self._parts[self.copying].add(drafted, accepted)
        if drafted:
            self.copying = accepted == drafted

    def rates(self, depth: int) -> list[float]:
        return self._parts[self.copying].rates(depth)

    @property
    def watches(self) -> bool:
        """Return True while a draft that is not verified is compared with the text."""
        return bool(self._unverified)

    def watch(self, draft: Draft) -> None:
        """Compare a draft that is not verified with the text."""
        rows = draft.tokens.tolist() if draft.nodes else []
        self._unverified = {row: ([token for token in ids if token != ABSENT], 0) for row, ids in enumerate(rows)}

    def drop(self) -> None:
        """End the comparison, because another draft is verified."""
        self._unverified.clear()

    def observe(self, outputs: list[list[int]]) -> None:
        """Add the next tokens of the text."""
        for row, (draft, before) in [*self._unverified.items()]:
            end = before + sum(takewhile(bool, map(eq, draft[before:], outputs[row])))
            if outputs[row] and end - before == len(outputs[row]):
                self._unverified[row], self.copying = (draft, end), True
            else:
                del self._unverified[row]
                self.add(len(draft), end)


class AcceptancePredictor:
    """Predicts acceptance of a draft token from the drafter's confidence by online logistic regression.

    The probability is sigmoid(w f + b), where f is the log-odds of the drafter's most likely token. Every observation
    adds one Newton step on exponentially decaying sums.
    """

    def __init__(self) -> None:
        self.w, self.b = 0.6, 0.5
        self._ww = self._bb = 4.0
        self._wb = 0.0

    def accept_prob(self, log_odds: float) -> float:
        """Return the predicted acceptance probability."""
        return 1.0 / (1.0 + exp(-max(-40.0, min(40.0, self.w * log_odds + self.b))))

    def add(self, log_odds: float, accepted: bool) -> None:
        """Add the result of one verified token."""
        predicted = self.accept_prob(log_odds)
        weight, error = predicted * (1.0 - predicted), accepted - predicted
        self._ww = PREDICTOR_DECAY * self._ww + weight * log_odds * log_odds
        self._wb = PREDICTOR_DECAY * self._wb + weight * log_odds
        self._bb = PREDICTOR_DECAY * self._bb + weight
        ww, wb, bb = self._ww + RIDGE, self._wb, self._bb + RIDGE
        step = error / (ww * bb - wb * wb)
        self.w = max(self.w + step * (bb * log_odds - wb), MIN_WEIGHT)
        self.b += step * (ww - wb * log_odds)
