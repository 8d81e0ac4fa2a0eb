"""Checked access to the untrusted output of an engine, sums over its parts, and numbers in its text."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from math import inf, isfinite
from statistics import fmean, median
from typing import NamedTuple, TypeVar

from specdemo.analysis.parts import MAX_DRAFTED, READING, Part, contrast, trend
from specdemo.core.safe_io import JsonObject, check_size
from specdemo.servers.counters import FIRST_TOKENS, all_passes

LONGEST_LINE = 20_000  # characters of a log line that are read
PREFIX = 300  # characters of a log line before its numbers: process, time, file
ValueT = TypeVar("ValueT", float, int)
IN_PART = re.compile(r"enable_adaptive_verification\W{1,6}[Tt]rue\b")  # of vLLM's speculative config
UNQUANTISED = ("auto", "f16", "f32", "bf16", "float", "bfloat")  # beginnings of types of KV caches
CLOCK, DAY = re.compile(r"\b([0-9]{2}):([0-9]{2}):([0-9]{2})\b"), 86400.0
_NUMBER = r"([0-9]{1,15}(?:\.[0-9]{0,12})?)"


class Output:
    """Text of an engine, and the JSON in it. Both are within the limits."""

    def __init__(self, text: str, limits: int) -> None:
        """Check the limits. Raises ValueError, one line, for a text that exceeds them."""
        self.text = text
        self.limits = limits
        if len(text) > limits:
            raise ValueError(f"this output may hold {limits / 1e6:g} MB at most; cut it to the end of the log")
        self.json = self.parse(text) if text.lstrip()[:1] in ("{", "[") else None

    def parse(self, text: str) -> object:
        """Return the value of a JSON text, None if it is not JSON. Raises ValueError if it exceeds the limits."""
        check_size(text.encode(), self.limits, "this output")
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return None

    def lines(self, *marks: str) -> Iterator[str]:
        """Yield the lines that contain one of the marks, each up to LONGEST_LINE characters after the first one."""
        pattern, end = re.compile("|".join(map(re.escape, marks))), 0
        while match := pattern.search(self.text, end):
            start = match.start()
            begin = self.text.rfind("\n", max(start - LONGEST_LINE, 0), start) + 1
            end = self.text.find("\n", start)
            end = len(self.text) if end < 0 else end
            yield self.text[begin or max(start - LONGEST_LINE, 0) : min(end, start + LONGEST_LINE)]


@dataclass(slots=True)
class OutputTotals:
    """Sums over the parts of an output, such as log lines or requests."""

    steps: float = 0.0  # target passes, also without a draft
    drafting_steps: float = 0.0  # those with a draft, if their number is known
    drafted: float = 0.0
    accepted: float = 0.0
    positions: list[float] = field(default_factory=list)  # steps that accepted at least so many draft tokens
    tokens: float = 0.0  # output in `seconds`
    seconds: float = 0.0
    speeds: list[float] = field(default_factory=list)  # of equal intervals
    batches: list[float] = field(default_factory=list)
    k: int = 0  # longest draft length of a request; 0: unknown
    drafts_nothing: bool = False  # although speculation is on
    parts: list[Part] = field(default_factory=list)
    noun: str = "request"  # what a part is
    text: float = 0.0  # tokens after the first of each request, where they are known
    beyond: float = 0.0  # accepted tokens that are more than these
    notes: list[str] = field(default_factory=list)

    def add(
        self,
        drafted: float,
        accepted: float,
        drafting_steps: float,
        positions: Sequence[float] = (),
        tokens: float | None = None,
        tokens_per_s: float | None = None,
        place: str = "",
    ) -> None:
        """Add a part. positions: shares of its steps with a draft. tokens: output after the first of each request;
        None: unknown, so that every step is taken to have had a draft. place: where it ran."""
        self.parts.append(Part(drafted, accepted, drafting_steps, tokens_per_s, place))
        passes = drafting_steps if tokens is None else all_passes(tokens, accepted, drafting_steps)
        if tokens is not None:
            self.text, self.beyond = self.text + tokens, self.beyond + max(accepted + passes - tokens, 0.0)
        self.steps += passes
        self.drafting_steps += drafting_steps
        self.drafted += drafted
        self.accepted += accepted
        self.positions += [0.0] * (len(positions[:MAX_DRAFTED]) - len(self.positions))
        for position, share in enumerate(positions[:MAX_DRAFTED]):
            self.positions[position] += share * drafting_steps

    def add_histogram(self, bars: Sequence[float], drafted: float, tokens: float | None = None) -> None:
        """Add a part from the number of steps with a draft that accepted 0, 1, .. draft tokens. tokens: as in `add`."""
        steps = sum(bars)
        shares = [sum(bars[place:]) / steps for place in range(1, len(bars[: MAX_DRAFTED + 1]))] if steps else []
        self.add(drafted, sum(n * count for n, count in enumerate(bars)), steps, shares, tokens)

    def add_time(self, tokens: float | None, ms: float | None) -> None:
        """Add the time in which a request output these tokens."""
        if tokens and ms:
            self.tokens += tokens
            self.seconds += ms / 1000.0

    def values(self) -> JsonObject:
        """Return the fields of an Observation that the sums give."""
        speed = self.tokens / self.seconds if self.seconds else mean(self.speeds)
        values: JsonObject = {"tokens_per_s": speed, "batch_size": mean(self.batches)}
        accepted, notes = self.accepted, [*self.notes]
        if self.beyond > FIRST_TOKENS * self.text:  # of long answers that is little, and engines count it
            accepted = max(accepted - self.beyond, 0.0)
            notes.append(past_end(self.accepted, accepted))
        notes += trend(self.parts) if self.noun == READING else ()
        values |= {"contrast": contrast(self.parts, self.noun), "notes": tuple(notes)}
        if self.drafted:
            values["acceptance_rate"] = accepted / self.drafted
        if self.steps:
            values |= {
                "steps": round(self.steps),
                "accepted_length": 1.0 + accepted / self.steps,
                "drafted_per_step": self.drafted / self.steps if self.drafted else None,
                "drafting_share": self.drafting_steps / self.steps if self.drafting_steps else None,
                "by_position": tuple(count / self.steps for count in self.positions),
            }
        if self.drafts_nothing:
            values |= {"accepted_length": 1.0, "drafted_per_step": 0.0, "drafting_share": 0.0}
        return values


def past_end(accepted: float, kept: float) -> str:
    """Return a note about accepted draft tokens of which a text holds only some: the last draft of an answer goes on
    after its end."""
    words = f"Of {accepted:,.0f} accepted draft tokens {kept:,.0f} are in the text; the others are after the end"
    return f"{words} of an answer and do not count."


class EngineLoad(NamedTuple):
    """Speed of an engine since its last line in a log. at: seconds of a clock, None if the line has no time."""

    engine: str
    at: float | None
    tokens_per_s: float
    running: float


def loads_of(lines: Iterable[str], engine: re.Pattern[str], speed: str, running: str) -> list[EngineLoad]:
    """Return what lines say about engines. engine: finds the parts of its name at the beginning of a line. speed,
    running: what precedes the numbers."""
    loads, day = list[EngineLoad](), 0.0
    for line in lines:
        clock = CLOCK.search(line)
        at = None if clock is None else day + 3600.0 * int(clock[1]) + 60.0 * int(clock[2]) + int(clock[3])
        if at is not None and loads and (loads[-1].at or 0.0) - at > DAY / 2:
            day, at = day + DAY, at + DAY
        numbers = (find_number(text, line) or 0.0 for text in (speed, running))
        loads.append(EngineLoad(" ".join(engine.findall(line[:PREFIX])), at, *numbers))
    return loads


def speeds_of_all(loads: Sequence[EngineLoad]) -> list[float]:
    """Return the tokens/s of all engines together, by moments.

    A moment is as long as an engine usually waits between two lines: every engine at work has a line in it, and engines
    that take turns are in different moments. Without times, a moment has the next line of every engine.
    """
    engines = defaultdict[str, list[EngineLoad]](list)
    for load in loads:
        engines[load.engine].append(load)
    if len(engines) < 2:
        return [load.tokens_per_s for load in loads]
    times = {name: [load.at for load in lines if load.at is not None] for name, lines in engines.items()}
    if sum(map(len, times.values())) < len(loads):
        rows = zip_longest(*engines.values())
        return [sum(load.tokens_per_s for load in row if load) for row in rows]
    gaps = [[b - a for a, b in pairwise(at) if b > a] for at in times.values()]
    moment, first = max((median(waits) for waits in gaps if waits), default=inf), min(map(min, times.values()))
    speeds = defaultdict[int, dict[str, list[float]]](lambda: defaultdict(list))
    for load in loads:
        speeds[int(((load.at or 0.0) - first) / moment + 0.5)][load.engine].append(load.tokens_per_s)
    return [sum(map(fmean, of_engines.values())) for of_engines in speeds.values()]


def hidden_engines(settings: str, visible: int) -> tuple[str, ...]:
    """Return a note if an output does not tell all engines of a server apart. settings: their number, if known."""
    if not settings.isdecimal() or int(settings) <= max(visible, 1):
        return ()
    return (
        f"The server has {settings} engines and the output tells {visible} apart: tokens/s may be of a part of them.",
    )


def number(value: object) -> float | None:
    """Return a finite number of at least 0, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300:
        return None
    return float(value) if isfinite(value) and value >= 0 else None


def count(value: object) -> int | None:
    """Return a whole number of at least 0, None for anything else."""
    amount = number(value)
    return int(amount) if amount is not None and amount == int(amount) else None


def text_of(value: object) -> str:
    """Return a short text, an empty one for anything else."""
    return " ".join(value[:200].split()) if isinstance(value, str) else ""


def objects(value: object) -> list[Mapping[str, object]]:
    """Return the objects of a list."""
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def find_number(name: str, text: str) -> float | None:
    """Return the number after a name such as `accept len: `, None if there is none."""
    match = re.search(re.escape(name) + r"[ ]{0,40}" + _NUMBER, text)
    return float(match[1]) if match else None


def find_last(pattern: str, text: str) -> str:
    """Return the first group of the last match of a pattern, an empty text without a match."""
    last = ""
    for match in re.finditer(pattern, text):
        last = match[1]
    return last


def numbers_in(text: str) -> list[float]:
    """Return the numbers of a list with commas, up to MAX_DRAFTED."""
    return [float(digits) for digits in re.findall(_NUMBER, text)[:MAX_DRAFTED]]


def mean(values: Iterable[float]) -> float | None:
    """Return the mean of the values above 0, None without any."""
    positive = [value for value in values if value > 0.0]
    return sum(positive) / len(positive) if positive else None


def quantised(kind: str) -> str:
    """Return a type of KV caches if it is quantised, else an empty text."""
    return "" if kind.startswith(UNQUANTISED) else kind


def found_below(value: object, key: str) -> Iterator[Mapping[str, object]]:
    """Yield all objects at a key, at any depth."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, Mapping):
            if isinstance(match := item.get(key), Mapping):
                yield match
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item
