"""Runs behind the page: the engine in a thread of its own, its messages read 15 times a second.

The engine never waits for a reader: messages pile up in a list, bounded by the token limit. Whoever closes the reader
stops the engine. Training (lab.py) is such work too.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import torch

from specdemo.core.trace import RunTrace
from specdemo.engine.lanes import lane_name
from specdemo.engine.messages import Note
from specdemo.engine.session import follow_up, session
from specdemo.engine.spec import RunSpec
from specdemo.models.load import LoadProgress
from specdemo.presets.recorded import recorded
from specdemo.presets.schema import EMBEDDED, Preset
from specdemo.ui import space
from specdemo.ui.log import Lines, Log, lines
from specdemo.ui.views import Failed, Loading, summary

__all__ = ["Engine", "compare", "follow_up", "free_memory", "lane_name", "preload", "run", "session"]

logger = logging.getLogger(__name__)

FLUSH_S = 1 / 15
LIMIT_S = 120.0 if space.public() else 1800.0  # wall clock of one run; a public machine is shared
ELSEWHERE = space.zero_gpu()  # the engine runs in another process
INSTEAD = "Shown in its place: this preset's recorded run, with the preset's own settings."
GRACE_S = 0.4  # how long Stop waits for the step in hand


Work = Callable[[Callable[[], bool], LoadProgress], Iterator[Any]]


class Engine:
    """Work in its own thread: given `cancelled` and where to report loading, it yields messages."""

    def __init__(self, work: Work, limit_s: float = LIMIT_S) -> None:
        self._do = work
        self._limit_s = limit_s
        self._messages: list[Any] = []
        self._read = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True, name="engine")

    def batches(self) -> Generator[list[Any], None, None]:
        """What is new, 15 times a second, often nothing. Closing the iterator stops the engine within one step."""
        deadline = time.monotonic() + self._limit_s
        self._thread.start()
        try:
            while self._thread.is_alive():
                self._thread.join(FLUSH_S)
                if time.monotonic() > deadline and not self._stop.is_set():
                    self._stop.set()
                    self._messages.append(Note(f"stopped: a run may take {self._limit_s:.0f} seconds"))
                yield self._new()
            yield self._new()
        finally:
            self._stop.set()

    def finish(self, grace_s: float = GRACE_S) -> list[Any]:
        """Stop, and what was said since the last batch."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(grace_s)
        return self._new()

    def _new(self) -> list[Any]:
        start, self._read = self._read, len(self._messages)
        return self._messages[start : self._read]

    def _work(self) -> None:
        try:
            for message in self._do(self._stop.is_set, self._loading):
                self._messages.append(message)
        except ValueError as error:
            self._messages.append(Failed(str(error)))
        except Exception as error:
            logger.exception("the run failed")
            self._messages.append(Failed(f"the run failed: {str(error).partition(chr(10))[0] or type(error).__name__}"))

    def _loading(self, share: float, what: str) -> None:
        self._messages.append(Loading(share, what))


@space.lent(lambda spec, log: space.seconds(spec))
def _play(spec: RunSpec, log: Log | None) -> Generator[Lines, None, None]:
    """The run, 15 times a second what is new of it; `log` learns of the engine where both are in one process."""
    engine = Engine(
        lambda cancelled, loading: session().stream(spec, cancelled, loading),
        space.seconds(spec) - space.BACK_S if ELSEWHERE else LIMIT_S,
    )
    if log is not None:
        log.engine = engine
    with contextlib.closing(engine.batches()) as batches:
        for batch in batches:
            yield lines(batch)


def run(spec: RunSpec, log: Log) -> Iterator[str]:
    """The log so far, 15 times a second. Closing the iterator stops the engine.

    A run that cannot start for want of a GPU ends as the preset's recorded one, where there is one, and says so.
    """
    log.spec = spec
    reason = _no_gpu(spec)
    if reason and space.public():  # trying all the same would keep a shared machine busy
        log.add([Failed(reason)])
    else:
        try:
            with contextlib.closing(_play(spec, None if ELSEWHERE else log)) as batches:
                for new in batches:
                    yield log.take(new)
        except Exception as error:  # from whoever lends the GPU: the engine tells its own failures
            said = getattr(error, "message", None) or str(error) or type(error).__name__
            reason = f"{'the GPU is gone' if log.started else 'no GPU for this run'}: {said}"
            log.add([Failed(reason)])
    if log.failure:
        trace = _stand_in(spec) if reason and not log.started else None
        yield log.fall_back(f"{log.failure.rstrip('.')}. {INSTEAD}", trace) if trace else log.text


def _no_gpu(spec: RunSpec) -> str:
    """Why a model that does not ship with the project may be too large for this machine; empty where there is a GPU."""
    if spec.target in EMBEDDED or spec.all_remote or torch.cuda.is_available():
        return ""
    return f"{spec.target} needs a GPU and there is none here"


def _stand_in(spec: RunSpec) -> RunTrace | None:
    """The preset's recorded run, unless the page was asked for another target or for the next turn of a chat."""
    trace = recorded(spec.preset)
    return trace if trace and trace.config.get("target") == spec.target and not spec.history else None


def compare(spec: RunSpec) -> dict[str, Any]:
    """A run without its steps. Raises ValueError with one line where there is none."""
    log = Log()
    for _ in run(spec, log):
        pass
    if log.trace is None or log.recorded:
        raise ValueError(log.failure or "the run came to no end; ask again")
    return summary(log.trace)


def free_memory() -> str:
    """Forget every loaded model; says which."""
    held = session().loaded()
    session().unload()
    if not held:
        return "no models were loaded"
    return f"freed {sum(size for _, size in held) / 1e6:.0f} MB: {', '.join(name for name, _ in held)}"


def preload(presets: Iterable[Preset]) -> None:
    """Load the models while the visitor reads; what fails here is said when Run is pressed."""
    for chosen in presets:
        with contextlib.suppress(Exception):
            session().place(chosen.spec())
