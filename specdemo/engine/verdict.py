"""Comparison of each lane's output with the baseline's, and classification of differences."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdemo.core.protocol import Target
from specdemo.core.rules import draws_by_position
from specdemo.core.sampling import PositionNoise, Sampling, to_probs
from specdemo.core.trace import LaneTrace, RunTrace, StepEvent, compare, same_prompt, whole_requests
from specdemo.core.tree import chain_parents
from specdemo.models.cpu_threads import step_threads
from specdemo.models.devices import device_kind
from specdemo.models.pass_cost import VERIFY_TOKENS, Pass, chain_rounding, pass_rounding

CHUNK = 16  # tokens per pass that reads a finished text, as many slots as a long draft
PASSES = 16  # of a lane before a difference that are repeated
AFTER = 16  # tokens after a difference over which rounding is measured too
MAX_TOLERANCE = 1.0  # of logits, a factor e of the probability: passes that differ by more are wrong, not rounded


def compare_outputs(
    trace: RunTrace, target: Target | None, disturbances: Sequence[str] = (), explains: bool = True
) -> None:
    """Fill in `comparison`.

    target: the baseline's target, which reads a text again where two lanes diverge; None: the baseline ran on a server.
    disturbances: reasons why the times of the run may not be repeatable. explains: examine why two texts diverge;
    otherwise the verdict is unknown.
    """
    config: Mapping[str, Any] = trace.config
    baseline = trace.lanes[0]
    sampling = Sampling(**{f.name: config[f.name] for f in fields(Sampling) if f.name in config})
    margin_of = partial(_margin, sampling=sampling, seed=config.get("seed", 0))
    for lane in trace.lanes[1:]:
        one_text = sampling.greedy or (draws_by_position(baseline.options) and draws_by_position(lane.options))
        row = compare(baseline, lane, one_text, schedule=trace.schedule)
        if row["speedup"] and disturbances:
            row |= {"noisy": True, "reasons": [*row["reasons"], *disturbances]}
        index = row["first_divergence"]
        served = whole_requests(baseline, lane)
        reader = None if served else target  # a server does not tell the ids of its prompt
        if "error" in (baseline.finish, lane.finish) or not same_prompt(baseline, lane):
            row |= {"identical": None, "first_divergence": None, "verdict": "unknown"}
        elif not lane.exact:
            row |= {"verdict": "lossy", "identical": row["identical"] or None}  # it need not be identical
            row |= _price(trace, lane, reader)
            if index is not None and reader is not None:
                with suppress(Exception), step_threads(reader):  # for example out of memory
                    row["divergence_margin"], _ = _gap(reader, baseline, lane, index, margin_of)
        elif served:
            row["verdict"] = _text_verdict(baseline, lane, row["identical"])
        elif index is None:
            row["verdict"] = "identical" if one_text else "same distribution"
            row["bit_for_bit"] = one_text and reader is not None and _same_bits(reader, lane)
        elif not explains:
            row["verdict"] = "unknown"
        else:
            assert reader is not None
            row["verdict"] = "unknown"
            with suppress(Exception), step_threads(reader):  # for example out of memory
                row["divergence_margin"], rounding = _divergence(reader, baseline, lane, index, margin_of)
                row["verdict"] = "rounding" if rounding else "differs"
        trace.comparison.append(row)


def _same_bits(target: Target, lane: LaneTrace) -> bool:
    """Return True if all passes of a lane give the same bits as plain decoding. Passes over trees, and over more than
    `DeviceKind.exact_slots` slots, may round differently."""
    drafts = [parents for event in lane.events for parents in event.parents]
    most = device_kind(target.device).exact_slots
    narrow = all(len(parents) < most for parents in drafts)
    return target.facts.same_bits and narrow and all(parents == [*range(len(parents))] for parents in drafts)


def _margin(logits: Tensor, tokens: Sequence[int], sampling: Sampling, seed: int, position: int) -> float:
    """Return the largest change of logits [V] that a token of `tokens` needs to become the one drawn at `position`.

    Greedy decoding draws the best logit, sampling the best one after temperature and noise among those that top-k,
    top-p and min-p keep. A token may also need to pass their limit, or the one drawn to fall below it.
    """
    if sampling.greedy:
        return float(logits.max() - logits[list(tokens)].min())
    noise = PositionNoise(seed, 1, position, len(logits), logits.device).ahead(1)[0, 0]
    scores, kept = logits - sampling.temperature * noise.log(), to_probs(logits, sampling) > 0.0
    lowest, highest_cut = logits[kept].min(), torch.where(kept, -torch.inf, logits).max()
    (best, second), (draw, _) = torch.where(kept, scores, -torch.inf).topk(2)
    gap, to_limit = -scores[list(tokens)], (lowest - logits[list(tokens)]).clamp_min(0.0)
    without_drawn = torch.maximum(second + gap, logits[draw] - highest_cut)
    return float(torch.maximum(torch.minimum(best + gap, without_drawn), to_limit).max())


def _price(trace: RunTrace, lane: LaneTrace, target: Target | None) -> dict[str, float]:
    """Return what the lossy rule of a lane changed: tokens that the lossless rule rejects, and the mean log-likelihood
    of a token under the target at temperature 1, with the baseline's. Unknown numbers are left out.
    """
    price: dict[str, float] = {}
    changed = [event.notes["changed"] for event in lane.events if "changed" in event.notes]
    if changed:
        price["tokens_changed"] = round(sum(changed))
    if target is None:
        return price
    with suppress(Exception), step_threads(target):  # for example out of memory
        for name, side in (("log_likelihood", lane), ("baseline_log_likelihood", trace.lanes[0])):
            price[name] = round(log_likelihood(target, side.prompt_ids, side.token_ids), 4)
    return price


@torch.no_grad()
def log_likelihood(target: Target, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> float:
    """Return the mean natural logarithm of the target's probability of a token, at temperature 1. Raises ValueError for
    a text without tokens."""
    if not token_ids:
        raise ValueError("the text has no tokens")
    tokens = torch.tensor([[*prompt_ids, *token_ids]], device=target.device)
    start = len(prompt_ids)
    try:
        scores = target.start(tokens[:, :start], reserve=len(token_ids)).logits[:, -1:]
        total = 0.0
        for begin in range(start, tokens.shape[1], CHUNK):
            chunk = tokens[:, begin : begin + CHUNK]
            forward = target.forward(chunk, chain_parents(1, chunk.shape[1] - 1, chunk.device))
            logits = torch.cat([scores, forward.logits[:, :-1]], 1).float()
            total += float(logits.log_softmax(-1).gather(-1, chunk[..., None]).sum())
            scores = forward.logits[:, -1:]
            target.commit([list(range(chunk.shape[1]))])
    finally:
        target.release()
    return total / len(token_ids)


def _text_verdict(baseline: LaneTrace, lane: LaneTrace, same: bool | None) -> str:
    """Return the verdict if a server wrote one of the texts. Its sampling rule, and why a text differs, are unknown."""
    if same is None or not lane.text:
        return "unknown"
    if not same:
        return "text differs"
    return "same text" if -1 in (*baseline.token_ids, *lane.token_ids) else "identical"


@torch.no_grad()
def _gap(
    target: Target, baseline: LaneTrace, lane: LaneTrace, index: int, margin_of: Callable[..., float]
) -> tuple[float, Tensor]:
    """Return the gap from the target's best logit to the worse of the two chosen ones where the texts diverge, and the
    logits [V]. margin_of: `_margin` with the run's settings."""
    end = len(baseline.prompt_ids) + index
    text = torch.tensor([(baseline.prompt_ids + baseline.token_ids)[:end]], device=target.device)
    logits = target.start(text).logits[0, -1].float()
    target.release()
    candidates = [tokens[index] for tokens in (baseline.token_ids, lane.token_ids) if index < len(tokens)]
    return round(margin_of(logits, candidates, position=end), 6), logits


@torch.no_grad()
def _divergence(
    target: Target, baseline: LaneTrace, lane: LaneTrace, index: int, margin_of: Callable[..., float]
) -> tuple[float, bool]:
    """Return the gap where the texts diverge, and True if rounding explains it.

    Passes of different widths use different kernels and round differently. It is rounding if the gap is no larger than
    1.5 times the largest difference between passes of one token and those of the lane, repeated up to the difference
    and as chains over the text around it, or than two units in the last place: two logits in two passes, each rounded
    by half a unit. A larger gap is a bug, and so is any gap where the passes are chains of the same bits.
    """
    margin, logits = _gap(target, baseline, lane, index, margin_of)
    if _same_bits(target, lane):
        return margin, False
    text = torch.tensor([baseline.prompt_ids + baseline.token_ids], device=target.device)
    end = len(baseline.prompt_ids) + index
    units = torch.finfo(target.dtype).eps * abs(float(logits.max()))
    width = 1 + max((len(event.drafted[0]) for event in lane.events), default=VERIFY_TOKENS - 1)
    rounding = chain_rounding(target, text[:, : end + AFTER], width)
    start, passes = _passes_before(lane, lane.events, index, target.device)
    if passes:
        rounding = max(rounding, pass_rounding(target, text[:, : len(baseline.prompt_ids) + start], passes))
    tolerance = max(1e-4, 2.0 * units, min(1.5 * rounding, MAX_TOLERANCE))
    return margin, margin <= tolerance


def _passes_before(
    lane: LaneTrace, events: Sequence[StepEvent], index: int, device: torch.device
) -> tuple[int, list[Pass]]:
    """Return the last PASSES of a lane up to the one that emitted token `index`, and the number of tokens before."""
    passes: list[tuple[int, Pass]] = []
    count = len(events[0].emitted[0]) if events else 0  # the prefill's
    for event in events[1:]:
        if count > index:
            break
        slots = torch.tensor([[lane.token_ids[count - 1], *event.drafted[0]]], device=device)
        parents = torch.tensor([event.parents[0]], dtype=torch.int64, device=device)
        passes.append((count - 1, (slots, parents, event.path[0])))
        count += len(event.emitted[0])
    last = passes[-PASSES:]
    return (last[0][0] if last else 0), [p for _, p in last]
