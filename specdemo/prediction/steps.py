"""The passes that a step is made of, before anybody asks how long they take: what predictions are made from, and what
measured steps are compared with.
"""

from typing import NamedTuple

from specdemo.prediction.acceptance import Acceptance
from specdemo.prediction.drafts import Drafting
from specdemo.prediction.roofline import Device
from specdemo.prediction.shapes import Shape, Work, work

BRANCHES = 10  # of a tree that grows by levels: nodes that a drafting pass goes on from


class Load(NamedTuple):
    """What a step is asked for: so many texts, behind so many tokens each, in numbers of so many bytes."""

    batch: int
    context: int
    bytes: float


class Step(NamedTuple):
    """Texts of a batch come to have different lengths as soon as anything is drafted: each keeps what it can."""

    check: Work
    drafts: tuple[tuple[Work, float], ...]  # passes and how many of them
    draft: Drafting
    rounds: int  # of drafting
    batch: int

    def draft_ms(self, device: Device) -> float:
        """Of drafting."""
        passes = sum(
            count * device.ms(of, self.batch, self._uneven, cold=not number)
            for number, (of, count) in enumerate(self.drafts)
        )
        costs = device.costs
        catching_up = self.drafts and self.draft.remembers  # on what became history
        begun = costs.draft_ms + (self.batch - 1.0) * costs.draft_text_ms if catching_up else 0.0
        beside = costs.token_ms + (costs.head_ms if self.draft.reads_all else 0.0)
        return passes + begun + self.rounds * beside

    def check_ms(self, device: Device) -> float:
        """Of the target's pass."""
        behind = bool(self.drafts)
        return device.ms(self.check, self.batch, self._uneven, behind) + device.costs.cold_ms * behind

    def beside_ms(self, device: Device) -> float:
        """Of all else that the engine does."""
        costs = device.costs
        return costs.step_ms + (costs.check_ms + (self.batch - 1.0) * costs.check_text_ms if self.rounds else 0.0)

    def ms(self, device: Device) -> float:
        """All of it."""
        return self.draft_ms(device) + self.check_ms(device) + self.beside_ms(device)

    @property
    def _uneven(self) -> bool:
        return self.rounds > 0 and self.batch > 1


def step_of(target: Shape, draft: Drafting, kept: Acceptance, k: int, load: Load, nodes: int = 0) -> Step:
    """k 0: plain decoding. nodes: of a tree, 0: a chain."""
    batch, context, size = load
    check = work(target, (nodes or k) + 1 if k else 1, batch, context, size)
    if not k or draft.first is None:
        return Step(check, (), draft, min(k, 1), batch)
    read = kept.longest_of(k, batch) if draft.reads_all else 1.0 + kept.whole(k, batch)
    if draft.block:
        return Step(check, ((work(draft.first, read + k, batch, context, size, k), 1.0),), draft, 1, batch)
    drafts = [(work(draft.first, read, batch, context, size, 1.0), 1.0)]
    if k > 1 and draft.further is not None:
        rows = min(BRANCHES, nodes) if nodes else 1
        drafts.append((work(draft.further, rows, batch, context, size), k - 1.0))
    return Step(check, tuple(drafts), draft, k, batch)
