"""Execution of comparisons: load, schedule, collect. One run at a time per process.

`Session.stream` yields the messages of messages.py, as `replay` does for a stored run.
"""

import gc
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, TypeVar

import torch

from specdemo.core.protocol import Target
from specdemo.core.settings import to_values
from specdemo.core.trace import UNREPORTED, RunTrace, without_probabilities
from specdemo.costs.shapes import Footprint
from specdemo.engine.clock import clock_name
from specdemo.engine.comparison import Comparison, Lane
from specdemo.engine.lanes import LaneModels, LocalLane, RunningLane, ServerLane, build_lane_models, chat_messages
from specdemo.engine.loop import never_cancelled
from specdemo.engine.messages import (
    COMPARING,
    LOADING,
    MEASURING,
    RACING,
    SCHEDULES,
    WARMING_UP,
    Finished,
    LaneDone,
    LaneSteps,
    Note,
    Restarted,
    RunMessage,
    RunStage,
    opened,
)
from specdemo.engine.verdict import compare_outputs
from specdemo.methods import BASELINE, method, model_method
from specdemo.methods.pairs import load_model
from specdemo.models.auto_dtype import placement
from specdemo.models.cpu_plan import CpuSettings
from specdemo.models.cpu_threads import step_threads, thread_counts, thread_limit
from specdemo.models.devices import best_device, device_kind, device_map_summary, graph_bytes, pick_device
from specdemo.models.errors import Cancelled, checkpoint_errors
from specdemo.models.gguf_files import has_chat_template
from specdemo.models.llamacpp import LlamaCppSettings
from specdemo.models.machine import GpuClock, commit, device_name, versions
from specdemo.models.memory import Needs, Precision, check_memory, footprint, free_bytes, free_memory
from specdemo.models.pass_cost import checking_note, costly_in_half, fastest_threads, measure_passes, pass_facts
from specdemo.models.prefix_reuse import prefix_cached, with_prefix_cache
from specdemo.models.ref import ModelRef
from specdemo.models.sources import LoadProgress, no_progress
from specdemo.models.text import tokenizer_of
from specdemo.servers.address import check_listed

Spec = TypeVar("Spec", bound=Comparison)
ModelKey = tuple[str, ...]  # method that reads it, name, then the key of its target or the settings it was loaded with
LaneKey = tuple[object, ...]  # key of the drafter's model, index of the lane, method and options

MOST_LENGTHS = 100
NOTHING = Footprint(0, 0)
RUN_SECONDS = 0.5  # for the choice of threads at the start of a run
TRACE_CONFIG = {*"target max_new_tokens seed dtype device quantization chat system thinking grammar".split()}


@dataclass(slots=True)
class _Loaded:
    """A loaded model. model: a LoadedModel for a target, the result of its method's `load` for a drafter."""

    model: Any
    bytes: int


class Session:
    """Runs comparisons, and keeps what they loaded: models, drafters that learn, and the caches of the chat so far.

    When memory is short, the least recently used model is dropped, a target with its drafters. The chat is dropped by
    the first run that is not its next turn. Other callers wait for `lock`.
    """

    def __init__(self, budget_bytes: int | None = None) -> None:
        """budget_bytes: limit for all loaded models, including unused ones; None: half of the free memory."""
        self.lock = threading.Lock()
        self.explains = True  # False: runs do not examine why two texts diverge, which reads them again
        self.keeps_threads = False  # True: runs use the threads that were chosen when the target was loaded
        self._budget = budget_bytes
        self._models: dict[ModelKey, _Loaded] = {}  # least recently used first, a target after its drafters
        self._target: ModelKey = ()
        self._lengths: dict[tuple[str, ...], int] = {}  # target and lane without draft length -> the one it got
        self._learners: dict[LaneKey, LaneModels] = {}  # one per lane
        self._chat: dict[LaneKey, tuple[Target, object]] = {}  # a lane's target, and the model of its drafter
        self._last_turn: Comparison | None = None  # last turn of the chat

    def loaded(self) -> list[tuple[str, int]]:
        """Return name and bytes of every loaded model, the most recently used first, and of the chat so far."""
        models = [(key[1], loaded.bytes) for key, loaded in reversed(list(self._models.items()))]
        chat = sum(part.history_bytes for parts in list(self._chat.values()) for part in prefix_cached(*parts))
        return [*models, *([("the chat so far", chat)] if chat else [])]

    def target(self) -> Target:
        """Return the target of the last comparison, with its own history on the shared weights."""
        target: Target = self._models[self._target].model.target()
        return target

    @property
    def tokenizer(self) -> Any:
        """Return the target's tokenizer; None if it has none."""
        return self._models[self._target].model.tokenizer

    def drafter(self, lane: Lane, spec: Comparison) -> object:
        """Return the model that the lane's method loaded; None if it needs none."""
        return None if lane.model is None else self._models[_drafter_key(lane, spec)].model

    def unload(self) -> None:
        """Drop all models; waits for a current run."""
        with self.lock:
            self._forget_chat()
            self._learners.clear()
            self._drop({*self._models})

    def forget_learned(self) -> None:
        """Drop what drafters learned in earlier runs; waits for a current run."""
        with self.lock:
            self._learners.clear()

    def memory(self, spec: Comparison) -> str:
        """Return in words what the models of a comparison need and whether it fits, from headers and configs or, of a
        model that is not on this machine, by its name. Does not ask the hub."""
        free = free_memory() if spec.target.gguf else sum(free_bytes(pick_device(_device(spec))))
        free += self._used_bytes()  # a run drops what it does not use
        _, precision = placement(spec.target, spec.dtype, _device(spec), spec.quantization, free, None)
        return _needs(spec, _sizes(spec, _models(spec), precision, None)).verdict(free)

    def check_room(self, spec: Comparison) -> None:
        """Raise ValueError if the models of a comparison do not fit into memory. Reads no weights."""
        self._make_room(spec, no_progress)

    def load(self, spec: Comparison, progress: LoadProgress = no_progress) -> None:
        """Load the models of a comparison and build every lane once.

        Raises ValueError with one line that says how to fix it.
        """
        with self.lock, self._run_scope():
            self._load(spec, progress)
            if not spec.all_remote:
                measure_passes(self.target())
            self._lanes(spec)

    def place_models(self, spec: Comparison, progress: LoadProgress = no_progress) -> None:
        """Load the models onto their devices without any computation, because the device may not be attached yet."""
        with self.lock:
            self._load(spec, progress)

    def run(
        self,
        spec: Comparison,
        cancelled: Callable[[], bool] = never_cancelled,
        progress: LoadProgress = no_progress,
        show: Callable[[RunMessage], object] = lambda message: None,
    ) -> RunTrace:
        """Run the comparison and return its trace. show: called with every message."""
        for message in self.stream(spec, cancelled, progress):
            show(message)
            if isinstance(message, Finished):
                return message.trace
        raise AssertionError("a run ends with Finished")

    def stream(
        self, spec: Comparison, cancelled: Callable[[], bool] = never_cancelled, progress: LoadProgress = no_progress
    ) -> Iterator[RunMessage]:
        """Run the comparison step by step. Closing the iterator, or `cancelled()`, stops every lane within one step. A
        lane that fails notes the reason in its trace and ends alone.

        progress: called with the share of the current stage that is done, and what is done now. Raises ValueError if
        models cannot be loaded, and Cancelled, also a ValueError, if `cancelled()` stopped what precedes the steps.
        """

        def report(share: float, what: str) -> None:
            if cancelled():
                raise Cancelled(f"stopped while {what}; the next run reuses complete files")
            progress(share, what)

        with self.lock, self._run_scope():
            yield RunStage(LOADING)
            self._load(spec, report)
            yield RunStage(MEASURING)
            used = 0 if spec.all_remote else self._prepare_target(spec, report)
            lanes = self._lanes(spec)
            self._keep_lengths(spec, lanes)
            local_target = next((lane.target for lane in lanes if isinstance(lane, LocalLane)), None)
            trace = RunTrace(
                preset=spec.id,
                config=spec.model_dump(include=TRACE_CONFIG) | asdict(spec.sampling),
                environment=environment(local_target),
                schedule=spec.schedule,
                lanes=[lane.trace for lane in lanes],
                prompt=spec.prompt,
            )
            if local_target:
                trace.notes += _notes(spec, local_target)
            yield from opened(trace)
            yield RunStage(WARMING_UP)
            for index, lane in enumerate(lanes):
                progress(index / len(lanes), f"warming up {lane.trace.name}, not timed")
                if lane.prepare(cancelled) and lane.trace.note:
                    yield Note(lane.trace.note, index)
            if local_target:  # a capture may have failed in the warm-up
                trace.environment["kernels"] = local_target.facts.kernels
            gpu = GpuClock(local_target.device if local_target else torch.device("cpu"))
            with step_threads(local_target) if local_target else nullcontext():  # every step finds them set
                yield RunStage(RACING)
                for run in range(1, spec.repeats):
                    progress((run - 1) / spec.repeats, f"run {run} of {spec.repeats}")
                    yield Note(f"run {run} of {spec.repeats} is not shown; the results pool all runs")
                    _repeat(spec.schedule, lanes, cancelled)
                for group in _groups(lanes):
                    yield from _play(group, trace, cancelled)
            if local_target and local_target.threads < used and not thread_limit.on_trial:
                trace.notes.append(
                    f"other programs use the processor: all lanes went back from {used} threads to "
                    f"{local_target.threads} during the run"
                )
            trace.notes += _disturbance_note(trace)
            if slowed := gpu.reasons():
                trace.environment["noise"] = slowed
            served = {lane.service.server: lane.service.model for lane in trace.lanes if lane.service.server}
            trace.environment |= {"served_models": served} if served else {}
            yield RunStage(COMPARING)
            compare_outputs(trace, self.target() if local_target else None, slowed, self.explains)
            self._end_run(spec, trace)
            yield Finished(trace)

    def with_chosen_lengths(self, spec: Spec) -> Spec:
        """Return the comparison with the draft lengths that its lanes got in earlier runs."""
        lanes = [
            lane.model_copy(update={"k": self._lengths.get(_length_key(spec, lane), lane.k)}) for lane in spec.lanes
        ]
        return spec.model_copy(update={"lanes": lanes})

    def _keep_lengths(self, spec: Comparison, lanes: Sequence[RunningLane]) -> None:
        if len(self._lengths) > MOST_LENGTHS:
            self._lengths.clear()
        for lane, running in zip(spec.lanes, lanes[1:], strict=True):
            if not lane.k and isinstance(length := running.trace.options.get("k"), int):
                self._lengths[_length_key(spec, lane)] = length

    def _prepare_target(self, spec: Comparison, report: LoadProgress) -> int:
        """Choose the threads of all lanes by a few passes, because other programs may use the processor now, and
        measure the costs of passes with them. Return the number of threads, 0 on another device."""
        thread_limit.start_run()
        target = self.target()
        used = before = target.threads
        if before and not self.keeps_threads:
            report(0.0, "choosing threads")
            used = fastest_threads(target, (spec.threads,) if spec.threads else thread_counts(), RUN_SECONDS)
        if used != before:
            target.pass_ms.clear()
        measure_passes(target, report=report)
        return used

    @contextmanager
    def _run_scope(self) -> Iterator[None]:
        """Drop the caches of a run afterwards, unless it was a turn of a chat that can continue."""
        try:
            yield
        finally:
            if self._last_turn is None:
                self._forget_chat()
            for models in self._learners.values():  # keep what they learned, drop the CUDA graphs of this run
                models.target.release_graphs()
                models.drafter.release_graphs()

    def _load(self, spec: Comparison, progress: LoadProgress) -> None:
        """Check the comparison, drop the state of another one, and load the models."""
        if not _is_next_turn(self._last_turn, spec):
            self._forget_chat()
        if not spec.all_remote:
            present = {_drafter_key(lane, spec) for lane in spec.lanes}
            self._learners = {key: models for key, models in self._learners.items() if key[0] in present}
        if spec.grammar.strip():
            _check_grammar(spec)
        for lane in spec.all_lanes:
            if lane.server is not None:
                check_listed(lane.server)
            _ = lane.parsed  # rejects unusable options before models are loaded
        if not spec.all_remote:
            self._load_models(spec, progress)

    def _load_models(self, spec: Comparison, progress: LoadProgress) -> None:
        """Load the models of the local lanes, and drop others if memory is short."""
        target, lanes = _target_key(spec), _local_drafters(spec)
        bytes_of = self._make_room(spec, progress)
        total = 1 + len(lanes)
        if target not in self._models:
            report = _scaled(progress, 0, total)
            loaded = load_model(
                spec.target,
                spec.dtype,
                _device(spec),
                spec.quantization,
                report,
                llamacpp=_llamacpp_settings(spec),
                cpu=CpuSettings(spec.threads, spec.bit_exact),
            )
            self._models[target] = _Loaded(loaded, bytes_of[target])
        self._target = target
        for done, (key, lane) in enumerate(lanes.items(), start=1):
            if key not in self._models:
                loader = method(model_method(lane.method, lane.options))
                report = _scaled(progress, done, total)
                report(0.0, f"loading {lane.model}")
                with checkpoint_errors(str(lane.model)):
                    self._models[key] = _Loaded(loader.load(str(lane.model), self.target(), report), bytes_of[key])
        for key in (*lanes, target):  # now the most recently used
            self._models[key] = self._models.pop(key)
        progress(1.0, "models ready")

    def _make_room(self, spec: Comparison, progress: LoadProgress) -> dict[ModelKey, int]:
        """Drop models until those to be loaded fit; return the bytes of each.

        Raises ValueError, before any download, if they do not fit even into empty memory.
        """
        models = _models(spec)
        missing = {key: name for key, name in models.items() if key not in self._models}
        if not missing:
            return {}
        progress(0.0, f"looking for {', '.join(missing.values())}")
        free = free_bytes(pick_device(_device(spec)))[0] + self._used_bytes()
        device, precision = placement(spec.target, spec.dtype, _device(spec), spec.quantization, free, progress)
        sizes = _sizes(spec, missing, precision, progress)
        needs = _needs(spec, sizes)
        needed = needs.bytes + graph_bytes(device, 2 * needs.lanes)  # target and drafter of every lane
        self._evict(needed, device, models.keys())
        if spec.target.gguf:
            needs.check_llamacpp(free_memory())
        else:
            check_memory(needs.name, needed, device, precision)
        progress(0.0, f"loading {needs.describe()}")
        return {key: sizes.get(key, NOTHING).weights for key in missing}

    def _evict(self, needed: int, device: torch.device, required: Set[ModelKey]) -> None:
        """Drop the least recently used models, except the required ones, until the budget has room for `needed`
        bytes."""
        budget = (sum(free_bytes(device)) + self._used_bytes()) // 2 if self._budget is None else self._budget
        for key in [key for key in self._models if key not in required]:
            if self._used_bytes() + needed <= budget:
                break
            self._drop({key})

    def _used_bytes(self) -> int:
        return sum(loaded.bytes for loaded in self._models.values())

    def _drop(self, keys: Set[ModelKey]) -> None:
        """Drop models, targets with their drafters."""
        self._models = {key: loaded for key, loaded in self._models.items() if keys.isdisjoint((key, key[2:]))}
        if not device_kind(best_device()).host:
            gc.collect()  # models with hooks of accelerate are in reference cycles
            device_kind(best_device()).empty_cache()

    def _lanes(self, spec: Comparison) -> Sequence[RunningLane]:
        self._last_turn = None  # a run that does not end leaves no chat
        if spec.all_remote:
            template = has_chat_template(spec.target) if spec.target.path else None
            return [ServerLane(spec, index, template) for index in range(len(spec.all_lanes))]
        tokenizer = tokenizer_of(self._models[self._target].model)
        chats = bool(tokenizer.chat_template)

        def local_lane(index: int) -> LocalLane:
            chat = bool(chat_messages(spec, chats))
            return LocalLane(spec, index, self._lane_models(spec, index, chat), tokenizer)

        servers = enumerate(lane.server for lane in spec.all_lanes)
        return [ServerLane(spec, index, chats) if server else local_lane(index) for index, server in servers]

    def _lane_models(self, spec: Comparison, index: int, chat: bool) -> LaneModels:
        """Return the models of a lane: loaded ones, unless they cache the chat or the drafter keeps what it learns.

        Raises ValueError for a drafter that does not fit.
        """
        lane = spec.all_lanes[index]
        key = _drafter_key(lane, spec), index, lane.method, *to_values(lane.parsed).items()
        models = self._learners.get(key)
        if models is None:
            if key in self._chat:
                target, model = self._chat[key]
            else:
                target, model = self.target(), self.drafter(lane, spec)
                if chat:
                    target, model = with_prefix_cache(target), with_prefix_cache(model)
            models = build_lane_models(lane, target, model)
        if method(lane.method).learns:
            self._learners = {k: other for k, other in self._learners.items() if k[1] != index} | {key: models}
        if models.prefix_cached:
            self._chat[key] = models.target, models.model
        return models

    def _end_run(self, spec: Comparison, trace: RunTrace) -> None:
        """Store the turn; drop what a failed lane has learned."""
        failed = {index for index, lane in enumerate(trace.lanes) if lane.finish == "error"}
        self._learners = {key: models for key, models in self._learners.items() if key[1] not in failed}
        if all(lane.messages and lane.finish in ("stop", "length") for lane in trace.lanes):
            self._last_turn = spec

    def _forget_chat(self) -> None:
        """Drop the chat's keys and values; keep the models."""
        for models in self._chat.values():
            for cached_target in prefix_cached(*models):
                cached_target.forget()
        self._chat.clear()
        self._last_turn = None


def _local_drafters(spec: Comparison) -> dict[ModelKey, Lane]:
    """Return a lane for every drafter that runs here with a model."""
    lanes = (lane for lane in spec.lanes if lane.model is not None and lane.server is None)
    return {_drafter_key(lane, spec): lane for lane in lanes}


def _models(spec: Comparison) -> dict[ModelKey, ModelRef]:
    """Return the names of a comparison's models, the target last."""
    drafters = {key: lane.model for key, lane in _local_drafters(spec).items() if lane.model}
    return {**drafters, _target_key(spec): spec.target}


def _target_key(spec: Comparison) -> ModelKey:
    settings = str(_llamacpp_settings(spec)) if spec.target.gguf else spec.bit_exact
    return BASELINE, spec.target, _device(spec), spec.dtype, str(spec.quantization), settings


def _drafter_key(lane: Lane, spec: Comparison) -> ModelKey:
    """Return the key of a drafter; a head belongs to the target it was loaded for."""
    return model_method(lane.method, lane.options), str(lane.model), *_target_key(spec)


def _llamacpp_settings(spec: Comparison) -> LlamaCppSettings:
    """Return the settings of GGUF models. Raises ValueError for a combination that llama.cpp does not support."""
    return LlamaCppSettings(spec.gpu_layers, spec.threads, spec.context, spec.cache_type, spec.flash_attention)


def _device(spec: Comparison) -> str:
    """Return the kind of device that a comparison runs on."""
    return best_device().type if spec.device == "auto" else spec.device


def _sizes(
    spec: Comparison, models: Mapping[ModelKey, ModelRef], precision: Precision, progress: LoadProgress | None
) -> dict[ModelKey, Footprint]:
    """Return the memory of models, as `footprint` has it. Heads inside the target's own checkpoint need none."""
    target, settings = _target_key(spec), _llamacpp_settings(spec)
    unquantised = Precision(precision.dtype)  # drafters and heads are not quantised
    return {
        key: footprint(name, precision if key == target else unquantised, settings, progress)
        for key, name in models.items()
        if key == target or name != spec.target
    }


def _needs(spec: Comparison, sizes: Mapping[ModelKey, Footprint]) -> Needs:
    """Return the memory of a run with models of these sizes."""
    target, tokens = _target_key(spec), len(spec.prompt) // 2 + spec.max_new_tokens  # 2 characters per token
    drafters = [size for key, size in sizes.items() if key != target]
    names = " with ".join([key[1] for key in reversed([*sizes])])
    return Needs(names, sizes.get(target, NOTHING), drafters, tokens, 1 + len(spec.lanes))


def _is_next_turn(last_turn: Comparison | None, spec: Comparison) -> bool:
    """Return True if the comparison is the last turn's with another message. The messages themselves are compared
    later, token by token."""
    changes = {"prompt": spec.prompt, "history": spec.history}
    return last_turn is not None and bool(spec.history) and last_turn.model_copy(update=changes) == spec


def _scaled(progress: LoadProgress, done: int, total: int) -> LoadProgress:
    return lambda share, what: progress((done + share) / total, what)


def _length_key(spec: Comparison, lane: Lane) -> tuple[str, ...]:
    return *_target_key(spec), lane.model_dump_json(exclude={"name"})


def _check_grammar(spec: Comparison) -> None:
    """Raise ValueError for a lane that cannot follow a grammar."""
    for lane in spec.all_lanes:
        if lane.server is not None:
            raise ValueError("a grammar needs local lanes, and one runs on a server; remove the grammar or the server")
        if not method(lane.method).exact:
            raise ValueError(f"method {lane.method!r} outputs tokens that a grammar forbids; choose another method")


@lru_cache(maxsize=1)
def session() -> Session:
    """Return the session of this process."""
    return Session()


def follow_up(spec: Comparison, trace: RunTrace, message: str | None = None) -> Comparison:
    """Return the comparison that continues a finished one: every lane gets the message after the baseline's answer, or
    without a message goes on with its text, so that all read one prompt. Raises ValueError if the run was not a chat,
    or without a message if that text was not cut or a server answers the chat."""
    baseline = trace.lanes[0]
    text = baseline.text if message else baseline.text.rstrip("\ufffd")  # a character that was cut
    if message is None and baseline.finish != "length":
        raise ValueError("the text of plain decoding was not cut; press Run for another one")
    if message is None and not baseline.messages:
        return spec.model_copy(update={"prompt": spec.prompt + text})
    if not all(lane.messages for lane in trace.lanes):
        raise ValueError(
            "this run continued a text; for a next turn, use a model with a chat template and turn chat on"
        )
    if len(trace.lanes) != len(spec.lanes) + 1 or any(lane.finish not in ("stop", "length") for lane in trace.lanes):
        raise ValueError("a lane has no complete answer to continue from; run the comparison again")
    if message is None and any(lane.server for lane in spec.all_lanes):
        raise ValueError("servers do not continue the answer of a chat; increase max_new_tokens")
    turns = baseline.messages[1 if spec.system else 0 :]
    begun = turns.pop()["content"] if turns[-1]["role"] == "assistant" else ""  # of an answer that was continued
    answer = {"role": "assistant", "content": begun + text}
    history, prompt = (turns, answer["content"]) if message is None else ([*turns, answer], message)
    return spec.model_copy(update={"prompt": prompt, "history": tuple(history)})


def environment(target: Target | None) -> dict[str, object]:
    """Return the facts about machine and software of a run. Without a target every lane ran on a server, and little is
    known."""
    threads = None
    if target is not None and device_kind(target.device).host:
        with step_threads(target):
            threads = target.threads or torch.get_num_threads()
    return {
        "device": device_name(target.device) if target else "servers",
        "threads": threads,
        "dtype": target.facts.precision if target else "unknown precision",
        "kernels": target.facts.kernels if target else "unknown",
        **(pass_facts(target) if target else {}),
        "clock": clock_name(target.device, target.facts.wall_time) if target else "wall time",
        "versions": versions(),
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def _notes(spec: Comparison, target: Target) -> list[str]:
    """Return what a reader should know of a run on this target."""
    spread = device_map_summary(target.model)
    cost = [checking_note(target)] if spec.target.gguf or costly_in_half(target) else []
    return [*([f"{spec.target} does not fit into one device: {spread}"] if spread else []), *target.notes, *cost]


def _disturbance_note(trace: RunTrace) -> list[str]:
    """Return a note on the steps, with several threads, during which other programs took the cores."""
    events = [e for lane in trace.lanes for run in (*lane.repeats, lane.events) for e in run[1:]]
    disturbed = sum("waited_ms" in event.notes for event in events)
    counted = "the mean of the other steps counts for them, if there are enough"
    return [f"other programs took the cores during {disturbed} of {len(events)} steps; {counted}"] if disturbed else []


def _groups(lanes: Sequence[RunningLane]) -> list[dict[int, RunningLane]]:
    """Group the lanes that run at the same time, by index: first all that may share the machine, then each exclusive
    lane."""
    exclusive = [{index: lane} for index, lane in enumerate(lanes) if lane.exclusive]
    return [{index: lane for index, lane in enumerate(lanes) if not lane.exclusive}, *exclusive]


def _repeat(schedule: str, lanes: Sequence[RunningLane], cancelled: Callable[[], bool]) -> None:
    """Run all lanes once by the same schedule without display, and add the events to the traces as a repeat."""
    hidden_lanes = [lane.empty_copy() for lane in lanes]
    for group in _groups(hidden_lanes):
        for _ in SCHEDULES[schedule]([lane.events(cancelled) for lane in group.values()]):
            pass
    for lane in hidden_lanes:
        lane.discard_turn()
    if all(lane.trace.finish in ("stop", "length") for lane in hidden_lanes):
        for shown, lane in zip(lanes, hidden_lanes, strict=True):
            shown.trace.repeats.append(without_probabilities(lane.trace.events))


def _play(lanes: Mapping[int, RunningLane], trace: RunTrace, cancelled: Callable[[], bool]) -> Iterator[RunMessage]:
    """Run the lanes by the trace's schedule. A lane whose text is complete is done immediately, the others at the
    end."""
    waiting = list(lanes)
    messages = {index: LaneSteps(trace, index) for index in lanes}
    with closing(SCHEDULES[trace.schedule]([lane.events(cancelled) for lane in lanes.values()])) as steps:
        for position, event in steps:
            index = list(lanes)[position]
            lane = lanes[index]
            trace.vocabulary |= lane.token_texts(event)
            yield messages[index].step(event)
            if lane.trace.finish != "cancelled":
                waiting.remove(index)
                yield LaneDone(index, lane.summarise())
    for index in waiting:
        if lanes[index].restarts:
            yield from _restarted(trace, index)
        done = lanes[index].summarise()
        if done.note:
            yield Note(done.note, index)
        yield LaneDone(index, done)


def _restarted(trace: RunTrace, index: int) -> Iterator[RunMessage]:
    """Yield the steps of a lane in place of its pieces, and add the texts of its draft tokens to the vocabulary."""
    lane = trace.lanes[index]
    if any(UNREPORTED in event.drafted[0] for event in lane.events):
        trace.vocabulary[str(UNREPORTED)] = "?"
    drafted = {token for event in lane.events for token in event.drafted[0] if token >= 0}
    texts = zip(lane.token_ids, lane.pieces, strict=True)
    trace.vocabulary.update({str(token): text for token, text in texts if token in drafted})
    yield Restarted(index)
    yield from map(LaneSteps(trace, index).step, lane.events)
