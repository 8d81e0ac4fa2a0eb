"""Measurement loop of the suites.

Repeats are interleaved (A B C A B C), so that a machine that warms up or slows down affects all lanes equally. A number
covers all runs and has a 95 % interval from three repeats on. A stopped suite returns its finished repeats.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from specdemo.bench.base import Progress, Stop
from specdemo.bench.report import sentence
from specdemo.bench.result import ALL, THOROUGH
from specdemo.core import noise
from specdemo.core.accept import AcceptRule
from specdemo.core.estimate import Estimate, RunTiming, over_repeats, rate, speedup, waited_share
from specdemo.core.protocol import GenerationConfig, Target
from specdemo.core.safe_io import read_text
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
Tick = Callable[[float], None]  # takes the fraction of a repeat that is done; raises Stopped
Show = Callable[[Callable[[], T]], None]  # takes a function that returns the measurements so far
MAX_QUESTIONS = 2000
QUESTIONS_BYTES = 16_000_000
QUESTION = 100_000  # maximum characters
MACHINE = 3  # maximum number of noise reasons from the machine; they contain clock rates, which differ between runs


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    category: str = ""


class Stopped(Exception):
    """Raised when the user cancels a suite."""


def repeated(
    count: int, report: Progress, cancelled: Stop, once: Callable[[int, Tick], T], noun: str = "repeat"
) -> tuple[list[T], list[str]]:
    """Call once(repeat, tick) `count` times; return the results, and a remark if stopped.

    Raises ValueError if stopped before the first repeat was complete.
    """
    done: list[T] = []
    try:
        for repeat in range(count):

            def tick(share: float, repeat: int = repeat) -> None:
                if cancelled():
                    raise Stopped
                report((repeat + share) / count, f"{noun} {repeat + 1} of {count}")

            tick(0.0)
            done.append(once(repeat, tick))
    except (Stopped, Cancelled):
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
    def accept_by_position(self) -> list[float | None]:
        """Return per position the share of the steps that drafted that deep and accepted a node there."""
        deepest = max((len(row.reached) for row in self.rows), default=0)
        reached = [sum(row.reached[i] for row in self.rows if i < len(row.reached)) for i in range(deepest)]
        kept = [sum(sum(row.accept_histogram[i + 1 :]) for row in self.rows) for i in range(deepest)]
        return [ratio(hits, tries) for hits, tries in zip(kept, reached, strict=True)]

    @property
    def tokens_per_pass(self) -> float | None:
        """Return output tokens per target pass and row; None without a pass."""
        return ratio(sum(row.tokens for row in self.rows), sum(row.steps for row in self.rows))


def tally_row(
    lane: str, where: Mapping[str, object], own: Sequence[Totals], plain: Sequence[Totals], machine: Iterable[str] = ()
) -> dict[str, object]:
    """Return the row of a lane from its tallies and those of plain decoding, one per repeat.

    where: the columns that identify the row. machine: why no time that was measured on the machine can be trusted.
    """
    every = Totals([row for totals in own for row in totals.rows])
    own_runs, plain_runs = _runs(own), _runs(plain)
    speed = Estimate(1.0, 1.0, 1.0) if own is plain else speedup(plain_runs, own_runs, shared=False)
    if speed and own is not plain:
        speed = replace(speed, reasons=(*noise.reasons(plain_runs, own_runs, speed), *islice(machine, MACHINE)))
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
class Compared:
    """Result of `compare_lanes`. Lane 0 is plain decoding."""

    names: list[str]
    tallies: list[dict[str, list[Totals]]]  # per repeat: category -> totals per lane
    runs: list[list[list[StepEvent]]]  # [lane][run] events
    verdicts: list[Counter[str]]  # verdict -> runs, per lane
    environment: dict[str, object]
    remarks: list[str]
    machine: Sequence[str] = ()  # see tally_row

    def rows(self, where: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
        """Return one row per lane over all prompts, then one per category if there are several. where[i]: columns of
        lane i.
        """
        categories = list(self.tallies[0])
        return [
            self._row(lane, {**columns, **({"category": category} if len(categories) > 1 else {})}, category)
            for category in (categories if len(categories) > 1 else [ALL])
            for lane, columns in enumerate(where)
        ]

    def places(self) -> list[list[float | None]]:
        """Return the acceptance by position for every row of `rows`."""
        return [lane.accept_by_position for lanes in self.tallies[0].values() for lane in lanes]

    def _row(self, lane: int, where: Mapping[str, object], category: str) -> dict[str, object]:
        of = [tallies[category] for tallies in self.tallies if category in tallies]  # the last repeat may be unfinished
        plain = [t[0] for t in of]
        row = tally_row(self.names[lane], where, [t[lane] for t in of] if lane else plain, plain, self.machine)
        verdict = self.verdicts[lane]
        words = (f"{count} {word}" if len(verdict) > 1 else word for word, count in verdict.items())
        return row | {"output": ", ".join(words) or None}


def compare_lanes(
    runner: Session,
    spec: Comparison,
    questions: Sequence[Question],
    repeats: int,
    report: Progress,
    cancelled: Stop,
    show: "Show[Compared]" = lambda so_far: None,
) -> Compared:
    """Compare the lanes of `spec` with plain decoding, one after the other on every question, `repeats` times."""
    every: list[list[tuple[str, RunTrace]]] = []  # with the unfinished repeat

    def once(_repeat: int, tick: Tick) -> list[tuple[str, RunTrace]]:
        traces: list[tuple[str, RunTrace]] = []
        every.append(traces)
        for number, question in enumerate(questions):
            tick(number / len(questions))
            trace = run_complete(runner, spec.model_copy(update={"prompt": question.text}), cancelled)
            tick((number + 1) / len(questions))  # do not count an interrupted run
            traces.append((question.category, trace))
            show(lambda: _compared(every, []))
        return traces

    return _compared(*repeated(repeats, report, cancelled, once))


def _compared(done: Sequence[Sequence[tuple[str, RunTrace]]], remarks: list[str]) -> Compared:
    """Return the totals of all runs. done: category and trace of each run, per repeat."""
    lanes = len(done[0][0][1].lanes)
    verdicts: list[Counter[str]] = [Counter() for _ in range(lanes)]
    runs: list[list[list[StepEvent]]] = [[] for _ in range(lanes)]
    tallies = []
    for traces in done:
        tallies.append(defaultdict[str, list[Totals]](lambda: [Totals() for _ in range(lanes)]))
        for category, trace in traces:
            for index, lane in enumerate(trace.lanes):
                runs[index].append(lane.events)
                for name in {category, ALL} - {""}:
                    tallies[-1][name][index].add(lane.events)
            for verdict, row in zip(verdicts[1:], trace.comparison, strict=True):
                verdict[str(row["verdict"])] += 1
    waited = [waited_share(_runs(tally[ALL][lane] for tally in tallies)) for lane in range(lanes)]
    known = [share for share in waited if share is not None]
    if known:
        remarks = [f"CPU contention: {_percentages(known)} of the time of the lanes.", *remarks]
    trace = done[-1][-1][1]
    remarks += [f"{sentence(note)}." for note in trace.notes]
    by_category = [{**{c: t for c, t in tally.items() if c != ALL}, ALL: tally[ALL]} for tally in tallies]
    names, environment = [lane.name for lane in trace.lanes], trace.environment
    machine = dict.fromkeys(reason for traces in done for _, run in traces for reason in _noise(run))
    return Compared(names, by_category, runs, verdicts, environment, remarks, [*machine])


def _noise(trace: RunTrace) -> list[str]:
    """Return what the machine's own sensors found wrong during a run."""
    found = trace.environment.get("noise", [])
    return [str(reason) for reason in found] if isinstance(found, list) else []


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
class Way:
    """Decoding setup: drafter, acceptance rule and config."""

    drafter: Method
    accept: AcceptRule
    config: GenerationConfig


@dataclass(frozen=True, slots=True)
class Place:
    """Sweep point: its value, the prompts [B, T] and the sampling settings."""

    value: float | str
    prompts: list[Tensor]
    sampling: Sampling = field(default_factory=Sampling)


def along(
    target: Target,
    lanes: Mapping[str, Way],
    places: Sequence[Place],
    axis: str,
    repeats: int,
    report: Progress,
    cancelled: Stop,
    show: Show[list[dict[str, object]]] = lambda so_far: None,
) -> tuple[list[dict[str, object]], list[str], int]:
    """Measure every lane at every sweep point, interleaved; return rows, remarks and finished repeats. The first lane
    is plain decoding.
    """

    machine: list[dict[str, None]] = [{} for _ in places]
    every: list[list[list[Totals]]] = []  # with the unfinished repeat

    def rows(done: Sequence[Sequence[Sequence[Totals]]]) -> list[dict[str, object]]:
        """Return a row per place and lane. done[repeat][place][lane]: totals of the measured places."""
        measured = [[tallies[number] for tallies in done if number < len(tallies)] for number in range(len(places))]
        return [
            _place_row(name, {axis: place.value}, index, own, machine[number])
            for number, (place, own) in enumerate(zip(places, measured, strict=True))
            for index, name in enumerate(lanes if own else ())
        ]

    def once(repeat: int, tick: Tick) -> list[list[Totals]]:
        tallies: list[list[Totals]] = []
        every.append(tallies)
        for number, place in enumerate(places):
            tallies.append([Totals() for _ in lanes])
            gpu = None
            for tally, way in zip(tallies[-1], lanes.values(), strict=True):
                config = replace(way.config, sampling=place.sampling, seed=repeat)
                run = partial(generate, target, way.drafter, accept=way.accept, cancelled=cancelled)
                if not repeat:  # warm up every shape
                    tick(number / len(places))
                    longest = max(place.prompts, key=lambda prompt: prompt.shape[1])
                    warm_up(target, way.drafter, longest, config, way.accept, cancelled)
                gpu = gpu or GpuClock(target.device)  # after the warm-up, when the GPU has left its idle clock
                for prompt in place.prompts:
                    tick(number / len(places))
                    tally.add(list(run(prompt, config)))
            machine[number] |= dict.fromkeys(gpu.reasons() if gpu else ())
            tick((number + 1) / len(places))  # the last run may have been interrupted
            show(lambda: rows(every))
        return tallies

    done, remarks = repeated(repeats, report, cancelled, once)
    return rows(done), remarks, len(done)


def _place_row(
    name: str, where: Mapping[str, object], lane: int, done: Sequence[Sequence[Totals]], machine: Iterable[str]
) -> dict[str, object]:
    """Return the row of a lane at a sweep point. done[repeat][lane]: totals at this point."""
    plain = [totals[0] for totals in done]
    own = [totals[lane] for totals in done] if lane else plain
    first = over_repeats([sum(totals.prefills) / len(totals.prefills) for totals in own])
    return tally_row(name, where, own, plain, machine) | {"TTFT ms": first}


def read_questions(path: Path) -> list[Question]:
    """Read Spec-Bench's question.jsonl: question_id, category, turns; only the first turn is used. Raises ValueError
    with one line.
    """
    lines = read_text(path, QUESTIONS_BYTES, "choose a question.jsonl with --questions").splitlines()
    questions = [_question(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not questions:
        raise ValueError(f"{path} contains no questions")
    if len(questions) > MAX_QUESTIONS:
        raise ValueError(f"{path} contains {len(questions)} questions; the limit is {MAX_QUESTIONS}")
    return questions


def _question(path: Path, number: int, line: str) -> Question:
    try:
        read = json.loads(line)
        text, category = read["turns"][0], read["category"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        text = category = None
    if not isinstance(text, str) or not isinstance(category, str) or not text.strip() or not category.strip():
        form = '{"question_id": 1, "category": "...", "turns": ["..."]}'
        raise ValueError(f"{path}, line {number}: not a question; it has the form {form}")
    if len(text) > QUESTION:
        raise ValueError(f"{path}, line {number}: a question of {len(text):,} characters; the limit is {QUESTION:,}")
    return Question(text, category.strip()[:80])


def windows(text: Sequence[int], width: int, count: int, device: torch.device) -> list[Tensor]:
    """`count` windows [1, width] on token ids that repeat without end, evenly spread over them."""
    endless = [*text] * (2 + width // len(text))
    starts = [i * len(text) // count for i in range(count)]
    return [torch.tensor([endless[start : start + width]], device=device) for start in starts]
