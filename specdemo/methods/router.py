"""Router: selects one of several drafters per prompt, by measured acceptance.

Every drafter is tried for a few steps; then the one with the most accepted tokens drafts for the rest of the
generation. All rows of a batch use the same drafter.
"""

from dataclasses import replace

from torch import Generator

from specdemo.core.protocol import Budget, Progress, Target
from specdemo.core.sampling import Sampling
from specdemo.core.tree import Draft
from specdemo.methods import METHODS, BaseOptions, load_drafter, setting, wrappable
from specdemo.methods.wrapper import Wrapper


class RouterOptions(BaseOptions):
    drafter: str = setting("draft_model", "the method of the drafters", choices=wrappable("router"))
    drafts: str = setting(
        "", "drafters besides the lane's model, separated by commas: models, or methods without a model"
    )
    trial: int = setting(4, "steps that each drafter is tried for", low=1, high=64, step=1)


class Router(Wrapper, method="router"):
    summary = "Tries several drafters at the start of a text and continues with the one that is accepted most."

    Options = RouterOptions

    def __init__(self, target: Target, model: object = None, options: RouterOptions | None = None) -> None:
        options = options or self.Options()
        names = [name.strip() for name in options.drafts.split(",") if name.strip()]
        others = (
            load_drafter(name, target) if name in METHODS else load_drafter(options.drafter, target, name)
            for name in names
        )
        super().__init__(load_drafter(options.drafter, target, model), *others)
        self._trial = options.trial

    def start(self, batch: int, sampling: Sampling, rng: Generator) -> None:
        super().start(batch, sampling, rng)
        self._steps = -1  # -1 until the prompt has been observed
        self._route = 0
        self._accepted = [0] * len(self.drafters)  # accepted tokens per drafter

    def propose(self, budget: Budget) -> Draft:
        """Draft with the current drafter. Notes: route, its index; 0 is the lane's model."""
        draft = self.drafters[self._route].propose(budget)
        return replace(draft, notes={**draft.notes, "route": self._route})

    def observe(self, progress: Progress) -> None:
        trials = self._trial * len(self.drafters)
        if self._steps < trials:
            super().observe(progress)
            if self._steps >= 0:
                self._accepted[self._route] += sum(progress.lengths) - sum(length > 0 for length in progress.lengths)
            self._steps += 1
            done = self._steps == trials
            self._route = self._accepted.index(max(self._accepted)) if done else self._steps // self._trial
        else:
            self.drafters[self._route].observe(progress)
