"""The engines by name, and those that specdemo does not start, which report draft counts at most."""

from collections.abc import Mapping
from typing import ClassVar

from specdemo.core.suggest import suggest
from specdemo.servers.counters import ServerStats, answer_stats, counts, fields_below, parse
from specdemo.servers.engines.base import ReportingEngine, ServingEngine
from specdemo.servers.engines.llama_server import LlamaServer
from specdemo.servers.engines.mlx import MLXLM, MLXVLM
from specdemo.servers.engines.sglang import SGLang
from specdemo.servers.engines.vllm import VLLM


class LMStudio(ReportingEngine):
    """LM Studio's server: counts in `usage` (0.4) or `stats` (release notes of 0.3.10 and later)."""

    name = "lmstudio"
    title = "LM Studio"
    drafts_with: ClassVar = frozenset({"draft_model"})
    draft_length = "Max Draft Size {k} in the settings of the model", "set no draft model"

    def draft_request(self, model: str, k: int) -> dict[str, object]:
        return {"draft_model": model}

    def acceptance(self, chunk: Mapping[str, object]) -> ServerStats | None:
        for key in ("usage", "stats"):
            names = ("total_draft_tokens_count", "accepted_draft_tokens_count")
            drafted, accepted = counts(fields_below(chunk, key), *names)
            if drafted:
                return answer_stats(self.title, drafted, accepted)
        return None


class Ollama(ReportingEngine):
    """Ollama, which reports nothing about drafts: names of server/routes.go and of its Modelfile."""

    name = "ollama"
    title = "Ollama"
    drafts_with: ClassVar = frozenset({"mtp", "dflash"})
    draft_length = "DRAFT with the drafter in the Modelfile, and draft_num_predict {k}", "draft_num_predict 0"


class OpenAI(ReportingEngine):
    """A server with OpenAI's usage details, or a gateway such as smg, which fills them in for other engines."""

    name = "openai"
    title = "The server"

    def acceptance(self, chunk: Mapping[str, object]) -> ServerStats | None:
        details = fields_below(chunk, "usage", "completion_tokens_details")
        accepted, rejected = counts(details, "accepted_prediction_tokens", "rejected_prediction_tokens")
        drafted = None if accepted is None or rejected is None else accepted + rejected
        return answer_stats(self.title, drafted, accepted) if drafted else None


DEFAULT = "vllm"
STARTED = VLLM(), SGLang(), LlamaServer(), MLXLM(), MLXVLM()  # engines that specdemo can start
OTHERS = LMStudio(), Ollama(), OpenAI()
ENGINES: dict[str, ServingEngine] = {engine.name: engine for engine in STARTED}
REPORTING: dict[str, ReportingEngine] = {engine.name: engine for engine in OTHERS}


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
    return [*ENGINES.values(), *REPORTING.values()]


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
