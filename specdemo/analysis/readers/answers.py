"""Answers of servers: Prometheus text of vLLM, SGLang, TensorRT-LLM and llama.cpp (servers/counters.py), whose numbers
count from the start of the server, and JSON of one request with the statistics of its drafts (servers/engines/).
"""

from collections.abc import Mapping

from specdemo.analysis.observation import Observation, values_of
from specdemo.analysis.readers.base import Output, OutputReader, count, number, text_of
from specdemo.core.safe_io import JsonObject
from specdemo.servers.counters import Samples, below, delta, gauge, parse
from specdemo.servers.engines import engines

GAUGES: Mapping[str, Mapping[str, str]] = {  # engine -> field of an Observation -> name of the gauge
    "vllm": {},
    "sglang": {"tokens_per_s": "sglang:gen_throughput"},
    "tensorrt-llm": {
        "accepted_length": "trtllm_spec_decode_acceptance_length",
        "batch_size": "trtllm_num_generation_requests",
    },
    "llama-server": {"tokens_per_s": "llamacpp:predicted_tokens_seconds"},
}
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


class PrometheusText(OutputReader):
    """Answer of a server's /metrics."""

    title = "Prometheus text"

    def read(self, output: Output) -> Observation | None:
        plain, speed = None, _mean_speed(parse(output.text, frozenset(SUMS)))  # metrics without drafts are a baseline
        for engine in engines():
            if engine.name not in GAUGES:
                continue
            names = {"batch_size": engine.running, **GAUGES[engine.name]}
            samples = parse(output.text, engine.metrics | {*names.values()})
            stats = engine.statistics({}, samples)
            drafting = stats is not None and bool(stats.counters)
            if drafting or samples:
                values: JsonObject = {field: gauge(samples, name) for field, name in names.items()}
                values |= {"tokens_per_s": speed} if speed else {}
                values |= values_of(stats) if stats else {}
                k = len(values.get("by_position", ())) or None
                found = Observation(engine=engine.name, source=f"{self.title}, {engine.title}", k=k, **values)
                if drafting:
                    return found
                plain = found
        return plain


def _mean_speed(samples: Samples) -> float | None:
    """Return vLLM's mean tokens/s of a request; None for other engines."""
    seconds, requests, decoding_s, output, finished = (delta({}, samples, name) for name in SUMS)
    if decoding_s and output and finished and output > finished:
        return (output - finished) / decoding_s
    return requests / seconds if seconds and requests else None


PREDICTION = "Generated prediction: {"  # in the log of LM Studio


class ServerAnswer(OutputReader):
    """Answer of vLLM, SGLang, llama.cpp, LM Studio since 0.3.10, mlx-vlm, FastDeploy or an OpenAI-like gateway."""

    title = "answer of a server, JSON"

    def read(self, output: Output) -> Observation | None:
        data = output.json
        if PREDICTION in output.text and not data:
            data = _last_prediction(output)
        if not isinstance(data, Mapping) or not {"usage", "stats", "timings", "metrics", "sglext"} & data.keys():
            return None
        one = Observation(source=self.title, target=text_of(data.get("model")), tokens_per_s=_speed(data))
        chunk = {str(name): value for name, value in data.items()}
        for engine in engines():
            stats = engine.acceptance(chunk)
            if stats is None or "accepted" not in stats.counters:
                continue
            tokens, drafter = _tokens(data), text_of(below(data, "stats", "draft_model"))
            counters, steps = stats.counters, stats.counters.get("steps")
            drafted = (counters.get("drafted") or 0) + (counters.get("unverified") or 0)
            k = count(below(data, "metrics", "speculative_decoding", "num_spec_tokens"))
            return one.changed(
                engine=engine.name,
                source=f"{self.title}, {engine.title}",
                drafter=drafter,
                method="draft_model" if drafter else text_of(below(data, "timings", "draft_kind")),
                k=k or (round(drafted / steps) if steps and counters.get("unverified") else None),
                batch_size=1.0,
                **values_of(stats.over_all_passes(max(tokens - 1.0, 0.0) if tokens else None)),
            )
        return one if one.tokens_per_s else None


def _last_prediction(output: Output) -> object:
    """Return the last answer in a log of LM Studio, None if it is incomplete."""
    text = output.text[output.text.rindex(PREDICTION) + len(PREDICTION) - 1 :]
    end = text.find("\n}")
    return output.parse(text[: end + 2]) if end >= 0 else None


def _tokens(data: Mapping[str, object]) -> float | None:
    return number(below(data, "usage", "completion_tokens")) or number(below(data, "timings", "predicted_n"))


def _speed(data: Mapping[str, object]) -> float | None:
    found = number(below(data, "stats", "tokens_per_second")) or number(below(data, "timings", "predicted_per_second"))
    return found or None
