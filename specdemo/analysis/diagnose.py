"""Diagnosis: the verdict on a run, its causes in order, and what to change. Needs no torch.

Causes are ranked by one measure: the factor by which the run would become faster if the cause were removed. A better
draft length costs nothing, so its factor compares with the run as it is; so does that of a drafter that fails after
its first positions. Every other factor compares two runs at their
best draft lengths, one of which has a healthy value in one part of the step. A specific cause (thinking mode, batch
size, experts, memory) replaces the part of the step that it makes slow.

Some causes precede the others. A known fault of the setup, such as random prompts, comes first: it makes the other
numbers meaningless, so it is to be removed before anything else is judged. Then come causes that are counted instead of
inferred: steps without a draft, and positions after which nothing is accepted. In a run that is faster than plain
decoding, the draft length comes next, because nothing else is wrong then.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import ceil, inf, sqrt
from pathlib import Path
from typing import Any

from specdemo.analysis.attribution import cost_model, ratios, step_costs, target_shape
from specdemo.analysis.observation import TOLERANCE, Observation, complete
from specdemo.analysis.parts import BROKEN_RATE, BROKEN_TOKENS, WORKING_RATE
from specdemo.analysis.predict import ASSUMED
from specdemo.core.atomic_io import finite, json_text
from specdemo.core.estimate import Estimate
from specdemo.core.suggest import counted, program
from specdemo.core.timing_spread import MIN_STEP_COST
from specdemo.costs.lengths import MAX_K
from specdemo.costs.step import CostModel, DraftLengthAdvice, StepCost, break_even_rate
from specdemo.models.ref import ModelRef
from specdemo.presets.drafters import RULES, published_drafters
from specdemo.presets.files import read_yaml
from specdemo.servers.engines import ENGINES, engines

# A healthy step. Acceptance: the default of predictions. Drafting: a draft model of a tenth of the target's size, as
# the rules for choosing one demand; heads are cheaper. Verification: reading the weights dominates, so a token adds
# about its own FLOPs, 2 % of a step on GPUs at batch size 1. Overhead: sampling and bookkeeping of vLLM and SGLang
# take about a tenth of a step of an 8B model.
HEALTHY_RATE = ASSUMED
HEALTHY_DRAFT, HEALTHY_SLOT, HEALTHY_OVERHEAD = 0.1, 0.02, 0.1  # plain steps per draft token, its slot, and step
# Smaller factors are within the repeatability of such measurements: engines' logs cover seconds, and speeds of two
# servers on one machine vary by a few percent.
SMALLEST_GAIN = 1.05
SMALLEST_RATE = 0.005  # break-even rates below are shown as 0 %, so they are left out
SURE = 1.96  # standard deviations for 95 %
EXAMPLES = 4  # engines whose flags are shown if the engine is unknown
FEW_STEPS = 50  # below, the mean accepted length is uncertain by more than 10 %
EARLY = 0.75  # share of k below which drafts end early
# Known from the output, not inferred from costs. Faults make the other numbers meaningless.
STOPPED = "stopped drafter"
FAULTS = ("random prompts", "thinking", "broken drafter", STOPPED, "memory")
COUNTED = ("few drafts", "later positions")
PREREQUISITES = (*FAULTS, "draft cache")  # what is changed before anything else is judged
CLIFF_TRIALS = 50.0  # drafts that reach a position at which none is accepted
FEW_DRAFTS, HARDLY_ANY = 0.5, 0.05  # share of the steps with a draft
THRESHOLD = 0.5  # confidence at which drafts end, if it is unknown
# Drafts for which a threshold is named: users of llama.cpp end long ones at 0.6 to 0.75 (issues 24508 and 25792).
LONG_DRAFT, MOSTLY_REJECTED, USUAL_P_MIN = 8.0, 0.5, 0.75  # tokens; acceptance rate; confidence


@dataclass(frozen=True, slots=True)
class Words:
    """Words for a cause, see causes.yaml."""

    title: str
    bottleneck: str
    evidence: str
    advice: str
    lookup: str = ""


_TEXTS: Any = read_yaml(Path(__file__).with_name("causes.yaml"))
WORDS = {name: Words(**texts) for name, texts in _TEXTS.items()}


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause of slowness. gain: the factor by which the run would become faster without it; 1 or more. title and
    evidence: sentences without a period. advice: what to change, one or two sentences; may be empty."""

    name: str
    title: str
    gain: float
    evidence: str
    advice: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Result of `diagnose`.

    observation: completed with the values that follow from others. step_cost: time of a step in plain steps.
    break_even: acceptance rate (accepted / drafted) below which this draft loses on this machine; above 1: it always
    loses. costs: plain steps of `draft` (a draft token), `verify` and `overhead`, `measured` or estimated. best_k:
    fastest draft length, 0 for off; speed_at_best: the speed-up with it; gain: the factor over the present draft
    length. Their intervals cover the ways in which the cost may be split, or the sampling error if all times were
    recorded. causes: most important first. sentence: the verdict. recommendations: what to change, with the engine's
    flags.
    """

    observation: Observation
    sentence: str
    causes: tuple[Cause, ...] = ()
    recommendations: tuple[str, ...] = ()
    step_cost: float | None = None
    break_even: float | None = None
    costs: Mapping[str, float] | None = None
    measured: bool = False
    best_k: int | None = None
    speed_at_best: Estimate | None = None
    gain: Estimate | None = None
    notes: tuple[str, ...] = ()

    @property
    def cause(self) -> Cause | None:
        """Return the main cause; None for a run that is faster than plain decoding at a good draft length and has no
        fault in its setup."""
        first = self.causes[0] if self.causes else None
        changing = (*FAULTS, "later positions", "draft length")
        return None if first is None or (self.healthy and first.name not in changing) else first

    @property
    def healthy(self) -> bool:
        """Return whether the run is faster than plain decoding, or expected to be."""
        speed = self.observation.speedup
        return ((self.expected_speed or 0.0) if speed is None else speed.value) >= SMALLEST_GAIN

    @property
    def expected_speed(self) -> float | None:
        """Return the speed-up that follows from the cost of a step; None without a diagnosis."""
        length = self.observation.accepted_length
        return length / self.step_cost if length and self.step_cost else None

    @property
    def implausible(self) -> bool:
        """Return whether the two speeds cannot be of the same prompts and load: a step would be faster than a plain
        one."""
        return not self.measured and self.step_cost is not None and self.step_cost < MIN_STEP_COST

    @property
    def short(self) -> bool:
        """Return whether the run has too few steps to tell its speed."""
        return 0 < (self.observation.steps or 0) < FEW_STEPS

    @property
    def hopeless(self) -> bool:
        """Return whether plain decoding is the fastest choice: no draft length is predicted to beat it, and the run
        did not."""
        speed = self.observation.speedup
        return self.best_k == 0 and (not self.healthy if speed is None else _label(speed) != "faster")

    def limits(self) -> list[str]:
        """Return a title and the causes in order, one per line; empty without any."""
        title = "Causes, by the speed-up without each:" if self.cause else "What limits the speed:"
        lines = [f"{cause.title} ({cause.gain:.2f}x): {cause.evidence}" for cause in self.causes]
        return [title, *(f"{place}. {line}" for place, line in enumerate(lines, start=1))] if lines else []

    @property
    def missing(self) -> tuple[str, ...]:
        """Return the names of the values that would make the diagnosis more certain."""
        return self.observation.missing

    def as_dict(self) -> dict[str, object]:
        """Return everything for JSON."""
        values = asdict(self)
        observation = values.pop("observation")
        cause = self.cause.name if self.cause else None
        content = finite(values | {"cause": cause, "missing": self.missing, "observation": observation})
        assert isinstance(content, dict)
        return content


def diagnose(observation: Observation, advice: DraftLengthAdvice | None = None) -> Diagnosis:
    """Diagnose a run. advice: its cost model and best draft length, if the events of all steps were recorded.

    Raises ValueError, one line, if the values contradict each other. A diagnosis with few values lists them in
    `missing` and has no causes.
    """
    observation = complete(observation)
    if observation.drafting_share == 0.0:
        change = _of_drafts(observation)
        return Diagnosis(observation, _never_drafted(observation), recommendations=(change,), notes=observation.notes)
    if observation.accepted_length is None or not observation.k:
        return Diagnosis(observation, _unknown(observation), notes=tuple(_reading_notes(observation)))
    if advice:
        fits = [_measured(observation, advice.costs)]
    else:
        fits = [_Fit(observation, cost, cost_model(cost, observation)) for cost in step_costs(observation)]
    first, *others = fits
    certain = advice is not None or None not in (observation.draft_cost, observation.verify_cost, observation.overhead)
    longest = min(MAX_K, 2 * first.model.k) if certain else min(MAX_K, first.model.k)
    best_k = advice.best if advice else _best_drafting(first.model, longest)
    gain = advice.gain if advice else _range([fit.gain(best_k) for fit in fits])
    if not first.pays(best_k, gain.value):
        best_k, gain = 0, _range([fit.gain(0) for fit in fits])
    best_speed = _range([fit.model.speedup(best_k) for fit in fits])
    causes = tuple(_order(first.causes(longest, best_k, gain), first))
    drafted = observation.drafted_per_step or float(observation.k)
    speed, expected_cost = observation.speedup, first.model.cost(first.model.k).total
    step_cost = expected_cost if speed is None else observation.accepted_length / speed.value
    diagnosis = Diagnosis(
        observation=observation,
        sentence="",
        causes=causes,
        step_cost=step_cost,
        break_even=break_even_rate(step_cost, drafted),
        costs={"draft": first.draft_cost, "verify": first.cost.verify, "overhead": first.cost.overhead},
        measured=certain,
        best_k=best_k,
        speed_at_best=best_speed,
        gain=gain,
        notes=tuple(_notes(observation, best_k, others)),
    )
    return replace(diagnosis, sentence=verdict(diagnosis), recommendations=tuple(_recommendations(diagnosis)))


def _range(values: Sequence[float]) -> Estimate:
    return Estimate(values[0], min(values), max(values)) if len(values) > 1 else Estimate(values[0])


def _order(causes: Iterable[Cause], fit: "_Fit") -> list[Cause]:
    """Return the causes in order: faults of the setup; what is counted and not inferred; then by gain. If the run is
    faster than plain decoding, only its drafts' length can be a cause, so it precedes the other gains."""
    pays = fit.speed >= SMALLEST_GAIN

    def rank(cause: Cause) -> tuple[bool, bool, float]:
        first = cause.name in (("later positions", "draft length") if pays else COUNTED)
        return cause.name not in FAULTS, not first, -cause.gain

    ranking = sorted(causes, key=rank)
    named = ("draft length", *COUNTED, *FAULTS)
    return [c if not pays or c.name in named else replace(c, title=WORDS[c.name].bottleneck) for c in ranking]


def _measured(observation: Observation, model: CostModel) -> "_Fit":
    """Return the cost model of recorded steps in units of a plain step. Plain steps have an overhead too."""
    unit, k = model.plain_ms, model.k
    times = ("plain_ms", "pass_ms", "draft_ms", "draft_step_ms", "other_ms")
    in_steps = replace(model, **{name: getattr(model, name) / unit for name in times})
    step = in_steps.cost(k)
    overhead = max(step.overhead - (1.0 - in_steps.pass_ms), 0.0)
    cost = StepCost(step.drafting, 1.0 + step.verify - in_steps.pass_ms, overhead)
    return _Fit(observation, cost, in_steps, recorded=True)


@dataclass(frozen=True, slots=True)
class _Fit:
    """A cost of the step, and the cost model with it."""

    observation: Observation
    cost: StepCost
    model: CostModel
    recorded: bool = False  # the events of all steps were recorded

    @property
    def draft_cost(self) -> float:
        """Return the cost of a draft token."""
        drafted = max(self.model.drafted(self.model.k), 1.0) if self.recorded else self.observation.drafted_per_step
        return self.cost.drafting / (drafted or 1.0)

    @property
    def speed(self) -> float:
        """Return the speed-up of the run, measured or expected."""
        measured = self.observation.speedup
        return self.model.speedup(self.model.k) if measured is None else measured.value

    def gain(self, k: int) -> float:
        """Return the predicted speed at draft length k relative to the run, k = 0 for plain decoding."""
        return self.model.speedup(k) / self.model.speedup(self.model.k)

    def pays(self, k: int, gain: float) -> bool:
        """Return whether draft length k, with that gain, is predicted to be clearly faster than plain decoding. A run
        that is faster itself only has to gain."""
        measured = self.observation.speedup
        faster = measured is not None and _label(measured) == "faster"
        return k > 0 and (self.speed * gain >= SMALLEST_GAIN or (faster and self.speed * gain > 1.0))

    def causes(self, longest: int, best_k: int, gain: Estimate) -> Iterator[Cause]:
        """Yield the causes whose removal gains more than `SMALLEST_GAIN`, and all that are known without costs. best_k,
        gain: the recommended draft length and its gain over the run."""
        clear = gain.label == "faster" if self.recorded else gain.value >= SMALLEST_GAIN
        if best_k and best_k != self.model.k and clear:
            yield self._of_length(best_k, gain.value)
        if self.observation.stopped:
            yield self._of_stopped_drafter()
        best, as_it_is = self.model.speedup(_best_drafting(self.model, longest)), self.model.speedup(self.model.k)
        for name, fixed in self._fixed():
            factor = fixed.speedup(_best_drafting(fixed, longest)) / (as_it_is if name == "later positions" else best)
            if name in (*FAULTS, "later positions") or factor >= SMALLEST_GAIN or self._hardly_drafts(name):
                words, facts = WORDS[name], self._facts()
                advice = words.lookup if words.lookup and self.observation.looks_up else words.advice
                texts = (text.format(**facts) for text in (words.evidence, advice))
                yield Cause(name, self._title(name), max(factor, 1.0), *texts)

    def _hardly_drafts(self, name: str) -> bool:
        return name == "few drafts" and self.model.reach_rates[0] < HARDLY_ANY

    def _title(self, name: str) -> str:
        run = self.observation
        if name == "later positions":
            return f"no draft token after position {self._cliff} is accepted"
        if name == "few drafts" and self._hardly_drafts(name):
            return "hardly any step has a draft"
        if name == "confidence threshold" and run.threshold:
            return "the confidence threshold ends drafts early"
        if name == "acceptance" and (run.accepted_length or 1.0) <= self.speed:
            return "too few draft tokens are accepted"
        return WORDS[name].title

    def _fixed(self) -> Iterator[tuple[str, CostModel]]:
        """Yield the cost model with one part replaced by that of a healthy step, by cause."""
        model, k = self.model, self.model.k
        reach = ratios([*model.reach_rates, *[model.reach_rates[-1]] * (len(model.alpha) - len(model.reach_rates))])
        healthy = [max(rate, HEALTHY_RATE * ratio) for rate, ratio in zip(model.alpha, reach, strict=False)]
        yield self._of_acceptance(), replace(model, alpha=healthy)
        if 0.0 < (share := model.reach_rates[0]) < FEW_DRAFTS:
            alpha = [model.alpha[0] / share, *model.alpha[1:]]
            yield "few drafts", replace(model, alpha=alpha, reach_rates=[rate / share for rate in model.reach_rates])
        if self._cliff:
            level = model.alpha[self._cliff - 1]
            alpha = [*model.alpha[: self._cliff], *(level * ratio for ratio in reach[self._cliff :])]
            yield "later positions", replace(model, alpha=alpha)
        if self._ends_early:
            yield "confidence threshold", self._without_threshold(reach)
        yield "drafting", replace(model, draft_ms=min(self.draft_cost, HEALTHY_DRAFT), draft_step_ms=0.0)
        flat = {n: min(v, 1.0 + HEALTHY_SLOT * (n - 1)) for n, v in model.verify.items()}
        yield self._of_verification(k), replace(model, verify=flat)
        other = model.other_ms - self.cost.overhead + min(self.cost.overhead, HEALTHY_OVERHEAD)
        yield "memory" if self.observation.offloaded else "overhead", replace(model, other_ms=other)

    @property
    def _cliff(self) -> int:
        """Return the last position at which drafts are accepted, if none is at the next one; else 0."""
        run, reach = self.observation, ratios(self.model.reach_rates)
        if self._ends_early or run.verified_in_part or not (self.recorded or any(run.by_position)):
            return 0
        trials = float(run.steps or inf)
        for place, (rate, ratio) in enumerate(zip(self.model.alpha, reach, strict=False)):
            trials *= ratio
            if not ratio or trials < CLIFF_TRIALS:
                return 0
            if rate <= BROKEN_RATE * ratio:
                return place if place and self.model.alpha[place - 1] >= WORKING_RATE * reach[place - 1] else 0
            trials *= rate / ratio
        return 0

    @property
    def _ends_early(self) -> bool:
        """Return whether a drafter's drafts end well before k, although its tokens are accepted."""
        run = self.observation
        on_purpose = self.recorded or run.looks_up or run.combined or (run.drafted_per_step or 0.0) > self.model.k
        return not on_purpose and run.per_draft < EARLY * self.model.k

    def _without_threshold(self, ratios_of_reach: Sequence[float]) -> CostModel:
        """Return the cost model of drafts that do not end early. The added tokens are those below the threshold; of a
        calibrated drafter, on average half as many are accepted as the threshold says."""
        model, share = self.model, self.model.reach_rates[0]
        added = (self.observation.threshold or THRESHOLD) / 2.0
        alpha = [model.alpha[0]]
        alpha += [
            rate + (1.0 - ratio) * added for rate, ratio in zip(model.alpha[1:], ratios_of_reach[1:], strict=False)
        ]
        return replace(model, alpha=alpha, reach_rates=[share] * model.k)

    def _of_acceptance(self) -> str:
        run = self.observation
        if run.random_prompts:
            return "random prompts"
        if run.draft_cache and not run.looks_up:
            return "draft cache"
        drafts = self.model.reach_rates[0] if self.recorded else run.drafting_share or 1.0
        hits = (run.accepted_length or 1.0) - 1.0
        if (run.draft_tokens or 0.0) >= BROKEN_TOKENS and hits <= BROKEN_RATE * drafts and not run.looks_up:
            return "broken drafter"
        other_mode = None not in (run.thinking, run.trained_thinking) and run.thinking != run.trained_thinking
        return "thinking" if other_mode else "acceptance"

    def _of_verification(self, k: int) -> str:
        """Return what makes the wider pass slow: experts, if reading them explains half of it, else a batch."""
        run = self.observation
        batch = run.batch_size or 1.0
        if run.moe and (self._expert_cost(k) - 1.0 >= 0.5 * (self.cost.verify - 1.0) or batch < 2.0):
            return "experts"
        if run.offloaded:
            return "memory"
        return "batch size" if batch >= 2.0 else "verification"

    def _expert_cost(self, k: int) -> float:
        """Return the weights that a pass over k + 1 tokens of every row reads, relative to one token."""
        shape, batch = target_shape(self.observation), self.observation.batch_size or 1.0
        read = [
            shape.dense + shape.head + shape.expert * shape.expert_layers * shape.touched(n * batch) for n in (1, k + 1)
        ]
        return read[1] / read[0]

    def _of_length(self, best_k: int, gain: float) -> Cause:
        length = self.observation.k or self.model.k
        title = f"k = {length} is too {'large' if best_k < length else 'small'}"
        return Cause(
            "draft length", title, gain, f"k = {best_k} is predicted to be {gain:.2f}x as fast as k = {length}", ""
        )

    def _of_stopped_drafter(self) -> Cause:
        """Return the cause of parts of the run in which the drafter does not work; it is measured by the others."""
        run, words = self.observation, WORDS[STOPPED]
        assert run.contrast is not None
        gain = run.contrast.other_length / (run.accepted_length or 1.0)
        if run.tokens_per_s and run.contrast.other_tokens_per_s:
            gain = run.contrast.other_tokens_per_s / run.tokens_per_s
        title, evidence = (
            text.format(where=run.contrast.where, there=_there(run)) for text in (words.title, words.evidence)
        )
        return Cause(STOPPED, title, max(gain, 1.0), evidence, words.advice)

    def _facts(self) -> dict[str, object]:
        """Return the numbers and words in the evidence and the advice for the causes."""
        run, cost, k = self.observation, self.cost, self.model.k
        share, batch = self.model.reach_rates[0], run.batch_size or 1.0
        rate, drafted = run.acceptance_rate or 0.0, run.draft_tokens or 0.0
        slots = 1.0 + (run.drafted_per_step or float(k))
        width = f"{k + 1}" if abs(slots - k - 1.0) < 0.05 * k else f"{slots:.1f}"
        drafts = f"{round(share * run.steps):,} of {run.steps:,} steps had a draft" if run.steps else ""
        cache = next((engine.full_draft_cache for engine in engines() if engine.name == run.engine), "")
        return {
            "run": run,
            "cost": cost,
            "draft_cost": self.draft_cost,
            "accepted": f"{100.0 * rate:.0f} % of the draft tokens were accepted",
            "tokens_accepted": f"{round(drafted * rate):,} of {round(drafted):,} draft tokens were accepted",
            "mode": _mode(run.thinking),
            "trained_mode": _mode(run.trained_thinking),
            "out": "" if run.trained_thinking else "out",
            "drafts": drafts or "steps with a draft",
            "share": percent(share),
            "draft_tokens": (run.drafted_per_step or 0.0) / share,
            "cliff": self._cliff,
            "at_cliff": percent(self._conditional(self._cliff)),
            "after_cliff": percent(self._conditional(self._cliff + 1)),
            "wide": f"a pass over {width} tokens costs {cost.verify:.2f} plain steps",
            "batch": batch,
            "verified": batch * slots,
            "read": self._expert_cost(k),
            "full_cache": f" ({cache})" if cache else "",
            "p_min": f" ({run.threshold:g} now)" if run.threshold else ", if the engine has one",
            "smaller": RULES[0],
        }

    def _conditional(self, position: int) -> float:
        """Return the acceptance at a position, counted from 1, among the drafts that reach it."""
        reach = ratios(self.model.reach_rates)
        return self.model.alpha[position - 1] / reach[position - 1] if 0 < position <= len(reach) else 0.0


def _there(run: Observation) -> str:
    """Return what was counted in the parts of a run in which far fewer draft tokens are accepted."""
    part = run.contrast
    assert part is not None
    words = (
        f"{part.accepted:,} of {part.drafted:,} draft tokens were accepted there, {percent(part.other_rate)} otherwise"
    )
    if part.tokens_per_s is None or part.other_tokens_per_s is None:
        return words
    there, otherwise = (
        _relative(speed, run.plain_tokens_per_s) for speed in (part.tokens_per_s, part.other_tokens_per_s)
    )
    return f"{words}; {there} there, {otherwise} otherwise"


def _relative(tokens_per_s: float, plain: float | None) -> str:
    speed = f"{tokens_per_s:.4g} tokens/s"
    return f"{speed} ({_label(Estimate(tokens_per_s / plain))}, {tokens_per_s / plain:.2f}x)" if plain else speed


def percent(share: float) -> str:
    """Return a share in percent, with a digit below 10 %."""
    return f"{100.0 * share:.0f} %" if share >= 0.1 or not share else f"{100.0 * share:.1f} %"


def _mode(thinking: bool | None) -> str:
    return "thinking" if thinking else "no thinking"


def _best_drafting(model: CostModel, longest: int) -> int:
    """Return the fastest draft length of at least 1."""
    if model.tree_nodes is not None:
        return model.k
    best: int = max([*range(1, longest + 1), model.k], key=model.speedup)
    return best


def speed_phrase(speed: Estimate, times: str = "x") -> str:
    """Return the result of a speed-up: `Slower (0.80x, 0.70 to 0.90)`. Without an interval, 5 % decide."""
    return f"{_label(speed).capitalize()} ({speed.format(times)})"


def _label(speed: Estimate) -> str:
    if speed.low is not None:
        return speed.label
    return "faster" if speed.value >= SMALLEST_GAIN else "slower" if speed.value <= 1.0 / SMALLEST_GAIN else speed.label


def verdict(diagnosis: Diagnosis, times: str = "x", opening: str = "") -> str:
    """Return the verdict in one sentence with its uncertainty. opening: replaces the words about the speed-up."""
    run = diagnosis.observation
    assert diagnosis.step_cost is not None
    speed = run.speedup
    start = opening or (speed_phrase(speed, times) if speed else _expected_phrase(diagnosis, times))
    takes = "takes" if speed else "is expected to take"
    cost = f"as long as plain decoding of {diagnosis.step_cost:.2f} tokens"
    parts = [f"{start}: a step {takes} {cost} and yields {_length(run)} tokens"]
    if run.acceptance_rate is not None:
        parts.append(accepted_clause(run.acceptance_rate, diagnosis.break_even))
    if diagnosis.implausible:
        reason = "so read a longer run" if diagnosis.short else "so the two speeds are of different prompts or load"
        return "; ".join([*parts, f"impossible, {reason}"]) + "."
    limits = [WORDS[cause.name].bottleneck for cause in diagnosis.causes if cause.name != "draft length"]
    if diagnosis.step_cost <= 1.0:
        parts.append("no extra cost over plain decoding")
    if diagnosis.cause is not None and (not diagnosis.healthy or diagnosis.cause.name != "draft length"):
        certain = diagnosis.measured or diagnosis.cause.name in (*FAULTS, *COUNTED)
        name = "fault" if diagnosis.healthy else "main cause" if certain else "likely main cause"
        parts.append(f"{name}: {diagnosis.cause.title}")
    elif diagnosis.step_cost > 1.0:
        parts.append(f"bottleneck: {limits[0]}" if limits else "no single bottleneck")
    return "; ".join([*parts, _advice_clause(diagnosis, times)]) + "."


def _expected_phrase(diagnosis: Diagnosis, times: str) -> str:
    """Return the opening of a run whose speed without speculation is unknown: `Expected to be faster (1.48x ..)`."""
    assert diagnosis.expected_speed is not None
    speed = Estimate(diagnosis.expected_speed)
    label = "about as fast" if _label(speed) == speed.label else _label(speed)
    return f"Expected to be {label} ({speed.format(times)} on an H100, not measured)"


def accepted_clause(rate: float, break_even: float | None) -> str:
    """Return the acceptance rate with the rate below which this draft loses, if that is known and not 0."""
    accepted = f"{100.0 * rate:.0f} % of the draft tokens were accepted"
    if break_even is None or break_even < SMALLEST_RATE:
        return accepted
    needed = f"{100.0 * break_even:.0f} % would break even" if break_even <= 1.0 else "not even 100 % would break even"
    return f"{accepted}, {needed}"


def _length(run: Observation) -> str:
    """Return the mean accepted length with its sampling error, if the number of steps is known."""
    assert run.accepted_length is not None
    if not run.steps or not any(run.by_position):
        return f"{run.accepted_length:.2f}"
    shares = (1.0, *run.by_position, 0.0)
    chances = [max(a - b, 0.0) for a, b in pairwise(shares)]
    mean = sum(n * chance for n, chance in enumerate(chances))
    error = sqrt(sum((n - mean) ** 2 * chance for n, chance in enumerate(chances)) / run.steps)
    return f"{run.accepted_length:.2f} ± {SURE * error:.2f}"


def _advice_clause(diagnosis: Diagnosis, times: str) -> str:
    run, gain = diagnosis.observation, diagnosis.gain
    assert gain is not None
    if diagnosis.cause is not None and diagnosis.cause.name in PREREQUISITES:
        return "fix that first, then measure again"
    if diagnosis.hopeless:
        return "not worth it here: no draft length is predicted to beat plain decoding"
    if any(cause.name == "draft length" for cause in diagnosis.causes):
        return f"k = {diagnosis.best_k} is predicted to be faster than k = {run.k} ({gain.format(times)})"
    if run.verified_in_part:
        return "the engine chooses how much of a draft it verifies, so no other k is predicted"
    if run.combined:
        return "each of its methods has a draft length of its own, so no other k is predicted"
    return f"no other k is predicted to be clearly faster than k = {run.k}"


def _unknown(run: Observation) -> str:
    needed = [
        words
        for value, words in ((run.accepted_length, "mean accepted length"), (run.k, "draft length k"))
        if not value
    ]
    if not run.k and run.accepted_length == 1.0:
        return "No diagnosis: this output is of plain decoding; use it as the baseline of a run with speculation."
    pronoun = "them" if len(needed) > 1 else "it"
    length = run.accepted_length
    read = f"; the mean accepted length of {length:.2f} needs a k of at least {least_k(length)}" if length else ""
    return (
        f"No diagnosis: {' and '.join(needed)} unknown{read}; give {pronoun} too, or read another output of the engine."
    )


def _never_drafted(run: Observation) -> str:
    speed = f"{speed_phrase(run.speedup)}: s" if run.speedup else "S"
    method, steps = (
        (f" ({run.method})" if run.method else ""),
        (f" in {counted(run.steps, 'step')}" if run.steps else ""),
    )
    return f"{speed}peculation is on{method} and never drafted{steps}, so this is plain decoding that looks for drafts."


def _of_drafts(run: Observation) -> str:
    """Return what to change where most or all steps have no draft."""
    words = WORDS["few drafts"]
    return words.lookup if run.looks_up and not run.combined else words.advice


def least_k(length: float) -> int:
    """Return the smallest draft length with which a step can output so many tokens."""
    return max(ceil(length - 1.0 - TOLERANCE), 1)


def _reading_notes(run: Observation) -> Iterator[str]:
    """Yield what the output itself does not say, and parts of it whose mean says little."""
    yield from run.notes
    if run.contrast:
        where = run.contrast.where
        yield f"{where[0].upper()}{where[1:]}, {_there(run)}: the other numbers are means of parts that differ."


def _notes(run: Observation, best_k: int, others: Sequence[_Fit]) -> Iterator[str]:
    yield from run.notes if run.stopped else _reading_notes(run)
    if run.stopped:
        yield "The numbers are means of parts that differ."
    if run.speedup is None:
        unknown = "with" if run.plain_tokens_per_s else "without"
        yield f"The speed {unknown} speculation is unknown, so costs are those expected on an H100; measure it too."
    elif others:
        yield "Times of drafting and verification are unknown; their split is estimated from the models' sizes."
    if not best_k and others:
        speed, k = max(
            ((fit.model.speedup(k), k) for fit in others for k in range(1, min(fit.model.k, MAX_K))), default=(0.0, 0)
        )
        if speed >= SMALLEST_GAIN:
            yield f"k = {k} may pay nevertheless, if the cost grows with k more than estimated."
    drafts = run.steps and max(round(run.steps * (run.drafting_share or 1.0)), 1)
    if drafts and drafts < FEW_STEPS:
        yield f"Only {counted(drafts, 'step' if drafts == run.steps else 'draft')}: read a longer run."
    if run.k_inferred:
        yield f"k = {run.k} is the mean length of the drafts; some may be longer, so give k if you know it."
    if run.verified_in_part:
        yield "The engine does not report which draft tokens it verified: all others count as not accepted."
    if run.k and run.per_draft < EARLY * run.k and not run.combined:
        yield f"Drafts end early: {run.per_draft:.1f} of k = {run.k} tokens on average."


def _recommendations(diagnosis: Diagnosis) -> Iterator[str]:
    run, best_k, cause = diagnosis.observation, diagnosis.best_k, diagnosis.cause
    assert best_k is not None
    if cause is not None and cause.name in PREREQUISITES:
        yield f"{cause.advice} Then measure again."
        return
    if diagnosis.implausible and diagnosis.short:
        yield "Read a longer run, with and without speculation: no step with a draft is faster than a plain one."
        return
    if diagnosis.implausible:
        yield (
            "Measure both speeds again with the same prompts and load, both of one request or both of all requests: "
            "no step with a draft is faster than a plain one."
        )
        return
    if diagnosis.hopeless:
        yield _setting(run, 0, "Turn speculation off")
    other_length = not diagnosis.hopeless and any(cause.name == "draft length" for cause in diagnosis.causes)
    if other_length:
        yield _setting(run, best_k, f"Draft {counted(best_k, 'token')} per step")
    if diagnosis.hopeless or cause is not None:
        yield from _shorter_drafts(run, best_k if other_length else 0)
    if cause is not None and cause.advice:
        yield cause.advice
    if cause is not None and cause.name == "batch size":
        yield from _schedule(run, best_k or 1)
    if cause is not None and cause.name in ("acceptance", "drafting"):
        yield from _other_drafters(run)
    slowest = run.contrast.tokens_per_s if run.contrast else None
    if slowest and run.contrast and run.plain_tokens_per_s and slowest * SMALLEST_GAIN <= run.plain_tokens_per_s:
        yield f"Check what differs {run.contrast.where}: it is slower than plain decoding there."


def _setting(run: Observation, k: int, words: str) -> str:
    """Return the recommendation with the flags of the engine, or of some engines if it is unknown."""
    matches = [engine for engine in engines() if engine.name == run.engine] or engines()[:EXAMPLES]
    settings = [(engine.title, engine.draft_length_setting(k, run.method, run.drafter)) for engine in matches]
    flags_by_engine = [f"{title}: {flags}" for title, flags in settings if flags]
    return f"{words} ({'; '.join(flags_by_engine)})." if flags_by_engine else f"{words}."


def _shorter_drafts(run: Observation, k: int) -> Iterator[str]:
    """Yield what ends long drafts early, most of whose tokens are rejected. A lookup has no confidence. k: recommended
    draft length, 0 if there is none."""
    p_min = engine.p_min if (engine := ENGINES.get(run.engine)) else ""
    if not engine or not p_min or run.per_draft < LONG_DRAFT or (run.acceptance_rate or 0.0) >= MOSTLY_REJECTED:
        return
    if not run.looks_up or run.combined:
        now = f"{run.threshold or 0.0:g} now"
        yield f"A confidence threshold ends drafts where the drafter is unsure ({p_min} {USUAL_P_MIN:g}, {now})."
        return
    hits = ((run.accepted_length or 1.0) - 1.0) / (run.drafting_share or 1.0)
    flags = engine.draft_length_setting(k or ceil(hits - TOLERANCE) + 1, run.method)
    yield f"Shorter drafts waste less ({flags}); {p_min} acts on draft models and heads only."


def _schedule(run: Observation, k: int) -> Iterator[str]:
    if run.engine in ("", "vllm") and run.batch_size:
        half = max(int(run.batch_size) // 2, 1)
        schedule = json_text([[1, half, k], [half + 1, 512, 0]])
        yield f'vLLM can draft at small batches only: "num_speculative_tokens_per_batch_size": {schedule}.'
        if not run.verified_in_part:
            yield 'It can also verify only what pays of each draft, on GPUs: "enable_adaptive_verification": true.'


def _other_drafters(run: Observation) -> Iterator[str]:
    target, own = ModelRef(run.target), ModelRef(run.drafter)
    others = [d for d in published_drafters(target) if d.drafter.base_name != own.base_name]
    if run.target and others:
        names = ", ".join(dict.fromkeys(drafter.drafter for drafter in others[:4]))
        yield f"Published drafters of this target: {names} (`{program()} drafters {run.target}`)."
