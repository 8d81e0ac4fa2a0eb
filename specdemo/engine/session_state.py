"""State that survives a run: drafters that learn, and models that cache the chat so far."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_tb

from specdemo.core.protocol import Target
from specdemo.core.settings import to_values
from specdemo.core.trace import RunTrace
from specdemo.engine.comparison import Comparison, Lane
from specdemo.engine.model_cache import drafter_key
from specdemo.methods import BASELINE, build_drafter, load_drafter, method
from specdemo.methods.base import Method
from specdemo.models.prefix_reuse import PrefixCachedLlamaCpp, PrefixCachedTarget, prefix_cached, with_prefix_cache

MAX_LENGTH = 500  # characters of a reason


def reason(error: Exception) -> str:
    """Return one line: the message if it is meant for users, else with the error's type and location."""
    line = str(error).strip().partition("\n")[0][:MAX_LENGTH].encode("utf-8", "replace").decode()
    if line and isinstance(error, RuntimeError | ValueError):
        return line
    *_, (frame, number) = walk_tb(error.__traceback__)
    text = f"{type(error).__name__}: {line}" if line else type(error).__name__
    return f"{text} ({Path(frame.f_code.co_filename).name}:{number})"


def clear_traceback(error: BaseException | None) -> None:
    """Clear the traceback, so that its frames and their KV caches can be freed."""
    while error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


Key = tuple[object, ...]  # key of the drafter's model, index of the lane, method and options
Models = tuple[Target, object]  # the target of a lane, and the model its drafter is built from


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


class SessionState:
    """State of the last comparison. The chat is dropped by the first run that is not its next turn."""

    def __init__(self) -> None:
        self.learners: dict[Key, LaneModels] = {}  # one per lane
        self.chat_models: dict[Key, Models] = {}
        self._last_turn: Comparison | None = None  # last turn of the chat

    def memory_use(self) -> list[tuple[str, int]]:
        """Return name and bytes of what is stored in addition to the models."""
        chat = sum(
            cached_target.history_bytes
            for models in list(self.chat_models.values())
            for cached_target in prefix_cached(*models)
        )
        return [("the chat so far", chat)] if chat else []

    @contextmanager
    def run_scope(self) -> Iterator[None]:
        """Drop the caches of a run afterwards, unless it was a turn of a chat that can continue."""
        try:
            yield
        finally:
            if self._last_turn is None:
                self.forget_chat()
            for models in self.learners.values():  # keep what they learned, drop the CUDA graphs of this run
                models.target.release_graphs()
                models.drafter.release_graphs()

    def prepare(self, spec: Comparison) -> None:
        """Drop the state of another comparison, before models are loaded."""
        if not _is_next_turn(self._last_turn, spec):
            self.forget_chat()
        if not spec.all_remote:
            present = {drafter_key(lane, spec) for lane in spec.lanes}
            self.learners = {key: models for key, models in self.learners.items() if key[0] in present}

    def begin_run(self) -> None:
        """Mark the start of a run; one that does not reach `end_run` leaves no chat."""
        self._last_turn = None

    def end_run(self, spec: Comparison, trace: RunTrace) -> None:
        """Store the turn; drop what a failed lane has learned."""
        failed = {index for index, lane in enumerate(trace.lanes) if lane.finish == "error"}
        self.learners = {key: models for key, models in self.learners.items() if key[1] not in failed}
        self._last_turn = (
            spec if all(lane.messages and lane.finish in ("stop", "length") for lane in trace.lanes) else None
        )

    def lane_models(self, spec: Comparison, index: int, chat: bool, load: Callable[[], Models]) -> LaneModels:
        """Return the models of a lane: loaded with `load`, unless they cache the chat or the drafter keeps what it
        learns.

        Raises ValueError for a drafter that does not fit.
        """
        lane = spec.all_lanes[index]
        key = drafter_key(lane, spec), index, lane.method, *to_values(lane.parsed).items()
        models = self.learners.get(key)
        if models is None:
            target, model = self.chat_models.get(key) or (map(with_prefix_cache, load()) if chat else load())
            models = _build_lane_models(lane, target, model)
        if method(lane.method).learns:
            self.learners = {k: p for k, p in self.learners.items() if k[1] != index} | {key: models}
        if models.prefix_cached:
            self.chat_models[key] = models.target, models.model
        return models

    def forget_chat(self) -> None:
        """Drop the chat's keys and values; keep the models."""
        for models in self.chat_models.values():
            for cached_target in prefix_cached(*models):
                cached_target.forget()
        self.chat_models.clear()
        self._last_turn = None

    def forget(self) -> None:
        """Drop the chat and the drafters that have learned."""
        self.forget_chat()
        self.learners.clear()


def _build_lane_models(lane: Lane, target: Target, model: object) -> LaneModels:
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


def _is_next_turn(last_turn: Comparison | None, spec: Comparison) -> bool:
    """Return True if the comparison is the last turn's with another message. The messages themselves are compared
    later, token by token."""
    changes = {"prompt": spec.prompt, "history": spec.history}
    return last_turn is not None and bool(spec.history) and last_turn.model_copy(update=changes) == spec
