"""Speculation statistics from a server's Prometheus /metrics, as differences between two readings.

All numbers count the whole server, including other users. Missing numbers are left out, and so are numbers that are
invalid, negative, implausibly large or inconsistent. Names: vLLM v1/spec_decode/metrics.py, whose suffixes llama.cpp
shares, and SGLang's metrics collector.
"""

import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from math import isnan, nan
from statistics import fmean
from typing import Annotated

from pydantic import Field

from specdemo.core.trace import MAX_DEPTH, Counter, Number, Span

MAX_COUNT = 2**53  # largest plausible count; browsers cannot represent larger integers exactly
_BOUNDS = Field(ge=0, le=MAX_COUNT)
_Count = Annotated[Number, _BOUNDS]
_NAME = re.compile(r"(?:vllm|llamacpp|sglang):\w+")
_POSITION = re.compile(r'[{,]\s*position="(\d{1,4})"')
_COUNTED = ("drafts", "draft_tokens", "accepted_tokens")
_PREFIXES = {"vLLM": "vllm:spec_decode_num_", "llama.cpp": "llamacpp:spec_decode_num_"}
_PER_POSITION = "accepted_tokens_per_pos"
_SGLANG = "sglang:"
_TIMES: dict[Span, str] = {
    "ttft_ms": "vllm:time_to_first_token_seconds",
    "decode_ms": "vllm:request_decode_time_seconds",
}
_READ = {
    *(prefix + name for prefix in _PREFIXES.values() for name in (*_COUNTED, _PER_POSITION)),
    *(f"{name}_{part}" for name in _TIMES.values() for part in ("sum", "count")),
    *(_SGLANG + name for name in ("spec_accept_rate", "spec_accept_length", "generation_tokens", "spec_verify_calls")),
}

Samples = dict[tuple[str, int | None], list[float]]  # (name without _total, position) -> one value per engine


@dataclass(frozen=True, slots=True)
class ServerStats:
    """Numbers of `core.trace.Remote`, and what they are; all empty when nothing is known."""

    counters: dict[Counter, _Count] = field(default_factory=dict)
    accept_by_position: list[_Count] = field(default_factory=list)
    source: str = ""
    # of one request, as measured by the server
    times: dict[Span, Annotated[float, _BOUNDS]] = field(default_factory=dict)


def parse(text: str) -> Samples:
    """Parse Prometheus' text format; lines of other metrics are skipped."""
    samples: Samples = defaultdict(list)
    for line in text.splitlines():
        match = _NAME.match(line)
        name = match[0].removesuffix("_total") if match else ""
        if match is None or name not in _READ:
            continue
        position = _POSITION.search(line)
        values = line[match.end() :].rpartition("}")[2].split(maxsplit=1)  # label values may contain braces
        samples[name, int(position[1]) if position else None].append(_number(values[0] if values else ""))
    return dict(samples)


def _number(text: str) -> float:
    """Parse a count. Return NaN if it is not one, which makes every derived value unknown."""
    try:
        value = float(text)
    except ValueError:
        return nan
    return value if 0 <= value < MAX_COUNT else nan


def stats_between(before: str | None, after: str | None) -> ServerStats:
    """Return the statistics between two readings of /metrics. None: a reading failed."""
    if before is None or after is None:
        return ServerStats()
    old, new = parse(before), parse(after)
    per_server = (_counted(old, new, server, prefix) for server, prefix in _PREFIXES.items())
    return replace(next(filter(None, per_server), None) or _sglang(old, new) or ServerStats(), times=_times(old, new))


def _times(old: Samples, new: Samples) -> dict[Span, float]:
    """Return the times of a single request; empty if there were several, or none was timed."""
    times: dict[Span, float] = {}
    for span, name in _TIMES.items():
        seconds = _delta(old, new, f"{name}_sum")
        if seconds is not None and _delta(old, new, f"{name}_count") == 1:
            times[span] = round(1000.0 * seconds, 3)
    return times if len(times) == len(_TIMES) else {}


def _delta(old: Samples, new: Samples, name: str, position: int | None = None) -> float | None:
    """Return the increase of a counter over all engines; None: not exported, not a number, or the server restarted."""
    if (name, position) not in new:
        return None
    grown = sum(new[name, position]) - sum(old.get((name, position), []))
    return grown if grown >= 0 else None


def _counted(old: Samples, new: Samples, server: str, prefix: str) -> ServerStats | None:
    drafts, drafted, accepted = (_delta(old, new, prefix + name) for name in _COUNTED)
    if not drafts or not drafted or accepted is None or accepted > drafted:
        return None
    positions = sorted(p for name, p in new if name == prefix + _PER_POSITION and p is not None)
    accepted_at = [_delta(old, new, prefix + _PER_POSITION, p) for p in positions[:MAX_DEPTH]]
    return ServerStats(
        {
            "steps": int(drafts),
            "drafted": int(drafted),
            "accepted": int(accepted),
            "acceptance_rate": round(accepted / drafted, 4),
            "tokens_per_step": round(1 + accepted / drafts, 4),
        },
        [None if n is None or n > drafts else round(n / drafts, 4) for n in accepted_at],
        f"{server}'s counters over the run: accepted / drafted tokens; 1 + accepted tokens / drafts; "
        "requests of other users are included",
    )


def _sglang(old: Samples, new: Samples) -> ServerStats | None:
    """Compute statistics from SGLang's metrics. Verified passes are a counter in some versions; all other metrics are
    gauges over the last log interval, 0 when idle.
    """
    rate, length = (_gauge(new, _SGLANG + name) for name in ("spec_accept_rate", "spec_accept_length"))
    tokens, passes = (_delta(old, new, _SGLANG + name) for name in ("generation_tokens", "spec_verify_calls"))
    if tokens and passes:
        length, means = tokens / passes, "generated tokens / verify calls over the run"
    else:
        means = "tokens per pass is a gauge over the last log interval"
    rate = None if rate and rate > 1 else rate
    if rate is None and length is None:
        return None
    counters: dict[Counter, float | None] = {"acceptance_rate": rate, "tokens_per_step": length}
    return ServerStats(
        {name: round(value, 4) for name, value in counters.items() if value is not None},
        [],
        "SGLang's metrics: the acceptance rate is a gauge over the last log interval, and some versions include the "
        f"bonus token; {means}; requests of other users are included",
    )


def _gauge(samples: Samples, name: str) -> float | None:
    busy = [value for value in samples.get((name, None), []) if value]
    mean = fmean(busy) if busy else nan
    return None if isnan(mean) else mean
