"""mlx-vlm: `timings` of a chunk, from mlx_vlm/server/generation.py (0.7)."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from specdemo.servers.counters import Count, ServerStats, answer_stats, reported
from specdemo.servers.engines.base import ReportingEngine


class _DraftTimings(BaseModel):
    draft_kind: str
    draft_rounds: Count = None
    draft_n: Count = None
    draft_n_accepted: Count = None


class MLXVLM(ReportingEngine):
    """mlx-vlm's server."""

    name = "mlx-vlm"
    title = "mlx-vlm"

    def acceptance(self, chunk: Mapping[str, Any]) -> ServerStats | None:
        found = reported(_DraftTimings, chunk, "timings")
        if found is None:
            return None
        return answer_stats(self.title, found.draft_n, found.draft_n_accepted, found.draft_rounds)
