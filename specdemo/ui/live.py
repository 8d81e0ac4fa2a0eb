"""Runs behind the page: the engine in a thread of its own, its messages read 15 times a second.

The engine never waits for a reader: messages pile up in a list, bounded by the token limit. Whoever closes the reader
stops the engine. Training (lab.py) is such work too.
"""

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from specdemo.core.trace import MAX_TRACE_BYTES, RunTrace, from_json
from specdemo.engine.session import Finished, Note, RunSpec, Started, replay, session
from specdemo.models.load import LoadProgress
from specdemo.presets.schema import Preset
from specdemo.ui.lines import to_line
from specdemo.ui.views import Failed, Loading, Shown, opening, summary, tokens_csv, view

__all__ = [
    "Engine",
    "Log",
    "compare",
    "free_memory",
    "notes",
    "open_trace",
    "preload",
    "recorded",
    "refusal",
    "run",
    "tokens_csv",
]

logger = logging.getLogger(__name__)

FLUSH_S = 1 / 15
LIMIT_S = 120.0 if os.environ.get("SPACE_ID") else 1800.0  # wall clock of one run; a public machine is shared
ELSEWHERE = bool(os.environ.get("SPACES_ZERO_GPU"))  # the engine runs in another process
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

    def batches(self) -> Iterator[list[Any]]:
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


class Log:
    """The text a view shows: append-only lines.

    `trace` is the run on show once it has ended: until this one starts, that is the run `before` it.
    """

    def __init__(self, recorded: bool = False, before: RunTrace | None = None) -> None:
        self.text = to_line(opening(secrets.token_hex(6), recorded))
        self.trace = before
        self.ended = False
        self.engine: Engine | None = None  # None where the engine is in another process

    def add(self, messages: Iterable[Shown]) -> str:
        for message in messages:
            self.text += to_line(view(message))
            if isinstance(message, Started):
                self.trace = None
            elif isinstance(message, Finished):
                self.trace, self.ended = message.trace, True
        return self.text

    def stop(self) -> str:
        """End the run and the log: with what the engine says, or where it is out of reach without it."""
        if self.engine is not None:
            self.add(self.engine.finish())
        if not self.ended:
            self.text += to_line({"type": "end", "finish": "cancelled", "comparison": []})
        return self.text


def notes(texts: Iterable[str]) -> str:
    """A log that holds nothing but notes; empty without any."""
    texts = list(texts)
    return Log().add(Note(text) for text in texts) if texts else ""


def refusal(error: Exception) -> Log:
    """A log that says why there is no run."""
    log = Log()
    log.add([Failed(str(error))])
    return log


def recorded(trace: RunTrace) -> Log:
    """A stored run, whole; needs no model."""
    log = Log(recorded=True)
    log.add(replay(trace))
    return log


def _seconds(spec: RunSpec, log: Log | None) -> int:
    """What to ask a shared GPU for: loading, and 20 tokens a second in every lane."""
    return min(120, 20 + (len(spec.lanes) + 1) * spec.max_new_tokens // 20)


def _play(spec: RunSpec, log: Log | None) -> Generator[list[Shown], None, None]:
    """The run's messages in batches; `log` learns of the engine where both are in one process."""
    engine = Engine(lambda cancelled, loading: session().stream(spec, cancelled, loading))
    if log is not None:
        log.engine = engine
    yield from engine.batches()


if ELSEWHERE:  # Hugging Face's shared GPUs run what is marked so in another process
    _play = import_module("spaces").GPU(duration=_seconds)(_play)


def run(spec: RunSpec, log: Log) -> Iterator[str]:
    """The log so far, 15 times a second. Closing the iterator stops the engine."""
    batches = _play(spec, None if ELSEWHERE else log)
    try:
        for batch in batches:
            yield log.add(batch)
    finally:
        batches.close()


def compare(spec: RunSpec) -> dict[str, Any]:
    """A run without its steps."""
    return summary(session().run(spec))


def free_memory() -> str:
    """Forget every loaded model; says which."""
    held = session().loaded()
    session().unload()
    if not held:
        return "no models were loaded"
    return f"freed {sum(size for _, size in held) / 1e6:.0f} MB: {', '.join(name for name, _ in held)}"


def open_trace(path: str) -> Log:
    """A stored run, or why the file is none."""
    try:
        if Path(path).stat().st_size > MAX_TRACE_BYTES:
            raise ValueError(f"a trace may hold {MAX_TRACE_BYTES // 1_000_000} MB at most")
        return recorded(from_json(Path(path).read_bytes()))
    except ValueError as error:
        return refusal(error)


def preload(chosen: Preset) -> None:
    """Load the models while the visitor reads; what fails here is said when Run is pressed."""
    with contextlib.suppress(Exception):
        session().load(chosen.spec())
