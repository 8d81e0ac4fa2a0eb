"""What a run says while it runs. `Session.stream` and `replay` yield the same messages, so whoever shows a run cannot
tell a live one from a stored one. Needs no torch: a page shows a stored run before the engine is there."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from specdemo.core.tally import Numbers, Tally, so_far
from specdemo.core.trace import LaneTrace, RunTrace, StepEvent
from specdemo.engine.race import race


@dataclass(frozen=True, slots=True)
class Started:
    """The trace as far as it is known before the first step; its lanes have no events yet."""

    trace: RunTrace


@dataclass(frozen=True, slots=True)
class Step:
    """One event of one lane, with the text each emitted token added and of each drafted token alone, and what the lane
    adds up to behind it (core.tally.so_far)."""

    lane: int
    event: StepEvent
    pieces: list[str]
    drafted: list[str]
    so_far: Numbers


@dataclass(frozen=True, slots=True)
class Note:
    text: str
    lane: int | None = None


@dataclass(frozen=True, slots=True)
class LaneDone:
    lane: int
    trace: LaneTrace


@dataclass(frozen=True, slots=True)
class Finished:
    trace: RunTrace


Message = Started | Step | Note | LaneDone | Finished


def opened(trace: RunTrace) -> Iterator[Message]:
    """Yield the first messages of a run: that it started, and its notes."""
    yield Started(trace)
    yield from map(Note, trace.notes)


def replay(trace: RunTrace) -> Iterator[Message]:
    """The messages of a stored run, in the order of the lanes' clocks; needs no model and no GPU."""
    empty = [replace(lane, events=[], token_ids=[], pieces=[], text="", summary={}) for lane in trace.lanes]
    yield from opened(replace(trace, lanes=empty, comparison=[]))
    tallies = [Tally() for _ in trace.lanes]
    given = [0] * len(trace.lanes)
    left = [len(lane.events) for lane in trace.lanes]
    for index, event in race([iter(lane.events) for lane in trace.lanes]):
        start, given[index] = given[index], given[index] + len(event.emitted[0])
        pieces = trace.lanes[index].pieces[start : given[index]]
        tallies[index].add(event)
        numbers = so_far(tallies[index], trace.lanes[index].remote is not None)
        yield Step(index, event, pieces, [trace.vocabulary.get(str(t), "") for t in event.drafted[0]], numbers)
        left[index] -= 1
        if not left[index]:
            yield LaneDone(index, trace.lanes[index])
    for index, lane in enumerate(trace.lanes):
        if not lane.events:
            yield LaneDone(index, lane)
    yield Finished(trace)
