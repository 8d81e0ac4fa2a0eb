"""Results of `vllm bench serve` (benchmarks/serve.py): the JSON of --save-result, and the table that it and SGLang's
`bench_serving` print.
"""

import re
from collections.abc import Mapping

from specdemo.diagnosis.observation import Observation
from specdemo.diagnosis.readers.base import Output, OutputReader, count, find_number, number, text_of

TABLE = "Serving Benchmark Result"
RANDOM = re.compile(r"--dataset-name[ =]random\b|dataset_name='random")
POSITION = re.compile(r"Position ([0-9]{1,3}): {1,40}([0-9.]{1,12})")


class BenchServe(OutputReader):
    """JSON of `vllm bench serve --save-result`."""

    title = "vllm bench serve, JSON"

    def read(self, output: Output) -> Observation | None:
        return self.observe(output.json)

    def observe(self, data: object) -> Observation | None:
        """Return what the value of a JSON text contains."""
        if not isinstance(data, Mapping) or "output_throughput" not in data or "mean_tpot_ms" not in data:
            return None
        if data.get("completed") == 0:
            raise ValueError("no request of this benchmark succeeded; check the server's log and measure again")
        tpot, throughput = number(data["mean_tpot_ms"]), number(data["output_throughput"])
        steps, drafted = count(data.get("spec_decode_num_drafts")), count(data.get("spec_decode_draft_tokens"))
        shares = data.get("spec_decode_per_position_acceptance_rates")
        known = [number(share) or 0.0 for share in shares] if isinstance(shares, list) else []
        accepted = count(data.get("spec_decode_accepted_tokens"))
        dataset = text_of(data.get("dataset_name")) or text_of(data.get("dataset"))
        return Observation(
            engine="vllm",
            source=self.title,
            target=text_of(data.get("model_id")),
            k=len(known) or None,
            accepted_length=number(data.get("spec_decode_acceptance_length")),
            acceptance_rate=accepted / drafted if accepted is not None and drafted else None,
            by_position=tuple(known),
            drafted_per_step=drafted / steps if steps and drafted else None,
            steps=steps,
            tokens_per_s=1000.0 / tpot if tpot else throughput,
            batch_size=_in_flight(throughput, tpot, number(data.get("max_concurrency"))),
            random_prompts=dataset.startswith("random") if dataset else None,
        )


class ServingTable(OutputReader):
    """Table printed by a serving benchmark, with the options that it prints first, or with the pasted command."""

    title = "table of a serving benchmark"

    def read(self, output: Output) -> Observation | None:
        if TABLE not in output.text:
            return None
        text = output.text
        head, table = text.split(TABLE, 1)
        tpot, throughput = find_number("Mean TPOT (ms):", table), find_number("Output token throughput (tok/s):", table)
        shares = [float(share) / 100.0 for _, share in POSITION.findall(table)]
        steps, drafted = find_number("Drafts:", table), find_number("Draft tokens:", table)
        accepted = find_number("Accepted tokens:", table)
        return Observation(
            engine="sglang" if "sglang" in text.lower() else "vllm",
            source=self.title,
            accepted_length=find_number("Acceptance length:", table) or find_number("Accept length:", table),
            acceptance_rate=accepted / drafted if accepted is not None and drafted else None,
            by_position=tuple(shares),
            drafted_per_step=drafted / steps if steps and drafted else None,
            steps=round(steps) if steps else None,
            tokens_per_s=1000.0 / tpot if tpot else throughput,
            batch_size=_in_flight(throughput, tpot, find_number("Maximum request concurrency:", table)),
            random_prompts=True if RANDOM.search(head) else None,
            k=_k(head),
        )


def _k(command: str) -> int | None:
    match = re.search(r"(?:num_speculative_tokens\W{1,6}|--speculative-num-steps[ =])([0-9]{1,3})", command)
    return int(match[1]) or None if match else None


def _in_flight(throughput: float | None, tpot_ms: float | None, limit: float | None) -> float | None:
    """Return the mean number of requests that decode at the same time (Little's law), at most the limit."""
    if not throughput or not tpot_ms:
        return limit
    return max(min(throughput * tpot_ms / 1000.0, limit or float("inf")), 1.0)
