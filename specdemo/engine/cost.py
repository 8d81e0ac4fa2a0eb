"""Why a lane is as fast as it is. c: time of drafting one token, v(n): time of a target pass over n slots, both in
units of a one-token target pass; alpha: acceptance per drafted token; k: draft length (Leviathan et al. 2211.17192,
theorem 3.8, with v(k + 1) measured instead of taken as 1)."""

from collections.abc import Callable
from typing import Any


def tokens_per_step(alpha: float, k: int) -> float:
    """Expected tokens of one step, the target's own included: 1 + alpha + ... + alpha^k."""
    return float(k + 1) if alpha >= 1.0 else (1.0 - alpha ** (k + 1)) / (1.0 - alpha)


def predicted_speedup(alpha: float, k: int, c: float, v: Callable[[int], float] = lambda n: 1.0) -> float:
    return tokens_per_step(alpha, k) / (k * c + v(k + 1))


def best_k(alpha: float, c: float, v: Callable[[int], float] = lambda n: 1.0, longest: int = 16) -> int:
    """The k in 0..longest that is predicted to be fastest; 0 means: do not speculate."""
    return max(range(longest + 1), key=lambda k: predicted_speedup(alpha, k, c, v))


def explain(plain: dict[str, Any], lane: dict[str, Any]) -> str:
    """One sentence from two lane summaries (core.trace.summarise): what the speed-up or slow-down is made of."""
    speeds = plain.get("tokens_per_s"), lane.get("tokens_per_s")
    if not speeds[0] or not speeds[1] or not lane["steps"]:
        return "Too few tokens to say."
    plain_ms = 1000.0 / speeds[0]
    step_ms = lane["tokens_per_step"] * 1000.0 / speeds[1]
    draft_ms = lane["ms_draft"] / lane["steps"]
    verdict = "Faster" if step_ms < lane["tokens_per_step"] * plain_ms else "Slower"
    sentence = (
        f"{verdict}: a step costs {step_ms / plain_ms:.2f}x a plain token ({draft_ms / step_ms:.0%} of it drafting) "
        f"and yields {lane['tokens_per_step']:.2f} tokens"
    )
    if not lane["drafted"]:
        return sentence + "; nothing was drafted."
    return sentence + f"; {lane['acceptance_rate']:.0%} of the drafted tokens were kept."
