"""HTTP client of one untrusted server: responses are limited in bytes, compressed ones are rejected, redirects are not
followed. Callers limit the total time; the client limits the time without data.
"""

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import TypeVar

import httpx

CONNECT_S = 5.0
SILENCE_S = 60.0  # timeout for the next bytes, and for a server that refuses requests; it may load its model
DRAIN_S = 0.1
METRICS_PATH = "/metrics"
METRICS_S = 3.0
METRICS_BYTES = 4_000_000
LINE_BYTES = 1_000_000  # longest line of a stream; it may contain the ids of a long prompt
SPARE_BYTES = 2_000_000  # of a response, in addition to its token events
EVENT_BYTES = 4_000  # average size of a token's event
REFUSAL_BYTES = 4_000
DONE = object()  # the event [DONE]


# longest wait in s until a server takes a request. A server that loads its model, a gateway without one and one with
# too many requests refuse for now (408, 425, 429, 502 to 504); what fails inside (500) mostly fails again.
PATIENCE_S = {500: 3.0, **dict.fromkeys((408, 425, 429, 502, 503, 504), SILENCE_S)}
PAUSE_S = 8.0  # longest pause between two requests, unless the server asks for a longer one
pause = asyncio.sleep  # tests replace it

Answer = TypeVar("Answer")


class StatusError(Exception):
    """A response with another status than 200. The message contains untrusted text of the server.

    asked_s: pause that the server asks for, 0 for none. patience_s: how long to repeat the request, 0 if the server
    refuses it for good.
    """

    def __init__(self, status: int, text: str, retry_after: str = "") -> None:
        super().__init__(f"Error code: {status} - {text}")
        self.status, self.patience_s = status, PATIENCE_S.get(status, 0.0)
        self.asked_s = float(retry_after) if re.fullmatch(r"[0-9]{1,9}", retry_after) else 0.0


class ReportedError(Exception):
    """An error that a server reports within an answer, in its own untrusted words."""


@dataclass(slots=True)
class Patience:
    """Repeats requests that a server refuses for now. waited_s: in total. status: of the last refusal."""

    waited_s: float = 0.0
    status: int = 0

    async def answer(self, request: Callable[[], Awaitable[Answer]]) -> Answer:
        """Return the answer to a request. Raises StatusError if the server refuses it for good or for too long."""
        for tries in count():
            try:
                return await request()
            except StatusError as error:
                seconds = max(error.asked_s or min(2.0**tries, PAUSE_S), 1.0)
                if self.waited_s + seconds > error.patience_s:
                    raise
                self.waited_s, self.status = self.waited_s + seconds, error.status
            await pause(seconds)
        raise AssertionError


@dataclass(frozen=True, slots=True)
class Client:
    """HTTP requests to one server."""

    server: str
    http: httpx.AsyncClient

    async def read(self, path: str, most: int) -> bytes:
        """Return the complete response. Raises StatusError, httpx.TransportError, and ValueError for more than `most`
        bytes.
        """
        async with self._answer("GET", path) as answer:
            return b"".join([part async for part, _ in _bounded(answer, most)])

    async def metrics(self) -> str | None:
        """Return the metrics; None if there are none, or if they are too long or too slow."""
        with suppress(Exception):  # without metrics the counters are unknown
            async with asyncio.timeout(METRICS_S):
                return (await self.read(METRICS_PATH, METRICS_BYTES)).decode(errors="replace")
        return None

    async def events(
        self, path: str, question: dict[str, object], tokens: int
    ) -> AsyncGenerator[tuple[object, float], None]:
        """Yield the JSON of every event of an answer and its arrival time in seconds of `time.perf_counter`.

        The event [DONE] is `DONE`, and a line `error` is an object with this field. Events without content, which keep
        a connection alive, are left out.
        The answer may have at most `tokens` tokens. Raises as `read` does.
        """
        async with self._answer("POST", path, question) as answer:
            parts = _bounded(answer, SPARE_BYTES + tokens * EVENT_BYTES)
            received, other = False, b""
            async for line, arrived in _lines(parts):
                name, _, value = line.partition(b":")
                data = value.strip()
                if name not in (b"data", b"error") or data in (b"", b"null"):
                    other += line[: REFUSAL_BYTES - len(other)]
                    continue
                received = True
                if data == b"[DONE]":
                    await _drain(parts)
                    yield DONE, arrived
                    return
                yield {"error": _json_or_text(data)} if name == b"error" else json.loads(data.decode()), arrived
            kind = answer.headers.get("content-type", "no content type")
            if not received and "text/event-stream" not in kind:
                raise ValueError(f"it sent {kind} instead of an event stream: {other.decode(errors='replace')}")

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, question: dict[str, object] | None = None
    ) -> AsyncIterator[httpx.Response]:
        request = self.http.build_request(method, self.server + path, json=question)
        try:
            answer = await self.http.send(request, stream=True)
        except (httpx.RemoteProtocolError, httpx.ReadError):  # the server has closed a connection that was kept
            answer = await self.http.send(request, stream=True)
        async with aclosing(answer):
            if answer.status_code == 200:
                yield answer
                return
            body = b""
            async for part in answer.aiter_raw():
                body += part
                if len(body) > REFUSAL_BYTES:
                    break
            text = body[:REFUSAL_BYTES].decode(errors="replace")
            raise StatusError(answer.status_code, text, answer.headers.get("retry-after", ""))


@asynccontextmanager
async def connect(server: str, key: str | None) -> AsyncIterator[Client]:
    """Open connections to one server, which are reused between requests. key: sent with every request; None: no key."""
    async with httpx.AsyncClient(
        headers={"Accept-Encoding": "identity", **({"Authorization": f"Bearer {key}"} if key else {})},
        verify=_ssl_context(),
        timeout=httpx.Timeout(SILENCE_S, connect=CONNECT_S),
        limits=httpx.Limits(),  # unlimited: the load suite sends its requests concurrently
        follow_redirects=False,
    ) as http:
        yield Client(server, http)


_ssl_context = lru_cache(httpx.create_ssl_context)  # of all connections; httpx takes 20 ms to create one


async def _bounded(answer: httpx.Response, most: int) -> AsyncGenerator[tuple[bytes, float], None]:
    """Yield the received bytes with their arrival times, before any processing."""
    if answer.headers.get("content-encoding", "identity") != "identity":
        raise ValueError("it sent a compressed response, which was not requested")
    size = 0
    async for part in answer.aiter_raw():
        arrived = time.perf_counter()
        size += len(part)
        if size > most:
            raise ValueError(f"it sent more than {most:,} bytes")
        yield part, arrived


def _json_or_text(data: bytes) -> object:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode(errors="replace")


async def _lines(parts: AsyncIterator[tuple[bytes, float]]) -> AsyncGenerator[tuple[bytes, float], None]:
    buffer = bytearray()
    arrived = 0.0
    async for part, arrived in parts:
        *ends, rest = part.split(b"\n")
        for end in ends:
            yield bytes(buffer + end), arrived
            buffer.clear()
        buffer += rest
        if len(buffer) > LINE_BYTES:
            raise ValueError(f"it sent a line of more than {LINE_BYTES:,} bytes")
    yield bytes(buffer), arrived


async def _drain(parts: AsyncIterator[tuple[bytes, float]]) -> None:
    """Read what ends an answer, without which the connection cannot be kept."""
    with suppress(TimeoutError, ValueError, httpx.TransportError):
        async with asyncio.timeout(DRAIN_S):
            async for _ in parts:
                pass
