"""Counts in the form of OpenAI's predicted outputs, which gateways such as smg fill in for the engines they front."""

from collections.abc import Mapping

from pydantic import BaseModel

from specdemo.servers.counters import Count, ServerStats, answer_stats, reported
from specdemo.servers.engines.base import ReportingEngine


class _PredictionDetails(BaseModel):
    accepted_prediction_tokens: Count = None
    rejected_prediction_tokens: Count = None


class OpenAI(ReportingEngine):
    """A server or gateway with OpenAI's usage details."""

    name = "openai"
    title = "The server"

    def acceptance(self, chunk: Mapping[str, object]) -> ServerStats | None:
        found = reported(_PredictionDetails, chunk, "usage", "completion_tokens_details")
        if found is None or found.accepted_prediction_tokens is None or found.rejected_prediction_tokens is None:
            return None
        drafted = found.accepted_prediction_tokens + found.rejected_prediction_tokens
        return answer_stats(self.title, drafted, found.accepted_prediction_tokens) if drafted else None
