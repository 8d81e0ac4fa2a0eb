"""Comparison with vLLM or llama.cpp on a CPU: requests with one greedy text each, interleaved, one thread per engine.

A lane's speed counts the tokens after the first SHORT, by difference, in CPU time of its processes. Neither the prompt
nor other programs count. Only complete answers are timed, so chunking has no effect.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx
import psutil
import torch

from specdemo.bench.base import Report
from specdemo.bench.measure import Tick, repeated
from specdemo.bench.prompts import PROMPTS
from specdemo.bench.result import Result, Row
from specdemo.core.estimate import over_repeats
from specdemo.core.protocol import GenerationConfig
from specdemo.engine.comparison import Lane
from specdemo.engine.loop import generate
from specdemo.engine.session import environment
from specdemo.methods import BASELINE, load_drafter
from specdemo.methods.base import Method
from specdemo.models.load import load_target
from specdemo.models.machine import threads
from specdemo.models.target import HFTarget
from specdemo.models.text import encode
from specdemo.presets.files import Preset, preset
from specdemo.presets.serve import serving
from specdemo.servers.address import TITLES, Engine, known_engine

if TYPE_CHECKING:
    from benchmarks import EngineComparison

SHORT = 16  # tokens of a short request
PATIENCE_S = 300.0
LOCAL = "here"

# a prompt's ids and a number of tokens -> the ids that follow
RequestFunction = Callable[[Sequence[int], int], list[int]]


@dataclass(frozen=True, slots=True)
class TimedLane:
    """A lane and its clock, which returns CPU seconds."""

    request: RequestFunction
    clock: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Round:
    """One repeat of a lane: CPU seconds of the long and the short requests, wall seconds of the long ones, and their
    outputs.
    """

    long_s: float
    short_s: float
    wall_s: float
    written: list[list[int]]


def compare_engines(suite: "EngineComparison", report: Report, cancelled: Callable[[], bool]) -> Result:
    """Compare the baseline and the first lane of a preset on both engines. Raises ValueError if the other engine does
    not start.
    """
    count = int(os.environ.setdefault("OMP_NUM_THREADS", "1"))  # the servers inherit it
    chosen = preset(suite.preset).with_changes(dtype=suite.dtype, temperature=0.0)
    chosen = chosen.model_copy(update={"lanes": chosen.lanes[:1]})
    target = load_target(chosen.target, device="cpu", dtype=suite.dtype)
    assert target.tokenizer is not None
    prompts = [encode(target.tokenizer, text, target.max_length - suite.new_tokens) for text in PROMPTS]
    engine = known_engine(suite.engine or "vllm")
    with threads(count), _timed_lanes(chosen, target, engine, suite.command, report) as lanes:
        for lane in lanes.values():
            _round(lane, prompts, suite.new_tokens)  # warm-up

        def once(repeat: int, tick: Tick) -> dict[str, Round]:
            tick(0.0)
            return {name: _round(lane, prompts, suite.new_tokens) for name, lane in lanes.items()}

        done, remarks = repeated(suite.repeats, report, cancelled, once)
    rows = [_row(name, done, suite.new_tokens - SHORT) for name in done[0]]
    return Result("beside", len(done), suite.config(chosen.target), environment(target), rows, remarks, "lane")


@contextmanager
def _timed_lanes(
    chosen: Preset, target: HFTarget, engine: Engine, command: str | None, report: Report
) -> Iterator[Mapping[str, TimedLane]]:
    """Yield the request functions of all lanes: the local lanes first, then the same lanes on the other engine."""
    asks: dict[str, TimedLane] = {}
    asking = _llamacpp if engine == "llamacpp" else _vllm
    started = serving(chosen, engine, lambda said: report(0.0, said), command)
    with started as (onto, _), httpx.Client(timeout=PATIENCE_S) as http:
        for lane in onto.all_lanes:
            drafter = load_drafter(lane.method, target, lane.model, **lane.options)
            asks[f"{lane.method}, {LOCAL}"] = TimedLane(_here(target, drafter, lane), time.process_time)
            asks[f"{lane.method}, {TITLES[engine]}"] = TimedLane(asking(http, lane, chosen.target), _servers_s)
        yield asks


def _here(target: HFTarget, drafter: Method, lane: Lane) -> RequestFunction:
    def request(prompt: Sequence[int], tokens: int) -> list[int]:
        config = GenerationConfig(tokens, budget=lane.budget, stop_token_ids=())
        steps = generate(target, drafter, torch.tensor([prompt]), config)
        return [token for event in steps for token in event.emitted[0]]

    return request


def _llamacpp(http: httpx.Client, lane: Lane, model: str) -> RequestFunction:
    def request(prompt: Sequence[int], tokens: int) -> list[int]:
        how = {"n_predict": tokens, "temperature": 0.0, "ignore_eos": True, "return_tokens": True}
        answer = http.post(f"{lane.server}/completion", json={"prompt": [*prompt], **how})
        ids: list[int] = answer.raise_for_status().json()["tokens"]
        return ids

    return request


def _vllm(http: httpx.Client, lane: Lane, model: str) -> RequestFunction:
    def request(prompt: Sequence[int], tokens: int) -> list[int]:
        how = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
        answer = http.post(f"{lane.server}/v1/completions", json={"model": model, "prompt": [*prompt], **how})
        ids: list[int] = answer.raise_for_status().json()["choices"][0]["token_ids"]
        return ids

    return request


def _servers_s() -> float:
    """Return the CPU seconds of all processes started here. Idle servers use almost none."""
    times = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return float(sum(taken.user + taken.system for taken in times))


def _round(lane: TimedLane, prompts: Sequence[Sequence[int]], new_tokens: int) -> Round:
    wall, cpu_start = time.perf_counter(), lane.clock()
    written = [lane.request(prompt, new_tokens) for prompt in prompts]
    between, wall_s = lane.clock(), time.perf_counter() - wall
    for prompt in prompts:
        lane.request(prompt, SHORT)
    return Round(between - cpu_start, lane.clock() - between, wall_s, written)


def _row(name: str, done: Sequence[Mapping[str, Round]], tokens: int) -> Row:
    method, _, where = name.partition(", ")
    there = next(other.partition(", ")[2] for other in done[0] if not other.endswith(LOCAL))
    plain, other_name = f"{BASELINE}, {where}", f"{method}, {there}"
    count = tokens * len(done[0][name].written)

    def speed(lane: str, rounds: Mapping[str, Round]) -> float:
        return count / (rounds[lane].long_s - rounds[lane].short_s)

    same = sum(a == b for a, b in zip(done[-1][name].written, done[-1][other_name].written, strict=True))
    return {
        "lane": name,
        "tokens/s": over_repeats([speed(name, rounds) for rounds in done]),
        "speed-up": over_repeats([speed(name, rounds) / speed(plain, rounds) for rounds in done]),
        f"of {there}'s": over_repeats([speed(name, rounds) / speed(other_name, rounds) for rounds in done]),
        f"of {there}'s, whole requests": over_repeats(
            [rounds[other_name].long_s / rounds[name].long_s for rounds in done]
        ),
        "by the wall": over_repeats([rounds[other_name].wall_s / rounds[name].wall_s for rounds in done]),
        "output": "identical" if same == len(done[0][name].written) else f"{same} identical",
    }
