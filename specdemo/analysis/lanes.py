"""Results of the lanes of a run in numbers and words, from the same diagnosis as for other engines. Needs no torch."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any

from specdemo.analysis.diagnose import Diagnosis, accepted_clause, diagnose, verdict
from specdemo.analysis.observation import Observation
from specdemo.core.estimate import Estimate
from specdemo.core.headline import SO_FAR, settled
from specdemo.core.tally import summarise
from specdemo.core.trace import ComparisonRow, LaneTrace, RunTrace, estimates, whole_requests
from specdemo.costs.step import DraftLengthAdvice, break_even_rate
from specdemo.methods.facts import PARALLEL

Summary = Mapping[str, Any]  # of core.tally.summarise


@dataclass(frozen=True, slots=True)
class LaneResult:
    """Result of a speculative lane, which the page and the command line show.

    row: its row of `comparison`; empty if the trace has none. word: of the speed-up, or "so far" for a lane that cannot
    be compared, whose `why` is empty then. why: the explanation of the speed-up. diagnosis: None if too little was
    decoded, and for a lane of whole requests.
    """

    lane: LaneTrace
    row: ComparisonRow
    speed: Estimate | None
    word: str = SO_FAR
    why: str = ""
    diagnosis: Diagnosis | None = None

    @property
    def cause(self) -> str:
        """Return what makes the lane faster or slower in one sentence; empty without a diagnosis."""
        found = self.diagnosis
        if found is None or found.step_cost is None:
            return ""
        main = f": {found.cause.title}" if found.cause else ""
        return (
            f"A step costs {found.step_cost:.2f} plain tokens and yields {found.observation.accepted_length:.2f}{main}."
        )


def results(trace: RunTrace, times: str = "x") -> list[LaneResult]:
    """Return the result of every speculative lane. times: the unit of a speed-up in a sentence."""
    rows = chain(trace.comparison, repeat(ComparisonRow()))
    lanes = [LaneResult(*parts) for parts in zip(trace.lanes[1:], rows, estimates(trace), strict=False)]
    return [_explained(trace.lanes[0], lane, times) if settled(trace, lane.lane) else lane for lane in lanes]


def break_even(lane: Summary, speed: Estimate | None) -> float | None:
    """Return the acceptance rate below which a lane is slower than plain decoding on this machine; above 1: it always
    is. None if it is unknown. lane: its summary.
    """
    length, drafted, steps = (lane.get(name) for name in ("tokens_per_step", "drafted", "steps"))
    if speed is None or not length or not drafted or not steps or not speed.value:
        return None
    return break_even_rate(length / speed.value, drafted / steps)


def _explained(plain: LaneTrace, result: LaneResult, times: str) -> LaneResult:
    """Return the result with its explanation."""
    lane, speed, numbers = result.lane, result.speed, summarise(result.lane)
    word, requests, k = speed.label if speed else "", whole_requests(plain, lane), lane.options.get("k")
    with suppress(ArithmeticError, ValueError):  # a stored trace may contain any times
        k = k if isinstance(k, int) else 0
        advice = (
            None
            if requests or speed is None
            else DraftLengthAdvice.of(plain.events, lane.events, k, lane.method in PARALLEL)
        )
        if advice is not None and speed is not None and numbers["drafted"]:
            diagnosis = diagnose(observation_of(numbers, lane.method, max(k, advice.costs.k), speed), advice)
            why = verdict(diagnosis, times, _opening(speed, times))
            return replace(result, word=word, why=why, diagnosis=diagnosis)
    why = _request_sentence(speed, numbers, times) if requests and speed else explain(numbers, speed, times)
    why += _server_times(plain) + _server_times(lane) + (f" {lane.service.source}." if lane.service.source else "")
    return replace(result, word=word, why=why)


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
