"""Stored runs in the formats of other tools: Prometheus text and records of AIPerf. Needs no torch."""

from collections.abc import Callable, Mapping

from specdemo.core.atomic_io import finite, json_text
from specdemo.core.tally import summarise
from specdemo.core.trace import LaneTrace, RunTrace, decode_timing
from specdemo.diagnosis.lanes import Summary

PREFIX = "specdemo:"
# names as vLLM's, after the prefix: name -> type, help
COUNTERS: Mapping[str, tuple[str, str]] = {
    "generation_tokens_total": ("counter", "Output tokens."),
    "prompt_tokens_total": ("counter", "Prompt tokens."),
    "spec_decode_num_drafts_total": ("counter", "Verified drafts."),
    "spec_decode_num_draft_tokens_total": ("counter", "Draft tokens."),
    "spec_decode_num_accepted_tokens_total": ("counter", "Accepted draft tokens."),
    "spec_decode_num_accepted_tokens_per_pos_total": ("counter", "Drafts that were accepted up to a position."),
    "time_to_first_token_seconds": ("gauge", "Device time until the first token."),
    "request_decode_time_seconds": ("gauge", "Device time of all tokens after the first."),
}


def aiperf_records(trace: RunTrace) -> str:
    """Return one record per lane in the format of AIPerf's profile_export.jsonl. Times are device times, and its
    timestamps count from the start of the lane.
    """
    return "".join(json_text(finite(_record(trace, n, lane))) + "\n" for n, lane in enumerate(trace.lanes))


def _record(trace: RunTrace, number: int, lane: LaneTrace) -> dict[str, object]:
    numbers: Summary = summarise(lane)
    first_ms, decode_ms = numbers["ttft_ms"], _decode_ms(lane)
    total_ms = (first_ms or 0.0) + decode_ms
    after_first = max(len(lane.token_ids) - 1, 0)
    metrics = {
        "input_sequence_length": (len(lane.prompt_ids) or None, "tokens"),
        "output_sequence_length": (len(lane.token_ids), "tokens"),
        "time_to_first_token": (first_ms, "ms"),
        "request_latency": (total_ms, "ms"),
        "inter_token_latency": (decode_ms / after_first if after_first else None, "ms"),
        "output_token_throughput_per_user": (numbers["tokens_per_s"], "tokens/sec/user"),
    }
    record: dict[str, object] = {
        "metadata": {
            "session_num": number,
            "x_request_id": f"{trace.preset}-{number}",
            "conversation_id": f"{trace.preset}: {lane.name}",
            "turn_index": 0,
            "request_start_ns": 0,
            "request_end_ns": round(1e6 * total_ms),
            "benchmark_phase": "profiling",
            "was_cancelled": lane.finish == "cancelled",
        },
        "metrics": {
            name: {"value": value, "unit": unit} for name, (value, unit) in metrics.items() if value is not None
        },
        "error": {"message": lane.note} if lane.finish == "error" else None,
    }
    return record | ({"spec_decode_acceptance": _acceptance(lane, numbers)} if numbers["drafted"] else {})


def _acceptance(lane: LaneTrace, numbers: Summary) -> dict[str, object]:
    return {
        "engine": "specdemo",
        "mean_acceptance_length": numbers["tokens_per_step"],
        "draft_acceptance_rate": numbers["acceptance_rate"],
        "acceptance_histogram": {str(n): count for n, count in enumerate(numbers["accept_histogram"] or ()) if count},
        "num_accepted_draft_tokens": numbers["accepted"],
        "num_draft_tokens": numbers["drafted"],
        "num_spec_steps": numbers["steps"],
        "num_spec_tokens": lane.options.get("k"),
    }


def _decode_ms(lane: LaneTrace) -> float:
    return decode_timing(lane.events, remote=lane.remote is not None).ms


def prometheus_text(trace: RunTrace) -> str:
    """Return the counters of all lanes in Prometheus' text format, with vLLM's names after `specdemo:` and a label per
    lane.
    """
    values: dict[str, list[str]] = {name: [] for name in COUNTERS}
    for lane in trace.lanes:
        labels = {"lane": lane.name, "method": lane.method, "model_name": str(trace.config.get("target", ""))}
        for name, position, value in _samples(lane):
            shown = _labels(labels | ({} if position is None else {"position": str(position)}))
            values[name].append(f"{PREFIX}{name}{{{shown}}} {value}")
    lines = []
    for name, samples in values.items():
        kind, words = COUNTERS[name]
        family = PREFIX + name.removesuffix("_total")
        lines += [f"# HELP {family} {words}", f"# TYPE {family} {kind}", *samples] if samples else []
    return "\n".join(lines) + "\n"


def _samples(lane: LaneTrace) -> list[tuple[str, int | None, float]]:
    """Return name, position and value of every known sample of a lane."""
    numbers: Summary = summarise(lane)
    found: list[tuple[str, int | None, float]] = [
        ("generation_tokens_total", None, len(lane.token_ids)),
        ("prompt_tokens_total", None, len(lane.prompt_ids)),
        ("request_decode_time_seconds", None, round(_decode_ms(lane) / 1000.0, 6)),
    ]
    if numbers["ttft_ms"] is not None:
        found.append(("time_to_first_token_seconds", None, round(numbers["ttft_ms"] / 1000.0, 6)))
    if numbers["drafted"]:
        names = {"steps": "drafts", "drafted": "draft_tokens", "accepted": "accepted_tokens"}
        known = {name: numbers[key] for key, name in names.items() if numbers[key] is not None}
        found += [(f"spec_decode_num_{name}_total", None, value) for name, value in known.items()]
        bars = numbers["accept_histogram"] or []
        place = "spec_decode_num_accepted_tokens_per_pos_total"
        found += [(place, position, sum(bars[position + 1 :])) for position in range(len(bars) - 1)]
    return found


def _labels(labels: Mapping[str, str]) -> str:
    escaped = {k: v.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for k, v in labels.items()}
    return ",".join(f'{name}="{value}"' for name, value in escaped.items())


FORMATS: Mapping[str, Callable[[RunTrace], str]] = {"aiperf": aiperf_records, "prometheus": prometheus_text}
