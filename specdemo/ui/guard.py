"""Checks of requests before Gradio reads them: no writes from other sites' pages, and no bodies that Gradio would keep
on disk forever, and none that are too large.
"""

import os
import re
import time
from collections import deque
from collections.abc import Iterator

from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdemo.ui.hosts import address

REQUEST_BYTES = 1_000_000  # JSON from the page and its API
ENVELOPE = 4_096  # bytes around the file in the body of an upload
WINDOW_S = 600.0  # uploads are counted over this time and deleted after it
UPLOADS, ALL_UPLOADS = 60, 300  # per address, which a class may share; in total
FILE = (
    rb'--%b\r\nContent-Disposition: form-data; name="files"; filename="[^"\r\n]*"\r\n(Content-Type:[^\r\n]*\r\n)?\r\n'
)


class RejectedRequest(Exception):
    """A rejected request. status: HTTP status code. The message is one line."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Guard:
    """ASGI middleware that rejects requests. most: maximum size of an upload in bytes."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most
        self._uploads: deque[tuple[float, str]] = deque()  # time and address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            try:
                receive = await self._admitted(scope, receive)
            except RejectedRequest as refused:
                await PlainTextResponse(str(refused), refused.status)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _admitted(self, scope: Scope, receive: Receive) -> Receive:
        headers = Headers(scope=scope)
        if not same_origin(headers):
            raise RejectedRequest(403, "requests from other sites are not allowed")
        upload = scope["path"].rstrip("/").endswith("/upload")
        if upload:
            self._count(address(HTTPConnection(scope)))
        body = await _body(receive, self._most + ENVELOPE if upload else REQUEST_BYTES)
        if upload:
            _check_upload(headers, body)
        messages: Iterator[Message] = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def again() -> Message:
            return next(messages, None) or await receive()

        return again

    def _count(self, visitor: str) -> None:
        now = time.monotonic()
        while self._uploads and self._uploads[0][0] < now - WINDOW_S:
            self._uploads.popleft()
        if len(self._uploads) >= ALL_UPLOADS or sum(who == visitor for _, who in self._uploads) >= UPLOADS:
            raise RejectedRequest(429, f"too many files were opened; wait {WINDOW_S / 60:.0f} minutes")
        self._uploads.append((now, visitor))


def same_origin(headers: Headers) -> bool:
    """Return whether the request does not come from another site's page. Clients other than browsers send no origin."""
    origin = headers.get("origin")
    forwarded = [host.strip() for host in headers.get("x-forwarded-host", "").split(",")]
    own = {headers.get("host"), *forwarded, os.environ.get("SPACE_HOST")} - {"", None}
    # a foreign script may forge X-Forwarded-Host, but not what its browser says of it
    within = headers.get("sec-fetch-site", "none") in ("same-origin", "none")
    return origin is None or (within and origin.partition("://")[2] in own)


async def _body(receive: Receive, most: int) -> bytes:
    body, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RejectedRequest(400, "the request was interrupted")
        body += message.get("body", b"")
        if len(body) > most:
            raise RejectedRequest(413, f"requests are limited to {most / 1e6:.3g} MB")
        more = message.get("more_body", False)
    return bytes(body)


def _check_upload(headers: Headers, body: bytes) -> None:
    """Check that the body is one complete file. Gradio would leave parts of anything else on disk."""
    kind, options = parse_options_header(headers.get("content-type"))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise RejectedRequest(400, "send the file as multipart/form-data")
    mark = b"--" + boundary
    complete = re.match(FILE % re.escape(boundary), body, re.IGNORECASE) and body.rstrip(b"\r\n").endswith(mark + b"--")
    if not complete or body.count(mark) != 2:
        raise RejectedRequest(400, "send one complete file, as `files`")
