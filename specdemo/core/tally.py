"""Totals over the steps of a lane. Summaries, the cost model, benchmarks and the page read them here.

A step is one target pass for one row of a batch; times are milliseconds of device time.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import quantiles
from typing import Self

from specdemo.core.estimate import RunTiming, rate, waited_share
from specdemo.core.trace import LaneTrace, Number, StepEvent, Timing, decode_timing, is_drafted, run_timings, step_ms

WINDOW = 16  # tokens that the recent rate covers
UNMEASURED = "ms_draft ms_verify ms_other peak_memory_bytes".split()  # unknown where requests are timed
# unknown where the steps are
UNCOUNTED = "steps drafted accepted acceptance_rate tokens_per_step accept_histogram accept_by_position".split()

Numbers = dict[str, Number | list[Number]]


def node_depths(event: StepEvent, row: int) -> list[int]:
    """Return the depth of every slot of a row: 0 for the root and for padding, 1 for the first draft tokens."""
    depths = [0]
    for token, parent in zip(event.drafted[row], event.parents[row], strict=True):
        depths.append(depths[parent] + 1 if is_drafted(token) else 0)
    return depths


@dataclass(frozen=True, slots=True)
class StepCounts:
    """One row of one event: tokens emitted, nodes drafted and their depth, draft tokens accepted."""

    emitted: int
    drafted: int
    depth: int
    accepted: int
    ms: float
    draft_ms: float
    verify_ms: float

    @classmethod
    def of(cls, event: StepEvent, row: int = 0) -> Self:
        """Count row `row` of an event."""
        depths = node_depths(event, row)
        draft_ms = event.ms.get("draft", 0.0) + event.ms.get("observe", 0.0)
        return cls(
            emitted=len(event.emitted[row]),
            drafted=sum(map(bool, depths)),
            depth=max(depths),
            # accepted tokens after a stop token do not count
            accepted=max(min(len(event.path[row]) - 1, len(event.emitted[row])), 0),
            ms=step_ms(event),
            draft_ms=draft_ms,
            verify_ms=event.ms.get("verify", 0.0),
        )


@dataclass(slots=True)
class Tally:
    """Running totals of one row. Decoding is all steps but the prefill, which emits the first token."""

    first: int = 0  # tokens of the prefill
    prefill_ms: float | None = None
    tokens: int = 0  # decoded, without the first
    steps: int = 0  # that emitted tokens
    ms: float = 0.0  # decode time
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    train_ms: float = 0.0  # part of draft_ms in which the drafter trained
    drafted: int = 0
    unverified: float = 0.0  # draft tokens that were left out before verification
    accept_histogram: list[int] = field(default_factory=lambda: [0])  # [n] steps that accepted n draft tokens
    reached: list[int] = field(default_factory=list)  # [i] steps that drafted at depth i + 1
    experts: float = 0.0  # per layer, summed over the steps that report them
    expert_steps: int = 0
    pieces: int = 0  # events whose step is unknown
    gaps: list[float] = field(default_factory=list)  # time of a step, divided equally among its tokens
    _past: list[tuple[float, int]] = field(default_factory=list)  # clock and tokens after each step

    @classmethod
    def of(cls, events: Iterable[StepEvent], row: int = 0) -> Self:
        """Return the tally of row `row` over a full run."""
        tally = cls()
        for event in events:
            tally.add(event, row)
        return tally

    def add(self, event: StepEvent, row: int = 0) -> None:
        """Add one step of row `row`, in constant time."""
        step = StepCounts.of(event, row)
        self.pieces += not any(event.path)
        if event.index == 0:
            self.first, self.prefill_ms = step.emitted, step.ms
        else:
            self._decode(step)
            self.train_ms += event.notes.get("train_ms", 0.0)
            self.unverified += event.notes.get("unverified", 0.0)
            self.experts += event.notes.get("experts", 0.0)
            self.expert_steps += "experts" in event.notes
        self._past.append((self.clock_ms, self.first + self.tokens))
        while len(self._past) > 2 and self._past[-1][1] - self._past[1][1] >= WINDOW:
            del self._past[0]

    def _decode(self, step: StepCounts) -> None:
        self.tokens += step.emitted
        self.steps += bool(step.emitted)
        self.ms += step.ms
        self.draft_ms += step.draft_ms
        self.verify_ms += step.verify_ms
        self.drafted += step.drafted
        longer = [0] * (step.depth - len(self.reached))
        self.accept_histogram += longer
        self.reached += longer
        self.accept_histogram[step.accepted] += 1
        for depth in range(step.depth):
            self.reached[depth] += 1
        self.gaps += [step.ms / max(step.emitted, 1)] * step.emitted

    @property
    def clock_ms(self) -> float:
        """Return the device time so far, including the prefill."""
        return self.ms + (self.prefill_ms or 0.0)

    @property
    def accepted(self) -> int:
        """Return the number of accepted draft tokens."""
        return sum(count * steps for count, steps in enumerate(self.accept_histogram))

    @property
    def tokens_per_s(self) -> float | None:
        """Return decoded tokens per second, without the prefill. None before the first step."""
        return ratio(self.tokens, self.ms / 1000.0)

    @property
    def recent_tokens_per_s(self) -> float | None:
        """Return tokens per second over about the last WINDOW tokens, without the prefill."""
        if len(self._past) < 2:
            return None
        (earlier_ms, earlier_tokens), (clock_ms, tokens) = self._past[0], self._past[-1]
        return ratio(tokens - earlier_tokens, (clock_ms - earlier_ms) / 1000.0)

    def numbers(self) -> Numbers:
        """Return the part of `summarise` that is known after every step."""
        # a step that accepted at a depth accepted at every smaller one
        hits = accumulate(reversed(self.accept_histogram[1:]))
        by_position = zip(reversed([*hits]), self.reached, strict=True)
        return {
            "tokens": self.first + self.tokens,
            "steps": self.steps,
            "tokens_per_s": self.tokens_per_s,
            "ttft_ms": None if self.prefill_ms is None else round(self.prefill_ms, 3),
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_rate": ratio(self.accepted, self.drafted),
            "tokens_per_step": ratio(self.tokens, self.steps),
            "accept_histogram": [*self.accept_histogram],
            "accept_by_position": [ratio(accepted, reached) for accepted, reached in by_position],
            "ms_draft": round(self.draft_ms, 3),
            "ms_verify": round(self.verify_ms, 3),
            "ms_other": round(self.ms - self.draft_ms - self.verify_ms, 3),
            **({"unverified": round(self.unverified)} if self.unverified else {}),
            **({"experts_touched": ratio(self.experts, self.expert_steps)} if self.expert_steps else {}),
        }

    def latencies(self) -> Numbers:
        """Return the median and the 95th percentile of the milliseconds between two tokens."""
        gaps = self.gaps * 2 if len(self.gaps) == 1 else self.gaps  # Python 3.11 needs two numbers
        percentiles = quantiles(gaps, n=20, method="inclusive") if gaps else []
        return {f"itl_ms_p{p}": round(percentiles[p // 5 - 1], 3) if gaps else None for p in (50, 95)}


def summarise(lane: LaneTrace, peak_memory_bytes: int = 0) -> Numbers:
    """Return the numbers of row 0 of a lane, as defined in `core.definitions`. None: unknown.

    If the lane was repeated, its speed and waiting time cover all runs, the other numbers the last run.
    """
    tally = Tally.of(lane.events)
    numbers = {**tally.numbers(), **tally.latencies(), "peak_memory_bytes": peak_memory_bytes}
    counted = {} if lane.steps_known else _server_counts(lane)
    return numbers | _unknown(tally, lane.timing) | counted | _speed(lane) | _energy(lane)


def _energy(lane: LaneTrace) -> Numbers:
    """Return the joules per token over all runs, without the prefill; nothing where they were not read."""
    every = (*lane.repeats, lane.events)
    if not all("joules" in event.notes for events in every for event in events[1:]):
        return {}
    runs = []
    for events in every:
        sizes = decode_timing(events).steps
        steps = [(size, event.notes["joules"]) for (size, _), event in zip(sizes, events[1:], strict=True)]
        runs.append(RunTiming(steps, sum(len(event.emitted[0]) for event in events[1:])))
    tokens = rate(runs)  # per 1000 joules
    if tokens is None or not tokens.value:
        return {}
    ends = {"": tokens.value, "_low": tokens.high, "_high": tokens.low}
    return {
        f"joules_per_token{end}": None if value is None else round(1000.0 / value, 4) for end, value in ends.items()
    }


def _speed(lane: LaneTrace) -> Numbers:
    runs = run_timings(lane)
    speed = rate(runs)
    ends = (speed.value, speed.low, speed.high) if speed else (None, None, None)
    names = ("tokens_per_s", "tokens_per_s_low", "tokens_per_s_high")
    speeds = {name: None if end is None else round(end, 4) for name, end in zip(names, ends, strict=True)}
    return {**speeds, "waited_share": waited_share(runs)}


def running_numbers(tally: Tally, timing: Timing) -> Numbers:
    """Return the numbers of a running lane: `numbers`, its clock and its recent speed. Where the steps are unknown, a
    token is a piece of text."""
    numbers = tally.numbers() | _unknown(tally, timing)
    if timing == "requests":
        numbers["tokens_per_s"] = ratio(tally.first + tally.tokens, tally.clock_ms / 1000.0)
    clocks = {"clock_ms": tally.clock_ms, "ms_train": tally.train_ms, "recent": tally.recent_tokens_per_s}
    return numbers | {name: None if ms is None else round(ms, 3) for name, ms in clocks.items()}


def _unknown(tally: Tally, timing: Timing) -> Numbers:
    """Return None for every number that nobody measured or counted."""
    return dict.fromkeys([*(UNMEASURED if timing == "requests" else ()), *(UNCOUNTED if tally.pieces else ())])


def _server_counts(lane: LaneTrace) -> Numbers:
    """Return the numbers that a server tells of a lane whose steps are unknown. Gaps between tokens are unknown if
    pieces come without token counts."""
    service = lane.service
    return {
        **dict.fromkeys(() if service.counted else ("itl_ms_p50", "itl_ms_p95")),
        "tokens": len(lane.token_ids) if service.counted else service.tokens,
        "accept_histogram": service.accept_histogram,
        "accept_by_position": service.accept_by_position,
        **{str(name): value for name, value in service.counters.items()},
    }


def ratio(a: float, b: float) -> float | None:
    """Return a / b, rounded to four digits; None if b is 0."""
    return round(a / b, 4) if b else None
