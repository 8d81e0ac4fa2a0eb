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

from bisect import bisect
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
from math import exp, log
from operator import add, eq, mul
from types import MappingProxyType

from torch import Generator

from specdemo.core.protocol import Budget, Progress, Target
from specdemo.core.sampling import Sampling
from specdemo.core.tree import ABSENT, Draft
from specdemo.costs.speedup import best_length, expected_tokens, interpolate, predicted_speedup
from specdemo.methods import BaseOptions, load_drafter, setting, wrappable
from specdemo.methods.wrapper import Wrapper, acceptance_per_row

PRIOR, PRIOR_WEIGHT = 0.7, 2.0  # prior acceptance rate, and its weight in observations
START_WEIGHT = 5.0  # of a lookup's earlier texts, in observations, because texts differ
DECAY = 0.98  # decay of an observation per later one: about the last 50 count
MEASUREMENTS = 9  # per size
PLAIN_STEPS = 2  # at the start, to measure the cost of a plain step
EXPLORATION = 0.01  # largest share of time spent on trying other depths
PREDICTOR_DECAY, RIDGE = 0.995, 0.1  # decay of the sums per observation; regularisation
MIN_WEIGHT = 0.05  # of the log-odds, so that predicted acceptance increases with confidence
EXPLORE_INTERVAL = 8  # least number of steps between two explorations
PLAN_STEPS = 4  # steps that a plan is reused, since its inputs change slowly and planning takes time
MAX_PROB = 1.0 - 1e-6


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Depth, acceptance and times of one step. Finished rows are left out."""

    k: int  # requested depth
    slots: int  # verified slots, including the root
    rows: Sequence[tuple[int, int]]  # per row: drafted levels, accepted levels
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    unverified: int = 0  # levels that a lookup drafted and that were not verified


class LatencyTable:
    """Seconds by size: the median of recent measurements. Between measured sizes it follows a curve."""

    def __init__(self, initial: Mapping[int, float], curve: Mapping[int, float] = MappingProxyType({})) -> None:
        """curve: size -> milliseconds, of which only the shape counts as soon as something is measured; empty: a
        line."""
        self._recent = {size: deque([seconds], MEASUREMENTS) for size, seconds in initial.items()}
        self._median = dict(initial)  # in units of the curve
        self._sizes = sorted(initial)
        self._unit = 0.001 if curve else 0.0
        self._curve = dict(curve) or {0: 1.0}  # a copy, because a later run may measure again
        self._curve_sizes = sorted(self._curve)

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, size: int, seconds: float) -> None:
        """Add a measurement."""
        seconds /= self._shape(size)
        if size not in self._recent:
            self._recent[size] = deque(maxlen=MEASUREMENTS)
            self._sizes.insert(bisect(self._sizes, size), size)
        recent = self._recent[size]
        recent.append(seconds)
        # the lower median, because noise only adds time
        self._median[size] = sorted(recent)[(len(recent) - 1) // 2]

    def estimates(self, sizes: Iterable[int]) -> list[float]:
        """Return the seconds of each size; before the first measurement those of the curve, 0 without one."""
        if not self._sizes:
            return [self._unit * self._shape(size) for size in sizes]
        return [interpolate(self._median, self._sizes, size) * self._shape(size) for size in sizes]

    def _shape(self, size: int) -> float:
        return interpolate(self._curve, self._curve_sizes, size)


class AcceptanceEstimator:
    """Acceptance rate per level, given that the level above was accepted, with exponential decay.

    Level 1 starts from an optimistic prior that decays like an observation. A deeper level starts from the rate of the
    level above.
    """

    copying = False

    def __init__(self) -> None:
        self._hits = [PRIOR * PRIOR_WEIGHT]
        self._tries = [PRIOR_WEIGHT]

    def start(self) -> None:
        """Begin another text."""

    def add(self, drafted: int, accepted: int) -> None:
        """Add one row of one step: drafted and accepted levels."""
        hits, tries = self._hits, self._tries
        verified = min(accepted + 1, drafted)
        while len(tries) < verified:
            hits.append(0.0)
            tries.append(0.0)
        for level in range(verified):
            hits[level] = DECAY * hits[level] + (level < accepted)
            tries[level] = DECAY * tries[level] + 1.0

    def forget(self, weight: float) -> None:
        """Let all observations together count for at most `weight`."""
        for level, tries in enumerate(self._tries):
            share = min(1.0, weight / tries)
            self._hits[level], self._tries[level] = share * self._hits[level], share * tries

    def rates(self, depth: int) -> list[float]:
        """Return the acceptance rates of levels 1 to `depth`."""
        rate, rates = self._hits[0] / self._tries[0], []
        for level in range(depth):
            if 0 < level < len(self._tries):
                rate = (self._hits[level] + PRIOR_WEIGHT * rate) / (self._tries[level] + PRIOR_WEIGHT)
            rates.append(rate)
        return rates


class LookupAcceptance(AcceptanceEstimator):
    """Acceptance of a lookup, which is right where a text is copied and hardly elsewhere: after a draft that was right,
    apart from that after others.

    A draft that is not verified counts, too, as soon as the text shows how much of it was right. From its first right
    token on the text counts as copied, the draft itself included: so where passes are dear, a lookup drafts after a
    token that it had right (the other way lost 1 to 3 % in replays). copying: the last draft was right so far; of
    several rows, the last one that drafted.
    """

    def __init__(self) -> None:
        self._parts = {copying: AcceptanceEstimator() for copying in (False, True)}
        self._unverified: dict[int, tuple[list[int], int]] = {}  # row -> draft, tokens of it that the text has

    def start(self) -> None:
        self.copying = False
        self._unverified.clear()
        for part in self._parts.values():
            part.forget(START_WEIGHT)

    def add(self, drafted: int, accepted: int) -> None:
        self._parts[self.copying].add(drafted, accepted)
        if drafted:
            self.copying = accepted == drafted

    def rates(self, depth: int) -> list[float]:
        return self._parts[self.copying].rates(depth)

    @property
    def watches(self) -> bool:
        """Return True while a draft that is not verified is compared with the text."""
        return bool(self._unverified)

    def watch(self, draft: Draft) -> None:
        """Compare a draft that is not verified with the text."""
        rows = draft.tokens.tolist() if draft.nodes else []
        self._unverified = {row: ([token for token in ids if token != ABSENT], 0) for row, ids in enumerate(rows)}

    def drop(self) -> None:
        """End the comparison, because another draft is verified."""
        self._unverified.clear()

    def observe(self, outputs: list[list[int]]) -> None:
        """Add the next tokens of the text."""
        for row, (draft, before) in [*self._unverified.items()]:
            known = before + sum(takewhile(bool, map(eq, draft[before:], outputs[row])))
            if outputs[row] and known - before == len(outputs[row]):
                self._unverified[row], self.copying = (draft, known), True
            else:
                del self._unverified[row]
                self.add(len(draft), known)


class AcceptancePredictor:
    """Predicts acceptance of a draft token from the drafter's confidence by online logistic regression.

    The probability is sigmoid(w f + b), where f is the log-odds of the drafter's most likely token. Every observation
    adds one Newton step on exponentially decaying sums.
    """

    def __init__(self) -> None:
        self.w, self.b = 0.6, 0.5
        self._ww = self._bb = 4.0
        self._wb = 0.0

    def accept_prob(self, log_odds: float) -> float:
        """Return the predicted acceptance probability."""
        return 1.0 / (1.0 + exp(-max(-40.0, min(40.0, self.w * log_odds + self.b))))

    def add(self, log_odds: float, accepted: bool) -> None:
        """Add the result of one verified token."""
        predicted = self.accept_prob(log_odds)
        weight, error = predicted * (1.0 - predicted), accepted - predicted
        self._ww = PREDICTOR_DECAY * self._ww + weight * log_odds * log_odds
        self._wb = PREDICTOR_DECAY * self._wb + weight * log_odds
        self._bb = PREDICTOR_DECAY * self._bb + weight
        ww, wb, bb = self._ww + RIDGE, self._wb, self._bb + RIDGE
        step = error / (ww * bb - wb * wb)
        self.w = max(self.w + step * (bb * log_odds - wb), MIN_WEIGHT)
        self.b += step * (ww - wb * log_odds)


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


class AdaptiveOptions(BaseOptions):
    drafter: str = setting("draft_model", "the method whose draft length is chosen", choices=wrappable("adaptive"))


class Adaptive(Wrapper, method="adaptive"):
    learns = True
    chooses_length = True
    summary = "Chooses the draft length at every step, down to zero, from past acceptance and measured cost."

    Options = AdaptiveOptions

    def __init__(self, target: Target, model: object = None, options: AdaptiveOptions | None = None) -> None:
        options = options or self.Options()
        super().__init__(load_drafter(options.drafter, target, model))
        self._lookup = LookupAcceptance() if self.drafters[0].looks_up else None
        self.policy = Goodput(target.pass_ms, self._lookup)
        self._device = target.device
        self._row_counts: list[tuple[int, int]] | None = None  # of the last draft, until its times arrive

    def start(self, batch: int, sampling: Sampling, rng: Generator) -> None:
        super().start(batch, sampling, rng)
        self.policy.start()
        self._empty_draft = Draft.empty(batch, self._device)
        self._draft: Draft | None = None  # None until the prompt has been observed
        self._unverified = 0

    def capture_graphs(self, budget: Budget) -> None:
        """Capture every length, because the policy measures the time of each."""
        depth = min(budget.depth, budget.nodes)
        for k in range(1, depth):
            self.drafters[0].propose(Budget(k, budget.nodes * k // depth))
        super().capture_graphs(budget)

    def propose(self, budget: Budget) -> Draft:
        """Draft with the chosen k.

        Notes: k, alpha (expected mean acceptance rate) and predicted (speed-up over plain decoding).
        """
        depth = min(budget.depth, budget.nodes)
        self._k = k = self.policy.choose(depth, budget.nodes)
        draft, self._unverified = self._empty_draft, 0
        if k:
            draft = super().propose(Budget(k, budget.nodes * k // depth, self.policy.should_stop))
            if self._lookup:
                self._lookup.drop()
        elif self._lookup and depth and not self._lookup.watches:
            self._lookup.watch(super().propose(budget))
            self._unverified = depth
        used = draft.nodes if self.policy.stops else k
        self._draft = replace(draft, notes={**draft.notes, **self.policy.notes, "k": used})
        return self._draft

    def observe(self, progress: Progress) -> None:
        if self._draft is not None:
            self._row_counts = acceptance_per_row(self._draft, self._k, progress)
        super().observe(progress)
        if self._lookup:
            self._lookup.observe(progress.output_ids())

    def on_step_timed(self, ms: Mapping[str, float]) -> None:
        super().on_step_timed(ms)
        if self._draft is not None and self._row_counts is not None:
            verifying = sum(ms.get(lap, 0.0) for lap in ("verify", "accept", "commit"))
            slots, drafting = self._draft.nodes + 1, ms.get("draft", 0.0)
            times = drafting / 1000.0, verifying / 1000.0
            self.policy.learn(StepOutcome(self._k, slots, self._row_counts, *times, self._unverified))
            self._row_counts = None
