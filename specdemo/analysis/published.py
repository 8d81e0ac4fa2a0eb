"""Published measurements of real model pairs: mean accepted length and speed-up, each with its source."""

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

PUBLISHED = Path(__file__).with_name("published.json")


@dataclass(frozen=True, slots=True)
class Published:
    """One published result. tokens: mean accepted length, including the correction or bonus token."""

    source: str  # URL
    what: str
    device: str  # name of a profile
    engine: Literal["recorded", "eager"]
    dtype: str
    target: str
    method: str
    k: int  # draft length, or depth of the tree
    nodes: int  # of the tree; 0: a chain
    tokens: float
    speedup: float
    context: int
    model: str | None = None
    old: bool = False  # an EAGLE-1 or -2 head, which has no vocabulary of its own


@lru_cache
def published() -> tuple[Published, ...]:
    """Return all results."""
    return tuple(Published(**row) for row in json.loads(PUBLISHED.read_text(encoding="utf-8")))
