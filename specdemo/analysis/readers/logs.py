"""Logs of servers.

vLLM: v1/spec_decode/metrics.py (lines with "SpecDecoding metrics"), v1/metrics/loggers.py (throughput). SGLang:
scheduler_metrics_mixin.py (lines with "Decode batch") and its /server_info.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from specdemo.analysis.observation import Observation
from specdemo.analysis.readers.base import (
    IN_PART,
    Output,
    OutputReader,
    OutputTotals,
    find_last,
    find_number,
    mean,
    number,
    numbers_in,
    objects,
    quantised,
    text_of,
)
from specdemo.servers.counters import FIRST_TOKENS, all_passes

VLLM_MARK = "SpecDecoding metrics:"
LOAD = "Avg generation throughput:"
ROUNDING = 0.006  # of a length that is printed with two digits
RATES = re.compile(r"Per-position acceptance rate: ([0-9., ]{1,8000})")


class VLLMLog(OutputReader):
    """Log of a vLLM server with speculative decoding, of versions since 0.9."""

    title = "vLLM log"

    def read(self, output: Output) -> Observation | None:
        if VLLM_MARK not in output.text and not ("Engine 0" in output.text and LOAD in output.text):
            return None
        totals, preemptions = OutputTotals(), 0
        drafting = [*output.lines(VLLM_MARK)]
        for line in drafting:
            _add_drafts(totals, line)
        for line in output.lines(LOAD):
            totals.speeds.append(find_number(LOAD, line) or 0.0)
            totals.batches.append(find_number("Running:", line) or 0.0)
            preemptions += "Preemptions:" in line
        _count_all_passes(totals, drafting)
        given, arguments = ("".join(output.lines(mark)) for mark in ("speculative_config=", "non-default args:"))
        config = find_last(r"'speculative_config': (\{[^{}]{0,4000}\})", arguments)
        cache = find_last(r"'kv_cache_dtype': '(\w{1,40})'", config) or find_last(r"kv_cache_dtype=(\w{1,40})", given)
        return Observation(
            engine="vllm",
            source=self.title,
            method=find_last(r"speculative_config=SpeculativeConfig\(method='([\w-]{1,60})'", given),
            drafter=find_last(r"SpeculativeConfig\([^()]{0,200}?model='([^']{1,200})'", given),
            target=find_last(r"with config: model='([^']{1,200})'", given),
            offloaded=True if preemptions > len(totals.speeds) / 2 else None,
            draft_cache=quantised(cache),
            verified_in_part=True if IN_PART.search(config) else None,
            **totals.values(),
        )


def _count_all_passes(totals: OutputTotals, drafting: Sequence[str]) -> None:
    """Count the passes without a draft from the throughput. A line about drafts covers the time since the last one, so
    the shortest of these times is that of a line about throughput.

    They stay unknown if the log begins or ends within a reading, and in old versions, whose lines about drafts have no
    throughput: it is not known whether those count every draft (vllm-0.9.log has 16 tokens per counted draft).
    """
    rates = [(find_number("Drafted:", line), find_number("Drafted throughput:", line)) for line in drafting]
    seconds = [drafted / rate for drafted, rate in rates if drafted and rate]
    if seconds and len(totals.speeds) >= len(drafting):
        tokens = sum(totals.speeds) * min(seconds)
        if tokens > (1.0 + FIRST_TOKENS) * (totals.drafting_steps + totals.accepted):
            totals.steps = all_passes(tokens, totals.accepted, totals.drafting_steps)


def _add_drafts(totals: OutputTotals, line: str) -> None:
    accepted, drafted = find_number(", Accepted:", line), find_number("Drafted:", line)
    length = find_number("Mean acceptance length:", line)
    match = RATES.search(line)
    rates = numbers_in(match[1]) if match else []
    if accepted is None or not drafted or length is None:
        return
    steps = drafted / len(rates) if rates else 0.0
    if accepted and length > 1.0 and (not steps or abs(1.0 + accepted / steps - length) > ROUNDING):
        steps = accepted / (length - 1.0)  # drafts that end early
    if steps:
        totals.add(drafted, accepted, steps, rates)


SGLANG_MARK = "Decode batch"


def _sglang(
    source: str, value: Callable[[str], str], lengths: Iterable[float], speed: float | None, batch: float | None = None
) -> Observation:
    """Return what SGLang's settings and measurements say. value: of a setting, an empty text if it is unknown."""
    steps, tokens = (value(f"speculative_num_{name}") for name in ("steps", "draft_tokens"))
    offload = value("cpu_offload_gb")
    return Observation(
        engine="sglang",
        source=source,
        method=value("speculative_algorithm"),
        drafter=value("speculative_draft_model_path"),
        target=value("model_path"),
        k=int(steps) or None if steps.isdecimal() else None,
        drafted_per_step=float(tokens) - 1.0 if tokens.isdecimal() and int(tokens) > 1 else None,
        accepted_length=mean(lengths),
        offloaded=bool(offload.strip("0.")) if offload else None,
        draft_cache=quantised(value("speculative_draft_kv_cache_dtype") or value("kv_cache_dtype")),
        tokens_per_s=speed,
        batch_size=batch,
    )


class SGLangLog(OutputReader):
    """Log of an SGLang server. Its accept rate is not read, because old versions count the bonus token in it."""

    title = "SGLang log"

    def read(self, output: Output) -> Observation | None:
        if SGLANG_MARK not in output.text or "gen throughput" not in output.text:
            return None
        given = "".join(output.lines("server_args="))

        def value(name: str) -> str:
            return find_last(rf"\b{name}='?((?!None\b)[^',()\s]{{1,200}})", given)

        lines = [*output.lines(SGLANG_MARK)]
        lengths, batches, speeds = (
            [find_number(name, line) or 0.0 for line in lines]
            for name in ("accept len:", "#running-req:", "gen throughput (token/s):")
        )
        after_prefill = speeds[1:] if len(speeds) > 2 else speeds
        return _sglang(self.title, value, lengths, mean(after_prefill), mean(batches))


class SGLangServerInfo(OutputReader):
    """Answer of SGLang's /server_info or /get_server_info."""

    title = "SGLang server info"

    def read(self, output: Output) -> Observation | None:
        data = output.json
        if not isinstance(data, Mapping) or "internal_states" not in data:
            return None
        lengths, speeds = (
            [number(state.get(name)) or 0.0 for state in objects(data["internal_states"])]
            for name in ("avg_spec_accept_length", "last_gen_throughput")
        )

        def value(name: str) -> str:
            return "" if data.get(name) is None else text_of(str(data[name])[:200])

        return _sglang(self.title, value, lengths, mean(speeds))
