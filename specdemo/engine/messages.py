"""Messages of a run. `Session.stream` and `replay` yield the same ones, so a live run and a stored one are displayed by
the same code. Needs no torch.

Lanes step in an order that depends on their clocks: a clock is the device time of a lane's own steps, so that lanes do
not affect each other's.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, repeat

from specdemo.core.tally import Numbers, Tally, running_numbers
from specdemo.core.trace import LaneTrace, Outcome, RunTrace, StepEvent, draft_outcomes, output_outcomes, step_ms


@dataclass(frozen=True, slots=True)
class RunStage:
    """Start of a part of the run: one of STAGES, or COMPARING. Progress that is reported from then on is its own."""

    name: str


@dataclass(frozen=True, slots=True)
class Started:
    """Start of a run, with the trace as known before the first step; its lanes have no events yet."""

    trace: RunTrace


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step of a lane as the page draws it: row 0 of its event under the names of the trace, with texts for ids."""

    lane: int
    index: int
    ms: dict[str, float]
    wall_ms: float | None
    output_outcomes: list[Outcome]
    text: list[str]  # that each emitted token added
    drafted: list[str]  # text of each draft token
    draft_outcomes: list[Outcome | None]  # None: absent
    parents: list[int]
    path: list[int]
    draft_probs: list[float | None]
    target_probs: list[float | None]
    top: list[list[tuple[str, float, bool]]]  # as in the event: text, probability, True for the output token
    notes: dict[str, float]
    so_far: Numbers  # of the lane (core.tally.running_numbers)


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


STAGES = LOADING, MEASURING, WARMING_UP, RACING = "loading", "measuring passes", "warming up", "racing"
COMPARING = "comparing the texts"  # after the last step; reading two texts that parted can take as long as the race
Ordered = Generator[tuple[int, StepEvent], None, None]  # steps with the indices of their lanes
RunMessage = RunStage | Started | StepRow | Restarted | Note | LaneDone | Finished


def opened(trace: RunTrace) -> Iterator[RunMessage]:
    """Yield the first messages of a run: that it started, and its notes."""
    yield Started(trace)
    yield from map(Note, trace.notes)


class LaneSteps:
    """Rows for the steps of a lane, in order. The texts of tokens come from the trace's vocabulary."""

    def __init__(self, trace: RunTrace, lane: int) -> None:
        self._trace, self._lane = trace, lane
        self._tally, self._emitted = Tally(), 0

    def step(self, event: StepEvent) -> StepRow:
        """Return the row of the next step."""
        lane, names = self._trace.lanes[self._lane], self._trace.vocabulary
        start, self._emitted = self._emitted, self._emitted + len(event.emitted[0])
        self._tally.add(event)
        outputs = chain(event.emitted[0], repeat(None))
        return StepRow(
            lane=self._lane,
            index=event.index,
            ms=event.ms,
            wall_ms=event.wall_ms,
            output_outcomes=output_outcomes(event),
            text=lane.pieces[start : self._emitted],
            drafted=[names.get(str(token), "") for token in event.drafted[0]],
            draft_outcomes=draft_outcomes(event),
            parents=event.parents[0],
            path=event.path[0],
            draft_probs=event.draft_probs[0],
            target_probs=event.target_probs[0],
            top=[
                [(names.get(str(token), ""), p, token == output) for token, p in row]
                for row, output in zip(event.top, outputs, strict=False)
            ],
            notes=event.notes,
            so_far=running_numbers(self._tally, lane.timing),
        )


def replay(trace: RunTrace) -> Iterator[RunMessage]:
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


def race(lanes: Sequence[Iterator[StepEvent]], interleaved: bool = True) -> Ordered:
    """Run in virtual time: the lane with the smallest clock steps next, ties go to the first.

    interleaved: False stops the clocks, so that one lane runs after the other.
    """
    clocks = [0.0] * len(lanes)
    running = set(range(len(lanes)))
    try:
        while running:
            lane = min(running, key=lambda i: (clocks[i], i))
            event = next(lanes[lane], None)
            if event is None:
                running.remove(lane)
            else:
                clocks[lane] += step_ms(event) if interleaved else 0.0
                yield lane, event
    finally:
        for steps in lanes:
            if isinstance(steps, Generator):
                steps.close()


sequential = partial(race, interleaved=False)
SCHEDULES: Mapping[str, Callable[..., Ordered]] = {"race": race, "sequential": sequential}
