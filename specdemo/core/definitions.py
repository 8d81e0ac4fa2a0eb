"""Definitions of all measured numbers, in definitions.toml; the page, the documentation and the API show this table.
Needs no torch.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Tile:
    """Row of a definition's first number on the page. format: None if tiles.js has a function for this row."""

    id: str
    title: str
    text: str  # beside the number
    format: Literal["percent", "decimal", "count", "bytes", "milliseconds"] | None = None
    baseline: bool = False  # the baseline has a row too
    optional: bool = False  # hidden if no lane has the number


@dataclass(frozen=True, slots=True)
class Definition:
    """Definition of one or more numbers. keys: in a summary or a row of `comparison`."""

    keys: tuple[str, ...]
    text: str
    tile: Tile | None = None


def _read(keys: list[str], text: str, tile: dict[str, Any] | None = None) -> Definition:
    return Definition(tuple(keys), text, Tile(**tile) if tile else None)


_ENTRIES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
DEFINITIONS: dict[str, Definition] = {name: _read(**entry) for name, entry in _ENTRIES.items()}


def table() -> str:
    """Return the definitions as a Markdown table."""
    rows = (f"| {name} | {definition.text} |" for name, definition in DEFINITIONS.items())
    return "\n".join(["| number | definition |", "|---|---|", *rows])


def by_key() -> dict[str, str]:
    """Return the definition of every key of a summary or of a row of `comparison`."""
    return {key: definition.text for definition in DEFINITIONS.values() for key in definition.keys}
