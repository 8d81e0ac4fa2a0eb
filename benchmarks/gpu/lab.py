"""Shared parts of the sections: the device, its loaded models, and how a step is measured."""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from random import Random
from statistics import fmean, median
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor
from transformers import PreTrainedModel

from specdemo.analysis.configs import shape
from specdemo.bench.device import copy_bandwidth, fast, read_bandwidth
from specdemo.bench.random_models import random_model
from specdemo.core.accept import AcceptResult, Lossless
from specdemo.core.protocol import Drafter, GenerationConfig
from specdemo.core.trace import StepEvent, step_ms
from specdemo.core.tree import ABSENT, Draft
from specdemo.engine.loop import generate
from specdemo.models.devices import DTYPES, device_kind, now, pick_dtype
from specdemo.models.machine import commit
from specdemo.models.target import HFTarget

ROOM = 1.2  # memory in multiples of the weights: fused matrices, caches, CUDA graphs
PROMPT = 64  # tokens of a prompt
RATES = (0.8, 0.78, 0.76, 0.74)  # synthetic acceptance rates by position; the last one repeats


@dataclass(slots=True)
class Found:
    """Result of a section. The cells of a row are text or numbers; column names include the unit. profile: the fields
    of the device profile that it measured.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    profile: dict[str, Any] = field(default_factory=dict)


class Absent(RuntimeError):
    """A model or package that is not available here. It is reported as a remark, not as a failure."""


class Lab:
    """One device with at most one loaded model."""

    def __init__(self, device: torch.device, repeats: int, shape: str = "", commit: str = "") -> None:
        """shape: for method measurements; empty: see `main`. commit: of a copy without its git folder."""
        self.device, self.repeats, self._shape, self._commit = device, repeats, shape, commit
        self.small = device.type == "cpu"  # a trial on a CPU
        self._loaded: tuple[Any, HFTarget] | None = None

    @cached_property
    def bandwidth(self) -> float:
        """Return bytes per second."""
        return max(copy_bandwidth(self.device), read_bandwidth(self.device, self.dtype()))

    def dtype(self, name: str = "auto") -> torch.dtype:
        return pick_dtype(name, self.device)

    def fits(self, name: str, dtype: torch.dtype, bits: int | None = None) -> bool:
        return ROOM * _bytes(name, dtype, bits) <= device_kind(self.device).free(self.device)

    def model(self, name: str, dtype: torch.dtype, bits: int | None = None) -> PreTrainedModel:
        """Load a model as transformers creates it. Raises Absent."""
        self.forget()
        if not self.fits(name, dtype, bits):
            needed, free = _bytes(name, dtype, bits) * ROOM, device_kind(self.device).free(self.device)
            raise Absent(f"{name} needs {needed / 1e9:.0f} GB and {free / 1e9:.0f} GB are free")
        try:
            return random_model(name, self.device, dtype, bits)
        except ImportError as error:
            raise Absent(f"{bits}bit needs bitsandbytes ({error})") from None

    def target(self, name: str, dtype: torch.dtype, bits: int | None = None) -> HFTarget:
        """Load a model as a lane runs it and cache the last one. Raises Absent."""
        key = name, dtype, bits
        if self._loaded is None or self._loaded[0] != key:
            self._loaded = key, fast(self.model(name, dtype, bits))
        return self._loaded[1]

    @property
    def commit(self) -> str | None:
        return self._commit or commit()

    @property
    def main(self) -> str:
        """Return the shape for method measurements: the largest that leaves room for heads and a draft model."""
        if self.small:
            return "llama-tiny"
        if self._shape:
            return self._shape
        free = device_kind(self.device).total(self.device)
        return "llama-8b" if 1.8 * _bytes("llama-8b", self.dtype()) <= free else "llama-1b"

    def forget(self) -> None:
        self._loaded = None
        gc.collect()
        with suppress(RuntimeError):  # the CUDA context may be lost
            device_kind(self.device).empty_cache()

    def prompt(self, target: HFTarget, period: int = 16) -> Tensor:
        """Return [1, PROMPT] tokens with repetitions, so that lookup methods find matches."""
        tokens = 1 + torch.arange(PROMPT, device=self.device) % period
        return tokens[None] % target.vocab_size

    def alive(self) -> bool:
        """Return whether the device still computes. An illegal memory access ends its context."""
        try:
            return bool((torch.ones(1, device=self.device) + 1.0).item() == 2.0)
        except RuntimeError:
            return False


class Synthetic:
    """Acceptance with fixed rates, independent of the target, for true costs where real texts are not available.

    The exact rule runs as well, so that its time is included. The output continues with the draft's next token as if
    the target had chosen it, or with `usual` [1], so that lookup methods find matches. One row.
    """

    exact: ClassVar[bool] = False
    note: ClassVar[str] = ""

    def __init__(self, usual: Tensor, rates: tuple[float, ...] = RATES, seed: int = 0) -> None:
        self._usual, self._rates, self._coins, self._rule = usual, rates, Random(seed), Lossless()

    def __call__(self, draft: Draft, target: Tensor, rng: Generator | None) -> AcceptResult:
        verdict = self._rule(draft, target, rng)
        if not draft.nodes:
            return AcceptResult(verdict.path, self._usual)
        first: dict[int, int] = {}  # slot -> first child
        tokens, parents = torch.stack([draft.tokens[0], draft.parents[0]]).tolist()
        for slot, (token, parent) in enumerate(zip(tokens, parents, strict=True), start=1):
            if token != ABSENT:
                first.setdefault(parent, slot)
        path = [0]
        while path[-1] in first and self._coins.random() < self._rates[min(len(path), len(self._rates)) - 1]:
            path.append(first[path[-1]])
        after = first.get(path[-1])
        return AcceptResult([path], self._usual if after is None else draft.tokens[:, after - 1])


@dataclass(frozen=True, slots=True)
class Steps:
    """Means over the steps of a run, medians over the runs."""

    ms: Mapping[str, float]  # by part of the step
    step_ms: float
    wall_ms: float  # wall time of a step, including the time between steps
    drafted: float
    accepted: float
    emitted: float

    @property
    def tokens_per_s(self) -> float:
        return 1000.0 * self.emitted / self.step_ms


def measure_steps(lab: Lab, target: HFTarget, drafter: Drafter, config: GenerationConfig) -> Steps:
    """Measure steps after one run that warms up and captures graphs."""
    prompt = lab.prompt(target)
    runs: list[list[StepEvent]] = []
    wall_ms: list[float] = []
    for repeat in range(lab.repeats + 1):
        steps = generate(target, drafter, prompt, config, accept=Synthetic(prompt[:, 0], seed=repeat))
        next(steps)  # the prefill
        begin = now(lab.device)
        events = list(steps)
        if repeat:
            wall_ms.append(1000.0 * (now(lab.device) - begin) / len(events))
            runs.append(list(_full_drafts(events, config)))

    def over_runs(of: Callable[[StepEvent], float], middle: Callable[[list[float]], float] = median) -> float:
        return middle([fmean(map(of, run)) for run in runs])

    def lap_ms(lap: str) -> float:
        return over_runs(lambda event: event.ms.get(lap, 0.0))

    return Steps(
        {lap: lap_ms(lap) for lap in runs[0][-1].ms},
        over_runs(step_ms),
        median(wall_ms),
        over_runs(lambda event: sum(token != ABSENT for token in event.drafted[0]), fmean),
        over_runs(lambda event: len(event.path[0]) - 1, fmean),
        over_runs(lambda event: len(event.emitted[0]), fmean),
    )


def _bytes(name: str, dtype: torch.dtype, bits: int | None = None) -> float:
    """Return the bytes of the weights of a model of that shape."""
    return shape(name, f"{bits}bit" if bits else None).weight_bytes(dtype.itemsize)


def _full_drafts(events: list[StepEvent], config: GenerationConfig) -> Iterator[StepEvent]:
    """Drop the last steps, which had no room for a full draft."""
    left = config.max_new_tokens - 1
    for event in events:
        if left > config.budget.depth:
            yield event
        left -= len(event.emitted[0])


def name_of(dtype: torch.dtype) -> str:
    return next(name for name, known in DTYPES.items() if known == dtype)
