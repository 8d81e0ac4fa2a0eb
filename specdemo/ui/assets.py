"""Files of the page: markup with the project's preview card, scripts and style."""

import gzip
import re
from hashlib import sha256
from pathlib import Path
from typing import Any

import brotli  # Gradio needs it, too
import gradio as gr
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Scope, Send

from specdemo.core.atomic_io import json_text
from specdemo.core.definitions import DEFINITIONS, Tile, table

HERE = Path(__file__).parent
HOW = tuple(f"{name}.js" for name in "helpers chart tree pending_tokens slow_motion maths how".split())
_RACE = "helpers player chart tree lanes bars pending_tokens slow_motion tiles ribbon panels inspector transport"
RACE = tuple(f"{name}.js" for name in [*_RACE.split(), "result_image", "run_history", "race"])
SWEEP = ("helpers.js", "chart.js", "pays.js", "sweep.js")
SCRIPTS: dict[str, bytes] = {}  # name -> script that a view loads when its tab is opened first
# whole lines, the end of a line without quotes (it may be in a text), and indentation
COMMENT = re.compile(
    r"^[ \t]*(?://[^\n]*|/\*\*(?:(?!\*/).)*\*/)\n|[ \t]+// [^\n\"'`]*$|^[ \t]+", re.MULTILINE | re.DOTALL
)
REMARK = re.compile(r"/\*.*?\*/|^[ \t]+", re.MULTILINE | re.DOTALL)
LOADER = """fetch("scripts/NAME").then((answer) => answer.text())
  .then((script) => new Function("element", "props", "watch", script)(element, props, watch))
  .catch(() => element.append("This tab could not be loaded. Reload the page."));"""

CARD = re.compile(rb'\s*<meta\s+(?:property|name)="(?:og|twitter):[^>]*>')  # Gradio's own preview card
LATER = re.compile(rb"<script.*?</script>", re.DOTALL)
PAGE, SMALL = "text/html", 1000  # bytes that are not worth compressing
QUALITY = {PAGE: 9, "application/json": 5}  # of brotli; a page is sent once per visit
FOREVER = "max-age=31536000, immutable"
TITLE = "specdemo: speculative decoding, side by side"


def text(name: str) -> str:
    """Return the text of a file in this folder, of a script or style without its comments."""
    found, kind = (HERE / name).read_text(encoding="utf-8"), name.rpartition(".")[2]
    return {"js": COMMENT, "css": REMARK}[kind].sub("", found) if kind in ("js", "css") else found


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
    """Return a fold with the numbers of the results as HTML, in the order of the definitions."""
    rows = "".join(_tile(one.keys[0], one.tile) for one in DEFINITIONS.values() if one.tile)
    return f'<details class="sd-fold"><summary>All numbers</summary><div class="sd-results">{rows}</div></details>'


def _tile(key: str, tile: Tile) -> str:
    number = f' data-key="{key}" data-format="{tile.format}"' if tile.format else ""
    flags = " data-baseline" * tile.baseline + " data-optional hidden" * tile.optional
    words = f'<h2>{tile.title}</h2><div class="sd-rows"></div><p>{tile.text}</p>'
    return f'<div class="sd-tile" data-tile="{tile.id}"{number}{flags}>{words}</div>'


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
    script = "\n".join(map(text, scripts))
    if later:
        constant = f"props = {{ value: {json_text(value)} }};\n" if value else ""
        content = (constant + script).encode()
        name = f"{elem_id}-{sha256(content).hexdigest()[:12]}.js"
        SCRIPTS[name] = content
        script, value = LOADER.replace("NAME", name), ""
    props |= {"html_template": markup(skeleton, elem_id), "js_on_load": script, "apply_default_css": False}
    drawn: gr.HTML = gr.HTML(value, elem_id=elem_id, **props)
    return drawn


def page_with_card(page: bytes) -> bytes:
    """Return the page with this project's preview card instead of Gradio's, and with its first style and a skeleton
    that the browser paints before Gradio's scripts, 0.5 MB, which follow it.
    """
    head, end, body = CARD.sub(b"", page).partition(b"</head>")
    card = f"{text('card.html').replace('@title', TITLE)}<style>{text('loading.css')}</style>"
    skeleton = text("skeleton.html").replace("@title", text("title.html").replace("h1>", "b>"))
    start, close, rest = body.partition(b"</body>")
    later = [skeleton.encode(), *LATER.findall(head)]
    return b"".join([LATER.sub(b"", head), card.encode(), end, start, *later, close, rest])


def compressor(scope: Scope, send: Send) -> Send:
    """Return what sends an answer: pages with the card, and pages and JSON compressed. Gradio compresses files only."""
    start: list[Message] = []  # first message of a page or of JSON
    body = bytearray()

    async def send_whole(message: Message) -> None:
        if message["type"] == "http.response.start" and _kind(MutableHeaders(scope=message)) in QUALITY:
            start.append(message)
        elif not start:
            await send(message)
        else:
            body.extend(message.get("body", b""))
            if not message.get("more_body"):
                content = compressed(bytes(body), scope, MutableHeaders(scope=start[0]))
                await send(start[0])
                await send({"type": "http.response.body", "body": content})

    return send_whole


def compressed(body: bytes, scope: Scope, headers: MutableHeaders) -> bytes:
    """Return the body of an answer, compressed if the browser accepts that, and set the headers that depend on it."""
    kind, accepted = _kind(headers), re.findall(r"\w+", Headers(scope=scope).get("accept-encoding", ""))
    body = page_with_card(body) if kind == PAGE else body
    if len(body) > SMALL and "br" in accepted:  # browsers accept it from this machine and over HTTPS
        body, headers["Content-Encoding"] = brotli.compress(body, quality=QUALITY[kind]), "br"
    elif len(body) > SMALL and "gzip" in accepted:
        body, headers["Content-Encoding"] = gzip.compress(body, 6), "gzip"
    headers.add_vary_header("Accept-Encoding")
    headers["Content-Length"] = str(len(body))
    return body


def _kind(headers: Headers) -> str:
    return headers.get("content-type", "").partition(";")[0]


def script(request: Request) -> Response:
    """Answer with a script that a view loads when its tab is opened first."""
    content = SCRIPTS.get(request.path_params["name"])
    if content is None:
        return Response(status_code=404)
    return Response(content, media_type="text/javascript", headers={"Cache-Control": FOREVER})
