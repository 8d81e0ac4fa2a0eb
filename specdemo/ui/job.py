"""Jobs: work that a visitor starts, follows, cancels and rejoins, for all tabs that run something.

A job is created before its call waits in Gradio's queue, so bad input is refused at once. The queue runs one job at a
time. The work has its own thread and never waits for a reader. Its messages collect in a list that the token limit
bounds; readers turn them into the append-only text of the view, one JSON object per line.
"""

import asyncio
import contextlib
import contextvars
import json
import logging
import math
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from inspect import isasyncgenfunction
from typing import Any, ClassVar, Generic, TypeVar, cast

import gradio as gr

from specdemo.core.atomic_io import json_text
from specdemo.engine.messages import Note
from specdemo.engine.session import session
from specdemo.models.errors import first_line
from specdemo.ui import space
from specdemo.ui.views import Failed, Loading, view

logger = logging.getLogger(__name__)

# The functions check the values themselves. Gradio would refuse a choice that a menu does not have (yet, or any more),
# and a number that is still being typed; the event then fails.
QUIET: dict[str, Any] = {
    "show_progress": "hidden", "api_visibility": "private", "preprocess": False, "queue": False,
}  # fmt: skip
ENGINE: dict[str, object] = {"concurrency_id": "engine", "concurrency_limit": 1}  # calls that run one at a time
UPLOADED = QUIET | {"preprocess": True}  # by a file, whose place Gradio checks
QUEUED = QUIET | ENGINE | {"queue": True}
FLUSH_S, SLOW_FLUSH_S = 1 / 8, 1 / 4  # between two texts; where lines come slowly
LINES, LINES_S = 20, 1.6  # this many lines in more time than this: slowly, which is every step over 0.1 s
SILENT_S = 5.0  # a text is yielded again after this time, because Gradio notices a closed page only then
STOPPING_S = 30.0  # the longest wait for the end of stopped work
LOST_S = 60.0  # a page that lost its connection can come back to its run within this time
BUDGET = 64_000_000  # bytes of all stored jobs
ENTRY = 4_000  # bytes of a job without its texts

Messages = list[Any]  # their types depend on the kind of job
Values = dict[str, Any]  # values or updates of controls, by name
Parts = dict[str, Any]  # controls by name
Handler = Callable[[gr.Request, Values], Any]  # of an event: values -> updates
Work = Callable[[Callable[[], bool], Callable[..., None]], Iterator[object]]


def to_line(fields: dict[str, object]) -> str:
    """Return a value as one line of JSON. NaN is not valid JSON: a top-level number that is not known yet is left out.
    Raises ValueError for NaN at a deeper level.
    """
    known = {k: v for k, v in fields.items() if not isinstance(v, float) or math.isfinite(v)}
    return json_text(known, ensure_ascii=False, separators=(",", ":")) + "\n"


def opening(key: str = "", **more: object) -> str:
    """Return the first line of a log, which is different for each log. key: of the settings that led to it.

    recorded: the run plays when the log arrives, unless it is `still`; then it waits for the visitor.
    """
    return to_line({"type": "run", "run": secrets.token_hex(6), "key": key, "recorded": False, "still": False, **more})


def refusal(error: Exception, key: str = "", **more: object) -> str:
    """Return a text that says why there is no job. key: of the settings that are refused. file: True for a file that
    cannot be opened."""
    return opening(key) + to_line(view(Failed(str(error))) | more)


class Worker:
    """Work in its own thread. The work gets `cancelled` and a callback for loading progress, and yields messages."""

    running: ClassVar[set["Worker"]] = set()

    def __init__(self, work: Work, limit_s: float | None = None) -> None:
        self._do = work
        self._limit_s = space.turn_s() if limit_s is None else limit_s
        self._messages: deque[object] = deque()  # unread messages
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def alive(self) -> bool:
        """Return whether the work has begun and not ended."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Begin, unless the work has begun before or was ended."""
        if self._thread is None and not self._stop.is_set():
            self._deadline = time.monotonic() + self._limit_s
            self.running.add(self)
            context = contextvars.copy_context()  # ZeroGPU finds the visitor's request in it
            self._thread = threading.Thread(target=context.run, args=(self._run,), daemon=True, name="engine")
            self._thread.start()

    def messages(self) -> Messages:
        """Return the messages since the last call."""
        return [self._messages.popleft() for _ in range(len(self._messages))]

    def batches(self) -> Generator[Messages, None, None]:
        """Yield new messages eight times a second, often none. Closing the iterator ends the work."""
        self.start()
        try:
            while self.alive:
                time.sleep(FLUSH_S)
                yield self.messages()
            yield self.messages()
        finally:
            self.end(STOPPING_S)

    def end(self, grace_s: float) -> None:
        """Stop the work, and wait at most this long for the current step."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(grace_s)

    def _cancelled(self) -> bool:
        if time.monotonic() > self._deadline and not self._stop.is_set():
            self._stop.set()
            self._messages.append(Note(f"stopped: the time limit is {self._limit_s:.0f} seconds"))
        return self._stop.is_set()

    def _run(self) -> None:
        try:
            for message in self._do(self._cancelled, lambda *progress: self._messages.append(Loading(*progress))):
                self._messages.append(message)
        except Exception as error:
            self._messages.append(Failed(reason(error)))
        finally:
            self.running.discard(self)


def reason(error: Exception) -> str:
    """Return why work failed, in one line; an unexpected error is logged."""
    if isinstance(error, ValueError):
        return str(error)
    logger.error("the run failed", exc_info=error)
    return f"the run failed: {first_line(error)}"


def with_engine_lock(work: Work) -> Work:
    """Return work that runs while no other work uses the engine."""

    def alone(cancelled: Callable[[], bool], report: Callable[..., None]) -> Iterator[object]:
        with session().lock:
            yield from work(cancelled, report)

    return alone


def stop_all() -> None:
    """End the work of all visitors.

    A server waits for its streams when it closes. If the interpreter ended in the middle of torch's code, the process
    would abort.
    """
    for worker in tuple(Worker.running):
        worker.end(STOPPING_S)


class Job(Worker, ABC):
    """Work that a visitor started, and the text that shows it. Without work it has ended."""

    STOPPING: ClassVar[Values] = {"type": "stopping"}  # the line after Stop was pressed; empty: none
    grace_s: ClassVar[float] = STOPPING_S  # after Stop the current step may take this long
    unread_s = 0.0  # the work goes on for this time without a reader
    at_work: ClassVar["Job | None"] = None  # the last one that began

    def __init__(self, text: str, work: Work | None = None, limit_s: float | None = None) -> None:
        super().__init__(work or (lambda *_: iter(())), limit_s)
        self.text = text
        self.ended = work is None  # True once the text has its last line
        self.stopped, self._until = False, math.inf  # stopped work has ended then, or when its step is over
        self._readers, self._page = 0, 0  # _page: number of the page that reads; an earlier one was closed
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Return the approximate size in bytes."""
        return ENTRY + len(self.text)

    @property
    def run(self) -> str:
        """Return the id of the run, which only its page knows."""
        return str(json.loads(self.text.partition("\n")[0] or "{}").get("run", ""))

    @abstractmethod
    def add(self, messages: Iterable[Any]) -> str:
        """Return the text extended by new messages."""

    async def follow(self) -> AsyncGenerator[str, None]:
        """Begin the work and yield the growing text as it changes: every message takes CPU time from the measurement,
        here and in the browser. Without a reader the work ends after `unread_s`, or as soon as another job begins.
        """
        self._readers += 1
        page = self._page
        shown, last, lines = -1, 0.0, deque[float](maxlen=LINES)
        try:
            await asyncio.to_thread(self._begin)
            while not self.ended and page == self._page:
                text, now = await asyncio.to_thread(self.read), time.monotonic()
                lines.extend([now] * text.count("\n", max(shown, 0)))
                pause = FLUSH_S
                if len(text) != shown or now - last > SILENT_S:
                    shown, last = len(text), now
                    yield text
                    pause = FLUSH_S if len(lines) == LINES and now - lines[0] < LINES_S else SLOW_FLUSH_S
                await asyncio.sleep(0.0 if self.ended else pause)
            if len(self.text) > shown >= 0 and page == self._page:  # Stop, or another reader, has read the end
                yield self.text
        finally:
            self._readers -= 1
            if self.unread_s:
                asyncio.get_running_loop().call_later(self.unread_s, self._end_unread)
            else:
                self._end_unread()

    def change_page(self) -> None:
        """End the readers of earlier pages. Gradio notices that a page is closed only when a text is sent to it."""
        self._page += 1

    def _begin(self) -> None:
        other, Job.at_work = Job.at_work, self
        if other is not None and other is not self:
            other.end(STOPPING_S)  # the queue runs one call at a time, so its page is gone
        self.start()

    def _end_unread(self) -> None:
        if not self._readers:
            self.end(0.0)

    def read(self) -> str:
        """Return the text, with what the work has yielded by now. Stopped work has ended when its step is over, or
        after `grace_s`.
        """
        with self._lock:
            if not self.ended:
                last = not self.alive or time.monotonic() > self._until
                self.add(self.messages())
                self.text += self.stopped_line() if last and self.stopped else ""
                self.ended = last
            return self.text

    def stop(self) -> str:
        """Ask the work to end, and return the text with a line that says what happens now."""
        with self._lock:
            self.stopped, self._until = True, time.monotonic() + self.grace_s
            self.text += to_line(self.STOPPING) if self.STOPPING else ""
        self.end(0.0)
        return self.read()

    def stopped_line(self) -> str:
        """Return the last line of stopped work."""
        return to_line({"type": "stopped"})

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
        self.name = name
        self._store = Store() if store is None else store

    def key(self, values: Values) -> str:
        """Return the key of the settings of a start, if the view compares it."""
        return ""

    def last(self, request: gr.Request) -> Kind | None:
        """Return the visitor's latest job."""
        return cast(Kind | None, self._store.get(self._key(request)))

    def keep(self, request: gr.Request, job: Kind) -> Kind:
        """Store a job as its visitor's latest, and return it."""
        self._store.put(self._key(request), job)
        return job

    def rejoin(self, values: Values, _: Kind | None) -> Kind | None:
        """Return the run that a page followed before it lost its connection or was reloaded."""
        job = cast(Kind | None, self._store.find(self.name, str(values["run"])))
        if job is not None:
            job.change_page()
        return job

    async def follow(self, request: gr.Request, *_: Values) -> AsyncGenerator[Values, None]:
        """Yield the updates of the visitor's latest job; an empty one if the page has its whole text already."""
        job = self.last(request)
        if job is None or job.ended:
            yield {}  # Gradio empties the outputs of a generator without values
            return
        async with contextlib.aclosing(job.follow()) as texts:
            async for text in texts:
                self.last(request)  # update its size in the store
                yield {"view": text, **job.extra_updates()}
        job.final_updates()

    def stop(self, request: gr.Request) -> Values:
        """Ask the job to end at its next step; `follow` yields its end, unless it waits in the queue."""
        job = self.last(request)
        return {} if job is None or job.ended else {"view": job.stop(), **job.extra_updates()}

    def _key(self, request: gr.Request) -> tuple[str, str]:
        return str(request.session_hash), self.name


# events; what creates the job; the controls with its values
Begin = Callable[[Values, Any], Job | None]  # controls and the last job -> a job
Start = tuple[Sequence[object], Begin, Parts]


def wire(
    jobs: Jobs[Any], starts: Sequence[Start], parts: Parts, stop: gr.Button, off: Sequence[object], first: str = ""
) -> list[Any]:
    """Connect Run and Stop of a tab, and a hidden button, `NAME-rejoin`, that a script clicks to rejoin a run; return
    the events at which a job of each start has ended.

    starts: ways to start a job: events, a function that creates it from the values of controls and the last job, and
    those controls. parts: `view`, which shows the text, and further components that a job updates. off: buttons
    disabled during a job. first: a script that a start waits for.
    """
    place = gr.HTML(elem_id=f"{jobs.name}-place", elem_classes="sd-place")  # in the queue, read by helpers.js
    turn = QUEUED | {"show_progress": "minimal", "show_progress_on": place}
    switched = {"stop": stop, **{str(i): button for i, button in enumerate(off)}}
    everything = {**parts, **switched}

    def switch(running: bool) -> Values:
        return {name: gr.update(interactive=running == (name == "stop")) for name in switched}

    def begin(start: Begin, request: gr.Request, values: Values) -> Values:
        try:
            job = start(values, jobs.last(request))
        except ValueError as error:
            return {"view": refusal(error, jobs.key(values))}
        return {"view": jobs.keep(request, job).text, **switch(not job.ended)} if job else {}

    def on_stop(request: gr.Request, _: Values) -> Values:
        updates, job = jobs.stop(request), jobs.last(request)
        running = job is not None and not job.ended
        return updates | ({"stop": gr.update(interactive=False)} if running else switch(False))

    def started(on: Any, start: Begin, given: Parts) -> object:
        begun = named(on, partial(begin, start), given, everything, trigger_mode="once", **QUIET)
        event = named(begun.success, jobs.follow, {}, everything, **turn)
        for after in (event.success, event.failure):
            named(after, lambda *_: switch(False), {}, switched, **QUIET)
        return event

    ended = []
    for pressed, start, given in starts:
        on = partial(gr.on, pressed)
        ended.append(started(on(None, None, None, js=first, **QUIET).then if first else on, start, given))
    again, run = gr.Button("Rejoin", elem_id=f"{jobs.name}-rejoin", elem_classes="sd-rejoin"), gr.JSON(visible=False)
    found = again.click(None, None, run, js=f"() => sessionStorage.getItem('specdemo.{jobs.name}') ?? ''", **QUIET)
    ended.append(started(found.then, jobs.rejoin, {"run": run}))
    named(stop.click, on_stop, {}, everything, **QUIET)
    return ended


def named(
    event: Callable[..., object], function: Handler, given: Parts, shown: Parts, data: str = "", **settings: object
) -> Any:
    """Wire an event to a function from named values of controls to named updates; {} changes nothing. data: the name
    of the event's data among the values.
    """

    def placed(updates: Values) -> object:
        return {shown[name]: update for name, update in updates.items()} or gr.skip()

    def read(values: dict[object, object]) -> Values:
        return {name: values[control] for name, control in given.items()}

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
