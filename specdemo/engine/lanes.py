"""Lanes of a run: one interface for local decoding and for servers.

A lane is prepared untimed, then read event by event while it fills its trace. A lane that fails ends alone, with one
line in its trace; the other lanes continue.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from traceback import walk_tb

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specdemo.core.protocol import Budget, GenerationConfig, Grammar, Target
from specdemo.core.rules import DEFAULT_RULE, RULES
from specdemo.core.settings import BaseOptions, to_values
from specdemo.core.tally import summarise
from specdemo.core.trace import LaneTrace, StepEvent
from specdemo.core.tree import ABSENT
from specdemo.costs.lengths import DEFAULT_LENGTH, USUAL_LENGTHS, usual_length, usual_tree
from specdemo.engine.comparison import Comparison, Lane
from specdemo.engine.loop import generate, warm_up
from specdemo.methods import BASELINE, build_drafter, load_drafter, method
from specdemo.methods.base import Method
from specdemo.models.devices import device_kind
from specdemo.models.errors import typed_line
from specdemo.models.grammar import compile_grammar
from specdemo.models.machine import EnergyMeter
from specdemo.models.prefix_reuse import PrefixCachedLlamaCpp, PrefixCachedTarget, prefix_cached
from specdemo.models.text import Detokenizer, encode, token_text
from specdemo.servers import lane as servers
from specdemo.servers.address import check_listed, machine
from specdemo.servers.engines import draft_request

WARM_UP_PROMPT = 64  # most tokens of a prompt that a CPU reads before a run
MAX_LENGTH = 500  # characters of a reason

StopCheck = Callable[[], bool]
Events = Generator[StepEvent, None, None]
ChatMessage = dict[str, str]  # role and content


def reason(error: Exception) -> str:
    """Return one line: the message if it is meant for users, else with the error's type and location."""
    line = str(error).strip().partition("\n")[0][:MAX_LENGTH].encode("utf-8", "replace").decode()
    if line and isinstance(error, RuntimeError | ValueError):
        return line
    *_, (frame, number) = walk_tb(error.__traceback__)
    return f"{typed_line(error)} ({Path(frame.f_code.co_filename).name}:{number})"


def clear_traceback(error: BaseException | None) -> None:
    """Clear the traceback, so that its frames and their KV caches can be freed."""
    while error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


@dataclass(frozen=True, slots=True)
class LaneModels:
    """Target with its own history and its drafter. model: the drafter's model. failure: why the drafter could not be
    built; it is plain decoding then."""

    target: Target
    model: object
    drafter: Method
    failure: str = ""

    @property
    def prefix_cached(self) -> list[PrefixCachedTarget | PrefixCachedLlamaCpp]:
        """Return the models that cache a text between turns."""
        return prefix_cached(self.target, self.model)


def build_lane_models(lane: Lane, target: Target, model: object) -> LaneModels:
    """Build the drafter. Only ValueError is raised, because it has advice for the user; other errors fail the lane and
    not the run."""
    try:
        return LaneModels(target, model, build_drafter(lane.method, target, model, lane.parsed))
    except ValueError:
        raise
    except Exception as error:
        failure = reason(error)
        clear_traceback(error)
        return LaneModels(target, model, load_drafter(BASELINE, target), failure)


class RunningLane(ABC):
    """A lane of a run. trace: grows with every event; its `finish` is `cancelled` until the text is complete."""

    exclusive = False  # True: no other lane runs at the same time
    restarts = False  # True once `trace` has other events than those that were read
    peak_bytes = 0

    def __init__(self, trace: LaneTrace) -> None:
        self.trace = trace

    def prepare(self, cancelled: StopCheck) -> bool:
        """Run all code paths once, untimed. Return True if that added notes for the user to the trace."""
        return False

    @abstractmethod
    def empty_copy(self) -> "RunningLane":
        """Return the same lane with an empty trace. It shares models, drafter and CUDA graphs, so it is prepared
        already."""

    def discard_turn(self) -> None:
        """Drop what was cached in the last run."""

    def events(self, cancelled: StopCheck) -> Events:
        """Decode, one event per step. Never raises an `Exception`: a failure ends the lane and is noted in its
        trace."""
        try:
            with closing(self._events(cancelled)) as events:
                yield from events
        except Exception as error:
            if self.trace.finish == "cancelled":
                self.trace.finish = "error"
            self.trace.note = reason(error)
            clear_traceback(error)

    @abstractmethod
    def _events(self, cancelled: StopCheck) -> Events: ...

    def token_texts(self, event: StepEvent) -> dict[str, str]:
        """Return the text of each draft token, and of the target's most likely tokens, by id as a string."""
        return {}

    def summarise(self) -> LaneTrace:
        """Return the trace with its summary."""
        self.trace.summary = summarise(self.trace, self.peak_bytes)
        return self.trace


class LocalLane(RunningLane):
    """A lane that decodes locally. Raises ValueError for a prompt that does not fit."""

    def __init__(self, spec: Comparison, index: int, models: LaneModels, tokenizer: PreTrainedTokenizerBase) -> None:
        lane = _with_length(spec.all_lanes[index], models)
        options = to_values(lane.parsed)
        messages = chat_messages(spec, bool(tokenizer.chat_template))
        room = models.target.max_length - spec.max_new_tokens
        prompt_ids = encode(tokenizer, messages or spec.prompt, room, spec.thinking)
        self._accept = lane.accept_rule()
        trace_options = {
            **options,
            **({"k": lane.k} if lane.k else {}),
            **({"model": lane.model} if lane.model else {}),
        }
        of_rule = to_values(self._accept) if isinstance(self._accept, BaseOptions) else {}
        if lane.acceptance != DEFAULT_RULE or spec.temperature:  # at temperature 0 all lossless rules are one
            trace_options |= {"acceptance": lane.acceptance}
            trace_options |= {f"acceptance.{name}": value for name, value in of_rule.items()}
        unset = [name for name in options if name not in spec.all_lanes[index].options]
        unset += ["k"] if lane.k != spec.all_lanes[index].k else []
        unset += [f"acceptance.{name}" for name in of_rule if name not in lane.acceptance_options]
        name, exact = spec.lane_names[index], _exact(lane)
        trace = LaneTrace(name, lane.method, trace_options, exact, prompt_ids, messages=messages, defaults=unset)
        super().__init__(trace)
        _note_differences(self.trace, spec, lane)
        self.target, self._models = models.target, models
        self._stop = self.target.stop_token_ids
        if not method(lane.method).exact:
            self.trace.note = "; ".join(filter(None, (self.trace.note, models.drafter.note)))
            self._stop = ()
        grammar = _grammar(spec, self.target, tokenizer)
        self._config = GenerationConfig(spec.max_new_tokens, spec.sampling, lane.budget, spec.seed, self._stop, grammar)
        self._spec, self._index, self._tokenizer = spec, index, tokenizer
        self._text = Detokenizer(tokenizer, prompt_ids)
        self._other_bytes = 0  # bytes on the device that belong to other lanes

    def empty_copy(self) -> "LocalLane":
        return LocalLane(self._spec, self._index, self._models, self._tokenizer)

    def prepare(self, cancelled: StopCheck) -> bool:
        try:
            warm_up(*self._warm_up_inputs(), self._accept, cancelled)
            self.discard_turn()
            return self._add_notes()
        except Exception as error:  # the timed run raises it again and notes it in the trace
            clear_traceback(error)
            for cached_target in self._models.prefix_cached:
                cached_target.forget()
            return False

    def discard_turn(self) -> None:
        for cached_target in self._models.prefix_cached:
            cached_target.discard_turn()

    def summarise(self) -> LaneTrace:
        if self.trace.finish != "error":
            self._add_notes()
        return super().summarise()

    def _add_notes(self) -> bool:
        """Add the notes of target, drafter and rule that the trace does not have yet. Return True if there were any."""
        drafter = self._models.drafter
        notes = [self.target.note, drafter.note, drafter.graph_note, self._accept.note]
        max_length = drafter.max_length
        if max_length is not None and max_length < len(self.trace.prompt_ids) + self._config.max_new_tokens:
            notes.append(f"the drafter reads at most {max_length} tokens and drafts nothing after them")
        before = self.trace.note
        for note in (note.rstrip(".") for note in notes):
            if note not in (self.trace.note or ""):
                self.trace.note = f"{self.trace.note}; {note}" if self.trace.note else note
        return self.trace.note != before

    def _events(self, cancelled: StopCheck) -> Events:
        self._reset_peak()
        meter = EnergyMeter(self.target.device) if self._spec.schedule == "sequential" else None  # one lane at a time
        with closing(generate(*self._inputs(), accept=self._accept, cancelled=cancelled)) as events:
            for event in events:
                self.peak_bytes = max(self.peak_bytes, self._memory())
                if meter and (joules := meter.joules()) is not None:
                    event = replace(event, notes={**event.notes, "joules": joules})
                if not event.index and self.target.cached_tokens:
                    event = replace(event, notes={**event.notes, "kept": float(self.target.cached_tokens)})
                self._record(event)
                yield event
                self._reset_peak()

    def _inputs(self) -> tuple[Target, Method, Tensor, GenerationConfig]:
        """Return the arguments of `generate`. Raises RuntimeError for a drafter that could not be built."""
        if self._models.failure:
            raise RuntimeError(self._models.failure)
        prompt = torch.tensor([self.trace.prompt_ids], device=self.target.device)
        return self.target, self._models.drafter, prompt, self._config

    def _warm_up_inputs(self) -> tuple[Target, Method, Tensor, GenerationConfig]:
        """Return the arguments of `generate` with the end of a long prompt only, because a CPU reads it for as long as
        the run itself does. A chat reads all of it, so that what it keeps stays."""
        target, drafter, prompt, config = self._inputs()
        left_out = prompt.shape[1] - WARM_UP_PROMPT
        chat = any(prefix.length for prefix in self._models.prefix_cached)
        if left_out > 0 and device_kind(target.device).host and not chat:
            prompt = prompt[:, left_out:]
            config = replace(config, max_new_tokens=config.max_new_tokens + left_out)  # reserves as much memory
        return target, drafter, prompt, config

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

    def token_texts(self, event: StepEvent) -> dict[str, str]:
        tokens = {*event.drafted[0], *(token for row in event.top for token, _ in row)} - {ABSENT}
        return {str(token): token_text(self._tokenizer, token) for token in sorted(tokens)}

    def _reset_peak(self) -> None:
        row, device = device_kind(self.target.device), self.target.device
        row.reset_peak(device)
        self._other_bytes = row.allocated(device) - self._model_bytes

    def _memory(self) -> int:
        """Return the memory of this lane in its last step: weights and caches and, if the device counts it, temporary
        tensors."""
        return max(self._model_bytes, device_kind(self.target.device).peak(self.target.device) - self._other_bytes)

    @property
    def _model_bytes(self) -> int:
        return sum(part.weight_bytes + part.history_bytes for part in (self.target, self._models.drafter))


class ServerLane(RunningLane):
    """A lane on a server. No local lane runs at the same time.

    template: the target has a chat template; None: unknown, because no lane is local.
    """

    exclusive = True

    def __init__(self, spec: Comparison, index: int, template: bool | None) -> None:
        self._made_from = (spec, index, template)
        lane = spec.all_lanes[index]
        assert lane.server is not None
        messages = chat_messages(spec, _wants_chat(spec) if template is None else template)
        check_listed(lane.server)
        super().__init__(LaneTrace(spec.lane_names[index], lane.method, {}, _exact(lane), [], messages=messages))
        _note_differences(self.trace, spec, lane)
        config = GenerationConfig(spec.max_new_tokens, spec.sampling, Budget(0, 0), spec.seed)
        forms = ("chat/completions",) if messages else _forms(spec, template)
        # lanes on one server differ by fields of the request
        draft = draft_request(lane.model, lane.budget.depth) if lane.model and lane.server == spec.server else {}
        if draft:
            self.trace.note = f"drafts by its request ({', '.join(draft)}); a server that ignores this decodes plainly"
        prompt = messages or spec.prompt
        self._stream = servers.RemoteLane(
            self.trace, lane.server, lane.served_model, spec.target, prompt, config, forms, spec.thinking, draft
        )

    def empty_copy(self) -> "ServerLane":
        return ServerLane(*self._made_from)

    def _events(self, cancelled: StopCheck) -> Events:
        yield from self._stream.events(cancelled)
        self.restarts = self._stream.has_steps


def _wants_chat(spec: Comparison) -> bool:
    return bool(spec.chat or spec.system or spec.history) or spec.thinking != "default"


def _forms(spec: Comparison, template: bool | None) -> tuple[servers.Form, ...]:
    """Return the endpoints that accept the prompt. A server's chat endpoint applies the same template as `encode`."""
    if template is None:
        return ("chat/completions", "completions") if spec.chat is None else ("completions",)
    return ("completions",) if template else ("completions", "chat/completions")


def chat_messages(spec: Comparison, template: bool) -> list[ChatMessage]:
    """Return the messages that the lanes answer, or whose last one, an answer, they continue; empty if they complete a
    text. Raises ValueError if the chat template is missing."""
    chat = template if spec.chat is None else spec.chat
    if chat and not template:
        raise ValueError(f"{spec.target} has no chat template, so it only completes texts; turn chat off")
    if not chat and spec.system:
        raise ValueError("text completion has no system prompt; leave it empty or turn chat on")
    if not chat and spec.thinking != "default":
        raise ValueError("text completion has no thinking mode; leave thinking at default or turn chat on")
    system = [{"role": "system", "content": spec.system}] if spec.system else []
    answered = not spec.history or spec.history[-1]["role"] == "assistant"
    last = {"role": "user" if answered else "assistant", "content": spec.prompt}
    return [*system, *map(dict, spec.history), last] if chat else []


def _grammar(spec: Comparison, target: Target, tokenizer: PreTrainedTokenizerBase) -> Grammar | None:
    """Return the compiled grammar of the comparison. Raises ValueError with one line for an invalid one."""
    if not spec.grammar.strip():
        return None
    return compile_grammar(spec.grammar, tokenizer, target.vocab_size, tuple(target.stop_token_ids))


def _with_length(lane: Lane, models: LaneModels) -> Lane:
    """Return the lane with a draft length, and on a CPU a tree with a number of nodes, chosen from the measured costs
    of the target's passes where it has none.

    Drafting is expected to take the time of the target's passes per byte of the weights that it reads.
    """
    target, drafter, nodes = models.target, models.drafter, lane.tree_nodes
    share = target.pass_ms.get(1, 0.0) / max(target.facts.pass_bytes or target.weight_bytes, 1)

    def draft_ms(k: int) -> float:
        return share * drafter.read_bytes(k)

    if lane.chooses_nodes and target.pass_ms and device_kind(target.device).host:
        k, nodes = usual_tree(target.pass_ms, draft_ms, nodes, lane.k)
        return lane.changed(k=k, options={**lane.options, "nodes": nodes})
    if lane.k or lane.method == BASELINE:
        return lane
    k = usual_length(target.pass_ms, draft_ms)
    if drafter.chooses_length:
        k = USUAL_LENGTHS[-1]
    elif nodes:  # a pass over a tree has the width of the tree
        k = DEFAULT_LENGTH
    return lane.model_copy(update={"k": max(k, method(lane.method).least_k(lane.parsed))})


def _exact(lane: Lane) -> bool:
    return RULES[lane.acceptance].lossless and method(lane.method).exact


def _note_differences(trace: LaneTrace, spec: Comparison, lane: Lane) -> None:
    """Note differences from the baseline that affect the speed as well."""
    other = "machine" if machine(lane.server) != machine(spec.server) else "software"
    if other == "machine" or (lane.server is None) != (spec.server is None):
        trace.note = f"its {other} differs from the baseline's, so the speed-up is not due to speculation only"
