"""Rapid-MLX: counters of vllm_mlx/routes/metrics.py. An attempt is one draft that the target verified."""

from specdemo.servers.counters import Samples, ServerStats, delta
from specdemo.servers.engines.base import ReportingEngine

ATTEMPTS, ACCEPTS = "rapid_mlx_spec_decode_attempts", "rapid_mlx_spec_decode_accepts"


class RapidMLX(ReportingEngine):
    """Rapid-MLX's server."""

    name = "rapid-mlx"
    title = "Rapid-MLX"
    metrics = frozenset({ATTEMPTS, ACCEPTS})

    def statistics(self, old: Samples, new: Samples) -> ServerStats | None:
        attempts, accepts = delta(old, new, ATTEMPTS), delta(old, new, ACCEPTS)
        if not attempts or accepts is None or accepts > attempts:
            return None
        source = f"{self.title}'s counters over the run: accepts / attempts; requests of other users are included"
        return ServerStats({"acceptance_rate": round(accepts / attempts, 4)}, [], source)
