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
from specdemo.methods.wrapper import Wrapper, judged, wrappable

PRIOR, PRIOR_TRIES = 0.7, 2.0  # the acceptance believed before anything was seen, and how many tries that is worth
MEMORY = 0.98  # what a try still counts after the next one: the last 50 matter
MEASUREMENTS = 9  # per size
PLAIN_STEPS = 2  # to begin with: nothing is lost by them, and all is measured against a plain step
EXPLORATION = 0.01  # the share of time that may be lost in looking what another depth brings
FADING, RIDGE = 0.995, 0.1  # of a verdict's weight at the next one; what is added to the sums
LEAST_WEIGHT = 0.05  # of the log-odds: a surer draft is never kept less
PATIENCE = 8  # steps between two such looks, at least
LASTING = 4  # steps that a plan serves: what it is made of changes slowly, and to make it takes time
SUREST = 1.0 - 1e-6


@dataclass(frozen=True, slots=True)
class Outcome:
    """One step: what was asked for and what came of it. Rows that have ended are left out."""

    asked: int  # k
    slots: int  # verified, the root included
    rows: Sequence[tuple[int, int]]  # levels drafted and levels kept, per row
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0


class Policy:
    """What decides how far to draft: as it is, as far as may be, and all of it is verified."""

    enough: Callable[[list[float]], bool] | None = None  # as in `Budget`

    def __init__(self) -> None:
        self.notes: dict[str, float] = {}

    def start(self) -> None:
        """A new generation."""

    def choose(self, depth: int, nodes: int) -> int:
        """How deep to draft, 0 to `depth`, when `nodes` nodes may be drafted at `depth`."""
        return depth

    def cut(self, draft: Draft) -> Draft:
        """What of a draft to verify."""
        return draft

    def learn(self, outcome: Outcome) -> None:
        """What came of the step that `choose` decided on."""


class Costs:
    """Seconds by size: the median of the last measurements. Sizes between measured ones are interpolated, those below
    cost what the smallest does, those above go on as the last two did."""

    def __init__(self, known: Mapping[int, float]) -> None:
        self._last = {size: deque([seconds], MEASUREMENTS) for size, seconds in known.items()}
        self._median = dict(known)
        self._sizes = sorted(known)

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, size: int, seconds: float) -> None:
        """Note that `size` took so many seconds."""
        if size not in self._last:
            self._last[size] = deque(maxlen=MEASUREMENTS)
            self._sizes.insert(bisect(self._sizes, size), size)
        last = self._last[size]
        last.append(seconds)
        self._median[size] = sorted(last)[(len(last) - 1) // 2]  # the lower of two: disturbances only add time

    def at(self, size: int) -> float:
        """0 while nothing is known."""
        median, sizes = self._median, self._sizes
        if size in median:
            return median[size]
        place = bisect(sizes, size)
        if not place or len(sizes) == 1:
            return median[sizes[0]] if sizes else 0.0
        beyond = place == len(sizes)
        low, high = sizes[-2:] if beyond else sizes[place - 1 : place + 1]
        slope = (median[high] - median[low]) / (high - low)
        return median[high] + (max(slope, 0.0) if beyond else slope) * (size - high)


class Acceptance:
    """The chance that level i is kept when the level above was, from what happened to the last tries there.

    Level 1 starts from an optimistic prior that is forgotten like any other try; a deeper level is believed to be like
    the one above until it has tries of its own.
    """

    def __init__(self) -> None:
        self._hits = [PRIOR * PRIOR_TRIES]
        self._tries = [PRIOR_TRIES]

    def add(self, drafted: int, kept: int) -> None:
        """Note one row of one step: levels drafted, and levels kept of them."""
        hits, tries = self._hits, self._tries
        reached = min(kept + 1, drafted)
        while len(tries) < reached:
            hits.append(0.0)
            tries.append(0.0)
        for level in range(reached):
            hits[level] = MEMORY * hits[level] + (level < kept)
            tries[level] = MEMORY * tries[level] + 1.0

    def rates(self, depth: int) -> list[float]:
        """The chance of each of the levels 1 to `depth`."""
        rate, rates = self._hits[0] / self._tries[0], []
        for level in range(depth):
            if 0 < level < len(self._tries):
                rate = (self._hits[level] + PRIOR_TRIES * rate) / (self._tries[level] + PRIOR_TRIES)
            rates.append(rate)
        return rates


class Keeping:
    """The chance that a drafted token is kept, of how sure the draft was: logistic in the log-odds f of the likeliest
    token there, sigmoid(w f + b), by one Newton step a verdict on sums that fade."""

    def __init__(self) -> None:
        self.w, self.b = 0.6, 0.5
        self._ww = self._bb = 4.0
        self._wb = 0.0

    def rate(self, odds: float) -> float:
        """0..1"""
        return 1.0 / (1.0 + exp(-max(-40.0, min(40.0, self.w * odds + self.b))))

    def add(self, odds: float, kept: bool) -> None:
        """Note what became of a token that was judged."""
        rate = self.rate(odds)
        weight, error = rate * (1.0 - rate), kept - rate
        self._ww = FADING * self._ww + weight * odds * odds
        self._wb = FADING * self._wb + weight * odds
        self._bb = FADING * self._bb + weight
        ww, wb, bb = self._ww + RIDGE, self._wb, self._bb + RIDGE
        step = error / (ww * bb - wb * wb)
        self.w = max(self.w + step * (bb * odds - wb), LEAST_WEIGHT)
        self.b += step * (ww - wb * odds)


def expected_tokens(rates: Sequence[float]) -> list[float]:
    """Acceptance by level -> for k = 0, 1, .. the tokens that a step emits, the target's own one included."""
    return list(accumulate(accumulate(rates, mul), initial=1.0))


@dataclass(frozen=True, slots=True)
class Plan:
    """What is believed of drafting k = 0, 1, .. tokens, and so the best k."""

    rates: list[float]  # of the levels
    tokens: list[float]
    seconds: list[float]
    best: int
    bars: list[float]  # the chance that all so far is kept, below which one more token is not worth its seconds


class Goodput(Policy):
    """The first steps are plain and the next ones draft one token: so the costs are known before much is spent."""

    def __init__(self) -> None:
        super().__init__()
        self.acceptance = Acceptance()
        self.keeping = Keeping()
        self._asks = False  # the drafter does, whether it is enough
        self._odds: list[list[float]] = []  # of the draft, per level and row
        self._alive: list[float] = []  # the chance that all of the row's draft so far is kept
        self._plans: dict[tuple[int, int], Plan] = {}  # of budgets
        self._plan = Plan([], [1.0], [0.0], 0, [])
        self._steps = 0
        self._tokens, self._time = 0.0, 0.0  # of the last steps, a row's
        self._drafting = Costs({0: 0.0})
        self._verifying = Costs({})
        self._met: set[int] = set()  # slots; the first pass over so many also pays for what the next ones find ready
        self._plain = PLAIN_STEPS
        self._drafted = False  # in the step before
        self._since = 0  # steps, since a neighbour was looked at
        self._deeper = False  # which one that was

    def start(self) -> None:
        self._drafted = False

    def choose(self, depth: int, nodes: int) -> int:
        self._plan = plan = self._plans.get((depth, nodes)) or self._planned(depth, nodes)
        if self._plain or len(self._drafting) == 1:
            k = 0 if self._plain else min(depth, 1)
            self._plain = max(self._plain - 1, 0)
        else:
            k = depth if self._asks and plan.best else self._explore(plan)
        self._odds, self._alive = [], []
        predicted = plan.tokens[k] * plan.seconds[0] / plan.seconds[k] if plan.seconds[k] else 1.0
        alpha = sum(plan.rates[: max(k, 1)]) / max(k, 1) if depth else 0.0
        self.notes = {"k": k, "alpha": round(alpha, 4), "predicted": round(predicted, 4)}
        return k

    def cut(self, draft: Draft) -> Draft:
        if self._odds:
            self.notes["k"] = draft.nodes
        return draft

    def enough(self, chances: list[float]) -> bool:
        """Whether one more token is worth less than its seconds, by the chances of the likeliest ones so far."""
        self._asks = True
        odds = [log(chance / (1.0 - chance)) for chance in (min(max(c, 1.0 - SUREST), SUREST) for c in chances)]
        self._odds.append(odds)
        rates = [*map(self.keeping.rate, odds)]
        self._alive = [*map(mul, self._alive, rates)] if self._alive else rates
        return sum(self._alive) < self._plan.bars[len(self._odds)] * len(rates)

    def learn(self, outcome: Outcome) -> None:
        if outcome.slots in self._met:
            self._verifying.add(outcome.slots, outcome.verify_seconds)
        self._met.add(outcome.slots)
        drafted = outcome.slots - 1 if self._odds else outcome.asked
        if drafted and self._drafted:  # a draft behind a plain step also reads what it has missed
            self._drafting.add(drafted, outcome.draft_seconds)
        self._drafted = drafted > 0
        for levels, kept in outcome.rows:
            self.acceptance.add(levels, kept)
        if outcome.rows and self._odds and len(self._odds[0]) == len(outcome.rows):
            for row, (levels, kept) in enumerate(outcome.rows):
                for level, odds in enumerate(self._odds[: min(kept + 1, levels)]):
                    self.keeping.add(odds[row], level < kept)
        if outcome.rows:
            tokens = 1.0 + sum(kept for _, kept in outcome.rows) / len(outcome.rows)
            self._tokens = MEMORY * self._tokens + tokens
            self._time = MEMORY * self._time + outcome.draft_seconds + outcome.verify_seconds
        self._steps += 1
        if self._steps < MEASUREMENTS or self._steps % LASTING == 0:
            self._plans.clear()

    def _planned(self, depth: int, nodes: int) -> Plan:
        rates = self.acceptance.rates(depth)
        tokens, seconds = expected_tokens(rates), self._seconds(depth, nodes)
        speeds = [t / s if s else 0.0 for t, s in zip(tokens, seconds, strict=True)]
        bars = self._bars(rates, seconds) if self._asks else [0.0] * depth
        plan = self._plans[depth, nodes] = Plan(rates, tokens, seconds, speeds.index(max(speeds)), bars)
        return plan

    def _bars(self, rates: list[float], seconds: list[float]) -> list[float]:
        """Another token is held to take the least that one takes in any longer draft: the seconds of single sizes lie
        too near each other for their differences to be trusted."""
        speed, last = self._tokens / self._time if self._time else 0.0, len(rates)
        slopes = (min((seconds[n] - seconds[k]) / (n - k) for n in range(k + 1, last + 1)) for k in range(last))
        return [slope * speed / max(rate, 1.0 - SUREST) for slope, rate in zip(slopes, rates, strict=True)]

    def _seconds(self, depth: int, nodes: int) -> list[float]:
        """Of a step, by k. More slots never take less time, so a plain step takes at most what any other does."""
        slots = (1 + nodes * k // max(depth, 1) for k in range(depth, -1, -1))
        verifying = [*accumulate(map(self._verifying.at, slots), min)]
        return [self._drafting.at(k) + v for k, v in enumerate(reversed(verifying))]

    def _explore(self, plan: Plan) -> int:
        """Mostly the best; now and then a neighbour, the rarer the more of the time that is expected to lose."""
        best, tokens, seconds = plan.best, plan.tokens, plan.seconds
        if len(seconds) == 1:
            return best
        deeper = best == 0 or (best + 1 < len(seconds) and not self._deeper)
        k = best + 1 if deeper else best - 1
        lost = seconds[k] - tokens[k] * seconds[best] / tokens[best]
        self._since += 1
        if self._since < max(PATIENCE, lost / (EXPLORATION * seconds[best])):
            return best
        self._since, self._deeper = 0, deeper
        return k


class Confidence(Policy):
    def __init__(self, threshold: float, drafter: str) -> None:
        super().__init__()
        self._threshold, self._drafter = threshold, drafter

    def cut(self, draft: Draft) -> Draft:
        if draft.nodes and draft.confidence is None:
            raise ValueError(
                f"{self._drafter!r} does not say how sure it is; choose policy 'goodput' or 'heuristic' for it"
            )
        draft = sure(draft, self._threshold)
        self.notes = {"k": draft.nodes}
        return draft


class Heuristic(Policy):
    _k: int | None = None

    def start(self) -> None:
        self._k = None

    def choose(self, depth: int, nodes: int) -> int:
        return depth if self._k is None else min(self._k, depth)

    def learn(self, outcome: Outcome) -> None:
        if any(drafted for drafted, _ in outcome.rows):
            whole = all(kept >= drafted for drafted, kept in outcome.rows)
            self._k = outcome.asked + 2 if whole else max(1, outcome.asked - 1)


def sure(draft: Draft, threshold: float) -> Draft:
    """The nodes all of whose ancestors have a confidence of at least `threshold`."""
    if draft.confidence is None or not draft.nodes:
        return draft
    kept = []
    for parents, confidence in zip(draft.parents.tolist(), draft.confidence.tolist(), strict=True):
        open_slots = [True]  # whether anything below a slot is kept
        row = []
        for parent, sureness in zip(parents, confidence, strict=True):
            row.append(open_slots[parent])
            open_slots.append(row[-1] and sureness >= threshold)
        kept.append(row)
    columns = [node for node in range(draft.nodes) if any(row[node] for row in kept)]
    if all(map(all, kept)):
        return draft
    device = draft.tokens.device
    picked = torch.tensor(columns, device=device)
    lost = ~torch.tensor(kept, device=device)
    slots = torch.zeros(draft.nodes + 1, dtype=torch.int64, device=device)
    slots[picked + 1] = torch.arange(1, len(columns) + 1, device=device)
    return Draft(
        draft.tokens.masked_fill(lost, ABSENT)[:, picked],
        slots[draft.parents[:, picked]],
        None if draft.probs is None else draft.probs[:, picked],
        draft.confidence[:, picked],
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
        self.policy: Policy = Heuristic() if options.policy == "heuristic" else Goodput()
        if options.policy == "confidence":
            self.policy = Confidence(options.threshold, options.drafter)
        self._device = target.device
        self._came: list[tuple[int, int]] | None = None  # of the last draft, until its step was timed

    def start(self, batch: int, sampling: Sampling, rng: Generator) -> None:
        super().start(batch, sampling, rng)
        self.policy.start()
        self._nothing = Draft.empty(batch, self._device)
        self._draft: Draft | None = None  # None until the prompt has been observed

    def rehearse(self, budget: Budget) -> None:
        """Every length, the shortest first: a draft of another length would be timed as what it is not."""
        depth = min(budget.depth, budget.nodes)
        for k in range(1, depth + 1):
            super().rehearse(Budget(k, budget.nodes * k // depth))

    def propose(self, budget: Budget) -> Draft:
        """Its notes have k; by goodput also alpha, the mean acceptance expected, and predicted, the speed-up over plain
        decoding."""
        depth = min(budget.depth, budget.nodes)
        self._asked = k = self.policy.choose(depth, budget.nodes)
        draft = self._nothing
        if k:
            draft = self.policy.cut(super().propose(Budget(k, budget.nodes * k // depth, self.policy.enough)))
        self._draft = replace(draft, notes={**draft.notes, "k": k, **self.policy.notes})
        return self._draft

    def observe(self, progress: Progress) -> None:
        if self._draft is not None:
            self._came = judged(self._draft, self._asked, progress)
        super().observe(progress)

    def timed(self, ms: Mapping[str, float]) -> None:
        super().timed(ms)
        if self._draft is not None and self._came is not None:
            verifying = sum(ms.get(lap, 0.0) for lap in ("verify", "accept", "commit"))
            slots, drafting = self._draft.nodes + 1, ms.get("draft", 0.0)
            self.policy.learn(Outcome(self._asked, slots, self._came, drafting / 1000.0, verifying / 1000.0))
            self._came = None
