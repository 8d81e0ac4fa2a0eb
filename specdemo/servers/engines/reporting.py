"""Servers that specdemo does not start, and whose answers or metrics report draft counts."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import ClassVar

from specdemo.servers.counters import Samples, ServerStats, answer_stats, counts, delta, listed_counts, reported
from specdemo.servers.engines.base import ReportingEngine


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
            drafted, accepted = counts(reported(chunk, key), *names)
            if drafted:
                return answer_stats(self.title, drafted, accepted)
        return None


class Ollama(ReportingEngine):
    """Ollama, which reports nothing about drafts: names of server/routes.go and of its Modelfile."""

    name = "ollama"
    title = "Ollama"
    drafts_with: ClassVar = frozenset({"mtp", "dflash"})
    draft_length = "DRAFT with the drafter in the Modelfile, and draft_num_predict {k}", "draft_num_predict 0"


class TensorRTLLM(ReportingEngine):
    """TensorRT-LLM's server: names of tensorrt_llm/metrics/collector.py."""

    name = "tensorrt-llm"
    title = "TensorRT-LLM"
    drafted, accepted = (f"trtllm_spec_decode_num_{what}_tokens" for what in ("draft", "accepted"))
    generated, running = "trtllm_generation_tokens", "trtllm_num_requests_running"
    metrics = frozenset({drafted, accepted, generated})
    metrics_path = "/prometheus/metrics"
    draft_length = "max_draft_len: {k} in speculative_config", "omit speculative_config"

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


class FastDeploy(ReportingEngine):
    """FastDeploy's server: `speculate_metrics` of a choice (output/token_processor.py). `accepted_tokens` has all
    output tokens, and the first entry of `accepted_tokens_per_head` the steps."""

    name = "fastdeploy"
    title = "FastDeploy"

    def acceptance(self, chunk: Mapping[str, object]) -> ServerStats | None:
        choices = chunk.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        found = reported(choice, "speculate_metrics")
        output, rejected = counts(found, "accepted_tokens", "rejected_tokens")
        steps, *heads = listed_counts(found, "accepted_tokens_per_head") or [0]
        if not steps or rejected is None or output != steps + sum(heads):
            return None
        reached = [steps, *heads, 0]
        histogram = [max(here - after, 0) for here, after in pairwise(reached)]
        return answer_stats(self.title, sum(heads) + rejected, sum(heads), steps, histogram)


class OpenAI(ReportingEngine):
    """A server with OpenAI's usage details, or a gateway such as smg, which fills them in for other engines."""

    name = "openai"
    title = "The server"

    def acceptance(self, chunk: Mapping[str, object]) -> ServerStats | None:
        found = reported(chunk, "usage", "completion_tokens_details")
        accepted, rejected = counts(found, "accepted_prediction_tokens", "rejected_prediction_tokens")
        drafted = None if accepted is None or rejected is None else accepted + rejected
        return answer_stats(self.title, drafted, accepted) if drafted else None
