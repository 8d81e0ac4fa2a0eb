"""JSON of llama.cpp's tools/server/bench/speed-bench/speed_bench.py --output."""

from collections.abc import Mapping

from specdemo.diagnosis.observation import Observation
from specdemo.diagnosis.readers.base import Output, OutputReader, OutputTotals, below, number, objects


class SpeedBench(OutputReader):
    """Requests of SPEED-Bench against `llama-server`. A step is a token that was not accepted from a draft, except the
    first, which comes from the prefill."""

    title = "llama.cpp speed-bench, JSON"

    def read(self, output: Output) -> Observation | None:
        data = output.json
        if not isinstance(data, Mapping) or "results" not in data or "completed_samples" not in data:
            return None
        totals = OutputTotals()
        for result in objects(data["results"]):
            drafted, accepted = number(result.get("draft_n")), number(result.get("draft_n_accepted"))
            tokens, ms = number(result.get("completion_tokens")), number(result.get("predicted_ms"))
            if tokens and ms:
                totals.speeds.append(1000.0 * tokens / ms)
            if drafted and accepted is not None and tokens and tokens > accepted + 1.0:
                totals.add(drafted, accepted, tokens - accepted - 1.0)
        concurrency = number(below(data, "config", "concurrency"))
        totals.batches.append(concurrency or 0.0)
        return Observation(engine="llama-server", source=self.title, **totals.values())
