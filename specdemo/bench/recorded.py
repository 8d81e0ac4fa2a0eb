"""Recorded results of the suites, `presets/recorded/suites/SUITE.json`, as `specdemo bench SUITE --out` writes them."""

from functools import lru_cache

from specdemo.bench.result import Result, read_result
from specdemo.presets.files import FOLDER


@lru_cache
def recorded_suite(suite: str) -> Result | None:
    """The recorded result of a suite; None where there is none. Raises ValueError for a damaged file."""
    path = FOLDER / "recorded" / "suites" / f"{suite}.json"
    return read_result(path) if path.is_file() else None
