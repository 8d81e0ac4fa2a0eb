"""Base class of methods that wrap other drafters. The lane's model belongs to the wrapped drafter."""

from collections.abc import Mapping

from torch import Generator

from specdemo.core.protocol import Budget, Progress
from specdemo.core.sampling import Sampling
from specdemo.core.tree import ABSENT, Draft
from specdemo.methods.base import Method


def acceptance_per_row(draft: Draft, depth: int, progress: Progress) -> list[tuple[int, int]]:
    """Return (drafted levels, accepted levels) of the last draft for every unfinished row."""
    drafted = [draft.nodes] * len(progress.lengths)
    if len(drafted) > 1 and draft.nodes:
        drafted = (draft.tokens != ABSENT).sum(1).tolist()
    lengths = zip(drafted, progress.lengths, strict=True)
    # forced tokens of a grammar may follow the draft
    return [(min(d, depth), min(length - 1, min(d, depth))) for d, length in lengths if length]


class Wrapper(Method):
    """Forwards all calls to the wrapped drafters; the first one drafts."""

    def __init__(self, *drafters: Method) -> None:
        self.drafters = self.parts = drafters
        self.taps = tuple(dict.fromkeys(tap for drafter in drafters for tap in drafter.taps))
        self.name = next((drafter.name for drafter in drafters if drafter.name), "")
        self.note = "; ".join(dict.fromkeys(drafter.note for drafter in drafters if drafter.note))

    def read_bytes(self, k: int) -> int:
        return self.drafters[0].read_bytes(k)

    @property
    def max_length(self) -> int | None:
        return min((drafter.max_length for drafter in self.drafters if drafter.max_length is not None), default=None)

    @property
    def graph_note(self) -> str:
        return next((drafter.graph_note for drafter in self.drafters if drafter.graph_note), "")

    def capture_graphs(self, budget: Budget) -> None:
        for drafter in self.drafters:
            drafter.propose(budget)
            drafter.capture_graphs(budget)

    def start(self, batch: int, sampling: Sampling, rng: Generator) -> None:
        for drafter in self.drafters:
            drafter.start(batch, sampling, rng)

    def propose(self, budget: Budget) -> Draft:
        return self.drafters[0].propose(budget)

    def observe(self, progress: Progress) -> None:
        for drafter in self.drafters:
            drafter.observe(progress)

    def on_step_timed(self, ms: Mapping[str, float]) -> None:
        for drafter in self.drafters:
            drafter.on_step_timed(ms)

    def release(self) -> None:
        for drafter in self.drafters:
            drafter.release()
