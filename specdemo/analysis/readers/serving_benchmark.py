"""Results of `vllm bench serve` (benchmarks/serve.py): the JSON of --save-result, and the table that it and SGLang's
`bench_serving` print.
"""

import re
from collections.abc import Mapping, Sequence

from specdemo.analysis.observation import Observation
from specdemo.analysis.readers.base import Output, OutputReader, OutputTotals, find_number, number, text_of

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
        shares = data.get("spec_decode_per_position_acceptance_rates")
        known = [number(share) or 0.0 for share in shares] if isinstance(shares, list) else []
        totals = _totals(
            tpot=number(data["mean_tpot_ms"]),
            throughput=number(data["output_throughput"]),
            limit=number(data.get("max_concurrency")),
            drafts=[
                number(data.get(f"spec_decode_{name}")) for name in ("num_drafts", "draft_tokens", "accepted_tokens")
            ],
            shares=known,
            tokens=number(data.get("total_output_tokens")),
            requests=number(data.get("completed")),
        )
        _add_gaps(totals, data)
        dataset = text_of(data.get("dataset_name")) or text_of(data.get("dataset"))
        return Observation(
            engine="vllm",
            source=self.title,
            target=text_of(data.get("model_id")),
            k=len(known) or None,
            **{"accepted_length": number(data.get("spec_decode_acceptance_length")), **totals.values()},
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
        length = find_number("Acceptance length:", table) or find_number("Accept length:", table)
        totals = _totals(
            tpot=find_number("Mean TPOT (ms):", table),
            throughput=find_number("Output token throughput (tok/s):", table),
            limit=find_number("Maximum request concurrency:", table),
            drafts=[find_number(f"{name}:", table) for name in ("Drafts", "Draft tokens", "Accepted tokens")],
            shares=[float(share) / 100.0 for _, share in POSITION.findall(table)],
            tokens=find_number("Total generated tokens:", table),
            requests=find_number("Successful requests:", table),
        )
        return Observation(
            engine="sglang" if "sglang" in text.lower() else "vllm",
            source=self.title,
            **{"accepted_length": length, **totals.values()},
            random_prompts=True if RANDOM.search(head) else None,
            k=_k(head),
        )


def _totals(
    tpot: float | None,
    throughput: float | None,
    limit: float | None,
    drafts: Sequence[float | None],
    shares: Sequence[float],
    tokens: float | None,
    requests: float | None,
) -> OutputTotals:
    """Return the sums of a benchmark. drafts: steps with a draft, draft tokens and accepted ones. limit: of requests at
    a time."""
    speed = 1000.0 / tpot if tpot else throughput
    totals = OutputTotals(speeds=[speed or 0.0], batches=[_in_flight(throughput, tpot, limit) or 0.0])
    steps, drafted, accepted = drafts
    if steps and drafted and accepted is not None:
        totals.add(drafted, accepted, steps, shares, tokens - requests if tokens and requests else None)
    return totals


def _add_gaps(totals: OutputTotals, data: Mapping[object, object]) -> None:
    """Add the tokens and times of all requests, which --save-detailed stores."""
    lengths, gaps = data.get("output_lens"), data.get("itls")
    if isinstance(lengths, list) and isinstance(gaps, list):
        for length, times in zip(lengths, gaps, strict=False):
            seconds = sum(number(time) or 0.0 for time in times) if isinstance(times, list) else 0.0
            totals.add_time((number(length) or 1.0) - 1.0, 1000.0 * seconds)


def _k(command: str) -> int | None:
    match = re.search(r"(?:num_speculative_tokens\W{1,6}|--speculative-num-steps[ =])([0-9]{1,3})", command)
    return int(match[1]) or None if match else None


def _in_flight(throughput: float | None, tpot_ms: float | None, limit: float | None) -> float | None:
    """Return the mean number of requests that decode at the same time (Little's law), at most the limit."""
    if not throughput or not tpot_ms:
        return limit
    return max(min(throughput * tpot_ms / 1000.0, limit or float("inf")), 1.0)
