"""Router: selects one of several drafters per prompt, by measured acceptance.

Every drafter is tried for a few steps; then the one with the most accepted tokens drafts for the rest of the
generation. All rows of a batch use the same drafter.
"""

from collections.abc import Sequence

from torch import Generator

from specdemo.core.protocol import Budget, Target
from specdemo.core.sampling import Sampling
from specdemo.methods import METHODS, BaseOptions, load_drafter, setting, wrappable
from specdemo.methods.base import Method
from specdemo.methods.measurements import StepOutcome
from specdemo.methods.wrapper import Choice, Wrapper


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
        self._steps = 0
        self._accepted = [0] * len(self.drafters)  # accepted tokens per drafter

    @property
    def _best(self) -> int | None:
        """Return the index of the drafter with the most accepted tokens; None during the trials."""
        trials = self._trial * len(self.drafters)
        return None if self._steps < trials else self._accepted.index(max(self._accepted))

    def choose(self, budget: Budget) -> Choice:
        """Draft with the drafter on trial, then with the best. Notes: route, its index; 0 is the lane's model."""
        route = self._steps // self._trial if self._best is None else self._best
        return Choice(route, budget, notes={"route": route})

    @property
    def readers(self) -> Sequence[Method]:
        """Return all drafters during the trials, then the best."""
        return self.drafters if self._best is None else [self.drafters[self._best]]

    def learn(self, outcome: StepOutcome) -> None:
        self._steps += 1
        self._accepted[outcome.drafter] += sum(accepted for _, accepted in outcome.rows)
