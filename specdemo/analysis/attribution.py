"""Cost of a speculative step, measured or expected, as `CostModel`s in units of a plain decoding step.

Most engines report no times of drafting and verification. The total cost of a step is then the mean accepted length
divided by the speed-up. It is split with the costs that the roofline expects for the models on a data-centre GPU; the
rest is attributed to the part that most likely causes it, and the other attributions give the uncertainty.
"""

from collections.abc import Sequence
from dataclasses import astuple
from functools import lru_cache

from specdemo.analysis.configs import drafting, shape
from specdemo.analysis.observation import Observation
from specdemo.analysis.predict import ASSUMED
from specdemo.costs.acceptance import Acceptance, solve
from specdemo.costs.profiles import profile
from specdemo.costs.roofline import device_of, step_cost
from specdemo.costs.shapes import Shape, reference_configs
from specdemo.costs.step import CostModel, StepCost
from specdemo.methods.facts import MODELS, PREDICTED
from specdemo.models.ref import ModelRef

DEVICE, DTYPE, CONTEXT = "h100-sxm", "bfloat16", 1024
DENSE, EXPERTS, SMALL = "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-30B-A3B", "meta-llama/Llama-3.2-1B-Instruct"
# A draft token costs at most a plain step, as if the target were its own drafter; further costs are not drafting.
SLOWEST_DRAFT = 1.0
MOST_DRAFTED = 64  # tokens of a draft whose cost is expected
PARTS = ("drafting", "verification", "overhead")


def reach_rates(observation: Observation) -> list[float]:
    """Return the share of the steps whose draft reaches each position of a completed observation.

    The reach of drafts that end early is not reported. It falls by the same factor per position, so that its sum is the
    measured number of draft tokens per step.
    """
    k, share = observation.k or 1, observation.drafting_share or 1.0
    drafted = min(observation.drafted_per_step or share * k, share * k)
    if drafted < share:  # the share is unknown, and so it is at most as large
        share = drafted
    factor = 1.0
    if drafted < share * k:
        factor = solve(lambda factor: share * sum(factor**place for place in range(k)), drafted)
    return [share * factor**place for place in range(k)]


def accepted_rates(observation: Observation) -> list[float]:
    """Return the chance, at each position of a completed observation, that a step that accepted all earlier positions
    drafts and accepts the next token."""
    k, length = observation.k or 1, observation.accepted_length or 1.0
    shares = observation.by_position[:k]
    if any(shares):
        return [min(b / a, 1.0) if a else 0.0 for a, b in zip((1.0, *shares), shares, strict=False)]
    reach = reach_rates(observation)
    rate = solve(lambda rate: sum(n * rate**place for place, n in enumerate(reach, start=1)), length - 1.0)
    return [rate * ratio for ratio in ratios(reach)]


def ratios(reach: Sequence[float]) -> list[float]:
    """Return the share of the drafts that reach each position among those that reach the one before it."""
    return [b / a if a else 0.0 for a, b in zip((1.0, *reach), reach, strict=False)]


def _reference_name(name: str) -> str:
    """Return the well-known model that a name means; empty if there is none."""
    names = {ModelRef(id).base_name: id for id in reference_configs() if "/" in id}
    return names.get(ModelRef(name).base_name, "") if name else ""


def target_shape(observation: Observation) -> Shape:
    """Return the shape of the target if it is well known, else that of a typical model of its kind."""
    return shape(_reference_name(observation.target) or (EXPERTS if observation.moe else DENSE))


def expected_cost(observation: Observation, k: int, batch: float = 1.0) -> StepCost:
    """Return the cost that the roofline expects for the models of an observation."""
    target = target_shape(observation)
    method = observation.kind if observation.kind in PREDICTED else "eagle"
    return _expected(target, method, _reference_name(observation.drafter), min(k, MOST_DRAFTED), max(round(batch), 1))


@lru_cache(maxsize=256)
def _expected(target: Shape, method: str, drafter: str, k: int, batch: int) -> StepCost:
    config = reference_configs()[drafter or SMALL] if method in MODELS else None
    draft = drafting(method, target, config, {})
    device, acceptance = device_of(profile(DEVICE), DTYPE, "recorded"), Acceptance((ASSUMED,))
    plain, step = (step_cost(device, target, draft, acceptance, length, batch, CONTEXT) for length in (0, k))
    overhead = max(step.overhead - plain.overhead, 0.0) / plain.total
    return StepCost(step.drafting / plain.total, step.verify / plain.verify, overhead)


def step_costs(observation: Observation) -> list[StepCost]:
    """Return the most likely cost of a step of a completed observation, then other costs that explain it as well.

    A single entry is certain: all three parts are measured, or only the expected cost is known.
    """
    drafted, share = observation.drafted_per_step or 1.0, observation.drafting_share or 1.0
    depth = min(observation.per_draft, observation.k or observation.per_draft)
    k = max(round(depth), 1)
    expectation = expected_cost(observation, k, observation.batch_size or 1.0)
    drafting = expectation.drafting / min(k, MOST_DRAFTED) * depth / observation.per_draft * drafted
    expected = StepCost(drafting, 1.0 + share * (expectation.verify - 1.0), share * expectation.overhead)
    measured_drafting = None if observation.draft_cost is None else observation.draft_cost * drafted
    measured = (measured_drafting, observation.verify_cost, observation.overhead)
    known_parts = [part for part, value in zip(PARTS, measured, strict=True) if value is not None]
    start = StepCost(*(e if m is None else m for m, e in zip(measured, astuple(expected), strict=True)))
    speed, length = observation.speedup, observation.accepted_length
    unknown = [part for part in PARTS if part not in known_parts]
    if speed is None or length is None or not unknown:
        return [start]
    excess = length / speed.value - start.total
    if excess <= 0.0:
        return [_reduced(start, unknown, excess)]
    order = [part for part in _likely(observation) if part in unknown]
    orders = [order, *([part] for part in order)]
    costs = [_raised(start, parts, excess, drafted) for parts in orders]
    return list(dict.fromkeys(costs))


def _likely(observation: Observation) -> Sequence[str]:
    """Return the parts in the order in which an unexpected cost is attributed to them.

    A separate draft model runs k passes one after the other, so its launches cost most. Heads are one layer and lookups
    cost nothing, so their unexpected costs are those of the wider pass; so are those of experts and of large batches.
    """
    wide = observation.moe or (observation.batch_size or 1.0) >= 2.0
    slow_draft = not wide and observation.kind in ("", "draft_model", "layer_skip")
    return PARTS if slow_draft else ("verification", "overhead")


def _reduced(cost: StepCost, unknown: Sequence[str], excess: float) -> StepCost:
    """Return the cost with its unknown parts reduced to the measured total. A pass costs at least one plain step."""
    drafting = cost.drafting if "drafting" in unknown else 0.0
    wider = cost.verify - 1.0 if "verification" in unknown else 0.0
    rest = cost.overhead if "overhead" in unknown else 0.0
    share = max(1.0 + excess / (drafting + wider + rest), 0.0) if drafting + wider + rest else 1.0
    return StepCost(
        cost.drafting * (share if drafting else 1.0),
        1.0 + (cost.verify - 1.0) * (share if wider else 1.0),
        cost.overhead * (share if rest else 1.0),
    )


def _raised(cost: StepCost, parts: Sequence[str], excess: float, drafted: float) -> StepCost:
    """Return the cost with an excess added to the parts in order, each up to its limit; the last takes the rest.

    k + 1 tokens cost at most as much as k + 1 passes.
    """
    limits = {
        "drafting": max(SLOWEST_DRAFT * drafted - cost.drafting, 0.0),
        "verification": max(drafted + 1.0 - cost.verify, 0.0),
    }
    added = dict.fromkeys(PARTS, 0.0)
    for part in parts:
        added[part] = excess if part == parts[-1] else min(excess, limits[part])
        excess -= added[part]
    return StepCost(
        cost.drafting + added["drafting"], cost.verify + added["verification"], cost.overhead + added["overhead"]
    )


def cost_model(cost: StepCost, observation: Observation) -> CostModel:
    """Return the cost model of a completed observation in units of a plain step.

    Verification costs grow linearly with the number of tokens. A tree, drafts of several methods, and those that are
    verified in part are known at their measured size only.
    """
    k, drafted = observation.k or 1, observation.drafted_per_step or 1.0
    sized = drafted > k or observation.combined or observation.verified_in_part
    widest = round(drafted) if sized else k
    return CostModel(
        plain_ms=1.0,
        pass_ms=1.0,
        verify={1: 1.0, widest + 1: 1.0 + (cost.verify - 1.0) * widest / drafted},
        draft_ms=cost.drafting / drafted,
        draft_step_ms=0.0,
        other_ms=cost.overhead,
        alpha=accepted_rates(observation),
        k=k,
        reach_rates=reach_rates(observation),
        tree_nodes=drafted if sized else None,
    )
