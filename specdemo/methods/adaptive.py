"""Adaptive draft length: expected tokens per second choose the draft depth at every step, up to the budget.

Chooses the k (0 included) with the most expected tokens per second (TurboSpec, 2406.14066): the sum over i <= k of the
probability that i draft tokens are accepted, divided by the seconds to draft and verify k. Acceptance is estimated per
position, seconds are measured; both estimates persist across generations. A drafter that drafts token by token stops as
soon as the next token is not worth its time. Its acceptance is predicted from the drafter's top probabilities (as in
vLLM 0.32), never from the sampled token.

A lookup is accepted while it copies and hardly elsewhere, so acceptance right after a draft of which all was right is
estimated apart. Where verification does not pay, a lookup drafts all the same, and the text shows what was right.

The draft length depends on measured times. The output is still exact, but two sampled runs with the same seed may use
different draft lengths, draw different noise and return different texts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from math import log
from operator import add, mul
from types import MappingProxyType

from torch import Generator

from specdemo.core.protocol import Budget, Progress, Target
from specdemo.core.sampling import Sampling
from specdemo.core.tree import Draft
from specdemo.costs.acceptance import expected_tokens
from specdemo.costs.lengths import best_length
from specdemo.costs.step import predicted_speedup
from specdemo.methods import load_drafter, setting, wrappable
from specdemo.methods.base import LookupOptions
from specdemo.methods.measurements import (
    DECAY,
    MEASUREMENTS,
    AcceptanceEstimator,
    AcceptancePredictor,
    LatencyTable,
    LookupAcceptance,
    StepOutcome,
)
from specdemo.methods.wrapper import Choice, Wrapper

PLAIN_STEPS = 2  # at the start, to measure the cost of a plain step
EXPLORATION = 0.01  # largest share of time spent on trying other depths
EXPLORE_INTERVAL = 8  # least number of steps between two explorations
PLAN_STEPS = 4  # steps that a plan is reused, since its inputs change slowly and planning takes time
MAX_PROB = 1.0 - 1e-6


@dataclass(frozen=True, slots=True)
class DepthPlan:
    """Estimates for k = 0, 1, .. draft tokens, and the best k."""

    rates: list[float]  # acceptance per level
    tokens: list[float]  # expected output tokens
    seconds: list[float]
    best: int
    # stop drafting when the probability that all tokens so far are accepted falls below this
    thresholds: list[float]


class Goodput:
    """Maximises expected tokens per second. Starts with plain steps, then one draft token, to measure the costs. A
    lookup drafts in hardly any time, so the costs of passes are enough to begin with."""

    def __init__(
        self, pass_ms: Mapping[int, float] = MappingProxyType({}), acceptance: AcceptanceEstimator | None = None
    ) -> None:
        """pass_ms: see `Target`; empty: unknown."""
        self.notes: dict[str, float] = {}
        self.acceptance = acceptance or AcceptanceEstimator()
        self.predictor = AcceptancePredictor()
        self._token_by_token = False  # whether the drafter calls `should_stop`
        self._log_odds: list[list[float]] = []  # of the current draft, by level and row
        self._path_probs: list[float] = []  # per row: probability that the whole draft so far is accepted
        self._plans: dict[tuple[int, int, bool], DepthPlan] = {}  # by budget and `acceptance.copying`
        self._plan = DepthPlan([], [1.0], [0.0], 0, [])
        self._num_steps = 0
        self._recent_tokens, self._recent_seconds = 0.0, 0.0  # of recent steps, per row
        self._draft_times = LatencyTable({0: 0.0})
        self._verify_times = LatencyTable({}, pass_ms)
        self._seen_widths: set[int] = set()  # the first pass of a width includes one-time work and is not measured
        self._costs_known = bool(pass_ms) and isinstance(acceptance, LookupAcceptance)
        self._plain_steps_left = PLAIN_STEPS
        self._drafted_last_step = False
        self._steps_since_explored = 0
        self._explored_deeper = False

    def start(self) -> None:
        """Begin a new generation."""
        self._drafted_last_step = False
        self.acceptance.start()

    def choose(self, depth: int, nodes: int) -> int:
        """Return the draft depth, 0 to `depth`, where `nodes` is the node budget at full depth."""
        self._plan = plan = self._plans.get((depth, nodes, self.acceptance.copying)) or self._make_plan(depth, nodes)
        if not self._costs_known and (self._plain_steps_left or len(self._draft_times) == 1):
            k = 0 if self._plain_steps_left else min(depth, 1)
            self._plain_steps_left = max(self._plain_steps_left - 1, 0)
        else:
            k = depth if self._token_by_token and plan.best else self._explore(plan)
        self._log_odds, self._path_probs = [], []
        predicted = predicted_speedup(plan.tokens[k], plan.seconds[k], plan.seconds[0]) if plan.seconds[k] else 1.0
        alpha = sum(plan.rates[: max(k, 1)]) / max(k, 1) if depth else 0.0
        self.notes = {"k": k, "alpha": round(alpha, 4), "predicted": round(predicted, 4)}
        return k

    @property
    def stops(self) -> bool:
        """Return whether the current draft was drafted token by token."""
        return bool(self._log_odds)

    def should_stop(self, top_probs: list[float]) -> bool:
        """Return True when one more token is not worth its time. chances: top probability per row at this level."""
        self._token_by_token = True
        log_odds = [log(prob / (1.0 - prob)) for prob in (min(max(c, 1.0 - MAX_PROB), MAX_PROB) for c in top_probs)]
        self._log_odds.append(log_odds)
        accept_probs = [*map(self.predictor.accept_prob, log_odds)]
        self._path_probs = [*map(mul, self._path_probs, accept_probs)] if self._path_probs else accept_probs
        return sum(self._path_probs) < self._plan.thresholds[len(self._log_odds)] * len(accept_probs)

    def learn(self, outcome: StepOutcome) -> None:
        """Update the estimates with the result of the last step."""
        if outcome.slots in self._seen_widths:
            self._verify_times.add(outcome.slots, outcome.verify_seconds)
        self._seen_widths.add(outcome.slots)
        drafted = outcome.unverified or (outcome.slots - 1 if self._log_odds else outcome.k)
        # after a plain step a drafter that is no lookup also reads the tokens that it missed
        if drafted and (outcome.unverified or self._drafted_last_step):
            self._draft_times.add(drafted, outcome.draft_seconds)
        self._drafted_last_step = drafted > 0
        for levels, accepted in outcome.rows:
            self.acceptance.add(levels, accepted)
        if outcome.rows and self._log_odds and len(self._log_odds[0]) == len(outcome.rows):
            for row, (levels, accepted) in enumerate(outcome.rows):
                for level, log_odds in enumerate(self._log_odds[: min(accepted + 1, levels)]):
                    self.predictor.add(log_odds[row], level < accepted)
        if outcome.rows:
            tokens = 1.0 + sum(accepted for _, accepted in outcome.rows) / len(outcome.rows)
            self._recent_tokens = DECAY * self._recent_tokens + tokens
            self._recent_seconds = DECAY * self._recent_seconds + outcome.draft_seconds + outcome.verify_seconds
        self._num_steps += 1
        if self._num_steps < MEASUREMENTS or self._num_steps % PLAN_STEPS == 0:
            self._plans.clear()

    def _make_plan(self, depth: int, nodes: int) -> DepthPlan:
        rates = self.acceptance.rates(depth)
        tokens, seconds = expected_tokens(rates), self._seconds(depth, nodes)
        thresholds = self._thresholds(rates, seconds) if self._token_by_token else [0.0] * depth
        plan = self._plans[depth, nodes, self.acceptance.copying] = DepthPlan(
            rates, tokens, seconds, best_length(tokens, seconds), thresholds
        )
        return plan

    def _thresholds(self, rates: list[float], seconds: list[float]) -> list[float]:
        """Return the stop thresholds per level.

        The cost of one more token is the smallest slope towards any longer draft, because the difference between two
        neighbouring sizes is mostly noise.
        """
        speed, depth = self._recent_tokens / self._recent_seconds if self._recent_seconds else 0.0, len(rates)
        slopes = (min((seconds[n] - seconds[k]) / (n - k) for n in range(k + 1, depth + 1)) for k in range(depth))
        return [slope * speed / max(rate, 1.0 - MAX_PROB) for slope, rate in zip(slopes, rates, strict=True)]

    def _seconds(self, depth: int, nodes: int) -> list[float]:
        """Return the seconds of a step by k. Verification time is made monotonic in the number of slots."""
        slots = [1 + nodes * k // max(depth, 1) for k in range(depth, -1, -1)]
        verifying = [*accumulate(self._verify_times.estimates(slots), min)]
        return [*map(add, self._draft_times.estimates(range(depth + 1)), reversed(verifying))]

    def _explore(self, plan: DepthPlan) -> int:
        """Return the best k, or now and then a neighbour; the more time that costs, the less often."""
        best, tokens, seconds = plan.best, plan.tokens, plan.seconds
        if len(seconds) == 1:
            return best
        deeper = best == 0 or (best + 1 < len(seconds) and not self._explored_deeper)
        k = best + 1 if deeper else best - 1
        lost_seconds = seconds[k] - tokens[k] * seconds[best] / tokens[best]
        self._steps_since_explored += 1
        if self._steps_since_explored < max(EXPLORE_INTERVAL, lost_seconds / (EXPLORATION * seconds[best])):
            return best
        self._steps_since_explored, self._explored_deeper = 0, deeper
        return k


class AdaptiveOptions(LookupOptions):
    drafter: str = setting("draft_model", "the method whose draft length is chosen", choices=wrappable("adaptive"))


class Adaptive(Wrapper, method="adaptive"):
    learns = True
    chooses_length = True
    summary = "Chooses the draft length at every step, down to zero, from past acceptance and measured cost."

    Options = AdaptiveOptions

    def __init__(self, target: Target, model: object = None, options: AdaptiveOptions | None = None) -> None:
        options = options or self.Options()
        super().__init__(load_drafter(options.drafter, target, model, **options.lookup_options(options.drafter)))
        self._lookup = LookupAcceptance() if self.drafters[0].looks_up else None
        self.policy = Goodput(target.pass_ms, self._lookup)
        self._device = target.device

    def start(self, batch: int, sampling: Sampling, rng: Generator) -> None:
        super().start(batch, sampling, rng)
        self.policy.start()
        self._empty_draft = Draft.empty(batch, self._device)

    def capture_graphs(self, budget: Budget) -> None:
        """Capture every length, because the policy measures the time of each."""
        depth = budget.chain
        for k in range(1, depth):
            self.drafters[0].propose(Budget(k, budget.nodes * k // depth))
        super().capture_graphs(budget)

    def choose(self, budget: Budget) -> Choice:
        """Draft with the k of the policy. A match of a lookup that is not worth a pass is compared with the text."""
        depth, unverified = budget.chain, 0
        if k := self.policy.choose(depth, budget.nodes):
            if self._lookup:
                self._lookup.drop()
            return Choice(0, Budget(k, budget.nodes * k // depth, self.policy.should_stop), notes=self.policy.notes)
        if self._lookup and depth and not self._lookup.watches:
            self._lookup.watch(self.drafters[0].propose(budget))
            unverified = depth
        return Choice(0, Budget(0, 0), self._empty_draft, unverified, self.policy.notes)

    def propose(self, budget: Budget) -> Draft:
        """Draft with the chosen k.

        Notes: k, alpha (expected mean acceptance rate) and predicted (speed-up over plain decoding).
        """
        draft = super().propose(budget)
        return replace(draft, notes={**draft.notes, "k": draft.nodes}) if self.policy.stops else draft

    def observe(self, progress: Progress) -> None:
        super().observe(progress)
        if self._lookup:
            self._lookup.observe(progress.output_ids())

    def learn(self, outcome: StepOutcome) -> None:
        self.policy.learn(outcome)
