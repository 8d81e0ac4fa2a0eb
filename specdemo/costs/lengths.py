"""Choice of draft lengths: the most expected tokens per time, from the costs of passes.

A step with k draft tokens outputs 1 + a1 + a1 a2 + ... tokens, where a is the acceptance rate of a position after
accepted ones (Leviathan et al., 2211.17192, equation 1, with one rate per position). Its time is that of drafting and
of a target pass over k + 1 slots.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from math import comb

from specdemo.costs.acceptance import expected_tokens
from specdemo.costs.passes import interpolate, pass_ratio

USUAL_RATE = 0.7  # acceptance rate that a draft length is chosen for before any is measured
RATES = [n / 20 for n in range(1, 20)]  # acceptance rates that draft lengths to try are chosen for
NEAR = 0.97  # share of the best speed at such a rate that is enough
USUAL_DECAY = 0.2  # that of a further child of a slot, relative to the one before
USUAL_LENGTHS = (1, 2, 3, 4, 5, 6, 7)  # draft lengths to choose from
MAX_K = 16  # largest draft length that is set, tried or predicted
DEFAULT_LENGTH = 4  # where the cost of passes is unknown


def best_length(tokens: Iterable[float], times: Iterable[float]) -> int:
    """Return the index of the most tokens per time. A time of 0 is unknown and loses against any other."""
    speeds = [n / time if time else 0.0 for n, time in zip(tokens, times, strict=True)]
    return speeds.index(max(speeds))


def usual_length(pass_ms: Mapping[int, float], draft_ms: Callable[[int], float]) -> int:
    """Return the draft length with the most expected tokens per time at USUAL_RATE.

    pass_ms: slots -> time of a pass; empty: unknown. draft_ms: draft length -> time of drafting.
    """
    times = [interpolate(pass_ms, k + 1) + draft_ms(k) for k in USUAL_LENGTHS]
    best = best_length(expected_tokens([USUAL_RATE] * len(times))[1:], times)
    return USUAL_LENGTHS[best] if pass_ms else DEFAULT_LENGTH


def draft_lengths(pass_ms: Mapping[int, float], draft: float, longest: int) -> list[int]:
    """Return the fewest draft lengths of which one is near the best at every acceptance rate, sorted; none if no length
    is faster than plain decoding at any rate.

    pass_ms: slots -> time of a pass. draft: time to draft a token, in passes. longest: the first length that is too
    long.
    """
    speeds = {}
    for k in range(1, longest):
        step = pass_ratio(pass_ms, k + 1) + draft * k
        speeds[k] = [expected_tokens([rate] * k)[k] / step for rate in RATES]
    best = [max(column) for column in zip(*speeds.values(), strict=True)]
    near = {k: {i for i, speed in enumerate(row) if speed >= NEAR * best[i]} for k, row in speeds.items()}
    rest, lengths = {i for i, speed in enumerate(best) if speed > 1.0}, list[int]()
    while rest:
        lengths.append(max(near, key=lambda k: (len(near[k] & rest), -k)))
        rest -= near[lengths[-1]]
    return sorted(lengths)


def usual_tree(
    pass_ms: Mapping[int, float], draft_ms: Callable[[int], float], most: int, depth: int = 0
) -> tuple[int, int]:
    """Return depth and nodes of the tree with the most expected tokens per time, no wider than a measured pass.

    The children of a slot are expected to be accepted at USUAL_RATE, USUAL_DECAY of it, and so on. most: nodes. depth:
    fixed; 0: chosen. For the other arguments see `usual_length`.
    """
    most = max(min(most, max(pass_ms) - 1), 1)
    gains: dict[tuple[int, int], float] = {}
    for k in (depth,) if depth else USUAL_LENGTHS:
        probs = [
            USUAL_RATE**level * USUAL_DECAY**ranks
            for level in range(1, k + 1)
            for ranks in range(most)
            for _ in range(min(comb(ranks + level - 1, ranks), most))  # so many nodes have these ranks in all
        ]
        tokens = accumulate(sorted(probs, reverse=True)[:most], initial=1.0)
        times = (interpolate(pass_ms, nodes + 1) + draft_ms(k) for nodes in range(most + 1))
        gains |= {(k, nodes): n / time for nodes, (n, time) in enumerate(zip(tokens, times, strict=True)) if nodes}
    return max(gains, key=gains.__getitem__)
