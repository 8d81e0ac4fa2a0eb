"""Security headers: a content security policy, no content sniffing, no foreign frames or origins.

Gradio's page requires two exceptions: 'unsafe-eval', with which it compiles `js=` handlers and the templates of
gr.HTML, and inline styles, which its components write. Inline scripts are allowed only by hash. They contain the page's
settings, so every answer has its own hashes.
"""

import gzip
import re
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from hashlib import sha256

import brotli  # Gradio needs it, too
from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdemo.presets import limits
from specdemo.ui import assets

CARD = re.compile(rb'\s*<meta\s+(?:property|name)="(?:og|twitter):[^>]*>')  # Gradio's own preview card
INLINE = re.compile(rb"<script(?![^>]*\ssrc=)[^>]*>(.*?)</script>", re.DOTALL)
PAGE, JSON = "text/html", "application/json"
FOREVER = "max-age=31536000, immutable"
SMALL = 1000  # bytes that are not worth compressing
TITLE = "specdemo: speculative decoding, side by side"
DESCRIPTION = (
    "Compare plain and speculative decoding side by side: every draft token, its acceptance, and the speed-up."
)
HUB = "https://huggingface.co https://*.hf.space"  # the hub shows a Space in a frame


def policy(page: bytes) -> str:
    """Return the content security policy of an HTML page."""
    hub = f" {HUB}" if limits.public() else ""
    scripts = "".join(f" 'sha256-{b64encode(sha256(text).digest()).decode()}'" for text in INLINE.findall(page))
    return "; ".join(
        (
            f"default-src 'self'{hub}",
            f"script-src 'self' 'unsafe-eval'{scripts}",
            "style-src 'self' 'unsafe-inline'",
            f"img-src 'self' data: blob:{hub}",
            "font-src 'self' data:",
            "worker-src 'self' blob:",
            "object-src 'none'",
            "base-uri 'self'",
            "form-action 'self'",
            f"frame-ancestors 'self'{hub}",
        )
    )


def carded(page: bytes) -> bytes:
    """Return the page with this project's preview card instead of Gradio's."""
    words = {"type": "website", "title": TITLE, "description": DESCRIPTION}
    card = "".join(f'<meta property="og:{name}" content="{text}">' for name, text in words.items())
    more = f'<meta name="description" content="{DESCRIPTION}"><meta name="twitter:card" content="summary">'
    icon = '<link rel="icon" href="favicon.ico" type="image/svg+xml">'
    style = f"<style>{assets.text('loading.css')}</style>"
    return CARD.sub(b"", page).replace(b"</head>", f"{card}{more}{icon}{style}</head>".encode(), 1)


class Policy:
    """ASGI middleware that buffers a page, to hash its scripts, to insert the preview card, and to compress it, as it
    does with JSON. Gradio compresses files only.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        page_start: list[Message] = []  # first message of a response with HTML or JSON
        body = b""

        async def send_page(message: Message) -> None:
            nonlocal body
            if message["type"] == "http.response.start" and _kind(message) in (PAGE, JSON):
                page_start.append(message)
            elif not page_start:
                await send(message)
            else:
                body += message.get("body", b"")
                if not message.get("more_body"):
                    page, headers = body, MutableHeaders(scope=page_start[0])
                    if _kind(page_start[0]) == PAGE:
                        page = carded(body)
                        headers["Content-Security-Policy"] = policy(page)
                    page = compressed(page, scope, headers)
                    await send(page_start[0])
                    await send({"type": "http.response.body", "body": page})

        script = assets.SCRIPTS.get(scope.get("path", ""))
        if scope["type"] == "http" and script is not None:
            headers = MutableHeaders({"Content-Type": "text/javascript", "Cache-Control": FOREVER})
            await Response(compressed(script, scope, headers), headers=headers)(scope, receive, send)
        else:
            await self._app(scope, receive, send_page)


def compressed(body: bytes, scope: Scope, headers: MutableHeaders) -> bytes:
    """Return the body of an answer, compressed if the browser accepts that and it saves something, and set the headers
    that depend on it.
    """
    accepted = re.findall(r"\w+", Headers(scope=scope).get("accept-encoding", ""))
    if len(body) > SMALL and "br" in accepted:  # browsers accept it from this machine and over HTTPS
        body, headers["Content-Encoding"] = brotli.compress(body, quality=5), "br"
    elif len(body) > SMALL and "gzip" in accepted:
        body, headers["Content-Encoding"] = gzip.compress(body, 6), "gzip"
    headers.add_vary_header("Accept-Encoding")
    headers["Content-Length"] = str(len(body))
    return body


def guarded(app: ASGIApp) -> ASGIApp:
    """Return the server app without the headers by which Gradio lets other origins read its answers."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name in [name for name in headers if name.startswith("access-control-")]:
                    del headers[name]
                headers["X-Content-Type-Options"] = "nosniff"
                headers["Referrer-Policy"] = "no-referrer"
            await send(message)

        await app(scope, receive, send_with_headers)

    return serve


def outermost(*layers: Callable[[ASGIApp], ASGIApp]) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """Return a lifespan that puts layers around the whole server, the last one outermost.

    Gradio puts its own layers around those that it is given, so these are added when the server starts.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        assert app.middleware_stack is not None
        for layer in layers:
            app.middleware_stack = layer(app.middleware_stack)
        yield

    return lifespan


def _kind(start: Message) -> str:
    return Headers(raw=start["headers"]).get("content-type", "").partition(";")[0]
