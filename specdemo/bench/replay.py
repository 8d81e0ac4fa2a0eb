"""Replay of a drafter that makes no passes on a text that plain decoding wrote. Greedy decoding with it writes the same
text, so the steps of every draft length are known without a pass of the target, and their time is the drafter's own and
that of the passes.
"""

from collections.abc import Callable
from itertools import takewhile
from operator import eq
from statistics import fmean
from time import perf_counter

import torch
from torch import Generator

from specdemo.core.protocol import Budget, Drafter, Progress
from specdemo.core.sampling import Sampling
from specdemo.core.trace import LaneTrace, step_ms


def replayed_speed(
    drafter: Drafter, k: int, plain: LaneTrace, new_tokens: int, pass_ratio: Callable[[int], float]
) -> float:
    """Return the predicted speed-up of a drafter of chains; 0 for a text of one token.

    plain: greedy decoding of at most `new_tokens`. pass_ratio: slots -> time of a pass in that of one over one token.
    """
    text, done = plain.token_ids, 1
    steps = [(step_ms(step), step.ms.get("verify", 0.0)) for step in plain.events[1:]] or [(0.0, 0.0)]
    plain_ms, pass_ms = map(fmean, zip(*steps, strict=True))
    drafter.start(1, Sampling(), Generator())
    drafter.observe(_progress(plain.prompt_ids, [*plain.prompt_ids[1:], *text[:1]]))
    total = 0.0
    while done < len(text):
        depth = min(k, new_tokens - done - 1)
        begin = perf_counter()
        draft = drafter.propose(Budget(depth, depth)).tokens[0].tolist()
        accepted = sum(takewhile(bool, map(eq, draft, text[done:])))
        step = text[done - 1 : done + accepted + 1]  # the root, what was accepted, and one more
        drafter.observe(_progress(step[:-1], step[1:]))
        drafting = 1000.0 * (perf_counter() - begin)
        verifying = pass_ms * pass_ratio(len(draft) + 1)
        drafter.on_step_timed({"draft": drafting, "verify": verifying})
        total += drafting + verifying + plain_ms - pass_ms
        done += len(step) - 1
    return plain_ms * (len(text) - 1) / total if total else 0.0


def _progress(inputs: list[int], outputs: list[int]) -> Progress:
    return Progress(torch.tensor([inputs]), torch.tensor([outputs]), [len(inputs)])
