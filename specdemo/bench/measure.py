"""Measurement loop of the suites.

Repeats are interleaved (A B C A B C), so that a machine that warms up or slows down affects all lanes equally. A number
covers all runs and has a 95 % interval from three repeats on. A stopped suite returns its finished repeats.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Self, TypeVar

import torch
from torch import Tensor

from specdemo.bench.base import Report, SoFar, Stop, Tick
from specdemo.bench.report import sentence
from specdemo.bench.result import THOROUGH, Result, Row
from specdemo.core import timing_spread
from specdemo.core.accept import AcceptRule
from specdemo.core.estimate import Estimate, RunTiming, over_repeats, rate, speedup, waited_share
from specdemo.core.protocol import GenerationConfig, Target
from specdemo.core.sampling import Sampling
from specdemo.core.tally import Tally, ratio
from specdemo.core.trace import RunTrace, StepEvent, decode_timing, step_ms
from specdemo.engine.comparison import Comparison
from specdemo.engine.loop import generate, warm_up
from specdemo.engine.session import Session
from specdemo.methods.base import Method
from specdemo.models.errors import Cancelled
from specdemo.models.machine import GpuClock

T = TypeVar("T")
MACHINE = 3  # maximum number of noise reasons from the machine; they contain clock rates, which differ between runs


def run_repeats(
    count: int, report: Report, cancelled: Stop, once: Callable[[int, Tick], T], noun: str = "repeat"
) -> tuple[list[T], list[str]]:
    """Call once(repeat, tick) `count` times; return the results, and a remark if stopped.

    Raises ValueError if stopped before the first repeat was complete.
    """
    done: list[T] = []
    try:
        for repeat in range(count):

            def tick(share: float, so_far: SoFar | None = None, /, repeat: int = repeat) -> None:
                if cancelled():
                    raise Cancelled("stopped")
                report((repeat + share) / count, f"{noun} {repeat + 1} of {count}", so_far)

            tick(0.0)
            done.append(once(repeat, tick))
    except Cancelled:
        if not done:
            raise ValueError(f"stopped before the first {noun} was complete, so nothing was measured") from None
        return done, [f"stopped after {len(done)} of {count} {noun}s"]
    return done, []


@dataclass(slots=True)
class Totals:
    """Totals of one lane over some prompts; all rows count."""

    rows: list[Tally] = field(default_factory=list)
    prefills: list[float] = field(default_factory=list)
    runs: list[RunTiming] = field(default_factory=list)

    @classmethod
    def of(cls, runs: Iterable[Sequence[StepEvent]]) -> Self:
        """Return the totals of some generations."""
        totals = cls()
        for events in runs:
            totals.add(events)
        return totals

    def add(self, events: Sequence[StepEvent]) -> None:
        """Count one generation's steps, of all its rows."""
        rows = [Tally.of(events, row) for row in range(len(events[0].emitted))]
        self.rows += rows
        self.prefills.append(step_ms(events[0]))
        self.runs.append(decode_timing(events))

    @property
    def acceptance_rate(self) -> float | None:
        """Return accepted / drafted tokens; None if nothing was drafted."""
        return ratio(sum(row.accepted for row in self.rows), sum(row.drafted for row in self.rows))

    @property
    def tokens_per_pass(self) -> float | None:
        """Return output tokens per target pass and row; None without a pass."""
        return ratio(sum(row.tokens for row in self.rows), sum(row.steps for row in self.rows))


def tally_row(
    lane: str, where: Mapping[str, object], own: Sequence[Totals], plain: Sequence[Totals], machine: Iterable[str] = ()
) -> Row:
    """Return the row of a lane from its tallies and those of plain decoding, one per repeat.

    where: the columns that identify the row. machine: why no time that was measured on the machine can be trusted.
    """
    every = Totals([row for totals in own for row in totals.rows])
    own_runs, plain_runs = _runs(own), _runs(plain)
    speed = Estimate(1.0, 1.0, 1.0) if own is plain else speedup(plain_runs, own_runs, shared=False)
    if speed and own is not plain:
        speed = replace(speed, reasons=(*timing_spread.reasons(plain_runs, own_runs, speed), *islice(machine, MACHINE)))
    return {
        "lane": lane,
        **where,
        "tokens/s": _thorough(rate(own_runs), len(own)),
        "speed-up": _thorough(speed, len(own)),
        "accepted": every.acceptance_rate,
        "tokens/pass": every.tokens_per_pass,
    }


def _runs(repeats: Iterable[Totals]) -> list[RunTiming]:
    return [run for totals in repeats for run in totals.runs]


def _percentages(shares: Sequence[float]) -> str:
    """Format the range of some shares as `0 %` or `17 to 51 %`."""
    low, high = (f"{100.0 * share:.0f}" for share in (min(shares), max(shares)))
    return f"{low} %" if low == high else f"{low} to {high} %"


def _thorough(number: Estimate | None, repeats: int) -> Estimate | None:
    """Round an estimate; drop its interval if there are too few repeats."""
    if number is None:
        return None
    ends = (number.low, number.high) if repeats >= THOROUGH else (None, None)
    low, high = (None if end is None else round(end, 4) for end in ends)
    return replace(number, value=round(number.value, 4), low=low, high=high)


@dataclass(frozen=True, slots=True)
class LaneRuns:
    """Result of `compare_lanes`. traces: [repeat][text], the last repeat may be unfinished; lane 0 is plain decoding.
    stopped: remarks on a stop."""

    traces: list[list[RunTrace]]
    stopped: list[str]

    @property
    def every(self) -> list[RunTrace]:
        """Return the runs of all repeats."""
        return [trace for traces in self.traces for trace in traces]

    def events(self, lane: int) -> list[list[StepEvent]]:
        """Return the events of a lane by run."""
        return [trace.lanes[lane].events for trace in self.every]

    def rows(self, where: Sequence[Mapping[str, object]]) -> list[Row]:
        """Return one row per lane. where[i]: columns of lane i."""
        machine = dict.fromkeys(reason for trace in self.every for reason in _machine_reasons(trace))
        plain, rows = self._totals(0), []
        for lane, columns in enumerate(where):
            own = self._totals(lane) if lane else plain
            verdicts = Counter(str(trace.comparison[lane - 1]["verdict"]) for trace in self.every if lane)
            words = (f"{count} {word}" if len(verdicts) > 1 else word for word, count in verdicts.items())
            row = tally_row(self.every[-1].lanes[lane].name, columns, own, plain, machine)
            rows.append(row | {"output": ", ".join(words) or None})
        return rows

    @property
    def remarks(self) -> list[str]:
        """Return remarks on the time that the lanes waited, on a stop, and the notes of the last run."""
        last = self.every[-1]
        waited = [waited_share(_runs(self._totals(lane))) for lane in range(len(last.lanes))]
        shares = [share for share in waited if share is not None]
        contention = [f"CPU contention: {_percentages(shares)} of the time of the lanes."] if shares else []
        return [*contention, *self.stopped, *(f"{sentence(note)}." for note in last.notes)]

    def _totals(self, lane: int) -> list[Totals]:
        """Return the totals of a lane by repeat."""
        return [Totals.of(trace.lanes[lane].events for trace in traces) for traces in self.traces if traces]


def compare_lanes(
    runner: Session,
    spec: Comparison,
    texts: Sequence[str],
    repeats: int,
    report: Report,
    cancelled: Stop,
    result: Callable[[LaneRuns], Result],
) -> LaneRuns:
    """Compare the lanes of `spec` with plain decoding, one after the other on every text, `repeats` times. result:
    returns the result of the runs so far."""
    every: list[list[RunTrace]] = []  # with the unfinished repeat

    def once(_repeat: int, tick: Tick) -> list[RunTrace]:
        every.append([])
        for number, text in enumerate(texts):
            tick(number / len(texts))
            trace = run_complete(runner, spec.model_copy(update={"prompt": text}), cancelled)
            every[-1].append(trace)
            tick((number + 1) / len(texts), lambda: result(LaneRuns(every, [])))  # raises after an interrupted run
        return every[-1]

    return LaneRuns(*run_repeats(repeats, report, cancelled, once))


def _machine_reasons(trace: RunTrace) -> list[str]:
    """Return what the machine's own sensors found wrong during a run."""
    reasons = trace.environment.get("noise", [])
    return [str(reason) for reason in reasons] if isinstance(reasons, list) else []


def run_complete(runner: Session, spec: Comparison, cancelled: Stop) -> RunTrace:
    """Run a comparison in which no lane may fail. Raises ValueError with one line."""
    trace = runner.run(spec, cancelled)
    for lane in trace.lanes:
        if lane.finish == "error":
            raise ValueError(f"lane {lane.name!r} failed: {lane.note}")
        if not lane.events and not cancelled():
            raise ValueError(f"lane {lane.name!r} generated no tokens")
    return trace


@dataclass(frozen=True, slots=True)
class Decoder:
    """Decoding setup: drafter, acceptance rule and config."""

    drafter: Method
    accept: AcceptRule
    config: GenerationConfig


@dataclass(frozen=True, slots=True)
class AxisPoint:
    """Point of an axis: its value, the prompts [B, T] and the sampling settings."""

    value: float | str
    prompts: list[Tensor]
    sampling: Sampling = field(default_factory=Sampling)


def measure_points(
    target: Target,
    lanes: Mapping[str, Decoder],
    points: Sequence[AxisPoint],
    axis: str,
    repeats: int,
    report: Report,
    cancelled: Stop,
    result: Callable[[list[Row]], Result],
) -> tuple[list[Row], list[str], int]:
    """Measure every lane at every point of the axis, interleaved; return rows, remarks and finished repeats. The first
    lane is plain decoding. result: returns the result of the rows so far.
    """

    machine: list[dict[str, None]] = [{} for _ in points]
    every: list[list[list[Totals]]] = []  # with the unfinished repeat

    def rows(done: Sequence[Sequence[Sequence[Totals]]]) -> list[Row]:
        """Return a row per point and lane. done[repeat][point][lane]: totals of the measured points."""
        measured = [[tallies[number] for tallies in done if number < len(tallies)] for number in range(len(points))]
        return [
            _point_row(name, {axis: point.value}, index, own, machine[number])
            for number, (point, own) in enumerate(zip(points, measured, strict=True))
            for index, name in enumerate(lanes if own else ())
        ]

    def once(repeat: int, tick: Tick) -> list[list[Totals]]:
        tallies: list[list[Totals]] = []
        every.append(tallies)
        for number, point in enumerate(points):
            tallies.append([Totals() for _ in lanes])
            gpu = None
            for tally, decoder in zip(tallies[-1], lanes.values(), strict=True):
                config = replace(decoder.config, sampling=point.sampling, seed=repeat)
                run = partial(generate, target, decoder.drafter, accept=decoder.accept, cancelled=cancelled)
                if not repeat:  # warm up every shape
                    tick(number / len(points))
                    longest = max(point.prompts, key=lambda prompt: prompt.shape[1])
                    warm_up(target, decoder.drafter, longest, config, decoder.accept, cancelled)
                gpu = gpu or GpuClock(target.device)  # after the warm-up, when the GPU has left its idle clock
                for prompt in point.prompts:
                    tick(number / len(points))
                    tally.add(list(run(prompt, config)))
            machine[number] |= dict.fromkeys(gpu.reasons() if gpu else ())
            tick((number + 1) / len(points), lambda: result(rows(every)))  # raises after an interrupted run
        return tallies

    done, remarks = run_repeats(repeats, report, cancelled, once)
    return rows(done), remarks, len(done)


def _point_row(
    name: str, where: Mapping[str, object], lane: int, done: Sequence[Sequence[Totals]], machine: Iterable[str]
) -> Row:
    """Return the row of a lane at a point of the axis. done[repeat][lane]: totals at this point."""
    plain = [totals[0] for totals in done]
    own = [totals[lane] for totals in done] if lane else plain
    first = over_repeats([sum(totals.prefills) / len(totals.prefills) for totals in own])
    return tally_row(name, where, own, plain, machine) | {"TTFT ms": first}


def windows(text: Sequence[int], width: int, count: int, device: torch.device) -> list[Tensor]:
    """`count` windows [1, width] on token ids that repeat without end, evenly spread over them."""
    endless = [*text] * (2 + width // len(text))
    starts = [i * len(text) // count for i in range(count)]
    return [torch.tensor([endless[start : start + width]], device=device) for start in starts]
