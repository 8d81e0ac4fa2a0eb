"""The order in which lanes step on one device. A lane is an iterator of StepEvents; its clock is the device time its
own steps took, so lanes never disturb each other's clock."""

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial

from specdemo.core.trace import StepEvent, step_ms

Steps = Generator[tuple[int, StepEvent], None, None]  # each with the index of its lane


def race(lanes: Sequence[Iterator[StepEvent]], in_turn: bool = True) -> Steps:
    """Virtual time: the lane whose clock is furthest behind steps next, ties to the first. Not in turn: one lane after
    the other."""
    clocks = [0.0] * len(lanes)
    running = list(range(len(lanes)))
    try:
        while running:
            lane = min(running, key=clocks.__getitem__) if in_turn else running[0]
            event = next(lanes[lane], None)
            if event is None:
                running.remove(lane)
            else:
                clocks[lane] += step_ms(event)
                yield lane, event
    finally:
        for each in lanes:
            if isinstance(each, Generator):
                each.close()


sequential = partial(race, in_turn=False)
SCHEDULES: dict[str, Callable[[Sequence[Iterator[StepEvent]]], Steps]] = {"race": race, "sequential": sequential}
