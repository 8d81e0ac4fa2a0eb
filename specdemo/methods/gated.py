"""Gated lookup: a lookup drafts where it finds a match that pays, another drafter drafts elsewhere.

Each step compares expected tokens per second. Those of the lookup are the mean accepted length at its measured
acceptance, divided by the time of looking and of a target pass over the match; those of the other drafter are the mean
of its recent steps, drafting included. A match that is not used is compared with the text all the same. Edits and code
repeat long parts of the prompt, which a lookup drafts without cost; the drafter drafts the rest.

The choice depends on measured times. The output is exact with every choice.
"""

from dataclasses import replace
from statistics import mean

from torch import Generator

from specdemo.core.protocol import Budget, Progress, Target
from specdemo.core.sampling import Sampling
from specdemo.core.tree import ABSENT, Draft
from specdemo.costs.acceptance import expected_tokens
from specdemo.costs.lengths import best_length
from specdemo.methods import load_drafter, setting, wrappable
from specdemo.methods.base import LookupOptions
from specdemo.methods.measurements import DECAY, LatencyTable, LookupAcceptance, StepOutcome
from specdemo.methods.wrapper import Choice, Wrapper

FIRST_STEPS = 3  # of the other drafter, before the two are compared; until then it drafts where the lookup just failed
DRAFTER, LOOKUP = range(2)


class GatedOptions(LookupOptions):
    drafter: str = setting(
        "draft_model", "the method that drafts where the lookup does not", choices=wrappable("gated")
    )
    lookup: str = setting("suffix", "the method that looks for matches", choices=("suffix", "ngram"))
    length: int = setting(0, "most draft tokens of the drafter; 0: the lane's k", low=0, high=16, step=1)


class Gated(Wrapper, method="gated"):
    summary = "A lookup drafts where it finds a match that pays, another drafter elsewhere."

    Options = GatedOptions

    def __init__(self, target: Target, model: object = None, options: GatedOptions | None = None) -> None:
        options = options or self.Options()
        lookup = load_drafter(options.lookup, target, **options.lookup_options(options.lookup))
        super().__init__(load_drafter(options.drafter, target, model), lookup)
        self._curve, self._most = target.pass_ms, options.length

    def start(self, batch: int, sampling: Sampling, rng: Generator) -> None:
        super().start(batch, sampling, rng)
        self._acceptance = LookupAcceptance()
        self._verify_times = LatencyTable({}, self._curve)
        self._lookup_times = LatencyTable({})  # of drafting with the lookup
        self._steps = 0  # of the drafter
        self._failed = False  # the last draft of the lookup was rejected, and the drafter has not drafted since
        self._tokens = self._seconds = 0.0  # of recent steps of the drafter, per row

    def choose(self, budget: Budget) -> Choice:
        """Draft with the lookup or with the drafter. Notes: route, 1 for the lookup."""
        match = self.drafters[LOOKUP].propose(budget)
        if length := self._length(match) if match.nodes else 0:
            self._acceptance.drop()
            first = _first(match, length)
            return Choice(LOOKUP, replace(budget, depth=length), first, notes={"route": LOOKUP})
        if not self._acceptance.watches:
            self._acceptance.watch(match)
        if self._most:
            budget = replace(budget, depth=min(budget.depth, self._most), nodes=min(budget.nodes, self._most))
        return Choice(DRAFTER, budget, notes={"route": DRAFTER})

    def observe(self, progress: Progress) -> None:
        super().observe(progress)
        self._acceptance.observe(progress.output_ids())

    def learn(self, outcome: StepOutcome) -> None:
        if not outcome.rows:
            return
        self._verify_times.add(outcome.slots, outcome.seconds - outcome.draft_seconds)
        if outcome.drafter == LOOKUP:
            self._lookup_times.add(1, outcome.draft_seconds)
            self._failed = not any(accepted for _, accepted in outcome.rows)
            for drafted, accepted in outcome.rows:
                self._acceptance.add(drafted, accepted)
        else:
            self._steps, self._failed = self._steps + 1, False
            self._tokens = DECAY * self._tokens + 1.0 + mean(accepted for _, accepted in outcome.rows)
            self._seconds = DECAY * self._seconds + outcome.seconds

    def _length(self, match: Draft) -> int:
        """Return how many tokens of a match to draft; 0: the drafter is expected to be faster, or no match is."""
        tokens = expected_tokens(self._acceptance.rates(match.nodes))
        share = float((match.tokens != ABSENT).any(1).float().mean())  # rows with a match
        tokens = [1.0 + share * (n - 1.0) for n in tokens]
        (looking,) = self._lookup_times.estimates([1])
        seconds = [looking + verifying for verifying in self._verify_times.estimates(range(1, match.nodes + 2))]
        length = max(best_length(tokens, seconds), 1) if len(self._verify_times) else match.nodes
        if self._steps < FIRST_STEPS:
            return 0 if self._failed else length
        return length if tokens[length] * self._seconds > self._tokens * seconds[length] else 0


def _first(chain: Draft, length: int) -> Draft:
    """Return the first tokens of a chain."""
    tokens, confidence = (None if x is None else x[:, :length] for x in (chain.tokens, chain.confidence))
    assert tokens is not None
    return Draft.chain(tokens, confidence=confidence)
