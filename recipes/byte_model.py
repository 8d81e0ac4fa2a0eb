"""Byte-level model and its seven prediction heads, trained jointly from scratch (Gloeckle et al., arXiv 2404.19737).

Bytes are numerous and easy to predict, so multi-token prediction gains most here.
"""

import time
from collections.abc import Callable, Generator
from pathlib import Path

from torch import Tensor, nn
from transformers import PreTrainedModel

from recipes.cards import write_head_card
from recipes.corpus import byte_tokenizer
from recipes.job import Job, facts, finish
from recipes.lessons import GrowingWindows, validation_rows
from recipes.llama import Shape, build
from recipes.losses import cross_entropy
from specdemo.core.outputs import check_output_folder
from specdemo.core.protocol import Progress
from specdemo.methods.base import Recipe
from specdemo.methods.recipes import untrained_drafter
from specdemo.models.target import HFTarget
from specdemo.training.collect import autocast, read_corpus
from specdemo.training.fit import (
    Batch,
    Batches,
    Schedule,
    TrainStep,
    make_folder,
    run_with_progress,
    train_steps,
    write_provenance,
)
from specdemo.training.heads import evaluate_rows
from specdemo.training.losses import Trainable

BYTES = Shape(layers=12, hidden=128, intermediate=344, heads=2, context=1024)  # narrow, so that seven heads cost little
HEADS = Recipe("Eight heads on a byte-level model", {"modules": 7, "kind": "parallel"}, "mtp")
VALIDATION_ROWS = 128


def train_bytes(job: Job) -> None:
    """Train the model into `out` and its heads into `out`-heads."""
    if job.start:
        raise ValueError(f"recipe {job.recipe!r} starts from scratch; omit --start")
    corpus, tokenizer = read_corpus(job.corpus), byte_tokenizer()
    heads = job.out.with_name(f"{job.out.name}-heads")
    check_output_folder(heads, job.force)
    make_folder(job.out)
    model = nn.Module.to(build(job.shape, tokenizer.get_vocab_size()), job.device)
    drafter = untrained_drafter(HEADS, HFTarget(model, name=job.out.name))
    short, long = job.world.windows
    epochs = job.world.epochs(corpus.train, tokenizer)
    batches = GrowingWindows(epochs, 65536 if job.large else 4096, job.device, short, long)
    valid = validation_rows(corpus, tokenizer, short + 1)[:VALIDATION_ROWS].to(job.device)
    ticks = train_jointly(model, drafter, batches, valid, job.out, job.schedule, job.micro_tokens)
    history = run_with_progress(ticks, job.minutes, job.out.name)
    finish(job, model, tokenizer, corpus, history)
    make_folder(heads)
    drafter.save(heads, job.out.name)
    parameters = sum(p.numel() for p in drafter.head.parameters())
    write_provenance(heads, history, **facts(job, corpus), parameters=parameters)
    write_head_card(heads, HEADS.title)


def train_jointly(
    model: PreTrainedModel,
    drafter: Trainable,
    batches: Batches,
    valid: Tensor,
    out: Path,
    schedule: Schedule,
    micro_tokens: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Generator[TrainStep, None, None]:
    """Train a model and its heads jointly on tokens [R, T + 1] (multi-token prediction, arXiv 2404.19737).

    The model learns the text. The heads learn the text first and, in the second half, the model's own predictions.
    Their gradients reach the model through its hidden states.
    """
    device, halfway = valid.device, [False]

    def parts(tokens: Tensor) -> tuple[Tensor, Tensor, dict[str, float]]:
        inputs, outputs = tokens[:, :-1], tokens[:, 1:]
        model_outputs = model.base_model(input_ids=inputs, use_cache=False, output_hidden_states=True)
        hidden = {tap: model_outputs.hidden_states[tap] for tap in drafter.taps}
        logits = model.get_output_embeddings()(model_outputs.last_hidden_state)
        probs = logits.detach().float().softmax(-1) if halfway[0] else None
        progress = Progress(inputs, outputs, [inputs.shape[1]] * len(inputs), hidden, probs)
        loss, metrics = drafter.loss(progress)
        return cross_entropy(logits, outputs), loss, metrics

    def both(tokens: Tensor) -> Tensor:
        with autocast(device):
            text, heads, _ = parts(tokens)
        return text + heads

    def measured(tokens: Tensor) -> dict[str, float]:
        text, heads, metrics = parts(tokens)
        return {"held_out_loss": float(text), "heads_loss": float(heads), **metrics}

    def evaluate() -> dict[str, float]:
        return evaluate_rows((valid,), max(1, micro_tokens // valid.shape[1]), measured)

    def in_turn(progress: float, step: int) -> Batch:
        halfway[0] = progress >= 0.5
        return batches(progress, step)

    module = nn.ModuleDict({"model": model, "heads": drafter.head}).requires_grad_(True)
    vocabulary = model.config.vocab_size
    checkpoint = out / "checkpoint.pt"
    yield from train_steps(
        module, in_turn, both, evaluate, schedule, checkpoint, micro_tokens, clock=clock, vocab_size=vocabulary
    )
