"""Plots of the sections on one page: v(n) by batch size, plain decoding against bandwidth, and the parts of a step."""

from collections.abc import Mapping
from html import escape
from itertools import cycle
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from benchmarks.gpu.report import methods_of, rows_of
from specdemo.bench.plot import GREY, LINES, axis, layout
from specdemo.core.files import write_text

StoredSection = Mapping[str, Any]
LAPS = ("draft", "verify", "accept", "commit", "observe")


def write_plots(path: Path, sections: Mapping[str, StoredSection], environment: StoredSection, note: str) -> bool:
    """Write the plots; return False if there is nothing to draw. note: text below the title."""
    drawn = [figure for figure in (_widths(sections), _bandwidth(sections), _steps(sections)) if figure is not None]
    if not drawn:
        return False
    where = escape(f"{environment['device']}, {environment['date']}")
    parts = [figure.to_html(full_html=False, include_plotlyjs=not index) for index, figure in enumerate(drawn)]
    head = f'<meta charset="utf-8"><title>{where}</title><style>body {{ font-family: system-ui }}</style>'
    write_text(path, f"<!doctype html>\n{head}\n<h1>{where}</h1>\n<p>{escape(note)}</p>\n" + "\n".join(parts) + "\n")
    return True


def _figure(title: str, x: dict[str, Any], y: dict[str, Any]) -> go.Figure:
    drawn = go.Figure(layout=layout(height=430, title={"text": f"<b>{title}</b>"}))
    drawn.update_xaxes(axis(**x))
    drawn.update_yaxes(axis(**y))
    return drawn


def _widths(sections: Mapping[str, StoredSection]) -> go.Figure | None:
    rows = rows_of(sections, "widths")
    if not rows:
        return None
    own = [row for row in rows if row["shape"] == rows[0]["shape"]]
    drawn = _figure(
        f"Time of a pass over n tokens, relative to one token, {rows[0]['shape']}",
        {"title": {"text": "n, tokens per row"}},
        {"title": {"text": "v(n)"}},
    )
    for batch, (color, dash, marker) in zip(dict.fromkeys(row["batch"] for row in own), cycle(LINES[1:]), strict=False):
        points = [row for row in own if row["batch"] == batch]
        drawn.add_scatter(
            x=[row["slots"] for row in points],
            y=[row["v"] for row in points],
            name=f"batch {batch}",
            mode="lines+markers",
            line={"color": color, "dash": dash},
            marker={"symbol": marker},
        )
    return drawn


def _bandwidth(sections: Mapping[str, StoredSection]) -> go.Figure | None:
    rows = rows_of(sections, "plain-")
    if not rows:
        return None
    drawn = _figure(
        "Plain decoding: weights read, as a share of the measured bandwidth",
        {"title": {"text": ""}},
        {"tickformat": ".0%", "title": {"text": "of the bandwidth"}},
    )
    for precision, (color, _, _) in zip(
        dict.fromkeys(row["precision"] for row in rows), cycle(LINES[1:]), strict=False
    ):
        own = [row for row in rows if row["precision"] == precision]
        drawn.add_bar(
            x=[row["shape"] for row in own],
            y=[row["of the bandwidth"] for row in own],
            name=precision,
            marker={"color": color, "opacity": 0.7},
            text=[f"{row['tokens/s']:.0f}/s" for row in own],
        )
    drawn.add_hline(y=0.8, line={"color": GREY, "dash": "dot"})
    return drawn


def _steps(sections: Mapping[str, StoredSection]) -> go.Figure | None:
    rows = methods_of(sections)
    if not rows:
        return None
    drawn = _figure(
        "Where a step's time goes", {"title": {"text": "ms"}}, {"autorange": "reversed", "automargin": True}
    )
    for lap, (color, _, _) in zip(LAPS, LINES[1:], strict=False):
        drawn.add_bar(
            y=[row["method"] for row in rows],
            x=[row.get(f"{lap} ms", 0.0) for row in rows],
            name=lap,
            orientation="h",
            marker={"color": color},
        )
    drawn.update_layout(barmode="stack", height=140 + 26 * len(rows), legend={"traceorder": "normal"})
    return drawn
