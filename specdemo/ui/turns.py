"""Turns on the engine: one call uses it, the others wait as suspended coroutines, which hold no thread.

No visitor has two turns while another waits. The waiting time of a call starts when it arrives or when its visitor's
last turn ends, whichever is later; the longest wait is next. A visitor who used the engine for more than SHARE_S of the
last hour waits for all others. One turn is bounded by `space.turn_s`. A page chooses its session id itself, so a
visitor is an address plus a session. An address, which a whole class may share, has its own share and number of places.
"""

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import gradio as gr

from specdemo.ui.hosts import address

SHARE_S, ADDRESS_SHARE_S, HOUR_S = 300.0, 1200.0, 3600.0
PLACES, ADDRESS_PLACES, VISITOR_PLACES = 200, 64, 20  # waiting calls: in total, per address, per visitor
TURNS = 2000  # past turns to remember
FIRST_S = 10.0  # assumed duration of a turn before the first one has ended
UPDATE_S = 1.0  # between two lines about the place of a waiting call

Visitor = tuple[str, str]


@dataclass(frozen=True, eq=False)
class Call:
    """A call that waits for the engine or uses it. `task` runs it."""

    visitor: Visitor
    arrived: float
    task: asyncio.Task[object] | None = None
    turn: asyncio.Event = field(default_factory=asyncio.Event)  # set when its turn begins


class Turns:
    """Past and current turns on an engine, and the calls that wait for one. All calls run in one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._past: deque[tuple[Visitor, float, float]] = deque(maxlen=TURNS)
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
        call = Call(visitor, self._clock(), task)
        self._waiting.append(call)
        self._grant()
        return call

    def leave(self, call: Call) -> None:
        """Remove a call from the line, or end its turn."""
        if self._current is not None and self._current[0] is call:
            self._past.append((call.visitor, self._current[1], self._clock()))
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
        """Return the place of a waiting call, and the time until its turn as estimated from the last ten turns."""
        ahead = self._waiting.index(call)
        recent = [end - start for _, start, end in list(self._past)[-10:]]
        usual = sum(recent) / len(recent) if recent else FIRST_S
        rest = max(usual - (self._clock() - self._current[1]), 0.0) if self._current else 0.0
        seconds = math.ceil(rest + usual * ahead)
        expected = f", about {seconds} s" if seconds else ""
        return f"Waiting: place {ahead + 1} of {len(self._waiting)} in line{expected}."

    def _grant(self) -> None:
        """Sort the line; begin the turn of the first call if the engine is free."""
        self._sort(self._clock())
        if self._current is None and self._waiting:
            call = self._waiting.pop(0)
            self._current = call, self._clock()
            call.turn.set()

    def _sort(self, now: float) -> None:
        used: Counter[Visitor | str] = Counter()
        last: dict[Visitor, float] = {}
        for visitor, start, end in self._past:
            if end > now - HOUR_S:
                used.update({visitor: end - start, visitor[0]: end - start})
                last[visitor] = end
        if self._current is not None:
            last[self._current[0].visitor] = now
        ahead: Counter[Visitor] = Counter()
        ranks: dict[Call, tuple[bool, int, float]] = {}
        for call in sorted(self._waiting, key=lambda call: call.arrived):
            visitor = call.visitor
            heavy = used[visitor] > SHARE_S or used[visitor[0]] > ADDRESS_SHARE_S
            ranks[call] = heavy, ahead[visitor], max(call.arrived, last.get(visitor, call.arrived))
            ahead[visitor] += 1
        self._waiting = sorted(ranks, key=ranks.__getitem__)

    def _check_room(self, visitor: Visitor) -> None:
        waiting = [call.visitor for call in self._waiting]
        if waiting.count(visitor) >= VISITOR_PLACES:
            raise ValueError(f"{VISITOR_PLACES} of your calls are already queued; wait until one finishes")
        if len(waiting) >= PLACES or [where for where, _ in waiting].count(visitor[0]) >= ADDRESS_PLACES:
            raise ValueError("the queue is full; try again in a minute")


ENGINE = Turns()  # of this process
