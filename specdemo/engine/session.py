"""From a comparison to its trace: load, warm up, race, collect. One run at a time in a process.

`Session.stream` yields the messages of messages.py, as `replay` there does for a stored run.
"""

import gc
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from specdemo.core.accept import AcceptRule, accept_rule
from specdemo.core.protocol import Budget, Drafter, GenerationConfig
from specdemo.core.sampling import Sampling
from specdemo.core.trace import LaneTrace, RunTrace, StepEvent, compare, summarise
from specdemo.core.tree import ABSENT
from specdemo.engine.loop import generate, never
from specdemo.engine.messages import Finished, LaneDone, Message, Note, Started, Step
from specdemo.engine.race import SCHEDULES
from specdemo.engine.remote import Form, RemoteLane
from specdemo.engine.servers import check_listed, host, machine
from specdemo.methods import BASELINE, check_model, load_drafter, method, reader, validate_options
from specdemo.models.footprint import Precision, free_bytes, measure
from specdemo.models.load import (
    Cancelled,
    LoadProgress,
    check_memory,
    load_model,
    locate,
    placed,
    plan,
    rounding_noise,
    silent,
)
from specdemo.models.machine import commit, device_name, versions
from specdemo.models.target import HFTarget
from specdemo.models.text import Detokenizer, encode, token_text

WARM_UP_TOKENS = 12
ANY_WEIGHTS = ("*.pt", "*.bin", "*.pth")  # of published speculators without safetensors
Schedule = Literal["race", "sequential"]
Messages = tuple[Mapping[str, str], ...]  # each with role and content


@dataclass(frozen=True)
class LaneSpec:
    """One speculative lane. k is the draft length, the depth of its budget.

    server: the address of a server on which it runs (remote.py), served_model what the target is called there; method,
    model, k and options then say what that server is meant to run, which nobody checks.
    """

    method: str
    model: str | None = None
    k: int = 4
    options: Mapping[str, Any] = field(default_factory=dict)
    acceptance: str = "lossless"
    name: str = ""
    server: str | None = None
    served_model: str | None = None


@dataclass(frozen=True)
class RunSpec:
    """A comparison. `lanes` are the speculative ones; plain decoding is always lane 0, here or on `server`. `follow_up`
    asks on."""

    preset: str
    target: str
    prompt: str
    lanes: tuple[LaneSpec, ...]
    max_new_tokens: int = 128
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    schedule: Schedule = "race"
    dtype: str = "auto"
    device: str = "auto"
    quantization: str | None = None
    server: str | None = None
    served_model: str | None = None
    chat: bool | None = None  # the prompt is a message in the model's chat template; None: where it has one
    system: str = ""
    history: tuple[Messages, ...] = ()  # of every lane, the baseline first: the chat before the prompt

    @property
    def all_lanes(self) -> tuple[LaneSpec, ...]:
        """Lane 0 too."""
        plain = LaneSpec(BASELINE, k=0, name="Baseline", server=self.server, served_model=self.served_model)
        return plain, *self.lanes

    @property
    def all_remote(self) -> bool:
        """True: no model is needed here."""
        return all(lane.server for lane in self.all_lanes)


@dataclass
class _Lane:
    trace: LaneTrace
    target: HFTarget
    tokenizer: PreTrainedTokenizerBase
    drafter: Drafter
    accept: AcceptRule
    config: GenerationConfig
    text: Detokenizer


@dataclass(slots=True)
class _Loaded:
    """model: of the target a LoadedModel, of a drafter what its method's `load` gave."""

    model: Any
    bytes: int


class Session:
    """Keeps the models of the last comparisons loaded, the least recently used going first where memory is short.

    A second caller waits for `lock`. A drafter is kept with the target it was loaded for, and goes when that goes.
    """

    def __init__(self, budget_bytes: int | None = None) -> None:
        """budget_bytes: what models that are not in use may take with those that are; None: half of what is free."""
        self.lock = threading.Lock()
        self._budget = budget_bytes
        self._models: dict[tuple[str, ...], _Loaded] = {}  # the least recently used first, a target after its drafters
        self._target: tuple[str, ...] = ()
        self._learners: dict[tuple[Any, ...], tuple[HFTarget, Drafter]] = {}  # drafters that get better with use

    def loaded(self) -> list[tuple[str, int]]:
        """Name and bytes of every model that is in memory, the last used first."""
        return [(key[1], held.bytes) for key, held in reversed(list(self._models.items()))]

    def unload(self) -> None:
        """Forget every model; waits for a run that is under way."""
        with self.lock:
            self._forget()

    def load(self, spec: RunSpec, progress: LoadProgress = silent) -> None:
        """Load what the comparison needs, in place of others where memory is short, and build every lane once.

        Raises ValueError with one line that names the cure.
        """
        with self.lock:
            self._load(spec, progress)
            self._lanes(spec)

    def place(self, spec: RunSpec, progress: LoadProgress = silent) -> None:
        """Put the models where they will run, and compute nothing: the device may not be there yet."""
        with self.lock:
            self._load(spec, progress)

    def run(self, spec: RunSpec, cancelled: Callable[[], bool] = never, progress: LoadProgress = silent) -> RunTrace:
        """The whole comparison -> its trace."""
        for message in self.stream(spec, cancelled, progress):
            if isinstance(message, Finished):
                return message.trace
        raise AssertionError("a run ends with Finished")

    def stream(
        self, spec: RunSpec, cancelled: Callable[[], bool] = never, progress: LoadProgress = silent
    ) -> Iterator[Message]:
        """The comparison step by step. Closing the iterator, or `cancelled()`, stops every lane within one step.

        Raises ValueError for what cannot be loaded, and Cancelled, a ValueError too, when that was to stop.
        """

        def report(share: float, what: str) -> None:
            if cancelled():
                raise Cancelled(f"stopped while {what}; files that were complete are kept")
            progress(share, what)

        with self.lock:
            self._load(spec, report)
            lanes = self._lanes(spec)
            here = next((lane for lane in lanes if isinstance(lane, _Lane)), None)
            trace = RunTrace(
                preset=spec.preset,
                config=_config(spec),
                environment=environment(here.target if here else None),
                schedule=spec.schedule,
                lanes=[lane.trace for lane in lanes],
                prompt=spec.prompt,
            )
            yield Started(trace)
            spread = placed(here.target.model) if here else ""
            if spread:
                yield Note(f"{spec.target} does not fit into one device: {spread}")
            for index, lane in enumerate(lanes):
                if isinstance(lane, _Lane):
                    if getattr(lane.drafter, "note", ""):
                        yield Note(lane.drafter.note, index)  # type: ignore[attr-defined]
                    _warm_up(lane, cancelled)
            yield from _race(lanes, trace, spec, cancelled)
            for index, lane in enumerate(lanes):
                if isinstance(lane, RemoteLane):
                    yield from _listen(lane, index, cancelled)
            _compare(trace, lanes, spec)
            yield Finished(trace)

    def _load(self, spec: RunSpec, progress: LoadProgress) -> None:
        target = (BASELINE, spec.target, _device(spec), spec.dtype, str(spec.quantization))
        for lane in spec.all_lanes:
            if lane.server is not None:
                check_listed(lane.server)
            check_model(lane.method, validate_options(lane.method, dict(lane.options)), lane.model)
        if spec.all_remote:
            return
        lanes = {_key(lane, target): lane for lane in spec.lanes if lane.model is not None and lane.server is None}
        present = {_key(lane, target) for lane in spec.lanes}
        self._learners = {key: pair for key, pair in self._learners.items() if key[0] in present}
        bytes_of = self._make_room(spec, target, lanes, progress)
        total = 1 + len(lanes)
        if target not in self._models:
            report = _scaled(progress, 0, total)
            loaded = load_model(spec.target, spec.dtype, _device(spec), spec.quantization, report)
            self._models[target] = _Loaded(loaded, bytes_of[target])
        self._target = target
        for done, (key, lane) in enumerate(lanes.items(), start=1):
            if key not in self._models:
                loader = method(reader(lane.method, lane.options))
                report = _scaled(progress, done, total)
                report(0.0, f"loading {lane.model}")
                self._models[key] = _Loaded(loader.load(lane.model, self._fresh_target(), report), bytes_of[key])
        for key in (*lanes, target):  # now the last used
            self._models[key] = self._models.pop(key)
        progress(1.0, "models ready")

    def target(self) -> HFTarget:
        """The target of the last comparison, with a history of its own."""
        return self._fresh_target()

    def _make_room(
        self, spec: RunSpec, target: tuple[str, ...], lanes: Mapping[tuple[str, ...], LaneSpec], progress: LoadProgress
    ) -> dict[tuple[str, ...], int]:
        """Bytes of every model that is to be loaded; others are forgotten until these fit.

        Raises ValueError, before anything is downloaded, when they do not fit even alone.
        """
        wanted = {key: str(lane.model) for key, lane in lanes.items() if key not in self._models}
        if target not in self._models:
            wanted[target] = spec.target
        if not wanted:
            return {}
        progress(0.0, f"looking for {', '.join(wanted.values())}")
        where, precision = plan(spec.dtype, _device(spec), spec.quantization)
        beside = Precision(precision.dtype)  # drafters and heads are not quantised
        new = {key: name for key, name in wanted.items() if key == target or name != spec.target}  # not its own heads
        sizes = {
            key: measure(locate(name, ANY_WEIGHTS), precision if key == target else beside) for key, name in new.items()
        }
        tokens = len(spec.prompt) // 2 + spec.max_new_tokens  # a token is seldom shorter than two characters
        histories = {key: tokens * (1 + len(spec.lanes) if key == target else 1) for key in sizes}
        needed = sum(size.of(histories[key]) for key, size in sizes.items())
        budget = (sum(free_bytes(where)) + self._held()) // 2 if self._budget is None else self._budget
        for key in [key for key in self._models if key != target and key not in lanes]:
            if self._held() + needed <= budget:
                break
            self._forget(key)
        check_memory(" with ".join([new[key] for key in reversed(new)]), needed, where, precision)
        return {key: sizes[key].weights if key in sizes else 0 for key in wanted}

    def _held(self) -> int:
        return sum(loaded.bytes for loaded in self._models.values())

    def _forget(self, gone: tuple[str, ...] | None = None) -> None:
        """A model, a target's drafters with it; None: all."""
        self._models = {key: m for key, m in self._models.items() if gone and gone not in (key, key[2:])}
        self._learners = {key: p for key, p in self._learners.items() if gone and gone not in (key[0], key[0][2:])}
        if torch.cuda.is_available():
            gc.collect()  # models that accelerate put its hooks on hold themselves in cycles
            torch.cuda.empty_cache()

    def _fresh_target(self) -> HFTarget:
        """A history of its own on the shared weights."""
        loaded = self._models[self._target].model
        return HFTarget(loaded.model, loaded.tokenizer, loaded.name)

    def _lanes(self, spec: RunSpec) -> list[_Lane | RemoteLane]:
        if not spec.prompt.strip():
            raise ValueError("the prompt is empty; write at least one word")
        forms: tuple[Form, ...]
        if spec.all_remote:
            chat = bool(spec.chat or spec.system or spec.history)
            forms = ("chat/completions", "completions") if spec.chat is None else ("completions",)
            asked = [_messages(spec, i, chat) for i in range(len(spec.all_lanes))]
            return [_remote_lane(spec, lane, said, forms) for lane, said in zip(spec.all_lanes, asked, strict=True)]
        tokenizer = self._models[self._target].model.tokenizer
        if tokenizer is None:
            raise ValueError(f"{spec.target} has no tokenizer; put its tokenizer.json into the same folder")
        template = bool(tokenizer.chat_template)
        # as `encode` puts it: a server's chat interface applies the same template
        forms = ("completions",) if template else ("completions", "chat/completions")
        return [
            _remote_lane(spec, lane, _messages(spec, i, template), forms)
            if lane.server
            else self._lane(spec, i, lane, tokenizer)
            for i, lane in enumerate(spec.all_lanes)
        ]

    def _lane(self, spec: RunSpec, index: int, lane: LaneSpec, tokenizer: PreTrainedTokenizerBase) -> _Lane:
        options = validate_options(lane.method, dict(lane.options))
        target, drafter = self._drafter(index, lane, options)
        messages = _messages(spec, index, bool(tokenizer.chat_template))
        prompt_ids = encode(tokenizer, messages or spec.prompt, target.max_length - spec.max_new_tokens)
        accept = accept_rule(lane.acceptance)
        shown = {**options, **({"k": lane.k} if lane.k else {}), **({"model": lane.model} if lane.model else {})}
        if not accept.exact:
            shown["acceptance"] = lane.acceptance
        name = lane.name or _lane_name(lane)
        trace = LaneTrace(name, lane.method, shown, accept.exact, prompt_ids, messages=messages)
        _note_unlike(trace, spec, lane)
        budget = Budget(lane.k, max(lane.k, int(options.get("nodes", 0))))
        config = GenerationConfig(spec.max_new_tokens, spec.sampling, budget, spec.seed)
        return _Lane(trace, target, tokenizer, drafter, accept, config, Detokenizer(tokenizer, prompt_ids))

    def _drafter(self, index: int, lane: LaneSpec, options: dict[str, Any]) -> tuple[HFTarget, Drafter]:
        """A target with a history of its own and its drafter: a new one, unless it keeps what it learns."""
        key = _key(lane, self._target), index, lane.method, *options.items()
        if key in self._learners:
            return self._learners[key]
        target = self._fresh_target()
        model = None if lane.model is None else self._models[_key(lane, self._target)].model
        pair = target, load_drafter(lane.method, target, model, **options)
        if getattr(method(lane.method), "learns", False):
            self._learners[key] = pair
        return pair


@lru_cache(maxsize=1)
def session() -> Session:
    """The session of this process."""
    return Session()


def follow_up(spec: RunSpec, trace: RunTrace, message: str) -> RunSpec:
    """The comparison that goes on from a finished one: every lane asks the message in a chat of its own, after its own
    answer. Raises ValueError when there is no chat to go on with."""
    if not all(lane.messages for lane in trace.lanes):
        raise ValueError("this run went on with a text; only a chat, of a model with a chat template, has a next turn")
    if len(trace.lanes) != len(spec.lanes) + 1 or any(lane.finish not in ("stop", "length") for lane in trace.lanes):
        raise ValueError("a lane has no whole answer to go on from; run the comparison again")
    start = 1 if spec.system else 0
    said = [(*lane.messages[start:], {"role": "assistant", "content": lane.text}) for lane in trace.lanes]
    return replace(spec, prompt=message, history=tuple(said))


def _messages(spec: RunSpec, lane: int, template: bool) -> list[dict[str, str]]:
    """The chat a lane answers; empty when it completes a text."""
    chat = template if spec.chat is None else spec.chat
    if chat and not template:
        raise ValueError(f"{spec.target} has no chat template, so it completes texts alone; turn chat off")
    if not chat and spec.system:
        raise ValueError("a text that is completed has no system prompt; leave it empty or turn chat on")
    system = [{"role": "system", "content": spec.system}] if spec.system else []
    before = [dict(message) for message in spec.history[lane]] if spec.history else []
    return [*system, *before, {"role": "user", "content": spec.prompt}] if chat else []


def environment(target: HFTarget | None) -> dict[str, Any]:
    """What the numbers were measured on, and when. Without a target every lane ran on a server, of which no more is
    known."""
    on_cpu = target is not None and target.device.type != "cuda"
    return {
        "device": device_name(target.device) if target else "servers",
        "threads": torch.get_num_threads() if on_cpu else None,
        "dtype": str(target.dtype).removeprefix("torch.") if target else "unknown precision",
        "kernels": target.kernels if target else "unknown",
        "versions": versions(),
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def _key(lane: LaneSpec, target: tuple[str, ...]) -> tuple[str, ...]:
    """Names a loaded drafter; a head belongs to the target it was loaded for."""
    return reader(lane.method, lane.options), str(lane.model), *target


def _remote_lane(spec: RunSpec, lane: LaneSpec, messages: list[dict[str, str]], forms: tuple[Form, ...]) -> RemoteLane:
    """forms: how a text may be put; a chat has one form alone."""
    assert lane.server is not None
    exact = accept_rule(lane.acceptance).exact
    name = lane.name or f"Server {host(check_listed(lane.server))}"  # what it runs is for the preset to claim
    trace = LaneTrace(name, lane.method, {}, exact, [], messages=messages)
    _note_unlike(trace, spec, lane)
    config = GenerationConfig(spec.max_new_tokens, spec.sampling, Budget(0, 0), spec.seed)
    prompt = messages or spec.prompt
    forms = ("chat/completions",) if messages else forms
    return RemoteLane(trace, lane.server, lane.served_model, spec.target, prompt, config, forms)


def _note_unlike(trace: LaneTrace, spec: RunSpec, lane: LaneSpec) -> None:
    """Say what else but speculation makes a lane faster or slower than the baseline."""
    other = "machine" if machine(lane.server) != machine(spec.server) else "software"
    if other == "machine" or (lane.server is None) != (spec.server is None):
        trace.note = f"its {other} is not the baseline's, so the ratio of speeds is not speculation's alone"


def _device(spec: RunSpec) -> str:
    if spec.device != "auto":
        return spec.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _scaled(progress: LoadProgress, done: int, total: int) -> LoadProgress:
    return lambda share, what: progress((done + share) / total, what)


def _lane_name(lane: LaneSpec) -> str:
    title: str = method(lane.method).title
    return title if lane.model is None else f"{title} ({lane.model.partition('@')[0].rpartition('/')[2]})"


def _config(spec: RunSpec) -> dict[str, Any]:
    kept = {"target", "max_new_tokens", "seed", "dtype", "device", "quantization", "chat", "system"}
    return {k: v for k, v in asdict(spec).items() if k in kept} | asdict(spec.sampling)


def _warm_up(lane: _Lane, cancelled: Callable[[], bool]) -> None:
    """Every code path and buffer of the lane once, off the clock."""
    config = replace(lane.config, max_new_tokens=min(WARM_UP_TOKENS, lane.config.max_new_tokens), stop_token_ids=())
    with suppress(RuntimeError, ValueError):  # a lane that cannot run says so in its own race, not here
        for _ in _events(lane, config, cancelled):
            pass


def _events(lane: _Lane, config: GenerationConfig, cancelled: Callable[[], bool]) -> Iterator[StepEvent]:
    prompt = torch.tensor([lane.trace.prompt_ids], device=lane.target.device)
    return generate(lane.target, lane.drafter, prompt, config, accept=lane.accept, cancelled=cancelled)


def _race(
    all_lanes: list[_Lane | RemoteLane], trace: RunTrace, spec: RunSpec, cancelled: Callable[[], bool]
) -> Iterator[Message]:
    """The lanes that run here."""
    lanes = {index: lane for index, lane in enumerate(all_lanes) if isinstance(lane, _Lane)}
    peaks = dict.fromkeys(lanes, 0)

    def guarded(index: int) -> Iterator[StepEvent]:
        """A lane that fails ends alone, with its reason; the others go on."""
        lane = lanes[index]
        try:
            for event in _events(lane, lane.config, cancelled):
                peaks[index] = max(peaks[index], _memory(lane))
                yield event
        except (RuntimeError, ValueError) as error:
            lane.trace.finish = "error"
            lane.trace.note = str(error).partition("\n")[0]

    done = set[int]()
    order = list(lanes)
    steps = SCHEDULES[spec.schedule]([guarded(i) for i in order])
    for place, event in steps:
        index = order[place]
        lane = lanes[index]
        yield _record(lane, index, event, trace.vocabulary, spec.max_new_tokens)
        if lane.trace.finish != "cancelled":
            done.add(index)
            lane.trace.summary = summarise(lane.trace, peaks[index])
            yield LaneDone(index, lane.trace)
    for index, lane in lanes.items():
        if index not in done:
            lane.trace.summary = summarise(lane.trace, peaks[index])
            if lane.trace.note:
                yield Note(lane.trace.note, index)
            yield LaneDone(index, lane.trace)


def _listen(lane: RemoteLane, index: int, cancelled: Callable[[], bool]) -> Iterator[Message]:
    """A lane on a server, alone: nothing here runs meanwhile. One that fails ends alone, with its reason."""
    try:
        for event, text in lane.events(cancelled):
            yield Step(index, event, [*[""] * (len(event.emitted[0]) - 1), text], [])
    except RuntimeError as error:
        lane.trace.finish = "error"
        lane.trace.note = str(error)
    lane.trace.summary = summarise(lane.trace)
    if lane.trace.note:
        yield Note(lane.trace.note, index)
    yield LaneDone(index, lane.trace)


def _record(lane: _Lane, index: int, event: StepEvent, vocabulary: dict[str, str], limit: int) -> Step:
    """Write one event into the lane's trace; `finish` stays `cancelled` until the lane has reached its end."""
    lane.trace.token_ids += event.emitted[0]
    pieces = lane.text.push(event.emitted[0])
    if lane.trace.token_ids[-1] in lane.target.stop_token_ids:
        lane.trace.finish = "stop"
    elif len(lane.trace.token_ids) >= limit:
        lane.trace.finish = "length"
    if lane.trace.finish != "cancelled":
        pieces[-1] += lane.text.flush()
    drafted = ["" if t == ABSENT else token_text(lane.tokenizer, t) for t in event.drafted[0]]
    vocabulary.update({str(t): text for t, text in zip(event.drafted[0], drafted, strict=True) if t != ABSENT})
    lane.trace.events.append(event)
    lane.trace.pieces += pieces
    lane.trace.text += "".join(pieces)
    return Step(index, event, pieces, drafted)


def _memory(lane: _Lane) -> int:
    """On a GPU the allocator's peak; on a CPU the weights and caches this lane holds, counted."""
    if lane.target.device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(lane.target.device))
    held = (lane.target, lane.drafter)
    return sum(getattr(x, "weight_bytes", 0) + getattr(x, "history_bytes", 0) for x in held)


def _compare(trace: RunTrace, lanes: list[_Lane | RemoteLane], spec: RunSpec) -> None:
    baseline = trace.lanes[0]
    for lane in trace.lanes[1:]:
        row = compare(baseline, lane, spec.sampling.greedy)
        index = row["first_divergence"]
        if not lane.exact:
            row["verdict"] = "lossy"
        elif baseline.remote or lane.remote:
            row["verdict"] = _from_outside(baseline, lane, row["identical"])
        elif index is None:
            row["verdict"] = "identical" if spec.sampling.greedy else "same distribution"
        else:
            assert isinstance(lanes[0], _Lane)
            row["divergence_margin"], rounding = _divergence(lanes[0], baseline, lane, index)
            row["verdict"] = "rounding" if rounding else "differs"
        trace.comparison.append(row)


def _from_outside(baseline: LaneTrace, lane: LaneTrace, same: bool | None) -> str:
    """The verdict where a server wrote one of the texts. Its rule of sampling, and why a text differs, are unknown."""
    if same is None or "error" in (baseline.finish, lane.finish) or not lane.text:
        return "unknown"
    if not same:
        return "text differs"
    return "same text" if -1 in (*baseline.token_ids, *lane.token_ids) else "identical"


@torch.no_grad()
def _divergence(plain: _Lane, baseline: LaneTrace, lane: LaneTrace, index: int) -> tuple[float, bool]:
    """The gap between the target's two best logits where the texts part, and whether it explains the parting.

    Passes of different widths use different kernels and round differently; when the two texts chose the two best
    tokens and these are no further apart than that noise, as measured on this text, or a few units in the last place,
    it is rounding. Anything larger is a fault.
    """
    said = baseline.token_ids[:index]
    tokens = torch.tensor([baseline.prompt_ids + said], device=plain.target.device)
    logits = plain.target.start(tokens).logits[0, -1].float()
    plain.target.release()
    best = logits.topk(2)
    margin = float(best.values[0] - best.values[1])
    noise = rounding_noise(plain.target, tokens)
    ours = {t[index] for t in (baseline.token_ids, lane.token_ids) if index < len(t)}
    units = torch.finfo(plain.target.dtype).eps * float(best.values[0].abs())
    tolerance = max(1e-4, 4.0 * units, 2.0 * noise)
    return round(margin, 6), ours == set(best.indices.tolist()) and margin <= tolerance
