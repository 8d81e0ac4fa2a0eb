"""Logs of servers.

vLLM: v1/spec_decode/metrics.py (lines with "SpecDecoding metrics"), v1/metrics/loggers.py (throughput). SGLang:
scheduler_metrics_mixin.py (lines with "Decode batch") and its /server_info. llama.cpp: `llama-server`
(tools/server/server-context.cpp, print_timings; common/speculative.cpp, statistics).
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import ceil

from specdemo.analysis.observation import COMBINED, TOLERANCE, Observation
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


ACCEPTED = re.compile(r"\( {0,12}([0-9]{1,12}) accepted */ *([0-9]{1,12}) generated\)")
POSITIONS = re.compile(r"rate per position = \(([0-9., ]{1,8000})\)")
DURATIONS = re.compile(r"dur\(b,g,a\) = [0-9.]{1,15}, ([0-9.]{1,15}),")
KIND = re.compile(r"statistics {1,20}([a-z0-9_-]{1,40}):")
SHARES = re.compile(r"#acc rate/pos = \(([0-9., ]{1,8000})\)")
LENGTH = re.compile(r"(?:--spec-draft-n-max[ =]|--draft-max[ =]|\bn_max=)([0-9]{1,3})\b")
SPEED = re.compile(r", {1,12}([0-9.]{1,12}) tokens per second\)")


class LlamaCppLog(OutputReader):
    """Log of `llama-server` or `llama-cli`, with or without speculation. The draft acceptance is logged per request."""

    title = "llama.cpp log"

    def read(self, output: Output) -> Observation | None:
        text = output.text
        if "eval time =" not in text or "tokens per second)" not in text or "n_predict" in text:
            return None
        totals, positions, requests = OutputTotals(batches=[1.0]), 0, 0
        for line in output.lines("draft acceptance"):
            positions = max(positions, _add_request(totals, line))
        kinds = _kinds(output)
        totals.drafting_steps = totals.drafting_steps or sum(kind.drafts for kind in kinds.values())
        totals.positions = totals.positions or _positions([*kinds.values()], totals.drafting_steps)
        for line in output.lines(" eval time ="):
            if SPEED.search(line) and "prompt eval" not in line:
                requests += 1
                totals.add_time(find_number("ms /", line), find_number("eval time =", line))
        totals.steps = all_passes(totals.tokens - requests, totals.accepted, totals.drafting_steps)
        given = [int(found) for found in LENGTH.findall(text)]
        return Observation(
            engine="llama-server",
            source=self.title,
            method=COMBINED.join(kinds),
            drafter=find_last(r"loading draft model '([^'\n]{1,200})'", text),
            k=(max(given) if len(kinds) > 1 else given[-1]) if given else positions or _longest(kinds) or None,
            threshold=float(
                find_last(r"(?:--spec-draft-p-min[ =]|--draft-p-min[ =]|\bp_min=)([01]\.[0-9]{1,9})", text) or 0
            )
            or None,
            draft_token_ms=_draft_token_ms([*kinds.values()]),
            moe=_moe(text),
            offloaded=_offloaded(text),
            draft_cache=_draft_cache(text),
            **totals.values(),
        )


def _add_request(totals: OutputTotals, line: str) -> int:
    """Add the acceptance of one request; return its number of positions."""
    match, positions = ACCEPTED.search(line), POSITIONS.search(line)
    length = find_number("mean acceptance length =", line) or find_number("mean len =", line)
    if not match:
        return 0
    accepted, drafted = float(match[1]), float(match[2])
    shares = numbers_in(positions[1]) if positions else []
    drafting = accepted / (length - 1.0) if length and length > 1.0 else drafted / len(shares) if shares else 0.0
    totals.add(drafted, accepted, drafting, shares)
    return len(shares)


@dataclass(frozen=True, slots=True)
class _Kind:
    """Statistics of one kind of drafts over all requests. shares: of its drafts that were accepted up to a position."""

    drafts: float
    tokens: float
    ms: float
    shares: list[float]


def _kinds(output: Output) -> dict[str, _Kind]:
    """Return the statistics by kind, which logs of a higher level contain. A kind's last line counts all requests."""
    kinds = {}
    for line in output.lines("statistics "):
        name, shares, durations = KIND.search(line), SHARES.search(line), DURATIONS.search(line)
        if name:
            drafts, tokens = (find_number(f"#gen {what} =", line) or 0.0 for what in ("drafts", "tokens"))
            ms = float(durations[1]) if durations else 0.0
            kinds[name[1].replace("_", "-")] = _Kind(drafts, tokens, ms, numbers_in(shares[1]) if shares else [])
    return {name: kind for name, kind in kinds.items() if kind.drafts} or kinds


def _positions(kinds: Sequence[_Kind], drafting_steps: float) -> list[float]:
    """Return the steps that accepted the draft tokens up to each position; empty if a kind does not report them."""
    drafts = sum(kind.drafts for kind in kinds)
    if not drafts or not all(kind.shares for kind in kinds):
        return []
    rows = zip_longest(*([share * kind.drafts for share in kind.shares] for kind in kinds), fillvalue=0.0)
    return [sum(row) * drafting_steps / drafts for row in rows]


def _longest(kinds: Mapping[str, _Kind]) -> int:
    """Return the largest mean draft length of the kinds, a lower bound of k."""
    return max((ceil(kind.tokens / kind.drafts - TOLERANCE) for kind in kinds.values() if kind.drafts), default=0)


def _draft_token_ms(kinds: Sequence[_Kind]) -> float | None:
    """Return the drafting time per draft token."""
    tokens = sum(kind.tokens for kind in kinds)
    return sum(kind.ms for kind in kinds) / tokens if tokens else None


def _moe(text: str) -> bool | None:
    experts = find_last(r"n_expert {1,20}= {1,4}([0-9]{1,5})\b", text)
    return int(experts) > 0 if experts else None


def _draft_cache(text: str) -> str:
    """Return the type of the draft model's KV cache if it is quantised, by the flags or by what was loaded."""
    flags = re.findall(r"(?:--spec-draft-type-[kv]|--cache-type-[kv]-draft|-ct[kv]d)[ =]{1,9}(\w{1,20})", text)
    loaded = re.findall(r"\b[KV] \((\w{1,20})\):", text.partition("loading draft model")[2])
    return next(filter(None, map(quantised, [*flags, *loaded])), "")


def _offloaded(text: str) -> bool | None:
    """Return whether a part of the layers stays in main memory although others are on the GPU."""
    layers = re.findall(r"offloaded ([0-9]{1,4})/([0-9]{1,4}) layers to GPU", text)
    return any(0 < int(on_gpu) < int(total) for on_gpu, total in layers) if layers else None
