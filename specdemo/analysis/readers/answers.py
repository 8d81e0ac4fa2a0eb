"""Answers of servers: Prometheus text of vLLM, SGLang and llama.cpp (servers/counters.py), whose numbers
count from the start of the server, and JSON of one request with the statistics of its drafts (servers/engines/).
"""

from collections import defaultdict
from collections.abc import Mapping

from specdemo.analysis.observation import Observation, values_of
from specdemo.analysis.readers.base import Output, count, find_last, number, past_end, text_of
from specdemo.core.safe_io import JsonObject
from specdemo.servers.counters import FIRST_TOKENS, Samples, ServerStats, below, delta, gauge, parse
from specdemo.servers.engines import engines

# counters of finished requests: the second over the first is the mean speed of a request; the fourth without the fifth,
# over the third, where they are exported, the mean speed over all tokens
SUMS = [
    f"vllm:request_{name}"
    for name in (
        "time_per_output_token_seconds_sum",
        "time_per_output_token_seconds_count",
        "decode_time_seconds_sum",
        "generation_tokens_sum",
        "generation_tokens_count",
    )
]


def prometheus_text(output: Output) -> Observation | None:
    """Read the answer of a server's /metrics."""
    plain, speed = None, _mean_speed(parse(output.text, frozenset(SUMS)))  # metrics without drafts are a baseline
    for engine in engines():
        names = {"batch_size": engine.running, "tokens_per_s": engine.speed}
        samples = parse(output.text, engine.metrics | {*names.values()})
        stats = engine.statistics({}, samples)
        drafting = stats is not None and bool(stats.counters)
        if drafting or samples:
            values: JsonObject = {field: gauge(samples, name) for field, name in names.items()}
            total = _over_engines(output.text, engine.speed)
            values |= {"tokens_per_s": speed or total} if speed or total else {}
            values |= values_of(stats) if stats else never_drafted("", output.text)
            k = len(values.get("by_position", ())) or None
            observation = Observation(engine=engine.name, source=engine.title, k=k, **values)
            if drafting:
                return observation
            plain = observation
    return plain


def _over_engines(text: str, name: str) -> float | None:
    """Return the sum of a gauge over the engines of a server, whose processes report the same value."""
    ranks = defaultdict[str, list[str]](list)
    for line in text.splitlines():
        if name and line.startswith(name):
            ranks[find_last(r'[{,] {0,9}dp_rank="([0-9]{1,5})"', line)].append(line)
    return sum(gauge(parse("\n".join(lines), {name}), name) or 0.0 for lines in ranks.values()) or None


def never_drafted(old: str, new: str) -> JsonObject:
    """Return the fields of an Observation for a vLLM server that drafted nothing between two readings although
    speculation is on, as only then it has these counters; empty for others."""
    names = {"vllm:spec_decode_num_drafts", "vllm:generation_tokens"}
    before, after = parse(old, names), parse(new, names)
    drafts, tokens = (delta(before, after, name) for name in sorted(names, reverse=True))
    never = drafts == 0.0 and tokens
    return {"accepted_length": 1.0, "drafted_per_step": 0.0, "drafting_share": 0.0} if never else {}


def _mean_speed(samples: Samples) -> float | None:
    """Return vLLM's mean tokens/s of a request; None for other engines."""
    seconds, requests, decoding_s, output, finished = (delta({}, samples, name) for name in SUMS)
    if decoding_s and output and finished and output > finished:
        return (output - finished) / decoding_s
    return requests / seconds if seconds and requests else None


EVAL = "eval_duration"  # in ns, in Ollama's answers
PREDICTION = "Generated prediction: {"  # in the log of LM Studio


def server_answer(output: Output) -> Observation | None:
    """Read an answer of vLLM, SGLang, llama.cpp, LM Studio since 0.3.10, mlx-vlm, Ollama (also its stream) or an
    OpenAI-like gateway."""
    data = output.json
    if PREDICTION in output.text and not data:
        data = _last_prediction(output)
    if EVAL in output.text and not data:
        data = output.parse(output.text.rstrip().rpartition("\n")[2])  # the end of a stream
    if not isinstance(data, Mapping) or not {"usage", "stats", "timings", "metrics", "sglext", EVAL} & data.keys():
        return None
    answer = Observation(target=text_of(data.get("model")), tokens_per_s=_speed(data))
    chunk = {str(name): value for name, value in data.items()}
    for engine in engines():
        stats = engine.acceptance(chunk)
        if stats is None or "accepted" not in stats.counters:
            continue
        drafter, kind = text_of(below(data, "stats", "draft_model")), text_of(below(data, "timings", "draft_kind"))
        counters, steps = stats.counters, stats.counters.get("steps")
        drafted = (counters.get("drafted") or 0) + (counters.get("unverified") or 0)
        k = count(below(data, "metrics", "speculative_decoding", "num_spec_tokens"))
        return answer.changed(
            engine=engine.name,
            source=engine.title,
            drafter=drafter,
            method="draft_model" if drafter else kind,
            k=k or (round(drafted / steps) if steps and counters.get("unverified") else None),
            batch_size=1.0,
            **_values(stats, _tokens(data), FIRST_TOKENS if not kind else 0.0),
        )
    return answer if answer.tokens_per_s else None


def _values(stats: ServerStats, tokens: float | None, share: float) -> JsonObject:
    """Return the fields of an Observation in the statistics of an answer, without the tokens past its end.

    share: of the text, by which accepted tokens may exceed it. mlx-vlm counts every draft in full and documents that
    its mean accepted length is that of the text (pull request 2324).
    """
    accepted = stats.counters.get("accepted") or 0.0
    after_first = max(tokens - 1.0, 0.0) if tokens else None
    whole = after_first is not None and stats.drafting_steps is None and accepted >= after_first
    if not stats.is_possible(after_first) or (whole and accepted):
        words = f"Its text of {tokens:,.0f} tokens cannot hold {accepted:,.0f} accepted draft tokens"
        return {"notes": (f"{words} and one of the target per step, so these counts are left out.",)}
    held, notes = stats.within(after_first), tuple[str, ...]()
    kept = held.counters.get("accepted") or 0.0
    if kept < accepted:
        notes = (past_end(accepted, kept),)
    passes = held.over_all_passes(after_first).counters.get("steps") or 0.0
    of_text = after_first is not None and kept + passes > (1.0 + share) * after_first
    return {**values_of(held.over_all_passes(after_first, of_text=of_text)), "notes": notes}


def _last_prediction(output: Output) -> object:
    """Return the last answer in a log of LM Studio, None if it is incomplete."""
    text = output.text[output.text.rindex(PREDICTION) + len(PREDICTION) - 1 :]
    end = text.find("\n}")
    return output.parse(text[: end + 2]) if end >= 0 else None


def _tokens(data: Mapping[str, object]) -> float | None:
    return number(below(data, "usage", "completion_tokens")) or number(below(data, "timings", "predicted_n"))


def _speed(data: Mapping[str, object]) -> float | None:
    rate = number(below(data, "stats", "tokens_per_second")) or number(below(data, "timings", "predicted_per_second"))
    tokens, ns = number(data.get("eval_count")), number(data.get(EVAL))
    return rate or (1e9 * tokens / ns if tokens and ns else None) or None
