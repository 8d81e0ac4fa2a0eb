"""Target models, trained by cross-entropy on their kind of text."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import PreTrainedModel

from recipes.cards import write_attribution
from recipes.corpus import train_tokenizer
from recipes.job import Job, finish, side_by_side
from recipes.lessons import GrowingWindows, validation_rows
from recipes.llama import average, build, drop_out, to_depth, weights
from recipes.losses import cross_entropy
from specdemo.core.atomic_io import atomic_path
from specdemo.training.collect import Corpus, autocast, read_corpus
from specdemo.training.fit import Batch, make_folder, run_with_progress, train_steps

DROPOUT_UNTIL = 0.8  # share of the time; the rest trains without dropout
SEED_LAYERS, SEED_SHARE = 4, 0.5  # depth of the shallow target, and its share of the time
COPYING, COPYING_SHARE = 0.97, 0.1  # share of edited documents late in training, and its share of the time


def train_target(job: Job) -> None:
    """Train a target by cross-entropy on its kind of text, part of it retold."""
    make_folder(job.out)
    write_attribution(job.corpus, job.out)
    train_on(job, read_corpus(job.corpus))


def train_on(job: Job, corpus: Corpus) -> None:
    """Train by cross-entropy on a corpus, part of it retold; `job.out` exists."""
    world = job.world
    tokenizer = load_or_train_tokenizer(corpus, job.out, job.start, world.vocab_size)
    model = nn.Module.to(build(job.shape, world.vocab_size), job.device)
    start = to_depth(weights(job.start), job.shape.layers) if job.start else {}
    if start:
        model.load_state_dict(start)
    short, long = world.windows_later if start else world.windows
    valid = validation_rows(corpus, tokenizer, long + 1).to(job.device)
    tokens_per_batch = 65536 if job.large else world.later_batch if start else 4096
    batches = GrowingWindows(
        world.epochs(corpus.train, tokenizer, bool(start)), tokens_per_batch, job.device, short, long
    )
    if start:  # use another order and other copies
        batches.first_epoch = 100_000
    drop_out(model, world.dropout)

    def lesson(progress: float, step: int) -> Batch:
        model.train(progress < DROPOUT_UNTIL)
        return batches(progress, step)

    forward = torch.compile(model, dynamic=False) if job.compile else model

    def loss(tokens: Tensor) -> Tensor:
        return cross_entropy(logits_of(forward, tokens[:, :-1]), tokens[:, 1:])

    def evaluate() -> dict[str, float]:
        return {"held_out_loss": round(validation_loss(model, valid), 4)}

    with side_by_side(job) as pool:
        ticks = train_steps(
            model,
            lesson,
            loss,
            evaluate,
            job.schedule,
            job.out / "checkpoint.pt",
            micro_tokens=job.micro_tokens + 8,  # a row is its window plus one token
            pool=pool,
        )
        history = run_with_progress(ticks, job.minutes, job.out.name)
    share = average(model, start, lambda: validation_loss(model, valid)) if start else 0.0
    if share:
        history.evaluations.append({**history.evaluations[-1], **evaluate()})
    finish(job, model, tokenizer, corpus, history, share)


def logits_of(model: Callable[..., Any], tokens: Tensor) -> Tensor:
    """Return logits [B, T, V] for tokens [B, T]."""
    with autocast(tokens.device):
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits


def validation_loss(model: PreTrainedModel, rows: Tensor) -> float:
    """Return the loss on rows [N, T + 1] in mean nats per token."""
    total = 0.0
    for chunk in rows.split(16):
        total += float(cross_entropy(logits_of(model, chunk[:, :-1]), chunk[:, 1:])) * len(chunk)
    return total / len(rows)


def load_or_train_tokenizer(corpus: Corpus, out: Path, start: str | None, vocab_size: int) -> Tokenizer:
    """Load the tokenizer of the folder or of the start, or train a new one and save it in the folder."""
    path = out / "tokenizer.json"
    if start and not path.exists():
        path = Path(start) / "tokenizer.json"
    if path.exists():
        return Tokenizer.from_file(str(path))
    tokenizer = train_tokenizer(corpus.train[::5] if len(corpus.train) > 20_000 else corpus.train, vocab_size)
    with atomic_path(path) as part:
        tokenizer.save(str(part))
    return tokenizer


def seeded(job: Job, name: str, layers: int, minutes: float, make: Callable[[Job], None]) -> Job:
    """Train a model of `layers` layers in the folder `name`; return the job that continues from its result."""
    out = job.out / name
    make(replace(job, out=out, shape=replace(job.shape, layers=layers), minutes=minutes, seed=True))
    return replace(job, start=str(out))


def deepened_target(job: Job) -> None:
    """Train a shallow target, which sees three times the text in the same time, then deepen it and continue.

    At the end the shallow target sees mostly edits, so that it learns to copy.
    """
    if not job.start:
        minutes, world = job.minutes, job.world
        job = seeded(job, "seed", SEED_LAYERS, minutes * SEED_SHARE, train_target)
        copying = replace(world, copies=(0.0, COPYING), windows_later=(world.windows_later[0], world.windows[1]))
        job = seeded(replace(job, world=copying), "copying", SEED_LAYERS, minutes * COPYING_SHARE, train_target)
        job = replace(job, world=world, minutes=minutes * (1.0 - SEED_SHARE - COPYING_SHARE))
    train_target(job)
