"""Base classes of suites, and the options that they share. Only `Suite.run` needs torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar

from specdemo.bench.prompts import PROMPTS
from specdemo.bench.result import Result
from specdemo.core.dtypes import NAMES, dtype_name
from specdemo.core.suggest import DEVICES
from specdemo.presets.files import DEFAULT
from specdemo.presets.limits import LIMITS
from specdemo.servers.engines import engine_names

Report = Callable[[float, str], None]  # fraction done 0..1, current activity
Stop = Callable[[], bool]  # returns True to stop

NEW_TOKENS = 96
REPEATS = 1000  # maximum
MINUTES = 600.0  # maximum
ROWS = 256  # batch size of the losslessness suite: continuations per repeat


@dataclass(frozen=True, slots=True)
class Axis:
    """Meaning of the points of a suite's curves: a column of its rows, its label and its unit."""

    column: str
    title: str
    unit: str
    doubling: bool = False  # points double, so the axis is logarithmic


@dataclass(frozen=True, kw_only=True)
class Suite:
    """One measurement; its fields are its options. Suites with title and question appear on the page's Sweep tab.

    Raises ValueError, one line with the fix, for an unusable option.
    """

    name: ClassVar[str]
    title: ClassVar[str] = ""
    question: ClassVar[str] = ""
    axis: ClassVar[Axis | None] = None  # None: compare the lanes only
    measured_by: ClassVar[str]  # module:function, imported by `run`, because it needs torch
    repeats: int = 5

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                OPTIONS[field.name].check(value)

    def run(self, report: Report, cancelled: Stop) -> Result:
        """Measure. When `cancelled()` turns true the result covers the finished repeats. Raises ValueError with one
        line, also when there is none."""
        found: Result = resolve_name(self.measured_by)(self, report, cancelled)
        return found

    def config(self, target: str) -> dict[str, object]:
        """Return the options and the target for the result's file."""
        options = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "repeats"}
        serialized = {name: OPTIONS[name].serialize(value) for name, value in options.items() if value is not None}
        return {"target": target, "temperature": 0.0, **serialized}


@dataclass(frozen=True, kw_only=True)
class Decoding(Suite):
    """Suite that generates texts of a fixed length on a device."""

    device: str = "auto"
    dtype: str = "auto"
    new_tokens: int = NEW_TOKENS


@dataclass(frozen=True, kw_only=True)
class Prompted(Decoding):
    """Suite with prompts, given or its own."""

    prompts: Sequence[str] | None = None

    @property
    def texts(self) -> Sequence[str]:
        """Return the given prompts, or the default ones."""
        return self.prompts or PROMPTS


@dataclass(frozen=True, kw_only=True)
class Laned(Prompted):
    """Suite of the first lane of a preset."""

    preset: str = DEFAULT


@dataclass(frozen=True, kw_only=True)
class Questioned(Prompted):
    """Suite that also takes a question file instead of prompts."""

    questions: Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompts is not None and self.questions is not None:
            raise ValueError("--prompt and --questions exclude each other; give one of them")

    @property
    def prompts_or_file(self) -> Sequence[str] | Path:
        """Return the question file if given, else the prompts."""
        return self.questions or self.texts


def _repeats(value: int) -> None:
    if not 1 <= value <= REPEATS:
        raise ValueError(f"repeats must be from 1 to {REPEATS}, not {value}")


def _ks(value: Sequence[int]) -> None:
    if not (any(value) and all(0 <= k <= LIMITS.k for k in value)):
        raise ValueError(f"draft lengths must be from 1 to {LIMITS.k}, not {list(value)[:20]}")


def _new_tokens(value: int) -> None:
    if not 2 <= value <= LIMITS.max_new_tokens:
        raise ValueError(f"new tokens must be 2 to {LIMITS.max_new_tokens}, not {value}")


def _prompts(value: Sequence[str]) -> None:
    if not (value and all(text.strip() for text in value)):
        raise ValueError("a prompt is empty; write at least one word")


def _minutes(value: float) -> None:
    if not 0.0 <= value <= MINUTES:
        raise ValueError(
            f"minutes must be 0 to {MINUTES:.0f}, not {value:g}; 0 writes a report of the existing results"
        )


def _at_most(value: Sequence[float]) -> None:
    if not (value and all(0 < one <= 1024 for one in value)):
        raise ValueError(f"loads must be above 0 and at most 1024, not {list(value)[:20]}")


def _above_zero(value: float) -> None:
    if not 0 < value < 1e9:
        raise ValueError(f"expected a number above 0, not {value}")


def _list(text: str, of: Callable[[str], object]) -> list[object]:
    """Parse a list of numbers: `1,2,4` -> [1, 2, 4]."""
    try:
        return [of(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"a load must be a number, or several like 1,2,4, not {text[:40]!r}") from None


def _ranges(text: str) -> list[int]:
    """Parse draft lengths: `4` -> [4], `1-8` -> [1, ..., 8], `0,1,3` -> [0, 1, 3]."""
    ks: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        try:
            found = range(int(first), int(last or first) + 1)
        except ValueError:
            found = range(0)
        if not found or found[0] < 0 or found[-1] > LIMITS.k:
            raise ValueError(f"--k takes a draft length from 1 to {LIMITS.k}, or a range like 1-8, not {part[:40]!r}")
        ks += found
    return ks


def _same(value: object) -> object:
    return value


@dataclass(frozen=True, slots=True)
class Option:
    """Option that suites may share: its flag on the command line, its check, and its form in the result file."""

    flag: str
    noun: str
    help: str
    kind: Any = str  # type on the command line
    read: Callable[[Any], object] = _same  # value from the command line -> value of the field
    check: Callable[[Any], object] = _same
    serialize: Callable[[Any], object] = _same
    metavar: str | None = None  # shown in the help; None: the type


OPTIONS: Mapping[str, Option] = {
    "repeats": Option("--repeats", "number of repeats", "Interleaved repeats.", int, check=_repeats),
    "preset": Option("--preset", "preset", "Preset whose target and first lane are measured.", metavar="ID"),
    "ks": Option(
        "--k",
        "draft length",
        "Draft lengths, for example 4, 1-8 or 0,1,3.",
        read=_ranges,
        check=_ks,
        serialize=list,
        metavar="K",
    ),
    "prompts": Option(
        "--prompt",
        "prompt",
        "Prompt to use instead of the suite's; repeatable.",
        list[str],
        check=_prompts,
        serialize=len,
        metavar="TEXT",
    ),
    "questions": Option(
        "--questions",
        "question file",
        "File question.jsonl in the format of Spec-Bench; adds results per category.",
        Path,
        serialize=lambda path: path.name,
    ),
    "new_tokens": Option("--new-tokens", "number of new tokens", "Output tokens per prompt.", int, check=_new_tokens),
    "engine": Option("--engine", "engine", f"Serving engine to start: {engine_names()}.", metavar="NAME"),
    "servers": Option(
        "--server",
        "server",
        "Running server, one per draft length; repeatable.",
        list[str],
        metavar="URL",
    ),
    "command": Option("--command", "program", "Program of the engine, if it is not on PATH.", metavar="PATH"),
    "gpus": Option("--gpus", "number of GPUs", "GPUs per server (tensor parallelism).", int, check=_above_zero),
    "concurrency": Option(
        "--concurrency",
        "concurrency",
        "Concurrent requests, for example 1,2,4.",
        read=partial(_list, of=int),
        check=_at_most,
        metavar="N",
    ),
    "rates": Option(
        "--rate",
        "arrival rate",
        "Requests per second with Poisson arrivals, for example 0.5,2; instead of --concurrency.",
        read=partial(_list, of=float),
        check=_at_most,
        metavar="R",
    ),
    "requests": Option(
        "--requests",
        "number of requests",
        "Requests per load and repeat; default: four times the concurrency.",
        int,
        check=_above_zero,
    ),
    "slo_ttft": Option(
        "--slo-ttft",
        "bound",
        "Largest time to first token of a good request, in ms.",
        float,
        check=_above_zero,
        metavar="MS",
    ),
    "slo_itl": Option(
        "--slo-itl",
        "bound",
        "Largest mean time per output token of a good request, in ms.",
        float,
        check=_above_zero,
        metavar="MS",
    ),
    "schedule": Option("--schedule", "schedule", "Measure the resulting schedule of draft lengths as well.", bool),
    "pair": Option("--pair", "model pair", "Pair of models: embedded, 8m, 98m, 342m or 8b.", metavar="NAME"),
    "folder": Option("--out", "folder", "Folder to write to.", Path, serialize=str),
    "minutes": Option("--minutes", "time", "Time limit of this call in minutes.", float, check=_minutes),
    "journal": Option(
        "--out", "file", "File of finished points, from which an interrupted run continues.", Path, serialize=str
    ),
    "device": Option("--device", "device", f"Device: {DEVICES}.", metavar="NAME"),
    "dtype": Option("--dtype", "dtype", f"Data type: {NAMES}.", read=dtype_name, metavar="NAME"),
}
