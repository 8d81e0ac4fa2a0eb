"""Readers of engines' outputs by title. Each is a function in this package and an entry of READERS: it returns what an
output contains, and None for an output of another kind. It raises ValueError, one line, for numbers that contradict
each other.
"""

from collections.abc import Callable
from pathlib import Path

from specdemo.analysis.observation import Observation
from specdemo.analysis.readers.answers import prometheus_text, server_answer
from specdemo.analysis.readers.base import Output
from specdemo.analysis.readers.benchmarks import aiperf, bench_serve, guidellm, serving_table
from specdemo.analysis.readers.llama_cpp import llama_cpp_log, llama_speculative
from specdemo.analysis.readers.logs import sglang_log, sglang_requests, sglang_server_info, vllm_log
from specdemo.core.safe_io import FILE_BYTES, read_bytes

READERS: dict[str, Callable[[Output], Observation | None]] = {  # the first that knows an output reads it
    "vllm bench serve, JSON": bench_serve,
    "table of a serving benchmark": serving_table,
    "SGLang server info": sglang_server_info,
    "GuideLLM report, JSON": guidellm,
    "AIPerf profile_export.jsonl": aiperf,
    "answer of a server, JSON": server_answer,
    "vLLM log": vllm_log,
    "SGLang log": sglang_log,
    "SGLang requests (meta_info)": sglang_requests,
    "llama-speculative output": llama_speculative,
    "llama.cpp log": llama_cpp_log,
    "Prometheus text": prometheus_text,
}


def read_output(text: str, limits: int = FILE_BYTES) -> Observation:
    """Return what an engine's output contains. Raises ValueError, one line, for an unknown, too large or contradictory
    output."""
    output = Output(text, limits)
    for title, read in READERS.items():
        if observation := read(output):
            return observation.changed(source=", ".join(filter(None, (title, observation.source))))
    raise ValueError(f"this output is of no known kind. It may be: {'; '.join(READERS)}")


def read_output_file(path: str | Path, limits: int = FILE_BYTES) -> Observation:
    """Return what a file contains. Raises ValueError, one line with the file's name."""
    text = _text(path, limits)
    try:
        return read_output(text, limits)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def read_json_output(path: str | Path) -> object:
    """Return the value of a JSON file, None for another file. Raises ValueError with one line."""
    return Output(_text(path, FILE_BYTES), FILE_BYTES).json


def _text(path: str | Path, limits: int) -> str:
    return read_bytes(path, limits, "choose the output of an engine").decode(errors="replace")
