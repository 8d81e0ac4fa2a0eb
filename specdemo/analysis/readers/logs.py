"""Logs of servers.

vLLM: v1/spec_decode/metrics.py (lines with "SpecDecoding metrics"), v1/metrics/loggers.py (throughput). SGLang:
scheduler_metrics_mixin.py (lines with "Decode batch"), tokenizer_manager.py (`meta_info`) and its /server_info.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise, zip_longest
from typing import Any

from specdemo.analysis.observation import Observation
from specdemo.analysis.parts import READING, contrast, trend
from specdemo.analysis.readers.base import (
    IN_PART,
    LONGEST_LINE,
    EngineLoad,
    Output,
    OutputTotals,
    find_last,
    find_number,
    hidden_engines,
    loads_of,
    mean,
    number,
    numbers_in,
    objects,
    quantised,
    speeds_of_all,
    text_of,
)
from specdemo.servers.counters import FIRST_TOKENS, all_passes

VLLM_MARK = "SpecDecoding metrics:"
LOAD = "Avg generation throughput:"
VLLM_ENGINE = re.compile(r"\bpid=[0-9]{1,10}\b|\bEngine [0-9]{1,5}\b|\b[0-9]{1,5} Engines Aggregated\b")
ROUNDING = 0.006  # of a length that is printed with two digits
VLLM_ENGINES = r"\bdata_parallel_size'?[=:] {0,2}([0-9]{1,5})\b"
RATES = re.compile(r"Per-position acceptance rate: ([0-9., ]{1,8000})")


def vllm_log(output: Output) -> Observation | None:
    """Read the log of a vLLM server with speculative decoding, of versions since 0.9."""
    if VLLM_MARK not in output.text and not ("Avg prompt throughput:" in output.text and LOAD in output.text):
        return None
    loads = loads_of(output.lines(LOAD), VLLM_ENGINE, LOAD, "Running:")
    drafting = [*output.lines(VLLM_MARK)]
    totals = OutputTotals(
        speeds=speeds_of_all(loads), batches=[load.running / _aggregated(load) for load in loads], noun=READING
    )
    _add_readings(totals, output, loads)
    _count_all_passes(totals, drafting, [load.tokens_per_s for load in loads])
    lines, arguments = ("".join(output.lines(mark)) for mark in ("speculative_config=", "non-default args:"))
    config = find_last(r"'speculative_config': (\{[^{}]{0,4000}\})", arguments)
    cache = find_last(r"'kv_cache_dtype': '(\w{1,40})'", config) or find_last(r"kv_cache_dtype=(\w{1,40})", lines)
    method = find_last(r"speculative_config=SpeculativeConfig\(method='([\w-]{1,60})'", lines)
    visible = max([len({load.engine for load in loads}), *map(_aggregated, loads)])
    totals.notes += _mixed(loads) or hidden_engines(find_last(VLLM_ENGINES, lines + arguments), visible)
    totals.drafts_nothing = bool(method) and any(totals.speeds) and not drafting
    return Observation(
        engine="vllm",
        method=method,
        drafter=find_last(r"SpeculativeConfig\([^()]{0,200}?model='([^']{1,200})'", lines),
        target=find_last(r"with config: model='([^']{1,200})'", lines),
        offloaded=True if sum("Preemptions:" in line for line in output.lines(LOAD)) > len(loads) / 2 else None,
        draft_cache=quantised(cache),
        verified_in_part=True if IN_PART.search(config) else None,
        **totals.values(),
    )


def _aggregated(load: EngineLoad) -> int:
    """Return the number of engines in a line, 1 if it is of one engine."""
    return int(find_last(r"([0-9]{1,5}) Engines Aggregated", load.engine) or 1) or 1


def _mixed(loads: Sequence[EngineLoad]) -> tuple[str, ...]:
    """Return a note if lines of several servers are mixed: an engine does not log twice in a second."""
    at_once = sum(a.at is not None and (a.engine, a.at) == (b.engine, b.at) for a, b in pairwise(loads))
    if at_once <= len(loads) / 4:
        return ()
    return ("Lines of several servers are mixed and nothing tells them apart, so their tokens/s are not added.",)


def _count_all_passes(totals: OutputTotals, drafting: Sequence[str], speeds: Sequence[float]) -> None:
    """Count the passes without a draft from the throughput. A line about drafts covers the time since the last one, so
    the shortest of these times is that of a line about throughput.

    They stay unknown if the log begins or ends within a reading, and in old versions, whose lines about drafts have no
    throughput: it is not known whether those count every draft (vllm-0.9.log has 16 tokens per counted draft).
    """
    rates = [(find_number("Drafted:", line), find_number("Drafted throughput:", line)) for line in drafting]
    seconds = [drafted / rate for drafted, rate in rates if drafted and rate]
    if seconds and len(speeds) >= len(drafting):
        tokens = sum(speeds) * min(seconds)
        if tokens > (1.0 + FIRST_TOKENS) * (totals.drafting_steps + totals.accepted):
            totals.steps = all_passes(tokens, totals.accepted, totals.drafting_steps)


def _add_readings(totals: OutputTotals, output: Output, loads: Sequence[EngineLoad]) -> None:
    """Add the drafts of all readings. The line about them follows that about the throughput of the same engine."""
    several, waiting, load = len({load.engine for load in loads}) > 1, iter(loads), None
    for line in output.lines(LOAD, VLLM_MARK):
        if VLLM_MARK not in line:
            load = next(waiting)
        elif load is None or several:
            _add_drafts(totals, line, None, find_last(r"(Engine [0-9]{1,5})", load.engine if load else ""))
        else:
            _add_drafts(totals, line, load.tokens_per_s)


def _add_drafts(totals: OutputTotals, line: str, tokens_per_s: float | None, place: str = "") -> None:
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
        totals.add(drafted, accepted, steps, rates, tokens_per_s=tokens_per_s, place=place)


SGLANG_MARK = "Decode batch"
SGLANG_ENGINE = re.compile(r"\bDP[0-9]{1,5}\b")
INTERVAL = 40.0  # passes between two lines, the default of decode_log_interval


def _sglang(value: Callable[[str], str], measured: Mapping[str, Any]) -> Observation:
    """Return what SGLang's settings and measurements say. value: of a setting, an empty text if it is unknown."""
    steps, offload = value("speculative_num_steps"), value("cpu_offload_gb")
    values = {"drafted_per_step": _drafted(value)} | {name: n for name, n in measured.items() if n is not None}
    return Observation(
        engine="sglang",
        method=value("speculative_algorithm"),
        drafter=value("speculative_draft_model_path"),
        target=value("model_path"),
        k=int(steps) or None if steps.isdecimal() else None,
        offloaded=bool(offload.strip("0.")) if offload else None,
        draft_cache=quantised(value("speculative_draft_kv_cache_dtype") or value("kv_cache_dtype")),
        **values,
    )


def _drafted(value: Callable[[str], str]) -> float | None:
    """Return the draft tokens of a step, which are the verified ones without the root."""
    tokens = value("speculative_num_draft_tokens")
    return float(tokens) - 1.0 if tokens.isdecimal() and int(tokens) > 1 else None


def _setting(text: str, name: str) -> str:
    """Return a setting in a log's `server_args=ServerArgs(..)`, an empty text without it."""
    return find_last(rf"\b{name}='?((?!None\b)[^',()\s]{{1,200}})", text)


def sglang_log(output: Output) -> Observation | None:
    """Read the log of an SGLang server without its accept rate, because old versions count the bonus token in it."""
    if SGLANG_MARK not in output.text or "gen throughput" not in output.text:
        return None
    value = partial(_setting, "".join(output.lines("server_args=")))
    lines = [*output.lines(SGLANG_MARK)]
    loads = loads_of(lines, SGLANG_ENGINE, "gen throughput (token/s):", "#running-req:")
    engines, interval = {load.engine for load in loads}, value("decode_log_interval")
    passes, per_draft = float(interval) if interval.isdecimal() else INTERVAL, _drafted(value) or 1.0
    totals = OutputTotals(noun=READING)
    for line, load in zip(lines, loads, strict=True):
        length, rows = find_number("accept len:", line) or 0.0, passes * (load.running or 1.0)
        if length >= 1.0:
            alone = {"tokens_per_s": load.tokens_per_s} if len(engines) == 1 else {"place": load.engine}
            totals.add(per_draft * rows, (length - 1.0) * rows, rows, **alone)
    measured = {
        "accepted_length": 1.0 + totals.accepted / totals.steps if totals.steps else None,
        "contrast": contrast(totals.parts, totals.noun),
        "tokens_per_s": mean(speeds_of_all(_after_prefill(loads))),
        "batch_size": mean(load.running for load in loads),
        "notes": (*hidden_engines(value("dp_size"), len(engines)), *trend(totals.parts)),
    }
    return _sglang(value, measured)


def _after_prefill(loads: Sequence[EngineLoad]) -> list[EngineLoad]:
    """Return the lines without the first of each engine that has more than two: its time includes the prefill."""
    counts = Counter(load.engine for load in loads)
    first = {load.engine: index for index, load in reversed([*enumerate(loads)])}
    return [load for index, load in enumerate(loads) if counts[load.engine] < 3 or first[load.engine] != index]


def sglang_server_info(output: Output) -> Observation | None:
    """Read an answer of SGLang's /server_info or /get_server_info, with the state of every engine."""
    data = output.json
    if not isinstance(data, Mapping) or "internal_states" not in data:
        return None
    lengths, speeds = (
        [number(state.get(name)) or 0.0 for state in objects(data["internal_states"])]
        for name in ("avg_spec_accept_length", "last_gen_throughput")
    )

    def value(name: str) -> str:
        return "" if data.get(name) is None else text_of(str(data[name])[:200])

    pairs = [(length, speed) for length, speed in zip(lengths, speeds, strict=True) if length and speed]
    passes = sum(speed / length for length, speed in pairs)
    measured = {
        "accepted_length": sum(speed for _, speed in pairs) / passes if passes else mean(lengths),
        "tokens_per_s": sum(speeds) or None,
        "notes": hidden_engines(value("dp_size"), len(speeds)),
    }
    return _sglang(value, measured)


META = re.compile(r"['\"]meta_info['\"]: {0,4}\{")
REQUEST = r"^ {0,9}['\"]id['\"]: {0,4}['\"]([^'\"]{1,80})['\"]"
OUTPUT, PASSES, SECONDS = "completion_tokens", "spec_verify_ct", "e2e_latency"
ACCEPTED = "spec_num_correct_drafts", "spec_accept_token_num"  # names of newer and older versions
PROPOSED = "spec_num_proposed_drafts", "spec_draft_token_num"


def sglang_requests(output: Output) -> Observation | None:
    """Read statistics of finished requests: `meta_info` in answers of SGLang's /generate, and in the lines `Finish:` of
    a log with --log-requests. Without drafts they are a baseline."""
    requests = dict[str, str]()  # the last answer of a stream has the numbers of all
    matches = [*META.finditer(output.text)]
    for match, after in zip_longest(matches, [request.start() for request in matches[1:]]):
        text = output.text[match.end() : min(match.end() + LONGEST_LINE, after or len(output.text))]
        if SECONDS in text and OUTPUT in text:
            requests[find_last(REQUEST, text) or text] = text
    if not requests:
        return None
    value, totals = partial(_setting, "".join(output.lines("server_args="))), OutputTotals()
    per_draft = _drafted(value) or 0.0
    for text in requests.values():
        _add_request(totals, text, per_draft)
    totals.notes.append("Tokens/s are of whole requests, with their prompts.")
    return _sglang(value, totals.values())


def _add_request(totals: OutputTotals, text: str, per_draft: float) -> None:
    """Add the statistics of a request. Without a count of accepted tokens, they are those of the text."""
    tokens, passes, seconds = (_field(text, name) or 0.0 for name in (OUTPUT, PASSES, SECONDS))
    totals.add_time(tokens, 1000.0 * seconds)
    if passes:
        after_first = max(tokens - 1.0, 0.0)
        accepted, drafted = _field(text, *ACCEPTED), _field(text, *PROPOSED) or passes * per_draft
        accepted = max(after_first - passes, 0.0) if accepted is None else accepted
        totals.add(drafted, accepted, passes, (), after_first, tokens / seconds if seconds else None)


def _field(text: str, *names: str) -> float | None:
    """Return the number of the first name that a JSON or Python text has."""
    numbers = (find_number(f"{name}{quote}:", text) for name in names for quote in "'\"")
    return next((number for number in numbers if number is not None), None)
