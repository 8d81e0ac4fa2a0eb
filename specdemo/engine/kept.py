"""What outlives a run: the drafters that get better with use, and the models that remember the chat so far."""

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

Key = tuple[object, ...]  # what was loaded for a lane's drafter, the lane's index, its method and options
Models = tuple[HFTarget, object]  # of a lane: its target, and what its drafter is built from


@dataclass(frozen=True, slots=True)
class Pair:
    """A target with a history of its own and its drafter. model: what that was built from. failure: why it could not
    be built, and is that of plain decoding."""

    target: HFTarget
    model: object
    drafter: Method
    failure: str = ""

    @property
    def memories(self) -> list[Remembering]:
        """The models of the pair that remember a text from turn to turn."""
        return _memories(self.target, self.model)


class Kept:
    """Of the last comparison. A chat is forgotten with the first run that is not its next turn."""

    def __init__(self) -> None:
        self.learners: dict[Key, Pair] = {}  # one per lane
        self.chat: dict[Key, Models] = {}
        self._turn: Comparison | None = None  # the chat's last

    def held(self) -> list[tuple[str, int]]:
        """Name and bytes of what is kept beside the models."""
        chat = sum(memory.history_bytes for models in list(self.chat.values()) for memory in _memories(*models))
        return [("the chat so far", chat)] if chat else []

    @contextmanager
    def around_run(self) -> Iterator[None]:
        """What a run's models remember goes with it, unless it was a turn of a chat that can go on."""
        try:
            yield
        finally:
            if self._turn is None:
                self.forget_chat()
            for pair in self.learners.values():  # what they learned is kept, not what was recorded for this run
                pair.target.unrecord()
                pair.drafter.unrecord()

    def prepare(self, spec: Comparison) -> None:
        """Before the models of a comparison are loaded: forget what belongs to another one."""
        if not _is_next(self._turn, spec):
            self.forget_chat()
        if not spec.all_remote:
            present = {drafter_key(lane, spec) for lane in spec.lanes}
            self.learners = {key: pair for key, pair in self.learners.items() if key[0] in present}

    def begin(self) -> None:
        """From here on a run that does not reach `end` leaves no chat."""
        self._turn = None

    def end(self, spec: Comparison, trace: RunTrace) -> None:
        """What a lane that failed has learned is not trusted."""
        failed = {index for index, lane in enumerate(trace.lanes) if lane.finish == "error"}
        self.learners = {key: pair for key, pair in self.learners.items() if key[1] not in failed}
        self._turn = spec if all(lane.messages and lane.finish in ("stop", "length") for lane in trace.lanes) else None

    def pair(self, spec: Comparison, index: int, chat: bool, fresh: Callable[[], Models]) -> Pair:
        """Of a lane: new, from `fresh` models, unless these remember the chat or the drafter keeps what it learns.

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
        """Drop the chat's keys and values; the models stay."""
        for models in self.chat.values():
            for memory in _memories(*models):
                memory.forget()
        self.chat.clear()
        self._turn = None

    def forget(self) -> None:
        """Drop the chat, and the methods that have learnt."""
        self.forget_chat()
        self.learners.clear()


def _pair(name: str, target: HFTarget, model: object, options: dict[str, object]) -> Pair:
    """Raises ValueError alone, which names a cure; whatever else goes wrong fails the lane, not the run."""
    try:
        return Pair(target, model, load_drafter(name, target, model, **options))
    except ValueError:
        raise
    except Exception as error:
        why = reason(error)
        let_go(error)
        return Pair(target, model, load_drafter(BASELINE, target), why)


def _is_next(turn: Comparison | None, spec: Comparison) -> bool:
    """Whether a comparison is that of a chat's last turn, with another message. What was said is compared later, token
    by token."""
    said = {"prompt": spec.prompt, "history": spec.history}
    return turn is not None and bool(spec.history) and turn.model_copy(update=said) == spec


def _remembering(model: object) -> Any:
    """The model, if it is one and no head, as a target that remembers its last text."""
    if not isinstance(model, HFTarget | LoadedModel):
        return model
    return Remembering(model.model, model.tokenizer, model.name, notes=model.notes)


def _memories(*models: object) -> list[Remembering]:
    return [model for model in models if isinstance(model, Remembering)]
