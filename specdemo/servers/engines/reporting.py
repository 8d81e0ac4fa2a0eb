"""Servers that specdemo does not start, and whose answers or metrics report draft counts."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import ClassVar

from pydantic import BaseModel

from specdemo.servers.counters import Count, Counts, Samples, ServerStats, answer_stats, delta, reported
from specdemo.servers.engines.base import ReportingEngine


class _LMStudioCounts(BaseModel):
    total_draft_tokens_count: Count = None
    accepted_draft_tokens_count: Count = None


class LMStudio(ReportingEngine):
    """LM Studio's server: counts in `usage` (0.4) or `stats` (release notes of 0.3.10 and later)."""

    name = "lmstudio"
    title = "LM Studio"
    drafts_with: ClassVar = frozenset({"draft_model"})

    def draft_length_setting(self, k: int, method: str = "", drafter: str = "") -> str:
        return f"Max Draft Size {k} in the settings of the model" if k else "set no draft model"

    def draft_request(self, model: str, k: int) -> dict[str, object]:
        return {"draft_model": model}

    def acceptance(self, chunk: Mapping[str, object]) -> ServerStats | None:
        for key in ("usage", "stats"):
            found = reported(_LMStudioCounts, chunk, key)
            total = found and found.total_draft_tokens_count
            if found and total:
                return answer_stats(self.title, total, found.accepted_draft_tokens_count)
        return None


class Ollama(ReportingEngine):
    """Ollama, which reports nothing about drafts: names of server/routes.go and of its Modelfile."""

    name = "ollama"
    title = "Ollama"
    drafts_with: ClassVar = frozenset({"mtp", "dflash"})

    def draft_length_setting(self, k: int, method: str = "", drafter: str = "") -> str:
        return f"DRAFT with the drafter in the Modelfile, and draft_num_predict {k}" if k else "draft_num_predict 0"


class TensorRTLLM(ReportingEngine):
    """TensorRT-LLM's server: names of tensorrt_llm/metrics/collector.py."""

    name = "tensorrt-llm"
    title = "TensorRT-LLM"
    drafted, accepted = (f"trtllm_spec_decode_num_{what}_tokens" for what in ("draft", "accepted"))
    generated, running = "trtllm_generation_tokens", "trtllm_num_requests_running"
    metrics = frozenset({drafted, accepted, generated})
    metrics_path = "/prometheus/metrics"

    def draft_length_setting(self, k: int, method: str = "", drafter: str = "") -> str:
        return f"max_draft_len: {k} in speculative_config" if k else "omit speculative_config"

    def statistics(self, old: Samples, new: Samples) -> ServerStats | None:
        drafted, accepted = delta(old, new, self.drafted), delta(old, new, self.accepted)
        if not drafted or accepted is None:
            return None
        source = f"{self.title}'s counters over the run: accepted / drafted tokens"
        stats = answer_stats(self.title, int(drafted), int(accepted))
        stats = stats and replace(stats, source=source).over_all_passes(delta(old, new, self.generated))
        return stats and replace(stats, source=f"{stats.source}; requests of other users are included")


class RapidMLX(ReportingEngine):
    """Rapid-MLX's server: counters of vllm_mlx/routes/metrics.py. An attempt is one draft that the target verified."""

    name = "rapid-mlx"
    title = "Rapid-MLX"
    attempts, accepts = "rapid_mlx_spec_decode_attempts", "rapid_mlx_spec_decode_accepts"
    metrics = frozenset({attempts, accepts})

    def statistics(self, old: Samples, new: Samples) -> ServerStats | None:
        attempts, accepts = delta(old, new, self.attempts), delta(old, new, self.accepts)
        if not attempts or accepts is None or accepts > attempts:
            return None
        source = f"{self.title}'s counters over the run: accepts / attempts; requests of other users are included"
        return ServerStats({"acceptance_rate": round(accepts / attempts, 4)}, [], source)


class _SpeculateMetrics(BaseModel):
    """Counts of output/token_processor.py: `accepted_tokens` has all output tokens, and the first entry of
    `accepted_tokens_per_head` the steps."""

    accepted_tokens: Count = None
    rejected_tokens: Count = None
    accepted_tokens_per_head: Counts = None


class FastDeploy(ReportingEngine):
    """FastDeploy's server: `speculate_metrics` of a choice."""

    name = "fastdeploy"
    title = "FastDeploy"

    def acceptance(self, chunk: Mapping[str, object]) -> ServerStats | None:
        choices = chunk.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        found = reported(_SpeculateMetrics, choice, "speculate_metrics")
        if found is None or not found.accepted_tokens_per_head:
            return None
        steps, *heads = found.accepted_tokens_per_head
        if found.rejected_tokens is None or found.accepted_tokens != steps + sum(heads):
            return None
        reached = [steps, *heads, 0]
        histogram = [max(here - after, 0) for here, after in pairwise(reached)]
        return answer_stats(self.title, sum(heads) + found.rejected_tokens, sum(heads), steps, histogram)


class _PredictionDetails(BaseModel):
    accepted_prediction_tokens: Count = None
    rejected_prediction_tokens: Count = None


class OpenAI(ReportingEngine):
    """A server with OpenAI's usage details, or a gateway such as smg, which fills them in for other engines."""

    name = "openai"
    title = "The server"

    def acceptance(self, chunk: Mapping[str, object]) -> ServerStats | None:
        found = reported(_PredictionDetails, chunk, "usage", "completion_tokens_details")
        if found is None or found.accepted_prediction_tokens is None or found.rejected_prediction_tokens is None:
            return None
        drafted = found.accepted_prediction_tokens + found.rejected_prediction_tokens
        return answer_stats(self.title, drafted, found.accepted_prediction_tokens) if drafted else None
