"""Adaptive k against every fixed k, per kind of text."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from specdemo.bench.base import Report
from specdemo.bench.measure import Tick, Totals, repeated
from specdemo.bench.result import Result, Row
from specdemo.bench.sweeps import KINDS
from specdemo.core.estimate import over_repeats, rate
from specdemo.core.protocol import Budget, GenerationConfig
from specdemo.engine.loop import generate
from specdemo.engine.session import environment
from specdemo.engine.warm_up import warm_up
from specdemo.methods import BASELINE, load_drafter
from specdemo.methods.base import Method
from specdemo.methods.draft_model import DraftModel
from specdemo.models.load import load_target
from specdemo.models.target import HFTarget
from specdemo.models.text import encode

DRAFTS = {"stories": "stories-draft-wide", "code": "code-draft"}
DEEPEST = 8
STARTS, SPACING = 4, 2  # starting points per answer, so that one lucky start does not decide
ADAPTIVE = "adaptive"


@dataclass(slots=True)
class Contest:
    """All drafters on one kind of text, text by text in random order."""

    target: HFTarget
    fixed: DraftModel
    prompts: list[Tensor]  # prompts with the first tokens of the answer
    new_tokens: int
    ways: dict[str, tuple[Method, int]] = field(default_factory=dict)  # name -> drafter and k
    order: random.Random = field(default_factory=random.Random)

    def once(self, repeat: int, tick: Tick) -> dict[str, Totals]:
        """Run all drafters once. `adaptive` is created anew every second repeat, so half of its learning cost is
        included.
        """
        if repeat % 2 == 0:
            made = load_drafter(ADAPTIVE, self.target, self.fixed.model)
            self.ways = {f"k = {k}": (self.fixed, k) for k in range(1, DEEPEST + 1)} | {ADAPTIVE: (made, DEEPEST)}
            for drafter, k in self.ways.values():
                warm_up(self.target, drafter, self.prompts[0], self._config(k))
        start = repeat // 2 % STARTS
        seen = {name: Totals() for name in self.ways}
        for number, prompt in enumerate(self.prompts):
            tick(number / len(self.prompts))
            ids = prompt[:, : prompt.shape[1] - SPACING * (STARTS - 1 - start)]
            for name in self.order.sample([*self.ways], len(self.ways)):
                drafter, k = self.ways[name]
                seen[name].add([*generate(self.target, drafter, ids, self._config(k))])
        return seen

    def _config(self, k: int) -> GenerationConfig:
        return GenerationConfig(self.new_tokens, budget=Budget(k, k), stop_token_ids=())


def lengths(repeats: int, new_tokens: int, report: Report, cancelled: Callable[[], bool]) -> Result:
    """Run the contest. repeats: a multiple of twice PLACES treats all starting points equally."""
    rows: list[Row] = []
    remarks: list[str] = []
    for name, kinds in KINDS.items():
        target = load_target(name)
        fixed = load_drafter("draft_model", target, DRAFTS[name])
        assert isinstance(fixed, DraftModel)
        for kind, texts in kinds.items():
            prompts = [_answered(target, text) for text in texts]
            contest = Contest(target, fixed, prompts, new_tokens, order=random.Random(0))
            done, stopped = repeated(repeats, partial(_report_row, report, kind), cancelled, contest.once)
            rows += _rows(kind, done)
            remarks += stopped
    return Result("lengths", repeats, {"new_tokens": new_tokens}, environment(target), rows, remarks, "text")


def _report_row(report: Report, kind: str, share: float, what: str) -> None:
    report(share, f"{kind}, {what}")


def _answered(target: HFTarget, text: str) -> Tensor:
    """Return the ids of a prompt and of the start of the target's answer, [1, T]."""
    assert target.tokenizer is not None
    ids = torch.tensor([encode(target.tokenizer, text, target.max_length)])
    config = GenerationConfig(SPACING * (STARTS - 1), stop_token_ids=())
    answer = [t for event in generate(target, load_drafter(BASELINE, target), ids, config) for t in event.emitted[0]]
    return torch.cat([ids, torch.tensor([answer])], 1)


def _rows(kind: str, done: list[dict[str, Totals]]) -> list[Row]:
    """Return the speed of every drafter relative to the best fixed k, which is chosen afterwards."""
    speeds = {name: [_speed(seen[name]) for seen in done] for name in done[0]}
    best = max((name for name in speeds if name != ADAPTIVE), key=lambda name: sum(speeds[name]))
    rows: list[Row] = []
    for name, own in speeds.items():
        every = Totals([row for seen in done for row in seen[name].rows])
        ratio = over_repeats([a / b for a, b in zip(own, speeds[best], strict=True)])
        details = {"tokens/pass": every.tokens_per_pass, "accepted": every.acceptance_rate}
        rows.append({"text": kind, "lane": name, "of the best": ratio, **details})
    return rows


def _speed(seen: Totals) -> float:
    speed = rate(seen.runs)
    return speed.value if speed else 0.0
