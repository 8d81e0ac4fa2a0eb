"""Charts of results: speed-up over the swept setting with its interval and the cost model's prediction, histograms of
two token samples, and throughput over latency of servers under load.

A chart is plain data, the options of `plot` in ui/chart.js, which draws it on the page and in exported files.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from specdemo.bench.base import Axis
from specdemo.bench.report import bench_report
from specdemo.bench.result import ALL, DRAFTED, LATENCY, PLAIN, TOKEN, Result, Row, is_baseline
from specdemo.bench.suites import suites
from specdemo.core.atomic_io import finite, json_text, write_text
from specdemo.core.estimate import Estimate
from specdemo.core.headline import PLAIN_DECODING
from specdemo.costs.passes import curve_of, pass_ratio

Chart = dict[str, Any]  # title, label, and options of `plot`

SERIES = 6  # colours and dash patterns, besides those of plain decoding
FASTER, SLOWER = 1, 2  # colours of bars
BARS = "lane"
TUNE = "tune"  # suite
KINDS = ("text", "thinking")  # axes whose values are words
SPEED: Chart = {"suffix": "×", "digits": 2, "level": 1.0, "baseline": PLAIN_DECODING}
UI = Path(__file__).parents[1] / "ui"  # scripts and style of the charts
PAGE = Path(__file__).with_name("page.html")


def chart(result: Result) -> Chart:
    """Return lines over the swept setting, one per lane, or bars if only lanes are compared. Plain decoding is the
    line at 1.

    Raises ValueError if the result has neither speed-ups nor a histogram.
    """
    if result.axis == TOKEN:
        return _histograms(result)
    if result.suite == TUNE and (curve := curve_of(result.environment)):
        return _costs(curve)
    if any(LATENCY in row for row in result.rows):
        return _frontier(result)
    over = result.axis or BARS
    place = str if over in (BARS, *KINDS) else (int, float)
    rows = [row for row in result.rows if row.get("category", ALL) == ALL and isinstance(row.get(over), place)]
    rows = [row for row in rows if isinstance(row.get("speed-up"), Estimate)]
    rows = [row for row in rows if isinstance(row.get("lane"), str) and not _is_baseline(row["lane"], rows)]
    if not rows:
        raise ValueError(f"suite {result.suite} measures no speed-up; there is nothing to draw")
    axes = {suite.axis.column: suite.axis for suite in suites().values() if suite.axis}
    along = axes.get(over, Axis(over, over, over))
    head = "Speed-up by lane" if over == BARS else f"Speed-up over {along.title}"
    marks = _bars(rows) if over == BARS else _groups(rows, over) if over in KINDS else _lines(rows, along)
    return _labelled(head, SPEED | marks)


def _costs(curve: Mapping[int, float]) -> Chart:
    """Return the cost of a pass by its width, and the tokens that it yields at most."""
    measured = [(width, pass_ratio(curve, width)) for width in sorted(curve)]
    most = line("tokens if every draft is accepted", SERIES - 1, [(1, 1), (max(curve), max(curve))])
    lines = [line("cost of a pass", 0, measured), most | {"series": 0, "dashed": True, "marks": False}]
    options = {"suffix": "×", "digits": 2, "unit": "tokens in a pass", "places": sorted(curve)}
    return _labelled(f"Cost of a pass here, in passes over one token ({curve[1]:.3g} ms)", {"lines": lines} | options)


def _labelled(title: str, marks: Chart) -> Chart:
    """Add the title, and a description for screen readers: the numbers are in a table below the chart."""
    parts = [line["name"] for line in marks.get("lines", ())] + [group["name"] for group in marks.get("groups", ())]
    return {"title": title, "label": f"{title}: {', '.join(parts)}. The numbers are in the table.", **marks}


def _is_baseline(lane: str, rows: list[Row]) -> bool:
    """Return True for the lane that the others are divided by: its speed-up is 1 in every repeat."""
    return all(is_baseline(row["speed-up"]) for row in rows if row.get("lane") == lane)


def _lines(rows: list[Row], along: Axis) -> Chart:
    over = along.column
    lines = []
    for number, lane in enumerate(_lanes(rows)):
        points = sorted((row for row in rows if row["lane"] == lane), key=lambda row: float(row[over]))
        lines.append(line(lane, number, [(row[over], row["speed-up"]) for row in points]))
        predicted = [[row[over], row["predicted"]] for row in points if _is_number(row.get("predicted"))]
        if predicted:
            lines.append(line(f"{lane}, predicted", number, predicted) | {"dashed": True, "faint": True})
    places = sorted({row[over] for row in rows})
    return {"lines": lines, "places": places, "unit": along.unit, "doubling": along.doubling and places[0] > 0}


def line(name: str, number: int, points: Iterable[Sequence[object]], **more: object) -> Chart:
    """Return a line through measured points, pairs of x and a number or an estimate. number: of the line, for its
    colour.
    """
    pairs = [*points]
    intervals = [(x, y) for x, y in pairs if isinstance(y, Estimate) and y.low is not None and y.high is not None]
    return {
        "name": name,
        "series": 1 + number % SERIES,
        "points": [[x, y.value if isinstance(y, Estimate) else y] for x, y in pairs],
        "band": [[x, y.low, y.high] for x, y in intervals],
        "marks": True,
        **more,
    }


def _bars(rows: list[Row]) -> Chart:
    rows = sorted(rows, key=_value, reverse=True)
    predicted = any(_is_number(row.get("predicted")) for row in rows)
    series = [FASTER if _value(row) >= 1.0 else SLOWER for row in rows]
    groups = [{"name": row["lane"], "bars": [_bar(row, i)]} for row, i in zip(rows, series, strict=True)]
    return {"groups": groups} | ({"unit": "◇ predicted"} if predicted else {})


def _groups(rows: list[Row], over: str) -> Chart:
    """Return grouped bars: for each lane a bar per value of the axis, the lane with the highest bar first."""
    kinds = [*dict.fromkeys(row[over] for row in rows)]
    lanes = [[row for row in rows if row["lane"] == lane] for lane in _lanes(rows)]
    lanes.sort(key=lambda own: max(map(_value, own)), reverse=True)
    bars = [[_bar(row, 1 + kinds.index(row[over]) % SERIES) | {"name": row[over]} for row in own] for own in lanes]
    return {"groups": [{"name": own[0]["lane"], "bars": lane_bars} for own, lane_bars in zip(lanes, bars, strict=True)]}


def _bar(row: Row, series: int) -> Chart:
    speed: Estimate = row["speed-up"]
    predicted = row.get("predicted") if _is_number(row.get("predicted")) else None
    return {"value": speed.value, "low": speed.low, "high": speed.high, "predicted": predicted, "series": series}


def _frontier(result: Result) -> Chart:
    """Return one curve per lane over the loads: further left is lower latency, further up is higher throughput."""
    over = result.axis or ""
    rows = [row for row in result.rows if isinstance(row.get("lane"), str) and _is_number(row.get(over))]
    rows = [row for row in rows if all(isinstance(row.get(n), Estimate) for n in ("tokens/s", LATENCY, "speed-up"))]
    if not rows:
        raise ValueError(f"suite {result.suite} has no load points; there is nothing to draw")
    lines = []
    for number, lane in enumerate(_lanes(rows), start=SERIES - 1):
        own = [row for row in rows if row["lane"] == lane]
        notes = [f"tokens/s at {over} {row[over]:g}, {_value(row):.2f}× of plain" for row in own]
        points = [(row[LATENCY].value, row["tokens/s"]) for row in own]
        lines.append(line(lane, number, points, texts=[f"{row[over]:g}" for row in own], notes=notes))
    lines[0]["series"] = 0  # plain decoding
    head = f"Throughput (tokens/s) over latency; points are labelled with their {over}"
    return _labelled(head, {"lines": lines, "unit": "ms per token of a request", "digits": 0})


def _histograms(result: Result) -> Chart:
    """Return the tokens of both samples with two standard errors, at the position where they differ most."""
    places: dict[object, list[Row]] = {}
    for row in result.rows:
        has_place = isinstance(row.get(TOKEN), str) and _is_number(row.get("place"))
        if has_place and all(_is_share(row.get(name)) for name in (PLAIN, DRAFTED)):
            places.setdefault(row["place"], []).append(row)
    differences = {place: sum(abs(row[PLAIN] - row[DRAFTED]) for row in rows) for place, rows in places.items()}
    place = max(differences, key=differences.__getitem__, default=None)
    draws = result.config.get("draws")
    if place is None or not isinstance(draws, int) or draws < 1:
        raise ValueError(f"suite {result.suite} has no histogram; there is nothing to draw")

    def bar(row: Row, series: int, name: str) -> Chart:
        share = row[name]
        error = 2.0 * (share * (1.0 - share) / draws) ** 0.5
        return {"name": name, "value": share, "low": max(0.0, share - error), "high": share + error, "series": series}

    groups = [
        {"name": _seen(row[TOKEN]), "bars": [bar(row, i, name) for i, name in enumerate((PLAIN, DRAFTED))]}
        for row in places[place]
    ]
    options = {"groups": groups, "percentage": True, "unit": f"share of {draws} continuations"}
    return _labelled(f"Token {place:g}, where the samples differ most", options)


def _seen(token: str) -> str:
    """Make the white space of a token visible."""
    glyphs = token.replace("\n", "⏎").replace("\r", "␍").replace("\t", "⇥")
    return re.sub("^ | $", "·", glyphs)


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0.0 <= value <= 1.0


def _lanes(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row["lane"] for row in rows))


def _value(row: Row) -> float:
    speed: Estimate = row["speed-up"]
    return speed.value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def write_page(result: Result, out: Path) -> None:
    """Write a result with its chart, its table and its conditions. A suite without speed-ups has only its table."""
    facts = {**result.config, **result.environment}
    listed = "\n".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in facts.items())
    content, options = f"<pre>{escape(bench_report(result))}</pre>\n<dl>\n{listed}\n</dl>", "null"
    with suppress(ValueError):
        picture = chart(result)
        content = f'<h2>{escape(picture["title"])}</h2>\n<div id="chart" class="sd-figure"></div>\n{content}'
        options = json_text(finite(picture)).replace("<", "\\u003c")  # no text of a result can end the script
    script = "\n".join((UI / name).read_text(encoding="utf-8") for name in ("helpers.js", "chart.js"))
    style = (UI / "chart.css").read_text(encoding="utf-8")
    title = escape(f"specdemo bench {result.suite}")
    page = Template(PAGE.read_text(encoding="utf-8"))
    write_text(out, page.substitute(title=title, style=style, content=content, script=script, options=options))
