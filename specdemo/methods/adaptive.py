"""Adaptive draft length: at every step a policy says how deep the wrapped drafter may draft. The budget is the ceiling.

B rows, N draft nodes, k the depth asked for. The policies:

goodput     the k of most expected tokens per second (TurboSpec, 2406.14066), 0 included: sum over i <= k of the chance
            that i drafted tokens are kept, over the seconds of drafting k and verifying them. Chances are estimated by
            position while decoding, seconds are measured; both outlive the generation. A drafter that writes token by
            token is stopped as soon as another one is not worth its seconds: worth it is the chance that it will count,
            which how sure the draft was of each token before tells (the estimator of vLLM 0.32), at the speed so far.
            That looks at distributions only, never at a token's own draw
confidence  nothing is kept below a node of which the drafter is unsure. That looks at a node's ancestors only, never at
            its own token, so it is exact under sampling too. It saves verification, not drafting
heuristic   two more after a draft that was kept whole, one less after any other, at least 1 (that of transformers)

Goodput listens to the clock. The text is exact all the same, but under sampling two runs of one seed may draft to other
depths, draw other noise and so write other texts.
"""

from bisect import bisect
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import exp, log
from operator import mul

import torch
from torch import Generator

from specdemo.core.protocol import Budget, Progress, Target
from specdemo.core.sampling import Sampling
from specdemo.core.tree import ABSENT, Draft
from specdemo.methods import knob, load_drafter
from specdemo.methods.wrapper import Wrapper, acceptance_per_row, wrappable

PRIOR, PRIOR_WEIGHT = 0.7, 2.0  # the acceptance believed before anything was seen, and how many tries that is worth
DECAY = 0.98  # what a try still counts after the next one: the last 50 matter
MEASUREMENTS = 9  # per size
PLAIN_STEPS = 2  # to begin with: nothing is lost by them, and all is measured against a plain step
EXPLORATION = 0.01  # the share of time that may be lost in looking what another depth brings
PREDICTOR_DECAY, RIDGE = 0.995, 0.1  # of a verdict's weight at the next one; what is added to the sums
MIN_WEIGHT = 0.05  # of the log-odds: a surer draft is never kept less
EXPLORE_INTERVAL = 8  # steps between two such looks, at least
PLAN_STEPS = 4  # steps that a plan serves: what it is made of changes slowly, and to make it takes time
MAX_PROB = 1.0 - 1e-6


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """One step: what was asked for and what came of it. Rows that have ended are left out."""

    k: int  # k
    slots: int  # verified, the root included
    rows: Sequence[tuple[int, int]]  # levels drafted and levels kept, per row
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0


class LengthPolicy:
    """What decides how far to draft: as it is, as far as may be, and all of it is verified."""

    should_stop: Callable[[list[float]], bool] | None = None  # as in `Budget`

    def __init__(self) -> None:
        self.notes: dict[str, float] = {}

    def start(self) -> None:
        """A new generation."""

    def choose(self, depth: int, nodes: int) -> int:
        """How deep to draft, 0 to `depth`, when `nodes` nodes may be drafted at `depth`."""
        return depth

    def prune(self, draft: Draft) -> Draft:
        """What of a draft to verify."""
        return draft

    def learn(self, outcome: StepOutcome) -> None:
        """What came of the step that `choose` decided on."""


class LatencyTable:
    """Seconds by size: the median of the last measurements. Sizes between measured ones are interpolated, those below
    cost what the smallest does, those above go on as the last two did."""

    def __init__(self, initial: Mapping[int, float]) -> None:
        self._recent = {size: deque([seconds], MEASUREMENTS) for size, seconds in initial.items()}
        self._median = dict(initial)
        self._sizes = sorted(initial)

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, size: int, seconds: float) -> None:
        """Note that `size` took so many seconds."""
        if size not in self._recent:
            self._recent[size] = deque(maxlen=MEASUREMENTS)
            self._sizes.insert(bisect(self._sizes, size), size)
        recent = self._recent[size]
        recent.append(seconds)
        self._median[size] = sorted(recent)[(len(recent) - 1) // 2]  # the lower of two: disturbances only add time

    def estimate(self, size: int) -> float:
        """0 while nothing is known."""
        median, sizes = self._median, self._sizes
        if size in median:
            return median[size]
        index = bisect(sizes, size)
        if not index or len(sizes) == 1:
            return median[sizes[0]] if sizes else 0.0
        extrapolate = index == len(sizes)
        low, high = sizes[-2:] if extrapolate else sizes[index - 1 : index + 1]
        slope = (median[high] - median[low]) / (high - low)
        return median[high] + (max(slope, 0.0) if extrapolate else slope) * (size - high)


class AcceptanceEstimator:
    """The chance that level i is kept when the level above was, from what happened to the last tries there.

    Level 1 starts from an optimistic prior that is forgotten like any other try; a deeper level is believed to be like
    the one above until it has tries of its own.
    """

    def __init__(self) -> None:
        self._hits = [PRIOR * PRIOR_WEIGHT]
        self._tries = [PRIOR_WEIGHT]

    def add(self, drafted: int, accepted: int) -> None:
        """Note one row of one step: levels drafted, and levels kept of them."""
        hits, tries = self._hits, self._tries
        verified = min(accepted + 1, drafted)
        while len(tries) < verified:
            hits.append(0.0)
            tries.append(0.0)
        for level in range(verified):
            hits[level] = DECAY * hits[level] + (level < accepted)
            tries[level] = DECAY * tries[level] + 1.0

    def rates(self, depth: int) -> list[float]:
        """The chance of each of the levels 1 to `depth`."""
        rate, rates = self._hits[0] / self._tries[0], []
        for level in range(depth):
            if 0 < level < len(self._tries):
                rate = (self._hits[level] + PRIOR_WEIGHT * rate) / (self._tries[level] + PRIOR_WEIGHT)
            rates.append(rate)
        return rates


class AcceptancePredictor:
    """The chance that a drafted token is kept, of how sure the draft was: logistic in the log-odds f of the likeliest
    token there, sigmoid(w f + b), by one Newton step a verdict on sums that fade."""

    def __init__(self) -> None:
        self.w, self.b = 0.6, 0.5
        self._ww = self._bb = 4.0
        self._wb = 0.0

    def accept_prob(self, log_odds: float) -> float:
        """0..1"""
        return 1.0 / (1.0 + exp(-max(-40.0, min(40.0, self.w * log_odds + self.b))))

    def add(self, log_odds: float, accepted: bool) -> None:
        """Note what became of a token that was judged."""
        predicted = self.accept_prob(log_odds)
        weight, error = predicted * (1.0 - predicted), accepted - predicted
        self._ww = PREDICTOR_DECAY * self._ww + weight * log_odds * log_odds
        self._wb = PREDICTOR_DECAY * self._wb + weight * log_odds
        self._bb = PREDICTOR_DECAY * self._bb + weight
        ww, wb, bb = self._ww + RIDGE, self._wb, self._bb + RIDGE
        step = error / (ww * bb - wb * wb)
        self.w = max(self.w + step * (bb * log_odds - wb), MIN_WEIGHT)
        self.b += step * (ww - wb * log_odds)


def expected_tokens(rates: Sequence[float]) -> list[float]:
    """Acceptance by level -> for k = 0, 1, .. the tokens that a step emits, the target's own one included."""
    return list(accumulate(accumulate(rates, mul), initial=1.0))


@dataclass(frozen=True, slots=True)
class DepthPlan:
    """What is believed of drafting k = 0, 1, .. tokens, and so the best k."""

    rates: list[float]  # of the levels
    tokens: list[float]
    seconds: list[float]
    best: int
    thresholds: list[float]  # the chance that all so far is kept, below which one more token is not worth its seconds


class Goodput(LengthPolicy):
    """The first steps are plain and the next ones draft one token: so the costs are known before much is spent."""

    def __init__(self) -> None:
        super().__init__()
        self.acceptance = AcceptanceEstimator()
        self.predictor = AcceptancePredictor()
        self._token_by_token = False  # the drafter does, whether it is enough
        self._log_odds: list[list[float]] = []  # of the draft, per level and row
        self._path_probs: list[float] = []  # the chance that all of the row's draft so far is kept
        self._plans: dict[tuple[int, int], DepthPlan] = {}  # of budgets
        self._plan = DepthPlan([], [1.0], [0.0], 0, [])
        self._num_steps = 0
        self._recent_tokens, self._recent_seconds = 0.0, 0.0  # of the last steps, a row's
        self._draft_times = LatencyTable({0: 0.0})
        self._verify_times = LatencyTable({})
        self._seen_widths: set[int] = (
            set()
        )  # slots; the first pass over so many also pays for what the next ones find ready
        self._plain_steps_left = PLAIN_STEPS
        self._drafted_last_step = False  # in the step before
        self._steps_since_explored = 0  # steps, since a neighbour was looked at
        self._explored_deeper = False  # which one that was

    def start(self) -> None:
        self._drafted_last_step = False

    def choose(self, depth: int, nodes: int) -> int:
        self._plan = plan = self._plans.get((depth, nodes)) or self._make_plan(depth, nodes)
        if self._plain_steps_left or len(self._draft_times) == 1:
            k = 0 if self._plain_steps_left else min(depth, 1)
            self._plain_steps_left = max(self._plain_steps_left - 1, 0)
        else:
            k = depth if self._token_by_token and plan.best else self._explore(plan)
        self._log_odds, self._path_probs = [], []
        predicted = plan.tokens[k] * plan.seconds[0] / plan.seconds[k] if plan.seconds[k] else 1.0
        alpha = sum(plan.rates[: max(k, 1)]) / max(k, 1) if depth else 0.0
        self.notes = {"k": k, "alpha": round(alpha, 4), "predicted": round(predicted, 4)}
        return k

    def prune(self, draft: Draft) -> Draft:
        if self._log_odds:
            self.notes["k"] = draft.nodes
        return draft

    def should_stop(self, top_probs: list[float]) -> bool:
        """Whether one more token is worth less than its seconds, by the chances of the likeliest ones so far."""
        self._token_by_token = True
        log_odds = [log(prob / (1.0 - prob)) for prob in (min(max(c, 1.0 - MAX_PROB), MAX_PROB) for c in top_probs)]
        self._log_odds.append(log_odds)
        accept_probs = [*map(self.predictor.accept_prob, log_odds)]
        self._path_probs = [*map(mul, self._path_probs, accept_probs)] if self._path_probs else accept_probs
        return sum(self._path_probs) < self._plan.thresholds[len(self._log_odds)] * len(accept_probs)

    def learn(self, outcome: StepOutcome) -> None:
        if outcome.slots in self._seen_widths:
            self._verify_times.add(outcome.slots, outcome.verify_seconds)
        self._seen_widths.add(outcome.slots)
        drafted = outcome.slots - 1 if self._log_odds else outcome.k
        if drafted and self._drafted_last_step:  # a draft behind a plain step also reads what it has missed
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
        speeds = [t / s if s else 0.0 for t, s in zip(tokens, seconds, strict=True)]
        thresholds = self._thresholds(rates, seconds) if self._token_by_token else [0.0] * depth
        plan = self._plans[depth, nodes] = DepthPlan(rates, tokens, seconds, speeds.index(max(speeds)), thresholds)
        return plan

    def _thresholds(self, rates: list[float], seconds: list[float]) -> list[float]:
        """Another token is held to take the least that one takes in any longer draft: the seconds of single sizes lie
        too near each other for their differences to be trusted."""
        speed, depth = self._recent_tokens / self._recent_seconds if self._recent_seconds else 0.0, len(rates)
        slopes = (min((seconds[n] - seconds[k]) / (n - k) for n in range(k + 1, depth + 1)) for k in range(depth))
        return [slope * speed / max(rate, 1.0 - MAX_PROB) for slope, rate in zip(slopes, rates, strict=True)]

    def _seconds(self, depth: int, nodes: int) -> list[float]:
        """Of a step, by k. More slots never take less time, so a plain step takes at most what any other does."""
        slots = (1 + nodes * k // max(depth, 1) for k in range(depth, -1, -1))
        verifying = [*accumulate(map(self._verify_times.estimate, slots), min)]
        return [self._draft_times.estimate(k) + v for k, v in enumerate(reversed(verifying))]

    def _explore(self, plan: DepthPlan) -> int:
        """Mostly the best; now and then a neighbour, the rarer the more of the time that is expected to lose."""
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


class Confidence(LengthPolicy):
    def __init__(self, threshold: float, drafter: str) -> None:
        super().__init__()
        self._threshold, self._drafter = threshold, drafter

    def prune(self, draft: Draft) -> Draft:
        if draft.nodes and draft.confidence is None:
            raise ValueError(
                f"{self._drafter!r} does not say how sure it is; choose policy 'goodput' or 'heuristic' for it"
            )
        draft = prune_by_confidence(draft, self._threshold)
        self.notes = {"k": draft.nodes}
        return draft


class Heuristic(LengthPolicy):
    _k: int | None = None

    def start(self) -> None:
        self._k = None

    def choose(self, depth: int, nodes: int) -> int:
        return depth if self._k is None else min(self._k, depth)

    def learn(self, outcome: StepOutcome) -> None:
        if any(drafted for drafted, _ in outcome.rows):
            all_accepted = all(accepted >= drafted for drafted, accepted in outcome.rows)
            self._k = outcome.k + 2 if all_accepted else max(1, outcome.k - 1)


def prune_by_confidence(draft: Draft, threshold: float) -> Draft:
    """The nodes all of whose ancestors have a confidence of at least `threshold`."""
    if draft.confidence is None or not draft.nodes:
        return draft
    masks = []
    for parents, confidence in zip(draft.parents.tolist(), draft.confidence.tolist(), strict=True):
        open_slots = [True]  # whether anything below a slot is kept
        row = []
        for parent, prob in zip(parents, confidence, strict=True):
            row.append(open_slots[parent])
            open_slots.append(row[-1] and prob >= threshold)
        masks.append(row)
    columns = [node for node in range(draft.nodes) if any(row[node] for row in masks)]
    if all(map(all, masks)):
        return draft
    device = draft.tokens.device
    selected = torch.tensor(columns, device=device)
    dropped = ~torch.tensor(masks, device=device)
    slots = torch.zeros(draft.nodes + 1, dtype=torch.int64, device=device)
    slots[selected + 1] = torch.arange(1, len(columns) + 1, device=device)
    return Draft(
        draft.tokens.masked_fill(dropped, ABSENT)[:, selected],
        slots[draft.parents[:, selected]],
        None if draft.probs is None else draft.probs[:, selected],
        draft.confidence[:, selected],
        draft.notes,
    )


class Adaptive(Wrapper):
    learns = True
    title = "Adaptive length"
    summary = "Decides at every step how far to draft, down to not at all, from what was kept and what it cost."

    @dataclass(frozen=True, slots=True)
    class Options:
        drafter: str = knob("draft_model", "the method whose draft length is chosen", choices=wrappable("adaptive"))
        policy: str = knob(
            "goodput",
            "what decides: expected tokens per second, the drafter's confidence, or what became of the last draft",
            choices=("goodput", "confidence", "heuristic"),
        )
        threshold: float = knob(0.4, "policy confidence: draft no further below this", low=0.0, high=1.0, step=0.05)

    def __init__(self, target: Target, model: object = None, options: Options | None = None) -> None:
        options = options or self.Options()
        super().__init__(load_drafter(options.drafter, target, model))
        self.policy: LengthPolicy = Heuristic() if options.policy == "heuristic" else Goodput()
        if options.policy == "confidence":
            self.policy = Confidence(options.threshold, options.drafter)
        self._device = target.device
        self._row_counts: list[tuple[int, int]] | None = None  # of the last draft, until its step was timed

    def start(self, batch: int, sampling: Sampling, rng: Generator) -> None:
        super().start(batch, sampling, rng)
        self.policy.start()
        self._empty_draft = Draft.empty(batch, self._device)
        self._draft: Draft | None = None  # None until the prompt has been observed

    def capture_graphs(self, budget: Budget) -> None:
        """Every length, the shortest first: a draft of another length would be timed as what it is not."""
        depth = min(budget.depth, budget.nodes)
        for k in range(1, depth + 1):
            super().capture_graphs(Budget(k, budget.nodes * k // depth))

    def propose(self, budget: Budget) -> Draft:
        """Its notes have k; by goodput also alpha, the mean acceptance expected, and predicted, the speed-up over plain
        decoding."""
        depth = min(budget.depth, budget.nodes)
        self._k = k = self.policy.choose(depth, budget.nodes)
        draft = self._empty_draft
        if k:
            draft = self.policy.prune(super().propose(Budget(k, budget.nodes * k // depth, self.policy.should_stop)))
        self._draft = replace(draft, notes={**draft.notes, "k": k, **self.policy.notes})
        return self._draft

    def observe(self, progress: Progress) -> None:
        if self._draft is not None:
            self._row_counts = acceptance_per_row(self._draft, self._k, progress)
        super().observe(progress)

    def on_step_timed(self, ms: Mapping[str, float]) -> None:
        super().on_step_timed(ms)
        if self._draft is not None and self._row_counts is not None:
            verifying = sum(ms.get(lap, 0.0) for lap in ("verify", "accept", "commit"))
            slots, drafting = self._draft.nodes + 1, ms.get("draft", 0.0)
            self.policy.learn(StepOutcome(self._k, slots, self._row_counts, drafting / 1000.0, verifying / 1000.0))
            self._row_counts = None
