"""Execution of comparisons: load, schedule, collect. One run at a time per process.

`Session.stream` yields the messages of messages.py, as `replay` does for a stored run.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from functools import lru_cache
from typing import TypeVar

import torch

from specdemo.core.protocol import Target
from specdemo.core.trace import UNREPORTED, RunTrace, without_probabilities
from specdemo.engine.clock import clock_name
from specdemo.engine.comparison import Comparison, Lane
from specdemo.engine.lanes import LocalLane, RunningLane, ServerLane, chat_messages
from specdemo.engine.loop import never_cancelled
from specdemo.engine.messages import SCHEDULES, Finished, LaneDone, LaneSteps, Note, Restarted, RunMessage, opened
from specdemo.engine.model_cache import ModelCache, target_key
from specdemo.engine.session_state import SessionState
from specdemo.engine.verdict import compare_outputs
from specdemo.methods import method
from specdemo.models.cpu_threads import step_threads, thread_counts, thread_limit
from specdemo.models.devices import device_map_summary
from specdemo.models.errors import Cancelled
from specdemo.models.gguf_files import has_chat_template, is_gguf
from specdemo.models.machine import GpuClock, commit, device_name, versions
from specdemo.models.pass_cost import checking_note, costly_in_half, fastest_threads, measure_passes, pass_facts
from specdemo.models.sources import LoadProgress, no_progress
from specdemo.servers.address import check_listed

Spec = TypeVar("Spec", bound=Comparison)

MOST_LENGTHS = 100
RUN_SECONDS = 0.5  # for the choice of threads at the start of a run
TRACE_CONFIG = {*"target max_new_tokens seed dtype device quantization chat system thinking grammar".split()}


class Session:
    """Runs comparisons on the models of its cache. Other callers wait for `lock`."""

    def __init__(self, budget_bytes: int | None = None) -> None:
        """budget_bytes: see ModelCache."""
        self.lock = threading.Lock()
        self.models = ModelCache(budget_bytes)
        self.state = SessionState()
        self.explains = True  # False: runs do not examine why two texts diverge, which reads them again
        self._lengths: dict[tuple[str, ...], int] = {}  # target and lane without draft length -> the one it got

    def loaded(self) -> list[tuple[str, int]]:
        """Return name and bytes of every loaded model, the most recently used first, and of state from earlier runs."""
        return [*self.models.loaded(), *self.state.memory_use()]

    def unload(self) -> None:
        """Drop all models; waits for a current run."""
        with self.lock:
            self.state.forget()
            self.models.forget()

    def forget_learned(self) -> None:
        """Drop what drafters learned in earlier runs; waits for a current run."""
        with self.lock:
            self.state.learners.clear()

    def load(self, spec: Comparison, progress: LoadProgress = no_progress) -> None:
        """Load the models of a comparison and build every lane once.

        Raises ValueError with one line that says how to fix it.
        """
        with self.lock, self.state.run_scope():
            self._load(spec, progress)
            if not spec.all_remote:
                measure_passes(self.models.target())
            self._lanes(spec)

    def place_models(self, spec: Comparison) -> None:
        """Load the models onto their devices without any computation, because the device may not be attached yet."""
        with self.lock:
            self._load(spec, no_progress)

    def run(
        self, spec: Comparison, cancelled: Callable[[], bool] = never_cancelled, progress: LoadProgress = no_progress
    ) -> RunTrace:
        """Run the comparison and return its trace."""
        for message in self.stream(spec, cancelled, progress):
            if isinstance(message, Finished):
                return message.trace
        raise AssertionError("a run ends with Finished")

    def stream(
        self, spec: Comparison, cancelled: Callable[[], bool] = never_cancelled, progress: LoadProgress = no_progress
    ) -> Iterator[RunMessage]:
        """Run the comparison step by step. Closing the iterator, or `cancelled()`, stops every lane within one step. A
        lane that fails notes the reason in its trace and ends alone.

        Raises ValueError if models cannot be loaded, and Cancelled, also a ValueError, if `cancelled()` stopped that.
        """

        def report(share: float, what: str) -> None:
            if cancelled():
                raise Cancelled(f"stopped while {what}; the next run reuses complete files")
            progress(share, what)

        with self.lock, self.state.run_scope():
            self._load(spec, report)
            used = 0 if spec.all_remote else self._prepare_target(spec)
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
            for index, lane in enumerate(lanes):
                if lane.prepare(cancelled) and lane.trace.note:
                    yield Note(lane.trace.note, index)
            if local_target:  # a capture may have failed in the warm-up
                trace.environment["kernels"] = local_target.facts.kernels
            gpu = GpuClock(local_target.device if local_target else torch.device("cpu"))
            with step_threads(local_target) if local_target else nullcontext():  # every step finds them set
                for run in range(1, spec.repeats):
                    yield Note(f"run {run} of {spec.repeats} is not shown; the results pool all runs")
                    _repeat(spec.schedule, lanes, cancelled)
                for group in _groups(lanes):
                    yield from _play(group, trace, cancelled)
            if local_target and local_target.threads < used:
                trace.notes.append(
                    f"other programs use the processor: all lanes went back from {used} threads to "
                    f"{local_target.threads} during the run"
                )
            trace.notes += _disturbance_note(trace)
            slowed = gpu.reasons()
            if slowed:
                trace.environment["noise"] = slowed
            served = {lane.service.server: lane.service.model for lane in trace.lanes if lane.service.server}
            trace.environment |= {"served_models": served} if served else {}
            compare_outputs(trace, self.models.target() if local_target else None, slowed, self.explains)
            self.state.end_run(spec, trace)
            yield Finished(trace)

    def target(self) -> Target:
        """Return the target of the last comparison, with its own history."""
        return self.models.target()

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

    def _prepare_target(self, spec: Comparison) -> int:
        """Choose the threads of all lanes by a few passes, because other programs may use the processor now, and
        measure the costs of passes with them. Return the number of threads, 0 on another device."""
        thread_limit.start_run()
        target = self.models.target()
        used = before = target.threads
        if before:
            used = fastest_threads(target, (spec.threads,) if spec.threads else thread_counts(), RUN_SECONDS)
        if used != before:
            target.pass_ms.clear()
        measure_passes(target)
        return used

    def _load(self, spec: Comparison, progress: LoadProgress) -> None:
        self.state.prepare(spec)
        if spec.grammar.strip():
            _check_grammar(spec)
        for lane in spec.all_lanes:
            if lane.server is not None:
                check_listed(lane.server)
            _ = lane.parsed  # rejects unusable options before models are loaded
        if not spec.all_remote:
            self.models.load(spec, progress)

    def _lanes(self, spec: Comparison) -> Sequence[RunningLane]:
        self.state.begin_run()
        if not spec.prompt.strip():
            raise ValueError("the prompt is empty; write at least one word")
        if spec.all_remote:
            template = has_chat_template(spec.target)
            return [ServerLane(spec, index, template) for index in range(len(spec.all_lanes))]
        tokenizer = self.models.tokenizer
        if tokenizer is None:
            raise ValueError(f"{spec.target} has no tokenizer; put its tokenizer.json into the same folder")
        chats = bool(tokenizer.chat_template)

        def local_lane(index: int) -> LocalLane:
            lane = spec.all_lanes[index]
            chat = bool(chat_messages(spec, chats))
            models = self.state.lane_models(
                spec, index, chat, lambda: (self.models.target(), self.models.drafter(lane, spec))
            )
            return LocalLane(spec, index, models, tokenizer)

        servers = enumerate(lane.server for lane in spec.all_lanes)
        return [ServerLane(spec, index, chats) if server else local_lane(index) for index, server in servers]


def _length_key(spec: Comparison, lane: Lane) -> tuple[str, ...]:
    return *target_key(spec), lane.model_dump_json(exclude={"name"})


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


def follow_up(spec: Comparison, trace: RunTrace, message: str) -> Comparison:
    """Return the comparison that continues a finished one: every lane gets the message after the baseline's answer, so
    that all read one prompt. Raises ValueError if the run was not a chat."""
    if not all(lane.messages for lane in trace.lanes):
        raise ValueError(
            "this run continued a text; for a next turn, use a model with a chat template and turn chat on"
        )
    if len(trace.lanes) != len(spec.lanes) + 1 or any(lane.finish not in ("stop", "length") for lane in trace.lanes):
        raise ValueError("a lane has no complete answer to continue from; run the comparison again")
    answer = {"role": "assistant", "content": trace.lanes[0].text}
    return spec.model_copy(
        update={"prompt": message, "history": (*trace.lanes[0].messages[1 if spec.system else 0 :], answer)}
    )


def environment(target: Target | None) -> dict[str, object]:
    """Return the facts about machine and software of a run. Without a target every lane ran on a server, and little is
    known."""
    threads = None
    if target is not None and target.device.type == "cpu":
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
    cost = [checking_note(target)] if is_gguf(spec.target) or costly_in_half(target) else []
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
