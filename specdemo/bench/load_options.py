"""Options of the load suite. Needs no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specdemo.bench.base import Axis, Prompted
from specdemo.bench.prompts import PROMPTS
from specdemo.core.suggest import program
from specdemo.presets.files import DEFAULT
from specdemo.servers import engines
from specdemo.servers.engines.base import ServingEngine

CONCURRENCY = Axis("concurrency", "concurrency", "concurrent requests", doubling=True)
RATE = Axis("rate", "arrival rate", "requests per second", doubling=True)
HERE = "here"
LENGTHS = (1, 2, 4)  # number of texts that are concatenated for a prompt
ROUNDS = 4  # default number of requests, in multiples of the concurrency
FEWEST = 8


@dataclass(frozen=True, kw_only=True)
class Load(Prompted):
    """Measures throughput and latency of a preset's first lane under load, and derives a schedule for servers."""

    name = "load"
    title = "Load"
    question = (
        "At which load does the gain end? Throughput against latency at increasing concurrency, with a curve per draft "
        "length of the preset's first lane. In specdemo's engine, concurrent requests are the rows of a batch; "
        f"`{program()} bench load --engine vllm` measures the same on a server."
    )
    axis = CONCURRENCY
    measured_by = "specdemo.bench.load:load"
    preset: str | None = None
    repeats: int = 3
    engine: str | None = None
    servers: Sequence[str] | None = None
    command: str | None = None
    gpus: int = 1
    ks: Sequence[int] = (0, 1, 3, 5)
    concurrency: Sequence[int] = (1, 2, 4, 8)
    rates: Sequence[float] | None = None
    requests: int | None = None
    new_tokens: int = 64
    slo_ttft: float | None = None
    slo_itl: float | None = None
    schedule: bool = False
    journal: Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.servers and (self.engine or self.command or self.schedule):
            raise ValueError("--server is for running servers; omit --engine, --command and --schedule")
        if self.here and (self.rates or self.command or self.schedule or self.gpus > 1):
            raise ValueError("--rate, --schedule, --command and --gpus need servers; add --server URL or --engine vllm")
        if not self.here and self.device != "auto":
            raise ValueError(
                "--device needs --engine here; choose the device of a server in the command that starts it"
            )
        if self.schedule and (self.rates or not self.serving_engine.takes_schedule):
            able = " or ".join(engine.title for engine in engines.ENGINES.values() if engine.takes_schedule)
            raise ValueError(f"--schedule needs {able} and --concurrency; omit --schedule, or --engine and --rate")

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
