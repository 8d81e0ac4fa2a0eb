"""What the load suite takes. Needs no torch."""

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass

from specdemo.bench.base import Axis, Suite
from specdemo.presets.files import DEFAULT

CONCURRENCY = Axis("concurrency", "concurrency", "requests at a time", doubling=True)
RATE = Axis("rate", "arrival rate", "requests a second", doubling=True)


@dataclass(frozen=True, kw_only=True)
class LoadOptions(Suite, ABC):
    """Servers, what they draft, and what they are asked at a time."""

    repeats: int = 3
    preset: str = DEFAULT
    engine: str | None = None
    servers: Sequence[str] | None = None
    command: str | None = None
    gpus: int = 1
    ks: Sequence[int] = (0, 1, 3, 5)
    concurrency: Sequence[int] = (1, 2, 4, 8)
    rates: Sequence[float] | None = None
    requests: int | None = None
    prompts: Sequence[str] | None = None
    new_tokens: int = 64
    slo_ttft: float | None = None
    slo_itl: float | None = None
    schedule: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.servers and (self.engine or self.command or self.schedule):
            raise ValueError("--server names servers that run already; leave --engine, --command and --schedule out")
        if self.schedule and (self.rates or self.engine not in (None, "vllm")):
            raise ValueError("a schedule is vLLM's and by concurrency; leave --schedule out, or --engine and --rate")

    @property
    def over(self) -> Axis:
        """What the loads are."""
        return RATE if self.rates else CONCURRENCY

    @property
    def loads(self) -> Sequence[float]:
        """They themselves, growing."""
        return sorted({*(self.rates or self.concurrency)})
