"""Prediction of the speed-up on another machine, at another load or with another draft.

A step with k draft tokens costs its drafting passes, one target pass over k + 1 tokens of every row, and the engine's
overhead. It emits the tokens that `Acceptance` predicts. All times come from `Device.ms` and the shapes in configs. The
interval combines a fixed error band of the times with that of the acceptance. `published` returns measured results to
compare with.
"""

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from math import exp, hypot, log
from pathlib import Path
from typing import Literal

from specdemo.analysis.configs import config_of, drafting, method_in, shape
from specdemo.core.estimate import Estimate
from specdemo.core.generation import dtype_name
from specdemo.core.suggest import program
from specdemo.core.trace import LaneTrace, RunTrace
from specdemo.costs.acceptance import Acceptance, of_lane
from specdemo.costs.drafting import Drafting
from specdemo.costs.lengths import best_length
from specdemo.costs.passes import measured_passes, pass_ratio
from specdemo.costs.profiles import Profile, profile
from specdemo.costs.roofline import BYTES, Device, Engine, device_of, step_cost
from specdemo.costs.shapes import HEADROOM, Shape
from specdemo.costs.step import StepCost, predicted_speedup
from specdemo.presets.files import load_trace

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MOST_EXPENSIVE = 1e9  # highest price per hour, in any currency
# Error band of a speed-up and of tokens/s: a prediction may be too high or too low by this factor. docs/what-if.md
# compares it with published and measured results.
BAND = 1.4
ASSUMED = 0.75  # default acceptance rate of every position


@dataclass(frozen=True, slots=True)
class Scenario:
    """Input of a prediction. nodes: size of the draft tree; 0: that of the acceptance's tree, or chains."""

    target: Shape
    draft: Drafting
    device: Device
    acceptance: Acceptance
    batch: int = 1
    context: int = 1024
    nodes: int = 0
    price: float | None = None  # per hour of the machine, in any currency
    passes: Mapping[int, float] = field(
        default_factory=dict
    )  # measured v: slots -> time of a pass; empty: the roofline

    def cost(self, k: int) -> StepCost:
        """Return the milliseconds of a step with k draft tokens; 0: plain decoding."""
        nodes = self.nodes_at(k)
        step = step_cost(self.device, self.target, self.draft, self.acceptance, k, self.batch, self.context, nodes)
        if not (k and self.passes) or self.batch > 1 or nodes:
            return step
        return replace(step, verify=pass_ratio(self.passes, k + 1) * self.cost(0).verify)

    def nodes_at(self, depth: int) -> int:
        """Return the size of the draft tree up to a depth; 0: a chain."""
        return self.nodes or sum(self.acceptance.widths[:depth])


@dataclass(frozen=True, slots=True)
class Row:
    """Prediction for one draft length."""

    k: int
    tokens: Estimate  # output tokens per target pass
    draft_ms: float
    verify_ms: float
    other_ms: float
    c: float  # cost of a draft token, in plain passes
    v: float  # cost of the verification pass, in plain passes
    speedup: Estimate
    tokens_per_s: Estimate  # over all rows
    limit: str  # the bottleneck
    extrapolated: bool = False  # k is larger than the recorded one

    @property
    def step_ms(self) -> float:
        """Return the time of a step."""
        return self.draft_ms + self.verify_ms + self.other_ms


@dataclass(frozen=True, slots=True)
class Gain:
    """Prediction for one batch size at its best draft length; k 0: none is faster than plain decoding."""

    batch: int
    k: int
    speedup: Estimate
    tokens_per_s: float
    memory_gb: float
    fits: bool


@dataclass(frozen=True)
class Prediction:
    """Result of a prediction. rows: by draft length, or depth of the tree, at the requested batch size. loads: by batch
    size.
    """

    scenario: Scenario
    plain_ms: float  # a step of plain decoding
    plain_tokens_per_s: Estimate
    rows: tuple[Row, ...]
    loads: tuple[Gain, ...]
    # the smallest batch at which no draft length gains; None: none up to the largest of `loads`
    break_even_batch: int | None
    memory_gb: float
    fits: bool
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Row:
        """Return the fastest row, even if plain decoding is faster."""
        return max(self.rows, key=lambda row: row.speedup.value)

    @property
    def best_k(self) -> int:
        """Return the draft length to use; 0: no speculation."""
        return self.best.k if self.best.speedup.value > 1.0 else 0

    @cached_property
    def sentence(self) -> str:
        """Return the result and its bottleneck in one sentence."""
        return " ".join(filter(None, (self._gain, self.extrapolation_note(self.best), self.too_large)))

    @property
    def _gain(self) -> str:
        best, scenario = self.best, self.scenario
        where = f"on {scenario.device.profile.title} at batch size {scenario.batch}"
        if not self.best_k:
            return f"No draft length gains {where}: k = {best.k} is {best.speedup.format()}; bottleneck: {best.limit}."
        limit_text = (
            f"; no speed-up from batch size {self.break_even_batch}"
            if self.break_even_batch and self.break_even_batch > scenario.batch
            else ""
        )
        nodes = scenario.nodes_at(best.k)
        how = f"{nodes} nodes" if nodes else f"k = {best.k}"
        return f"{best.speedup.format()} {where} with {how}; bottleneck: {best.limit}{limit_text}."

    def extrapolation_note(self, row: Row) -> str:
        """Return the sentence that marks a row as extrapolated; empty for a recorded draft length."""
        if not row.extrapolated:
            return ""
        longest = self.scenario.acceptance.longest
        return (
            f"k = {row.k} is extrapolated: the run recorded k = {longest}. Record a run with k = {row.k} to check it."
        )

    @property
    def too_large(self) -> str:
        """Return the sentence about the device's memory; empty if the models fit."""
        room = self.scenario.device.profile.memory_gb.value
        needed = f"It needs {self.memory_gb:.1f} GB and does not fit into this machine's memory ({room:g} GB)."
        return "" if self.fits else needed

    def per_million(self, tokens_per_s: float) -> float | None:
        """Return the cost of a million tokens; None without a price."""
        return None if self.scenario.price is None else self.scenario.price / 3600.0 / tokens_per_s * 1e6

    def as_dict(self) -> dict[str, object]:
        """Return everything for JSON; intervals as value, low and high."""
        scenario = self.scenario
        return {
            "target": scenario.target.name,
            "method": scenario.draft.method,
            "device": scenario.device.profile.name,
            "measured": bool(scenario.device.profile.passes),
            "dtype": scenario.device.dtype,
            "engine": scenario.device.engine,
            "batch": scenario.batch,
            "context": scenario.context,
            "nodes": scenario.nodes or scenario.acceptance.nodes,
            "plain_ms": round(self.plain_ms, 4),
            "plain_tokens_per_s": _formatted(self.plain_tokens_per_s),
            "best_k": self.best_k,
            "recorded_k": scenario.acceptance.longest,
            "break_even_batch": self.break_even_batch,
            "memory_gb": round(self.memory_gb, 3),
            "fits": self.fits,
            "plain_per_million": self.per_million(self.plain_tokens_per_s.value),
            "per_million": self.per_million(self.best.tokens_per_s.value),
            "sentence": self.sentence,
            "notes": list(self.notes),
            "rows": [*map(_formatted, self.rows)],
            "loads": [*map(_formatted, self.loads)],
        }


def _formatted(value: object) -> object:
    if isinstance(value, Row | Gain | Estimate):
        return {f.name: _formatted(getattr(value, f.name)) for f in fields(value) if f.name != "reasons"}
    return round(value, 4) if isinstance(value, float) else value


def predict(
    target: str | Shape,
    *,
    device: str | Profile = "h100-sxm",
    method: str = "",
    model: str | Mapping[str, object] | None = None,
    dtype: str = "",
    quantization: str | None = None,
    batch: int = 1,
    context: int = 1024,
    acceptance: Acceptance | Sequence[float] | None = None,
    trace: str | Path | None = None,
    ks: Sequence[int] = (),
    nodes: int = 0,
    engine: Engine = "recorded",
    options: Mapping[str, int] | None = None,
    price: float | None = None,
    passes: Mapping[int, float] | None = None,
) -> Prediction:
    """Predict the speed-up at every draft length with its interval, tokens/s, memory, and the break-even batch size.

    target: a folder, an embedded name, a hub id, or a `Shape`. model: the drafter or its config; None: a typical head
    for the target. method: detected from the model's config by default. device: a name in `specdemo/profiles`, a file
    of `specdemo profile --out`, or a `Profile`. acceptance: conditional acceptance rates by position, or the result of
    `costs.acceptance.of_lane`. trace: a stored run; acceptance, method and model default to its first speculative lane.
    nodes: of a draft tree. engine: recorded (CUDA graphs) or eager. price: hourly price of the machine.
    passes: slots -> time of a pass on a CPU, by default as the trace measured it on this target; on a CPU its shape
    replaces the roofline's. Raises ValueError, one line with the nearest match, for unknown names.
    """
    where = device if isinstance(device, Profile) else profile(device)
    dtype = dtype_name(dtype) or ("float32" if where.kind == "cpu" else "bfloat16")
    of = target if isinstance(target, Shape) else shape(target, quantization)
    if trace is not None:
        recorded, lane = _drafting_lane(trace)
        passes = passes or measured_passes(recorded, target)
        method, model = method or lane.method, model or _model_of(lane, method)
        acceptance = acceptance or of_lane(lane)
    config = config_of(model) if isinstance(model, str) else model
    method = method or (method_in(config) if config else "eagle")
    notes = [] if acceptance else [f"No acceptance rates were given: {ASSUMED} is assumed at every position."]
    acceptance_model = acceptance if isinstance(acceptance, Acceptance) else Acceptance(tuple(acceptance or (ASSUMED,)))
    _check(batch, context, nodes or acceptance_model.nodes, price)
    scenario = Scenario(
        of,
        drafting(method, of, config, options or {}),
        device_of(where, dtype, engine),
        acceptance_model,
        batch,
        context,
        nodes,
        price,
        passes if passes and where.kind == "cpu" else {},
    )
    if scenario.passes:
        notes.append("The costs of wider passes are those that the run measured on its CPU.")
    if acceptance_model.extrapolates(max(ks or _lengths(scenario))):
        notes.append(
            f"The run recorded k = {acceptance_model.longest}. Larger k are extrapolated with decaying acceptance; "
            "their intervals span from no further draft token accepted to all of them."
        )
    return predict_scenario(scenario, ks, tuple(notes))


def _drafting_lane(path: str | Path) -> tuple[RunTrace, LaneTrace]:
    """Return a stored run and its first lane that drafts. Raises ValueError with one line."""
    trace = load_trace(path)
    for lane in trace.lanes:
        if lane.method != "none":
            return trace, lane
    raise ValueError(f"{path} has no lane that drafts; record one with {program()} run PRESET --out FILE")


def _model_of(lane: LaneTrace, method: str) -> str | None:
    """Return the drafter of a lane if the requested method is the lane's."""
    named = lane.options.get("model")
    return named if isinstance(named, str) and method in ("", lane.method) else None


def predict_scenario(scenario: Scenario, ks: Sequence[int] = (), notes: tuple[str, ...] = ()) -> Prediction:
    """Predict a scenario whose inputs have been read. Takes milliseconds."""
    lengths = tuple(ks) or _lengths(scenario)
    rows = tuple(_row(scenario, k) for k in lengths)
    memory = _memory_gb(scenario)
    room = scenario.device.profile.memory_gb.value
    plain = scenario.cost(0).total
    value = 1e3 * scenario.batch / plain
    return Prediction(
        scenario=scenario,
        plain_ms=plain,
        plain_tokens_per_s=Estimate(value, value / BAND, value * BAND),
        rows=rows,
        loads=tuple(_load(replace(scenario, batch=batch), lengths) for batch in BATCHES),
        break_even_batch=_break_even_batch(scenario, lengths),
        memory_gb=memory,
        fits=memory <= room,
        notes=notes,
    )


def _check(batch: int, context: int, nodes: int, price: float | None) -> None:
    if price is not None and not 0.0 <= price <= MOST_EXPENSIVE:
        raise ValueError(f"price must be from 0 to {MOST_EXPENSIVE:,.0f} per hour, not {price:g}")
    for name, value, low, high in (
        ("batch", batch, 1, 4096),
        ("context", context, 1, 1 << 20),
        ("nodes", nodes, 0, 1024),
    ):
        if not low <= value <= high:
            raise ValueError(f"{name} must be from {low} to {high:,}, not {value}")


def _lengths(scenario: Scenario) -> tuple[int, ...]:
    rates = len(scenario.acceptance.rates)
    if scenario.nodes:
        return (rates,)
    if scenario.acceptance.widths:
        return tuple(range(1, rates + 1))
    return tuple(range(1, scenario.draft.longest + 1))


def _row(scenario: Scenario, k: int) -> Row:
    plain, step, tokens = scenario.cost(0), scenario.cost(k), scenario.acceptance.tokens(k)
    gain = predicted_speedup(tokens.value, step.total, plain.total)
    return Row(
        k=k,
        tokens=tokens,
        draft_ms=step.drafting,
        verify_ms=step.verify,
        other_ms=step.overhead,
        c=step.drafting / max(k, 1) / plain.total,
        v=step.verify / plain.verify,
        speedup=_about(gain, tokens),
        tokens_per_s=_about(1e3 * scenario.batch * tokens.value / step.total, tokens),
        limit=_limit(k, tokens.value, step, plain),
        extrapolated=scenario.acceptance.extrapolates(k),
    )


def _about(value: float, tokens: Estimate) -> Estimate:
    """Combine the interval of the tokens with the error band of the time; they are independent."""
    half = log(BAND)
    if tokens.low is None or tokens.high is None or not tokens.low > 0.0:
        return Estimate(value, value * exp(-half), value * exp(half))
    below, above = log(tokens.value / tokens.low), log(tokens.high / tokens.value)
    return Estimate(value, value * exp(-hypot(half, below)), value * exp(hypot(half, above)))


def _limit(k: int, tokens: float, step: StepCost, plain: StepCost) -> str:
    """Name the part that would gain most if it were free, or acceptance if it were perfect."""
    total = step.total
    gains = {
        "drafting": total / (total - step.drafting),
        "the wider pass": total / (total - max(step.verify - plain.verify, 0.0)),
        "engine overhead": total / (total - max(step.overhead - plain.overhead, 0.0)),
        "the acceptance rate": (k + 1.0) / tokens,
    }
    return max(gains, key=gains.__getitem__)


def _fastest(scenario: Scenario, lengths: Sequence[int]) -> int:
    """Return the draft length with the most tokens per time; 0: plain decoding."""
    tokens = (scenario.acceptance.tokens(k).value if k else 1.0 for k in lengths)
    return lengths[best_length(tokens, (scenario.cost(k).total for k in lengths))]


def _load(scenario: Scenario, lengths: Sequence[int]) -> Gain:
    best = _fastest(scenario, lengths)
    row, memory = _row(scenario, best), _memory_gb(scenario)
    off = row.speedup.value <= 1.0
    rate = 1e3 * scenario.batch / scenario.cost(0).total if off else row.tokens_per_s.value
    fits = memory <= scenario.device.profile.memory_gb.value
    return Gain(scenario.batch, 0 if off else best, row.speedup, rate, memory, fits)


def _break_even_batch(scenario: Scenario, lengths: Sequence[int]) -> int | None:
    """Return the smallest batch size at which no draft length gains; None: even the largest gains."""

    def gains(batch: int) -> bool:
        return _fastest(replace(scenario, batch=batch), (0, *lengths)) > 0

    last = next((batch for batch in BATCHES if not gains(batch)), None)
    return last and bisect_left(range(last + 1), True, last // 2 + 1, key=lambda batch: not gains(batch))


def _memory_gb(scenario: Scenario) -> float:
    """Return the memory for the weights and KV caches of target and drafter."""
    size, own = BYTES[scenario.device.dtype], scenario.draft.own
    footprints = [model.footprint(scenario.context, size) for model in (scenario.target, own) if model]
    return HEADROOM * sum(model.bytes(scenario.context, scenario.batch) for model in footprints) / 1e9


PUBLISHED = Path(__file__).with_name("published.json")


@dataclass(frozen=True, slots=True)
class Published:
    """One published result. tokens: mean accepted length, including the correction or bonus token."""

    source: str  # URL
    what: str
    device: str  # name of a profile
    engine: Literal["recorded", "eager"]
    dtype: str
    target: str
    method: str
    k: int  # draft length, or depth of the tree
    nodes: int  # of the tree; 0: a chain
    tokens: float
    speedup: float
    context: int
    model: str | None = None
    old: bool = False  # an EAGLE-1 or -2 head, which has no vocabulary of its own


@lru_cache
def published() -> tuple[Published, ...]:
    """Return all results."""
    return tuple(Published(**row) for row in json.loads(PUBLISHED.read_text(encoding="utf-8")))
