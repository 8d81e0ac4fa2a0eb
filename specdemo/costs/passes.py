"""Curve of pass costs: milliseconds of a target's pass by its slots, and how its passes run on its machine, in words.

models/pass_cost.py measures the curve. A trace has it in its `environment`, which may come from a stranger's file.
"""

from bisect import bisect
from collections.abc import Mapping
from dataclasses import dataclass

from specdemo.core.tally import Tally
from specdemo.core.trace import RunTrace

SAME_BITS = "the same bits in passes of every width, for chains"
ROUNDED = "passes of different widths round differently"
MAX_MS = 1e9  # of a measured pass
LONGEST_WORD = 100  # characters
KEY_SPLIT = 512  # keys that torch's attention kernel for CPUs reads at once


@dataclass(frozen=True, slots=True)
class PassShape:
    """Sizes of verification passes with which kernels add in one order, so that a slot's logits are the same bits in a
    pass of every width (models/cpu_plan.py).

    slots: fewest slots of a pass; shorter ones are padded. tails: numbers of keys that a pass may read beyond a
    multiple of KEY_SPLIT, in ascending order; the mask hides those that follow the new ones. Empty: any number.
    """

    slots: int = 1
    tails: tuple[int, ...] = ()

    def columns(self, needed: int) -> int:
        """Return the number of columns that a pass reads if it needs `needed`."""
        if not self.tails:
            return needed
        splits, rest = divmod(needed - 1, KEY_SPLIT)
        return splits * KEY_SPLIT + next(tail for tail in self.tails if tail > rest)


def interpolate(values: Mapping[int, float], size: float) -> float:
    """Return the value at a size, interpolated linearly between measured ones.

    Below the smallest size the value is constant; above the largest it is extrapolated with the last slope, but never
    downwards. 0 without any value.
    """
    if size in values:
        return values[int(size)]
    sizes = sorted(values)
    index = bisect(sizes, size)
    if not index or len(sizes) == 1:
        return values[sizes[0]] if sizes else 0.0
    extrapolate = index == len(sizes)
    low, high = sizes[-2:] if extrapolate else sizes[index - 1 : index + 1]
    slope = (values[high] - values[low]) / (high - low)
    return values[high] + (max(slope, 0.0) if extrapolate else slope) * (size - high)


def pass_ratio(pass_ms: Mapping[int, float], slots: float) -> float:
    """Return the time of a pass over `slots` tokens, in that of one over a single token."""
    return interpolate(pass_ms, slots) / max(pass_ms[1], 1e-6)


def curve_of(environment: Mapping[str, object]) -> dict[int, float]:
    """Return slots -> milliseconds of a pass over a chain of that many; empty if it was not measured."""
    curve = environment.get("pass_ms")
    entries = curve.items() if isinstance(curve, dict) else ()
    times = {int(n): ms for n, ms in entries if n.isdecimal() and len(n) < 4 and isinstance(ms, int | float)}
    return times if 1 in times and all(0.0 < ms < MAX_MS for ms in times.values()) else {}


def cost_points(trace: RunTrace) -> list[tuple[float, float]]:
    """Return the tokens of passes and their costs in passes over one token, in ascending order: as measured at load,
    else from the steps of the lanes. Empty if neither is known."""
    if curve := curve_of(trace.environment):
        return [(n, round(pass_ratio(curve, n), 3)) for n in sorted(curve)]
    plain, *others = [Tally.of(lane.events) for lane in trace.lanes] or [Tally()]
    if not plain.verify_ms:
        return []
    drafting = [lane for lane in others if lane.drafted and lane.steps and lane.verify_ms]
    cost = plain.steps / plain.verify_ms
    points = [(1.0 + lane.drafted / lane.steps, round(cost * lane.verify_ms / lane.steps, 3)) for lane in drafting]
    return [(1.0, 1.0), *sorted(points)] if points else []


def measured_passes(trace: RunTrace, target: object) -> dict[int, float]:
    """Return the curve of the target on the CPU of a run; empty if the run does not have it."""
    here = trace.config.get("target") == target and trace.environment.get("threads")
    return curve_of(trace.environment) if here else {}


def pass_rows(environment: Mapping[str, object]) -> list[tuple[str, str]]:
    """Return name and value of every known fact."""
    facts = {name: str(value)[:LONGEST_WORD] for name, value in environment.items() if value}
    rows = [(title, facts[name]) for name, title in _WORDS.items() if name in facts]
    if curve := curve_of(environment):
        wider = [f"{n} tokens {ms / curve[1]:.2f}×" for n, ms in sorted(curve.items()) if n > 1]
        rows.append(("Passes", ", ".join([f"1 token {curve[1]:.1f} ms", *wider])))
    share, bandwidth = environment.get("bandwidth_share"), environment.get("bandwidth_gb_per_s")
    if isinstance(share, int | float) and isinstance(bandwidth, int | float):
        rows.append(("Memory", f"one token uses {100.0 * share:.0f} % of the {bandwidth:.1f} GB/s measured here"))
    return rows


_WORDS = {"kernels": "Engine", "threads": "CPU threads", "dtype": "Weights", "layout": "Layout", "exactness": "Logits"}
