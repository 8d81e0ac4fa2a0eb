"""The README's chart of `bench models`: speed-ups over plain decoding by model and kind of work, as SVG."""

from html import escape
from itertools import groupby
from math import log

from specdemo.bench.result import Result, Row, is_baseline

LEFT, TOP, COLUMN, PANEL, GAP = 44, 88, 134, 92, 26  # pixels; a panel per model, a column per kind of work
RADIUS, LEGEND, LEGEND_ROW = 3.5, 212, 20
TICKS = (0.5, 1, 2, 4)
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#56b4e9")
OTHERS = "#8c8c8c"  # lanes of transformers and llama.cpp; those that draft are hollow
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#333}.grid{stroke:#8883}.plain{stroke:#888}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}}"
)


def chart(result: Result) -> str:
    """Return a dot with its 95 % interval for every lane that ran all kinds of work, on one logarithmic scale."""
    kinds = list(dict.fromkeys(row["category"] for row in result.rows))
    rows = [row for row in result.rows if not is_baseline(row["speed-up"]) and _kinds(row, result) == len(kinds)]
    lanes = sorted(dict.fromkeys(_label(row) for row in rows), key=lambda lane: _engine(lane) != "")
    low, high = (
        log(limit(getattr(row["speed-up"], end) for row in rows)) for limit, end in ((min, "low"), (max, "high"))
    )
    parts = [_mark(12 + n % 4 * LEGEND, 18 + n // 4 * LEGEND_ROW, lane, lanes, lane) for n, lane in enumerate(lanes)]
    parts += [_text(LEFT + (n + 0.5) * COLUMN, TOP - 20, kind, "middle") for n, kind in enumerate(kinds)]
    width, top = LEFT + COLUMN * len(kinds) + 8, TOP
    for model, panel in groupby(rows, key=lambda row: str(row["model"])):

        def height(speed: float, top: int = top) -> float:
            return top + 16 + (PANEL - 16) * (high - log(speed)) / (high - low)

        parts.append(_text(LEFT, top + 4, model, weight="bold"))
        for tick in TICKS:
            y, style = height(tick), "plain" if tick == 1 else "grid"
            parts.append(
                f'<path class="{style}" d="M{LEFT} {y:.1f}H{width - 8}"/>' + _text(LEFT - 6, y + 4, f"{tick}×", "end")
            )
        own = [*panel]
        present = [lane for lane in lanes if lane in map(_label, own)]
        for row in own:
            place = (present.index(_label(row)) + 1) / (len(present) + 1)
            x, speed = LEFT + (kinds.index(row["category"]) + place) * COLUMN, row["speed-up"]
            colour = _colour(_label(row), lanes)
            parts.append(f'<path stroke="{colour}" d="M{x:.1f} {height(speed.low):.1f}V{height(speed.high):.1f}"/>')
            parts.append(_mark(x, height(speed.value), _label(row), lanes))
        top += PANEL + GAP
    size = f'width="{width}" height="{top - GAP + 12}" viewBox="0 0 {width} {top - GAP + 12}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>', *parts, "</svg>\n"])


def _kinds(row: Row, result: Result) -> int:
    return sum((other["model"], other["lane"]) == (row["model"], row["lane"]) for other in result.rows)


def _engine(lane: str) -> str:
    return lane.rpartition(":")[0]


def _label(row: Row) -> str:
    """Return the name of a lane; the other engines run plain decoding and one lookup, under two names."""
    engine, _, lane = str(row["lane"]).rpartition(": ")
    return lane if not engine else "other engine: plain" if lane == "plain" else "other engine: n-gram"


def _colour(lane: str, lanes: list[str]) -> str:
    return OTHERS if _engine(lane) else COLOURS[lanes.index(lane) % len(COLOURS)]


def _mark(x: float, y: float, lane: str, lanes: list[str], words: str = "") -> str:
    colour = _colour(lane, lanes)
    fill = "none" if _engine(lane) and not lane.endswith("plain") else colour
    dot = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{RADIUS}" stroke="{colour}" fill="{fill}"/>'
    return dot + (_text(x + 9, y + 4, words) if words else "")


def _text(x: float, y: float, words: str, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{escape(words)}</text>'
