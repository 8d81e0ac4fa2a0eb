"""Servers that specdemo does not start, and most of whose answers report draft counts."""

from collections.abc import Mapping
from typing import ClassVar

from specdemo.servers.counters import ServerStats, answer_stats, counts, fields_below
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
