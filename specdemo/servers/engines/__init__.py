"""The engines by name."""

from collections.abc import Mapping

from specdemo.core.suggest import suggest
from specdemo.servers.counters import ServerStats, parse
from specdemo.servers.engines.base import ReportingEngine, ServingEngine
from specdemo.servers.engines.llama_server import LlamaServer
from specdemo.servers.engines.mlx import MLXLM, MLXVLM
from specdemo.servers.engines.reporting import LMStudio, Ollama, OpenAI
from specdemo.servers.engines.sglang import SGLang
from specdemo.servers.engines.vllm import VLLM

DEFAULT = "vllm"
STARTED = VLLM(), SGLang(), LlamaServer(), MLXLM(), MLXVLM()  # engines that specdemo can start
OTHERS = LMStudio(), Ollama(), OpenAI()
ENGINES: dict[str, ServingEngine] = {engine.name: engine for engine in STARTED}
READERS: dict[str, ReportingEngine] = {engine.name: engine for engine in OTHERS}


def serving_engine(name: str) -> ServingEngine:
    """Return the engine of that name. Raises ValueError for an unknown name."""
    if name not in ENGINES:
        raise ValueError(f"unknown engine {name!r}; {suggest(name, ENGINES)}")
    return ENGINES[name]


def engine_names() -> str:
    """Return the names as text: `a, b or c`."""
    *names, last = ENGINES
    return f"{', '.join(names)} or {last}"


def same_bits_options() -> list[str]:
    """Return a sentence about the option of each engine that makes its passes independent of other requests."""
    return [f"{engine.title}: {engine.same_bits}." for engine in ENGINES.values() if engine.same_bits]


def engines() -> list[ReportingEngine]:
    """Return all engines whose answers can be read."""
    return [*ENGINES.values(), *READERS.values()]


def request_fields() -> dict[str, object]:
    """Return the fields of a request that make an answer report its drafts; other engines ignore them."""
    return {name: value for engine in engines() for name, value in engine.request.items()}


def counts_unverified(method: str) -> bool:
    """Return whether an engine counts draft tokens of a method that it may not have verified."""
    return any(method in engine.counts_unverified for engine in engines())


def draft_request(model: str, k: int) -> dict[str, object]:
    """Return the fields of a request with which engines draft that take the draft model per request."""
    return {name: value for engine in engines() for name, value in engine.draft_request(model, k).items()}


def stats_between(before: str | None, after: str | None) -> ServerStats:
    """Return the statistics between two readings of the metrics. None: a reading failed."""
    if before is None or after is None:
        return ServerStats()
    names = frozenset[str]().union(*(engine.metrics for engine in engines()))
    old, new = parse(before, names), parse(after, names)
    statistics = (engine.statistics(old, new) for engine in engines())
    return next((stats for stats in statistics if stats), ServerStats())


def acceptance(chunk: Mapping[str, object]) -> ServerStats:
    """Return the statistics of one answer from a chunk of its stream; empty if it has none."""
    statistics = (engine.acceptance(chunk) for engine in engines())
    return next((stats for stats in statistics if stats), ServerStats())
