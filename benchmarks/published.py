"""Published results in `published.json` against predictions from model shapes and spec sheets.

A row names its source, device, models, method, draft length or tree, and the tokens emitted per pass. The measured
speed-up is not used for the prediction. old: an EAGLE-1 or -2 head, which has no vocabulary of its own.
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.what_if import row_of, verdict
from specdemo.bench.result import Result
from specdemo.prediction.acceptance import from_mean
from specdemo.prediction.predict import Row, predict

FILE = Path(__file__).with_suffix(".json")
EAGLE_1 = {"architectures": ["LlamaForCausalLM"]}

Published = dict[str, Any]


def read() -> list[Published]:
    """Return the results as published."""
    found: list[Published] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def predict_row(one: Published) -> Row:
    """Predict one result."""
    return predict(
        one["target"],
        device=one["device"],
        method=one["method"],
        model=one.get("model") or (EAGLE_1 if one.get("old") else None),
        dtype=one["dtype"],
        engine=one["engine"],
        context=one["context"],
        acceptance=from_mean(one["tokens"], one["k"]),
        ks=(one["k"],),
        nodes=one["nodes"],
    ).rows[0]


def published() -> Result:
    """Predict every result and return its error and whether the interval contains the published value."""
    rows = [
        {"device": one["device"], "target": one["target"].rpartition("/")[2], "nodes": one["nodes"]}
        | row_of(one["what"], one["method"], one["k"], 1, one["speedup"], predict_row(one))
        for one in read()
    ]
    remarks = [f"{engine}: {line}" for engine in ("recorded", "eager") for line in _verdict(rows, engine)]
    where = {"device": "datasheets", "threads": None, "dtype": "published precisions"}
    return Result("published", 1, {"results": len(rows)}, where, rows, [*_verdict(rows, ""), *remarks])


def _verdict(rows: list[dict[str, Any]], engine: str) -> list[str]:
    selected = [row for row, one in zip(rows, read(), strict=True) if one["engine"].startswith(engine)]
    return [verdict(selected)[0]]
