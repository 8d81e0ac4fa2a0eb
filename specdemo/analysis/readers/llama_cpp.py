"""Outputs of llama.cpp: logs of `llama-server` and `llama-cli` (tools/server/server-context.cpp, print_timings;
common/speculative.cpp, statistics), and what `llama-speculative` and `llama-speculative-simple` print at their end.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import ceil

from specdemo.analysis.observation import COMBINED, TOLERANCE, Observation
from specdemo.analysis.readers.base import (
    Output,
    OutputTotals,
    find_last,
    find_number,
    numbers_in,
    quantised,
)

ACCEPTED = re.compile(r"\( {0,12}([0-9]{1,12}) accepted */ *([0-9]{1,12}) generated\)")
POSITION_RATES = re.compile(r"rate per position = \(([0-9., ]{1,8000})\)")
DURATIONS = re.compile(r"dur\(b,g,a\) = [0-9.]{1,15}, ([0-9.]{1,15}),")
KIND = re.compile(r"statistics {1,20}([a-z0-9_-]{1,40}):")
SHARES = re.compile(r"#acc rate/pos = \(([0-9., ]{1,8000})\)")
# a kind of drafts is named in a line of its own or, in older builds, by the function that logs its settings
START = re.compile(
    r"speculative implementation '([a-z0-9_-]{1,40})'|common_speculative_(?:impl|state)_(\w{1,40}): (?=- )"
    r"|- ((?:n_match|size_n|size_key)=[0-9]{1,9}, )?(?:n_max|size_m|size_value)=([0-9]{1,4})\b"
)
FLAG = re.compile(r"(?:--spec-draft-n-max|--draft-max|--spec-ngram-[a-z0-9-]{1,20}-(?:n-max|size-m))[ =]([0-9]{1,4})\b")
P_MIN = r"(?:--spec-draft-p-min[ =]|--draft-p-min[ =]|\bp_min=)([01]\.[0-9]{1,9})"
SPEED = re.compile(r", {1,12}([0-9.]{1,12}) tokens per second\)")


def llama_cpp_log(output: Output) -> Observation | None:
    """Read the log of `llama-server` or `llama-cli`, with or without speculation. It has the draft acceptance per
    request."""
    text = output.text
    if "eval time =" not in text or "tokens per second)" not in text:
        return None
    totals, positions = OutputTotals(batches=[1.0]), 0
    waiting = dict[str, tuple[float, float]]()  # output tokens and tokens/s of a slot's request
    for line in output.lines(" eval time =", "draft acceptance"):
        slot, speed = find_last(r"\bid {1,4}([0-9]{1,4}) \|", line), SPEED.search(line)
        if "draft acceptance" in line:
            positions = max(positions, _add_request(totals, line, slot, *waiting.pop(slot, (0.0, 0.0))))
        elif speed and "prompt eval" not in line:
            _add_plain(totals, waiting.pop(slot, (0.0, 0.0))[0])
            tokens = find_number("ms /", line) or 0.0
            totals.add_time(tokens, find_number("eval time =", line))
            waiting[slot] = tokens, float(speed[1])
    for tokens, _ in waiting.values():
        _add_plain(totals, tokens)
    kinds, started = _kinds(output), _started(text)
    totals.drafting_steps = totals.drafting_steps or sum(kind.drafts for kind in kinds.values())
    totals.steps = max(totals.steps, totals.drafting_steps)
    totals.positions = totals.positions or _positions([*kinds.values()], totals.drafting_steps)
    drafter = find_last(r"loading draft model '([^'\n]{1,200})'", text)
    names = [*kinds] or [*started] or _flagged(text)
    totals.drafts_nothing = bool(totals.tokens and (names or drafter)) and not totals.drafted
    k = _length(names, started, [int(length) for length in FLAG.findall(text)]) or positions
    return Observation(
        engine="llama-server",
        method="" if names == [UNNAMED] else COMBINED.join(names),
        drafter=drafter,
        k=k or _longest(kinds) or None,
        k_inferred=True if kinds and not k else None,
        threshold=float(find_last(P_MIN, text) or 0) or None,
        draft_token_ms=_draft_token_ms([*kinds.values()]),
        moe=_moe(text),
        offloaded=_offloaded(text),
        draft_cache=_draft_cache(text),
        **totals.values(),
    )


UNNAMED = "draft model"


def _started(text: str) -> dict[str, int]:
    """Return the draft length of each kind of drafts that the server lists at its start, 0 if it is not in the line."""
    lengths, name = dict[str, int](), ""
    for match in START.finditer(text):
        if match[4]:
            lengths[name or ("ngram-mod" if "n_match" in (match[3] or "") else UNNAMED)] = int(match[4])
            name = ""
        else:
            name = (match[1] or match[2]).replace("_", "-")
            lengths.setdefault(name, 0)
    return lengths


def _flagged(text: str) -> list[str]:
    """Return the kinds of drafts in a pasted command."""
    kinds = find_last(r"--spec-type[ =]([a-z0-9,-]{1,200})", text)
    return [kind for kind in kinds.split(",") if kind not in ("", "none")]


def _length(names: Sequence[str], started: Mapping[str, int], flags: Sequence[int]) -> int:
    """Return the draft length of these kinds, the longest of several, from the start of the server, else from flags. 0:
    unknown."""
    lengths = [started.get(name) or started.get(UNNAMED, 0) for name in names]
    lengths = lengths if any(lengths) else [*flags]
    return max(lengths, default=0) if len(names) > 1 else [0, *lengths][-1]


def llama_speculative(output: Output) -> Observation | None:
    """Read the output of `llama-speculative` and `llama-speculative-simple`, whose statistics cover one text. Every
    token of it is the output of a step, also the first."""
    drafted, accepted, tokens, k = (
        find_last(rf"\bn_{name} {{1,9}}= {{0,9}}([0-9]{{1,12}})\b", output.text)
        for name in ("drafted", "accept", "predict", "draft")
    )
    if not (drafted and accepted and tokens):
        return None
    totals, kinds = OutputTotals(batches=[1.0]), [*_kinds(output).values()]
    totals.add(float(drafted), float(accepted), 0.0, tokens=float(tokens))
    seconds = find_last(r"\bdecoded {1,9}[0-9]{1,12} tokens in {1,9}([0-9.]{1,12}) seconds", output.text)
    totals.add_time(float(tokens), 1000.0 * float(seconds or 0.0))
    of_drafter = output.text.partition("draft:")[2].partition("target:")[0]
    draft_ms = find_last(
        r" eval time = {0,12}[0-9.]{1,12} ms / {1,12}[0-9]{1,12} runs.{0,9}\( {0,12}([0-9.]{1,12})", of_drafter
    )
    return Observation(
        engine="llama-server",
        method=COMBINED.join(_kinds(output)) or "draft_model",
        k=int(k or 0) or None,
        draft_token_ms=_draft_token_ms(kinds) or float(draft_ms or 0.0) or None,
        **totals.values(),
    )


def _add_request(totals: OutputTotals, line: str, slot: str, tokens: float, tokens_per_s: float) -> int:
    """Add the acceptance of one request; return its number of positions. tokens: 0 if they are unknown."""
    match, positions = ACCEPTED.search(line), POSITION_RATES.search(line)
    length = find_number("mean acceptance length =", line) or find_number("mean len =", line)
    if not match:
        return 0
    accepted, drafted = float(match[1]), float(match[2])
    shares = numbers_in(positions[1]) if positions else []
    drafting = accepted / (length - 1.0) if length and length > 1.0 else drafted / len(shares) if shares else 0.0
    after_first, place = max(tokens - 1.0, 0.0) if tokens else None, f"slot {slot}" if slot else ""
    totals.add(drafted, accepted, drafting, shares, after_first, tokens_per_s or None, place)
    return len(shares)


def _add_plain(totals: OutputTotals, tokens: float) -> None:
    """Add the passes of a request without drafts."""
    totals.steps += max(tokens - 1.0, 0.0)


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


def _draft_cache(text: str) -> str:
    """Return the type of the draft model's KV cache if it is quantised, by the flags or by what was loaded."""
    flags = re.findall(r"(?:--spec-draft-type-[kv]|--cache-type-[kv]-draft|-ct[kv]d)[ =]{1,9}(\w{1,20})", text)
    loaded = re.findall(r"\b[KV] \((\w{1,20})\):", text.partition("loading draft model")[2])
    return next(filter(None, map(quantised, [*flags, *loaded])), "")


def _offloaded(text: str) -> bool | None:
    """Return whether a part of the layers stays in main memory although others are on the GPU."""
    layers = re.findall(r"offloaded ([0-9]{1,4})/([0-9]{1,4}) layers to GPU", text)
    return any(0 < int(on_gpu) < int(total) for on_gpu, total in layers) if layers else None
