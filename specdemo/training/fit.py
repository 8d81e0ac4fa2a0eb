"""Fit any parameters to any stream of batches: schedule by the clock, checkpoints that survive a kill, provenance.

Names no method. The learning rate follows the share of `minutes` that is used up, so a run ends when it was asked to
end, on any machine; what it saw is written down beside the result.
"""

import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from tqdm import tqdm

CHECKPOINT_SECONDS = 120.0


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


Batches = Callable[[float, int], Tensor]  # (progress 0..1, step) -> tokens [B, T]
Loss = Callable[[Tensor], tuple[Tensor, dict[str, float]]]
Evaluate = Callable[[], dict[str, float]]


def optimizers(module: nn.Module, schedule: Schedule) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices, AdamW for everything else."""
    outer = {id(p) for m in module.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    parameters = [p for p in module.parameters() if p.requires_grad]
    hidden = [p for p in parameters if p.ndim == 2 and id(p) not in outer]
    rest = [p for p in parameters if p.ndim != 2 or id(p) in outer]
    built: list[torch.optim.Optimizer] = []
    if hidden:
        built.append(torch.optim.Muon(hidden, lr=schedule.muon, weight_decay=schedule.weight_decay, momentum=0.95))
    if rest:
        built.append(torch.optim.AdamW(rest, lr=schedule.adamw, betas=(0.9, 0.95), weight_decay=0.0, fused=True))
    for optimizer in built:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return built


def fit(
    module: nn.Module,
    batches: Batches,
    loss: Loss,
    evaluate: Evaluate,
    schedule: Schedule,
    checkpoint: Path,
    micro_tokens: int = 2048,
    evaluate_every_seconds: float = 240.0,
) -> History:
    """Train `module` in place until `schedule.minutes` of training time are used; resume from `checkpoint` if it exists.

    A batch runs in pieces of `micro_tokens` tokens whose gradients add up: small pieces stay in a CPU's cache.
    """
    built = optimizers(module, schedule)
    history = History()
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        module.load_state_dict(saved["module"])
        for optimizer, state in zip(built, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        history = History(**saved["history"])
        torch.set_rng_state(saved["rng"])

    def save() -> None:
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        part = checkpoint.with_suffix(".part")
        state = {
            "module": module.state_dict(),
            "optimizers": [o.state_dict() for o in built],
            "history": asdict(history),
            "rng": torch.get_rng_state(),
        }
        torch.save(state, part)
        part.replace(checkpoint)  # a kill leaves either the old checkpoint or the new one

    total = schedule.minutes * 60.0
    saved_at = evaluated_at = history.seconds
    bar = tqdm(total=round(total), initial=round(history.seconds), unit="s", desc=checkpoint.parent.name, mininterval=5)
    module.train()
    while history.seconds < total:
        started = time.perf_counter()
        progress = history.seconds / total
        scale = schedule.scale(history.step, progress)
        for optimizer in built:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * scale
        batch = batches(progress, history.step)
        numbers: dict[str, float] = {}
        total_loss = 0.0
        for piece in batch.split(max(1, micro_tokens // batch.shape[1])):
            value, numbers = loss(piece)
            value = value * (len(piece) / len(batch))
            value.backward()  # type: ignore[no-untyped-call]
            total_loss += value.item()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for optimizer in built:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        history.step += 1
        history.tokens += batch.numel()
        history.seconds += time.perf_counter() - started
        if history.step % 10 == 0:
            bar.n = round(history.seconds)
            bar.set_postfix({"step": history.step, "loss": f"{total_loss:.3f}", **numbers})
        due = history.seconds - evaluated_at >= evaluate_every_seconds
        if due or history.seconds >= total:
            module.eval()
            with torch.no_grad():
                result = {"step": history.step, "tokens": history.tokens, "seconds": round(history.seconds)}
                history.evaluations.append({**result, "train_loss": round(total_loss, 4), **evaluate()})
            module.train()
            evaluated_at = history.seconds
            bar.write(json.dumps(history.evaluations[-1]))
        if history.seconds - saved_at >= CHECKPOINT_SECONDS or history.seconds >= total:
            save()
            saved_at = history.seconds
    bar.close()
    module.eval()
    return history


def write_provenance(out: Path, history: History, data_sha256: str, **more: Any) -> None:
    """`provenance.json` beside a result: what ran, on what, on which data, and the curve."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    facts = {
        "argv": ["specdemo", *sys.argv[1:]],
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__},
        "commit": commit.stdout.strip() or None,
        "data_sha256": data_sha256,
        **more,
        **asdict(history),
    }
    (out / "provenance.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def cycle(epoch: Callable[[int], Iterator[Tensor]]) -> Iterator[Tensor]:
    """Epoch 0, 1, 2, ... without end."""
    number = 0
    while True:
        yield from epoch(number)
        number += 1
