"""Results of the lanes of a run in numbers and words, from the same diagnosis as for other engines. Needs no torch."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

from specdemo.analysis.diagnose import accepted_clause, diagnose, verdict
from specdemo.analysis.observation import Observation
from specdemo.core.estimate import Estimate
from specdemo.core.headline import SO_FAR, settled
from specdemo.core.tally import summarise
from specdemo.core.trace import ComparisonRow, LaneTrace, RunTrace, estimates, whole_requests
from specdemo.costs.step import DraftLengthAdvice, break_even_rate

Summary = Mapping[str, Any]  # of core.tally.summarise


@dataclass(frozen=True, slots=True)
class LaneResult:
    """Result of a speculative lane, which the page and the command line show.

    row: its row of `comparison`; empty if the trace has none. word: of the speed-up, or "so far" for a lane that cannot
    be compared, whose `why` is empty then.
    """

    lane: LaneTrace
    row: ComparisonRow
    speed: Estimate | None
    word: str
    why: str


def results(trace: RunTrace, times: str = "x") -> list[LaneResult]:
    """Return the result of every speculative lane. times: the unit of a speed-up in a sentence."""
    rows = chain(trace.comparison, repeat(ComparisonRow()))
    lanes = []
    for lane, row, speed, entry in zip(trace.lanes[1:], rows, estimates(trace), prediction(trace, times), strict=False):
        word, why = (speed.label if speed else "", entry["sentence"]) if settled(trace, lane) else (SO_FAR, "")
        lanes.append(LaneResult(lane, row, speed, word, why))
    return lanes


def prediction(trace: RunTrace, times: str = "x") -> list[dict[str, Any]]:
    """Return one entry per speculative lane: lane, predicted_speedup (as it ran), best_k (0: off), best_speedup,
    sentence.

    The numbers are None if too little was decoded. times: the unit of a speed-up in the sentence.
    """
    lanes = zip(trace.lanes[1:], estimates(trace), strict=True)
    return [_predict_lane(trace.lanes[0], lane, speed, times) for lane, speed in lanes]


def break_even(lane: Summary, speed: Estimate | None) -> float | None:
    """Return the acceptance rate below which a lane is slower than plain decoding on this machine; above 1: it always
    is. None if it is unknown. lane: its summary.
    """
    length, drafted, steps = (lane.get(name) for name in ("tokens_per_step", "drafted", "steps"))
    if speed is None or not length or not drafted or not steps or not speed.value:
        return None
    return break_even_rate(length / speed.value, drafted / steps)


def _predict_lane(plain: LaneTrace, lane: LaneTrace, speed: Estimate | None, times: str) -> dict[str, object]:
    numbers, requests = summarise(lane), whole_requests(plain, lane)
    sentence = _request_sentence(speed, numbers, times) if requests and speed else explain(numbers, speed, times)
    sentence += _server_times(plain) + _server_times(lane)
    if lane.service.source:
        sentence += f" {lane.service.source}."
    predicted: dict[str, object] = dict.fromkeys(("predicted_speedup", "best_k", "best_speedup"))
    requested_k = lane.options.get("k")
    with suppress(ArithmeticError, ValueError):  # a stored trace may contain any times
        k = requested_k if isinstance(requested_k, int) else 0
        advice = None if requests or speed is None else DraftLengthAdvice.of(plain.events, lane.events, k)
        if advice is not None and speed is not None and numbers["drafted"]:
            found = diagnose(observation_of(numbers, lane.method, max(k, advice.costs.k), speed), advice)
            sentence = verdict(found, times, _opening(speed, times))
            costs, best = advice.costs, found.best_k or 0
            speedups = round(costs.speedup(costs.k), 4), round(costs.speedup(best), 4)
            predicted = {"predicted_speedup": speedups[0], "best_k": best, "best_speedup": speedups[1]}
    return {"lane": lane.name, **predicted, "sentence": sentence}


def explain(lane: Summary, speed: Estimate | None, times: str = "x") -> str:
    """Explain a lane's speed-up in one sentence, from its summary (core.tally.summarise)."""
    if speed is None or not (lane["steps"] or lane.get("tokens")):
        return "Too few tokens for an explanation."
    if not lane["steps"]:  # only a server does not tell them
        return f"{_opening(speed, times)}; {_accepted(lane, speed) or 'the server does not report its drafts'}."
    cost = round(lane["tokens_per_step"] / speed.value, 2)
    sentence = (
        f"{_opening(speed, times)}: a step takes as long as plain decoding of {cost:.2f} tokens{_drafting(lane, cost)} "
        f"and yields {lane['tokens_per_step']:.2f} tokens"
    )
    nothing = f"nothing was {'verified' if lane.get('unverified') else 'drafted'}"
    return f"{sentence}; {_accepted(lane, speed) or nothing}."


def _drafting(lane: Summary, cost: float) -> str:
    """Return drafting's part of the cost of a step, if it is known and there is any."""
    draft, *others = (lane.get(f"ms_{part}") or 0.0 for part in ("draft", "verify", "other"))
    part = cost * draft / (draft + sum(others)) if draft else 0.0
    return f" ({part:.2f} of them for drafting)" if part >= 0.01 else ""


def _opening(speed: Estimate, times: str) -> str:
    return f"{speed.label.capitalize()} ({speed.format(times)})"


def observation_of(lane: Summary, method: str, k: int, speed: Estimate | None = None) -> Observation:
    """Return the facts in the summary of a lane that drafts k tokens with a method."""
    return Observation(
        method=method,
        k=k,
        accepted_length=lane["tokens_per_step"],
        acceptance_rate=lane["acceptance_rate"],
        drafted_per_step=lane["drafted"] / max(lane["steps"], 1),
        steps=lane["steps"],
        speedup=speed,
    )


def _accepted(lane: Summary, speed: Estimate) -> str:
    """Return the acceptance rate with the one that breaks even; empty if nothing was drafted."""
    rate, needed = lane.get("acceptance_rate"), break_even(lane, speed)
    return "" if rate is None else accepted_clause(rate, needed)


def _request_sentence(speed: Estimate, lane: Summary, times: str) -> str:
    """Return the sentence for lanes of which requests were timed, whose time cannot be split."""
    length = lane["tokens_per_step"]
    opening = f"{_opening(speed, times)}: whole requests, timed by the client"
    yielded = "" if length is None else f"mean accepted length {length:.2f}"
    return "; ".join(filter(None, [opening, _accepted(lane, speed), yielded])) + "."


def _server_times(lane: LaneTrace) -> str:
    """Return the server's own times of the last request, if it sends them."""
    times = lane.service.times
    if len(times) < 2:
        return ""
    first, decoding = times["ttft_ms"], times["decode_ms"]
    return f" The server of {lane.name} reports {first:.0f} ms to the first token and {decoding:.0f} ms of decoding."
