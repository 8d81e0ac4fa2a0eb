"""Messages of a run. `Session.stream` and `replay` yield the same ones, so a live run and a stored one are displayed by
the same code. Needs no torch: a page shows a stored run before the engine is loaded."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from specdemo.core.tally import Numbers, Tally, running_numbers
from specdemo.core.trace import LaneTrace, RunTrace, StepEvent
from specdemo.engine.race import race


@dataclass(frozen=True, slots=True)
class Started:
    """Start of a run, with the trace as known before the first step; its lanes have no events yet."""

    trace: RunTrace


@dataclass(frozen=True, slots=True)
class LaneStep:
    """One event of one lane, with the text of each emitted token, of each draft token and of the target's most likely
    tokens (`event.top`), and the lane's numbers so far (core.tally.running_numbers)."""

    lane: int
    event: StepEvent
    pieces: list[str]
    drafted: list[str]
    numbers: Numbers
    top: list[list[str]]


@dataclass(frozen=True, slots=True)
class Restarted:
    """The steps of a lane follow from its first one again: a server reported at the end which tokens were drafted."""

    lane: int


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence for the user, about one lane or the run."""

    text: str
    lane: int | None = None


@dataclass(frozen=True, slots=True)
class LaneDone:
    """End of a lane."""

    lane: int
    trace: LaneTrace


@dataclass(frozen=True, slots=True)
class Finished:
    """End of the run, with the complete trace."""

    trace: RunTrace


Message = Started | LaneStep | Restarted | Note | LaneDone | Finished


def opened(trace: RunTrace) -> Iterator[Message]:
    """Yield the first messages of a run: that it started, and its notes."""
    yield Started(trace)
    yield from map(Note, trace.notes)


class LaneSteps:
    """Messages for the steps of a lane, in order. The texts of tokens come from the trace's vocabulary."""

    def __init__(self, trace: RunTrace, lane: int) -> None:
        self._trace, self._lane = trace, lane
        self._tally, self._emitted = Tally(), 0

    def step(self, event: StepEvent) -> LaneStep:
        """Return the message of the next step."""
        lane, names = self._trace.lanes[self._lane], self._trace.vocabulary
        start, self._emitted = self._emitted, self._emitted + len(event.emitted[0])
        self._tally.add(event)
        numbers = running_numbers(self._tally, lane.remote is not None)
        drafted = [names.get(str(t), "") for t in event.drafted[0]]
        top = [[names.get(str(t), "") for t, _ in row] for row in event.top]
        return LaneStep(self._lane, event, lane.pieces[start : self._emitted], drafted, numbers, top)


def replay(trace: RunTrace) -> Iterator[Message]:
    """Yield the messages of a stored run, in the order of the lanes' clocks. Needs no model and no GPU."""
    empty = [replace(lane, events=[], token_ids=[], pieces=[], text="", summary={}) for lane in trace.lanes]
    yield from opened(replace(trace, lanes=empty, comparison=[]))
    stored = [LaneSteps(trace, index) for index in range(len(trace.lanes))]
    remaining = [len(lane.events) for lane in trace.lanes]
    for index, event in race([iter(lane.events) for lane in trace.lanes]):
        yield stored[index].step(event)
        remaining[index] -= 1
        if not remaining[index]:
            yield LaneDone(index, trace.lanes[index])
    for index, lane in enumerate(trace.lanes):
        if not lane.events:
            yield LaneDone(index, lane)
    yield Finished(trace)
