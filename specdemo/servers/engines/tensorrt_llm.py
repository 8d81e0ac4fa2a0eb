"""TensorRT-LLM: names of tensorrt_llm/metrics/collector.py, which its server exports at /prometheus/metrics."""

from dataclasses import replace

from specdemo.servers.counters import Samples, ServerStats, answer_stats, delta
from specdemo.servers.engines.base import ReportingEngine

DRAFTED, ACCEPTED = (f"trtllm_spec_decode_num_{what}_tokens" for what in ("draft", "accepted"))


class TensorRTLLM(ReportingEngine):
    """TensorRT-LLM's server."""

    name = "tensorrt-llm"
    title = "TensorRT-LLM"
    metrics = frozenset({DRAFTED, ACCEPTED})
    metrics_path = "/prometheus/metrics"
    generated, running = "trtllm_generation_tokens", "trtllm_num_requests_running"

    def draft_length_setting(self, k: int, method: str = "", drafter: str = "") -> str:
        return f"max_draft_len: {k} in speculative_config" if k else "omit speculative_config"

    def statistics(self, old: Samples, new: Samples) -> ServerStats | None:
        drafted, accepted = delta(old, new, DRAFTED), delta(old, new, ACCEPTED)
        if not drafted or accepted is None:
            return None
        source = f"{self.title}'s counters: accepted / drafted tokens over the run; other users' requests are included"
        stats = answer_stats(self.title, int(drafted), int(accepted))
        return stats and replace(stats, source=source)
