"""Fit any parameters to any stream of batches: schedule by the clock, checkpoints that survive a kill, provenance.

Names no method. The learning rate follows the share of `minutes` that is used up, so a run ends when it was asked to
end, on any machine; what it saw is written down beside the result.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field
from math import nan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from specdemo.models.machine import commit, versions
from specdemo.training.muon import Muon

CHECKPOINT_SECONDS = 120.0
MOST_MINUTES = 1_000_000


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning rates at full height; warm-up in steps, then constant, then linear to `floor` from `decay_from` on."""

    minutes: float
    muon: float = 0.02  # 2-D hidden matrices (Muon, Keller Jordan 2024)
    adamw: float = 0.004  # embedding, head, norms
    weight_decay: float = 0.1
    warmup_steps: int = 50
    decay_from: float = 0.5
    floor: float = 0.02

    def scale(self, step: int, progress: float) -> float:
        """Factor on both learning rates after `step` steps and a share `progress` in 0..1 of the minutes."""
        down = 1.0 - (1.0 - self.floor) * max(0.0, progress - self.decay_from) / (1.0 - self.decay_from)
        return min(1.0, (step + 1) / self.warmup_steps) * down


@dataclass(slots=True)
class History:
    """What a run did so far; saved in every checkpoint and beside the result."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    evaluations: list[dict[str, float]] = field(default_factory=list)


Batch = tuple[Tensor, ...]  # columns about the same rows, tokens [B, T] first
Batches = Callable[[float, int], Batch]  # (progress 0..1, step) -> batch
Loss = Callable[..., Tensor]  # (*columns) -> mean nats per token
Evaluate = Callable[[], dict[str, float]]


def optimizers(module: nn.Module, schedule: Schedule, vocab_size: int = 0) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices, AdamW for everything else: norms, embeddings, heads over `vocab_size` words."""
    outer = {id(p) for m in module.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    outer |= {id(p) for p in module.parameters() if p.ndim == 2 and p.shape[0] == vocab_size}
    parameters = [p for p in module.parameters() if p.requires_grad]
    hidden = [p for p in parameters if p.ndim == 2 and id(p) not in outer]
    rest = [p for p in parameters if p.ndim != 2 or id(p) in outer]
    built: list[torch.optim.Optimizer] = []
    if hidden:
        built.append(Muon(hidden, lr=schedule.muon, weight_decay=schedule.weight_decay, momentum=0.95))
    if rest:
        built.append(torch.optim.AdamW(rest, lr=schedule.adamw, betas=(0.9, 0.95), weight_decay=0.0, fused=True))
    for optimizer in built:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return built


@dataclass(slots=True)
class Run:
    """A module, its optimizers and its history: all that a checkpoint must hold to go on exactly."""

    module: nn.Module
    optimizers: list[torch.optim.Optimizer]
    history: History
    pool: Executor | None = None  # runs the pieces of a batch side by side

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        state = {
            "module": self.module.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "history": asdict(self.history),
            "rng": torch.get_rng_state(),
        }
        torch.save(state, part)
        part.replace(path)  # a kill leaves either the old checkpoint or the new one

    def load(self, path: Path) -> None:
        saved = torch.load(path, weights_only=True)
        self.module.load_state_dict(saved["module"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.history = History(**saved["history"])
        torch.set_rng_state(saved["rng"])

    def step(self, batch: Batch, loss: Loss, scale: float, micro_tokens: int) -> float:
        """One update at `scale` times the peak learning rates -> loss in nats per token."""
        rows, length = batch[0].shape
        pieces = zip(*(column.split(max(1, micro_tokens // length)) for column in batch), strict=True)

        def backward(piece: Batch) -> float:
            value = loss(*piece) * (len(piece[0]) / rows)
            value.backward()
            return value.item()

        total = sum(self.pool.map(backward, pieces) if self.pool else map(backward, pieces))
        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.history.step += 1
        self.history.tokens += batch[0].numel()
        return total

    def evaluate(self, evaluate: Evaluate, train_loss: float) -> dict[str, float]:
        self.module.eval()
        with torch.no_grad():
            numbers = evaluate()
        self.module.train()
        h = self.history
        h.evaluations.append(
            {
                "step": h.step,
                "tokens": h.tokens,
                "seconds": round(h.seconds),
                "train_loss": round(train_loss, 4),
                **numbers,
            }
        )
        return h.evaluations[-1]


@dataclass(frozen=True, slots=True)
class Tick:
    """One step of a run; `evaluation` when there was one behind it."""

    history: History
    loss: float
    evaluation: dict[str, float] | None


def steps(
    module: nn.Module,
    batches: Batches,
    loss: Loss,
    evaluate: Evaluate,
    schedule: Schedule,
    checkpoint: Path,
    micro_tokens: int = 2048,
    evaluate_every_seconds: float = 240.0,
    clock: Callable[[], float] = time.perf_counter,
    vocab_size: int = 0,
    pool: Executor | None = None,
) -> Iterator[Tick]:
    """Train `module` in place until `schedule.minutes` of training are used; go on from `checkpoint` if it exists.

    A batch runs in pieces of `micro_tokens` tokens whose gradients add up: small pieces stay in a CPU's cache,
    and a `pool` of single-threaded workers runs them side by side without the barriers of a parallel operation.
    Evaluations and checkpoints do not count as training time. `clock` tells seconds. Closing the iterator stops
    behind a whole step and saves; ask for the same folder again to go on.
    """
    run = Run(module, optimizers(module, schedule, vocab_size), History(), pool)
    if checkpoint.exists():
        run.load(checkpoint)
    history = run.history
    total = schedule.minutes * 60.0
    saved_at = history.seconds
    evaluated_at = history.evaluations[-1]["seconds"] if history.evaluations else 0.0
    module.train()
    try:
        yield Tick(history, nan, None)  # where it begins
        while history.seconds < total:
            started = clock()
            progress = history.seconds / total
            batch = batches(progress, history.step)
            train_loss = run.step(batch, loss, schedule.scale(history.step, progress), micro_tokens)
            history.seconds += clock() - started
            ended = history.seconds >= total
            evaluation = None
            if ended or history.seconds - evaluated_at >= evaluate_every_seconds:
                evaluation = run.evaluate(evaluate, train_loss)
                evaluated_at = history.seconds
            if ended or history.seconds - saved_at >= CHECKPOINT_SECONDS:
                run.save(checkpoint)
                saved_at = history.seconds
            yield Tick(history, train_loss, evaluation)
    except GeneratorExit:
        run.save(checkpoint)
        raise
    finally:
        module.eval()


def fit(
    module: nn.Module,
    batches: Batches,
    loss: Loss,
    evaluate: Evaluate,
    schedule: Schedule,
    checkpoint: Path,
    **how: Any,
) -> History:
    """`steps` to the end behind a progress bar, a line for every evaluation."""
    ticks = steps(module, batches, loss, evaluate, schedule, checkpoint, **how)
    return show(ticks, schedule.minutes, checkpoint.parent.name)


def show(ticks: Iterable[Tick], minutes: float, name: str) -> History:
    """Draw the bar of a run while it goes to its end."""
    history = History()
    with tqdm(total=round(60.0 * minutes), unit="s", desc=name, mininterval=5) as bar:
        for tick in ticks:
            history = tick.history
            bar.n = min(round(history.seconds), round(60.0 * minutes))
            if history.step % 10 == 0:
                bar.set_postfix(step=history.step, loss=f"{tick.loss:.3f}")
            if tick.evaluation:
                bar.write(json.dumps(tick.evaluation))
    return history


def positive(minutes: float) -> float:
    """The minutes again. Raises ValueError unless they are a positive number."""
    if not 0.0 < minutes <= MOST_MINUTES:
        raise ValueError(f"minutes must be positive, not {minutes:g}; {MOST_MINUTES:,} at most")
    return minutes


def make_folder(out: Path) -> None:
    """Raises ValueError with one line when it cannot be made."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make the folder {out}: {error.strerror}; name another with --out") from None


def write_provenance(out: Path, history: History, **facts: Any) -> None:
    """`provenance.json` beside a result: what ran, on what, on which data, and the curve."""
    facts = {**facts, "versions": versions(), "commit": commit(), **asdict(history)}
    (out / "provenance.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
