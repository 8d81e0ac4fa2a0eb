"""The engine beside vLLM on a CPU: whole requests of one greedy text at a time, in turns, one thread each.

A lane's speed is that of the tokens behind the first SHORT, by difference: neither prompt nor connection counts. Only
whole answers are timed, so bunches do not count either.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx
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
from specdemo.models.hub import embedded_folder
from specdemo.models.load import load_target
from specdemo.models.machine import one_thread
from specdemo.models.target import HFTarget
from specdemo.models.text import encode
from specdemo.presets.files import Preset, preset
from specdemo.presets.serve import serving

if TYPE_CHECKING:
    from benchmarks import Beside

SHORT = 16  # tokens
PATIENCE_S = 300.0
OURS, THEIRS = "here", "vLLM"

Ask = Callable[[Sequence[int], int], list[int]]  # a prompt's ids and a number of tokens -> the ids that follow


@dataclass(frozen=True, slots=True)
class Round:
    """One repeat of a lane: seconds of the long and of the short requests, and what the long ones wrote."""

    long_s: float
    short_s: float
    written: list[list[int]]


def beside(suite: "Beside", report: Report, cancelled: Callable[[], bool]) -> Result:
    """The baseline and the first lane of a preset here and on vLLM. Raises ValueError where vLLM does not start."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # which the servers inherit
    chosen = preset(suite.preset).with_changes(dtype=suite.dtype, temperature=0.0)
    chosen = chosen.model_copy(update={"lanes": chosen.lanes[:1]})
    target = load_target(chosen.target, device="cpu", dtype=suite.dtype)
    assert target.tokenizer is not None
    prompts = [encode(target.tokenizer, text, target.max_length - suite.new_tokens) for text in PROMPTS]
    with one_thread(target.device), _asked(chosen, target, suite.command, report) as lanes:
        for ask in lanes.values():
            _round(ask, prompts, suite.new_tokens)  # off the clock

        def once(repeat: int, tick: Tick) -> dict[str, Round]:
            tick(0.0)
            return {name: _round(ask, prompts, suite.new_tokens) for name, ask in lanes.items()}

        done, remarks = repeated(suite.repeats, report, cancelled, once)
    rows = [_row(name, done, suite.new_tokens - SHORT) for name in done[0]]
    return Result("beside", len(done), suite.config(chosen.target), environment(target), rows, remarks, "lane")


@contextmanager
def _asked(chosen: Preset, target: HFTarget, command: str | None, report: Report) -> Iterator[Mapping[str, Ask]]:
    """Every lane's way to be asked: here first, then the same lane on vLLM."""
    asks: dict[str, Ask] = {}
    started = serving(chosen, "vllm", embedded_folder(), lambda said: report(0.0, said), command)
    with started as onto, httpx.Client(timeout=PATIENCE_S) as http:
        for lane in onto.all_lanes:
            drafter = load_drafter(lane.method, target, lane.model, **lane.options)
            asks[f"{lane.method}, {OURS}"] = _here(target, drafter, lane)
            asks[f"{lane.method}, {THEIRS}"] = _there(http, lane, chosen.target)
        yield asks


def _here(target: HFTarget, drafter: Method, lane: Lane) -> Ask:
    def ask(prompt: Sequence[int], tokens: int) -> list[int]:
        config = GenerationConfig(tokens, budget=lane.budget, stop_token_ids=())
        steps = generate(target, drafter, torch.tensor([prompt]), config)
        return [token for event in steps for token in event.emitted[0]]

    return ask


def _there(http: httpx.Client, lane: Lane, model: str) -> Ask:
    def ask(prompt: Sequence[int], tokens: int) -> list[int]:
        how = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
        answer = http.post(f"{lane.server}/v1/completions", json={"model": model, "prompt": [*prompt], **how})
        ids: list[int] = answer.raise_for_status().json()["choices"][0]["token_ids"]
        return ids

    return ask


def _round(ask: Ask, prompts: Sequence[Sequence[int]], new_tokens: int) -> Round:
    began = time.perf_counter()
    written = [ask(prompt, new_tokens) for prompt in prompts]
    between = time.perf_counter()
    for prompt in prompts:
        ask(prompt, SHORT)
    return Round(between - began, time.perf_counter() - between, written)


def _row(name: str, done: Sequence[Mapping[str, Round]], tokens: int) -> Row:
    method, _, where = name.partition(", ")
    plain, theirs = f"{BASELINE}, {where}", f"{method}, {THEIRS}"
    count = tokens * len(done[0][name].written)

    def speed(lane: str, rounds: Mapping[str, Round]) -> float:
        return count / (rounds[lane].long_s - rounds[lane].short_s)

    same = sum(a == b for a, b in zip(done[-1][name].written, done[-1][theirs].written, strict=True))
    return {
        "lane": name,
        "tokens/s": over_repeats([speed(name, rounds) for rounds in done]),
        "speed-up": over_repeats([speed(name, rounds) / speed(plain, rounds) for rounds in done]),
        "of vLLM's": over_repeats([speed(name, rounds) / speed(theirs, rounds) for rounds in done]),
        "whole requests of vLLM's": over_repeats([rounds[theirs].long_s / rounds[name].long_s for rounds in done]),
        "output": "identical" if same == len(done[0][name].written) else f"{same} identical",
    }
