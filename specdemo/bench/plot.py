"""Plots of results: speed-up over the swept setting with its interval and the cost model's prediction, histograms of
two token samples, and throughput over latency of servers under load.

Colours have medium lightness and backgrounds are transparent, so that one figure suits light and dark pages. No line is
distinguished by colour only.
"""

import re
from collections.abc import Iterable
from html import escape
from itertools import cycle
from typing import Any

import plotly.graph_objects as go

from specdemo.bench.base import Axis
from specdemo.bench.result import ALL, DRAFTED, LATENCY, PLAIN, TOKEN, Result, Row, is_baseline
from specdemo.bench.suites import suites
from specdemo.core.estimate import Estimate

FONTS = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "Arial", "sans-serif"]
GREY = "#7d8694"
GRID = "rgba(125,134,148,.22)"
LINES = (  # colour (Okabe and Ito), dash, marker; the first is for plain decoding
    (GREY, "dot", "circle"),
    ("#2f8fd0", "solid", "circle"),
    ("#d97f1e", "dash", "square"),
    ("#17a088", "dashdot", "diamond"),
    ("#a86fc4", "longdash", "triangle-up"),
    ("#c4a000", "longdashdot", "x"),
    ("#d4639a", "dash", "star"),
)
BELOW = {"orientation": "h", "x": 0, "y": -0.2, "yanchor": "top"}
BARS = "lane"
KIND = "text"  # axis of the suite that compares kinds of text
TIMES = "×"
BASELINE = "plain decoding"


def figure(result: Result) -> go.Figure:
    """Plot lines over the swept setting, one per lane, or bars if only lanes are compared. Plain decoding is the line
    at 1.

    Raises ValueError if the result has neither speed-ups nor a histogram.
    """
    if result.axis == TOKEN:
        return _histograms(result)
    if any(LATENCY in row for row in result.rows):
        return _frontier(result)
    over = result.axis or BARS
    place = str if over in (BARS, KIND) else (int, float)
    rows = [row for row in result.rows if row.get("category", ALL) == ALL and isinstance(row.get(over), place)]
    rows = [row for row in rows if isinstance(row.get("speed-up"), Estimate)]
    rows = [row for row in rows if isinstance(row.get("lane"), str) and not _is_baseline(row["lane"], rows)]
    if not rows:
        raise ValueError(f"suite {result.suite} measures no speed-up; there is nothing to draw")
    known = {suite.axis.column: suite.axis for suite in suites().values() if suite.axis}
    along = known.get(over, Axis(over, _plain(over), _plain(over)))
    drawn = _bars(rows) if over == BARS else _groups(rows) if over == KIND else _lines(rows, along)
    head = "Speed-up by lane" if over == BARS else f"Speed-up over {along.title}"
    drawn.update_layout(title=_title(result, head))
    return drawn


def _is_baseline(lane: str, rows: list[Row]) -> bool:
    """Return True for the lane that the others are divided by: its speed-up is 1 in every repeat."""
    return all(is_baseline(row["speed-up"]) for row in rows if row.get("lane") == lane)


def _lines(rows: list[Row], along: Axis) -> go.Figure:
    over = along.column
    places = sorted({row[over] for row in rows})
    drawn = go.Figure(layout=layout(height=430, margin={"l": 56, "r": 16, "t": 92, "b": 40}))
    drawn.add_scatter(
        x=[places[0], places[-1]],
        y=[1.0, 1.0],
        mode="lines",
        name=BASELINE,
        line={"color": GREY, "dash": "dot", "width": 2},
        hoverinfo="skip",
    )
    for lane, (color, _, marker) in zip(_lanes(rows), cycle(LINES[1:]), strict=False):
        points = sorted((row for row in rows if row["lane"] == lane), key=lambda row: float(row[over]))
        name = _plain(lane)
        drawn.add_scatter(
            x=[row[over] for row in points],
            y=[_value(row) for row in points],
            error_y=_intervals(points) | {"color": color},
            mode="lines+markers",
            name=name,
            line={"color": color, "width": 2.5},
            marker={"symbol": marker, "size": 9},
            customdata=_hover_text(points),
            hovertemplate=f"%{{x}}: <b>%{{y:.2f}}{TIMES}</b> %{{customdata[0]}}<extra>{name}</extra>",
        )
        predicted_rows = [row for row in points if _is_number(row.get("predicted"))]
        if predicted_rows:
            drawn.add_scatter(
                x=[row[over] for row in predicted_rows],
                y=[row["predicted"] for row in predicted_rows],
                mode="lines+markers",
                name=f"{name}, predicted",
                line={"color": color, "width": 1.75, "dash": "dash"},
                marker={"symbol": f"{marker}-open", "size": 8},
                hovertemplate=f"%{{x}}: %{{y:.2f}}{TIMES} predicted<extra>{name}</extra>",
            )
    ticks = {"tickmode": "array", "tickvals": places, "ticktext": [f"{place:g}" for place in places]}
    scale = {"type": "log", "rangemode": "normal"} if along.doubling else {"rangemode": "normal"}
    drawn.update_xaxes(axis(title={"text": along.unit}, **ticks) | scale)
    drawn.update_yaxes(axis(title={"text": "speed-up"}, ticksuffix=TIMES))
    drawn.update_layout(legend=BELOW, showlegend=True)
    return drawn


def _bars(rows: list[Row]) -> go.Figure:
    rows = sorted(rows, key=_value, reverse=True)
    drawn = go.Figure(layout=layout(height=150 + 27 * len(rows), margin={"l": 8, "r": 16, "t": 92, "b": 44}))
    faster, slower = LINES[1][0], LINES[2][0]
    drawn.add_bar(
        **_sideways(rows),
        name="measured",
        marker={"color": [faster if _value(row) >= 1.0 else slower for row in rows], "opacity": 0.6},
        text=[f"{_value(row):.2f}{TIMES}" for row in rows],
        textposition="inside",
        insidetextanchor="start",
        constraintext="none",
        textfont={"color": "#0b1220"},
    )
    predicted_rows = [row for row in rows if _is_number(row.get("predicted"))]
    if predicted_rows:
        drawn.add_scatter(
            x=[row["predicted"] for row in predicted_rows],
            y=[_plain(row["lane"]) for row in predicted_rows],
            mode="markers",
            name="predicted",
            marker={"symbol": "diamond-open", "size": 10, "color": GREY, "line": {"width": 2}},
            hovertemplate=f"%{{y}}: %{{x:.2f}}{TIMES} predicted<extra></extra>",
        )
    drawn.update_xaxes(
        axis(title={"text": "speed-up; ◇ predicted" if predicted_rows else "speed-up"}, ticksuffix=TIMES)
    )
    drawn.update_yaxes(axis(autorange="reversed", automargin=True, showgrid=False))
    drawn.update_layout(showlegend=False)
    drawn.add_vline(
        x=1.0,
        line={"color": GREY, "dash": "dot"},
        annotation_text=BASELINE,
        annotation_position="top",
        annotation_font={"color": GREY, "size": 11},
    )
    return drawn


def _groups(rows: list[Row]) -> go.Figure:
    """Draw grouped bars, one bar per kind of text for each lane."""
    drawn = go.Figure(layout=layout(height=170 + 72 * len(_lanes(rows)), margin={"l": 8, "r": 16, "t": 92, "b": 44}))
    kinds = dict.fromkeys(row[KIND] for row in rows)
    for kind, (color, _, _), shape in zip(kinds, LINES[1:], ("", "/", ".", "x", "-", "+"), strict=False):
        points, name = [row for row in rows if row[KIND] == kind], _plain(kind)
        marker = {"color": color, "opacity": 0.7, "pattern": {"shape": shape}}
        drawn.add_bar(**_sideways(points, name), name=name, marker=marker)
    drawn.update_xaxes(axis(title={"text": "speed-up"}, ticksuffix=TIMES))
    drawn.update_yaxes(axis(autorange="reversed", automargin=True, showgrid=False))
    drawn.update_layout(barmode="group", bargap=0.25, legend={"orientation": "h", "x": 0, "y": -0.08, "yanchor": "top"})
    drawn.add_vline(x=1.0, line={"color": GREY, "dash": "dot"})
    return drawn


def _sideways(rows: list[Row], name: str = "") -> dict[str, object]:
    """Plot one horizontal bar per lane."""
    return {
        "x": [_value(row) for row in rows],
        "y": [_plain(row["lane"]) for row in rows],
        "error_x": _intervals(rows) | {"color": GREY},
        "orientation": "h",
        "customdata": _hover_text(rows),
        "hovertemplate": f"%{{y}}: <b>%{{x:.2f}}{TIMES}</b> %{{customdata[0]}}<extra>{name}</extra>",
    }


def _frontier(result: Result) -> go.Figure:
    """Plot one curve per lane over the loads: further left is lower latency, further up is higher throughput."""
    over, columns = result.axis or "", ("tokens/s", LATENCY, "speed-up")
    rows = [row for row in result.rows if all(isinstance(row.get(name), Estimate) for name in columns)]
    rows = [row for row in rows if isinstance(row.get("lane"), str) and _is_number(row.get(over))]
    if not rows:
        raise ValueError(f"suite {result.suite} has no load points; there is nothing to draw")
    drawn = go.Figure(layout=layout(height=460, margin={"l": 64, "r": 16, "t": 92, "b": 40}))
    for lane, (color, dash, marker) in zip(_lanes(rows), cycle(LINES), strict=False):
        points = [row for row in rows if row["lane"] == lane]
        drawn.add_scatter(
            x=[row[LATENCY].value for row in points],
            y=[row["tokens/s"].value for row in points],
            error_y=_intervals(points, "tokens/s") | {"color": color},
            mode="lines+markers+text",
            name=_plain(lane),
            text=[f"{row[over]:g}" for row in points],
            textposition="top left",
            line={"color": color, "width": 2.5, "dash": dash},
            marker={"symbol": marker, "size": 9},
            customdata=[(row["speed-up"].value,) for row in points],
            hovertemplate=f"%{{text}} {over}: <b>%{{y:.0f}} tokens/s</b>, %{{x:.2f}} ms per token, "
            f"%{{customdata[0]:.2f}}{TIMES} of plain<extra>{_plain(lane)}</extra>",
        )
    drawn.update_xaxes(axis(title={"text": "ms per token of a request, from sending to end"}))
    drawn.update_yaxes(axis(title={"text": "tokens/s over all requests"}))
    drawn.update_layout(legend=BELOW, showlegend=True)
    drawn.update_layout(title=_title(result, f"Throughput over latency; the label of a point is its {_plain(over)}"))
    return drawn


def _histograms(result: Result) -> go.Figure:
    """Plot the tokens of both samples with two standard errors, at the position where they differ most."""
    places: dict[object, list[Row]] = {}
    for row in result.rows:
        known = isinstance(row.get(TOKEN), str) and _is_number(row.get("place"))
        if known and all(_is_share(row.get(name)) for name in (PLAIN, DRAFTED)):
            places.setdefault(row["place"], []).append(row)
    differences = {place: sum(abs(row[PLAIN] - row[DRAFTED]) for row in rows) for place, rows in places.items()}
    place = max(differences, key=differences.__getitem__, default=None)
    rows = places.get(place, [])
    draws = result.config.get("draws")
    if not rows or not isinstance(draws, int) or draws < 1:
        raise ValueError(f"suite {result.suite} has no histogram; there is nothing to draw")
    drawn = go.Figure(layout=layout(height=430, margin={"l": 8, "r": 16, "t": 92, "b": 44}))
    for name, (color, _, _) in zip((PLAIN, DRAFTED), LINES, strict=False):
        shares = [row[name] for row in rows]
        drawn.add_bar(
            x=shares,
            y=[_plain(_seen(row[TOKEN])) for row in rows],
            error_x={
                "array": [2.0 * (share * (1.0 - share) / draws) ** 0.5 for share in shares],
                "color": color,
                "thickness": 1.5,
                "width": 4,
            },
            orientation="h",
            name=name,
            marker={"color": color, "opacity": 0.6, "pattern": {"shape": "/" if name == DRAFTED else ""}},
            hovertemplate=f"%{{y}}: <b>%{{x:.1%}}</b><extra>{name}</extra>",
        )
    drawn.update_xaxes(axis(title={"text": f"share of {draws} continuations"}, tickformat=".0%"))
    drawn.update_yaxes(axis(autorange="reversed", automargin=True, showgrid=False, type="category"))
    drawn.update_layout(
        barmode="group",
        bargap=0.25,
        legend=BELOW | {"y": -0.14},
        showlegend=True,
        title=_title(result, f"Token {place:g}, where the samples differ most"),
    )
    return drawn


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


def _intervals(rows: list[Row], column: str = "speed-up") -> dict[str, object]:
    """Return error bars for the intervals, if there are any."""
    known: list[Estimate] = [row[column] for row in rows]
    up = [(one.high or one.value) - one.value for one in known]
    down = [one.value - (one.low or one.value) for one in known]
    return {"type": "data", "symmetric": False, "array": up, "arrayminus": down, "thickness": 1.5, "width": 5}


def _hover_text(rows: list[Row]) -> list[tuple[str]]:
    return [(row["speed-up"].interval(),) for row in rows]


def _title(result: Result, head: str) -> dict[str, object]:
    """Return the title: suite, machine, date and commit."""
    facts = result.environment
    threads = f"{facts['threads']} thread{'s' * (facts['threads'] != 1)}" if facts.get("threads") else None
    where = [facts.get("device"), threads, facts.get("dtype")]
    commit = f"commit {str(facts['commit'])[:7]}" if facts.get("commit") else None
    when = [f"suite {result.suite}", facts.get("date"), commit]
    lines = [", ".join(_plain(part) for part in parts if part) for parts in (where, when)]
    small = "".join(f'<br><span style="font-size:12px">{line}</span>' for line in lines if line)
    return {
        "text": f"<b>{head}</b>{small}",
        "font": {"size": 15},
        "x": 0.012,
        "xanchor": "left",
        "y": 0.965,
        "yref": "container",
        "yanchor": "top",
    }


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _plain(text: object) -> str:
    """Escape a name, because Plotly interprets some HTML."""
    return escape(str(text), quote=False)


def layout(**more: object) -> go.Layout:
    """Clear backgrounds, system fonts, and what a chart adds."""
    common = {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": GREY, "family": ", ".join(FONTS), "size": 12},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": GREY},
    }
    return go.Layout(common | more)


def axis(**more: object) -> dict[str, object]:
    """Return Plotly's layout of one axis; `more` overrides settings."""
    return {"gridcolor": GRID, "zeroline": False, "rangemode": "tozero", **more}
