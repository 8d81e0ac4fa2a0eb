"""Answers of the server: the project's preview card in the page, compression, and the scripts of tabs."""

import gzip
import re

import brotli  # Gradio needs it, too
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdemo.ui import assets

CARD = re.compile(rb'\s*<meta\s+(?:property|name)="(?:og|twitter):[^>]*>')  # Gradio's own preview card
PAGE, JSON = "text/html", "application/json"
FOREVER = "max-age=31536000, immutable"
SMALL = 1000  # bytes that are not worth compressing
TITLE = "specdemo: speculative decoding, side by side"
DESCRIPTION = (
    "Compare plain and speculative decoding side by side: every draft token, its acceptance, and the speed-up."
)


def carded(page: bytes) -> bytes:
    """Return the page with this project's preview card instead of Gradio's."""
    words = {"type": "website", "title": TITLE, "description": DESCRIPTION}
    card = "".join(f'<meta property="og:{name}" content="{text}">' for name, text in words.items())
    more = f'<meta name="description" content="{DESCRIPTION}"><meta name="twitter:card" content="summary">'
    icon = '<link rel="icon" href="favicon.ico" type="image/svg+xml">'
    style = f"<style>{assets.text('loading.css')}</style>"
    return CARD.sub(b"", page).replace(b"</head>", f"{card}{more}{icon}{style}</head>".encode(), 1)


class Answers:
    """ASGI middleware that buffers a page, to insert the preview card and to compress it, as it does with JSON. Gradio
    compresses files only.
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
                    headers = MutableHeaders(scope=page_start[0])
                    page = carded(body) if _kind(page_start[0]) == PAGE else body
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


def _kind(start: Message) -> str:
    return Headers(raw=start["headers"]).get("content-type", "").partition(";")[0]
