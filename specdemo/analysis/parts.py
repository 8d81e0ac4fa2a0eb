"""Parts of a run that differ much: readings of a log or of metrics, requests, slots, engines. Their mean hides a
drafter that works in some of them only. Needs no torch.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from operator import add
from statistics import fmean
from typing import NamedTuple, Self

from specdemo.core.suggest import program

# A drafter that guesses only frequent tokens still has 1 to 3 % accepted at the first position (the recorded runs with
# noise on all weights have 1.3 %), and the worst trained ones above 10 %. 200 tokens tell 2 % from 0 with certainty.
BROKEN_RATE, BROKEN_TOKENS = 0.02, 200.0  # accepted tokens per draft; draft tokens
WORKING_RATE = 0.3  # accepted tokens per draft
LEAST_IN_THIRD = 2  # parts in a third of a run
WORSE = 0.8  # ratio of the accepted tokens per draft in the last third to those in the first
MUCH = 0.5  # ratio of the accepted tokens per draft in some parts to that in the others
MAX_DRAFTED = 1024  # draft tokens per step
READING = "reading"  # name of a part that follows the one before it in time


@dataclass(frozen=True, slots=True)
class Part:
    """Counts of a part: draft tokens, the accepted ones, and steps with a draft (0: unknown). place: where it ran, such
    as `slot 1`. Sums and differences of parts have counts only."""

    drafted: float
    accepted: float
    drafts: float
    tokens_per_s: float | None = None
    place: str = ""

    def __add__(self, other: Self) -> "Part":
        return Part(self.drafted + other.drafted, self.accepted + other.accepted, self.drafts + other.drafts)

    def __sub__(self, other: Self) -> "Part":
        return Part(self.drafted - other.drafted, self.accepted - other.accepted, self.drafts - other.drafts)

    @property
    def rate(self) -> float:
        """Return the accepted tokens per draft, or per draft token if the drafts were not counted."""
        return self.accepted / (self.drafts if self.drafts * MAX_DRAFTED >= self.drafted else self.drafted)


class Contrast(NamedTuple):
    """The parts of a run in which far fewer draft tokens are accepted, and the others. where: such as `since reading 6
    of 10`. length: mean accepted length over the steps with a draft."""

    where: str
    drafted: int
    accepted: int
    length: float
    tokens_per_s: float | None
    other_rate: float
    other_length: float
    other_tokens_per_s: float | None

    @property
    def broken(self) -> bool:
        """Return whether the drafter does not work in these parts."""
        return self.length <= 1.0 + BROKEN_RATE

    @property
    def rate(self) -> float:
        """Return the acceptance rate."""
        return self.accepted / self.drafted


def contrast(parts: Sequence[Part], noun: str) -> Contrast | None:
    """Return the parts with at most `MUCH` of the others' accepted tokens per draft, None without such parts. Those in
    which the drafter does not work precede others, then those that explain most of the difference between all parts.
    noun: name of a part."""
    drafting = [part for part in parts if part.drafted]
    choice, largest = None, (False, 0.0)
    for where, members, group, others in _groups(drafting, noun):
        if min(group.drafted, others.drafted) >= BROKEN_TOKENS and others.rate >= WORKING_RATE:
            explained = group.drafted * others.drafted * (others.rate - group.rate) ** 2
            rank = (group.rate <= BROKEN_RATE, round(explained, 3))
            if group.rate <= MUCH * others.rate and rank > largest:
                choice, largest = (where, members, group, others), rank
    if choice is None:
        return None
    where, members, group, others = choice
    speeds = list[float](), list[float]()
    for index, part in enumerate(drafting):
        if part.tokens_per_s:
            speeds[index in members].append(part.tokens_per_s)
    there, here = (fmean(values) if all(speeds) else None for values in speeds)
    counts = round(group.drafted), round(group.accepted)
    return Contrast(where, *counts, 1.0 + group.rate, here, others.accepted / others.drafted, 1.0 + others.rate, there)


def trend(parts: Sequence[Part]) -> tuple[str, ...]:
    """Return a note if fewer and fewer draft tokens are accepted from each third of the readings to the next, as where
    texts grow; none otherwise, and where `contrast` says more."""
    drafting = [part for part in parts if part.drafted]
    third = len(drafting) // 3
    if third < LEAST_IN_THIRD or contrast(parts, READING):
        return ()
    thirds = [reduce(add, drafting[i * third : (i + 1) * third]) for i in range(3)]
    first, middle, last = (part.rate for part in thirds)
    if min(part.drafted for part in thirds) < BROKEN_TOKENS or not first > middle > last or last > WORSE * first:
        return ()
    return (
        f"The accepted length falls from {1.0 + first:.2f} in the first third of the {READING}s to {1.0 + last:.2f} in "
        f"the last: if texts grew, `{program()} bench context` finds the length from which plain decoding is faster.",
    )


def _groups(parts: Sequence[Part], noun: str) -> Iterator[tuple[str, Collection[int], Part, Part]]:
    """Yield parts that may differ from the others: where they are, their indices, their sums, and those of the others.

    Single parts count only with enough draft tokens: of many short ones, some accept nothing by chance.
    """
    count = len(parts)
    if count < 2:
        return
    sums = [*accumulate(parts, add)]
    total = sums[-1]
    for end, before in enumerate(sums[:-1], start=1):
        yield f"since {noun} {end + 1:,} of {count:,}", range(end, count), total - before, before
        yield f"until {noun} {end:,} of {count:,}", range(end), before, total - before
    sets = {f"in {place}": {i for i, part in enumerate(parts) if part.place == place} for place in _places(parts)}
    low = {i for i, part in enumerate(parts) if part.drafted >= BROKEN_TOKENS and part.rate <= MUCH * total.rate}
    for where, members in [*sets.items(), (f"in {len(low):,} of {count:,} {noun}s", low)]:
        if 0 < len(members) < count:
            group = reduce(add, (parts[index] for index in sorted(members)))
            yield where, members, group, total - group


def _places(parts: Sequence[Part]) -> list[str]:
    return [*filter(None, dict.fromkeys(part.place for part in parts))]
