"""Fair queue of the engine: Gradio's queue with turns by visitor.

Gradio's queue is first come, first served: one visitor may fill it, and the next is rejected. Replacing it costs less
than a second queue behind it: waiting calls hold no thread, and the page shows position and time through Gradio's
messages.

No visitor has two turns while another waits. The waiting time of a call starts when it arrives or when its visitor's
last turn ends, whichever is later; the longest wait is next. A visitor who used the engine for more than SHARE_S of the
last hour waits for all others. One turn is bounded by `space.turn_s`. A page chooses its session id itself, so a
visitor is an address plus a session, and calls without a session are one visitor. An address, which a whole class may
share, has its own share and number of places.
"""

import time
from collections import Counter, deque
from typing import Any, Literal

import fastapi
import gradio as gr
from gradio.data_classes import PredictBodyInternal
from gradio.queueing import Event, Queue
from gradio.route_utils import get_fn
from gradio.server_messages import EstimationMessage, EventMessage
from gradio.utils import LRUCache

from specdemo.ui.hosts import address
from specdemo.ui.job import ENGINE

SHARE_S, ADDRESS_SHARE_S, HOUR_S = 300.0, 1200.0, 3600.0
PLACES, ADDRESS_PLACES, VISITOR_PLACES = 200, 64, 20  # waiting calls: in total, per address, per visitor
TURNS = 2000  # past turns to remember
FIRST_S = 10.0  # assumed duration of a turn before the first one has ended
SESSIONS = 300  # sessions with stored messages

Visitor = tuple[str, str]


class Turns:
    """Past and current turns on the engine."""

    def __init__(self) -> None:
        self._past: deque[tuple[Visitor, float, float]] = deque(maxlen=TURNS)
        self._now: tuple[str, Visitor, float] | None = None  # call, visitor and start of the current turn

    def begin(self, call: str, visitor: Visitor, now: float) -> None:
        """Record that a visitor's call uses the engine from `now` on."""
        self._now = call, visitor, now

    def end(self, now: float, call: str | None = None) -> None:
        """End the current turn if it belongs to this call."""
        if self._now is not None and call in (None, self._now[0]):
            _, visitor, start = self._now
            self._past.append((visitor, start, now))
            self._now = None

    def order(self, waiting: list[tuple[str, Visitor, float]], now: float) -> list[str]:
        """Return the calls in the order of their turns.

        waiting: call, visitor and time of arrival.
        """
        used: Counter[Visitor | str] = Counter()
        last: dict[Visitor, float] = {}
        for visitor, start, ended in self._past:
            if ended > now - HOUR_S:
                used.update({visitor: ended - start, visitor[0]: ended - start})
                last[visitor] = ended
        if self._now is not None:
            last[self._now[1]] = now
        ahead: Counter[Visitor] = Counter()
        places: dict[str, tuple[bool, int, float]] = {}
        for call, visitor, came in sorted(waiting, key=lambda one: one[2]):
            late = used[visitor] > SHARE_S or used[visitor[0]] > ADDRESS_SHARE_S
            places[call] = late, ahead[visitor], max(came, last.get(visitor, came))
            ahead[visitor] += 1
        return sorted(places, key=places.__getitem__)

    def seconds(self, waiting: int, now: float) -> list[float]:
        """Estimate the time until `waiting` calls have had their turns, from the last ten turns."""
        recent = [ended - start for _, start, ended in list(self._past)[-10:]]
        usual = sum(recent) / len(recent) if recent else FIRST_S
        rest = max(usual - (now - self._now[2]), 0.0) if self._now else 0.0
        return [rest + usual * place for place in range(1, waiting + 1)]


class FairQueue(Queue):
    """Queue of calls that use the engine, one at a time."""

    def __init__(self, page: gr.Blocks) -> None:
        super().__init__(False, page.max_threads, 1, None, page)  # positions and times are sent every second
        self._turns = Turns()
        self.pending_messages_per_session = LRUCache(SESSIONS)
        self.ANALYTICS_MAX_EVENTS = 100

    async def push(
        self, body: PredictBodyInternal, request: fastapi.Request, username: str | None
    ) -> tuple[bool, str | list[dict[str, Any]], Literal["success", "error", "queue_full", "validator_error"]]:
        """Accept a call, or reject it if its visitor has enough of them waiting."""
        if body.fn_index is not None and not get_fn(self.blocks, None, body).queue:
            return False, "this function is not called through the queue", "error"
        refused = self._full(address(request), body.session_hash or "")
        if refused:
            return False, refused, "queue_full"
        for session in [s for s, calls in self.pending_event_ids_session.items() if not calls]:
            del self.pending_event_ids_session[session]  # Gradio never deletes them
        pushed = await super().push(body, request, username)
        self._arrange()
        return pushed

    def get_events(self) -> tuple[list[Event], bool, str] | None:
        """Return the next call, of the visitor whose turn it is."""
        lane = self.event_queue_per_concurrency_id.get(ENGINE["concurrency_id"])
        if lane is not None and lane.queue and not lane.current_concurrency:
            self._turns.end(time.monotonic())
            self._arrange()
        picked = super().get_events()
        if picked:
            event = picked[0][0]
            self._turns.begin(event._id, _visitor(event), time.monotonic())
        return picked

    async def process_events(self, events: list[Event], *rest: Any, **more: Any) -> None:
        """Run a call and record when it ends."""
        try:
            await super().process_events(events, *rest, **more)
        finally:
            self._turns.end(time.monotonic(), events[0]._id)

    def send_message(self, event: Event, event_message: EventMessage) -> None:
        """Send a message to a caller who is still connected."""
        if event.session_hash in self.pending_messages_per_session:  # otherwise Gradio's queue would stop
            super().send_message(event, event_message)

    def broadcast_estimations(self, concurrency_id: str, after: int | None = None) -> None:
        """Send all waiting callers their position and time."""
        waiting = self.event_queue_per_concurrency_id[concurrency_id].queue
        times = self._turns.seconds(len(waiting), time.monotonic())
        for rank, (event, eta) in enumerate(zip(waiting, times, strict=True)):
            self.send_message(event, EstimationMessage(rank=rank, rank_eta=eta, queue_size=len(waiting)))

    def _arrange(self) -> None:
        for lane in self.event_queue_per_concurrency_id.values():
            calls = [(event._id, _visitor(event), event.enqueue_time) for event in lane.queue]
            order = {call: place for place, call in enumerate(self._turns.order(calls, time.monotonic()))}
            lane.queue.sort(key=lambda event: order[event._id])

    def _full(self, address: str, session: str) -> str:
        """Return why a visitor cannot queue; "" if there is room."""
        waiting = [_visitor(event) for lane in self.event_queue_per_concurrency_id.values() for event in lane.queue]
        if waiting.count((address, session)) >= VISITOR_PLACES:
            return f"{VISITOR_PLACES} of your calls are already queued; wait until one finishes"
        if len(waiting) >= PLACES or [where for where, _ in waiting].count(address) >= ADDRESS_PLACES:
            return "the queue is full; try again in a minute"
        return ""


def _visitor(event: Event) -> Visitor:
    return address(event.request), "" if event.session_hash == event._id else event.session_hash


def queue(page: gr.Blocks) -> None:
    """Install this queue on a page. Events that use the engine cannot bypass it."""
    page.queue(api_open=False)
    page._queue = FairQueue(page)
