"""Requests of production that break on servers with speculation: tool calls, JSON schemas, several at once, sampled,
thinking and long prompts. Both servers get the same chats, streamed; the replies are compared.

Sources of the kinds: vLLM issues 25993, 46118, 46249, 49002 and 52767. Needs no torch, but for `sampled`.
"""

import asyncio
import json
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specdemo.bench.prompts import COPYING
from specdemo.bench.result import Row
from specdemo.core.atomic_io import json_text
from specdemo.servers.client import DONE, Client, Patience, StatusError, connect
from specdemo.servers.lane import KEY

PATH = "/v1/chat/completions"
STALL_S, STALL_FACTOR = 3.0, 4.0  # a silence within an answer this long, and this many times the reference's
AT_ONCE = 8  # requests
SAMPLES, SAMPLED_TOKENS = 128, 3
LONG_REPEATS = 60  # of a text of about 100 tokens
IDENTICAL, UNEXPLAINED = "identical", "differs, margin unknown"
REFUSED, UNSTABLE = "refused by both", "the reference differs from itself"
HARMLESS = (IDENTICAL, REFUSED, UNSTABLE)

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
SCHEMA = CITY | {"required": ["city", "days"], "additionalProperties": False}
WEATHER = {"name": "forecast", "description": "Return the weather of a city for some days.", "parameters": SCHEMA}
ASKED = ("Bergen for the next 3 days", "Lima tomorrow and the day after", "Kyoto for a week", "New York for 10 days")


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete answer. calls: name and arguments of each tool call. silence_s: longest time between two events.
    error: a refusal, in the server's untrusted words."""

    text: str = ""
    thinking: str = ""
    calls: Sequence[tuple[str, str]] = ()
    finish: str = ""
    silence_s: float = 0.0
    error: str = ""

    @property
    def content(self) -> tuple[object, ...]:
        """Return what two servers of one model have to agree on."""
        return self.text, self.thinking, *self.calls, self.finish


def _fault_of_calls(reply: Reply) -> str:
    """Return what is wrong with the arguments of the tool calls; "" if they are JSON objects."""
    wrong = next((arguments for _, arguments in reply.calls if not _is_object(arguments)), None)
    return "" if wrong is None else f"arguments that are no JSON: {wrong[:60]!r}"


def _fault_of_json(reply: Reply) -> str:
    return "" if _is_object(reply.text) or reply.finish == "length" else f"text that is no JSON: {reply.text[:60]!r}"


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


@dataclass(frozen=True, slots=True)
class RequestKind:
    """One kind of request. fields: of the request, beside messages. fault: what is wrong with a reply alone."""

    questions: Sequence[str]
    fields: Mapping[str, object] = field(default_factory=dict)
    at_once: int = 1
    fault: Callable[[Reply], str] = lambda reply: ""


KINDS = {
    "tools": RequestKind(
        [f"What will the weather be in {place}?" for place in ASKED],
        {"tools": [{"type": "function", "function": WEATHER}], "tool_choice": "auto"},
        fault=_fault_of_calls,
    ),
    "json": RequestKind(
        [f"Write a JSON object with the city and the number of days: {place}." for place in ASKED],
        {"response_format": {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}},
        fault=_fault_of_json,
    ),
    "concurrent": RequestKind([f"Count from {n} to {n + 30}." for n in range(AT_ONCE)], at_once=AT_ONCE),
    "thinking": RequestKind(["Is 391 a prime number?"], {"chat_template_kwargs": {"enable_thinking": True}}),
    "long": RequestKind(["\n\n".join([COPYING[0]] * LONG_REPEATS) + "\n\nRepeat the first paragraph."]),
    "sampled": RequestKind(["Write the name of an animal."], at_once=AT_ONCE),
}


@dataclass(frozen=True, slots=True)
class ChatServer:
    """A server that gets the requests. model: its name there."""

    address: str
    model: str
    tokens: int  # of an answer at most

    def body(self, question: str, **fields: object) -> dict[str, object]:
        """Return a request, as it can be attached to a report."""
        message = {"role": "user", "content": question}
        fixed = {"model": self.model, "messages": [message], "max_tokens": self.tokens, "temperature": 0.0}
        return {**fixed, "stream": True, **fields}

    async def replies(self, bodies: Iterable[Mapping[str, object]], at_once: int) -> list[Reply]:
        """Send requests, so many at a time, and return the replies in order."""
        free = asyncio.Semaphore(at_once)
        async with connect(self.address, os.environ.get(KEY)) as http:

            async def ask(body: Mapping[str, object]) -> Reply:
                async with free:
                    return await _reply(http, dict(body), self.tokens)

            return await asyncio.gather(*map(ask, bodies))


async def _reply(http: Client, body: dict[str, object], tokens: int) -> Reply:
    try:
        return await Patience().answer(lambda: _read(http, body, tokens))
    except StatusError as error:
        return Reply(error=str(error))


async def _read(http: Client, body: dict[str, object], tokens: int) -> Reply:
    """Read one streamed chat. Raises StatusError, and ValueError for what is no chat."""
    parts: dict[str, str] = {"content": "", "reasoning": ""}
    calls: dict[int, list[str]] = {}
    finish, silence, before = "", 0.0, None
    async for event, arrived in http.events(PATH, body, tokens):
        silence, before = max(silence, arrived - before if before else 0.0), arrived
        choices = event.get("choices") if event is not DONE and isinstance(event, dict) else None
        for choice in choices or ():
            delta: dict[str, Any] = choice.get("delta") or {}
            parts["content"] += delta.get("content") or ""
            parts["reasoning"] += delta.get("reasoning_content") or delta.get("reasoning") or ""
            for call in delta.get("tool_calls") or ():
                function, known = call.get("function") or {}, calls.setdefault(int(call.get("index") or 0), ["", ""])
                known[0] += function.get("name") or ""
                known[1] += function.get("arguments") or ""
            finish = choice.get("finish_reason") or finish
    called = [(name, arguments) for name, arguments in calls.values()]
    return Reply(parts["content"], parts["reasoning"], called, finish, silence)


def check_requests(names: Sequence[str], reference: ChatServer, server: ChatServer) -> tuple[list[Row], list[str]]:
    """Return the rows of these kinds, and for each kind that differs a sentence with the request to attach."""
    rows: list[Row] = []
    remarks = []
    for name in names:
        check = _sampled if name == "sampled" else _compared
        kind_rows, body = asyncio.run(_limited(check(name, KINDS[name], reference, server)))
        rows += kind_rows
        if body is not None:
            text = json_text(body, ensure_ascii=False)
            remarks.append(
                f"To report the difference of {name}, attach: curl {server.address}{PATH} -d '{text[:2000]}'"
            )
    return rows, remarks


Checked = tuple[list[Row], Mapping[str, object] | None]


async def _limited(check: Awaitable[Checked]) -> Checked:
    try:
        return await check
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"a server sent what is no chat: {error}") from None


async def _compared(name: str, kind: RequestKind, reference: ChatServer, server: ChatServer) -> Checked:
    """Compare greedy replies. The reference answers twice, one request at a time and as many as the kind says: where it
    differs from itself, the sizes of its batches round differently, and a difference says nothing."""
    sent = [[side.body(question, **kind.fields) for question in kind.questions] for side in (reference, server)]
    expected, again = await reference.replies(sent[0], 1), await reference.replies(sent[0], kind.at_once)
    replies = await server.replies(sent[1], kind.at_once)
    rows: list[Row] = []
    differing = []
    for question, body, one, other, reply in zip(kind.questions, sent[1], expected, again, replies, strict=True):
        output = judge(one, other, reply, kind.fault)
        rows.append(_row(name, question, output, one, reply))
        differing += [] if output in HARMLESS else [body]
    return rows, differing[0] if differing else None


def judge(reference: Reply, again: Reply, reply: Reply, fault: Callable[[Reply], str]) -> str:
    """Return how a reply compares with two of the reference's."""
    if reference.error and reply.error:
        return REFUSED
    if reply.error:
        return f"refused: {reply.error[:80]}"
    if (wrong := fault(reply)) and not fault(reference):
        return wrong
    if reply.silence_s > max(STALL_S, STALL_FACTOR * reference.silence_s):
        return f"silent for {reply.silence_s:.1f} s"
    if reply.content in (reference.content, again.content):
        return IDENTICAL
    if reference.content != again.content:
        return UNSTABLE
    cut = reply.finish == "length" != reference.finish or (not reply.finish and bool(reference.finish))
    return "cut" if cut and reference.text.startswith(reply.text) else UNEXPLAINED


def _row(name: str, question: str, output: str, reference: Reply, reply: Reply) -> Row:
    row: Row = {"prompt": f"{name}: {question}"[:40], "tokens": None, "parts at": None, "margin": None}
    return row | {"output": output, "reference": _brief(reference), "server": _brief(reply)}


def _brief(reply: Reply) -> str:
    call = " ".join(reply.calls[0]) if reply.calls else ""
    return (reply.error or call or reply.text or reply.thinking)[:20]


async def _sampled(name: str, kind: RequestKind, reference: ChatServer, server: ChatServer) -> Checked:
    """Compare the distributions of the first tokens of samples; the same seed twice has to give one text."""
    from specdemo.bench.losslessness import ALARM, chi_square  # imports torch

    fields: dict[str, object] = {"temperature": 1.0, "max_tokens": SAMPLED_TOKENS}
    counts = []
    for side in (reference, server):
        bodies = [side.body(kind.questions[0], seed=seed, **fields) for seed in range(SAMPLES)]
        replies = await side.replies(bodies, kind.at_once)
        if refused := next((reply.error for reply in replies if reply.error), ""):
            return [_row(name, kind.questions[0], f"refused: {refused[:80]}", Reply(), Reply())], bodies[0]
        counts.append(Counter(reply.text for reply in replies))
    result = chi_square(*counts)
    bodies = [server.body(kind.questions[0], seed=0, **fields)] * 2
    again = await server.replies(bodies, 1)
    same_law = result.p >= ALARM
    outputs = {
        f"{SAMPLES} texts, p = {result.p:.2g}": IDENTICAL if same_law else "another distribution",
        "one seed twice": IDENTICAL if again[0].content == again[1].content else "two texts of one seed",
    }
    rows = [_row(name, question, output, Reply(), Reply()) for question, output in outputs.items()]
    return rows, None if all(output == IDENTICAL for output in outputs.values()) else bodies[0]
