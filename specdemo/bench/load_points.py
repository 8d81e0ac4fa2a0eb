"""What a load measures: answers, the points they make up, and the file that outlives a killed run."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from specdemo.core.files import append_line, write_text
from specdemo.servers.counters import Told

Schedule = Sequence[Sequence[int]]  # [from, to, k]: of batch sizes
Measure = Callable[[float, bool], "Point"]  # the load, and whether it is but the warm-up
Round = Mapping[str, "Point"]  # one load, once: a point per lane


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's; times in ms."""

    asked: int  # the prompt's place
    text: str
    tokens: int
    ttft: float
    gaps: Sequence[float]

    @property
    def per_token(self) -> float:
        """The whole time over the tokens."""
        return (self.ttft + sum(self.gaps)) / max(self.tokens, 1)


@dataclass(frozen=True, slots=True)
class Point:
    """One lane at one load, once."""

    answers: Sequence[Answer]
    seconds: float
    told: Told

    @property
    def throughput(self) -> float:
        """Tokens a second, of all requests together."""
        return sum(answer.tokens for answer in self.answers) / self.seconds

    @property
    def per_token(self) -> float:
        """The mean of its requests'."""
        return sum(answer.per_token for answer in self.answers) / len(self.answers)

    def goodput(self, ttft: float | None, itl: float | None) -> float:
        """Requests a second that keep the bounds, in ms; None: there is none."""
        good = (a for a in self.answers if (ttft is None or a.ttft <= ttft) and (itl is None or a.per_token <= itl))
        return sum(1 for _ in good) / self.seconds


@dataclass(slots=True)
class Measured:
    """A lane: how many tokens it drafts, or by which schedule, and its points at every load, one per repeat."""

    lane: str
    k: int
    schedule: Schedule = ()
    points: dict[float, list[Point]] = field(default_factory=dict)


class Journal:
    """The rounds that are through, a line of JSON each, below what was asked for. No path: none is kept."""

    def __init__(self, path: Path | None, asked: Mapping[str, object]) -> None:
        """Raises ValueError for a file of another run."""
        self._path, self._rounds = path, dict[str, Round]()
        if path is None:
            return
        head = json.dumps(asked)
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        if lines and lines[0] != head:
            raise ValueError(f"{path} holds a run with other options; give those, remove it, or choose another --out")
        for line in lines[1:]:
            try:
                key, found = _line.validate_json(line)
            except ValidationError:
                break  # it was killed while it wrote
            self._rounds[key] = found
        write_text(path, "\n".join([head, *lines[1 : len(self._rounds) + 1], ""]))

    def get(self, key: str) -> Round | None:
        """The round, where it is through."""
        return self._rounds.get(key)

    def put(self, key: str, found: Round) -> None:
        """Keep a round."""
        if self._path is not None:
            line = json.dumps([key, {lane: asdict(point) for lane, point in found.items()}])
            append_line(self._path, line)


_line = TypeAdapter(tuple[str, dict[str, Point]])
