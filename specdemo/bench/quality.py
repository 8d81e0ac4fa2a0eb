"""Quality of a drafter for a target: acceptance by kind of work and position, and what looks wrong with its file."""

from collections.abc import Iterator

import torch

from specdemo.analysis.diagnose import diagnose
from specdemo.analysis.lanes import Summary, observation_of
from specdemo.analysis.predict import published
from specdemo.bench.prompts import OWN
from specdemo.bench.report import table
from specdemo.core.protocol import GenerationConfig, Target
from specdemo.core.tally import Tally
from specdemo.engine.comparison import Lane
from specdemo.engine.loop import generate
from specdemo.methods import build_drafter
from specdemo.methods.pairs import load_target
from specdemo.models.checkpoints import open_checkpoint
from specdemo.models.ref import ModelRef
from specdemo.models.text import encode
from specdemo.presets.pair import work_prompts

K, NEW_TOKENS = 4, 64
TEXTS = 6  # of all kinds of work together
ACCEPTANCE_FAULTS = ("broken drafter", "later positions")  # causes that acceptance alone shows
LENGTH_KEYS = ("max_position_embeddings", "sliding_window")


def quality(name: ModelRef, lane: Lane) -> Iterator[str]:
    """Run a drafter on a few texts of every kind of work, greedy and untimed; yield a table, then remarks.

    Raises ValueError, one line, if the target or the drafter cannot be loaded.
    """
    target = load_target(name)
    lane = lane.model_copy(update={"k": K})
    drafter = build_drafter(lane.method, target, lane.model, lane.parsed)
    config, total = GenerationConfig(NEW_TOKENS, budget=lane.budget), Tally()
    kinds, rows = OWN.get(name) or work_prompts(), []
    for kind, texts in kinds.items():
        tally = Tally()
        for text in texts[: TEXTS // len(kinds)]:
            prompt = [{"role": "user", "content": text}] if target.tokenizer.chat_template else text
            ids = encode(target.tokenizer, prompt, target.max_length - NEW_TOKENS)
            for event in generate(target, drafter, torch.tensor([ids], device=target.device), config):
                tally.add(event)
                total.add(event)
        rows.append((kind, *_cells(tally)))
    tree = f" in a tree of {lane.budget.nodes}" if lane.budget.nodes > K else ""
    yield f"Accepted with k = {K}{tree}, in {NEW_TOKENS} greedy tokens of {TEXTS} texts:"
    yield table(("work", *(f"at {n}" for n in range(1, K + 1)), "tokens a pass"), [*rows, ("all", *_cells(total))])
    yield from filter(None, [_fault(lane, total), *_of_file(lane.model, target), *_published(name, lane)])


def _cells(tally: Tally) -> list[str]:
    """Return the share of the drafts that were accepted up to each position, and the mean accepted length."""
    numbers = tally.numbers()
    shares = numbers["accept_by_position"]
    assert isinstance(shares, list)
    cells = ["" if share is None else f"{100.0 * share:.0f} %" for share in shares[:K]]
    length = numbers["tokens_per_step"]
    return [*cells, *[""] * (K - len(cells)), "" if length is None else f"{length:.2f}"]


def _fault(lane: Lane, total: Tally) -> str:
    """Return what acceptance shows to be wrong; empty for nothing."""
    numbers: Summary = total.numbers()
    reached = tuple(share or 0.0 for share in numbers["accept_by_position"])
    run = observation_of(numbers, lane.method, K).changed(by_position=reached)
    causes = [cause for cause in diagnose(run).causes if cause.name in ACCEPTANCE_FAULTS]
    return "".join(f"{cause.title}: {cause.evidence}. {cause.advice}" for cause in causes[:1])


def _of_file(source: ModelRef | None, target: Target) -> Iterator[str]:
    """Yield what is unusual in the files of a head: weights that are zero or the target's own, and a short context."""
    if source is None or source.gguf:
        return
    checkpoint = open_checkpoint(source)
    config = {**checkpoint.config, **(checkpoint.config.get("transformer_layer_config") or {})}
    for name in LENGTH_KEYS if config.get("use_sliding_window", True) else LENGTH_KEYS[:1]:
        if isinstance(length := config.get(name), int) and 0 < length < target.max_length:
            yield f"{name} is {length}, and the target reads {target.max_length}: later drafts may be worse."
    shared = {"embed_tokens.weight": target.embed, "lm_head.weight": target.lm_head}
    for name, tensor in checkpoint.tensors.items():
        if tensor.is_floating_point() and tensor.numel() > 1 and not tensor.any():
            yield f"{name} is zero everywhere, as if it had not been trained."
        weight = getattr(shared.get(name.rpartition("model.")[2]), "weight", None)
        if weight is not None and weight.shape == tensor.shape and torch.equal(weight.to(tensor.dtype), tensor):
            yield f"{name} is the target's own; without it the file is {tensor.nbytes / 1e6:.0f} MB smaller."


def _published(name: ModelRef, lane: Lane) -> Iterator[str]:
    """Yield published mean accepted lengths of the method with this target."""
    for row in published():
        if ModelRef(row.target).base_name == name.base_name and row.method == lane.method:
            tree = f" and a tree of {row.nodes}" if row.nodes else ""
            yield f"Published: {row.tokens:.2f} tokens a pass with k = {row.k}{tree} ({row.what}, {row.source})."
