"""Speculation statistics from a server's Prometheus /metrics, as differences between two readings.

All numbers count the whole server, including other users. Missing numbers are left out, and so are numbers that are
invalid, negative, implausibly large or inconsistent. servers/engines/ has the names that each engine uses.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from math import isnan, nan
from statistics import fmean
from typing import Annotated

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from specdemo.core.trace import MAX_DEPTH, Counter, Number, Span

MAX_DRAFT = 64  # draft tokens of a step, at most
MAX_COUNT = 2**53  # largest plausible count; browsers cannot represent larger integers exactly
_BOUNDS = Field(ge=0, le=MAX_COUNT)
_Value = Annotated[Number, _BOUNDS]
_NAME = re.compile(r"[a-zA-Z_:][\w:]*")
_POSITION = re.compile(r'[{,]\s*position="(\d{1,4})"')
_DRAFTS = ("drafts", "draft_tokens", "accepted_tokens")
_PER_POSITION = "accepted_tokens_per_pos"
FIRST_TOKENS = 0.05  # largest share of output tokens that are the first of a request: answers have 20 tokens or more


def _none_if_invalid(value: object, check: ValidatorFunctionWrapHandler) -> object:
    try:
        return check(value)
    except ValidationError:
        return None


IF_VALID = WrapValidator(_none_if_invalid)
Count = Annotated[Annotated[int, Field(strict=True, ge=0, lt=MAX_COUNT)] | None, IF_VALID]
Drafts = Sequence[tuple[int, int]]  # drafted and accepted tokens of every verified draft, in order
Samples = dict[tuple[str, int | None], list[float]]  # (name without _total, position) -> one value per engine


@dataclass(frozen=True, slots=True)
class ServerStats:
    """Numbers of `core.trace.Remote`, and what they are; all empty when nothing is known.

    drafts: of one answer, None if the server reports only totals. drafting_steps: steps with a draft, which are all
    that engines count, None if unknown. running: the totals cover the answer up to this chunk, so that their increases
    give the drafts.
    """

    counters: dict[Counter, _Value] = field(default_factory=dict)
    accept_by_position: list[_Value] = field(default_factory=list)
    source: str = ""
    # of one request, as measured by the server
    times: dict[Span, Annotated[float, _BOUNDS]] = field(default_factory=dict)
    accept_histogram: list[int] = field(default_factory=list)
    drafts: Drafts | None = None
    drafting_steps: int | None = None
    running: bool = False

    def over_all_passes(self, tokens: float | None, of_text: bool = False) -> "ServerStats":
        """Return the statistics over all target passes. tokens: output tokens after the first of each request, None if
        unknown. of_text: the last step of an answer counts with the tokens that its text holds.
        `accept_by_position` stays a share of the steps with a draft."""
        accepted = self.counters.get("accepted")
        if tokens is None or accepted is None:
            return self
        passes = all_passes(tokens, accepted, self.drafting_steps or 0)
        if not passes:
            return self
        bars = [*self.accept_histogram]
        if bars and self.drafting_steps is not None:
            bars[0] += passes - self.drafting_steps
        length, formula = 1 + accepted / passes, "1 + accepted tokens / passes"
        if of_text:
            length, formula = max(tokens / passes, 1.0), "tokens after the first / passes"
        counters = self.counters | {"steps": passes, "tokens_per_step": round(length, 4)}
        source = f"{self.source.partition(';')[0]}; {formula}, with those that had no draft"
        return replace(self, counters=counters, accept_histogram=bars, source=source)

    def within(self, tokens: float | None) -> "ServerStats":
        """Return the statistics with at most the accepted tokens that an answer of so many tokens after the first can
        hold: every step but the last outputs a token of its own. None: unknown."""
        counters, drafted = self.counters, self.counters.get("drafted")
        accepted, steps = counters.get("accepted") or 0.0, self.drafting_steps or 1
        most = accepted if tokens is None else max(tokens - (steps - 1), 0)
        if accepted <= most or not drafted:
            return self
        return replace(self, counters=counters | {"accepted": most, "acceptance_rate": round(most / drafted, 4)})

    def is_possible(self, tokens: float | None) -> bool:
        """Return False if an answer of so many tokens after the first cannot have these counts. The last draft may go
        on after its end; None: unknown."""
        accepted, steps = self.counters.get("accepted") or 0, self.drafting_steps or 0
        return tokens is None or (accepted <= tokens + MAX_DRAFT and steps <= tokens + 1)


def all_passes(tokens: float, accepted: float, drafting_steps: float) -> int:
    """Return the target passes that output so many tokens: the accepted ones and one of its own per pass.

    tokens: after the first of each request, which comes from the prefill. drafting_steps: passes with a draft, a lower
    bound, because the last pass of a request may be cut off.
    """
    return round(max(tokens - accepted, drafting_steps))


def parse(text: str, names: Set[str]) -> Samples:
    """Parse the metrics of these names (without _total) in Prometheus' text format."""
    samples: Samples = defaultdict(list)
    for line in text.splitlines():
        match = _NAME.match(line)
        name = match[0].removesuffix("_total") if match else ""
        if match is None or name not in names:
            continue
        position = _POSITION.search(line)
        values = line[match.end() :].rpartition("}")[2].split(maxsplit=1)  # label values may contain braces
        samples[name, int(position[1]) if position else None].append(_number(values[0] if values else ""))
    return dict(samples)


def _number(text: str) -> float:
    """Parse a count. Return NaN if it is not one, which makes every derived value unknown."""
    try:
        value = float(text)
    except ValueError:
        return nan
    return value if 0 <= value < MAX_COUNT else nan


def delta(old: Samples, new: Samples, name: str, position: int | None = None) -> float | None:
    """Return the increase of a counter over all engines; None: not exported, not a number, or the server restarted."""
    if (name, position) not in new:
        return None
    grown = sum(new[name, position]) - sum(old.get((name, position), []))
    return grown if grown >= 0 else None


def draft_names(prefix: str) -> frozenset[str]:
    """Return the names that `draft_counters` reads."""
    return frozenset(prefix + name for name in (*_DRAFTS, _PER_POSITION))


def draft_counters(
    old: Samples, new: Samples, prefix: str, title: str, generated: str = "", requests: str = ""
) -> ServerStats | None:
    """Return the statistics of counters with vLLM's suffixes, None if nothing was drafted.

    title: of the engine. generated, requests: names of the counters of output tokens and of the requests that output
    one; empty if the engine has none.
    """
    drafts, drafted, accepted = (delta(old, new, prefix + name) for name in _DRAFTS)
    if not drafts or not drafted or accepted is None:
        return None
    stats = answer_stats(title, int(drafted), int(accepted), int(drafts))
    if stats is None:
        return None
    positions = sorted(p for name, p in new if name == prefix + _PER_POSITION and p is not None)
    accepted_at = [delta(old, new, prefix + _PER_POSITION, p) for p in positions[:MAX_DEPTH]]
    shares = [None if n is None or n > drafts else round(n / drafts, 4) for n in accepted_at]
    source = f"{title}'s counters over the run: accepted / drafted tokens; 1 + accepted tokens / drafts"
    tokens = _tokens_after_first(old, new, generated, requests, int(drafts + accepted))
    stats = replace(stats, accept_by_position=shares, source=source)
    if tokens is not None and drafts + accepted > (1.0 + FIRST_TOKENS) * tokens:  # many drafts end after their answer
        stats = stats.within(tokens).over_all_passes(tokens, of_text=True)
    else:
        stats = stats.over_all_passes(tokens)
    return replace(stats, source=f"{stats.source}; requests of other users are included")


def _tokens_after_first(old: Samples, new: Samples, generated: str, requests: str, of_drafts: int) -> float | None:
    """Return the output tokens without the first of each request, None if they are unknown. of_drafts: tokens output by
    steps with a draft; if the requests are not counted, a few more tokens are their first ones."""
    tokens, first = delta(old, new, generated), delta(old, new, requests)
    if tokens is None or (first is None and tokens <= of_drafts * (1.0 + FIRST_TOKENS)):
        return None
    return max(tokens - (first or 0.0), 0.0)


def below(value: object, *keys: str) -> object:
    """Return the value below keys of nested objects, None if it is missing."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def fields_below(chunk: Mapping[str, object], *keys: str) -> Mapping[str, object]:
    """Return the fields below `keys` in a chunk of an answer, none if they are missing."""
    content = below(chunk, *keys)
    return content if isinstance(content, Mapping) else {}


def counts(fields: Mapping[str, object], *names: str) -> list[int | None]:
    """Return counts of an answer, None for those that are missing or invalid."""
    return [value if isinstance(value, int) and _is_possible(value) else None for value in map(fields.get, names)]


def milliseconds(fields: Mapping[str, object], *names: str) -> list[float | None]:
    """Return times of an answer, None for those that are missing or invalid."""
    return [
        value if isinstance(value, int | float) and _is_possible(value) else None for value in map(fields.get, names)
    ]


def listed_counts(fields: Mapping[str, object], name: str) -> list[int] | None:
    """Return a list of counts, None if it is missing or one of them is invalid."""
    values = fields.get(name)
    if isinstance(values, list) and all(isinstance(value, int) and _is_possible(value) for value in values):
        return values
    return None


def _is_possible(value: float) -> bool:
    return not isinstance(value, bool) and 0 <= value < MAX_COUNT


def answer_stats(
    title: str,
    drafted: int | None,
    accepted: int | None,
    steps: int | None = None,
    histogram: Sequence[int] | None = None,
    drafts: Drafts | None = None,
    unverified: int = 0,
) -> ServerStats | None:
    """Return the statistics of one answer from its totals, None if they are missing or inconsistent.

    title: of the engine. drafted: without the tokens that are known to be `unverified`. histogram: [n] steps that
    accepted n draft tokens; it and `drafts` are left out if they contradict the totals.
    """
    if drafted is None or accepted is None or accepted > drafted:
        return None
    counters: dict[Counter, float | None] = {"drafted": drafted, "accepted": accepted}
    source = f"{title}'s count for this answer: accepted / drafted tokens"
    counters |= {"unverified": unverified} if unverified else {}
    if drafted:
        counters["acceptance_rate"] = round(accepted / drafted, 4)
    if steps:
        counters |= {"steps": steps, "tokens_per_step": round(1 + accepted / steps, 4)}
        source += "; 1 + accepted tokens / steps"
    bars = list(histogram or [])[: MAX_DEPTH + 1]
    if not steps or sum(bars) != steps or sum(n * count for n, count in enumerate(bars)) != accepted:
        bars = []
    if drafts is not None and (
        any(a > d for d, a in drafts) or (sum(d for d, _ in drafts), sum(a for _, a in drafts)) != (drafted, accepted)
    ):
        drafts = None
    positions = [round(sum(bars[i:]) / steps, 4) for i in range(1, len(bars))] if steps else []
    return ServerStats(
        counters, list[Number](positions), source, accept_histogram=bars, drafts=drafts, drafting_steps=steps
    )


def gauge(samples: Samples, name: str) -> float | None:
    """Return the mean of a gauge over the engines at work, None if it is unknown."""
    busy = [value for value in samples.get((name, None), []) if value]
    mean = fmean(busy) if busy else nan
    return None if isnan(mean) else mean
