"""Losses for training heads: tokens per pass on held-out text after the same fine-tuning of a shipped head."""

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
from specdemo.methods.base import Head
from specdemo.methods.heads.network import Network
from specdemo.methods.recipes import head_recipe, trained_drafter
from specdemo.methods.targets import load_target
from specdemo.models.text import encode
from specdemo.presets.limits import LIMITS
from specdemo.training.collect import Plan
from specdemo.training.corpus import read_corpus
from specdemo.training.heads import START_RATES, TeacherSplit, build_dataset, save_head, train_head
from specdemo.training.losses import LOSSES, Objective

HEADS = {
    "stories-dflash": Lane(method="dflash", model="stories-dflash", k=4),
    "stories-eagle-3": Lane(method="eagle", model="stories-eagle-3", k=4, options={"draft": "chain"}),
}
OBJECTIVES = [*(Objective(loss) for loss in LOSSES), Objective(weights="dpace")]
OPENING = 24  # tokens of a held-out document that are the prompt
TEXT_ROWS = 2048  # of teacher data; a quarter as many are the target's samples
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
    """Fine-tune every head with every objective on the same batches; measure tokens per pass on held-out openings.

    cache: teacher data, built if missing. out: folder of the fine-tuned heads, which are not trained again.
    temperature: of the measurement.
    """
    target, fused = load_target("stories", kernels="transformers"), load_target("stories")
    openings = [encode(tokenizer(fused), text, LIMITS.prompt)[:OPENING] for text in read_corpus(corpus).valid]
    chosen = [torch.tensor([ids]) for ids in openings if len(ids) == OPENING][:prompts]
    taps = tuple(sorted({tap for name in heads for tap in _load(target, name).taps}))
    plan = Plan(text_rows=TEXT_ROWS, sampled_rows=TEXT_ROWS // 4, rows_per_shard=32, context=256, taps=taps)
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


def _load(target: Target, name: str, folder: Path | None = None) -> Head[Network]:
    """Load a shipped head, or the one that was fine-tuned from it in `folder`."""
    lane = HEADS[name]
    drafter = load_drafter(lane.method, target, str(folder or name), **lane.options)
    assert isinstance(drafter, Head)
    return drafter


def _train(
    target: Target,
    name: str,
    data: TeacherSplit,
    objective: Objective,
    folder: Path,
    steps: int,
    batch_tokens: int,
) -> None:
    """Fine-tune a shipped head for `steps` steps and save it."""
    torch.manual_seed(0)
    recipe = name.removeprefix("stories-")
    drafter = trained_drafter(head_recipe(recipe), target, name)
    drafter.objective = objective
    folder.mkdir(parents=True, exist_ok=True)
    seconds = count()  # every step takes a second of this clock
    clock = partial(next, seconds)
    *_, last = train_head(drafter, target, data, folder, steps / 60, batch_tokens, clock, START_RATES)
    save_head(drafter, target, folder, last.history, data, recipe=recipe, start=name, **asdict(objective))


def count_passes(
    target: Target,
    drafter: Head[Network],
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
