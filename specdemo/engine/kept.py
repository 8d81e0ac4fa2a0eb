"""State that survives a run: drafters that learn, and models that cache the chat so far."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from specdemo.core.trace import RunTrace
from specdemo.engine.comparison import Comparison
from specdemo.engine.failure import let_go, reason
from specdemo.engine.model_cache import drafter_key
from specdemo.methods import BASELINE, load_drafter, method, validate_options
from specdemo.methods.base import Method
from specdemo.models.load import LoadedModel
from specdemo.models.prefix_reuse import Remembering
from specdemo.models.target import HFTarget

Key = tuple[object, ...]  # key of the drafter's model, index of the lane, method and options
Models = tuple[HFTarget, object]  # the target of a lane, and the model its drafter is built from


@dataclass(frozen=True, slots=True)
class Pair:
    """Target with its own history and its drafter. model: the drafter's model. failure: why the drafter could not be
    built; it is plain decoding then."""

    target: HFTarget
    model: object
    drafter: Method
    failure: str = ""

    @property
    def memories(self) -> list[Remembering]:
        """Return the models that cache a text between turns."""
        return _memories(self.target, self.model)


class Kept:
    """State of the last comparison. The chat is dropped by the first run that is not its next turn."""

    def __init__(self) -> None:
        self.learners: dict[Key, Pair] = {}  # one per lane
        self.chat: dict[Key, Models] = {}
        self._turn: Comparison | None = None  # last turn of the chat

    def held(self) -> list[tuple[str, int]]:
        """Return name and bytes of what is stored in addition to the models."""
        chat = sum(memory.history_bytes for models in list(self.chat.values()) for memory in _memories(*models))
        return [("the chat so far", chat)] if chat else []

    @contextmanager
    def around_run(self) -> Iterator[None]:
        """Drop the caches of a run afterwards, unless it was a turn of a chat that can continue."""
        try:
            yield
        finally:
            if self._turn is None:
                self.forget_chat()
            for pair in self.learners.values():  # keep what they learned, drop the CUDA graphs of this run
                pair.target.unrecord()
                pair.drafter.unrecord()

    def prepare(self, spec: Comparison) -> None:
        """Drop the state of another comparison, before models are loaded."""
        if not _is_next(self._turn, spec):
            self.forget_chat()
        if not spec.all_remote:
            present = {drafter_key(lane, spec) for lane in spec.lanes}
            self.learners = {key: pair for key, pair in self.learners.items() if key[0] in present}

    def begin(self) -> None:
        """Mark the start of a run; one that does not reach `end_run` leaves no chat."""
        self._turn = None

    def end(self, spec: Comparison, trace: RunTrace) -> None:
        """Store the turn; drop what a failed lane has learned."""
        failed = {index for index, lane in enumerate(trace.lanes) if lane.finish == "error"}
        self.learners = {key: pair for key, pair in self.learners.items() if key[1] not in failed}
        self._turn = spec if all(lane.messages and lane.finish in ("stop", "length") for lane in trace.lanes) else None

    def pair(self, spec: Comparison, index: int, chat: bool, fresh: Callable[[], Models]) -> Pair:
        """Return the models of a lane: loaded with `load`, unless they cache the chat or the drafter keeps what it
        learns.

        Raises ValueError for a drafter that does not fit.
        """
        lane = spec.all_lanes[index]
        options = validate_options(lane.method, dict(lane.options))
        key = drafter_key(lane, spec), index, lane.method, *options.items()
        pair = self.learners.get(key)
        if pair is None:
            target, model = self.chat.get(key) or (map(_remembering, fresh()) if chat else fresh())
            pair = _pair(lane.method, target, model, options)
        if method(lane.method).learns:
            self.learners = {k: p for k, p in self.learners.items() if k[1] != index} | {key: pair}
        if pair.memories:
            self.chat[key] = pair.target, pair.model
        return pair

    def forget_chat(self) -> None:
        """Drop the chat's keys and values; keep the models."""
        for models in self.chat.values():
            for memory in _memories(*models):
                memory.forget()
        self.chat.clear()
        self._turn = None

    def forget(self) -> None:
        """Drop the chat and the drafters that have learned."""
        self.forget_chat()
        self.learners.clear()


def _pair(name: str, target: HFTarget, model: object, options: dict[str, object]) -> Pair:
    """Build the drafter. Only ValueError is raised, because it has advice for the user; other errors fail the lane and
    not the run."""
    try:
        return Pair(target, model, load_drafter(name, target, model, **options))
    except ValueError:
        raise
    except Exception as error:
        why = reason(error)
        let_go(error)
        return Pair(target, model, load_drafter(BASELINE, target), why)


def _is_next(turn: Comparison | None, spec: Comparison) -> bool:
    """Return True if the comparison is the last turn's with another message. The messages themselves are compared
    later, token by token."""
    said = {"prompt": spec.prompt, "history": spec.history}
    return turn is not None and bool(spec.history) and turn.model_copy(update=said) == spec


def _remembering(model: object) -> Any:
    """Return the model with a prefix cache; a head is returned unchanged."""
    if not isinstance(model, HFTarget | LoadedModel):
        return model
    return Remembering(model.model, model.tokenizer, model.name, notes=model.notes)


def _memories(*models: object) -> list[Remembering]:
    return [model for model in models if isinstance(model, Remembering)]
