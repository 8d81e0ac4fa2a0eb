"""The lanes of a run: one interface for what decodes here and what decodes on a server.

A lane is prepared off the clock, then read event by event while it writes its trace. One that fails ends alone, with
one line of why in its trace; the other lanes go on.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specdemo.core.accept import accept_rule
from specdemo.core.protocol import Budget, GenerationConfig
from specdemo.core.tally import summarise
from specdemo.core.trace import LaneTrace, StepEvent
from specdemo.core.tree import ABSENT
from specdemo.engine.comparison import Comparison, Lane
from specdemo.engine.failure import let_go, reason
from specdemo.engine.kept import Pair
from specdemo.engine.loop import generate
from specdemo.engine.warm_up import warm_up
from specdemo.methods import BASELINE, method, validate_options
from specdemo.methods.base import Method
from specdemo.models.devices import kind
from specdemo.models.prefix_reuse import Remembering
from specdemo.models.target import HFTarget
from specdemo.models.text import Detokenizer, encode, token_text
from specdemo.servers import lane as servers
from specdemo.servers.address import check_listed, host, machine

Cancelled = Callable[[], bool]
Events = Generator[StepEvent, None, None]
Message = dict[str, str]  # role and content


class RunningLane(ABC):
    """trace: grows with every event that is read; its `finish` stays `cancelled` until the text is whole."""

    alone = False  # True: no other lane runs meanwhile
    peak_bytes = 0

    def __init__(self, trace: LaneTrace) -> None:
        self.trace = trace

    def prepare(self, cancelled: Cancelled) -> list[str]:
        """Run what it runs once, off the clock; -> what is to be known of it beforehand."""
        return []

    def rewind(self) -> None:
        """Remember nothing of the last run."""

    def events(self, cancelled: Cancelled) -> Events:
        """Never raises an `Exception`: whatever fails ends the lane, and its trace says why."""
        try:
            with closing(self._events(cancelled)) as events:
                yield from events
        except Exception as error:
            if self.trace.finish == "cancelled":
                self.trace.finish = "error"
            self.trace.note = reason(error)
            let_go(error)

    @abstractmethod
    def _events(self, cancelled: Cancelled) -> Events: ...

    def drafted(self, event: StepEvent) -> list[str]:
        """The text of each drafted token alone; empty where it is absent."""
        return [""] * len(event.drafted[0])

    def summarise(self) -> LaneTrace:
        """The trace, with its summary."""
        self.trace.summary = summarise(self.trace, self.peak_bytes)
        return self.trace


class LocalLane(RunningLane):
    """Raises ValueError for a prompt that does not fit."""

    def __init__(self, spec: Comparison, index: int, pair: Pair, tokenizer: PreTrainedTokenizerBase) -> None:
        lane = spec.all_lanes[index]
        options = validate_options(lane.method, dict(lane.options))
        messages = chat_of(spec, index, bool(tokenizer.chat_template))
        prompt_ids = encode(tokenizer, messages or spec.prompt, pair.target.max_length - spec.max_new_tokens)
        self._accept = accept_rule(lane.acceptance)
        shown = {**options, **({"k": lane.k} if lane.k else {}), **({"model": lane.model} if lane.model else {})}
        if lane.acceptance != "lossless":
            shown["acceptance"] = lane.acceptance
        unset = [name for name in options if name not in lane.options]
        trace = LaneTrace(
            lane_name(lane), lane.method, shown, _exact(lane), prompt_ids, messages=messages, defaults=unset
        )
        super().__init__(trace)
        _note_unlike(self.trace, spec, lane)
        own = method(lane.method).exact
        if not own:
            self.trace.note = "; ".join(filter(None, (self.trace.note, pair.drafter.note)))
        self._stop = pair.target.stop_token_ids if own else ()
        self._config = GenerationConfig(spec.max_new_tokens, spec.sampling, lane.budget, spec.seed, self._stop)
        self.target, self._pair = pair.target, pair
        self._tokenizer = tokenizer
        self._text = Detokenizer(tokenizer, prompt_ids)
        self._others = 0  # bytes on the device that are not this lane's

    def prepare(self, cancelled: Cancelled) -> list[str]:
        try:
            warm_up(*self._task(), self._accept, cancelled)
            self.rewind()
            return self._notes()
        except Exception as error:  # a lane that cannot run says so in its own race, not here
            let_go(error)
            for memory in self._pair.memories:
                memory.forget()
            return []

    def rewind(self) -> None:
        for memory in self._pair.memories:
            memory.rewind()

    def _notes(self) -> list[str]:
        drafter = self._pair.drafter
        notes = [self.target.note, drafter.note, drafter.unrecorded, self._accept.note]
        reads = drafter.max_length
        if reads is not None and reads < len(self.trace.prompt_ids) + self._config.max_new_tokens:
            notes.append(f"its draft reads {reads} tokens; nothing is drafted behind them")
        return [note for note in notes if note and note not in (self.trace.note or "")]

    def _events(self, cancelled: Cancelled) -> Events:
        self._forget_peak()
        with closing(generate(*self._task(), accept=self._accept, cancelled=cancelled)) as events:
            for event in events:
                self.peak_bytes = max(self.peak_bytes, self._memory())
                event = self._noted(event)
                self._record(event)
                yield event
                self._forget_peak()

    def _task(self) -> tuple[HFTarget, Method, Tensor, GenerationConfig]:
        """What is decoded, and by whom. Raises RuntimeError for a drafter that could not be built."""
        if self._pair.failure:
            raise RuntimeError(self._pair.failure)
        prompt = torch.tensor([self.trace.prompt_ids], device=self.target.device)
        return self.target, self._pair.drafter, prompt, self._config

    def _noted(self, event: StepEvent) -> StepEvent:
        """The prefill's notes have kept: the tokens of the prompt that the target did not read again."""
        kept = self.target.kept if isinstance(self.target, Remembering) and not event.index else 0
        return replace(event, notes={**event.notes, "kept": float(kept)}) if kept else event

    def _record(self, event: StepEvent) -> None:
        trace = self.trace
        trace.token_ids += event.emitted[0]
        pieces = self._text.push(event.emitted[0])
        if trace.token_ids[-1] in self._stop:
            trace.finish = "stop"
        elif len(trace.token_ids) >= self._config.max_new_tokens:
            trace.finish = "length"
        if trace.finish != "cancelled":
            pieces[-1] += self._text.flush()
        trace.events.append(event)
        trace.pieces += pieces
        trace.text += "".join(pieces)

    def drafted(self, event: StepEvent) -> list[str]:
        return ["" if t == ABSENT else token_text(self._tokenizer, t) for t in event.drafted[0]]

    def _forget_peak(self) -> None:
        row, device = kind(self.target.device), self.target.device
        row.forget_peak(device)
        self._others = row.allocated(device) - self._held

    def _memory(self) -> int:
        """Of this lane alone in its last step: what it holds and, where the device counts it, what came and went."""
        return max(self._held, kind(self.target.device).peak(self.target.device) - self._others)

    @property
    def _held(self) -> int:
        """Weights and caches, counted."""
        return sum(held.weight_bytes + held.history_bytes for held in (self.target, self._pair.drafter))


class RemoteLane(RunningLane):
    """On a server, alone: nothing here runs meanwhile. `template`: whether the target has a chat template; None: no
    lane is here to know."""

    alone = True

    def __init__(self, spec: Comparison, index: int, template: bool | None) -> None:
        lane = spec.all_lanes[index]
        assert lane.server is not None
        messages = chat_of(
            spec, index, bool(spec.chat or spec.system or spec.history) if template is None else template
        )
        drafts = "" if lane.method == BASELINE else f", k = {lane.k}"
        name = lane.name or f"{lane_name(lane)}{drafts} on {host(check_listed(lane.server))}"  # as the preset claims
        super().__init__(LaneTrace(name, lane.method, {}, _exact(lane), [], messages=messages))
        _note_unlike(self.trace, spec, lane)
        config = GenerationConfig(spec.max_new_tokens, spec.sampling, Budget(0, 0), spec.seed)
        forms = ("chat/completions",) if messages else _forms(spec, template)
        self._stream = servers.RemoteLane(
            self.trace, lane.server, lane.served_model, spec.target, messages or spec.prompt, config, forms
        )

    def _events(self, cancelled: Cancelled) -> Events:
        for event, _ in self._stream.events(cancelled):
            yield event


def _forms(spec: Comparison, template: bool | None) -> tuple[servers.Form, ...]:
    """How a text may be put. A server's chat interface applies the same template as `encode`."""
    if template is None:
        return ("chat/completions", "completions") if spec.chat is None else ("completions",)
    return ("completions",) if template else ("completions", "chat/completions")


def chat_of(spec: Comparison, lane: int, template: bool) -> list[Message]:
    """The chat a lane answers; empty when it completes a text. Raises ValueError where there is no template for it."""
    chat = template if spec.chat is None else spec.chat
    if chat and not template:
        raise ValueError(f"{spec.target} has no chat template, so it completes texts alone; turn chat off")
    if not chat and spec.system:
        raise ValueError("a text that is completed has no system prompt; leave it empty or turn chat on")
    system = [{"role": "system", "content": spec.system}] if spec.system else []
    before = [dict(message) for message in spec.history[lane]] if spec.history else []
    return [*system, *before, {"role": "user", "content": spec.prompt}] if chat else []


def lane_name(lane: Lane) -> str:
    """Its own, or else its method's title and its model."""
    if lane.name:
        return lane.name
    title: str = method(lane.method).title
    return title if lane.model is None else f"{title} ({lane.model.partition('@')[0].rpartition('/')[2]})"


def _exact(lane: Lane) -> bool:
    return accept_rule(lane.acceptance).exact and method(lane.method).exact


def _note_unlike(trace: LaneTrace, spec: Comparison, lane: Lane) -> None:
    """Say what else but speculation makes a lane faster or slower than the baseline."""
    other = "machine" if machine(lane.server) != machine(spec.server) else "software"
    if other == "machine" or (lane.server is None) != (spec.server is None):
        trace.note = f"its {other} is not the baseline's, so the ratio of speeds is not speculation's alone"
