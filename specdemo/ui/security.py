"""Security of the page: own host names and paths, trusted proxies, same origin, size limits of requests, headers of
answers, and one line in the log for a failed call, where Gradio and the server print a traceback.

If a page accepted every host name, any site could read it: the site points its own name at this machine, and a
visitor's browser takes the page for a part of the site (DNS rebinding).
"""

import logging
import os
import re
import socket
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import gradio as gr
from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdemo.bench.report import visible
from specdemo.presets import limits
from specdemo.ui import assets

REQUEST_BYTES = 1_000_000  # JSON from the page and its API
ENVELOPE = 4_096  # bytes around the file in the body of an upload
WINDOW_S = 600  # uploads are counted over this time and deleted after it
UPLOADS, ALL_UPLOADS = 60, 300  # per address, which a class may share; in total
HOST = re.compile(r"(\[[^\[\]]+\]|[a-z0-9._-]+?)\.?(:\d*)?")  # Host header in lower case
# Gradio has more paths: a monitor, an editor, a stream that reports changed code, a proxy, files, stored sessions.
PATH = re.compile(
    r"/(config/?|favicon\.ico|manifest\.json|robots\.txt|theme\.css|pwa_icon(/\d+)?|(assets|scripts|static|svelte)/.*|"
    r"gradio_api/(startup-events|app_id/?|info/?|openapi\.json|theme\.css|(heartbeat|run|api|call)/.*|"
    r"queue/(join|data)|cancel|reset/?|upload|upload_progress))?"
)
PLATFORM = (  # addresses of the proxies of a Space
    "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "::1/128", "fc00::/7",
)  # fmt: skip

MAX_MESSAGE = 300  # characters of a logged message
PACKAGE = Path(__file__).parents[1]

logger = logging.getLogger(__name__)


class RequestFilter:
    """ASGI middleware around the whole server.

    It rejects requests for other host names and other paths, writes from other sites' pages, and bodies that are too
    large or that Gradio would keep on disk forever. It adds security headers to answers, removes Gradio's that let
    other origins read them, and logs failed requests without a traceback. names: own host names. most: maximum size of
    an upload in bytes.
    """

    def __init__(self, app: ASGIApp, names: Collection[str], most: int) -> None:
        self._app = app
        self._names = names
        self._most = most
        self._uploads: deque[tuple[float, str]] = deque()  # time and address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        send_whole = assets.compressor(scope, send)

        async def answer(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                _secure(MutableHeaders(scope=message))
            await send_whole(message)

        try:
            await self._app(scope, await self._admitted(scope, receive), answer)
        except HTTPException as refused:
            await PlainTextResponse(refused.detail, refused.status_code)(scope, receive, answer)
        except ClientDisconnect:
            return
        except Exception as error:  # starlette raises it again after it has answered with status 500
            if not started:
                raise
            log_failure(f"{scope['method']} {scope['path']}", error)

    async def _admitted(self, scope: Scope, receive: Receive) -> Receive:
        """Return what receives the checked request. Raises HTTPException with one line."""
        headers = Headers(scope=scope)
        host, address = headers.get("host", ""), scope["server"][0]  # that the request came in on
        if canonical(host) not in {*self._names, canonical(str(address))}:
            how = "start it with --allow-host NAME to allow a name"
            raise HTTPException(403, f"this page does not answer to the host {host[:100]!r}; {how}")
        if not PATH.fullmatch(scope["path"].removeprefix(scope.get("root_path", ""))):
            raise HTTPException(404, "this page has no such path")
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return receive
        if not same_origin(headers):
            raise HTTPException(403, "requests from other sites are not allowed")
        upload = scope["path"].rstrip("/").endswith("/upload")
        if upload:
            self._count(scope["client"])
        body = await _body(Request(scope, receive), self._most + ENVELOPE if upload else REQUEST_BYTES)
        if upload:
            await _check_upload(Request(scope, _replay(body, receive)))
        return _replay(body, receive)

    def _count(self, client: tuple[str, int] | None) -> None:
        now, visitor = time.monotonic(), client[0] if client else ""
        while self._uploads and self._uploads[0][0] < now - WINDOW_S:
            self._uploads.popleft()
        if len(self._uploads) >= ALL_UPLOADS or sum(who == visitor for _, who in self._uploads) >= UPLOADS:
            raise HTTPException(429, f"too many files were opened; wait {WINDOW_S / 60:.0f} minutes")
        self._uploads.append((now, visitor))


def only_here(bound: str, allowed: Iterable[str], proxies: Iterable[str]) -> bool:
    """Return whether only this machine reaches a page that is bound to an address."""
    return bound in ("localhost", "127.0.0.1", "::1") and not [*allowed, *proxies]


def own_names(bound: str, allowed: Iterable[str] = ()) -> set[str]:
    """Return the host names of a page that is bound to an address.

    They are those of this machine, that of the Space, and `allowed`. The address that a connection came in on is always
    accepted, so it is not listed. Raises ValueError for an invalid name.
    """
    names = {"localhost", "127.0.0.1", "::1", bound, *os.environ.get("SPACE_HOST", "").split(",")}
    if bound in ("0.0.0.0", "::"):  # all addresses of this machine
        short = socket.gethostname().partition(".")[0]
        names |= {socket.gethostname(), short, f"{short}.local"}
    for name in allowed:
        if not canonical(name):
            raise ValueError(f"--allow-host takes a host name such as demo.example.org, not {name!r:.100}")
    return {canonical(name) for name in (*names, *allowed)} - {""}


def canonical(host: str) -> str:
    """Return a host without its port, in lower case, an IP address in its usual form; empty if it is not a host."""
    name = host.strip().lower()
    match = HOST.fullmatch(name)
    with suppress(ValueError):
        address = ip_address((match[1] if match else name).strip("[]").partition("%")[0])
        return str(getattr(address, "ipv4_mapped", None) or address)
    return match[1] if match and "[" not in name else ""


def trust_proxies(addresses: Iterable[str]) -> None:
    """Let the server read a visitor's address from the X-Forwarded-For header of these proxies, given as addresses or
    networks; without any, of a Space's own. Call it before the server starts.

    Raises ValueError for an invalid address.
    """
    listed = [part for given in addresses for part in given.split(",")]
    try:
        networks = [str(ip_network(address.strip(), strict=False)) for address in listed]
    except ValueError as error:
        example = "the address or network of a proxy, such as 127.0.0.1 or 10.0.0.0/8"
        raise ValueError(f"--behind-proxy takes {example}: {str(error)[:200]}") from None
    platform = PLATFORM if os.environ.get("SPACE_ID") else ()
    # uvicorn would believe any local peer by default
    os.environ["FORWARDED_ALLOW_IPS"] = ",".join(networks or platform)


def same_origin(headers: Headers) -> bool:
    """Return whether the request does not come from another site's page. Clients other than browsers send no origin."""
    origin = headers.get("origin")
    forwarded = [host.strip() for host in headers.get("x-forwarded-host", "").split(",")]
    own = {headers.get("host"), *forwarded, os.environ.get("SPACE_HOST")} - {"", None}
    # a foreign script may forge X-Forwarded-Host, but not what its browser says of it
    within = headers.get("sec-fetch-site", "none") in ("same-origin", "none")
    return origin is None or (within and origin.partition("://")[2] in own)


async def _body(request: Request, most: int) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise HTTPException(413, f"requests are limited to {most / 1e6:.3g} MB")
    return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return what receives a body that was read, and what follows it."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return messages.pop() if messages else await receive()

    return again


async def _check_upload(request: Request) -> None:
    """Check that the body is one complete file. Gradio, whose parser is a copy of Starlette's, would leave parts of
    anything else on disk."""
    try:
        async with request.form(max_files=1, max_fields=0) as form:
            names = [name for name, part in form.multi_items() if isinstance(part, UploadFile)]
    except (MultiPartException, HTTPException):
        names = []
    if names != ["files"]:
        raise HTTPException(400, "send one complete file, as `files`")


def policy() -> str:
    """Return the content security policy of all answers. Gradio's page needs inline scripts and styles, and
    'unsafe-eval', with which it compiles `js=` handlers and the templates of gr.HTML.
    """
    hub = " https://huggingface.co https://*.hf.space" if limits.public() else ""  # it shows a Space in a frame
    return (
        f"default-src 'self'{hub}; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
        f"img-src 'self' data: blob:{hub}; font-src 'self' data:; worker-src 'self' blob:; object-src 'none'; "
        f"base-uri 'self'; form-action 'self'; frame-ancestors 'self'{hub}"
    )


def _secure(headers: MutableHeaders) -> None:
    """Add the security headers of an answer, and remove Gradio's that let other origins read it."""
    for name in [name for name in headers if name.startswith("access-control-")]:
        del headers[name]
    headers["Content-Security-Policy"] = policy()
    headers["X-Content-Type-Options"] = "nosniff"
    headers["Referrer-Policy"] = "no-referrer"


def outermost(layer: Callable[[ASGIApp], ASGIApp]) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """Return a lifespan that puts a layer around the whole server.

    Gradio puts its own layers around those that it is given, so this one is added when the server starts.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        assert app.middleware_stack is not None
        app.middleware_stack = layer(app.middleware_stack)
        yield

    return lifespan


class Page(gr.Blocks):
    """Blocks that print no traceback of failed calls: anyone can send bad ones to a public page."""

    async def process_api(self, block_fn: Any, *args: Any, **settings: Any) -> dict[str, object]:
        """Run a call. Raises gr.Error, which Gradio does not print."""
        try:
            return await super().process_api(block_fn, *args, **settings)
        except gr.Error as error:
            error.print_exception = False
            raise
        except Exception as error:
            log_failure(f"call of {getattr(block_fn, 'name', block_fn)}", error)
            message = "the call failed; see the log of the server"
            raise gr.Error(message, visible=False, print_exception=False) from error


def log_failure(what: str, error: Exception) -> None:
    """Log a failure in one line, with the place in the code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)[::-1]
    own = (frame for frame in frames if PACKAGE in Path(frame.filename).parents and frame.filename != __file__)
    place = next(own, frames[0])
    line = " ".join(f"{what} failed: {type(error).__name__}: {error}".split())
    logger.warning("%s (%s:%s)", visible(line)[:MAX_MESSAGE], Path(place.filename).name, place.lineno)
    logger.debug("its traceback", exc_info=error)
