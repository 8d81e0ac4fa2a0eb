"""What a server's Prometheus /metrics tells of its speculation between two moments.

Every number counts the whole server: whoever else used it in between is counted in. What a server does not export is
left out. Names: vLLM v1/spec_decode/metrics.py, SGLang's metrics collector.
"""

import re
from collections import defaultdict
from dataclasses import dataclass, field
from statistics import fmean

from specdemo.core.trace import Counter, Number

_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_POSITION = re.compile(r'(?:^|,)\s*position="(\d+)"')
_VLLM = "vllm:spec_decode_num_"
_SGLANG = "sglang:"

Samples = dict[tuple[str, int | None], list[float]]  # name without _total, position -> a value per engine


@dataclass(frozen=True, slots=True)
class Told:
    """Numbers of `core.trace.Remote`, and what they are; all empty when nothing is known."""

    counters: dict[Counter, Number] = field(default_factory=dict)
    accept_by_position: list[Number] = field(default_factory=list)
    source: str = ""


def parse(text: str) -> Samples:
    """Prometheus' text format; lines that are none of it are skipped."""
    samples: Samples = defaultdict(list)
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None:
            continue
        name, labels, value = match.groups()
        position = _POSITION.search(labels or "")
        try:
            samples[name.removesuffix("_total"), int(position[1]) if position else None].append(float(value))
        except ValueError:
            continue
    return dict(samples)


def between(before: str, after: str) -> Told:
    """What happened between two readings of /metrics."""
    old, new = parse(before), parse(after)
    return _vllm(old, new) or _sglang(old, new) or Told()


def _grown(old: Samples, new: Samples, name: str, position: int | None = None) -> float | None:
    """How far a counter has come, all engines together; None: not exported, or the server was restarted."""
    if (name, position) not in new:
        return None
    grown = sum(new[name, position]) - sum(old.get((name, position), []))
    return grown if grown >= 0 else None


def _vllm(old: Samples, new: Samples) -> Told | None:
    drafts, drafted, accepted = (
        _grown(old, new, _VLLM + name) for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    if not drafts or not drafted or accepted is None:
        return None
    per_position = _VLLM + "accepted_tokens_per_pos"
    positions = sorted(p for name, p in new if name == per_position and p is not None)
    kept = [_grown(old, new, per_position, p) for p in positions]
    return Told(
        {
            "steps": int(drafts),
            "drafted": int(drafted),
            "accepted": int(accepted),
            "acceptance_rate": round(accepted / drafted, 4),
            "tokens_per_step": round(1 + accepted / drafts, 4),
        },
        [None if n is None else round(n / drafts, 4) for n in kept],
        "vLLM's counters over the run: accepted / drafted tokens; 1 + accepted tokens / drafts; "
        "other users of the server are counted in",
    )


def _sglang(old: Samples, new: Samples) -> Told | None:
    """Verified passes are a counter in some versions; the rest are gauges over the last log interval, 0 when idle."""
    rate, length = (_gauge(new, _SGLANG + name) for name in ("spec_accept_rate", "spec_accept_length"))
    tokens, passes = (_grown(old, new, _SGLANG + name) for name in ("generation_tokens", "spec_verify_calls"))
    if tokens and passes:
        length, means = tokens / passes, "generated tokens / verify calls over the run"
    else:
        means = "tokens per pass a gauge over its last log interval"
    if rate is None and length is None:
        return None
    counters: dict[Counter, float | None] = {"acceptance_rate": rate, "tokens_per_step": length}
    return Told(
        {name: round(value, 4) for name, value in counters.items() if value is not None},
        [],
        f"SGLang's metrics: acceptance a gauge over its last log interval, which some versions count with the bonus "
        f"token; {means}; other users of the server are counted in",
    )


def _gauge(samples: Samples, name: str) -> float | None:
    busy = [value for value in samples.get((name, None), []) if value > 0]
    return fmean(busy) if busy else None
