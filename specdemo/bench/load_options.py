"""Options of the load suite. Needs no torch."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Self, TypeVar

from pydantic import AfterValidator, BeforeValidator, PlainSerializer, model_validator

from specdemo.bench.base import PRESET, Axis, Ks, NewTokens, Option, Prompted, Repeats
from specdemo.bench.prompts import PROMPTS
from specdemo.prediction.golden import Curve, read_curve
from specdemo.presets.files import DEFAULT
from specdemo.servers import engines
from specdemo.servers.engines.base import ServingEngine

CONCURRENCY = Axis("concurrency", "concurrency", "concurrent requests", doubling=True)
RATE = Axis("rate", "arrival rate", "requests per second", doubling=True)
HERE = "here"
LENGTHS = (1, 2, 4)  # number of texts that are concatenated for a prompt
ROUNDS = 4  # default number of requests, in multiples of the concurrency
FEWEST = 8


Number = TypeVar("Number", int, float)


def _loads(value: Sequence[float]) -> Sequence[float]:
    if not (value and all(0 < one <= 1024 for one in value)):
        raise ValueError(f"loads must be above 0 and at most 1024, not {list(value)[:20]}")
    return value


def _above_zero(value: Number) -> Number:
    if not 0 < value < 1e9:
        raise ValueError(f"expected a number above 0, not {value}")
    return value


def _list(text: object, of: Callable[[str], object]) -> object:
    """Parse a list of numbers: `1,2,4` -> [1, 2, 4]."""
    if not isinstance(text, str):
        return text
    try:
        return [of(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"a load must be a number, or several like 1,2,4, not {text[:40]!r}") from None


def _curve(source: object) -> object:
    return read_curve(source) if isinstance(source, str) else source


Milliseconds = Annotated[float, AfterValidator(_above_zero)] | None


class LoadOptions(Prompted):
    """Suite under load, here or on a server."""

    preset: Annotated[str | None, PRESET] = None
    repeats: Repeats = 3
    engine: Annotated[str | None, Option(f"Serving engine to start: {engines.engine_names()}.", metavar="NAME")] = None
    servers: Annotated[
        Sequence[str] | None,
        Option("Running server, one per draft length; repeatable.", list[str], "URL", "--server"),
    ] = None
    command: Annotated[str | None, Option("Program of the engine, if it is not on PATH.", metavar="PATH")] = None
    gpus: Annotated[int, AfterValidator(_above_zero), Option("GPUs per server (tensor parallelism).", int)] = 1
    ks: Ks = (0, 1, 3, 5)
    concurrency: Annotated[
        Sequence[int],
        BeforeValidator(partial(_list, of=int)),
        AfterValidator(_loads),
        Option("Concurrent requests, for example 1,2,4.", metavar="N"),
    ] = (1, 2, 4, 8)
    rates: Annotated[
        Annotated[Sequence[float], BeforeValidator(partial(_list, of=float)), AfterValidator(_loads)] | None,
        Option(
            "Requests per second with Poisson arrivals, for example 0.5,2; instead of --concurrency.",
            metavar="R",
            flag="--rate",
        ),
    ] = None
    requests: Annotated[
        Annotated[int, AfterValidator(_above_zero)] | None,
        Option("Requests per load and repeat; default: four times the concurrency.", int),
    ] = None
    new_tokens: NewTokens = 64
    slo_ttft: Annotated[Milliseconds, Option("Largest time to first token of a good request, in ms.", float, "MS")] = (
        None
    )
    slo_itl: Annotated[
        Milliseconds, Option("Largest mean time per output token of a good request, in ms.", float, "MS")
    ] = None
    schedule: Annotated[bool, Option("Measure the resulting schedule of draft lengths as well.", bool)] = False
    lengths: Annotated[
        Annotated[Curve, BeforeValidator(_curve), PlainSerializer(lambda curve: curve.title, when_used="json")] | None,
        Option(
            "Mean accepted lengths by k (golden_al_distribution YAML or a result of `vllm bench serve`). The servers "
            "accept draft tokens at random with these lengths; their texts are meaningless.",
            metavar="FILE[:on|off]",
        ),
    ] = None
    journal: Annotated[
        Path | None, Option("File of finished points, from which an interrupted run continues.", Path, flag="--out")
    ] = None

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        if self.servers and (self.engine or self.command or self.schedule):
            raise ValueError("--server is for running servers; omit --engine, --command and --schedule")
        if self.here and (self.rates or self.command or self.schedule or self.gpus > 1):
            raise ValueError(
                f"--rate, --schedule, --command and --gpus need servers; add --server URL or --engine {engines.DEFAULT}"
            )
        if not self.here and self.device != "auto":
            raise ValueError(
                "--device needs --engine here; choose the device of a server in the command that starts it"
            )
        if self.schedule and (self.rates or not self.serving_engine.takes_schedule):
            able = " or ".join(engine.title for engine in engines.ENGINES.values() if engine.takes_schedule)
            raise ValueError(f"--schedule needs {able} and --concurrency; omit --schedule, or --engine and --rate")
        if self.lengths is not None:
            self._check_lengths(self.lengths)
        return self

    def _check_lengths(self, curve: Curve) -> None:
        """Raise ValueError if the engine takes no lengths or a draft length has none."""
        if self.here or self.servers or not self.serving_engine.takes_length:
            able = " or ".join(name for name, engine in engines.ENGINES.items() if engine.takes_length)
            raise ValueError(f"--lengths needs servers that specdemo starts; add --engine {able}")
        for k in self.ks:
            if k:
                curve.length(k)

    @property
    def here(self) -> bool:
        """Return whether the local engine is under load. It is, unless servers are given."""
        servers = (self.servers, self.command, self.schedule, self.rates, self.gpus > 1)
        return self.engine == HERE or (self.engine is None and not any(servers))

    @property
    def serving_engine(self) -> ServingEngine:
        """Return the engine of the servers. Raises ValueError for an unknown one, and for one without batches."""
        engine = engines.serving_engine(self.engine or engines.DEFAULT)
        if not engine.concurrent:
            able = " or ".join(name for name, other in engines.ENGINES.items() if other.concurrent)
            raise ValueError(f"specdemo starts {engine.title} for one request at a time; use --engine {able}")
        return engine

    @property
    def preset_id(self) -> str:
        """Return the preset to measure. Running servers are assumed to serve it only if it was given."""
        return self.preset or DEFAULT

    @property
    def over(self) -> Axis:
        """Return the axis of the loads."""
        return RATE if self.rates else CONCURRENCY

    @property
    def loads(self) -> Sequence[float]:
        """Return the loads in increasing order."""
        return sorted({*(self.rates or self.concurrency)})

    @property
    def texts(self) -> Sequence[str]:
        """Return the given prompts, or the default ones in several lengths, which alternate."""
        ring = [*PROMPTS, *PROMPTS]
        return self.prompts or [" ".join(ring[i : i + n]) for i in range(len(PROMPTS)) for n in LENGTHS]

    def count(self, load: float, warm_up: bool) -> int:
        """Return the number of requests at a load."""
        at_once = FEWEST if self.rates else int(load)
        return at_once if warm_up else self.requests or max(FEWEST, ROUNDS * at_once)

    def config(self, target: str) -> dict[str, object]:
        """Return the options for the result's file, without the journal, and without a target that is not known."""
        config = {"preset": self.preset_id, **super().config(target)}
        unknown = ["target", "preset"] if self.servers and not self.preset else []
        return {name: value for name, value in config.items() if name not in ["journal", *unknown]}
