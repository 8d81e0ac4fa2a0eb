"""Base class of methods that wrap other drafters. The lane's model belongs to the first wrapped drafter.

At every step `choose` says who drafts and how long, from what earlier steps measured. Methods differ in this function,
and in what they `learn` from a step.

The option `p_min` is such a choice, too: drafts end before a token of which the drafter is not sure, as in llama.cpp.
Whether a token is left out depends on the distribution that it was drawn from, not on the token, so that rejection
sampling stays exact.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Generator

from specdemo.core.protocol import Budget, Progress
from specdemo.core.sampling import Sampling
from specdemo.core.tree import ABSENT, Draft, chain_parents, is_chain, select_nodes
from specdemo.methods.base import Method
from specdemo.methods.measurements import StepOutcome, acceptance_per_row


@dataclass(frozen=True, slots=True)
class Choice:
    """Who drafts at a step, and how long."""

    drafter: int  # index of the wrapped drafter
    budget: Budget
    draft: Draft | None = None  # its draft, if there is one already
    unverified: int = 0  # levels of another draft that is compared with the text instead
    notes: Mapping[str, float] = field(default_factory=dict)


class Wrapper(Method):
    """Forwards all calls to the wrapped drafters; the first one drafts unless `choose` says something else."""

    def __init__(self, *drafters: Method) -> None:
        self.drafters = self.parts = drafters
        self.taps = tuple(dict.fromkeys(tap for drafter in drafters for tap in drafter.taps))
        self.name = next((drafter.name for drafter in drafters if drafter.name), "")
        self.note = "; ".join(dict.fromkeys(drafter.note for drafter in drafters if drafter.note))

    def choose(self, budget: Budget) -> Choice:
        """Return who drafts at this step, and how long."""
        return Choice(0, budget)

    def learn(self, outcome: StepOutcome) -> None:
        """Read the measurements of a step that `choose` planned."""

    @property
    def readers(self) -> Sequence[Method]:
        """Return the drafters that read the text."""
        return self.drafters

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
        self._planned: tuple[Choice, Draft] | None = None  # None: nothing was drafted since the last measurement
        self._lengths: Sequence[int] = ()

    def propose(self, budget: Budget) -> Draft:
        choice = self.choose(budget)
        draft = self.drafters[choice.drafter].propose(choice.budget) if choice.draft is None else choice.draft
        self._planned = choice, draft
        return replace(draft, notes={**draft.notes, **choice.notes})

    def observe(self, progress: Progress) -> None:
        for drafter in self.readers:
            drafter.observe(progress)
        self._lengths = progress.lengths

    def on_step_timed(self, ms: Mapping[str, float]) -> None:
        for drafter in self.drafters:
            drafter.on_step_timed(ms)
        if self._planned is not None:
            (choice, draft), self._planned = self._planned, None
            k = choice.budget.depth
            rows = acceptance_per_row(draft, k, self._lengths)
            drafting, verifying = ms.get("draft", 0.0), sum(ms.get(lap, 0.0) for lap in ("verify", "accept", "commit"))
            times = drafting / 1000.0, verifying / 1000.0, sum(ms.values()) / 1000.0
            self.learn(StepOutcome(k, draft.nodes + 1, rows, *times, choice.drafter, choice.unverified))

    def release(self) -> None:
        for drafter in self.drafters:
            drafter.release()


class Confident(Wrapper):
    """A drafter whose drafts end before the first token below `p_min`."""

    def __init__(self, drafter: Method, p_min: float) -> None:
        super().__init__(drafter)
        self._p_min = p_min

    def choose(self, budget: Budget) -> Choice:
        """Draft until no row is sure of its last token."""

        def unsure(top_probs: list[float]) -> bool:
            return max(top_probs) < self._p_min or bool(budget.enough and budget.enough(top_probs))

        return Choice(0, replace(budget, enough=unsure))

    def propose(self, budget: Budget) -> Draft:
        """Draft without the tokens below `p_min`. Notes: unverified, their number per row."""
        return _confident_part(super().propose(budget), self._p_min)


def _confident_part(draft: Draft, p_min: float) -> Draft:
    """Return a draft without the nodes below `p_min`, and without what follows them."""
    sure = draft.confidence if draft.probs is None else draft.probs.amax(-1)
    if sure is None or not draft.nodes:
        return draft
    present = draft.tokens != ABSENT
    kept = present & ~(sure < p_min)  # one that is not a number stays, so that the loop reports it
    if is_chain(draft.parents):
        kept = kept.int().cumprod(1).bool()
    else:
        reached = torch.cat([kept.new_ones(len(kept), 1), kept], 1)  # of every slot
        for node in range(draft.nodes):
            reached[:, node + 1] &= reached.gather(1, draft.parents[:, node : node + 1])[:, 0]
        kept = reached[:, 1:]
    notes = {**draft.notes, "unverified": float((present & ~kept).sum()) / len(kept)}
    index = kept.any(0).nonzero()[:, 0].expand(len(kept), -1)  # nodes that are kept in some row
    selection = select_nodes(replace(draft, tokens=draft.tokens.masked_fill(~kept, ABSENT), notes=notes), index)
    if is_chain(draft.parents):
        selection = replace(selection, parents=chain_parents(*selection.tokens.shape, index.device))
    return selection
