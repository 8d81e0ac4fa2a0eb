"""Train a speculation head on what its target says. Names no method: whoever is `Trainable` is welcome.

R rows of T tokens, V vocabulary, H hidden. Text is a corpus, or, without one, what the target writes by itself; the
second part of a run mixes in the target's own samples (the two stages of 2404.19124, section 3).
"""

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdemo.core.protocol import Progress, Trainable
from specdemo.models.machine import device_name
from specdemo.models.target import HFTarget
from specdemo.training.collect import (
    Plan,
    Recorded,
    autocast,
    claim,
    collecting,
    complete,
    keep,
    listen,
    load_cache,
    own_rows,
    sound,
    watched,
)
from specdemo.training.corpus import read_corpus, windows
from specdemo.training.fit import Batch, History, Schedule, Tick, steps, write_provenance

HELD_OUT_ROWS = 32
HELD_OUT_SEED = -1  # the text's are its shards' numbers
DENSE = 1 << 22  # entries of a [B, A, V] distribution that a CPU works on at once; a GPU takes 64 times as many


@dataclass(frozen=True)
class Material:
    """What the target said: to learn from, and held out."""

    text: Recorded
    samples: Recorded
    held_out: Recorded
    source: str  # sha256 of the corpus, or who wrote the text


def gathering(
    target: HFTarget, cache: Path, plan: Plan, corpus: Path | None = None
) -> Generator[float, None, Material]:
    """Complete the cache of `target` and read it; gives the share that is done as it goes, at last the material.

    A cache with more taps than planned will do, and so will a complete one made of other text, such as that of a
    draft model. Raises ValueError when the cache is of another target or lacks taps, and for a target on fused layers,
    which tell no hidden states to transformers.
    """
    if target.kernels != "transformers":
        raise ValueError(f"{target.name} runs on fused layers; load it with kernels='transformers'")
    model, context = target.model, min(plan.context, target.max_length)
    plan = replace(plan, context=context, sample_length=min(plan.sample_length, context))
    first = target.stop_token_ids[0] if target.stop_token_ids else 0
    text: Tensor | int
    stories: list[list[int]]
    if corpus is None:
        text, stories, source = first, [], f"text written by {target.name}"
    else:
        text, stories, held_out, source = _read(target, corpus, context)
    if complete(cache):
        claim(cache, model, None, plan)
    else:
        yield from collecting(model, text, stories, cache, plan)
    if corpus is None:
        held_out = _own_held_out(model, first, cache, context)
    recorded = Recorded.of(listen(model, held_out[:HELD_OUT_ROWS], plan.taps))
    said, sampled = (load_cache(cache, [kind], plan.taps) for kind in ("text", "samples"))
    return Material(said, sampled, recorded, source)


def gather(target: HFTarget, cache: Path, plan: Plan, corpus: Path | None = None) -> Material:
    """`gathering` to the end behind a progress bar."""
    return watched(gathering(target, cache, plan, corpus), f"cache {cache.name}")


def _read(target: HFTarget, corpus: Path, context: int) -> tuple[Tensor, list[list[int]], Tensor, str]:
    """Text [R, context], documents, held-out text [R, context] and the corpus's sha256."""
    assert target.tokenizer is not None
    read = read_corpus(corpus)
    documents = [[int(i) for i in target.tokenizer(d, verbose=False).input_ids] for d in read.train]
    held_out = [int(i) for d in read.valid for i in target.tokenizer(d, verbose=False).input_ids]
    stream = torch.tensor([i for d in documents for i in d])
    held = torch.tensor(held_out)
    return windows(stream, context), documents, windows(held, min(context, len(held))), read.sha256


def _own_held_out(model: PreTrainedModel, first: int, cache: Path, context: int) -> Tensor:
    """Rows [R, context] that the target writes by itself, kept in its cache."""
    shard = cache / "held-out.safetensors"
    if not sound(shard):
        keep(shard, {"tokens": own_rows(model, first, HELD_OUT_ROWS // 4, context, HELD_OUT_SEED)})
    return load_file(shard)["tokens"]


@dataclass(frozen=True, slots=True)
class Rows:
    """Batches of recorded columns; a pure function of progress and step, so that a resumed run goes on exactly."""

    material: Material
    taps: tuple[int, ...]
    count: int  # rows of a batch
    samples_from: float = 0.4

    def __call__(self, progress: float, step: int) -> Batch:
        if progress < self.samples_from:
            return columns(self.material.text.turn(self.count, step), self.taps)
        half = max(1, self.count // 2)
        both = (self.material.text.turn(half, step), self.material.samples.turn(half, step))
        pairs = zip(*(columns(rows, self.taps) for rows in both), strict=True)
        return tuple(torch.cat(pair) for pair in pairs)


def columns(recorded: Recorded, taps: Sequence[int]) -> Batch:
    """tokens, indices, probs and the taps, in this order."""
    return recorded.tokens, recorded.indices, recorded.probs, *(recorded.hidden[tap] for tap in taps)


def example(batch: Batch, taps: Sequence[int], target: HFTarget) -> Progress:
    """Columns [R, T, ...] -> the T - 1 positions whose next token is known, with the target's distribution there."""
    tokens, indices, probs, *hidden = (column.to(target.device) for column in batch)
    known = probs[:, :-1].float()
    dense = known.new_zeros(*known.shape[:2], target.vocab_size)
    dense.scatter_(-1, indices[:, :-1].long(), known / known.sum(-1, keepdim=True))
    states = {tap: h[:, :-1].float() for tap, h in zip(taps, hidden, strict=True)}
    inputs, outputs = tokens[:, :-1], tokens[:, 1:]
    return Progress(inputs, outputs, [inputs.shape[1]] * len(inputs), states, dense)


def train_head(
    drafter: Trainable,
    target: HFTarget,
    material: Material,
    out: Path,
    minutes: float,
    batch_tokens: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Generator[Tick, None, None]:
    """Train `drafter.head` in place, step by step; go on from the checkpoint in `out` if there is one."""
    large = target.device.type != "cpu"
    context = material.text.tokens.shape[1]
    tokens = batch_tokens or (32768 if large else 4096)
    micro = max(context, (64 * DENSE if large else DENSE) // target.vocab_size)
    head = nn.Module.float(drafter.head).requires_grad_(True)

    def progress_of(batch: Batch) -> Progress:
        return example(batch, drafter.taps, target)

    def loss(*batch: Tensor) -> Tensor:
        with autocast(target.device):
            return drafter.loss(progress_of(batch))[0]

    def measured(*piece: Tensor) -> dict[str, float]:
        nats, metrics = drafter.loss(progress_of(piece))
        return {"held_out_loss": float(nats), **metrics}

    def evaluate() -> dict[str, float]:
        return on_held_out(columns(material.held_out, drafter.taps), max(1, micro // context), measured)

    yield from steps(
        head,
        Rows(material, drafter.taps, max(1, tokens // context)),
        loss,
        evaluate,
        Schedule(minutes, muon=0.01, adamw=0.002, decay_from=0.3),
        out / "checkpoint.pt",
        micro_tokens=micro,
        evaluate_every_seconds=max(10.0, 60.0 * minutes / 12),
        vocab_size=target.vocab_size,
        clock=clock,
    )


def on_held_out(batch: Batch, rows: int, measured: Callable[..., dict[str, float]]) -> dict[str, float]:
    """What is measured on so many rows of a batch's columns at a time, each number's mean over all of them."""
    pieces = [*zip(*(column.split(rows) for column in batch), strict=True)]
    found = [(len(piece[0]) / len(batch[0]), measured(*piece)) for piece in pieces]
    return {name: round(sum(share * numbers[name] for share, numbers in found), 4) for name in found[0][1]}


def save_head(
    drafter: Trainable, target: HFTarget, out: Path, history: History, material: Material, **facts: str | float
) -> None:
    """The head in its public format, with provenance. Measured first is what is saved beside it."""
    drafter.measure(example(columns(material.held_out, drafter.taps), drafter.taps, target))
    nn.Module.to(drafter.head, torch.bfloat16)
    drafter.save(out, target.name)
    write_provenance(
        out,
        history,
        target=target.name,
        hardware=device_name(target.device),
        threads=torch.get_num_threads(),
        parameters=sum(p.numel() for p in drafter.head.parameters()),
        data_sha256=material.source,
        **facts,
    )
