"""What a pass of a target costs by its width, and how far passes of different widths round apart."""

from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdemo.core.protocol import Target
from specdemo.core.tree import chain_parents
from specdemo.models.machine import clock, one_thread
from specdemo.models.target import HFTarget

VERIFY_TOKENS = 5
APART = 4
VERIFY_LIMIT = 1.2  # times a one-token pass: above, speculation cannot pay


def verify_cost(target: HFTarget, slots: int = VERIFY_TOKENS, repeats: int = 5) -> tuple[float, float]:
    """Milliseconds of a one-token pass and of one that verifies `slots` tokens."""
    times = verify_costs(target, (1, slots), repeats)
    return times[1], times[slots]


def verify_costs(
    target: Target,
    widths: Sequence[int],
    repeats: int = 5,
    rows: int = 1,
    context: int = 32,
    of: Callable[[Sequence[float]], float] = median,
    uneven: bool = False,
) -> dict[int, float]:
    """Slots -> milliseconds of a pass over chains of that many behind `context` tokens, `rows` texts at once;
    interleaved, of all repeats the median, or what `of` says. uneven: the texts have different lengths, as drafts leave
    them: up to `APART` tokens more."""
    prompt = (torch.arange(1, context + 1, device=target.device) % target.vocab_size).repeat(rows, 1)
    times: dict[int, list[float]] = {width: [] for width in widths}
    with one_thread(target.device):
        target.start(prompt, reserve=max(widths) + APART)
        if uneven:
            _seconds(target, APART, rows)
            target.commit([list(range(1 + row % APART)) for row in range(rows)])
        for repeat in range(repeats + 1):
            for width, measured in times.items():
                seconds = _seconds(target, width, rows)
                if repeat:  # the first round warms up
                    measured.append(1000.0 * seconds)
        target.release()
    return {width: of(measured) for width, measured in times.items()}


def _seconds(target: Target, width: int, rows: int) -> float:
    tokens = (torch.arange(width, device=target.device) % target.vocab_size).repeat(rows, 1)
    now = clock(target.device)
    begin = now()
    target.forward(tokens, chain_parents(rows, width - 1, target.device))
    return now() - begin


def rounding_noise(target: HFTarget, tokens: Tensor, slots: int = VERIFY_TOKENS) -> float:
    """How far the logits of one-token passes and of one pass over the same `slots` tokens, the last of tokens [1, T],
    lie apart: kernels for other widths add in another order. 0.0 for a text too short to tell."""
    if tokens.shape[1] <= slots:
        return 0.0
    last = tokens[:, -slots:]
    target.start(tokens[:, :-slots])
    alone = []
    for token in last.split(1, 1):  # first, or they would be read by the recording of a wider pass
        alone.append(target.forward(token, token[:, 1:]).logits.float())
        target.commit([[0]])
    target.crop([tokens.shape[1] - slots])
    together = target.forward(last, chain_parents(1, slots - 1, tokens.device)).logits.float()
    target.release()
    return float((torch.cat(alone, 1) - together).abs().max())


def check_verify_cost(model: PreTrainedModel, name: str, dtype: str) -> None:
    """Raises ValueError where verifying costs so much more than one token that speculation cannot pay."""
    one, several = verify_cost(HFTarget(model))
    ratio = several / one
    if ratio > VERIFY_LIMIT:
        raise ValueError(
            f"{name} in {dtype} on this CPU: checking {VERIFY_TOKENS} tokens takes {ratio:.2f} times as long as one "
            f"(limit {VERIFY_LIMIT}), so speculation cannot pay; use dtype 'float32'"
        )
