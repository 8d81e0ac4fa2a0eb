"""Device time of one step, split into named laps. Nothing between two steps is ever counted."""

import time
from collections.abc import Callable
from typing import Protocol

import torch


class Stopwatch(Protocol):
    def start(self) -> None:
        """Begin a step."""

    def lap(self, name: str) -> None:
        """What ran since the last lap was `name`; laps of one name add up."""

    def read(self) -> dict[str, float]:
        """End the step: milliseconds per name, in the order of the laps."""


class CpuStopwatch:
    """Wall clock of the calling thread's work; `now` returns seconds."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._last = 0.0
        self._ms: dict[str, float] = {}

    def start(self) -> None:
        self._ms = {}
        self._last = self._now()

    def lap(self, name: str) -> None:
        now = self._now()
        self._ms[name] = self._ms.get(name, 0.0) + (now - self._last) * 1000.0
        self._last = now

    def read(self) -> dict[str, float]:
        return {name: round(ms, 4) for name, ms in self._ms.items()}


class CudaStopwatch:
    """CUDA events on the device's current stream; `read` is the step's one host synchronisation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._names: list[str] = []

    def _record(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))  # or else of the current device's
        self._events.append(event)

    def start(self) -> None:
        self._events, self._names = [], []
        self._record()

    def lap(self, name: str) -> None:
        self._names.append(name)
        self._record()

    def read(self) -> dict[str, float]:
        self._events[-1].synchronize()
        ms: dict[str, float] = {}
        for name, before, after in zip(self._names, self._events, self._events[1:], strict=False):
            ms[name] = ms.get(name, 0.0) + before.elapsed_time(after)
        return {name: round(value, 4) for name, value in ms.items()}


def stopwatch_for(device: torch.device) -> Stopwatch:
    return CudaStopwatch(device) if device.type == "cuda" else CpuStopwatch()
