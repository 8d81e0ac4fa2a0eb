"""Log of llama.cpp: `llama-server` (tools/server/server-context.cpp, print_timings; common/speculative.cpp, statistics)
and the older program `llama-speculative`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import ceil

from specdemo.analysis.observation import COMBINED, TOLERANCE, Observation
from specdemo.analysis.readers.base import Output, OutputReader, OutputTotals, find_last, find_number, numbers_in
from specdemo.servers.counters import all_passes

ACCEPTED = re.compile(r"\( {0,12}([0-9]{1,12}) accepted */ *([0-9]{1,12}) generated\)")
POSITIONS = re.compile(r"rate per position = \(([0-9., ]{1,8000})\)")
DURATIONS = re.compile(r"dur\(b,g,a\) = [0-9.]{1,15}, ([0-9.]{1,15}),")
KIND = re.compile(r"statistics {1,20}([a-z0-9_-]{1,40}):")
SHARES = re.compile(r"#acc rate/pos = \(([0-9., ]{1,8000})\)")
LENGTH = re.compile(r"(?:--spec-draft-n-max[ =]|--draft-max[ =]|\bn_max=)([0-9]{1,3})\b")
SPEED = re.compile(r", {1,12}([0-9.]{1,12}) tokens per second\)")


class LlamaCppLog(OutputReader):
    """Log of `llama-server` or `llama-cli`, with or without speculation. The draft acceptance is logged per request."""

    title = "llama.cpp log"

    def read(self, output: Output) -> Observation | None:
        text = output.text
        if "eval time =" not in text or "tokens per second)" not in text or "n_predict" in text:
            return None
        totals, positions, requests = OutputTotals(batches=[1.0]), 0, 0
        for line in output.lines("draft acceptance"):
            positions = max(positions, _add(totals, line))
        kinds = _kinds(output)
        totals.drafting_steps = totals.drafting_steps or sum(kind.drafts for kind in kinds.values())
        totals.positions = totals.positions or _positions([*kinds.values()], totals.drafting_steps)
        for line in output.lines(" eval time ="):
            if SPEED.search(line) and "prompt eval" not in line:
                requests += 1
                totals.add_time(find_number("ms /", line), find_number("eval time =", line))
        totals.steps = all_passes(totals.tokens - requests, totals.accepted, totals.drafting_steps)
        given = [int(found) for found in LENGTH.findall(text)]
        return Observation(
            engine="llama-server",
            source=self.title,
            method=COMBINED.join(kinds),
            drafter=find_last(r"loading draft model '([^'\n]{1,200})'", text),
            k=(max(given) if len(kinds) > 1 else given[-1]) if given else positions or _longest(kinds) or None,
            threshold=float(
                find_last(r"(?:--spec-draft-p-min[ =]|--draft-p-min[ =]|\bp_min=)([01]\.[0-9]{1,9})", text) or 0
            )
            or None,
            draft_token_ms=_draft_token_ms([*kinds.values()]),
            moe=_moe(text),
            offloaded=_offloaded(text),
            **totals.values(),
        )


class LlamaSpeculative(OutputReader):
    """Output of `llama-speculative`, which llama.cpp had until 2026."""

    title = "llama-speculative"

    def read(self, output: Output) -> Observation | None:
        text = output.text
        if "n_drafted" not in text or "n_accept" not in text:
            return None
        drafted, accepted = find_number("n_drafted =", text), find_number("n_accept  =", text)
        tokens, k = find_number("n_predict =", text), find_number("n_draft   =", text)
        decoded = re.search(r"decoded {1,9}[0-9]{1,9} tokens.{1,60}speed: {1,9}([0-9.]{1,12}) t/s", text)
        totals = OutputTotals(batches=[1.0], speeds=[float(decoded[1])] if decoded else [])
        if drafted and accepted is not None and tokens and tokens > accepted:
            totals.add(drafted, accepted, tokens - accepted)
        draft = text.partition("draft:")[2].partition("target:")[0]
        speed = [
            float(found) for found in re.findall(r"[^t] eval time =.{1,80}?([0-9.]{1,12}) tokens per second", draft)
        ]
        return Observation(
            engine="llama-server",
            source=self.title,
            method="draft_model",
            k=int(k) or None if k else None,
            draft_token_ms=1000.0 / speed[-1] if speed and speed[-1] else None,
            moe=_moe(text),
            offloaded=_offloaded(text),
            **totals.values(),
        )


def _add(totals: OutputTotals, line: str) -> int:
    """Add the acceptance of one request; return its number of positions."""
    match, positions = ACCEPTED.search(line), POSITIONS.search(line)
    length = find_number("mean acceptance length =", line) or find_number("mean len =", line)
    if not match:
        return 0
    accepted, drafted = float(match[1]), float(match[2])
    shares = numbers_in(positions[1]) if positions else []
    drafting = accepted / (length - 1.0) if length and length > 1.0 else drafted / len(shares) if shares else 0.0
    totals.add(drafted, accepted, drafting, shares)
    return len(shares)


@dataclass(frozen=True, slots=True)
class _Kind:
    """Statistics of one kind of drafts over all requests. shares: of its drafts that were accepted up to a position."""

    drafts: float
    tokens: float
    ms: float
    shares: list[float]


def _kinds(output: Output) -> dict[str, _Kind]:
    """Return the statistics by kind, which logs of a higher level contain. A kind's last line counts all requests."""
    kinds = {}
    for line in output.lines("statistics "):
        name, shares, durations = KIND.search(line), SHARES.search(line), DURATIONS.search(line)
        if name:
            drafts, tokens = (find_number(f"#gen {what} =", line) or 0.0 for what in ("drafts", "tokens"))
            ms = float(durations[1]) if durations else 0.0
            kinds[name[1].replace("_", "-")] = _Kind(drafts, tokens, ms, numbers_in(shares[1]) if shares else [])
    return {name: kind for name, kind in kinds.items() if kind.drafts} or kinds


def _positions(kinds: Sequence[_Kind], drafting_steps: float) -> list[float]:
    """Return the steps that accepted the draft tokens up to each position; empty if a kind does not report them."""
    drafts = sum(kind.drafts for kind in kinds)
    if not drafts or not all(kind.shares for kind in kinds):
        return []
    rows = zip_longest(*([share * kind.drafts for share in kind.shares] for kind in kinds), fillvalue=0.0)
    return [sum(row) * drafting_steps / drafts for row in rows]


def _longest(kinds: Mapping[str, _Kind]) -> int:
    """Return the largest mean draft length of the kinds, a lower bound of k."""
    return max((ceil(kind.tokens / kind.drafts - TOLERANCE) for kind in kinds.values() if kind.drafts), default=0)


def _draft_token_ms(kinds: Sequence[_Kind]) -> float | None:
    """Return the drafting time per draft token."""
    tokens = sum(kind.tokens for kind in kinds)
    return sum(kind.ms for kind in kinds) / tokens if tokens else None


def _moe(text: str) -> bool | None:
    experts = find_last(r"n_expert {1,20}= {1,4}([0-9]{1,5})\b", text)
    return int(experts) > 0 if experts else None


def _offloaded(text: str) -> bool | None:
    """Return whether a part of the layers stays in main memory although others are on the GPU."""
    layers = re.findall(r"offloaded ([0-9]{1,4})/([0-9]{1,4}) layers to GPU", text)
    return any(0 < int(on_gpu) < int(total) for on_gpu, total in layers) if layers else None
