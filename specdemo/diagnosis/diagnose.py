"""Diagnosis: the verdict on a run, its causes in order, and what to change. Needs no torch.

Causes are ranked by one measure: the factor by which the run would become faster if the cause were removed. A better
draft length costs nothing, so its factor compares with the run as it is. Every other factor compares two runs at their
best draft lengths, one of which has a healthy value in one part of the step. A specific cause (thinking mode, batch
size, experts, memory) replaces the part of the step that it makes slow.

Two kinds of causes precede the others. A known fault of the setup, such as random prompts, comes first: it makes the
other numbers meaningless, so it is to be removed before anything else is judged. In a run that is faster than plain
decoding, the draft length comes next, because nothing else is wrong then.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import sqrt
from typing import Literal

from specdemo.core.atomic_io import finite, json_text
from specdemo.core.estimate import Estimate
from specdemo.core.noise import MIN_STEP_COST
from specdemo.core.speedup import break_even_rate
from specdemo.core.suggest import program
from specdemo.diagnosis.costs import StepCost, cost_model, step_costs, target_shape
from specdemo.diagnosis.observation import Observation, complete
from specdemo.engine.cost import MAX_K, CostModel, DraftLengthAdvice
from specdemo.prediction.predict import ASSUMED
from specdemo.presets.drafters import RULES, base_name, published_drafters
from specdemo.servers.engines import engines

CauseName = Literal[
    "acceptance",
    "thinking",
    "random prompts",
    "draft length",
    "drafting",
    "verification",
    "batch size",
    "experts",
    "overhead",
    "memory",
]
# A healthy step. Acceptance: the default of predictions. Drafting: a draft model of a tenth of the target's size, as
# the rules for choosing one demand; heads are cheaper. Verification: reading the weights dominates, so a token adds
# about its own FLOPs, 2 % of a step on GPUs at batch size 1. Overhead: sampling and bookkeeping of vLLM and SGLang
# take about a tenth of a step of an 8B model.
HEALTHY_RATE = ASSUMED
HEALTHY = StepCost(draft=0.1, verify=0.02, overhead=0.1)  # verify: per draft token, in addition to 1
# Smaller factors are within the repeatability of such measurements: engines' logs cover seconds, and speeds of two
# servers on one machine vary by a few percent.
SMALLEST_GAIN = 1.05
SMALLEST_RATE = 0.005  # break-even rates below are shown as 0 %, so they are left out
SURE = 1.96  # standard deviations for 95 %
EXAMPLES = 4  # engines whose flags are shown if the engine is unknown
FEW_STEPS = 50  # below, the mean accepted length is uncertain by more than 10 %
EARLY = 0.75  # share of k below which drafts end early
FAULTS = ("random prompts", "thinking", "memory")  # known from the output, not inferred from costs

TITLES: dict[CauseName, tuple[str, str]] = {  # as a cause and as the bottleneck of a fast run
    "acceptance": ("the acceptance rate is too low for the cost of the draft", "the acceptance rate"),
    "thinking": ("the drafter was trained for the other thinking mode", "the thinking mode"),
    "random prompts": ("the prompts are random tokens, which no drafter predicts", "random prompts"),
    "drafting": ("drafting is too slow", "drafting"),
    "verification": ("verifying several tokens costs much more than one", "the wider pass"),
    "batch size": ("the batch is too large for speculation", "the batch size"),
    "experts": ("verification reads more experts", "the experts of the wider pass"),
    "overhead": ("overhead of the engine in every step", "engine overhead"),
    "memory": ("weights or caches do not fit into the device's memory", "memory"),
}


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause of slowness. gain: the factor by which the run would become faster without it; 1 or more. title and
    evidence: sentences without a period. advice: what to change, one or two sentences; may be empty."""

    name: CauseName
    title: str
    gain: float
    evidence: str
    advice: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Result of `diagnose`.

    observation: completed with the values that follow from others. step_cost: time of a step in plain steps.
    break_even: acceptance rate (accepted / drafted) below which this draft loses on this machine; above 1: it always
    loses. costs: parts of the step in plain steps, `measured` or estimated. best_k: fastest draft length, 0 for off;
    speed_at_best: the speed-up with it; gain: the factor over the present draft length. Their intervals cover the ways
    in which the cost may be split, or the sampling error if all times were recorded. causes: most important first.
    sentence: the verdict. recommendations: what to change, with the engine's flags.
    """

    observation: Observation
    sentence: str
    causes: tuple[Cause, ...] = ()
    recommendations: tuple[str, ...] = ()
    step_cost: float | None = None
    break_even: float | None = None
    costs: StepCost | None = None
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
        return None if first is None or (self.healthy and first.name not in (*FAULTS, "draft length")) else first

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
    def hopeless(self) -> bool:
        """Return whether plain decoding is the fastest choice: no draft length is predicted to beat it, and the run
        did not."""
        speed = self.observation.speedup
        return self.best_k == 0 and (not self.healthy if speed is None else _label(speed) != "faster")

    @property
    def missing(self) -> tuple[str, ...]:
        """Return the names of the values that would make the diagnosis more certain."""
        return self.observation.missing

    def as_dict(self) -> dict[str, object]:
        """Return everything for JSON."""
        values = asdict(self)
        observation = values.pop("observation")
        cause = self.cause.name if self.cause else None
        found = finite(values | {"cause": cause, "missing": self.missing, "observation": observation})
        assert isinstance(found, dict)
        return found


def diagnose(given: Observation, advice: DraftLengthAdvice | None = None) -> Diagnosis:
    """Diagnose a run. advice: its cost model and best draft length, if the events of all steps were recorded.

    Raises ValueError, one line, if the values contradict each other. A diagnosis with few values lists them in
    `missing` and has no causes.
    """
    observation = complete(given)
    if observation.accepted_length is None or not observation.k:
        return Diagnosis(observation, _unknown(observation))
    if advice:
        fits = [_measured(observation, advice.costs)]
    else:
        fits = [_Fit(observation, cost, cost_model(cost, observation)) for cost in step_costs(observation)]
    first, *others = fits
    certain = advice is not None or None not in (observation.draft_cost, observation.verify_cost, observation.overhead)
    longest = min(MAX_K, 2 * first.model.k) if certain else min(MAX_K, first.model.k)
    best_k = advice.best if advice else first.best_k(longest)
    causes = tuple(_order(first.causes(longest, advice), first))
    best_speed = _range([fit.model.speedup(best_k) for fit in fits])
    gain = _range([fit.model.speedup(best_k) / fit.model.speedup(fit.model.k) for fit in fits])
    drafted = observation.drafted_per_step or float(observation.k)
    speed, expected_cost = observation.speedup, first.model.step_ms(first.model.k)
    step_cost = expected_cost if speed is None else observation.accepted_length / speed.value
    found = Diagnosis(
        observation=observation,
        sentence="",
        causes=causes,
        step_cost=step_cost,
        break_even=break_even_rate(step_cost, drafted),
        costs=first.cost,
        measured=certain,
        best_k=best_k,
        speed_at_best=best_speed,
        gain=advice.gain if advice else gain,
        notes=tuple(_notes(observation, best_k, others)),
    )
    return replace(found, sentence=verdict(found), recommendations=tuple(_recommendations(found)))


def _range(values: Sequence[float]) -> Estimate:
    """Return the first value with the range of all."""
    return Estimate(values[0], min(values), max(values)) if len(values) > 1 else Estimate(values[0])


def _order(causes: Iterable[Cause], fit: "_Fit") -> list[Cause]:
    """Return the causes in order: faults of the setup, then by gain. If the run is faster than plain decoding, only its
    draft length can be a cause, so it precedes the other gains."""
    measured = fit.observation.speedup
    speed = fit.model.speedup(fit.model.k) if measured is None else measured.value

    def rank(cause: Cause) -> tuple[bool, bool, float]:
        first = cause.name == "draft length" and speed >= SMALLEST_GAIN
        return cause.name not in FAULTS, not first, -cause.gain

    return sorted(causes, key=rank)


def _measured(observation: Observation, model: CostModel) -> "_Fit":
    """Return the cost model of recorded steps in units of a plain step. Plain steps have an overhead too."""
    unit, k = model.plain_ms, model.k
    times = ("plain_ms", "pass_ms", "draft_ms", "draft_step_ms", "other_ms")
    in_steps = replace(model, **{name: getattr(model, name) / unit for name in times})
    verify = 1.0 + in_steps.verify_ms(k) - in_steps.pass_ms
    overhead = max(in_steps.other_ms - (1.0 - in_steps.pass_ms), 0.0)
    cost = StepCost(in_steps.drafting_ms(k) / max(in_steps.drafted(k), 1.0), verify, overhead)
    return _Fit(observation, cost, in_steps)


@dataclass(frozen=True, slots=True)
class _Fit:
    """A cost of the step, and the cost model with it."""

    observation: Observation
    cost: StepCost
    model: CostModel

    def causes(self, longest: int, advice: DraftLengthAdvice | None) -> Iterator[Cause]:
        """Yield the causes whose removal gains more than `SMALLEST_GAIN`, and all known faults of the setup."""
        best_k = _best_drafting(self.model, longest)
        best = self.model.speedup(best_k)
        gain = best / self.model.speedup(self.model.k)
        if advice is None and best >= SMALLEST_GAIN <= gain:
            yield self._of_length(best_k, gain)
        if advice is not None and advice.best and advice.gain.label == "faster":
            yield self._of_length(advice.best, advice.gain.value)
        for name, fixed in self._fixed():
            gain = fixed.speedup(_best_drafting(fixed, longest)) / best
            if name in FAULTS or gain >= SMALLEST_GAIN:
                yield Cause(name, TITLES[name][0], max(gain, 1.0), self._evidence(name), self._advice(name))

    def best_k(self, longest: int) -> int:
        """Return the fastest draft length that clearly beats plain decoding, else 0."""
        k = _best_drafting(self.model, longest)
        return k if self.model.speedup(k) >= SMALLEST_GAIN else 0

    def _fixed(self) -> Iterator[tuple[CauseName, CostModel]]:
        """Yield the cost model with one part replaced by that of a healthy step, by cause."""
        model, k = self.model, self.model.k
        healthy = [max(rate, HEALTHY_RATE) for rate in model.alpha]
        yield self._of_acceptance(), replace(model, alpha=healthy)
        yield "drafting", replace(model, draft_ms=min(self.cost.draft, HEALTHY.draft), draft_step_ms=0.0)
        flat = {n: min(v, 1.0 + HEALTHY.verify * (n - 1)) for n, v in model.verify.items()}
        yield self._of_verification(k), replace(model, verify=flat)
        other = model.other_ms - self.cost.overhead + min(self.cost.overhead, HEALTHY.overhead)
        yield "memory" if self.observation.offloaded else "overhead", replace(model, other_ms=other)

    def _of_acceptance(self) -> CauseName:
        one = self.observation
        if one.random_prompts:
            return "random prompts"
        other_mode = None not in (one.thinking, one.trained_thinking) and one.thinking != one.trained_thinking
        return "thinking" if other_mode else "acceptance"

    def _of_verification(self, k: int) -> CauseName:
        """Return what makes the wider pass slow: experts, if reading them explains half of it, else a batch."""
        one = self.observation
        batch = one.batch_size or 1.0
        if one.moe and (self._expert_cost(k) - 1.0 >= 0.5 * (self.cost.verify - 1.0) or batch < 2.0):
            return "experts"
        if one.offloaded:
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
        length = self.model.k
        title = f"k = {length} is too {'large' if best_k < length else 'small'}"
        return Cause(
            "draft length", title, gain, f"k = {best_k} is predicted to be {gain:.2f}x as fast as k = {length}", ""
        )

    def _evidence(self, name: CauseName) -> str:
        one, cost, k = self.observation, self.cost, self.model.k
        rate = 100.0 * (one.acceptance_rate or 0.0)
        batch = one.batch_size or 1.0
        accepted = f"{rate:.0f} % of the draft tokens were accepted"
        wide = f"a pass over {k + 1} tokens costs {cost.verify:.2f} plain steps"
        evidence: dict[CauseName, str] = {
            "acceptance": accepted,
            "thinking": f"{accepted}, with {_mode(one.thinking)} and a drafter trained {_mode(one.trained_thinking)}",
            "random prompts": f"{accepted} after random prompts",
            "drafting": f"a draft token costs {cost.draft:.2f} plain steps",
            "verification": wide,
            "batch size": f"{wide} at batch size {batch:.3g}, where it verifies {batch * (k + 1):.0f} tokens",
            "experts": f"{wide}, and it reads {self._expert_cost(k):.1f} times the weights of one token",
            "overhead": f"{cost.overhead:.2f} plain steps per step are neither drafting nor verification",
            "memory": "weights or caches are read from main memory or disk",
        }
        return evidence[name]

    def _advice(self, name: CauseName) -> str:
        advice: dict[CauseName, str] = {
            "acceptance": "Use a drafter that was trained for exactly this target, chat template and kind of text.",
            "thinking": f"Ask with{'out' * (not self.observation.trained_thinking)} thinking, or use another drafter.",
            "random prompts": "Measure with real prompts, such as SPEED-Bench or Spec-Bench.",
            "drafting": f"Use {RULES[0]}, or a head; check that the drafter runs on the same device as the target.",
            "verification": "Use fewer draft tokens, or an engine with kernels for passes over a few tokens.",
            "batch size": "Use fewer draft tokens at large batches, or none.",
            "experts": "Use few draft tokens: every one of them reads further experts.",
            "overhead": "Check that both models run in CUDA graphs, without synchronisation per draft token, on one "
            "device; update the engine.",
            "memory": "Use a smaller target or drafter, more quantisation or a shorter context, so that all fits.",
        }
        return advice[name]


def _mode(thinking: bool | None) -> str:
    return "thinking" if thinking else "no thinking"


def _best_drafting(model: CostModel, longest: int) -> int:
    """Return the fastest draft length of at least 1."""
    if model.tree_nodes is not None:
        return model.k
    return max(range(1, longest + 1), key=model.speedup)


def speed_phrase(speed: Estimate, times: str = "x") -> str:
    """Return the result of a speed-up: `Slower (0.80x, 0.70 to 0.90)`. Without an interval, 5 % decide."""
    return f"{_label(speed).capitalize()} ({speed.format(times)})"


def _label(speed: Estimate) -> str:
    if speed.low is not None:
        return speed.label
    return "faster" if speed.value >= SMALLEST_GAIN else "slower" if speed.value <= 1.0 / SMALLEST_GAIN else speed.label


def verdict(found: Diagnosis, times: str = "x", opening: str = "") -> str:
    """Return the verdict in one sentence with its uncertainty. opening: replaces the words about the speed-up."""
    one = found.observation
    assert found.step_cost is not None
    speed = one.speedup
    start = opening or (speed_phrase(speed, times) if speed else _expected_phrase(found, times))
    takes = "takes" if speed else "is expected to take"
    cost = f"as long as plain decoding of {found.step_cost:.2f} tokens"
    parts = [f"{start}: a step {takes} {cost} and yields {_length(one)} tokens"]
    if one.acceptance_rate is not None:
        parts.append(accepted_clause(one.acceptance_rate, found.break_even))
    if found.implausible:
        return "; ".join([*parts, "impossible, so the two speeds are of different prompts or load"]) + "."
    limits = [TITLES[cause.name][1] for cause in found.causes if cause.name != "draft length"]
    if found.step_cost <= 1.0:
        parts.append("no extra cost over plain decoding")
    elif found.cause is not None and (not found.healthy or found.cause.name in FAULTS):
        certain = found.measured or found.cause.name in FAULTS
        parts.append(f"{'main' if certain else 'likely main'} cause: {found.cause.title}")
    elif limits:
        parts.append(f"bottleneck: {limits[0]}")
    return "; ".join([*parts, _advice_clause(found, times)]) + "."


def _expected_phrase(found: Diagnosis, times: str) -> str:
    """Return the opening of a run whose speed without speculation is unknown: `Expected to be faster (1.48x ..)`."""
    assert found.expected_speed is not None
    speed = Estimate(found.expected_speed)
    label = "about as fast" if _label(speed) == speed.label else _label(speed)
    return f"Expected to be {label} ({speed.format(times)} on an H100, not measured)"


def accepted_clause(rate: float, break_even: float | None) -> str:
    """Return the acceptance rate with the rate below which this draft loses, if that is known and not 0."""
    accepted = f"{100.0 * rate:.0f} % of the draft tokens were accepted"
    if break_even is None or break_even < SMALLEST_RATE:
        return accepted
    needed = f"{100.0 * break_even:.0f} % would break even" if break_even <= 1.0 else "not even 100 % would break even"
    return f"{accepted}, {needed}"


def _length(one: Observation) -> str:
    """Return the mean accepted length with its sampling error, if the number of steps is known."""
    assert one.accepted_length is not None
    if not one.steps or not any(one.by_position):
        return f"{one.accepted_length:.2f}"
    shares = (1.0, *one.by_position, 0.0)
    chances = [max(a - b, 0.0) for a, b in pairwise(shares)]
    mean = sum(n * chance for n, chance in enumerate(chances))
    error = sqrt(sum((n - mean) ** 2 * chance for n, chance in enumerate(chances)) / one.steps)
    return f"{one.accepted_length:.2f} ± {SURE * error:.2f}"


def _advice_clause(found: Diagnosis, times: str) -> str:
    one, gain = found.observation, found.gain
    assert gain is not None
    if found.hopeless:
        return "not worth it here: no draft length is predicted to beat plain decoding"
    if any(cause.name == "draft length" for cause in found.causes):
        return f"k = {found.best_k} is predicted to be faster than k = {one.k} ({gain.format(times)})"
    return f"no other k is predicted to be clearly faster than k = {one.k}"


def _unknown(one: Observation) -> str:
    needed = [
        words
        for value, words in ((one.accepted_length, "mean accepted length"), (one.k, "draft length k"))
        if not value
    ]
    if not one.k and one.accepted_length == 1.0:
        return "No diagnosis: this output is of plain decoding; use it as the baseline of a run with speculation."
    pronoun = "them" if len(needed) > 1 else "it"
    return f"No diagnosis: {' and '.join(needed)} unknown; give {pronoun} too, or read another output of the engine."


def _notes(one: Observation, best_k: int, others: Sequence[_Fit]) -> Iterator[str]:
    if one.speedup is None:
        unknown = "with" if one.plain_tokens_per_s else "without"
        yield f"The speed {unknown} speculation is unknown, so costs are those expected on an H100; measure it too."
    elif others:
        yield "Times of drafting and verification are unknown; their split is estimated from the models' sizes."
    if not best_k and others:
        speed, k = max(((fit.model.speedup(k), k) for fit in others for k in range(1, fit.model.k)), default=(0.0, 0))
        if speed >= SMALLEST_GAIN:
            yield f"k = {k} may pay nevertheless, if the cost grows with k more than estimated."
    if one.steps and one.steps < FEW_STEPS:
        yield f"Only {one.steps} steps: read a longer run."
    if one.k and one.drafted_per_step and one.drafted_per_step < EARLY * one.k:
        yield f"Drafts end early: {one.drafted_per_step:.1f} of k = {one.k} tokens on average."


def _recommendations(found: Diagnosis) -> Iterator[str]:
    """Yield what to change, most useful first."""
    one, best_k, cause = found.observation, found.best_k, found.cause
    assert best_k is not None
    if cause is not None and cause.name in FAULTS:
        yield f"{cause.advice} Then measure again."
        return
    if found.implausible:
        yield (
            "Measure both speeds again with the same prompts and load, both of one request or both of all requests: "
            "no step with a draft is faster than a plain one."
        )
        return
    if found.hopeless:
        yield _setting(one, 0, "Turn speculation off")
    elif any(cause.name == "draft length" for cause in found.causes):
        yield _setting(one, best_k, f"Draft {best_k} token{'s' * (best_k > 1)} per step")
    if cause is not None and cause.advice:
        yield cause.advice
    if cause is not None and cause.name == "batch size":
        yield from _schedule(one, best_k or 1)
    if cause is not None and cause.name in ("acceptance", "drafting"):
        yield from _other_drafters(one)


def _setting(one: Observation, k: int, words: str) -> str:
    """Return the recommendation with the flags of the engine, or of some engines if it is unknown."""
    chosen = [engine for engine in engines() if engine.name == one.engine] or engines()[:EXAMPLES]
    settings = [(engine.title, engine.draft_length_setting(k, one.method, one.drafter)) for engine in chosen]
    known = [f"{title}: {flags}" for title, flags in settings if flags]
    return f"{words} ({'; '.join(known)})." if known else f"{words}."


def _schedule(one: Observation, k: int) -> Iterator[str]:
    if one.engine in ("", "vllm") and one.batch_size:
        half = max(int(one.batch_size) // 2, 1)
        schedule = json_text([[1, half, k], [half + 1, 512, 0]])
        yield f'vLLM can draft at small batches only: "num_speculative_tokens_per_batch_size": {schedule}.'


def _other_drafters(one: Observation) -> Iterator[str]:
    others = [d for d in published_drafters(one.target) if base_name(d.drafter) != base_name(one.drafter)]
    if one.target and others:
        names = ", ".join(dict.fromkeys(drafter.drafter for drafter in others[:4]))
        yield f"Published drafters of this target: {names} (`{program()} drafters {one.target}`)."
