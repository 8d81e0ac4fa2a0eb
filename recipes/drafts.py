"""Draft models, trained on their target's distributions and on text."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from recipes.agreement import agreement, next_probs
from recipes.corpus import gpt2_words, train_tokenizer
from recipes.job import Job, finish
from recipes.lessons import Lessons, validation_rows
from recipes.llama import build, is_as_wide, to_depth, weights
from recipes.losses import head_forward_kl
from recipes.targets import train_on
from specdemo.core.atomic_io import atomic_path
from specdemo.models.shipped import check_embedded
from specdemo.training.collect import (
    END,
    Corpus,
    TeacherData,
    autocast,
    build_cache,
    claim_cache,
    is_complete,
    load_cache,
    read_corpus,
    windows,
    with_progress,
)
from specdemo.training.fit import Schedule, make_folder, run_with_progress, train_steps

OPENINGS = 10_000  # documents whose beginnings prompt the target's samples
KINDS = ("text", "samples")  # kinds of training data from a target
OTHER_WORDS = 15  # another vocabulary is trained on one document in 15
OTHER_TURNS = 2  # passes over the target's samples per epoch
RATES_LATER = 0.3  # factor of the learning rates for a trained draft model


def train_draft(job: Job) -> None:
    """Train a draft model by forward KL to the target on text and finally also on the target's samples.

    A draft as wide as its target is initialised from target layers, any other draft is first trained by cross-entropy.
    A trained draft (`job.start`) learns from samples from its first step on, at lower rates.
    """
    corpus = read_corpus(job.corpus)
    target, wrapped = load_target(job)
    make_folder(job.out)
    tokenizer = wrapped.backend_tokenizer
    valid = validation_rows(corpus, tokenizer, job.plan.context)
    truth = next_probs(target, valid)
    model = nn.Module.to(build(job.shape, target.config.vocab_size), job.device)
    same_width = is_as_wide(job.shape, target.config)
    if job.start or same_width:
        model.load_state_dict(weights(job.start) if job.start else to_depth(target.state_dict(), job.shape.layers))
    listen_from = 0.0 if job.start or same_width else 0.1
    samples_from, rates = (0.0, RATES_LATER) if job.start else (0.5, 1.0)
    text, samples = record(job, target, corpus, tokenizer)
    batches = Lessons(text, samples, 65536 if job.large else 4096, job.device, listen_from, samples_from)

    def loss(tokens: Tensor, indices: Tensor, probs: Tensor) -> Tensor:
        with autocast(job.device):
            hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
        return head_forward_kl(hidden.flatten(0, 1), model.lm_head.weight, indices.flatten(0, 1), probs.flatten(0, 1))

    def evaluate() -> dict[str, float]:
        return agreement(model, truth, valid)

    ticks = train_steps(
        model,
        batches,
        loss,
        evaluate,
        Schedule(job.minutes, decay_from=0.2).scaled(rates),
        job.out / "checkpoint.pt",
        micro_tokens=job.micro_tokens,
        evaluate_every_seconds=120.0,
    )
    finish(job, model, tokenizer, corpus, run_with_progress(ticks, job.minutes, job.out.name))


def train_other(job: Job) -> None:
    """Train a draft model with another vocabulary by cross-entropy on text and on the target's samples.

    This is sequence-level distillation (Kim & Rush 2016, arXiv 1606.07947) and needs no shared tokens.
    """
    corpus = read_corpus(job.corpus)
    target, wrapped = load_target(job)
    make_folder(job.out)
    words = job.out / "tokenizer.json"
    if not words.exists():
        with atomic_path(words) as part:  # few documents, so that the vocabulary differs
            train_tokenizer(corpus.train[: -(-len(corpus.train) // OTHER_WORDS)], words=gpt2_words).save(str(part))
    (samples,) = record(job, target, corpus, wrapped.backend_tokenizer, ("samples",))
    rows = samples.tokens.view(-1, job.plan.sample_length)
    decoded = wrapped.batch_decode(rows, clean_up_tokenization_spaces=False)
    sampled_stories = [story.strip() for text in decoded for story in text.split(END) if story.strip()]
    train_on(job, replace(corpus, train=corpus.train + OTHER_TURNS * sampled_stories))


def load_target(job: Job) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Load the target in fp32 and its tokenizer. Raises ValueError if there is none at `job.target`."""
    check_embedded(Path(job.target))
    try:
        target = AutoModelForCausalLM.from_pretrained(job.target, dtype=torch.float32)
        return nn.Module.to(target.eval(), job.device), PreTrainedTokenizerFast.from_pretrained(job.target)
    except OSError as error:
        raise ValueError(f"no target model at {job.target}: name the folder of stories-target with --target") from error


def record(
    job: Job, target: PreTrainedModel, corpus: Corpus, tokenizer: Tokenizer, kinds: Sequence[str] = KINDS
) -> list[TeacherData]:
    """Return the target's cache of text and samples and complete it if necessary. A complete cache of other text is
    used too.
    """
    if is_complete(job.cache):
        claim_cache(job.cache, target, None, job.plan)
        return [load_cache(job.cache, [kind]) for kind in kinds]
    text = windows(job.world.epochs(corpus.train, tokenizer, later=True).stream(0, job.plan.context), job.plan.context)
    openings = corpus.train[:: 1 + len(corpus.train) // OPENINGS]
    stories = [e.ids for e in tokenizer.encode_batch(openings)]
    with_progress(build_cache(target, text, stories, job.cache, job.plan, job.backwards), f"cache {job.cache.name}")
    return [load_cache(job.cache, [kind]) for kind in kinds]
