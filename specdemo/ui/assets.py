"""Files of the page, markup, scripts and style, and how the server sends them: with the project's preview card,
compressed.
"""

import gzip
import re
from hashlib import sha256
from pathlib import Path
from typing import Any

import brotli  # Gradio needs it, too
import gradio as gr
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdemo.core.atomic_io import json_text
from specdemo.core.definitions import DEFINITIONS, table

HERE = Path(__file__).parent
HOW = tuple(f"{name}.js" for name in "helpers chart tree pending_tokens slow_motion maths how".split())
_RACE = "helpers player chart tree lanes bars pending_tokens slow_motion tiles panels inspector transport"
RACE = tuple(f"{name}.js" for name in [*_RACE.split(), "result_image", "race"])
SCRIPTS: dict[str, bytes] = {}  # path -> script that a view loads when its tab is opened first
COMMENT = re.compile(r"^[ \t]*(?://[^\n]*|/\*\*(?:(?!\*/).)*\*/)\n|^[ \t]+", re.MULTILINE | re.DOTALL)
LOADER = """fetch("PATH").then((answer) => answer.text())
  .then((script) => new Function("element", "props", "watch", script)(element, props, watch))
  .catch(() => element.append("This tab could not be loaded. Reload the page."));"""

CARD = re.compile(rb'\s*<meta\s+(?:property|name)="(?:og|twitter):[^>]*>')  # Gradio's own preview card
PAGE, JSON = "text/html", "application/json"
FOREVER = "max-age=31536000, immutable"
SMALL = 1000  # bytes that are not worth compressing
TITLE = "specdemo: speculative decoding, side by side"
DESCRIPTION = (
    "Compare plain and speculative decoding side by side: every draft token, its acceptance, and the speed-up."
)


def text(name: str) -> str:
    """Return the text of a file in this folder."""
    return (HERE / name).read_text(encoding="utf-8")


def markup(name: str, view: str = "") -> str:
    """Return the text of a skeleton, with the tiles of the results or the explanation of a view's result."""
    found = text(name).replace("@tiles", tiles())
    return found.replace("@below", text(f"result_{view}.html")) if "@below" in found else found


def reference() -> str:
    """Return the reference tab as Markdown, with its contents and the definition of every number."""
    words = text("reference.md")
    titles = re.findall(r"^## (.+)$", words, re.MULTILINE)
    contents = " · ".join(f"[{title}](#h-{title.lower().replace(' ', '-')})" for title in titles)
    return f"{contents}\n\n{words.replace('@definitions', table())}"


def tiles() -> str:
    """Return the tiles of the results as HTML, in the order of the definitions, and a fold with more of them."""
    parts: list[str] = []
    folded: list[str] = []
    for definition in DEFINITIONS.values():
        if tile := definition.tile:
            number = f' data-key="{definition.keys[0]}" data-format="{tile.format}"' if tile.format else ""
            number += " data-baseline" if tile.baseline else ""
            number += " data-optional hidden" if tile.optional else ""
            head = f'<div class="sd-tile{"" if parts else " sd-main-tile"}" data-tile="{tile.id}"{number}>'
            (folded if tile.more else parts).append(
                f'{head}<h2>{tile.title}</h2><div class="sd-rows"></div><p>{tile.text}</p></div>'
            )
    more = f'<summary>More numbers</summary><div class="sd-tiles">{"".join(folded)}</div>'
    shown = f'<section class="sd-tiles" aria-label="Results">{"".join(parts)}</section>'
    return f'{shown}<details class="sd-fold">{more}</details>'


def to_tab(tab_id: str) -> str:
    """Return a script that shows a tab.

    Tabs must not be outputs of an event: Gradio's front end would then copy them, with all their content, at every
    message of every run.
    """
    return f"""() => document.querySelector('[role="tab"][data-tab-id="{tab_id}"]').click()"""


def heading(picture: str, words: str, elem_id: str) -> None:
    """Return HTML with a card's picture next to its title and text."""
    with gr.Row(elem_classes="card-head"):
        gr.HTML(text(f"picture_{picture}.html"), elem_classes="picture")
        gr.Markdown(words, elem_id=elem_id)


def view(skeleton: str, *scripts: str, elem_id: str, value: str = "", later: bool = False, **props: Any) -> gr.HTML:
    """Create a component whose value is an append-only log, which the scripts draw into the skeleton one after the
    other. later: load the scripts, and a value that does not change, when the tab is opened first. props: further data
    of the scripts.
    """
    script = COMMENT.sub("", "\n".join(map(text, scripts)))
    if later:
        constant = f"props = {{ value: {json_text(value)} }};\n" if value else ""
        content = (constant + script).encode()
        path = f"scripts/{elem_id}-{sha256(content).hexdigest()[:12]}.js"
        SCRIPTS[f"/{path}"] = content
        script, value = LOADER.replace("PATH", path), ""
    drawn: gr.HTML = gr.HTML(
        value,
        html_template=markup(skeleton, elem_id),
        js_on_load=script,
        elem_id=elem_id,
        apply_default_css=False,
        **props,
    )
    return drawn


def carded(page: bytes) -> bytes:
    """Return the page with this project's preview card instead of Gradio's."""
    words = {"type": "website", "title": TITLE, "description": DESCRIPTION}
    card = "".join(f'<meta property="og:{name}" content="{text}">' for name, text in words.items())
    more = f'<meta name="description" content="{DESCRIPTION}"><meta name="twitter:card" content="summary">'
    icon = '<link rel="icon" href="favicon.ico" type="image/svg+xml">'
    style = f"<style>{text('loading.css')}</style>"
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

        script = SCRIPTS.get(scope.get("path", ""))
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
        quality = 5 if headers.get("content-type", "").startswith(JSON) else 9  # a page is sent once per visit
        body, headers["Content-Encoding"] = brotli.compress(body, quality=quality), "br"
    elif len(body) > SMALL and "gzip" in accepted:
        body, headers["Content-Encoding"] = gzip.compress(body, 6), "gzip"
    headers.add_vary_header("Accept-Encoding")
    headers["Content-Length"] = str(len(body))
    return body


def _kind(start: Message) -> str:
    return Headers(raw=start["headers"]).get("content-type", "").partition(";")[0]
