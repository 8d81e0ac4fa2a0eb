"""Base class of readers, and checked access to untrusted output. A new reader is a file in this package and a line in
`specdemo.analysis.readers`.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import ClassVar, TypeVar

from specdemo.analysis.observation import LONGEST, Observation
from specdemo.core.safe_io import JsonObject, check_size
from specdemo.servers.counters import all_passes

LONGEST_LINE = 20_000  # characters of a log line that are read
ValueT = TypeVar("ValueT", float, int)
IN_PART = re.compile(r"enable_adaptive_verification\W{1,6}[Tt]rue\b")  # of vLLM's speculative config
UNQUANTISED = ("auto", "f16", "f32", "bf16", "float", "bfloat")  # beginnings of types of KV caches
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

    def lines(self, mark: str) -> Iterator[str]:
        """Yield the lines that contain a mark, each up to LONGEST_LINE characters after it."""
        start = self.text.find(mark)
        while start >= 0:
            begin = self.text.rfind("\n", max(start - LONGEST_LINE, 0), start) + 1
            end = self.text.find("\n", start)
            end = len(self.text) if end < 0 else end
            yield self.text[begin or max(start - LONGEST_LINE, 0) : min(end, start + LONGEST_LINE)]
            start = self.text.find(mark, end)


class OutputReader(ABC):
    """Reader of one kind of output. title: name of the output."""

    title: ClassVar[str]

    @abstractmethod
    def read(self, output: Output) -> Observation | None:
        """Return what the output contains, None if it is of another kind. Raises ValueError, one line, if its numbers
        contradict each other."""


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

    def add(
        self,
        drafted: float,
        accepted: float,
        drafting_steps: float,
        positions: Sequence[float] = (),
        tokens: float | None = None,
    ) -> None:
        """Add a part. positions: shares of its steps with a draft. tokens: output after the first of each request;
        None: unknown, so that every step is taken to have had a draft."""
        self.steps += drafting_steps if tokens is None else all_passes(tokens, accepted, drafting_steps)
        self.drafting_steps += drafting_steps
        self.drafted += drafted
        self.accepted += accepted
        self.positions += [0.0] * (len(positions[:LONGEST]) - len(self.positions))
        for place, share in enumerate(positions[:LONGEST]):
            self.positions[place] += share * drafting_steps

    def add_histogram(self, bars: Sequence[float], drafted: float, tokens: float | None = None) -> None:
        """Add a part from the number of steps with a draft that accepted 0, 1, .. draft tokens. tokens: as in `add`."""
        steps = sum(bars)
        shares = [sum(bars[place:]) / steps for place in range(1, len(bars[: LONGEST + 1]))] if steps else []
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
        if self.drafted:
            values["acceptance_rate"] = self.accepted / self.drafted
        if self.steps:
            values |= {
                "steps": round(self.steps),
                "accepted_length": 1.0 + self.accepted / self.steps,
                "drafted_per_step": self.drafted / self.steps if self.drafted else None,
                "drafting_share": self.drafting_steps / self.steps if self.drafting_steps else None,
                "by_position": tuple(count / self.steps for count in self.positions),
            }
        if self.steps and self.drafts_nothing:
            values |= {"drafted_per_step": 0.0, "drafting_share": 0.0}
        return values


def number(value: object) -> float | None:
    """Return a finite number of at least 0, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300:
        return None
    return float(value) if isfinite(value) and value >= 0 else None


def count(value: object) -> int | None:
    """Return a whole number of at least 0, None for anything else."""
    found = number(value)
    return int(found) if found is not None and found == int(found) else None


def text_of(value: object) -> str:
    """Return a short text, an empty one for anything else."""
    return " ".join(value[:200].split()) if isinstance(value, str) else ""


def objects(value: object) -> list[Mapping[str, object]]:
    """Return the objects of a list."""
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []


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
    """Return the numbers of a list with commas, up to LONGEST."""
    return [float(found) for found in re.findall(_NUMBER, text)[:LONGEST]]


def mean(values: Iterable[float]) -> float | None:
    """Return the mean of the values above 0, None without any."""
    known = [value for value in values if value > 0.0]
    return sum(known) / len(known) if known else None


def quantised(kind: str) -> str:
    """Return a type of KV caches if it is quantised, else an empty text."""
    return "" if kind.startswith(UNQUANTISED) else kind


def found_below(value: object, key: str) -> Iterator[Mapping[str, object]]:
    """Yield all objects at a key, at any depth."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Mapping):
            if isinstance(match := one.get(key), Mapping):
                yield match
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
