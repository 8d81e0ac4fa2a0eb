"""Streams of servers: chunks are checked, bounded and turned into events, and pieces into steps, by the draft counts of
the engine.

A piece is what arrived at one time; a step is one pass of the target. The first token comes from the prefill. Numbers
that are invalid, negative or implausibly large count as not reported. Invalid or excessive text ends the answer.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import accumulate
from math import isfinite
from typing import Annotated, Literal

import httpx
from pydantic import BaseModel, Field

from specdemo.core.trace import UNREPORTED, StepEvent
from specdemo.core.trace import Span as Clock
from specdemo.servers.client import DONE, Client, ReportedError
from specdemo.servers.counters import IF_VALID, Count, Drafts, ServerStats, below
from specdemo.servers.engines import acceptance


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of one step: their number, and the drafted and accepted tokens. drafted: None if unknown."""

    size: int
    drafted: int | None = 0
    accepted: int = 0


def spans_by_totals(totals: Sequence[tuple[int, int]]) -> list[Span] | None:
    """Return the steps from running totals. totals: drafted and accepted tokens up to each token of the text.

    Returns None for totals that no sequence of steps has.
    """
    if not totals or totals[0] != (0, 0):
        return None
    spans, at, before = [Span(1)], 1, totals[0]
    while at < len(totals):
        drafted, accepted = (new - old for new, old in zip(totals[at], before, strict=True))
        if not 0 <= accepted <= drafted:
            return None
        size = min(accepted + 1, len(totals) - at)
        if any(total != totals[at] for total in totals[at : at + size]):
            return None
        spans.append(Span(size, drafted, accepted))
        at, before = at + size, totals[at]
    return spans


def spans_by_drafts(pieces: Sequence[int], drafts: Drafts) -> list[Span] | None:
    """Return the steps from the drafts, in order. pieces: number of tokens of each piece.

    Steps without a draft are not among the drafts: they are found if every piece is a step. Pieces of several steps are
    accepted if each ends with a step. The last step may be cut off. Returns None if the drafts do not fit.
    """
    return _by_pieces(pieces, drafts) or _by_sum(pieces, drafts)


def _by_pieces(pieces: Sequence[int], drafts: Drafts) -> list[Span] | None:
    """Match pieces with drafts: a piece of several tokens had a draft, and one of a single token may have had one."""
    if not pieces or pieces[0] != 1:
        return None
    last = min(drafts[-1][1] + 1, pieces[-1]) if drafts else 1
    for final in dict.fromkeys(([drafts[-1][1] + 1] if drafts else []) + [last]):
        sizes = [accepted + 1 for _, accepted in drafts[:-1]] + ([final] if drafts else [])
        (singles, long), (undecided, steps) = _runs(pieces[1:]), _runs(sizes)
        if long == steps and all(few <= many for few, many in zip(undecided, singles, strict=True)):
            return [Span(1), *_matched(pieces[1:], singles, undecided, iter(drafts))]
    return None


def _runs(sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the sizes above 1, and the number of ones before each and at the end."""
    singles, long = [0], []
    for size in sizes:
        if size == 1:
            singles[-1] += 1
        else:
            long.append(size)
            singles.append(0)
    return singles, long


def _matched(
    sizes: Sequence[int], singles: Sequence[int], drafts_in_run: Sequence[int], drafts: Iterator[tuple[int, int]]
) -> Iterator[Span]:
    """Yield the steps. In a run of single tokens it may be unknown which of them had a draft."""
    at = 0
    for many, few in zip(singles, drafts_in_run, strict=True):
        run = [next(drafts) for _ in range(few)]
        if few == many:
            yield from (Span(1, *draft) for draft in run)
        else:
            yield from [Span(1, None if few else 0)] * many
        at += many
        if at < len(sizes):
            yield Span(sizes[at], *next(drafts))
            at += 1


def _by_sum(pieces: Sequence[int], drafts: Drafts) -> list[Span] | None:
    """Lay the steps end to end; every piece has to end with one of them."""
    total = sum(pieces)
    sizes = [1, *(accepted + 1 for _, accepted in drafts)]
    ends = list(accumulate(sizes))
    if not drafts or not ends[-2] < total <= ends[-1]:
        return None
    ends[-1] = total
    if not set(accumulate(pieces)) <= set(ends):
        return None
    sizes[-1] = total - ends[-2]
    return [Span(1), *(Span(size, *draft) for size, draft in zip(sizes[1:], drafts, strict=True))]


def token_pieces(
    events: Sequence[StepEvent], texts: Sequence[str], decode: Callable[[list[int]], list[str]]
) -> tuple[list[str], list[bool]]:
    """Return the text of each token, and whether it is known.

    texts: of each event. decode: returns the text of the next token ids, one by one; it is right for an event if the
    texts add up.
    """
    pieces: list[str] = []
    split: list[bool] = []
    for event, text in zip(events, texts, strict=True):
        ids = event.emitted[0]
        parts = decode(ids) if min(ids) >= 0 else []
        right = len(ids) == 1 or (len(parts) == len(ids) and "".join(parts) == text)
        pieces += parts if right and len(ids) > 1 else [*[""] * (len(ids) - 1), text]
        split += [right] * len(ids)
    return pieces, split


def step_events(events: Sequence[StepEvent], spans: Sequence[Span], split: Sequence[bool]) -> list[StepEvent]:
    """Return one event per step in place of one per piece. A step takes the time until its last token arrived.

    split: for each token, whether its own text is known; a step with another token stays unknown, and so does one
    whose draft is unknown.
    """
    ids = [token for event in events for token in event.emitted[0]]
    clock = accumulate(sum(event.ms.values()) for event in events)
    arrivals = [ms for event, ms in zip(events, clock, strict=True) for _ in event.emitted[0]]
    steps, start, before = [], 0, 0.0
    for index, span in enumerate(spans):
        end = start + span.size
        ms = {"stream" if index else "prefill": round(arrivals[end - 1] - before, 4)}
        steps.append(_event(index, ids[start:end], span if all(split[start:end]) else Span(span.size, None), ms))
        start, before = end, arrivals[end - 1]
    return steps


def _event(index: int, emitted: list[int], span: Span, ms: dict[str, float]) -> StepEvent:
    if span.drafted is None:
        return StepEvent(index, [[]], [[]], [[]], [emitted], [[]], [[]], ms)
    ids = [UNREPORTED if token < 0 else token for token in emitted[: span.accepted]]
    drafted = ids + [UNREPORTED] * (span.drafted - len(ids))
    path: list[int] = list(range(span.accepted + 1))
    unknown: list[list[float | None]] = [[None] * span.drafted]
    return StepEvent(index, [drafted], [list(range(span.drafted))], [path], [emitted], unknown, unknown, ms)


TOKEN_CHARS = 64  # average length of a token's text
SPARE_CHARS = 4_000
END_S = 2.0  # timeout for the counts of an answer after its finish reason

Finish = Literal["stop", "length"]
FINISH: Mapping[str, Finish | None] = {  # of OpenAI, TGI, koboldcpp, Anthropic; None: the text goes on
    **dict.fromkeys(("", "null", "none"), None),
    **dict.fromkeys(("stop", "eos", "eos_token", "stop_token", "stop_sequence", "end_turn"), "stop"),
    **dict.fromkeys(("length", "max_tokens", "max_length"), "length"),
}
INTERRUPTED = ("abort", "canceled", "cancelled", "content_filter", "error")  # reasons of an incomplete text

Piece = tuple[StepEvent, str]
Alternatives = tuple[str, dict[str, float]]  # a token, and the log-probabilities of the most likely ones in its place

_Id = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
_LogProb = Annotated[float, Field(le=1e-3)]


class _TopToken(BaseModel):
    token: str
    logprob: _LogProb


class _Position(BaseModel):
    token: str = ""
    top_logprobs: list[_TopToken] = []

    @property
    def next_tokens(self) -> dict[str, float]:
        return {token.token: token.logprob for token in self.top_logprobs if isfinite(token.logprob)}


class _LogProbs(BaseModel):
    """Most likely tokens: of a completion, or in the form of a chat, which llama.cpp uses for both."""

    top_logprobs: list[dict[str, _LogProb] | None] | None = None
    content: list[_Position] | None = None

    @property
    def first(self) -> dict[str, float]:
        """Return those of the first position, without impossible ones."""
        if self.content:
            return self.content[0].next_tokens
        alternatives: dict[str, float] = (self.top_logprobs or [None])[0] or {}
        return {token: value for token, value in alternatives.items() if isfinite(value)}


class _Text(BaseModel):
    reasoning_content: str | None = None
    reasoning: str | None = None
    content: str | None = None
    text: str | None = None

    @property
    def complete(self) -> str:
        return (self.reasoning_content or self.reasoning or "") + (self.content or self.text or "")


class _Choice(_Text):
    delta: _Text | None = None
    token_ids: Annotated[Annotated[list[_Id], Field(fail_fast=True)] | None, IF_VALID] = None
    finish_reason: str | None = None
    logprobs: Annotated[_LogProbs | None, IF_VALID] = None


class _Usage(BaseModel):
    completion_tokens: Count = None


class _Chunk(BaseModel):
    choices: Annotated[list[_Choice], Field(max_length=1)] | None = None
    usage: Annotated[_Usage | None, IF_VALID] = None


class StreamParser:
    """Turns the chunks of one answer of at most `limit` tokens into events."""

    def __init__(self, emit: Callable[[Piece], None], limit: int) -> None:
        self._emit = emit
        self._limit = limit
        self._room = SPARE_CHARS + TOKEN_CHARS * limit
        self.started_at = self._last = 0.0
        self._steady = True  # no count has decreased
        self.pieces = 0
        self.tokens = 0  # as counted by the server; one per piece if it sends no counts
        self.counted = False  # every piece so far came with its number of tokens
        self.reported_tokens: int | None = None  # tokens of the text so far, as counted by the server
        self.finish: Finish | None = None
        self.finish_note = ""  # what is unusual about the end of the text, in the server's words
        self.drafted: ServerStats | None = None
        self.times: dict[Clock, float] = {}  # as measured by the server
        self.next_tokens: dict[str, float] = {}  # most likely first tokens and their log-probabilities
        self.alternatives: list[Alternatives] = []  # of each token of a chat
        self._sizes: list[int] = []  # tokens of each piece
        self._totals: list[tuple[int, int]] = []  # drafted and accepted tokens up to each token, if reported

    def begin(self) -> None:
        """Start the clock: the request goes out now."""
        self.started_at = self._last = time.perf_counter()

    async def read_stream(self, http: Client, path: str, question: dict[str, object]) -> None:
        """Read a complete response: up to [DONE] or the end of the connection, and END_S after a finish reason.

        Raises the errors of `Client.events` and `feed`, and ConnectionError if it ends early.
        """
        self.begin()
        done = False
        try:
            async with aclosing(http.events(path, question, self._limit)) as events:
                while not done:
                    async with asyncio.timeout(END_S if self.finish else None):
                        event, arrived = await anext(events)
                    done = event is DONE
                    if not done:
                        self.feed(event, arrived)
        except StopAsyncIteration:
            pass
        except (TimeoutError, httpx.TransportError):
            if self.finish is None:
                raise
        if self.finish is None:
            self._end_without_reason(done)

    def _end_without_reason(self, done: bool) -> None:
        """Find out how a text ended without a known finish reason. done: the server sent [DONE]."""
        if self.finish_note:
            self.finish = "stop"
        elif done and self.pieces:
            self.finish = "length" if max(self.tokens, self.reported_tokens or 0) == self._limit else "stop"
            self.finish_note = "its server gave no reason for the end of the text"
        else:
            raise ConnectionError("the response ended early")

    def feed(self, event: object, arrived: float) -> None:
        """Process a chunk. arrived: its time on `time.perf_counter`. Raises ReportedError for an error of the server,
        and ValueError for an invalid chunk and for more text or tokens than requested.
        """
        chunk = _Chunk.model_validate(event)
        if error := below(event, "error") or (below(event, "object") == "error" and event):
            raise ReportedError(str(below(error, "message") or error))
        stats = acceptance(event) if isinstance(event, dict) else ServerStats()
        grown = self._grown(chunk.usage.completion_tokens if chunk.usage else None)
        for choice in chunk.choices or []:
            text, ids = (choice.delta or choice).complete, choice.token_ids or []
            if text or ids or grown:
                self._piece(text, ids, grown, arrived)
                self._count(len(ids) or grown or 1, stats)
            if choice.logprobs:
                self.next_tokens = self.next_tokens or choice.logprobs.first
                content = (choice.logprobs.content or [])[: self._limit - len(self.alternatives)]
                self.alternatives += [(position.token, position.next_tokens) for position in content]
            self._end(choice.finish_reason)
        self.times = stats.times or self.times
        self.drafted = stats if stats.counters else self.drafted

    def _grown(self, total: int | None) -> int:
        """Return the tokens since the last count, if every piece came with one; a count at the end gives only the
        sum.
        """
        if total is None or not self._steady:
            return 0
        before, self.reported_tokens = self.reported_tokens or 0, total
        self._check(total)
        if total < before:
            self._steady, self.reported_tokens, self.counted = False, None, False
            return 0
        return total - before if self.counted or not self.pieces else 0

    def _check(self, tokens: int) -> None:
        if tokens > self._limit:
            raise ValueError(f"it sent more than the {self._limit} requested tokens")

    def _piece(self, text: str, ids: list[int], grown: int, arrived: float) -> None:
        self.tokens += len(ids) or grown or 1
        self._check(self.tokens)
        self._room -= len(text)
        if self._room < 0:
            raise ValueError(f"it sent more text than fits into {self._limit} tokens")
        self.counted = bool(ids or grown) and (self.counted or not self.pieces)
        ms = {"stream" if self.pieces else "prefill": round((arrived - self._last) * 1000.0, 4)}
        text_utf8 = text.encode("utf-8", "replace").decode()  # JSON can contain lone surrogates
        self._emit((StepEvent(self.pieces, [[]], [[]], [[]], [ids or [-1] * (grown or 1)], [[]], [[]], ms), text_utf8))
        self._last = arrived
        self.pieces += 1

    def _end(self, reason: str | None) -> None:
        word = (reason or "").strip().lower()
        if word in INTERRUPTED:
            raise ValueError(f"it ended the text early: {reason}")
        self.finish = FINISH.get(word) or self.finish
        if word not in FINISH:
            self.finish_note = f"its server ended the text for an unknown reason: {reason}"
        elif self.finish:
            self.finish_note = ""

    def _count(self, tokens: int, stats: ServerStats) -> None:
        self._sizes.append(tokens)
        if stats.running:
            drafted, accepted = (int(stats.counters.get(name) or 0) for name in ("drafted", "accepted"))
            self._totals += [(drafted, accepted)] * tokens

    @property
    def tokens_after_first(self) -> int | None:
        """Return the output tokens without the first, which comes from the prefill; None if they are not counted."""
        tokens = self.tokens if self.counted else self.reported_tokens
        return max(tokens - 1, 0) if tokens else None

    @property
    def all_counted(self) -> bool:
        """Return whether every piece is known to be a number of tokens."""
        return self.counted or self.reported_tokens == self.pieces

    def spans(self) -> list[Span] | None:
        """Return the steps of the complete answer; empty if its engine reports only totals, None if its counts do not
        fit the text.
        """
        if self.drafted is None:
            return []
        if self.drafted.drafts is not None:
            return spans_by_drafts(self._sizes, self.drafted.drafts) if self.all_counted else None
        if not self.drafted.running or len(self._totals) < self.tokens:
            return []
        return spans_by_totals(self._totals) if self.all_counted else None
