"""The load suite: what it asks and takes. Needs no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specdemo.bench.base import Axis, Prompted
from specdemo.bench.prompts import PROMPTS
from specdemo.core.suggest import program
from specdemo.presets.files import DEFAULT

CONCURRENCY = Axis("concurrency", "concurrency", "requests at a time", doubling=True)
RATE = Axis("rate", "arrival rate", "requests a second", doubling=True)
HERE = "here"
LENGTHS = (1, 2, 4)  # of the suite's texts, one behind the other
ROUNDS = 4  # requests for each that is at work at a time, unless told
FEWEST = 8


@dataclass(frozen=True, kw_only=True)
class Load(Prompted):
    """The first lane of a preset under load at every draft length: throughput, latency, the schedule for servers."""

    name = "load"
    title = "Load"
    question = (
        "Where does the gain die under load? Throughput against latency, from one request at a time to many: a curve "
        "per draft length of the preset's first lane. Here requests at a time are the rows of a batch; "
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
            raise ValueError("--server names servers that run already; leave --engine, --command and --schedule out")
        if self.here and (self.rates or self.command or self.schedule or self.gpus > 1):
            raise ValueError(
                "--rate, --schedule, --command and --gpus are for servers; name them, or start some with --engine vllm"
            )
        if not self.here and self.device != "auto":
            raise ValueError("--device is for --engine here; a server is told its device where it is started")
        if self.schedule and (self.rates or self.engine not in (None, "vllm")):
            raise ValueError("a schedule is vLLM's and by concurrency; leave --schedule out, or --engine and --rate")

    @property
    def here(self) -> bool:
        """Return whether the local engine is under load. It is, unless servers are given."""
        servers = (self.servers, self.command, self.schedule, self.rates, self.gpus > 1)
        return self.engine == HERE or (self.engine is None and not any(servers))

    @property
    def preset_id(self) -> str:
        """The preset to measure. Servers that run already serve it only if it was given."""
        return self.preset or DEFAULT

    @property
    def over(self) -> Axis:
        """Return the axis of the loads."""
        return RATE if self.rates else CONCURRENCY

    @property
    def loads(self) -> Sequence[float]:
        """They themselves, growing."""
        return sorted({*(self.rates or self.concurrency)})

    @property
    def texts(self) -> Sequence[str]:
        """The prompts given, else the suite's own in several lengths, which take turns."""
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
