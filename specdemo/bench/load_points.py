"""Measurements of a load: answers, points, and the journal that survives a killed run."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from specdemo.core.atomic_io import append_line, json_text, write_text
from specdemo.core.safe_io import read_text
from specdemo.servers.counters import ServerStats
from specdemo.servers.engines.base import Schedule

Measure = Callable[[float, bool], "Point"]  # (load, warm-up) -> result
Round = Mapping[str, "Point"]  # one load, one repeat: lane -> point


JOURNAL_BYTES = 500_000_000
# types of the values in a journal
_Count = Annotated[int, Field(ge=0, le=10**9)]
_Tokens = Annotated[int, Field(ge=1, le=10**9)]
_Ms = Annotated[float, Field(ge=0.0, le=1e12)]
_Seconds = Annotated[float, Field(ge=1e-6, le=1e9)]


@dataclass(frozen=True, slots=True)
class Answer:
    """Response to one request; times in ms."""

    asked: _Count  # index of the prompt
    text: str
    tokens: _Tokens
    ttft: _Ms
    gaps: Sequence[_Ms]

    @property
    def per_token(self) -> float:
        """Return the time of the request divided by its tokens."""
        return (self.ttft + sum(self.gaps)) / max(self.tokens, 1)


@dataclass(frozen=True, slots=True)
class Point:
    """Measurement of one lane at one load in one repeat."""

    answers: Annotated[Sequence[Answer], Field(min_length=1)]
    seconds: _Seconds
    told: ServerStats

    @property
    def throughput(self) -> float:
        """Return tokens per second over all requests."""
        return sum(answer.tokens for answer in self.answers) / self.seconds

    @property
    def per_token(self) -> float:
        """Return the mean ms/token of the requests."""
        return sum(answer.per_token for answer in self.answers) / len(self.answers)

    def goodput(self, ttft: float | None, itl: float | None) -> float:
        """Return the requests per second that meet the limits, in ms; None: no limit."""
        good = (a for a in self.answers if (ttft is None or a.ttft <= ttft) and (itl is None or a.per_token <= itl))
        return sum(1 for _ in good) / self.seconds


@dataclass(slots=True)
class MeasuredLane:
    """A lane with its number of draft tokens or its schedule, and one point per load and repeat."""

    lane: str
    k: int
    schedule: Schedule = ()
    points: dict[float, list[Point]] = field(default_factory=dict)


class Journal:
    """File of the measured rounds of a run: a line with the options, then one line of JSON per round. Without a path
    nothing is stored.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, object]) -> None:
        """Read the rounds of an interrupted run. Raises ValueError, one line, for any other file."""
        self._path, self._rounds = path, dict[str, tuple[int, Round]]()  # key -> (line number, round)
        if path is None:
            return
        head = json_text(settings)
        text = read_text(path, JOURNAL_BYTES, "remove it, or choose another --out") if path.is_file() else ""
        first, *lines = text.split("\n")
        if text and first != head:
            raise ValueError(
                f"{path} contains a run with other options; use those options, remove the file, or choose another --out"
            )
        complete_lines = lines[:-1]  # the last line is empty or incomplete
        for number, line in enumerate(complete_lines, 2):
            key, found = self._parsed(number, line)
            self._rounds[key] = number, found
        write_text(path, "\n".join([head, *complete_lines, ""]))

    def _parsed(self, number: int, line: str) -> tuple[str, Round]:
        try:
            return _line.validate_json(line)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise self._damaged(number, f"{place}: {first['msg']}" if place else first["msg"]) from None

    def _damaged(self, number: int, reason: str) -> ValueError:
        reason = " ".join(reason.split())[:200]
        return ValueError(f"{self._path}, line {number}: {reason}; remove that line to measure the round again")

    def get(self, key: str, lanes: Collection[str]) -> Round | None:
        """Return the round, None if it is not measured yet. Raises ValueError if its lanes are not these."""
        number, found = self._rounds.get(key, (0, None))
        if found is not None and found.keys() != {*lanes}:
            raise self._damaged(number, f"lanes {', '.join(found) or 'none'} instead of {', '.join(lanes)}")
        return found

    def put(self, key: str, found: Round) -> None:
        """Store a round."""
        if self._path is not None:
            line = json_text([key, {lane: asdict(point) for lane, point in found.items()}])
            append_line(self._path, line)


_line: TypeAdapter[tuple[str, dict[str, Point]]] = TypeAdapter(
    tuple[str, dict[str, Point]], config=ConfigDict(allow_inf_nan=False)
)
