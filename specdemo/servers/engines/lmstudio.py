"""LM Studio: counts in `usage` (0.4) or `stats` (release notes of 0.3.10 and later)."""

from collections.abc import Mapping

from pydantic import BaseModel

from specdemo.servers.counters import Count, ServerStats, answer_stats, reported
from specdemo.servers.engines.base import ReportingEngine


class _Counts(BaseModel):
    total_draft_tokens_count: Count = None
    accepted_draft_tokens_count: Count = None


class LMStudio(ReportingEngine):
    """LM Studio's server."""

    name = "lmstudio"
    title = "LM Studio"

    def draft_length_setting(self, k: int, method: str = "", drafter: str = "") -> str:
        return f"Max Draft Size {k} in the settings of the model" if k else "set no draft model"

    def draft_request(self, model: str, k: int) -> dict[str, object]:
        return {"draft_model": model}

    def acceptance(self, chunk: Mapping[str, object]) -> ServerStats | None:
        for key in ("usage", "stats"):
            found = reported(_Counts, chunk, key)
            total = found and found.total_draft_tokens_count
            if found and total:
                return answer_stats(self.title, total, found.accepted_draft_tokens_count)
        return None
