"""Readers of engines' outputs by kind. Each is a file in this package and a line in CLASSES."""

from pathlib import Path
from pkgutil import resolve_name

from specdemo.analysis.observation import Observation
from specdemo.analysis.readers.base import Output, OutputReader
from specdemo.core.safe_io import FILE_BYTES, read_bytes

CLASSES = (
    "specdemo.analysis.readers.benchmarks:BenchServe",
    "specdemo.analysis.readers.benchmarks:ServingTable",
    "specdemo.analysis.readers.logs:SGLangServerInfo",
    "specdemo.analysis.readers.benchmarks:GuideLLM",
    "specdemo.analysis.readers.benchmarks:AIPerf",
    "specdemo.analysis.readers.answers:ServerAnswer",
    "specdemo.analysis.readers.logs:VLLMLog",
    "specdemo.analysis.readers.logs:SGLangLog",
    "specdemo.analysis.readers.logs:LlamaCppLog",
    "specdemo.analysis.readers.answers:PrometheusText",
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
    text = _text(path, limits)
    try:
        return read_output(text, limits)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def read_json_output(path: str | Path, limits: int = FILE_BYTES) -> object:
    """Return the value of a JSON file, None for another file. Raises ValueError, one line with the file's name."""
    text = _text(path, limits)
    try:
        return Output(text, limits).json
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _text(path: str | Path, limits: int) -> str:
    return read_bytes(path, limits, "choose the output of an engine").decode(errors="replace")
