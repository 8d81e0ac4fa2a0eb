"""The tab "How it works": five interactive figures, drawn from runs that ship with the project."""

import json

from specdemo.bench.result import recorded_suite
from specdemo.core.atomic_io import json_text
from specdemo.presets.files import DEFAULT
from specdemo.presets.recorded import recorded
from specdemo.ui import assets
from specdemo.ui.log import replayed

STEPS = 14


def draw() -> None:
    """Create the tab, inside the current Blocks."""
    value = json_text({"lines": _race(), "batch": _batch()})
    assets.view("how.html", *assets.HOW, elem_id="how", value=value, later=True)


def _race() -> list[str]:
    trace = recorded(DEFAULT)
    lines = replayed(trace).text.splitlines() if trace else []
    parsed = ((line, json.loads(line)) for line in lines)
    return [line for line, message in parsed if message["type"] == "start" or message.get("index", STEPS + 1) <= STEPS]


def _batch() -> dict[str, object] | None:
    result = recorded_suite("batch")
    if result is None:
        return None
    drafting = [row for row in result.rows if row["accepted"] is not None]
    points = [[row["batch"], row["speed-up"].value] for row in drafting]
    return {"points": points, "where": result.environment.get("device", "")}
