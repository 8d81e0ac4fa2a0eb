"""From a comparison to its trace: load, warm up, race, collect. One run at a time in a process.

`Session.stream` yields the messages of messages.py, as `replay` there does for a stored run.
"""

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from specdemo.core.accept import AcceptRule, accept_rule
from specdemo.core.protocol import Budget, GenerationConfig
from specdemo.core.tally import Tally, so_far, summarise
from specdemo.core.trace import LaneTrace, RunTrace, StepEvent
from specdemo.core.tree import ABSENT
from specdemo.engine.loop import generate, never
from specdemo.engine.messages import Finished, LaneDone, Message, Note, Started, Step
from specdemo.engine.race import SCHEDULES
from specdemo.engine.shelf import Shelf, drafter_key
from specdemo.engine.spec import LaneSpec, RunSpec
from specdemo.engine.verdict import judge
from specdemo.methods import check_model, load_drafter, method, validate_options
from specdemo.methods.base import Method
from specdemo.models.load import (
    Cancelled,
    LoadedModel,
    LoadProgress,
    placed,
    silent,
)
from specdemo.models.machine import commit, device_name, versions
from specdemo.models.memory import Remembering
from specdemo.models.target import HFTarget
from specdemo.models.text import Detokenizer, encode, token_text
from specdemo.servers.address import check_listed, host, machine
from specdemo.servers.lane import Form, RemoteLane

WARM_UP_TOKENS = 12


@dataclass(frozen=True, slots=True)
class _Pair:
    """model: what the drafter was built from."""

    target: HFTarget
    model: Any
    drafter: Method


@dataclass
class _Lane:
    trace: LaneTrace
    target: HFTarget
    tokenizer: PreTrainedTokenizerBase
    drafter: Method
    memories: list[Remembering]
    accept: AcceptRule
    config: GenerationConfig
    text: Detokenizer
    tally: Tally = field(default_factory=Tally)


class Session:
    """Runs comparisons on the models of its shelf. A second caller waits for `lock`."""

    def __init__(self, budget_bytes: int | None = None) -> None:
        """budget_bytes: see Shelf."""
        self.lock = threading.Lock()
        self.shelf = Shelf(budget_bytes)
        self._learners: dict[tuple[Any, ...], _Pair] = {}  # drafters that get better with use
        self._chat: dict[tuple[Any, ...], tuple[HFTarget, Any]] = {}  # targets and models that remember the chat so far
        self._turn: RunSpec | None = None  # its last turn

    def loaded(self) -> list[tuple[str, int]]:
        """Name and bytes of every model that is in memory, the last used first, and of the chat that may go on."""
        chat = sum(memory.history_bytes for models in list(self._chat.values()) for memory in _memories(*models))
        return [*self.shelf.loaded(), *([("the chat so far", chat)] if chat else [])]

    def unload(self) -> None:
        """Forget every model; waits for a run that is under way."""
        with self.lock:
            self._forget_chat()
            self._learners.clear()
            self.shelf.forget()

    def load(self, spec: RunSpec, progress: LoadProgress = silent) -> None:
        """Load what the comparison needs, in place of others where memory is short, and build every lane once.

        Raises ValueError with one line that names the cure.
        """
        with self.lock, self._remembering():
            self._load(spec, progress)
            self._turn = None
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

        with self.lock, self._remembering():
            self._load(spec, report)
            self._turn = None
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
                    _warm_up(lane, cancelled)
                    for part in (lane.target, lane.drafter):
                        if part.note:
                            yield Note(part.note, index)
                    reads = lane.drafter.max_length
                    if reads is not None and reads < len(lane.trace.prompt_ids) + spec.max_new_tokens:
                        yield Note(f"its draft reads {reads} tokens; nothing is drafted behind them", index)
            if here:  # the warm-up may have shown that passes cannot be recorded
                trace.environment["kernels"] = here.target.kernels
            yield from _race(lanes, trace, spec, cancelled)
            for index, lane in enumerate(lanes):
                if isinstance(lane, RemoteLane):
                    yield from _listen(lane, index, cancelled)
            judge(trace, self.shelf.target() if here else None)
            self._turn = spec if _can_go_on(trace) else None
            yield Finished(trace)

    def target(self) -> HFTarget:
        """The target of the last comparison, with a history of its own."""
        return self.shelf.target()

    @contextmanager
    def _remembering(self) -> Iterator[None]:
        """Around a run: what its models remember goes, unless it was a turn of a chat that can go on."""
        try:
            yield
        finally:
            if self._turn is None:
                self._forget_chat()

    def _forget_chat(self) -> None:
        for models in self._chat.values():
            for memory in _memories(*models):
                memory.forget()
        self._chat.clear()
        self._turn = None

    def _load(self, spec: RunSpec, progress: LoadProgress) -> None:
        if not _is_next(self._turn, spec):
            self._forget_chat()
        for lane in spec.all_lanes:
            if lane.server is not None:
                check_listed(lane.server)
            check_model(lane.method, validate_options(lane.method, dict(lane.options)), lane.model)
        if not spec.all_remote:
            present = {drafter_key(lane, spec) for lane in spec.lanes}
            self._learners = {key: pair for key, pair in self._learners.items() if key[0] in present}
            self.shelf.bring(spec, progress)

    def _lanes(self, spec: RunSpec) -> list[_Lane | RemoteLane]:
        if not spec.prompt.strip():
            raise ValueError("the prompt is empty; write at least one word")
        forms: tuple[Form, ...]
        if spec.all_remote:
            chat = bool(spec.chat or spec.system or spec.history)
            forms = ("chat/completions", "completions") if spec.chat is None else ("completions",)
            asked = [_messages(spec, i, chat) for i in range(len(spec.all_lanes))]
            return [_remote_lane(spec, lane, said, forms) for lane, said in zip(spec.all_lanes, asked, strict=True)]
        tokenizer = self.shelf.tokenizer
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
        messages = _messages(spec, index, bool(tokenizer.chat_template))
        pair = self._pair(spec, index, lane, options, chat=bool(messages))
        target = pair.target
        prompt_ids = encode(tokenizer, messages or spec.prompt, target.max_length - spec.max_new_tokens)
        accept = accept_rule(lane.acceptance)
        shown = {**options, **({"k": lane.k} if lane.k else {}), **({"model": lane.model} if lane.model else {})}
        if not accept.exact:
            shown["acceptance"] = lane.acceptance
        trace = LaneTrace(lane_name(lane), lane.method, shown, accept.exact, prompt_ids, messages=messages)
        _note_unlike(trace, spec, lane)
        budget = Budget(lane.k, max(lane.k, int(options.get("nodes", 0))))
        config = GenerationConfig(spec.max_new_tokens, spec.sampling, budget, spec.seed)
        text = Detokenizer(tokenizer, prompt_ids)
        memories = _memories(target, pair.model)
        return _Lane(trace, target, tokenizer, pair.drafter, memories, accept, config, text)

    def _pair(self, spec: RunSpec, index: int, lane: LaneSpec, options: dict[str, Any], chat: bool) -> _Pair:
        """A target with a history of its own and its drafter: new, unless the target remembers the chat or the drafter
        keeps what it learns."""
        key = drafter_key(lane, spec), index, lane.method, *options.items()
        pair = self._learners.get(key)
        if pair is None:
            target, model = self._chat.get(key) or self._models(spec, lane, chat)
            pair = _Pair(target, model, load_drafter(lane.method, target, model, **options))
        if method(lane.method).learns:
            self._learners[key] = pair
        if _memories(pair.target, pair.model):
            self._chat[key] = pair.target, pair.model
        return pair

    def _models(self, spec: RunSpec, lane: LaneSpec, chat: bool) -> tuple[HFTarget, Any]:
        """Of a lane: its target, and what its drafter is built from. Those of a chat remember."""
        target, model = self.shelf.target(), self.shelf.drafter(lane, spec)
        return (_remembering(target), _remembering(model)) if chat else (target, model)


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


def _can_go_on(trace: RunTrace) -> bool:
    return all(lane.messages and lane.finish in ("stop", "length") for lane in trace.lanes)


def _is_next(turn: RunSpec | None, spec: RunSpec) -> bool:
    """Whether a comparison is that of a chat's last turn, with another message. What was said is compared later, token
    by token."""
    return turn is not None and bool(spec.history) and replace(turn, prompt=spec.prompt, history=spec.history) == spec


def _remembering(model: Any) -> Any:
    """The model, if it is one and no head, as a target that remembers its last text."""
    if not isinstance(model, HFTarget | LoadedModel):
        return model
    return Remembering(model.model, model.tokenizer, model.name)


def _memories(*models: Any) -> list[Remembering]:
    return [model for model in models if isinstance(model, Remembering)]


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


def lane_name(lane: LaneSpec) -> str:
    """Its own, or else its method's title and its model."""
    if lane.name:
        return lane.name
    title: str = method(lane.method).title
    return title if lane.model is None else f"{title} ({lane.model.partition('@')[0].rpartition('/')[2]})"


def _config(spec: RunSpec) -> dict[str, Any]:
    kept = {"target", "max_new_tokens", "seed", "dtype", "device", "quantization", "chat", "system"}
    return {k: v for k, v in asdict(spec).items() if k in kept} | asdict(spec.sampling)


def _warm_up(lane: _Lane, cancelled: Callable[[], bool]) -> None:
    """Every code path and buffer of the lane once, off the clock: the first tokens of the same run."""
    written = 0
    with (
        suppress(RuntimeError, ValueError),
        closing(_events(lane, replace(lane.config, stop_token_ids=()), cancelled)) as run,
    ):
        for event in run:  # a lane that cannot run says so in its own race, not here
            written += len(event.emitted[0])
            if written >= WARM_UP_TOKENS:
                break
    for memory in lane.memories:
        memory.rewind()


def _events(lane: _Lane, config: GenerationConfig, cancelled: Callable[[], bool]) -> Generator[StepEvent, None, None]:
    """The prefill's notes have kept: the tokens of the prompt that the target did not read again."""
    prompt = torch.tensor([lane.trace.prompt_ids], device=lane.target.device)
    for event in generate(lane.target, lane.drafter, prompt, config, accept=lane.accept, cancelled=cancelled):
        kept = lane.target.kept if isinstance(lane.target, Remembering) else 0
        yield replace(event, notes={**event.notes, "kept": float(kept)}) if kept and not event.index else event


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
            _forget_peak(lane)
            for event in _events(lane, lane.config, cancelled):
                peaks[index] = max(peaks[index], _memory(lane))
                yield event
                _forget_peak(lane)
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
    tally = Tally()
    try:
        for event, text in lane.events(cancelled):
            tally.add(event)
            yield Step(index, event, [*[""] * (len(event.emitted[0]) - 1), text], [], so_far(tally, remote=True))
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
    lane.tally.add(event)
    return Step(index, event, pieces, drafted, so_far(lane.tally, remote=False))


def _forget_peak(lane: _Lane) -> None:
    if lane.target.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(lane.target.device)


def _memory(lane: _Lane) -> int:
    """On a GPU the allocator's peak in this lane's last step; on a CPU the weights and caches it holds, counted."""
    if lane.target.device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(lane.target.device))
    return sum(held.weight_bytes + held.history_bytes for held in (lane.target, lane.drafter))
