"""Selection of the checkpoint convention for files that allow several.

A wrong convention raises no error, but its drafts are rejected more often. The convention with the highest agreement on
text sampled from the target is used; within a margin, the documented one.
"""

from collections.abc import Callable

import torch
from torch import Generator

from specdemo.core.protocol import Progress, Target, Trainable
from specdemo.core.sampling import draw
from specdemo.methods.heads.network import Network

ROWS, COLUMNS = 8, 48  # of the sampled text
MARGIN = 0.02  # smaller differences in agreement may be noise


@torch.no_grad()
def select_convention(head: Network, target: Target, make_drafter: Callable[[], Trainable]) -> None:
    """Set the convention with the highest agreement on a sampled text, and describe it in `head.note`.

    make_drafter: returns a drafter of the head under its current convention.
    """
    taps: set[int] = set()
    for convention in head.conventions:
        head.use_convention(convention)
        taps.update(make_drafter().taps)
    text, scores = sample_target_text(target, tuple(taps)), []
    for convention in head.conventions:
        head.use_convention(convention)
        metrics = make_drafter().loss(text)[1]
        scores.append(sum(metrics.values()) / len(metrics))
    best = max(range(len(scores)), key=scores.__getitem__)
    chosen = head.conventions[best if scores[best] >= scores[0] + MARGIN else 0]
    head.use_convention(chosen)
    shares = "; ".join(f"{100 * share:.0f} % with {name}" for share, name in zip(scores, head.conventions, strict=True))
    head.note = f"Convention: {chosen}. The file does not specify it; agreement on a short text was {shares}."


def sample_target_text(target: Target, taps: tuple[int, ...]) -> Progress:
    """Sample texts from the target after a stop token; outputs are its argmax at every position.

    Greedy text would soon repeat itself and not distinguish the conventions.
    """
    rng = Generator().manual_seed(0)  # on the host, because a shared GPU may not be attached yet
    first = target.stop_token_ids[0] if target.stop_token_ids else 0
    tokens = torch.full((ROWS, 1), first, device=target.device)
    forward, texts, argmax_ids = target.start(tokens), [tokens], []
    for _ in range(COLUMNS):
        argmax_ids.append(forward.logits[:, -1].argmax(-1))
        texts.append(draw(forward.logits[:, -1].float().softmax(-1).cpu(), rng)[:, None].to(target.device))
        forward = target.forward(texts[-1], tokens[:, 1:])
        target.commit([[0]] * ROWS)
    inputs = torch.cat(texts[:-1], 1)
    hidden = target.start(inputs, taps).hidden
    target.release()
    return Progress(inputs, torch.stack(argmax_ids, 1), [COLUMNS] * ROWS, hidden)
