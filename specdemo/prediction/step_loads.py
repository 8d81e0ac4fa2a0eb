"""Passes of a step, without their times; used by predictions and by the calibration."""

from typing import NamedTuple

from specdemo.core.shapes import Shape
from specdemo.methods.drafting_cost import Drafting
from specdemo.prediction.acceptance import Acceptance
from specdemo.prediction.roofline import BYTES, Device
from specdemo.prediction.work import Work, work

BRANCHES = 10  # nodes per level that are expanded, in a tree that grows by levels


class Step(NamedTuple):
    """Passes of a step. Drafting makes the rows of a batch uneven, because they accept different numbers of tokens."""

    check: Work
    drafts: tuple[tuple[Work, float], ...]  # passes, and the number of each
    draft: Drafting
    rounds: int  # number of drafting rounds
    batch: int

    def draft_ms(self, device: Device) -> float:
        """Return the milliseconds of drafting."""
        passes = sum(
            count * device.ms(of, self.batch, self._uneven, cold=not number)
            for number, (of, count) in enumerate(self.drafts)
        )
        costs = device.costs
        catching_up = self.drafts and self.draft.remembers  # reading the committed tokens
        base_ms = costs.draft_ms + (self.batch - 1.0) * costs.draft_text_ms if catching_up else 0.0
        extra_ms = costs.token_ms + (costs.head_ms if self.draft.reads_all else 0.0)
        return passes + base_ms + self.rounds * extra_ms

    def check_ms(self, device: Device) -> float:
        """Return the milliseconds of verification."""
        has_drafts = bool(self.drafts)
        return device.ms(self.check, self.batch, self._uneven, has_drafts) + device.costs.cold_ms * has_drafts

    def overhead_ms(self, device: Device) -> float:
        """Return the milliseconds of the engine's overhead."""
        costs = device.costs
        return costs.step_ms + (costs.check_ms + (self.batch - 1.0) * costs.check_text_ms if self.rounds else 0.0)

    def ms(self, device: Device) -> float:
        """Return the milliseconds of the step."""
        return self.draft_ms(device) + self.check_ms(device) + self.overhead_ms(device)

    @property
    def _uneven(self) -> bool:
        return self.rounds > 0 and self.batch > 1


def step_of(
    target: Shape, draft: Drafting, acceptance: Acceptance, k: int, batch: int, context: int, dtype: str, nodes: int = 0
) -> Step:
    """Return the passes of a step; k 0: plain decoding. nodes: size of the draft tree; 0: a chain."""
    size = BYTES[dtype]
    check = work(target, (nodes or k) + 1 if k else 1, batch, context, size)
    if not k or draft.first is None:
        return Step(check, (), draft, min(k, 1), batch)
    read = acceptance.longest_of(k, batch) if draft.reads_all else 1.0 + acceptance.p_all_accepted(k, batch)
    if draft.block:
        return Step(check, ((work(draft.first, read + k, batch, context, size, k), 1.0),), draft, 1, batch)
    drafts = [(work(draft.first, read, batch, context, size, 1.0), 1.0)]
    if k > 1 and draft.further is not None:
        rows = min(BRANCHES, nodes) if nodes else 1
        drafts.append((work(draft.further, rows, batch, context, size), k - 1.0))
    return Step(check, tuple(drafts), draft, k, batch)
