"""Speed beside another program that takes a core: threads that wait for a core delay all others."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from specdemo.bench.base import Report, Tick
from specdemo.bench.measure import run_repeats
from specdemo.bench.prompts import COPYING
from specdemo.bench.result import Result
from specdemo.core.estimate import over_repeats
from specdemo.core.protocol import Budget, Drafter, GenerationConfig, Target
from specdemo.engine.loop import generate
from specdemo.engine.session import environment
from specdemo.methods import BASELINE, load_drafter
from specdemo.models.cpu_threads import thread_limit, usable_cores
from specdemo.models.load import load_target
from specdemo.models.pass_cost import measure_passes
from specdemo.models.text import encode

K = 4  # draft tokens
LOOP = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"


def busy_core(name: str, repeats: int, new_tokens: int, report: Report, cancelled: Callable[[], bool]) -> Result:
    """Measure plain decoding and prompt lookup with one thread and with all, in quiet and with a core taken, in turns.

    Raises ValueError on a machine with one core, and where a program cannot be pinned to one.
    """
    cores = usable_cores()
    if cores < 2 or not hasattr(os, "sched_setaffinity"):
        raise ValueError("a core cannot be taken here; run this on Linux with two cores or more")
    target = load_target(name)
    measure_passes(target)
    lanes = {"plain": load_drafter(BASELINE, target), f"prompt lookup, k={K}": load_drafter("ngram", target)}
    for drafter in lanes.values():
        _tokens_per_s(target, drafter, new_tokens)  # warm-up

    def once(_repeat: int, tick: Tick) -> dict[tuple[str, bool, int], float]:
        speeds = {}
        for place, taken in enumerate((False, True)):
            tick(place / 2)
            with _loop(max(os.sched_getaffinity(0)), taken):
                for threads in (1, cores):
                    target.threads = threads
                    for lane, drafter in lanes.items():
                        speeds[lane, taken, threads] = _tokens_per_s(target, drafter, new_tokens)
        return speeds

    done, remarks = run_repeats(repeats, report, cancelled, once)
    rows: list[dict[str, Any]] = []
    for lane in lanes:
        for taken in (False, True):
            one, several = (over_repeats([speeds[lane, taken, n] for speeds in done]) for n in (1, cores))
            ratio = over_repeats([speeds[lane, taken, cores] / speeds[lane, taken, 1] for speeds in done])
            condition = "one core taken" if taken else "quiet"
            tokens = {"one thread, tokens/s": one, f"{cores} threads, tokens/s": several}
            rows.append({"lane": lane, "machine": condition, **tokens, f"{cores} threads / one": ratio})
    config = {"target": target.name, "new_tokens": new_tokens, "k": K}
    return Result("busy-core", len(done), config, environment(target), rows, remarks)


@contextmanager
def _loop(core: int, taken: bool) -> Iterator[None]:
    """Run a busy loop on a core until the block ends."""
    if not taken:
        yield
        return
    with subprocess.Popen([sys.executable, "-c", LOOP, str(core)]) as process:
        try:
            yield
        finally:
            process.kill()


def _tokens_per_s(target: Target, drafter: Drafter, new_tokens: int) -> float:
    """Return the speed of a run of its own in wall time, from the first token on."""
    tokenizer = target.tokenizer
    assert tokenizer is not None
    prompt = torch.tensor([encode(tokenizer, COPYING[0], target.max_length - new_tokens)], device=target.device)
    thread_limit.start_run()
    config = GenerationConfig(new_tokens, budget=Budget(K, K), stop_token_ids=())
    steps = generate(target, drafter, prompt, config)
    next(steps)  # the first token, after the prompt
    start = time.perf_counter()
    count = sum(len(event.emitted[0]) for event in steps)
    return count / (time.perf_counter() - start)
