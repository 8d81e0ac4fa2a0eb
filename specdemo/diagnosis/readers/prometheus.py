"""Prometheus text of vLLM, SGLang, TensorRT-LLM and llama.cpp, read with servers/counters.py. All numbers count from
the start of the server.
"""

from dataclasses import astuple, dataclass
from typing import Any, ClassVar

from specdemo.diagnosis.observation import Observation
from specdemo.diagnosis.readers.base import Output, OutputReader
from specdemo.servers.counters import Samples, gauge, parse
from specdemo.servers.engines import engines


@dataclass(frozen=True, slots=True)
class Names:
    """Names of an engine's gauges. seconds, tokens: pairs of counters whose ratio is tokens per second of a request."""

    running: str = ""
    speed: str = ""
    seconds: str = ""
    tokens: str = ""
    length: str = ""


class PrometheusText(OutputReader):
    """Answer of a server's /metrics."""

    title = "Prometheus text"
    names: ClassVar = {
        "vllm": Names(
            running="vllm:num_requests_running",
            seconds="vllm:request_time_per_output_token_seconds_sum",
            tokens="vllm:request_time_per_output_token_seconds_count",
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
            counters, positions = stats.counters, tuple(share or 0.0 for share in stats.accept_by_position)
            values = _gauges(samples, names)
            if length := counters.get("tokens_per_step"):
                values["accepted_length"] = length
            steps, drafted = counters.get("steps"), counters.get("drafted")
            return Observation(
                engine=engine.name,
                source=f"{self.title}, {engine.title}",
                k=len(positions) or None,
                by_position=positions,
                acceptance_rate=counters.get("acceptance_rate") if drafted else None,
                drafted_per_step=drafted / steps if steps and drafted else None,
                steps=round(steps) if steps else None,
                **values,
            )
        return plain


def _gauges(samples: Samples, names: Names) -> dict[str, Any]:
    """Return batch size, speed and mean accepted length, where the engine exports them."""
    seconds, requests = gauge(samples, names.seconds), gauge(samples, names.tokens)
    speed = requests / seconds if seconds and requests else gauge(samples, names.speed)
    return {
        "batch_size": gauge(samples, names.running),
        "tokens_per_s": speed or None,
        "accepted_length": gauge(samples, names.length),
    }
