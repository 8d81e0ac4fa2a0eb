"""Order in which lanes step on one device. A lane is an iterator of StepEvents; its clock is the device time of its own
steps, so that lanes do not affect each other's clock."""

from collections.abc import Generator, Iterator, Sequence

from specdemo.core.trace import StepEvent, step_ms


def race(lanes: Sequence[Iterator[StepEvent]]) -> Generator[tuple[int, StepEvent], None, None]:
    """Run in virtual time: the lane with the smallest clock steps next, ties go to the first."""
    clocks = [0.0] * len(lanes)
    running = set(range(len(lanes)))
    try:
        while running:
            lane = min(running, key=lambda i: (clocks[i], i))
            event = next(lanes[lane], None)
            if event is None:
                running.remove(lane)
            else:
                clocks[lane] += step_ms(event)
                yield lane, event
    finally:
        _close(lanes)


def sequential(lanes: Sequence[Iterator[StepEvent]]) -> Generator[tuple[int, StepEvent], None, None]:
    """Run one lane after the other."""
    try:
        for index, lane in enumerate(lanes):
            for event in lane:
                yield index, event
    finally:
        _close(lanes)


SCHEDULES = {"race": race, "sequential": sequential}


def _close(lanes: Sequence[Iterator[StepEvent]]) -> None:
    for lane in lanes:
        if isinstance(lane, Generator):
            lane.close()
