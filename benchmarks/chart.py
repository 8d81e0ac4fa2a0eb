"""The README's chart of `bench models`: speed-ups over plain decoding by model and kind of work, as SVG."""

from html import escape
from itertools import groupby
from math import log

from specdemo.bench.result import Result, Row, is_baseline

LEFT, COLUMN, PANEL, GAP = 44, 134, 92, 26  # pixels; a panel per model, a column per kind of work
LEGEND, LEGEND_ROW, LEGEND_COLUMNS = 212, 20, 4
RADIUS = 3.5
TICKS = (0.5, 1, 2, 4)
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#56b4e9", "#7b5bc4")
OTHERS = ("#757575", "#9a9a9a", "#b8b8b8")  # engines in the order of their first lane; lanes that draft are hollow
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#333}.grid{stroke:#8883}.plain{stroke:#888}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}}"
)


def chart(result: Result) -> str:
    """Return a dot with its 95 % interval for every lane that ran all kinds of work, on one logarithmic scale."""
    kinds = list(dict.fromkeys(row["category"] for row in result.rows))
    rows = [row for row in result.rows if not is_baseline(row["speed-up"]) and _kinds(row, result) == len(kinds)]
    lanes = sorted(dict.fromkeys(str(row["lane"]) for row in rows), key=lambda lane: ":" in lane)
    low, high = log(min(row["speed-up"].low for row in rows)), log(max(row["speed-up"].high for row in rows))
    parts: list[str] = []
    for number, lane in enumerate(lanes):
        line, column = divmod(number, LEGEND_COLUMNS)
        place = 12.0 + column * LEGEND, 18.0 + line * LEGEND_ROW
        parts.append(_dot(*place, lane, lanes) + _text(place[0] + 9, place[1] + 4, lane))
    top, width = 48 + LEGEND_ROW * -(-len(lanes) // LEGEND_COLUMNS), LEFT + COLUMN * len(kinds) + 8
    parts += [_text(LEFT + (n + 0.5) * COLUMN, top - 20, kind, "middle") for n, kind in enumerate(kinds)]
    for model, panel in groupby(rows, key=lambda row: str(row["model"])):

        def height(speed: float, zero: int = top + 16) -> float:
            return zero + (PANEL - 16) * (high - log(speed)) / (high - low)

        parts.append(_text(LEFT, top + 4, model))
        for tick in TICKS:
            y, style = height(tick), "plain" if tick == 1 else "grid"
            line_at = f'<path class="{style}" d="M{LEFT} {y:.1f}H{width - 8}"/>'
            parts.append(line_at + _text(LEFT - 6, y + 4, f"{tick}×", "end"))
        shown = [*panel]
        present = [lane for lane in lanes if any(row["lane"] == lane for row in shown)]
        for row in shown:
            lane, speed = str(row["lane"]), row["speed-up"]
            x = LEFT + (kinds.index(row["category"]) + (present.index(lane) + 1) / (len(present) + 1)) * COLUMN
            ends = f"M{x:.1f} {height(speed.low):.1f}V{height(speed.high):.1f}"
            parts.append(f'<path stroke="{_colour(lane, lanes)}" d="{ends}"/>')
            parts.append(_dot(x, height(speed.value), lane, lanes))
        top += PANEL + GAP
    size = f'width="{width}" height="{top - GAP + 12}" viewBox="0 0 {width} {top - GAP + 12}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>', *parts, "</svg>\n"])


def _kinds(row: Row, result: Result) -> int:
    return sum((other["model"], other["lane"]) == (row["model"], row["lane"]) for other in result.rows)


def _colour(lane: str, lanes: list[str]) -> str:
    engine, colon, _ = lane.partition(":")
    engines = list(dict.fromkeys(other.partition(":")[0] for other in lanes if ":" in other))
    return OTHERS[engines.index(engine) % len(OTHERS)] if colon else COLOURS[lanes.index(lane) % len(COLOURS)]


def _dot(x: float, y: float, lane: str, lanes: list[str]) -> str:
    colour = _colour(lane, lanes)
    fill = "none" if ":" in lane and not lane.endswith(": plain") else colour
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{RADIUS}" stroke="{colour}" fill="{fill}"/>'


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
