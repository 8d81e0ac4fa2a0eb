"""Readers of engines' outputs by kind. Each is a file in this package and a line in CLASSES."""

from pathlib import Path
from pkgutil import resolve_name

from specdemo.core.safe_io import FILE_BYTES, read_bytes
from specdemo.diagnosis.observation import Observation
from specdemo.diagnosis.readers.base import Output, OutputReader

CLASSES = (
    "specdemo.diagnosis.readers.serving_benchmark:BenchServe",
    "specdemo.diagnosis.readers.serving_benchmark:ServingTable",
    "specdemo.diagnosis.readers.sglang_log:SGLangServerInfo",
    "specdemo.diagnosis.readers.guidellm:GuideLLM",
    "specdemo.diagnosis.readers.aiperf:AIPerf",
    "specdemo.diagnosis.readers.answer:ServerAnswer",
    "specdemo.diagnosis.readers.vllm_log:VLLMLog",
    "specdemo.diagnosis.readers.sglang_log:SGLangLog",
    "specdemo.diagnosis.readers.llamacpp_log:LlamaSpeculative",
    "specdemo.diagnosis.readers.llamacpp_log:LlamaCppLog",
    "specdemo.diagnosis.readers.prometheus:PrometheusText",
)
READERS: list[OutputReader] = [resolve_name(path)() for path in CLASSES]


def read_output(text: str, limits: int = FILE_BYTES) -> Observation:
    """Return what an engine's output contains. Raises ValueError, one line, for an unknown, too large or contradictory
    output."""
    output = Output(text, limits)
    for reader in READERS:
        found = reader.read(output)
        if found is not None:
            return found
    known = "; ".join(reader.title for reader in READERS)
    raise ValueError(f"this output is of no known kind. It may be: {known}")


def read_output_file(path: str | Path, limits: int = FILE_BYTES) -> Observation:
    """Return what a file contains. Raises ValueError, one line with the file's name."""
    try:
        return read_output(_text(path, limits), limits)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def read_json_output(path: str | Path, limits: int = FILE_BYTES) -> object:
    """Return the value of a JSON file, None for another file. Raises ValueError, one line with the file's name."""
    try:
        return Output(_text(path, limits), limits).json
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _text(path: str | Path, limits: int) -> str:
    return read_bytes(path, limits, "choose the output of an engine").decode(errors="replace")
