"""Training loop for any module and any stream of batches, with a schedule by time, checkpoints and provenance.

The learning rate depends on the used fraction of `minutes`, so that a run ends on time on any machine; the amount of
data it used is stored with the result.
"""

import logging
import shutil
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from math import isnan, nan
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from specdemo.core.atomic_io import MARKER, atomic_path, finite, json_text, write_text
from specdemo.core.signals import defer_signals
from specdemo.models.machine import commit, matmul_dtype, versions

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # quintic iteration that brings singular values close to 1 in 5 steps
STEPS = 5


def orthogonal(matrix: Tensor) -> Tensor:
    """Approximate U V^T of the singular value decomposition of a matrix [n, m], by Newton-Schulz iteration."""
    a, b, c = COEFFICIENTS
    x = matrix.to(matmul_dtype(matrix.device))
    wide = x if x.shape[0] <= x.shape[1] else x.T
    wide = wide / wide.norm().clamp_min(1e-7)
    for _ in range(STEPS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    nearest: Tensor = wide if x.shape[0] <= x.shape[1] else wide.T
    return nearest.to(matrix.dtype)


class Muon(torch.optim.Optimizer):
    """Optimizer with Nesterov momentum; a matrix [n, m] moves by lr * sqrt(max(1, n / m)) times an orthogonal
    matrix.

    The rule is that of torch.optim.Muon, whose products are always in bfloat16: on a CPU without instructions for it a
    step of that takes 20 to 30 times as long.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, weight_decay: float = 0.1, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(matrix)
                buffer = state["momentum_buffer"].lerp_(matrix.grad, 1.0 - group["momentum"])
                update = orthogonal(matrix.grad.lerp(buffer, group["momentum"]))
                rows, columns = matrix.shape
                matrix.mul_(1.0 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


CHECKPOINT, CACHE = "checkpoint.pt", "cache"  # in the folder of a run
CHECKPOINT_SECONDS = 120.0
MAX_MINUTES = 1_000_000
FIRST_CHECKPOINT_SECONDS = 10.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning rates: warm-up in steps, then constant, then linear to `floor` from the fraction `decay_from` on."""

    minutes: float
    muon: float = 0.02  # 2-D hidden matrices (Muon, Keller Jordan 2024)
    adamw: float = 0.004  # embedding, head, norms
    warmup_steps: int = 50
    decay_from: float = 0.5
    floor: float = 0.02

    def scale(self, step: int, progress: float) -> float:
        """Return the factor on both learning rates after `step` steps and the fraction `progress` of the minutes."""
        down = 1.0 - (1.0 - self.floor) * max(0.0, progress - self.decay_from) / (1.0 - self.decay_from)
        return min(1.0, (step + 1) / self.warmup_steps) * down

    def scaled(self, rates: float) -> "Schedule":
        """Return the schedule with both learning rates multiplied by `rates`."""
        return replace(self, muon=self.muon * rates, adamw=self.adamw * rates)


@dataclass(slots=True)
class TrainHistory:
    """Progress of a run, stored in every checkpoint and with the result."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    evaluations: list[dict[str, float]] = field(default_factory=list)


Batch = tuple[Tensor, ...]  # columns of the same rows, tokens [B, T] first
Batches = Callable[[float, int], Batch]  # (progress 0..1, step) -> batch
Loss = Callable[..., Tensor]  # (*columns) -> mean nats per token
Evaluate = Callable[[], dict[str, float]]


def optimizers(module: nn.Module, schedule: Schedule, vocab_size: int = 0) -> list[torch.optim.Optimizer]:
    """Return Muon for the hidden matrices and AdamW for all other parameters: norms, embeddings, heads over
    `vocab_size` tokens."""
    outer = {id(p) for m in module.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    outer |= {id(p) for p in module.parameters() if p.ndim == 2 and p.shape[0] == vocab_size}
    parameters = [p for p in module.parameters() if p.requires_grad]
    hidden = [p for p in parameters if p.ndim == 2 and id(p) not in outer]
    rest = [p for p in parameters if p.ndim != 2 or id(p) in outer]
    built: list[torch.optim.Optimizer] = []
    if hidden:
        built.append(Muon(hidden, lr=schedule.muon))
    if rest:
        built.append(torch.optim.AdamW(rest, lr=schedule.adamw, betas=(0.9, 0.95), weight_decay=0.0, fused=True))
    for optimizer in built:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return built


@dataclass(slots=True)
class TrainRun:
    """Module, optimizers and history: the state that a checkpoint stores."""

    module: nn.Module
    optimizers: list[torch.optim.Optimizer]
    history: TrainHistory
    pool: Executor | None = None  # runs the pieces of a batch in parallel

    def save(self, path: Path) -> None:
        """Write a checkpoint; the previous one becomes `*.previous`. Raises ValueError, one line, and leaves both
        unchanged on failure."""
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "module": self.module.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "history": asdict(self.history),
            "rng": torch.get_rng_state(),
        }
        with atomic_path(path) as part:
            with part.open("wb") as file:  # errors of a file that torch opens give no reason
                torch.save(state, file)
            if path.exists():
                path.replace(_previous(path))

    def resume(self, path: Path) -> None:
        """Load the checkpoint or, with a warning, the previous one; start from scratch if neither is usable.

        A file that is damaged or of another run is renamed to `*.unusable`.
        """
        for file in (path, _previous(path)):
            if not file.exists():
                continue
            try:
                self.load(file)
                return
            except (PermissionError, MemoryError):
                raise
            except Exception:  # torch and pickle raise any exception for an invalid file
                aside = file.replace(file.with_name(f"{file.name}.unusable"))
                logger.warning("%s is damaged or belongs to another run; renamed it to %s", file, aside.name)

    def load(self, path: Path) -> None:
        """Load a checkpoint. Raises for a file of another module, before anything is changed."""
        saved = torch.load(path, "cpu", weights_only=True)
        history = TrainHistory(**saved["history"])
        if _shapes(saved["module"]) != _shapes(self.module.state_dict()):
            raise ValueError("it belongs to another model or head")
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        torch.set_rng_state(saved["rng"])
        self.module.load_state_dict(saved["module"])
        self.history = history

    def step(self, batch: Batch, loss: Loss, scale: float, micro_tokens: int) -> float:
        """Run one update at `scale` times the peak learning rates; return the loss in nats per token."""
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
        """Run `evaluate` on validation text without gradients, and add its result to the history."""
        self.module.eval()
        with torch.no_grad():
            numbers = evaluate()
        self.module.train()
        h = self.history
        at = {"step": h.step, "tokens": h.tokens, "seconds": round(h.seconds), "train_loss": round(train_loss, 4)}
        h.evaluations.append(at | numbers)
        return h.evaluations[-1]


def _previous(path: Path) -> Path:
    return path.with_name(f"{path.name}.previous")


def _shapes(state: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in state.items()}


@dataclass(frozen=True, slots=True)
class TrainStep:
    """One training step; `evaluation` is set if one followed it."""

    history: TrainHistory
    loss: float
    evaluation: dict[str, float] | None


def train_steps(
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
) -> Generator[TrainStep, None, None]:
    """Train `module` in place until `schedule.minutes` are used; continue from `checkpoint` if it exists.

    All evaluations and checkpoints but the last ones count as well. A batch runs in pieces of `micro_tokens` tokens,
    whose gradients add up: small pieces stay in the CPU's cache, and a `pool` of single-threaded workers runs them
    without the barriers of a parallel operation. `clock` returns seconds. Closing the iterator stops after the current
    step and saves a checkpoint; run again with the same folder to continue.
    """
    run = TrainRun(module, optimizers(module, schedule, vocab_size), TrainHistory(), pool)
    run.resume(checkpoint)
    history = run.history
    total = schedule.minutes * 60.0
    save_at = history.seconds + min(FIRST_CHECKPOINT_SECONDS, CHECKPOINT_SECONDS)
    evaluated_at = history.evaluations[-1]["seconds"] if history.evaluations else 0.0
    module.train()
    try:
        yield TrainStep(history, nan, None)  # state before the first step
        started = clock()
        while history.seconds < total:
            progress = history.seconds / total
            batch = batches(progress, history.step)
            train_loss = run.step(batch, loss, schedule.scale(history.step, progress), micro_tokens)
            now = clock()
            history.seconds, started = history.seconds + now - started, now
            ended = history.seconds >= total
            evaluation = None
            if ended or history.seconds - evaluated_at >= evaluate_every_seconds:
                evaluation = run.evaluate(evaluate, train_loss)
                evaluated_at = history.seconds
            if ended or history.seconds >= save_at:
                run.save(checkpoint)
                save_at = history.seconds + CHECKPOINT_SECONDS
            yield TrainStep(history, train_loss, evaluation)
    except GeneratorExit:
        run.save(checkpoint)
        raise
    finally:
        module.eval()


def run_with_progress(ticks: Generator[TrainStep, None, None], minutes: float, name: str) -> TrainHistory:
    """Run to the end with a progress bar, or to the end of the step in which SIGINT or SIGTERM arrives."""
    history = TrainHistory()
    bar = tqdm(total=round(60.0 * minutes), unit="s", desc=name, mininterval=1.0, miniters=0)
    with defer_signals() as stop:
        with bar, closing(ticks):
            for tick in ticks:
                history = tick.history
                bar.n = min(round(history.seconds), round(60.0 * minutes))
                if not isnan(tick.loss):
                    bar.set_postfix(step=history.step, loss=f"{tick.loss:.3f}", refresh=False)
                    bar.update(0)  # shows it, once a second at most
                if tick.evaluation:
                    bar.write(json_text(finite(tick.evaluation)))
                if stop:
                    break
        if stop:
            logger.warning("%s is saved after %.0f s; run the same command to continue", name, history.seconds)
    return history


def check_minutes(minutes: float) -> float:
    """Return the minutes. Raises ValueError unless they are positive."""
    if not 0.0 < minutes <= MAX_MINUTES:
        raise ValueError(f"minutes must be positive, not {minutes:g}; {MAX_MINUTES:,} at most")
    return minutes


def remove_intermediate(out: Path) -> None:
    """Remove what a complete run no longer needs from its folder: its checkpoints and its teacher data."""
    for file in (out / CHECKPOINT, _previous(out / CHECKPOINT)):
        file.unlink(missing_ok=True)
    shutil.rmtree(out / CACHE, ignore_errors=True)


def write_provenance(out: Path, history: TrainHistory, **facts: object) -> None:
    """Write `provenance.json`: software, hardware, data and the training curve of a result."""
    facts = {**facts, "versions": versions(), "commit": commit(), **asdict(history)}
    write_text(out / "provenance.json", json_text(finite(facts), indent=1) + "\n")
    (out / MARKER).unlink(missing_ok=True)
