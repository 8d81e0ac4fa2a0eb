"""Queue for the engine: one call uses it, the others wait in the order of arrival, as suspended coroutines, which hold
no thread.

One turn is bounded by `space.turn_s`. A page chooses its session id itself, so a visitor is an address plus a session.
Visitors and addresses, which a whole class may share, have a limited number of places.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import gradio as gr

from specdemo.ui.security import address

PLACES, ADDRESS_PLACES, VISITOR_PLACES = 200, 64, 20  # waiting calls: in total, per address, per visitor
TURNS = 10  # past turns from which the waiting time is estimated
FIRST_S = 10.0  # assumed duration of a turn before the first one has ended
UPDATE_S = 1.0  # between two lines about the place of a waiting call

Visitor = tuple[str, str]


@dataclass(frozen=True, eq=False)
class Call:
    """A call that waits for the engine or uses it. `task` runs it."""

    visitor: Visitor
    task: asyncio.Task[object] | None = None
    turn: asyncio.Event = field(default_factory=asyncio.Event)  # set when its turn begins


class Turns:
    """Past and current turns on an engine, and the calls that wait for one. All calls run in one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._past: deque[float] = deque(maxlen=TURNS)  # seconds
        self._current: tuple[Call, float] | None = None  # call and start of the current turn
        self._waiting: list[Call] = []  # in the order of their turns

    @contextmanager
    def line(self, request: gr.Request) -> Iterator[Call]:
        """Put a visitor's call in line. On exit it leaves the line or ends its turn. Raises gr.Error if the line is
        full.
        """
        where = address(request.request) if request.request else ""
        try:
            call = self.join((where, str(request.session_hash)), asyncio.current_task())
        except ValueError as error:
            raise gr.Error(str(error), print_exception=False) from None
        try:
            yield call
        finally:
            self.leave(call)

    def join(self, visitor: Visitor, task: asyncio.Task[object] | None = None) -> Call:
        """Add a call to the line; its turn may begin at once. Raises ValueError if the line is full."""
        self._check_room(visitor)
        call = Call(visitor, task)
        self._waiting.append(call)
        self._grant()
        return call

    def leave(self, call: Call) -> None:
        """Remove a call from the line, or end its turn."""
        if self._current is not None and self._current[0] is call:
            self._past.append(self._clock() - self._current[1])
            self._current = None
        elif call in self._waiting:
            self._waiting.remove(call)
        self._grant()

    @property
    def crowded(self) -> bool:
        """Return whether a call waits for its turn."""
        return bool(self._waiting)

    async def forget(self, request: gr.Request) -> None:
        """Cancel the waiting calls of a page that was closed."""
        for call in self._waiting:
            if call.visitor[1] == request.session_hash and call.task is not None:
                call.task.cancel()

    async def wait(self, call: Call) -> AsyncIterator[str]:
        """Yield the place in line and the expected time, once a second, until the call's turn begins."""
        while not call.turn.is_set():
            yield self.place(call)
            with suppress(TimeoutError):
                async with asyncio.timeout(UPDATE_S):
                    await call.turn.wait()

    def place(self, call: Call) -> str:
        """Return the place of a waiting call, and the time until its turn as estimated from the last turns."""
        ahead = self._waiting.index(call)
        usual = sum(self._past) / len(self._past) if self._past else FIRST_S
        rest = max(usual - (self._clock() - self._current[1]), 0.0) if self._current else 0.0
        seconds = math.ceil(rest + usual * ahead)
        expected = f", about {seconds} s" if seconds else ""
        return f"Waiting: place {ahead + 1} of {len(self._waiting)} in line{expected}."

    def _grant(self) -> None:
        """Begin the turn of the first call if the engine is free."""
        if self._current is None and self._waiting:
            call = self._waiting.pop(0)
            self._current = call, self._clock()
            call.turn.set()

    def _check_room(self, visitor: Visitor) -> None:
        waiting = [call.visitor for call in self._waiting]
        if waiting.count(visitor) >= VISITOR_PLACES:
            raise ValueError(f"{VISITOR_PLACES} of your calls are already queued; wait until one finishes")
        if len(waiting) >= PLACES or [where for where, _ in waiting].count(visitor[0]) >= ADDRESS_PLACES:
            raise ValueError("the queue is full; try again in a minute")


ENGINE = Turns()  # of this process
