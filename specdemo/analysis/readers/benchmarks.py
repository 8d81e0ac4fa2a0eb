"""Results of benchmarks: `vllm bench serve` (benchmarks/serve.py; the JSON of --save-result, and the table that it and
SGLang's `bench_serving` print), GuideLLM's benchmarks.json, and AIPerf's profile_export.jsonl, one request per line
(docs/reference, "Spec Decode").
"""

import re
from collections.abc import Mapping, Sequence

from specdemo.analysis.observation import Observation
from specdemo.analysis.readers.base import (
    IN_PART,
    Output,
    OutputTotals,
    count,
    find_number,
    found_below,
    number,
    objects,
    text_of,
)
from specdemo.servers.counters import below

TABLE = "Serving Benchmark Result"
TABLE_TITLES = {  # name in the JSON -> in the table
    "mean_tpot_ms": "Mean TPOT (ms)",
    "output_throughput": "Output token throughput (tok/s)",
    "max_concurrency": "Maximum request concurrency",
    "total_output_tokens": "Total generated tokens",
    "completed": "Successful requests",
    "spec_decode_num_drafts": "Drafts",
    "spec_decode_draft_tokens": "Draft tokens",
    "spec_decode_accepted_tokens": "Accepted tokens",
}
RANDOM = re.compile(r"--dataset-name[ =]random\b|dataset_name='random")
POSITION = re.compile(r"Position ([0-9]{1,3}): {1,40}([0-9.]{1,12})")


def bench_serve(output: Output) -> Observation | None:
    """Read the JSON of `vllm bench serve --save-result`."""
    return serving_result(output.json)


def serving_result(data: object) -> Observation | None:
    """Return what the value of a JSON text of `vllm bench serve` contains, None for another one."""
    if not isinstance(data, Mapping) or "output_throughput" not in data or "mean_tpot_ms" not in data:
        return None
    if data.get("completed") == 0:
        raise ValueError("no request of this benchmark succeeded; check the server's log and measure again")
    shares = data.get("spec_decode_per_position_acceptance_rates")
    rates = [number(share) or 0.0 for share in shares] if isinstance(shares, list) else []
    totals = _totals([number(data.get(name)) for name in TABLE_TITLES], rates)
    _add_gaps(totals, data)
    dataset = text_of(data.get("dataset_name")) or text_of(data.get("dataset"))
    return Observation(
        engine="vllm",
        target=text_of(data.get("model_id")),
        k=len(rates) or None,
        **{"accepted_length": number(data.get("spec_decode_acceptance_length")), **totals.values()},
        random_prompts=dataset.startswith("random") if dataset else None,
    )


def serving_table(output: Output) -> Observation | None:
    """Read the table of a serving benchmark, with the options that it prints first, or with the pasted command."""
    if TABLE not in output.text:
        return None
    text = output.text
    head, table = text.split(TABLE, 1)
    length = find_number("Acceptance length:", table) or find_number("Accept length:", table)
    shares = [float(share) / 100.0 for _, share in POSITION.findall(table)]
    totals = _totals([find_number(f"{title}:", table) for title in TABLE_TITLES.values()], shares)
    return Observation(
        engine="sglang" if "sglang" in text.lower() else "vllm",
        **{"accepted_length": length, **totals.values()},
        random_prompts=True if RANDOM.search(head) else None,
        verified_in_part=True if IN_PART.search(head) else None,
        k=_k(head),
    )


def _totals(numbers: Sequence[float | None], shares: Sequence[float]) -> OutputTotals:
    """Return the sums of a benchmark from its TABLE_TITLES and its acceptance by position."""
    tpot, throughput, limit, tokens, requests, steps, drafted, accepted = numbers
    speed = 1000.0 / tpot if tpot else throughput
    totals = OutputTotals(speeds=[speed or 0.0], batches=[_in_flight(throughput, tpot, limit) or 0.0])
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


def guidellm(output: Output) -> Observation | None:
    """Read the first benchmark of a report. Its acceptance is that of vLLM's metrics per request, if they were sent."""
    data = output.json
    benchmarks = objects(below(data, "benchmarks"))
    if not benchmarks or "metrics" not in benchmarks[0]:
        return None
    return guidellm_benchmark(data, benchmarks[0])


def guidellm_benchmark(data: object, first: Mapping[str, object]) -> Observation:
    """Return what one benchmark of a report of GuideLLM contains."""
    latency = number(below(first, "metrics", "inter_token_latency_ms", "successful", "mean"))
    concurrency = number(below(first, "metrics", "request_concurrency", "successful", "mean"))
    totals = OutputTotals(speeds=[1000.0 / latency] if latency else [], batches=[concurrency or 0.0])
    for request in objects(below(first, "requests", "successful")):
        drafts = next(found_below(request, "speculative_decoding"), {})
        tokens = number(request.get("output_tokens"))
        after_first = max(tokens - 1.0, 0.0) if tokens else None
        _add_drafts(totals, drafts, after_first)
    prompts = str(below(data, "args", "data"))[:2000]
    return Observation(
        engine="vllm" if totals.steps else "",
        target=text_of(below(data, "args", "model")) or text_of(below(first, "config", "backend", "model")),
        k=totals.k or None,
        random_prompts=True if "prompt_tokens" in prompts else None,  # synthetic data
        **totals.values(),
    )


RECORD = '"metrics"'


def aiperf(output: Output) -> Observation | None:
    """Read records of AIPerf 0.13 and later, with --export-level records. Without acceptance it is a baseline."""
    totals, engine, has_records = OutputTotals(), "", False
    for line in output.text.splitlines():
        record = output.parse(line) if line.startswith("{") and RECORD in line else None
        if not isinstance(record, Mapping) or not {"metadata", "metrics"} <= record.keys():
            continue
        has_records = True
        tokens = _metric(record, "output_sequence_length")
        after_first = max(tokens - 1.0, 0.0) if tokens else None
        speed = _metric(record, "output_token_throughput_per_user")
        totals.add_time(after_first or 1.0, 1000.0 / speed * (after_first or 1.0) if speed else None)
        drafts = record.get("spec_decode_acceptance")
        if isinstance(drafts, Mapping):
            engine = text_of(drafts.get("engine")) or engine
            _add_drafts(totals, drafts, after_first)
    if not has_records:
        return None
    return Observation(engine=engine, k=totals.k or None, **totals.values())


def _metric(record: Mapping[object, object], name: str) -> float | None:
    return number(below(record, "metrics", name, "value"))


def _add_drafts(totals: OutputTotals, drafts: Mapping[str, object], tokens: float | None) -> None:
    """Add the drafts of a request: their histogram, a list or an object by number of accepted tokens, else totals."""
    totals.k = max(totals.k, count(drafts.get("num_spec_tokens")) or 0)
    bars, drafted = drafts.get("acceptance_histogram"), number(drafts.get("num_draft_tokens")) or 0.0
    accepted, steps = number(drafts.get("num_accepted_draft_tokens")), number(drafts.get("num_spec_steps"))
    if isinstance(bars, Mapping):
        bars = [bars.get(str(n)) for n in range(_longest(bars) + 1)]
    if isinstance(bars, list):
        totals.add_histogram([number(bar) or 0.0 for bar in bars], drafted, tokens)
    elif accepted is not None and steps:
        totals.add(drafted, accepted, steps, tokens=tokens)


def _longest(bars: Mapping[object, object]) -> int:
    return max((int(name) for name in bars if isinstance(name, str) and name.isdecimal() and len(name) < 4), default=0)
