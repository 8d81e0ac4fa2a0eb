"""Cost of a target's forward pass by its width, and rounding differences between passes of different widths."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from specdemo.core.estimate import Estimate, over_repeats
from specdemo.core.protocol import Target
from specdemo.core.tree import chain_parents
from specdemo.models.machine import clock, one_thread

VERIFY_TOKENS = 5
MAX_LENGTH_SPREAD = 4
VERIFY_LIMIT = 1.2  # times a one-token pass; above it the cost of verifying is worth a note
REPEATS = 6  # interleaved repeats of one measurement of the verify cost
NOISE_TOKENS = 48  # tokens over which rounding is measured
LIKELY = 8  # tokens of a position whose logits are compared
ROUNDS = 4  # measurements at most; only the first one is made where its interval excludes VERIFY_LIMIT

Clock = Callable[[], float]  # seconds
Pass = tuple[Tensor, Tensor, list[int]]  # tokens [1, S], parents [1, S - 1], path from the root


@dataclass(frozen=True, slots=True)
class VerifyCost:
    """Median milliseconds of a one-token pass and of a pass that verifies VERIFY_TOKENS tokens, and their ratio."""

    one_ms: float
    verify_ms: float
    ratio: Estimate

    @property
    def unclear(self) -> bool:
        """Return True if the interval of the ratio contains VERIFY_LIMIT."""
        return self.ratio.low is None or self.ratio.high is None or self.ratio.low <= VERIFY_LIMIT <= self.ratio.high

    def note(self, dtype: str) -> str:
        """Return a note where verifying costs more than VERIFY_LIMIT one-token passes, else an empty string."""
        if self.ratio.value <= VERIFY_LIMIT:
            return ""
        interval = f" (95 % interval {self.ratio.interval()})" if self.ratio.interval() else ""
        return (
            f"verifying {VERIFY_TOKENS} tokens in {dtype} takes {self.ratio.value:.2f} times as long as one token on "
            f"this CPU{interval}, so speculation gains less; compare with dtype float32"
        )


def median_times(times: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Return the median of the repeats of every width."""
    return {width: median(repeats) for width, repeats in times.items()}


def verify_cost(target: Target, now: Clock | None = None) -> VerifyCost:
    """Measure the verify cost with interleaved repeats, and measure on while its ratio is not clear of VERIFY_LIMIT.

    now: the clock; None: the clock of lanes on the target's device."""
    one: list[float] = []
    verify: list[float] = []
    for _ in range(ROUNDS):
        times = pass_times(target, (1, VERIFY_TOKENS), REPEATS, now=now)
        one += times[1]
        verify += times[VERIFY_TOKENS]
        ratio = over_repeats([long / max(short, 1e-6) for short, long in zip(one, verify, strict=True)])
        cost = VerifyCost(median(one), median(verify), ratio)
        if not cost.unclear:
            break
    return cost


def pass_times(
    target: Target,
    widths: Sequence[int],
    repeats: int = 5,
    rows: int = 1,
    context: int = 32,
    ragged: bool = False,
    now: Clock | None = None,
) -> dict[int, list[float]]:
    """Return slots -> milliseconds of every repeat of a pass over a chain of that many, after `context` tokens, for
    `rows` texts at once. Repeats of different widths are interleaved.

    ragged: the texts have different lengths, up to `MAX_LENGTH_SPREAD` tokens more. now: the clock; None: that of
    lanes.
    """
    now = now or clock(target.device, target.wall_time)
    prompt = (torch.arange(1, context + 1, device=target.device) % target.vocab_size).repeat(rows, 1)
    times: dict[int, list[float]] = {width: [] for width in widths}
    with one_thread(target.device):
        target.start(prompt, reserve=max(widths) + MAX_LENGTH_SPREAD)
        if ragged:
            _seconds(target, MAX_LENGTH_SPREAD, rows, now)
            target.commit([list(range(1 + row % MAX_LENGTH_SPREAD)) for row in range(rows)])
        for repeat in range(repeats + 1):
            for width, measured in times.items():
                seconds = _seconds(target, width, rows, now)
                if repeat:  # the first round warms up
                    measured.append(1000.0 * seconds)
        target.release()
    return times


def _seconds(target: Target, width: int, rows: int, now: Clock) -> float:
    tokens = (torch.arange(width, device=target.device) % target.vocab_size).repeat(rows, 1)
    begin = now()
    target.forward(tokens, chain_parents(rows, width - 1, target.device))
    return now() - begin


def rounding_noise(target: Target, tokens: Tensor, slots: int = VERIFY_TOKENS) -> float:
    """Return the `passes_noise` of passes over chains of `slots` tokens, about the last NOISE_TOKENS of tokens [1, T].
    0.0 for a text of one token."""
    slots = min(slots, tokens.shape[1] - 1)
    if slots < 2:
        return 0.0
    count = slots * min(max(NOISE_TOKENS // slots, 1), (tokens.shape[1] - 1) // slots)
    parents = chain_parents(1, slots - 1, tokens.device)
    chains = [(chain, parents, [*range(slots)]) for chain in tokens[:, -count:].split(slots, 1)]
    return passes_noise(target, tokens[:, :-count], chains)


def passes_noise(target: Target, tokens: Tensor, passes: Sequence[Pass]) -> float:
    """Return the largest change of the gap between two likely tokens from one-token passes to `passes` over the same
    text, after tokens [1, T]. Kernels for other widths, and caches in another order, add in another order."""
    text = torch.cat([slots[:, path] for slots, _, path in passes], 1)
    # one-token passes first, because the CUDA graph of a wide pass would serve single tokens too
    single = _logits(target, tokens, [(token, token[:, 1:], [0]) for token in text.split(1, 1)])
    likely = single.topk(min(LIKELY, single.shape[-1])).indices
    change = (single - _logits(target, tokens, passes)).gather(-1, likely)
    return float((change.amax(-1) - change.amin(-1)).max())


def _logits(target: Target, tokens: Tensor, passes: Sequence[Pass]) -> Tensor:
    """Return the logits [1, N, vocabulary] of the N slots on the paths of passes after tokens [1, T]."""
    target.start(tokens, reserve=sum(slots.shape[1] for slots, _, _ in passes))
    found = []
    for slots, parents, path in passes:
        found.append(target.forward(slots, parents).logits[:, path].float())
        target.commit([path])
    target.release()
    return torch.cat(found, 1)
