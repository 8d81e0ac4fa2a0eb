"""The serving engines by name."""

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

from specdemo.core.suggest import suggest
from specdemo.servers.counters import ServerStats, parse
from specdemo.servers.engines.base import ServingEngine

DEFAULT = "vllm"
CLASSES = (
    "specdemo.servers.engines.vllm:VLLM",
    "specdemo.servers.engines.sglang:SGLang",
    "specdemo.servers.engines.llamacpp:LlamaCpp",
)
ENGINES: dict[str, ServingEngine] = {engine.name: engine for engine in (resolve_name(path)() for path in CLASSES)}


def serving_engine(name: str) -> ServingEngine:
    """Return the engine of that name. Raises ValueError for an unknown name."""
    if name not in ENGINES:
        raise ValueError(f"unknown engine {name!r}; {suggest(name, ENGINES)}")
    return ENGINES[name]


def engine_names() -> str:
    """Return the names as text: `a, b or c`."""
    *names, last = ENGINES
    return f"{', '.join(names)} or {last}"


def stats_between(before: str | None, after: str | None) -> ServerStats:
    """Return the statistics between two readings of /metrics. None: a reading failed."""
    if before is None or after is None:
        return ServerStats()
    names = frozenset[str]().union(*(engine.metrics for engine in ENGINES.values()))
    old, new = parse(before, names), parse(after, names)
    found = (engine.statistics(old, new) for engine in ENGINES.values())
    return next((stats for stats in found if stats), ServerStats())


def acceptance(chunk: Mapping[str, Any]) -> ServerStats:
    """Return the statistics of one response from a chunk of its stream; empty if it has none."""
    found = (engine.acceptance(chunk) for engine in ENGINES.values())
    return next((stats for stats in found if stats), ServerStats())
