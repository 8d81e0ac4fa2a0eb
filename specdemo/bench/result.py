"""Result of a suite, and its file."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, FailFast, Field, TypeAdapter
from pydantic.dataclasses import dataclass as checked

from specdemo.core.atomic_io import finite, json_text, write_text
from specdemo.core.estimate import Estimate, fastest
from specdemo.core.headline import listed
from specdemo.core.safe_io import FILE_BYTES, JsonObject, read_limited, validated
from specdemo.core.suggest import counted
from specdemo.presets.files import FOLDER

SCHEMA = 1
THOROUGH = 3  # minimum number of repeats for an interval
ALL = "all"  # pseudo-category: all questions of a file
TOKEN = "token"  # axis of histograms; a row has a token's position and its share in both samples, PLAIN and DRAFTED
PLAIN, DRAFTED = "plain", "speculative"
LATENCY = "ms/token"  # column of load results, per request


Row = dict[str, Any]  # column -> text, number, Estimate or None


@dataclass(frozen=True, slots=True)
class Result:
    suite: str
    repeats: int  # finished repeats
    config: JsonObject
    environment: JsonObject
    rows: list[Row]
    remarks: list[str] = field(default_factory=list)
    axis: str | None = None  # column of the x axis


def to_json(result: Result) -> str:
    """Return the text of the result file."""
    return json_text(finite({"schema": SCHEMA, **asdict(result)}), indent=1) + "\n"


def write_result(result: Result, out: Path) -> None:
    """Write a result to `out` as JSON, whole or not at all. Raises OSError."""
    write_text(out, to_json(result))


_strict = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)
_Text = Annotated[str, Field(max_length=2000)]


@checked(frozen=True, config=_strict)
class _Estimate:
    value: float
    low: float | None
    high: float | None
    reasons: Annotated[list[_Text], Field(max_length=64)]


@checked(frozen=True, config=_strict)
class _Quartiles:
    """A number in a result from before intervals existed."""

    median: float
    q1: float
    q3: float


_Cell = _Quartiles | _Estimate | float | int | bool | _Text | None
_Row = Annotated[dict[Annotated[str, Field(max_length=80)], _Cell], Field(max_length=40)]


@checked(frozen=True, config=_strict)
class _Stored:
    schema: Literal[1]
    suite: _Text
    repeats: Annotated[int, Field(ge=1)]
    config: dict[str, object]
    environment: dict[str, object]
    rows: Annotated[list[_Row], Field(max_length=5000), FailFast()]
    remarks: Annotated[list[_Text], Field(max_length=200), FailFast()] = field(default_factory=list)
    axis: _Text | None = None


_adapter = TypeAdapter(_Stored)


def read_result(source: str | bytes | Path, bounds: int = FILE_BYTES) -> Result:
    """Read a file that `write_result` wrote, or its text, which starts with a brace. Raises ValueError with one
    line.
    """
    if isinstance(source, bytes) or (isinstance(source, str) and source.lstrip()[:1] == "{"):
        return _parsed(source, bounds)
    try:
        content = read_limited(source, bounds)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"cannot read {str(source)[:100]!r}: {reason}") from None
    return _parsed(content, bounds)


@lru_cache
def recorded_suite(suite: str) -> Result | None:
    """Return the recorded result of a suite, as written by `specdemo bench SUITE --out`; None if there is none.

    Raises ValueError for a damaged file.
    """
    path = FOLDER / "recorded" / "suites" / f"{suite}.json"
    return read_result(path) if path.is_file() else None


def _parsed(content: str | bytes, bounds: int) -> Result:
    stored = validated(_adapter, content, bounds, "result")
    if stored.axis is not None and not any(stored.axis in row for row in stored.rows):
        raise ValueError(f"not a specdemo result: no row has its axis {stored.axis[:40]!r}")
    rows = [{name: _cell(value) for name, value in row.items()} for row in stored.rows]
    fields = (stored.suite, stored.repeats, stored.config, stored.environment, rows, stored.remarks, stored.axis)
    return Result(*fields)


def _cell(value: object) -> object:
    if isinstance(value, _Estimate):
        return Estimate(value.value, value.low, value.high, tuple(value.reasons))
    if isinstance(value, _Quartiles):  # quartiles are not a 95 % interval
        return Estimate(value.median)
    return value


def best(result: Result) -> str:
    """Name the fastest rows: one if its interval lies above all others, else all that cannot be distinguished.

    Returns "" below THOROUGH repeats or if no speed-up was measured.
    """
    rows = [row for row in result.rows if isinstance(row.get("speed-up"), Estimate) and row.get("category", ALL) == ALL]
    rows = [row for row in rows if not is_baseline(row["speed-up"])]
    if not rows:
        return ""
    if result.repeats < THOROUGH and not intervals(result):
        return f"measured {counted(result.repeats, 'time')}; {THOROUGH} repeats are needed to find the best."
    speeds: list[Estimate] = [row["speed-up"] for row in rows]
    if all(speed.low is None for speed in speeds):
        return "measured before 95 % intervals were; run it again to find the best."
    top, *tied = fastest(speeds)
    if speeds[top].label != "faster":
        return "nothing was clearly faster than plain decoding."
    if tied:
        names = _places([rows[index] for index in sorted([top, *tied])], result.axis)
        value = speeds[top].value
        return f"no clear difference between the fastest, {names}: about {value:.2f}x plain decoding."
    speed = speeds[top]
    interval = f" ({speed.interval()})" if speed.interval() else ""
    return f"fastest: {_places([rows[top]], result.axis)}, {speed.value:.2f}x plain decoding{interval}."


def intervals(result: Result) -> bool:
    """Return whether its numbers have 95 % intervals."""
    return any(isinstance(cell, Estimate) and cell.low is not None for row in result.rows for cell in row.values())


def noisy(result: Result) -> str:
    """Name the numbers that a second run may not confirm, with the reason; "" if there are none."""
    rows = [row for row in result.rows if isinstance(row.get("speed-up"), Estimate) and row["speed-up"].noisy]
    if not rows:
        return ""
    first = rows[0]
    return (
        f"Noisy machine, run again: a second run may not confirm {len(rows)} of {len(result.rows)} rows, such as "
        f"{_places([first], result.axis)}: {'; '.join(first['speed-up'].reasons)}."
    )


def is_baseline(speed: Estimate) -> bool:
    """Return whether this speed is the denominator of the others."""
    return {speed.value, speed.low, speed.high} <= {1.0, None}


def _places(rows: Sequence[Row], axis: str | None) -> str:
    """Name rows by their lanes and the points of each on the axis."""
    axis = axis or "lane"
    points: dict[str, list[str]] = {}
    for row in rows:
        points.setdefault(str(row.get("lane")), []).append(str(row.get(axis)))
    if axis == "lane":
        return listed([*points])
    return listed([f"{lane} at {axis} = {listed(values)}" for lane, values in points.items()])
