"""Which reading of a file that leaves open how it is meant.

A wrong reading raises nothing, its drafts are only refused more often. So the target writes, and the reading is kept
whose guesses are right most often, the documented one where there is little between them.
"""

from collections.abc import Callable

import torch
from torch import Generator

from specdemo.core.protocol import Progress, Target, Trainable
from specdemo.core.sampling import draw
from specdemo.methods.heads.network import Network

ROWS, COLUMNS = 8, 48  # of the target's own text
MARGIN = 0.02  # of the guesses: what is less may be chance, and then the likeliest reading stands


@torch.no_grad()
def settle(head: Network, target: Target, drafter: Callable[[], Trainable]) -> None:
    """Keep the reading by which the head guesses texts of the target best, and note it. `drafter` makes one of the head
    as it is read now."""
    taps: set[int] = set()
    for reading in head.readings:
        head.read_as(reading)
        taps.update(drafter().taps)
    text, found = written(target, tuple(taps)), []
    for reading in head.readings:
        head.read_as(reading)
        metrics = drafter().loss(text)[1]
        found.append(sum(metrics.values()) / len(metrics))
    best = max(range(len(found)), key=found.__getitem__)
    kept = head.readings[best if found[best] >= found[0] + MARGIN else 0]
    head.read_as(kept)
    shares = "; ".join(f"{100 * share:.0f} % right by {way}" for share, way in zip(found, head.readings, strict=True))
    head.note = f"Read by {kept}, since of the guesses at a short text were {shares}: its file does not say."


def written(target: Target, taps: tuple[int, ...]) -> Progress:
    """Texts drawn from the target behind a stop token, and what it finds likeliest at every place: written greedily, a
    text soon repeats itself, and then any reading does."""
    rng = Generator().manual_seed(0)  # of the host: a lent GPU may not be there yet
    first = target.stop_token_ids[0] if target.stop_token_ids else 0
    tokens = torch.full((ROWS, 1), first, device=target.device)
    forward, texts, said = target.start(tokens), [tokens], []
    for _ in range(COLUMNS):
        said.append(forward.logits[:, -1].argmax(-1))
        texts.append(draw(forward.logits[:, -1].float().softmax(-1).cpu(), rng)[:, None].to(target.device))
        forward = target.forward(texts[-1], tokens[:, 1:])
        target.commit([[0]] * ROWS)
    inputs = torch.cat(texts[:-1], 1)
    hidden = target.start(inputs, taps).hidden
    target.release()
    return Progress(inputs, torch.stack(said, 1), [COLUMNS] * ROWS, hidden)
