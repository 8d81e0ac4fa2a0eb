"""Report of GuideLLM: benchmarks.json."""

from collections.abc import Mapping

from specdemo.analysis.observation import Observation
from specdemo.analysis.readers.base import (
    Output,
    OutputReader,
    OutputTotals,
    below,
    count,
    found_below,
    number,
    objects,
    text_of,
)


class GuideLLM(OutputReader):
    """The first benchmark of a report. Its acceptance is that of vLLM's metrics per request, if they were sent."""

    title = "GuideLLM report, JSON"

    def read(self, output: Output) -> Observation | None:
        data = output.json
        benchmarks = objects(below(data, "benchmarks"))
        if not benchmarks or "metrics" not in benchmarks[0]:
            return None
        return self.observe(data, benchmarks[0])

    def observe(self, data: object, first: Mapping[str, object]) -> Observation:
        """Return what one benchmark of a report contains."""
        latency = number(below(first, "metrics", "inter_token_latency_ms", "successful", "mean"))
        concurrency = number(below(first, "metrics", "request_concurrency", "successful", "mean"))
        totals = OutputTotals(speeds=[1000.0 / latency] if latency else [], batches=[concurrency or 0.0])
        k = 0
        for request in objects(below(first, "requests", "successful")):
            drafts = next(found_below(request, "speculative_decoding"), {})
            tokens = number(request.get("output_tokens"))
            after_first = max(tokens - 1.0, 0.0) if tokens else None
            k = max(k, count(drafts.get("num_spec_tokens")) or 0)
            accepted, steps = number(drafts.get("num_accepted_draft_tokens")), number(drafts.get("num_spec_steps"))
            if accepted is not None and steps:
                bars = drafts.get("acceptance_histogram")
                drafted = number(drafts.get("num_draft_tokens")) or 0.0
                if isinstance(bars, list):
                    totals.add_histogram([number(bar) or 0.0 for bar in bars], drafted, after_first)
                else:
                    totals.add(drafted, accepted, steps, tokens=after_first)
        prompts = str(below(data, "args", "data"))[:2000]
        return Observation(
            engine="vllm" if totals.steps else "",
            source=self.title,
            target=text_of(below(data, "args", "model")) or text_of(below(first, "config", "backend", "model")),
            k=k or None,
            random_prompts=True if "prompt_tokens" in prompts else None,  # synthetic data
            **totals.values(),
        )
