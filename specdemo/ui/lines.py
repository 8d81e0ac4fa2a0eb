"""The lines of the append-only texts that the page's scripts draw: one JSON object each."""

import json
import math
from typing import Any


def to_line(fields: dict[str, Any]) -> str:
    """JSON knows no NaN: a number that is not known yet is left out. Raises ValueError where one is deeper inside."""
    known = {k: v for k, v in fields.items() if not isinstance(v, float) or math.isfinite(v)}
    return json.dumps(known, ensure_ascii=False, separators=(",", ":"), allow_nan=False) + "\n"
