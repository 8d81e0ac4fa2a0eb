"""Plain decoding: an empty draft at every step, in the same loop."""

from torch import Generator

from specdemo.core.protocol import Budget, Progress, Target
from specdemo.core.sampling import Sampling
from specdemo.core.tree import Draft
from specdemo.methods.base import Method, NoOptions


class NoDraft(Method, method="none"):
    summary = "One token per target pass; the baseline of every comparison."

    def __init__(self, target: Target, model: object = None, options: NoOptions | None = None) -> None:
        self._device = target.device

    def start(self, batch: int, sampling: Sampling, rng: Generator) -> None:
        self._empty_draft = Draft.empty(batch, self._device)

    def propose(self, budget: Budget) -> Draft:
        return self._empty_draft

    def observe(self, progress: Progress) -> None:
        pass
