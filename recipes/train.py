"""Training of the shipped models: `specdemo train stories-target | stories-draft-wide | ...` in a checkout.

A run writes a standard Hugging Face folder with `MODEL_CARD.md` and `provenance.json`. An interrupted run resumes from
its last checkpoint if it is started again with the same folder.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from recipes.cards import write_attribution, write_head_card
from recipes.code_corpus import collect_code
from recipes.corpus import GPT2_WORDS, GrowingWindows, Lessons, byte_tokenizer, train_tokenizer, validation_rows
from recipes.dialogues import LATER, eagle, speculator, train_dialogues
from recipes.job import RECIPES, Job, side_by_side
from recipes.llama import (
    agreement,
    are_as_wide,
    average,
    cross_entropy,
    drop_out,
    head_forward_kl,
    load,
    next_probs,
    to_depth,
)
from specdemo.core.atomic_io import atomic_path, check_output_folder, make_folder
from specdemo.core.protocol import Progress
from specdemo.core.suggest import suggest
from specdemo.methods.heads.head import Recipe as HeadRecipe
from specdemo.methods.recipes import HEAD_RECIPES, untrained_drafter
from specdemo.models import cpu_threads
from specdemo.models.devices import pick_device
from specdemo.models.packaged import SMOLLM2
from specdemo.models.ref import ModelRef
from specdemo.models.target import HFTarget
from specdemo.training.collect import (
    END,
    Corpus,
    TeacherData,
    autocast,
    build_cache,
    check_corpus,
    claim_cache,
    is_complete,
    load_cache,
    read_corpus,
    windows,
    with_progress,
)
from specdemo.training.fit import Batch, Batches, Schedule, TrainHistory, check_minutes, write_provenance
from specdemo.training.heads import evaluate_rows
from specdemo.training.losses import Trainable

DROPOUT_UNTIL = 0.8  # share of the time; the rest trains without dropout
SEED_LAYERS, SEED_SHARE = 4, 0.5  # depth of the shallow target, and its share of the time
COPYING, COPYING_SHARE = 0.97, 0.1  # share of edited documents late in training, and its share of the time
OPENINGS = 10_000  # documents whose beginnings prompt the target's samples
KINDS = ("text", "samples")  # kinds of training data from a target
OTHER_WORDS = 15  # another vocabulary is trained on one document in 15
OTHER_TURNS = 2  # passes over the target's samples per epoch
RATES_LATER = 0.3  # factor of the learning rates for a trained draft model
HEADS = HeadRecipe("Eight heads on a byte-level model", {"modules": 7, "kind": "parallel"}, "mtp")
VALIDATION_ROWS = 128  # of bytes


def train_target(job: Job) -> TrainHistory:
    """Train a target by cross-entropy on its kind of text, part of it retold."""
    make_folder(job.out)
    write_attribution(job.corpus, job.out)
    return train_on(job, read_corpus(job.corpus))


def train_on(job: Job, corpus: Corpus) -> TrainHistory:
    """Train by cross-entropy on a corpus, part of it retold; `job.out` exists."""
    recipe = job.recipe
    files = [Path(folder) / "tokenizer.json" for folder in (job.out, job.start) if folder]
    read = corpus.train[::5] if len(corpus.train) > 20_000 else corpus.train
    found = next((file for file in files if file.exists()), files[0])
    tokenizer = saved_tokenizer(found, lambda: train_tokenizer(read, recipe.vocab_size))
    model = job.build(recipe.vocab_size)
    start = to_depth(load(job.start).state_dict(), len(model.model.layers)) if job.start else {}
    if start:
        model.load_state_dict(start)
    short, long = recipe.windows_later if start else recipe.windows
    valid = validation_rows(corpus, tokenizer, long + 1).to(job.device)
    tokens_per_batch = job.batch_tokens(recipe.later_batch) if start else job.batch_tokens()
    epochs = recipe.epochs(corpus.train, tokenizer, bool(start))
    first_epoch = LATER if start else 0  # another order and other copies
    batches = GrowingWindows(epochs, tokens_per_batch, job.device, short, long, first_epoch)
    drop_out(model, recipe.dropout)

    def lesson(progress: float, step: int) -> Batch:
        model.train(progress < DROPOUT_UNTIL)
        return batches(progress, step)

    forward = torch.compile(model, dynamic=False) if job.compile else model

    def loss(tokens: Tensor) -> Tensor:
        return cross_entropy(logits_of(forward, tokens[:, :-1]), tokens[:, 1:])

    def measured(rows: Tensor) -> dict[str, float]:
        return {"held_out_loss": float(cross_entropy(logits_of(model, rows[:, :-1]), rows[:, 1:]))}

    def evaluate() -> dict[str, float]:
        return evaluate_rows((valid,), 16, measured)

    size = job.batch_tokens(2048) + 8  # a row is its window plus one token
    with side_by_side(job) as pool:
        history = job.run(model, lesson, loss, evaluate, micro_tokens=size, pool=pool)
    share = average(model, start, lambda: evaluate()["held_out_loss"]) if start else 0.0
    if share:
        history.evaluations.append({**history.evaluations[-1], **evaluate()})
    job.finish(model, tokenizer, corpus, history, share)
    return history


def logits_of(model: Callable[..., Any], tokens: Tensor) -> Tensor:
    """Return logits [B, T, V] for tokens [B, T]."""
    with autocast(tokens.device):
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits


def saved_tokenizer(path: Path, make: Callable[[], Tokenizer]) -> Tokenizer:
    """Load a tokenizer's file, or make and save it."""
    if not path.exists():
        with atomic_path(path) as part:
            make().save(str(part))
    return Tokenizer.from_file(str(path))


def train_deepened(job: Job) -> None:
    """Train a shallow target, which sees three times the text in the same time, then deepen it and continue.

    At the end the shallow target sees mostly edits, so that it learns to copy.
    """
    if not job.start:
        recipe, seeds = job.recipe, []
        shallow = replace(recipe, shape={**recipe.shape, "num_hidden_layers": SEED_LAYERS})
        copying = replace(shallow, copies=(0.0, COPYING), windows_later=(recipe.windows_later[0], recipe.windows[1]))
        part = replace(job, seed=True)
        for name, version, share in (("seed", shallow, SEED_SHARE), ("copying", copying, COPYING_SHARE)):
            part = replace(part, recipe=version, out=job.out / name, minutes=job.minutes * share)
            history = train_target(part)
            seen = {"minutes": history.seconds / 60, "tokens": history.tokens}
            seen["held_out_loss"] = history.evaluations[-1]["held_out_loss"]
            seeds.append({"name": name, "layers": SEED_LAYERS, **seen})
            part = replace(part, start=str(part.out))
        job = replace(job, start=part.start, minutes=job.minutes * (1.0 - SEED_SHARE - COPYING_SHARE), seeds=seeds)
    train_target(job)


def train_draft(job: Job) -> None:
    """Train a draft model by forward KL to the target on text and finally also on the target's samples.

    A draft as wide as its target is initialised from target layers, any other draft is first trained by cross-entropy.
    A trained draft (`job.start`) learns from samples from its first step on, at lower rates.
    """
    corpus = read_corpus(job.corpus)
    target, wrapped = load_target(job)
    make_folder(job.out)
    tokenizer = wrapped.backend_tokenizer
    valid = validation_rows(corpus, tokenizer, job.recipe.plan.context)
    truth = next_probs(target, valid)
    model = job.build(target.config.vocab_size)
    start = load(job.start) if job.start else target if are_as_wide(model.config, target.config) else None
    if start:
        model.load_state_dict(to_depth(start.state_dict(), len(model.model.layers)))
    listen_from = 0.0 if start else 0.1
    samples_from, rates = (0.0, RATES_LATER) if job.start else (0.5, 1.0)
    text, samples = record(job, target, corpus, tokenizer)
    batches = Lessons(text, samples, job.batch_tokens(), job.device, listen_from, samples_from)

    def loss(tokens: Tensor, indices: Tensor, probs: Tensor) -> Tensor:
        with autocast(job.device):
            hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
        return head_forward_kl(hidden.flatten(0, 1), model.lm_head.weight, indices.flatten(0, 1), probs.flatten(0, 1))

    options = {"schedule": Schedule(job.minutes, decay_from=0.2).scaled(rates), "evaluate_every_seconds": 120.0}
    history = job.run(model, batches, loss, lambda: agreement(model, truth, valid), **options)
    job.finish(model, tokenizer, corpus, history)


def train_other(job: Job) -> None:
    """Train a draft model with another vocabulary by cross-entropy on text and on the target's samples.

    This is sequence-level distillation (Kim & Rush 2016, arXiv 1606.07947) and needs no shared tokens.
    """
    corpus = read_corpus(job.corpus)
    target, wrapped = load_target(job)
    make_folder(job.out)
    few = corpus.train[: -(-len(corpus.train) // OTHER_WORDS)]  # so that the vocabulary differs
    saved_tokenizer(job.out / "tokenizer.json", lambda: train_tokenizer(few, words=GPT2_WORDS))
    (samples,) = record(job, target, corpus, wrapped.backend_tokenizer, ("samples",))
    rows = samples.tokens.view(-1, job.recipe.plan.sample_length)
    decoded = wrapped.batch_decode(rows, clean_up_tokenization_spaces=False)
    sampled_stories = [story.strip() for text in decoded for story in text.split(END) if story.strip()]
    train_on(job, replace(corpus, train=corpus.train + OTHER_TURNS * sampled_stories))


def load_target(job: Job) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Load the target in fp32 and its tokenizer. Raises ValueError if there is none at `job.target`."""
    target = nn.Module.to(load(job.target), job.device)
    return target, PreTrainedTokenizerFast.from_pretrained(job.target)


def record(
    job: Job, target: PreTrainedModel, corpus: Corpus, tokenizer: Tokenizer, kinds: Sequence[str] = KINDS
) -> list[TeacherData]:
    """Return the target's cache of text and samples and complete it if necessary. A complete cache of other text is
    used too.
    """
    plan = job.recipe.plan
    if is_complete(job.cache):
        claim_cache(job.cache, target, None, plan)
    else:
        stream = job.recipe.epochs(corpus.train, tokenizer, later=True).stream(0, plan.context)
        openings = [e.ids for e in tokenizer.encode_batch(corpus.train[:: 1 + len(corpus.train) // OPENINGS])]
        text = windows(stream, plan.context)
        shares = build_cache(target, text, openings, job.cache, plan)
        with_progress(shares, f"cache {job.cache.name}")
    return [load_cache(job.cache, [kind]) for kind in kinds]


def train_bytes(job: Job) -> None:
    """Train a byte-level model into `out` and its prediction heads into `out`-heads."""
    if job.start:
        raise ValueError(f"recipe {job.recipe.name!r} starts from scratch; omit --start")
    corpus, tokenizer = read_corpus(job.corpus), byte_tokenizer()
    heads = job.out.with_name(f"{job.out.name}-heads")
    check_output_folder(heads, job.force)
    make_folder(job.out)
    model = job.build(tokenizer.get_vocab_size())
    drafter = untrained_drafter(HEADS, HFTarget(model, name=job.out.name))
    short, long = job.recipe.windows
    epochs = job.recipe.epochs(corpus.train, tokenizer)
    batches = GrowingWindows(epochs, job.batch_tokens(), job.device, short, long)
    valid = validation_rows(corpus, tokenizer, short + 1)[:VALIDATION_ROWS].to(job.device)
    history = train_jointly(job, model, drafter, batches, valid)
    job.finish(model, tokenizer, corpus, history)
    make_folder(heads)
    drafter.save(heads, job.out.name)
    parameters = sum(p.numel() for p in drafter.head.parameters())
    write_provenance(heads, history, **job.facts(corpus), parameters=parameters)
    write_head_card(heads, HEADS.title, job.out.name, job.recipe)


def train_jointly(
    job: Job, model: PreTrainedModel, drafter: Trainable, batches: Batches, valid: Tensor
) -> TrainHistory:
    """Train a model and its heads jointly on tokens [R, T + 1] (multi-token prediction, arXiv 2404.19737).

    The model learns the text. The heads learn the text first and, in the second half, the model's own predictions.
    Their gradients reach the model through its hidden states.
    """
    learned = False  # from the model itself, in the second half

    def parts(tokens: Tensor) -> tuple[Tensor, Tensor, dict[str, float]]:
        inputs, outputs = tokens[:, :-1], tokens[:, 1:]
        read = model.base_model(input_ids=inputs, use_cache=False, output_hidden_states=True)
        hidden = {tap: read.hidden_states[tap] for tap in drafter.taps}
        logits = model.get_output_embeddings()(read.last_hidden_state)
        probs = logits.detach().float().softmax(-1) if learned else None
        loss, metrics = drafter.loss(Progress(inputs, outputs, [inputs.shape[1]] * len(inputs), hidden, probs))
        return cross_entropy(logits, outputs), loss, metrics

    def both(tokens: Tensor) -> Tensor:
        with autocast(job.device):
            text, heads, _ = parts(tokens)
        return text + heads

    def measured(tokens: Tensor) -> dict[str, float]:
        text, heads, metrics = parts(tokens)
        return {"held_out_loss": float(text), "heads_loss": float(heads), **metrics}

    def in_turn(progress: float, step: int) -> Batch:
        nonlocal learned
        learned = progress >= 0.5
        return batches(progress, step)

    module = nn.ModuleDict({"model": model, "heads": drafter.head}).requires_grad_(True)
    rows, size = max(1, job.batch_tokens(2048) // valid.shape[1]), model.config.vocab_size
    return job.run(module, in_turn, both, lambda: evaluate_rows((valid,), rows, measured), vocab_size=size)


MAKERS: dict[str, Callable[[Job], object]] = {
    make.__name__: make for make in (train_target, train_deepened, train_draft, train_other, train_bytes)
}
MAKERS |= {f"train_{head.__name__}": partial(train_dialogues, student=head) for head in (eagle, speculator)}


def train(
    recipe: str,
    corpus: Path | None,
    out: Path | None = None,
    minutes: float | None = None,
    device: str = "auto",
    threads: int | None = None,
    target: str | None = None,
    cache: Path | None = None,
    start: str | None = None,
    compile: bool = False,
    force: bool = False,
) -> Path:
    """Run a recipe and return its folder. Raises ValueError, one line, if something is missing.

    `minutes` counts training only. A draft first completes the target's cache in `cache` (default: `cache` next to
    `out`). Drafts of one target share it, one after the other. `target` is a folder, an embedded name or a hub id, and
    so is `start`, a trained model to continue from. `threads`: number of CPU threads; a small draft is fastest with
    one. `compile` runs the target through `torch.compile`, which needs a C++ compiler.
    """
    if recipe not in RECIPES:
        raise ValueError(f"unknown recipe {recipe!r}; {suggest(recipe, [*HEAD_RECIPES, *RECIPES])}")
    chosen = RECIPES[recipe]
    minutes = check_minutes(chosen.minutes if minutes is None else minutes)
    out = out or Path("runs") / recipe
    check_output_folder(out, force)
    if corpus is None:
        if chosen.text not in ("code", SMOLLM2):
            raise ValueError(f"recipe {recipe!r} needs a corpus: name a folder of *.txt files with --corpus")
        corpus = collect_code(out.parent / "code-corpus") if chosen.text == "code" else out.parent
    else:
        check_corpus(corpus)
    count = threads or chosen.threads or os.cpu_count() or 1
    source, begin = ModelRef(target or chosen.text).location, ModelRef(start).location if start else None
    places = source, cache or out.parent / "cache", begin
    job = Job(chosen, corpus, out, minutes, pick_device(device), *places, count, compile, force)
    with cpu_threads.threads(count):
        MAKERS[chosen.make](job)
    return out
