"""Fairness of the race: a slow lane must not change the other lane's clock."""

import time
from collections.abc import Callable
from statistics import fmean
from typing import Any

import torch

from specdemo.bench.base import Report, Tick
from specdemo.bench.measure import run_repeats
from specdemo.bench.prompts import PROMPTS
from specdemo.bench.result import Result
from specdemo.core.estimate import over_repeats
from specdemo.core.protocol import Budget, Drafter, GenerationConfig, Target
from specdemo.core.trace import StepEvent, step_ms
from specdemo.core.tree import Draft
from specdemo.engine.loop import generate
from specdemo.engine.messages import race
from specdemo.engine.session import environment
from specdemo.methods import BASELINE, load_drafter
from specdemo.methods.base import Method
from specdemo.methods.wrapper import Wrapper
from specdemo.models.load import load_target
from specdemo.models.text import encode

NEW_TOKENS = 96
STALL_MS = 20.0


def race_fairness(repeats: int, report: Report, cancelled: Callable[[], bool]) -> Result:
    """Race a plain lane against a draft lane, once unchanged and once slowed down."""
    target, other = load_target("stories"), load_target("stories")
    drafter = load_drafter("draft_model", other, "stories-draft-wide")
    names = ("its usual rival", f"a rival stalled {STALL_MS:.0f} ms a step")
    opponents: dict[str, Drafter] = dict(zip(names, (drafter, Stalled(drafter, STALL_MS)), strict=True))
    _race_once(target, other, drafter, PROMPTS[0])  # warm-up

    def once(_repeat: int, tick: Tick) -> dict[str, tuple[float, float]]:
        clocks = {}
        for number, (name, opponent) in enumerate(opponents.items()):
            tick(number / len(opponents))
            both = [_race_once(target, other, opponent, prompt) for prompt in PROMPTS[:3]]
            clocks[name] = fmean(plain for plain, _ in both), fmean(rival for _, rival in both)
        return clocks

    done, remarks = run_repeats(repeats, report, cancelled, once)
    rows: list[dict[str, Any]] = []
    for name in opponents:
        own, rival = (over_repeats([clocks[name][side] for clocks in done]) for side in (0, 1))
        rows.append({"plain lane beside": name, "its ms/token": own, "the rival's ms/token": rival})
    usual, stalled = (row["its ms/token"] for row in rows)
    widths = [each.width for each in (usual, stalled) if each.width is not None]
    noise = f"; its 95 % intervals are up to ±{max(widths):.1%} wide" if widths else ""
    remark = f"The plain lane's own clock changed by {stalled.value / usual.value - 1.0:+.1%}{noise}."
    config = {"target": "stories", "prompts": 3, "new_tokens": NEW_TOKENS, "stall_ms": STALL_MS}
    return Result("race-fairness", len(done), config, environment(target), rows, [remark, *remarks])


class Stalled(Wrapper):
    """A wrapper that wastes `ms` before every draft."""

    def __init__(self, drafter: Method, ms: float, now: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(drafter)
        self._seconds = ms / 1000.0
        self._now = now

    def propose(self, budget: Budget) -> Draft:
        end = self._now() + self._seconds
        while self._now() < end:  # a busy loop, like a slow draft; a sleeping core would lower its clock
            pass
        return super().propose(budget)


def _race_once(target: Target, other: Target, opponent: Drafter, prompt: str) -> tuple[float, float]:
    """Return milliseconds per token on the clocks of the plain lane and of its opponent."""
    tokenizer = target.tokenizer
    assert tokenizer is not None
    ids = torch.tensor([encode(tokenizer, prompt, target.max_length - NEW_TOKENS)], device=target.device)
    config = GenerationConfig(NEW_TOKENS, budget=Budget(4, 4), stop_token_ids=())
    lanes = [generate(target, load_drafter(BASELINE, target), ids, config), generate(other, opponent, ids, config)]
    events: list[list[StepEvent]] = [[], []]
    for index, event in race(lanes):
        events[index].append(event)
    plain, rival = (sum(map(step_ms, e[1:])) / (NEW_TOKENS - 1) for e in events)
    return plain, rival
