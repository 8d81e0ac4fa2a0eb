"""FastDeploy: `speculate_metrics` of a choice, from its output/token_processor.py (`SpeculateMetrics`).

`accepted_tokens` counts all output tokens, and the first entry of `accepted_tokens_per_head` the steps.
"""

from collections.abc import Mapping
from itertools import pairwise

from pydantic import BaseModel

from specdemo.servers.counters import Count, Counts, ServerStats, answer_stats, reported
from specdemo.servers.engines.base import ReportingEngine


class _Metrics(BaseModel):
    accepted_tokens: Count = None
    rejected_tokens: Count = None
    accepted_tokens_per_head: Counts = None


class FastDeploy(ReportingEngine):
    """FastDeploy's server."""

    name = "fastdeploy"
    title = "FastDeploy"

    def acceptance(self, chunk: Mapping[str, object]) -> ServerStats | None:
        choices = chunk.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        found = reported(_Metrics, choice, "speculate_metrics")
        if found is None or not found.accepted_tokens_per_head:
            return None
        steps, *heads = found.accepted_tokens_per_head
        if found.rejected_tokens is None or found.accepted_tokens != steps + sum(heads):
            return None
        reached = [steps, *heads, 0]
        histogram = [max(here - after, 0) for here, after in pairwise(reached)]
        return answer_stats(self.title, sum(heads) + found.rejected_tokens, sum(heads), steps, histogram)
