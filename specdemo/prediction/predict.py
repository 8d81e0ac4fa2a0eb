"""What speculation would bring on a machine, at a load or with a draft that is not here.

A step that drafts k tokens costs its drafting passes, one pass of the target over k + 1 tokens of every text, and what
the engine does beside; it emits what `Acceptance` says. All times are `Device.ms` of what `shapes` reads from configs.
The interval is that of the device's terms, whose errors and their covariance the fit gives, of what the roofline itself
is off by, and of the acceptance.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import exp, hypot, log, sqrt
from pathlib import Path

from specdemo.core.dtypes import dtype_name
from specdemo.core.estimate import Estimate
from specdemo.core.trace import LaneTrace
from specdemo.prediction.acceptance import Acceptance, drafting_lane, of_lane
from specdemo.prediction.drafts import Drafting, drafting, method_in
from specdemo.prediction.fit import device_of
from specdemo.prediction.profiles import Profile, profile
from specdemo.prediction.roofline import BYTES, EDGE, NAMES, Device, Engine
from specdemo.prediction.shapes import Shape, config_of, shape
from specdemo.prediction.steps import Load, Step, step_of

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MOST_EXPENSIVE = 1e9  # an hour, in any currency
SURE = 1.96  # standard deviations of 95 %
HEADROOM = 1.1  # of memory: activations and buffers
ASSUMED = 0.75  # acceptance of every position, where nobody says
ALIKE = 0.5  # of the misfit, how much two passes of one model have in common


@dataclass(frozen=True, slots=True)
class Scene:
    """All that a prediction is made from. nodes: of a draft tree; 0: chains."""

    target: Shape
    draft: Drafting
    device: Device
    acceptance: Acceptance
    batch: int = 1
    context: int = 1024
    nodes: int = 0
    price: float | None = None  # of an hour of the machine, in any currency


@dataclass(frozen=True, slots=True)
class Row:
    """One draft length."""

    k: int
    tokens: Estimate  # that a pass of the target emits
    draft_ms: float
    verify_ms: float
    other_ms: float
    c: float  # drafting a token, in plain passes
    v: float  # the pass that checks, in plain passes
    speedup: Estimate
    tokens_per_s: Estimate  # of all texts together
    limit: str  # what more of which would bring most
    extrapolated: bool = False  # k is larger than the recorded one

    @property
    def step_ms(self) -> float:
        """All of a step."""
        return self.draft_ms + self.verify_ms + self.other_ms


@dataclass(frozen=True, slots=True)
class Gain:
    """One batch size at its best draft length; k 0: none is faster than plain decoding."""

    batch: int
    k: int
    speedup: Estimate
    tokens_per_s: float
    memory_gb: float
    fits: bool


@dataclass(frozen=True)
class Prediction:
    """rows: by draft length, of the batch that was asked for; a tree has one. loads: by batch size."""

    scene: Scene
    plain_ms: float  # a step of plain decoding
    plain_tokens_per_s: Estimate
    rows: tuple[Row, ...]
    loads: tuple[Gain, ...]
    dies: int | None  # the smallest batch at which no draft length gains; None: none up to the largest of `loads`
    memory_gb: float
    fits: bool
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Row:
        """The fastest row, even where plain decoding is faster."""
        return max(self.rows, key=lambda row: row.speedup.value)

    @property
    def best_k(self) -> int:
        """The draft length to choose; 0: off."""
        return self.best.k if self.best.speedup.value > 1.0 else 0

    @cached_property
    def sentence(self) -> str:
        """What comes out and what limits it."""
        return " ".join(filter(None, (self._gain, self.beyond(self.best), self.too_large)))

    @property
    def _gain(self) -> str:
        best, scene = self.best, self.scene
        where = f"on {scene.device.profile.title} at batch {scene.batch}"
        if not self.best_k:
            return f"No draft length gains {where}: k = {best.k} is {best.speedup.format()}; {best.limit} costs most."
        dies = f"; the gain ends at batch {self.dies}" if self.dies and self.dies > scene.batch else ""
        how = f"{scene.nodes} nodes" if scene.nodes else f"k = {best.k}"
        return f"{best.speedup.format()} {where} with {how}; {best.limit} limits it{dies}."

    def beyond(self, row: Row) -> str:
        """Return the sentence that marks a row as extrapolated; empty for a recorded draft length."""
        if not row.extrapolated:
            return ""
        longest = self.scene.acceptance.longest
        return (
            f"k = {row.k} is extrapolated: the run recorded k = {longest}. Record a run with k = {row.k} to check it."
        )

    @property
    def too_large(self) -> str:
        """Return the sentence about the device's memory; empty if the models fit."""
        room = self.scene.device.profile.memory_gb.value
        needed = f"It needs {self.memory_gb:.1f} GB and does not fit into this machine's memory ({room:g} GB)."
        return "" if self.fits else needed

    def per_million(self, tokens_per_s: float) -> float | None:
        """What a million tokens cost; None without a price."""
        return None if self.scene.price is None else self.scene.price / 3600.0 / tokens_per_s * 1e6

    def as_dict(self) -> dict[str, object]:
        """All of it for JSON: names of fields, intervals as value, low and high."""
        scene = self.scene
        return {
            "target": scene.target.name,
            "method": scene.draft.method,
            "device": scene.device.profile.name,
            "measured": bool(scene.device.profile.passes),
            "dtype": scene.device.dtype,
            "engine": scene.device.engine,
            "batch": scene.batch,
            "context": scene.context,
            "nodes": scene.nodes,
            "plain_ms": round(self.plain_ms, 4),
            "plain_tokens_per_s": _told(self.plain_tokens_per_s),
            "best_k": self.best_k,
            "recorded_k": scene.acceptance.longest,
            "dies": self.dies,
            "memory_gb": round(self.memory_gb, 3),
            "fits": self.fits,
            "plain_per_million": self.per_million(self.plain_tokens_per_s.value),
            "per_million": self.per_million(self.best.tokens_per_s.value),
            "sentence": self.sentence,
            "notes": list(self.notes),
            "rows": [{name: _told(getattr(row, name)) for name in ROW} for row in self.rows],
            "loads": [{name: _told(getattr(load, name)) for name in LOAD} for load in self.loads],
        }


ROW = tuple(field.name for field in fields(Row))
LOAD = tuple(field.name for field in fields(Gain))


def _told(value: object) -> object:
    if isinstance(value, Estimate):
        return {name: _told(part) for name, part in (("value", value.value), ("low", value.low), ("high", value.high))}
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
) -> Prediction:
    """The speed-up of a draft at every length with its interval, tokens/s, memory, the batch at which the gain ends.

    target: a folder, an embedded name, a hub id, or a `Shape`. model: the drafter's, or its config; None: a head as is
    usual on such a target. method: told from the model's config
    where none is named. device: one of `specdemo/profiles`, a file of `specdemo profile --out`, or a `Profile`.
    acceptance: the chance that each position is kept where those before it are, or what `acceptance.of_lane` says of a
    recorded lane. trace: a stored run, whose first lane that drafts says acceptance, method and model, as far as these
    are not given. nodes: of a draft tree. engine: recorded (CUDA graphs) or eager. price: of an hour of the machine.
    Raises ValueError, one line with the nearest, for names nobody knows.
    """
    where = device if isinstance(device, Profile) else profile(device)
    dtype = dtype_name(dtype) or ("float32" if where.kind == "cpu" else "bfloat16")
    of = target if isinstance(target, Shape) else shape(target, quantization)
    if trace is not None:
        lane = drafting_lane(trace)
        method, model = method or lane.method, model or _model_of(lane, method)
        acceptance = acceptance or of_lane(lane)
    config = config_of(model) if isinstance(model, str) else model
    method = method or (method_in(config) if config else "eagle")
    notes = [] if acceptance else [f"No acceptance was given: {ASSUMED} at every position is assumed."]
    kept = acceptance if isinstance(acceptance, Acceptance) else Acceptance(tuple(acceptance or (ASSUMED,)))
    _check(batch, context, nodes or kept.nodes, price)
    scene = Scene(
        of,
        drafting(method, of, config, options or {}),
        device_of(where, dtype, engine),
        kept,
        batch,
        context,
        nodes or kept.nodes,
        price,
    )
    if kept.extrapolates(max(ks or _lengths(scene))):
        notes.append(
            f"The run recorded k = {kept.longest}. Larger k are extrapolated with decaying acceptance; their intervals "
            "go from no further draft token accepted to every one."
        )
    return predicted(scene, ks, tuple(notes))


def _model_of(lane: LaneTrace, method: str) -> str | None:
    """The drafter of a lane, where that is of the method asked for."""
    named = lane.options.get("model")
    return named if isinstance(named, str) and method in ("", lane.method) else None


def predicted(scene: Scene, ks: Sequence[int] = (), notes: tuple[str, ...] = ()) -> Prediction:
    """`predict` of what has been read already; takes milliseconds."""
    lengths = tuple(ks) or _lengths(scene)
    rows = tuple(_row(scene, k) for k in lengths)
    memory = _memory_gb(scene)
    room = scene.device.profile.memory_gb.value
    plain = _step(scene, 0).ms(scene.device)
    value = 1e3 * scene.batch / plain
    half = _half(scene.device, lambda d: log(_step(scene, 0).ms(d)), scene.device.misfit)
    return Prediction(
        scene=scene,
        plain_ms=plain,
        plain_tokens_per_s=Estimate(value, value * exp(-half), value * exp(half)),
        rows=rows,
        loads=tuple(_load(replace(scene, batch=batch), lengths) for batch in BATCHES),
        dies=_dies(scene, lengths),
        memory_gb=memory,
        fits=memory <= room,
        notes=notes,
    )


def _check(batch: int, context: int, nodes: int, price: float | None) -> None:
    if price is not None and not 0.0 <= price <= MOST_EXPENSIVE:
        raise ValueError(f"price goes from 0 to {MOST_EXPENSIVE:,.0f} an hour, not {price:g}")
    for name, value, low, high in (
        ("batch", batch, 1, 4096),
        ("context", context, 1, 1 << 20),
        ("nodes", nodes, 0, 1024),
    ):
        if not low <= value <= high:
            raise ValueError(f"{name} goes from {low} to {high:,}, not {value}")


def _lengths(scene: Scene) -> tuple[int, ...]:
    if scene.nodes:
        return (len(scene.acceptance.rates),)
    return tuple(range(1, scene.draft.longest + 1))


def _step(scene: Scene, k: int) -> Step:
    """k 0: plain decoding."""
    load = Load(scene.batch, scene.context, BYTES[scene.device.dtype])
    return step_of(scene.target, scene.draft, scene.acceptance, k, load, scene.nodes)


def _row(scene: Scene, k: int) -> Row:
    device, plain, step = scene.device, _step(scene, 0), _step(scene, k)
    tokens, plain_ms = scene.acceptance.tokens(k), plain.ms(device)
    draft_ms, verify_ms, other_ms = step.draft_ms(device), step.check_ms(device), step.beside_ms(device)
    step_ms = draft_ms + verify_ms + other_ms
    speedup, rate = tokens.value * plain_ms / step_ms, 1e3 * scene.batch * tokens.value / step_ms
    own, shared = verify_ms / step_ms, draft_ms / step_ms
    apart = ALIKE * (1.0 - own) ** 2 + (1.0 - ALIKE) * (1.0 + own**2) + shared**2
    half = _half(device, lambda d: log(plain.ms(d) / step.ms(d)), device.misfit * sqrt(apart))
    alone = _half(device, lambda d: log(step.ms(d)), device.misfit)
    return Row(
        k=k,
        tokens=tokens,
        draft_ms=draft_ms,
        verify_ms=verify_ms,
        other_ms=other_ms,
        c=draft_ms / k / plain_ms,
        v=verify_ms / plain.check_ms(device),
        speedup=_about(speedup, tokens, half),
        tokens_per_s=_about(rate, tokens, alone),
        limit=_limit(scene, k, tokens.value, step, plain),
        extrapolated=scene.acceptance.extrapolates(k),
    )


def _half(device: Device, what: Callable[[Device], float], misfit: float) -> float:
    """Half of the interval of a logarithm."""
    slopes = [(what(device.scaled({n: EDGE})) - what(device.scaled({n: -EDGE}))) / (2.0 * EDGE) for n in NAMES]
    terms = range(len(NAMES))
    return SURE * sqrt(sum(slopes[i] * slopes[j] * device.errors[i][j] for i in terms for j in terms) + misfit**2)


def _about(value: float, tokens: Estimate, half: float) -> Estimate:
    """With the interval of the tokens and that of the time, which know nothing of each other."""
    if tokens.low is None or tokens.high is None or not tokens.low > 0.0:
        return Estimate(value, value * exp(-half), value * exp(half))
    below, above = log(tokens.value / tokens.low), log(tokens.high / tokens.value)
    return Estimate(value, value * exp(-hypot(half, below)), value * exp(hypot(half, above)))


def _limit(scene: Scene, k: int, tokens: float, step: Step, plain: Step) -> str:
    """What would bring most if it cost nothing, or for acceptance, if it were whole."""
    device, all_ms = scene.device, step.ms(scene.device)
    wider_ms = step.check_ms(device) - plain.check_ms(device)
    more_ms = step.beside_ms(device) - plain.beside_ms(device)
    gains = {
        "what drafting costs": all_ms / (all_ms - step.draft_ms(device)),
        "what a wider pass costs": all_ms / (all_ms - max(wider_ms, 0.0)),
        "what the engine does beside its passes": all_ms / (all_ms - max(more_ms, 0.0)),
        "what is refused of the drafts": (k + 1.0) / tokens,
    }
    return max(gains, key=gains.__getitem__)


def _speedup(scene: Scene, k: int) -> float:
    times = _step(scene, 0).ms(scene.device) / _step(scene, k).ms(scene.device)
    return scene.acceptance.tokens(k).value * times


def _load(scene: Scene, lengths: Sequence[int]) -> Gain:
    best = max(lengths, key=lambda k: _speedup(scene, k))
    row, memory = _row(scene, best), _memory_gb(scene)
    off = row.speedup.value <= 1.0
    rate = 1e3 * scene.batch / _step(scene, 0).ms(scene.device) if off else row.tokens_per_s.value
    fits = memory <= scene.device.profile.memory_gb.value
    return Gain(scene.batch, 0 if off else best, row.speedup, rate, memory, fits)


def _dies(scene: Scene, lengths: Sequence[int]) -> int | None:
    """The smallest batch at which every draft length loses; None: even the largest gains."""

    def gains(batch: int) -> bool:
        return max(_speedup(replace(scene, batch=batch), k) for k in lengths) > 1.0

    last = next((batch for batch in BATCHES if not gains(batch)), None)
    if last is None or last == 1:
        return last
    low, high = last // 2, last
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if gains(middle) else (low, middle)
    return high


def _memory_gb(scene: Scene) -> float:
    """Weights, and what is remembered of every text, of target and drafter."""
    size, own = BYTES[scene.device.dtype], scene.draft.own
    shapes = [scene.target, *([own] if own else [])]
    weights = sum(one.weight_bytes(size) for one in shapes)
    return HEADROOM * (weights + scene.batch * sum(one.kept_bytes(scene.context, size) for one in shapes)) / 1e9
