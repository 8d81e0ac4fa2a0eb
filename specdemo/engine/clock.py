"""Device time of a step, split into named laps. Time between steps is not counted.

On a GPU this is the time between CUDA events. On a CPU with one thread it is the CPU time of that thread, so that a
lane that waits for the processor is not slower; the wall time shows how long it waited. With several threads, or where
the system counts thread time in coarse ticks, it is wall time; steps with several threads in which other programs took
the cores are marked where the system counts that (Linux).
"""

import time
from collections.abc import Callable, Mapping
from functools import partial

import torch

from specdemo.models.devices import EVENTS, SYNCHRONISING, device_kind, now
from specdemo.models.machine import thread_times, uses_thread_time

WAITED_SHARE = 0.05  # of a step's time, from which on the step is marked; in quiet it is below 0.02
ThreadTimes = Mapping[str, tuple[float, float]]  # thread -> milliseconds that it ran and that it waited


class CpuStopwatch:
    """Stopwatch on CPU clocks.

    wall_ms: wall time of the last step; None if it is not comparable. waited_ms: time that the last step lost because
    other programs took the cores, if it is marked.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.perf_counter,
        wall: Callable[[], float] | None = None,
        threads: Callable[[], ThreadTimes] | None = None,
    ) -> None:
        """now: seconds. wall: seconds of a clock that runs while the thread waits. threads: see `thread_times`."""
        self.wall_ms: float | None = None
        self.waited_ms: float | None = None
        self._now, self._wall, self._threads = now, wall, threads
        self._read_threads: ThreadTimes = {}  # the last reading
        self._wall_start = 0.0
        self._last = 0.0
        self._ms: dict[str, float] = {}

    def start(self) -> None:
        """Start a step."""
        now = self._now()
        # a reading takes as long as an argmax, so the last one serves a step that follows at once
        if self._threads and now - self._last >= WAITED_SHARE * sum(self._ms.values()) / 1000.0:
            self._read_threads = self._threads()
            now = self._now()
        self._ms = {}
        self._wall_start = self._wall() if self._wall else 0.0
        self._last = now

    def lap(self, name: str) -> None:
        """Record the time since the last lap as `name`; laps of one name add up."""
        now = self._now()
        self._ms[name] = self._ms.get(name, 0.0) + (now - self._last) * 1000.0
        self._last = now

    def read(self) -> dict[str, float]:
        """End the step. Return milliseconds per name, in the order of the laps."""
        if self._wall:
            self.wall_ms = round((self._wall() - self._wall_start) * 1000.0, 4)
        if self._threads:
            total, before = sum(self._ms.values()), self._read_threads
            self._read_threads = self._threads()
            waited = _waited_ms(before, self._read_threads, total)
            self.waited_ms = round(waited, 4) if waited >= WAITED_SHARE * total else None
        return {name: round(ms, 4) for name, ms in self._ms.items()}


def _waited_ms(before: ThreadTimes, after: ThreadTimes, step_ms: float) -> float:
    """Return the longest wait of a thread that computes in a step: one that runs or waits in most of its time."""
    longest = 0.0
    for thread, (ran, waited) in after.items():
        ran_before, waited_before = before.get(thread, (ran, waited))
        if ran - ran_before + waited - waited_before > step_ms / 2.0:
            longest = max(longest, waited - waited_before)
    return longest


class CudaStopwatch:
    """Stopwatch on CUDA events of the device's current stream; `read` is the only host synchronisation of a step."""

    wall_ms: float | None = None
    waited_ms: float | None = None

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._names: list[str] = []

    def _record(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))  # default: the stream of the current device
        self._events.append(event)

    def start(self) -> None:
        """Start a step."""
        self._events, self._names = [], []
        self._record()

    def lap(self, name: str) -> None:
        """Record an event at the end of a lap."""
        self._names.append(name)
        self._record()

    def read(self) -> dict[str, float]:
        """Wait for the last event. Return milliseconds per name, in the order of the laps."""
        self._events[-1].synchronize()
        ms: dict[str, float] = {}
        for name, before, after in zip(self._names, self._events, self._events[1:], strict=False):
            ms[name] = ms.get(name, 0.0) + before.elapsed_time(after)
        return {name: round(value, 4) for name, value in ms.items()}


Stopwatch = CpuStopwatch | CudaStopwatch


def stopwatch_for(device: torch.device, wall_time: bool = False) -> Stopwatch:
    """Return the stopwatch of a device. wall_time: passes run outside the calling thread, see `TargetFacts`."""
    timing = device_kind(device).timing
    if timing == EVENTS:
        return CudaStopwatch(device)
    if uses_thread_time(device) and not wall_time:
        return CpuStopwatch(time.thread_time, time.perf_counter)
    return CpuStopwatch(partial(now, device)) if timing == SYNCHRONISING else CpuStopwatch(threads=thread_times)


def clock_name(device: torch.device, wall_time: bool = False) -> str:
    """Return the name of the clock for lanes on a device. wall_time: as for `stopwatch_for`."""
    if device_kind(device).timing == EVENTS:
        return "CUDA events"
    return "thread CPU time" if uses_thread_time(device) and not wall_time else "wall time"
