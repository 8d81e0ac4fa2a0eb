"""Losses for training drafters: tokens per pass on held-out text after the same fine-tuning of a shipped one."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from specdemo.bench.base import Report
from specdemo.bench.result import Result
from specdemo.bench.sweeps import tokenizer
from specdemo.core.estimate import Estimate, bootstrap
from specdemo.core.protocol import GenerationConfig, Target
from specdemo.core.sampling import Sampling
from specdemo.core.tally import Tally
from specdemo.engine.comparison import Lane
from specdemo.engine.loop import generate
from specdemo.engine.session import environment
from specdemo.methods import load_drafter
from specdemo.methods.base import Method
from specdemo.methods.recipes import trained_drafter
from specdemo.methods.targets import load_target
from specdemo.models.text import encode
from specdemo.presets.limits import LIMITS
from specdemo.training.collect import Plan
from specdemo.training.corpus import read_corpus
from specdemo.training.heads import START_RATES, TeacherSplit, build_dataset, save_head, train_head
from specdemo.training.losses import LOSSES, Objective

HEADS = {  # and draft models
    str(lane.model): lane
    for lane in (
        Lane(method="dflash", model="stories-dflash", k=4),
        Lane(method="draft_model", model="stories-draft-wide", k=4),
        Lane(method="eagle", model="stories-eagle-1", k=4, options={"draft": "chain"}),
        Lane(method="eagle", model="stories-eagle-3", k=4, options={"draft": "chain"}),
        Lane(method="mlp_speculator", model="stories-mlp-speculator", k=4, options={"draft": "chain"}),
    )
}
OBJECTIVES = [*(Objective(loss) for loss in LOSSES), Objective(weights="dpace")]
OPENING = 24  # tokens of a held-out document that are the prompt
CONTEXT = 256  # tokens of a row of teacher data
VALIDATION_ROWS = 8

Counts = list[tuple[int, int]]  # output tokens and target passes of every prompt


def losses(
    corpus: Path,
    cache: Path,
    out: Path,
    heads: Sequence[str],
    steps: int,
    batch_tokens: int,
    prompts: int,
    new_tokens: int,
    temperature: float,
    report: Report,
    cancelled: Callable[[], bool],
) -> Result:
    """Fine-tune every drafter with every objective on the same batches; measure tokens per pass on held-out openings.

    heads: names in `HEADS`. cache: teacher data, built if missing. out: folder of the fine-tuned drafters, which are
    not trained again.
    temperature: of the measurement.
    """
    target, fused = load_target("stories", kernels="transformers"), load_target("stories")
    openings = [encode(tokenizer(fused), text, LIMITS.prompt)[:OPENING] for text in read_corpus(corpus).valid]
    chosen = [torch.tensor([ids]) for ids in openings if len(ids) == OPENING][:prompts]
    taps = tuple(sorted({tap for name in heads for tap in _load(target, name).taps}))
    used = max(1, steps * batch_tokens // CONTEXT)  # rows, fewer than a third of them samples
    plan = Plan(text_rows=used, sampled_rows=-(-used // 3), rows_per_shard=32, context=CONTEXT, taps=taps)
    data = build_dataset(target, cache, plan, corpus)
    few = torch.arange(min(VALIDATION_ROWS, len(data.validation)))
    data = replace(data, validation=data.validation.select(few))
    rows: list[dict[str, Any]] = []
    for name in heads:
        shipped = count_passes(fused, _load(fused, name), HEADS[name], chosen, new_tokens, temperature)
        rows.append(_row(name, "shipped", shipped, shipped))
        for number, objective in enumerate(OBJECTIVES):
            if cancelled():
                break
            what = f"{objective.loss}, {objective.weights}"
            report((heads.index(name) + number / len(OBJECTIVES)) / len(heads), f"{name}: {what}")
            folder = out / f"{name}-{objective.loss}-{objective.weights}"
            _train(target, name, data, objective, folder, steps, batch_tokens)
            trained = count_passes(fused, _load(fused, name, folder), HEADS[name], chosen, new_tokens, temperature)
            rows.append(_row(name, what, trained, shipped))
            report((heads.index(name) + (number + 1) / len(OBJECTIVES)) / len(heads), f"{name}: {rows[-1]}")
    config = {"target": target.name, "steps": steps, "batch tokens": batch_tokens, "prompts": len(chosen)}
    config |= {"new tokens": new_tokens, "temperature": temperature}
    remark = f"Brackets: 95 % bootstrap interval over prompts. Learning rates: {START_RATES:g} times the recipe's."
    return Result("head-losses", 1, config, environment(target), rows, [remark])


def _load(target: Target, name: str, folder: Path | None = None) -> Method:
    """Load a shipped drafter, or the one that was fine-tuned from it in `folder`."""
    lane = HEADS[name]
    return load_drafter(lane.method, target, str(folder or name), **lane.options)


def _train(
    target: Target,
    name: str,
    data: TeacherSplit,
    objective: Objective,
    folder: Path,
    steps: int,
    batch_tokens: int,
) -> None:
    """Fine-tune a shipped drafter for `steps` steps and save it."""
    torch.manual_seed(0)
    drafter = trained_drafter(HEADS[name].method, target, name)
    drafter.objective = objective
    folder.mkdir(parents=True, exist_ok=True)
    seconds = count()  # every step takes a second of this clock
    clock = partial(next, seconds)
    *_, last = train_head(drafter, target, data, folder, steps / 60, batch_tokens, clock, START_RATES)
    save_head(drafter, target, folder, last.history, data, start=name, **asdict(objective))


def count_passes(
    target: Target,
    drafter: Method,
    lane: Lane,
    prompts: Sequence[torch.Tensor],
    new_tokens: int,
    temperature: float,
) -> Counts:
    """Return output tokens and target passes for every prompt [1, T]."""
    config = GenerationConfig(new_tokens, Sampling(temperature), stop_token_ids=(), budget=lane.budget)
    tallies = [Tally.of([*generate(target, drafter, prompt, config)], 0) for prompt in prompts]
    return [(tally.tokens, tally.steps) for tally in tallies]


def ratio_interval(own: Counts, other: Counts) -> Estimate:
    """Return tokens per pass relative to `other` on the same prompts, with a 95 % bootstrap interval over prompts."""
    return bootstrap(lambda chosen: per_pass(own, chosen) / per_pass(other, chosen), len(own))


def per_pass(counts: Counts, chosen: Sequence[int]) -> float:
    """Return tokens per pass over the chosen prompts."""
    return sum(counts[i][0] for i in chosen) / sum(counts[i][1] for i in chosen)


def _row(name: str, what: str, own: Counts, shipped: Counts) -> dict[str, Any]:
    tokens = round(per_pass(own, range(len(own))), 4)
    return {"head": name, "loss, weights": what, "tokens/pass": tokens, "ratio": ratio_interval(own, shipped)}
