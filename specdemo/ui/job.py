"""Jobs of the engine, shared by all tabs that run something: started, streamed, stopped and deleted per visitor.

The engine works in a separate thread and never waits for a reader. Messages collect in a list that the token limit
bounds. A job turns them into the append-only text of its view, one JSON object per line. Jobs take turns on the engine
(turns.py). Needs no torch.
"""

import asyncio
import contextlib
import contextvars
import functools
import json
import logging
import math
import secrets
import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from inspect import isasyncgenfunction
from typing import Any, ClassVar, Generic, TypeVar, cast

import gradio as gr
from gradio_client.utils import is_file_obj_with_meta

from specdemo.core.atomic_io import json_text
from specdemo.engine.messages import Note
from specdemo.ui import space
from specdemo.ui.turns import ENGINE, Call
from specdemo.ui.views import Failed, Loading, view

logger = logging.getLogger(__name__)

# The functions check the values themselves. Gradio would refuse a choice that a menu does not have (yet, or any more),
# and a number that is still being typed; the event then fails.
QUEUED: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private", "preprocess": False}
QUIET = QUEUED | {"queue": False}
FLUSH_S = 1 / 15
GRACE_S = 0.4  # Stop waits this long for the current step of a run
STOPPING_S = 30.0  # the longest wait for the end of stopped work
LOST_S = 60.0  # a page that lost its connection can come back to its run within this time
BUDGET = 16_000_000  # bytes of all stored jobs
ENTRY = 4_000  # bytes of a job without its texts

Messages = list[Any]  # their types depend on the kind of job
Values = dict[str, Any]  # values or updates of controls, by name
Parts = dict[str, Any]  # controls by name
Work = Callable[[Callable[[], bool], Callable[..., None]], Iterator[object]]
Item = TypeVar("Item")
END = object()


def to_line(fields: dict[str, object]) -> str:
    """Return a value as one line of JSON. NaN is not valid JSON: a top-level number that is not known yet is left out.
    Raises ValueError for NaN at a deeper level.
    """
    known = {k: v for k, v in fields.items() if not isinstance(v, float) or math.isfinite(v)}
    return json_text(known, ensure_ascii=False, separators=(",", ":")) + "\n"


def opening(**fields: object) -> str:
    """Return the first line of a log, which is different for each log.

    recorded: the run plays when the log arrives, unless it is `still`; then it waits for the visitor.
    """
    return to_line({"type": "run", "run": secrets.token_hex(6), "recorded": False, "still": False, **fields})


class Packed:
    """A compressed text."""

    def __init__(self, text: str) -> None:
        self._bytes = zlib.compress(text.encode(), level=1)

    @property
    def size(self) -> int:
        """Return the size in bytes."""
        return len(self._bytes)

    @property
    def text(self) -> str:
        """Return the original text."""
        return zlib.decompress(self._bytes).decode()


class Engine:
    """Work in its own thread. The work gets `cancelled` and a callback for loading progress, and yields messages."""

    at_work: ClassVar[set["Engine"]] = set()

    def __init__(self, work: Work, limit_s: float | None = None) -> None:
        self._do = work
        self._limit_s = space.turn_s() if limit_s is None else limit_s
        self._messages: deque[Any] = deque()  # unread messages
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True, name="engine")

    def batches(self) -> Generator[Messages, None, None]:
        """Yield new messages 15 times a second, often none. Closing the iterator stops the engine and waits for it."""
        deadline = time.monotonic() + self._limit_s
        self.at_work.add(self)
        self._thread.start()
        try:
            while self._thread.is_alive():
                self._thread.join(FLUSH_S)
                if time.monotonic() > deadline and not self._stop.is_set():
                    self._stop.set()
                    self._messages.append(Note(f"stopped: the time limit is {self._limit_s:.0f} seconds"))
                yield self._new()
            yield self._new()
        finally:
            self.end(STOPPING_S)

    def end(self, grace_s: float) -> None:
        """Stop the work, and wait at most this long for the current step."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(grace_s)

    def finish(self, grace_s: float = GRACE_S) -> Messages:
        """Stop the engine and return the messages since the last batch."""
        self.end(grace_s)
        return self._new()

    def _new(self) -> Messages:
        new = []
        with contextlib.suppress(IndexError):  # Stop may read at the same time
            while True:
                new.append(self._messages.popleft())
        return new

    def _work(self) -> None:
        try:
            for message in self._do(self._stop.is_set, lambda *progress: self._messages.append(Loading(*progress))):
                self._messages.append(message)
        except ValueError as error:
            self._messages.append(Failed(str(error)))
        except Exception as error:
            logger.exception("the run failed")
            self._messages.append(Failed(f"the run failed: {str(error).partition(chr(10))[0] or type(error).__name__}"))
        finally:
            self.at_work.discard(self)


def stop_all() -> None:
    """End the work of all visitors.

    A server waits for its streams when it closes. If the interpreter ended in the middle of torch's code, the process
    would abort.
    """
    for engine in tuple(Engine.at_work):
        engine.end(STOPPING_S)


class Job(ABC):
    """Work that a visitor started, and the text that shows it."""

    STOPPING: ClassVar[Values] = {"type": "stopping"}  # the line after Stop was pressed
    UNREAD_S: ClassVar[float] = 0.0  # the work goes on for this time without a reader
    engine: Engine | None = None  # None if it is in another process
    worker: "asyncio.Task[None] | None" = None  # runs the job
    readers = 0  # pages that follow the job

    def __init__(self, text: str) -> None:
        self.text = text
        self.ended = False  # True after the last line
        self.stopped = False
        self._unread = threading.Event()  # set while `stream` has no reader
        self._unread.set()

    @property
    def size(self) -> int:
        """Return the approximate size in bytes."""
        return ENTRY + len(self.text)

    @property
    def run(self) -> str:
        """Return the id of the run, which only its page knows."""
        return str(json.loads(self.text.partition("\n")[0] or "{}").get("run", ""))

    def start(self, line: contextlib.ExitStack, call: Call) -> None:
        """Begin the work in the background; at its end the call leaves the `line`."""
        self.worker = asyncio.create_task(self._run(line, call))

    async def _run(self, line: contextlib.ExitStack, call: Call) -> None:
        with line:
            async with contextlib.aclosing(follow(call, self)) as texts:
                async for _ in texts:
                    pass

    async def read(self) -> AsyncGenerator[str, None]:
        """Yield the growing text, 15 times a second. Without a reader the work ends after UNREAD_S, or as soon as
        another call waits for the engine.
        """
        self.readers += 1
        try:
            while self.worker is not None and not self.worker.done():
                yield self.text
                await asyncio.wait([self.worker], timeout=FLUSH_S)
            if self.worker is not None and not self.worker.cancelled():
                self.worker.result()
            yield self.text
        finally:
            self.readers -= 1
            if self.UNREAD_S:
                self._watch = asyncio.create_task(self._end_unread())
            else:
                await self._cancel()

    async def _end_unread(self) -> None:
        end = time.monotonic() + self.UNREAD_S
        while self.worker is not None and not self.worker.done() and not self.readers:
            if time.monotonic() > end or ENGINE.crowded:
                await self._cancel()
            else:
                await asyncio.wait([self.worker], timeout=FLUSH_S)

    async def _cancel(self) -> None:
        if self.worker is not None and not self.worker.done():
            self.worker.cancel()
            await asyncio.wait([self.worker])

    @abstractmethod
    def add(self, messages: Iterable[Any]) -> str:
        """Return the text extended by new messages."""

    def wait(self, place: str) -> str:
        """Return the text extended by the place in line."""
        self.text += to_line({"type": "waiting", "text": place})
        return self.text

    def stream(self) -> Generator[str, None, None]:
        """Yield the text so far, 15 times a second. Closing the iterator stops the engine."""
        assert self.engine is not None
        self._unread.clear()
        with contextlib.closing(self.engine.batches()) as batches:
            try:
                yield self.text
                for batch in batches:
                    yield self.add(batch)
                self.ended = True
            finally:
                self._unread.set()

    def request_stop(self) -> str:
        """Return the text with a last line that says what happens now; `stop` waits for that."""
        self.text += to_line(self.STOPPING)
        return self.text

    def stop(self) -> str:
        """End the work and return the text, with the last messages if they arrive in time."""
        assert self.engine is not None
        self.end_worker()
        self.add(self.engine.finish(STOPPING_S))
        self.text += to_line({"type": "stopped"})
        self.ended = True
        return self.text

    def end_worker(self) -> None:
        """End the work in the background, and wait until nothing else reads the engine's messages."""
        self.stopped = True
        if self.worker is not None and not self.worker.done():
            self.worker.get_loop().call_soon_threadsafe(self.worker.cancel)
        self._unread.wait(STOPPING_S)

    def extra_updates(self) -> Values:
        """Return updates of the components next to the text."""
        return {}

    def final_updates(self) -> Values:
        """Return the final updates of the tab. The page then has the text, so it is not stored here."""
        shown = {"view": self.text, **self.extra_updates()}
        if self.ended:
            self.text = ""
        return shown


Kind = TypeVar("Kind", bound=Job)


class Store:
    """Jobs of all open pages.

    If they exceed `budget` bytes, those that were not requested for the longest time are dropped. A page chooses its
    own session id and may never say that it was closed.
    """

    def __init__(self, budget: int = BUDGET) -> None:
        self._budget = budget
        self._jobs: OrderedDict[tuple[str, str], Job] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Return the size of all jobs in bytes."""
        return sum(job.size for job in self._jobs.values())

    def get(self, key: tuple[str, str]) -> Job | None:
        """Return a visitor's job, and make it the last to be dropped. None if it was dropped."""
        with self._lock:
            if key not in self._jobs:
                return None
            self._jobs.move_to_end(key)
            while self.size > self._budget and len(self._jobs) > 1:
                self._jobs.popitem(last=False)
            return self._jobs[key]

    def put(self, key: tuple[str, str], job: Job) -> None:
        """Store a job; drop the oldest ones if there is not enough memory."""
        with self._lock:
            self._jobs[key] = job
        self.get(key)

    def find(self, name: str, run: str) -> Job | None:
        """Return the job of a tab by the id of its run."""
        with self._lock:
            jobs = [job for key, job in self._jobs.items() if key[1] == name]
        return next((job for job in jobs if run and job.run == run), None)

    async def forget_later(self, request: gr.Request) -> None:
        """Drop all jobs of a page that does not come back."""
        asyncio.get_running_loop().call_later(LOST_S, self.forget, request)

    def forget(self, request: gr.Request) -> None:
        """Drop all jobs of a page."""
        with self._lock:
            for key in [key for key in self._jobs if key[0] == request.session_hash]:
                del self._jobs[key]


class Jobs(Generic[Kind]):
    """Run and Stop of one tab, for all visitors. name: identifies these jobs among a visitor's."""

    def __init__(self, name: str, store: Store | None = None) -> None:
        self._name = name
        self._store = Store() if store is None else store

    def last(self, request: gr.Request) -> Kind | None:
        """Return the visitor's latest job."""
        return cast(Kind | None, self._store.get(self._key(request)))

    async def run(
        self, begin: Callable[[Values, Kind | None], Kind], request: gr.Request, values: Values
    ) -> AsyncGenerator[Values, None]:
        """Yield the growing text of a job. If `begin`, called with the values of the controls and the last job, raises
        ValueError, yield a text with the reason.
        """
        with contextlib.ExitStack() as line:
            call = line.enter_context(ENGINE.line(request))
            try:
                job = await asyncio.to_thread(begin, values, self.last(request))
            except ValueError as error:
                yield {"view": refusal(error)}
                return
            self.keep(request, job)
            job.start(line.pop_all(), call)
        async for updates in self._read(request, job):
            yield updates

    async def rejoin(self, request: gr.Request, values: Values) -> AsyncGenerator[Values, None]:
        """Yield the growing text of the run that a page followed before it lost its connection or was reloaded."""
        job = cast(Kind | None, await asyncio.to_thread(self._store.find, self._name, str(values["run"])))
        if job is not None:
            self.keep(request, job)
            async for updates in self._read(request, job):
                yield updates

    async def _read(self, request: gr.Request, job: Kind) -> AsyncGenerator[Values, None]:
        async with contextlib.aclosing(job.read()) as texts:
            async for text in texts:
                self.last(request)  # update its size in the store
                yield {"view": text, **job.extra_updates()}
        job.final_updates()

    def request_stop(self, request: gr.Request) -> Values:
        """Ask the job to end at its next step."""
        job = self.last(request)
        return {} if job is None or job.ended else {"view": job.request_stop()}

    def stop(self, request: gr.Request) -> Values:
        """End the job now and return what there is to show. A job that ended while Stop was pressed may not have been
        delivered.
        """
        job = self.last(request)
        if job is None or job.ended:
            return job.final_updates() if job and job.worker and job.text else {}
        text = job.stop()
        return {**job.final_updates(), "view": text}

    def keep(self, request: gr.Request, job: Kind) -> None:
        """Store a job as its visitor's latest."""
        self._store.put(self._key(request), job)

    def _key(self, request: gr.Request) -> tuple[str, str]:
        return str(request.session_hash), self._name


async def follow(call: Call, job: Job) -> AsyncGenerator[str, None]:
    """Yield the growing text of a job: its place in line, then its messages. A job stopped in line does not start."""
    async for place in ENGINE.wait(call):
        yield job.wait(place)
    if not job.stopped:
        async with contextlib.aclosing(in_thread(job.stream())) as texts:
            async for text in texts:
                yield text


async def in_thread(items: Generator[Item, None, None]) -> AsyncGenerator[Item, None]:
    """Yield items that a worker thread computes. Closing waits for the current item, then closes `items`."""
    step: asyncio.Future[Item | object] | None = None
    loop = asyncio.get_running_loop()
    advance = functools.partial(contextvars.copy_context().run, lambda: next(items, END))
    try:
        while True:
            step = loop.run_in_executor(None, advance)  # no task: the end of the loop cancels tasks
            item = await asyncio.shield(step)
            if item is END:
                return
            yield cast(Item, item)
    finally:
        if step is not None and not step.done():
            await asyncio.wait([step])
        await asyncio.to_thread(items.close)


def refusal(error: Exception) -> str:
    """Return a text that says why there is no job."""
    return opening() + to_line(view(Failed(str(error))))


# events, or one to follow; what creates the job, None to rejoin one; the controls with its values
Start = tuple[Sequence[object] | Callable[..., object], Callable[[Values, Any], Job] | None, Parts]


def wire(
    jobs: Jobs[Any],
    starts: Sequence[Start],
    parts: Mapping[str, object],
    stop: gr.Button,
    off: Sequence[object],
    first: str | None = None,
) -> list[Any]:
    """Connect Run and Stop of a tab; return the events at which a job of each start has ended.

    starts: ways to start a job: events, a function that creates it from the values of controls and the last job (None:
    rejoin a job), and those controls. parts: `view`, which shows the text, and further components that a job updates.
    off: buttons disabled during a job. first: a script that a start waits for.
    """
    switched = {"stop": stop, **{str(i): button for i, button in enumerate(off)}}
    stopped = {"stopped": gr.State(False)}  # True after Stop, which may arrive before Run

    def switch(running: bool) -> Values:
        return {name: gr.update(interactive=running == (name == "stop")) for name in switched}

    async def run(
        begin: Callable[[Values, Any], Job] | None, request: gr.Request, values: Values
    ) -> AsyncIterator[Values]:
        if not values.pop("stopped"):
            texts = jobs.run(begin, request, values) if begin else jobs.rejoin(request, values)
            async with contextlib.aclosing(texts) as shown:
                async for updates in shown:
                    yield updates

    ended = []
    for pressed, begin, given in starts:
        on = pressed if callable(pressed) else partial(gr.on, pressed, trigger_mode="once")
        locked = named(
            on, lambda *_: {**switch(True), "stopped": False}, {}, {**switched, **stopped}, js=first, **QUIET
        )
        ended.append(named(locked.then, partial(run, begin), {**given, **stopped}, parts, **QUEUED))
        for after in at_end(ended[-1]):
            named(after, lambda *_: switch(False), {}, switched, **QUIET)

    def on_stop(request: gr.Request, _: Values) -> Values:
        return {**jobs.request_stop(request), "stop": gr.update(interactive=False), "stopped": True}

    def end(request: gr.Request, _: Values) -> Values:
        return {**jobs.stop(request), **switch(False)}

    everything = {**parts, **switched, **stopped}
    named(named(stop.click, on_stop, {}, everything, cancels=ended, **QUIET).then, end, {}, everything, **QUIET)
    return ended


def at_end(event: Any) -> tuple[Callable[..., object], Callable[..., object]]:
    """Return the events after the end of an event: of its success and of its failure, which `then` leaves out."""
    return event.success, event.failure


def rejoining(name: str) -> Start:
    """Return the start that rejoins a tab's run. A hidden button, `NAME-rejoin`, is clicked by a script of the page."""
    button, run = gr.Button("Rejoin", elem_id=f"{name}-rejoin", elem_classes="sd-rejoin"), gr.JSON(visible=False)
    found = button.click(None, None, run, js=f"() => sessionStorage.getItem('specdemo.{name}') ?? ''", **QUIET)
    return found.then, None, {"run": run}


def named(
    event: Callable[..., object],
    function: Callable[[gr.Request, Values], Any],
    given: Mapping[str, object],
    shown: Mapping[str, object],
    data: str = "",
    **settings: object,
) -> Any:
    """Wire an event to a function from named values of controls to named updates; {} changes nothing. data: the name
    of the event's data among the values.
    """

    def placed(updates: Values) -> object:
        return {shown[name]: update for name, update in updates.items()} or gr.skip()

    def read(values: dict[object, object]) -> Values:
        return {name: _path(values[control]) for name, control in given.items()}

    def handle(values: dict[object, object], request: gr.Request) -> object:
        return placed(function(request, read(values)))

    def handle_data(values: dict[object, object], request: gr.Request, event: gr.EventData) -> object:
        return placed(function(request, read(values) | {data: getattr(event, data)}))

    async def stream(values: dict[object, object], request: gr.Request) -> AsyncIterator[object]:
        async with contextlib.aclosing(function(request, read(values))) as results:
            async for updates in results:
                yield placed(updates)

    chosen = handle_data if data else stream if isasyncgenfunction(function) else handle
    return event(chosen, {*given.values()}, [*shown.values()], **settings)


def _path(value: object) -> object:
    """Return the path of an uploaded file, whose place Gradio has checked; any other value as it is."""
    return value["path"] if isinstance(value, dict) and is_file_obj_with_meta(value) else value
