"""Readers of engines' outputs by kind. Each is a class in this package and an entry of READERS."""

from pathlib import Path

from specdemo.analysis.observation import Observation
from specdemo.analysis.readers.answers import PrometheusText, ServerAnswer
from specdemo.analysis.readers.base import Output, OutputReader
from specdemo.analysis.readers.benchmarks import AIPerf, BenchServe, GuideLLM, ServingTable
from specdemo.analysis.readers.llama_cpp import LlamaCppLog, LlamaSpeculative
from specdemo.analysis.readers.logs import SGLangLog, SGLangRequests, SGLangServerInfo, VLLMLog
from specdemo.core.safe_io import FILE_BYTES, read_bytes

# the first that knows an output reads it
READERS: list[OutputReader] = [BenchServe(), ServingTable(), SGLangServerInfo(), GuideLLM(), AIPerf(), ServerAnswer()]
READERS += [VLLMLog(), SGLangLog(), SGLangRequests(), LlamaSpeculative(), LlamaCppLog(), PrometheusText()]


def read_output(text: str, limits: int = FILE_BYTES) -> Observation:
    """Return what an engine's output contains. Raises ValueError, one line, for an unknown, too large or contradictory
    output."""
    output = Output(text, limits)
    for reader in READERS:
        observation = reader.read(output)
        if observation is not None:
            return observation
    titles = "; ".join(reader.title for reader in READERS)
    raise ValueError(f"this output is of no known kind. It may be: {titles}")


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
