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


Message = Started | LaneStep | Note | LaneDone | Finished


def opened(trace: RunTrace) -> Iterator[Message]:
    """Yield the first messages of a run: that it started, and its notes."""
    yield Started(trace)
    yield from map(Note, trace.notes)


def replay(trace: RunTrace) -> Iterator[Message]:
    """Yield the messages of a stored run, in the order of the lanes' clocks. Needs no model and no GPU."""
    empty = [replace(lane, events=[], token_ids=[], pieces=[], text="", summary={}) for lane in trace.lanes]
    yield from opened(replace(trace, lanes=empty, comparison=[]))
    tallies = [Tally() for _ in trace.lanes]
    emitted = [0] * len(trace.lanes)
    remaining = [len(lane.events) for lane in trace.lanes]
    for index, event in race([iter(lane.events) for lane in trace.lanes]):
        start, emitted[index] = emitted[index], emitted[index] + len(event.emitted[0])
        pieces = trace.lanes[index].pieces[start : emitted[index]]
        tallies[index].add(event)
        numbers = running_numbers(tallies[index], trace.lanes[index].remote is not None)
        drafted = [trace.vocabulary.get(str(t), "") for t in event.drafted[0]]
        top = [[trace.vocabulary.get(str(t), "") for t, _ in row] for row in event.top]
        yield LaneStep(index, event, pieces, drafted, numbers, top)
        remaining[index] -= 1
        if not remaining[index]:
            yield LaneDone(index, trace.lanes[index])
    for index, lane in enumerate(trace.lanes):
        if not lane.events:
            yield LaneDone(index, lane)
    yield Finished(trace)
