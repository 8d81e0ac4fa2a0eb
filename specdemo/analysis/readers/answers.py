"""Answers of servers: Prometheus text of vLLM, SGLang, TensorRT-LLM and llama.cpp (servers/counters.py), whose numbers
count from the start of the server, and JSON of one request with the statistics of its drafts (servers/engines/).
"""

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any, ClassVar

from specdemo.analysis.observation import Observation
from specdemo.analysis.readers.base import Output, OutputReader, OutputTotals, below, count, number, text_of
from specdemo.servers.counters import Samples, delta, gauge, parse
from specdemo.servers.engines import engines


@dataclass(frozen=True, slots=True)
class Names:
    """Names of an engine's gauges. seconds, requests: counters whose ratio is the mean time per token of a request;
    decoding_s, output, finished: counters whose ratio (output - finished) / decoding_s is the speed of all requests."""

    running: str = ""
    speed: str = ""
    seconds: str = ""
    requests: str = ""
    decoding_s: str = ""
    output: str = ""
    finished: str = ""
    length: str = ""


class PrometheusText(OutputReader):
    """Answer of a server's /metrics."""

    title = "Prometheus text"
    names: ClassVar = {
        "vllm": Names(
            running="vllm:num_requests_running",
            seconds="vllm:request_time_per_output_token_seconds_sum",
            requests="vllm:request_time_per_output_token_seconds_count",
            decoding_s="vllm:request_decode_time_seconds_sum",
            output="vllm:request_generation_tokens_sum",
            finished="vllm:request_generation_tokens_count",
        ),
        "sglang": Names(running="sglang:num_running_reqs", speed="sglang:gen_throughput"),
        "tensorrt-llm": Names(length="trtllm_spec_decode_acceptance_length", running="trtllm_num_generation_requests"),
        "llama-server": Names(running="llamacpp:requests_processing", speed="llamacpp:predicted_tokens_seconds"),
    }

    def read(self, output: Output) -> Observation | None:
        if not any(prefix in output.text for prefix in ("vllm:", "sglang:", "trtllm_", "llamacpp:")):
            return None
        plain = None  # metrics without drafts are a baseline
        for engine in engines():
            names = self.names.get(engine.name)
            if names is None:
                continue
            samples = parse(output.text, engine.metrics | {name for name in astuple(names) if name})
            stats = engine.statistics({}, samples)
            if stats is None or not stats.counters:
                name, source = engine.name, f"{self.title}, {engine.title}"
                plain = Observation(engine=name, source=source, **_gauges(samples, names)) if samples else plain
                continue
            counters, steps = stats.counters, stats.counters.get("steps")
            share = stats.drafting_steps / steps if stats.drafting_steps and steps else None
            positions = tuple((one or 0.0) * (share or 1.0) for one in stats.accept_by_position)
            values = _gauges(samples, names)
            if length := counters.get("tokens_per_step"):
                values["accepted_length"] = length
            drafted = counters.get("drafted")
            return Observation(
                engine=engine.name,
                source=f"{self.title}, {engine.title}",
                k=len(positions) or None,
                by_position=positions,
                acceptance_rate=counters.get("acceptance_rate") if drafted else None,
                drafted_per_step=drafted / steps if steps and drafted else None,
                drafting_share=share,
                steps=round(steps) if steps else None,
                **values,
            )
        return plain


def _gauges(samples: Samples, names: Names) -> dict[str, Any]:
    """Return batch size, speed and mean accepted length, where the engine exports them."""
    seconds, requests, decoding_s, output, finished = (
        delta({}, samples, name)
        for name in (names.seconds, names.requests, names.decoding_s, names.output, names.finished)
    )
    speed = requests / seconds if seconds and requests else gauge(samples, names.speed)
    if decoding_s and output and finished and output > finished:
        speed = (output - finished) / decoding_s
    return {
        "batch_size": gauge(samples, names.running),
        "tokens_per_s": speed or None,
        "accepted_length": gauge(samples, names.length),
    }


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
        chunk = {str(name): value for name, value in data.items()}
        for engine in engines():
            stats = engine.acceptance(chunk)
            if stats is None or "accepted" not in stats.counters:
                continue
            accepted, drafted = stats.counters["accepted"] or 0.0, stats.counters["drafted"] or 0.0
            steps, tokens = stats.counters.get("steps") or 0.0, _tokens(data)
            after_first = max(tokens - 1.0, 0.0) if tokens else None
            totals = OutputTotals(speeds=[_speed(data) or 0.0], batches=[1.0])
            bars = stats.accept_histogram
            if bars:
                totals.add_histogram(bars, drafted, after_first)
            else:
                totals.add(drafted, accepted, steps, tokens=after_first)
            k = count(below(data, "metrics", "speculative_decoding", "num_spec_tokens"))
            return Observation(
                engine=engine.name,
                source=f"{self.title}, {engine.title}",
                target=text_of(data.get("model")),
                drafter=text_of(below(data, "stats", "draft_model")),
                method="draft_model" if below(data, "stats", "draft_model") else _kind(data),
                k=k or None,
                **totals.values(),
            )
        speed = _speed(data)
        return Observation(source=self.title, target=text_of(data.get("model")), tokens_per_s=speed) if speed else None


def _last_prediction(output: Output) -> object:
    """Return the last answer in a log of LM Studio, None if it is incomplete."""
    text = output.text[output.text.rindex(PREDICTION) + len(PREDICTION) - 1 :]
    end = text.find("\n}")
    return output.parse(text[: end + 2]) if end >= 0 else None


def _kind(data: Mapping[str, object]) -> str:
    return text_of(below(data, "timings", "draft_kind"))


def _tokens(data: Mapping[str, object]) -> float | None:
    return number(below(data, "usage", "completion_tokens")) or number(below(data, "timings", "predicted_n"))


def _speed(data: Mapping[str, object]) -> float | None:
    found = number(below(data, "stats", "tokens_per_second")) or number(below(data, "timings", "predicted_per_second"))
    return found or None
