"""What the methods that wrap other drafters share. The lane's model is the wrapped drafter's."""

from typing import Any

from torch import Generator

from specdemo.core.protocol import Budget, Drafter, Progress
from specdemo.core.sampling import Sampling
from specdemo.core.tree import ABSENT, Draft
from specdemo.methods import BASELINE, METHODS


def wrappable(wrapper: str) -> tuple[str, ...]:
    """What a wrapper may wrap: every method but plain decoding and itself."""
    return tuple(name for name in METHODS if name not in (BASELINE, wrapper))


def judged(draft: Draft, depth: int, progress: Progress) -> list[tuple[int, int]]:
    """What became of a draft of at most `depth` levels: levels drafted and levels kept, per row still running."""
    drafted = [draft.nodes] * len(progress.lengths)
    if len(drafted) > 1 and draft.nodes:
        drafted = (draft.tokens != ABSENT).sum(1).tolist()
    return [(min(d, depth), length - 1) for d, length in zip(drafted, progress.lengths, strict=True) if length]


class Wrapper:
    """Hands everything on to the drafters it holds; the first one drafts."""

    needs_model = False  # never asked: `methods.reader` names who reads the model

    def __init__(self, *drafters: Drafter) -> None:
        self.drafters = drafters
        self.taps = tuple(dict.fromkeys(tap for drafter in drafters for tap in drafter.taps))

    @property
    def weight_bytes(self) -> int:
        return self._total("weight_bytes")

    @property
    def history_bytes(self) -> int:
        return self._total("history_bytes")

    def start(self, batch: int, sampling: Sampling, rng: Generator) -> None:
        for drafter in self.drafters:
            drafter.start(batch, sampling, rng)

    def propose(self, budget: Budget) -> Draft:
        return self.drafters[0].propose(budget)

    def observe(self, progress: Progress) -> None:
        for drafter in self.drafters:
            drafter.observe(progress)

    def release(self) -> None:
        for drafter in self.drafters:
            release: Any = getattr(drafter, "release", None)
            if release:
                release()

    def _total(self, name: str) -> int:
        return sum(getattr(drafter, name, 0) for drafter in self.drafters)
