"""Scripts and markup as the page sends them, and answers of the server: compression and headers."""

import gzip
import re
from pathlib import Path

import brotli
import pytest
from starlette.applications import Starlette
from starlette.responses import HTMLResponse, JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from specdemo.core.definitions import DEFINITIONS, table
from specdemo.ui import assets
from specdemo.ui.assets import COMMENT, HERE

SCRIPT = """// One.
/**
 * Two. */
function f(x) {
  // three
  const url = "http://a"; // four
  /** @type {HTMLElement} */ (x).click();
  return x; /* five */
}
"""


def test_whole_lines_of_comments_and_indentation_are_removed():
    assert COMMENT.sub("", SCRIPT) == (
        'function f(x) {\nconst url = "http://a"; // four\n'
        "/** @type {HTMLElement} */ (x).click();\nreturn x; /* five */\n}\n"
    )


def test_no_template_literal_spans_lines():
    """Its indentation would be removed."""
    for path in HERE.glob("*.js"):
        for line in path.read_text(encoding="utf-8").splitlines():
            assert line.count("`") % 2 == 0, (path.name, line)


def test_a_link_to_the_page_shows_the_projects_card_and_not_gradios():
    page = b"""<head><meta property="og:title" content="Gradio" />
    <meta
        name="twitter:image" content="https://elsewhere" /><title>x</title></head>"""
    carded = assets.carded(page).decode()
    assert "Gradio" not in carded and "elsewhere" not in carded and "<title>x</title>" in carded
    assert f'<meta property="og:title" content="{assets.TITLE}">' in carded and 'rel="icon"' in carded


LONG = "x" * 2000


@pytest.fixture
def client():
    def page(_):
        return HTMLResponse(f"<head><title>{LONG}</title></head><script>1</script>")

    def answer(_):
        return JSONResponse({"data": LONG})

    def short(_):
        return JSONResponse({})

    app = Starlette(routes=[Route(f"/{route.__name__}", route) for route in (page, answer, short)])

    async def served(scope, receive, send):
        await app(scope, receive, assets.whole(scope, send))

    return TestClient(served)


def fetch(client, path, accepted):
    with client.stream("GET", path, headers={"accept-encoding": accepted}) as response:
        return response.headers, b"".join(response.iter_raw())


@pytest.mark.parametrize("path", ["/page", "/answer"])
@pytest.mark.parametrize(
    ("accepted", "used", "decompress"),
    [("gzip, deflate, br, zstd", "br", brotli.decompress), ("gzip, deflate", "gzip", gzip.decompress)],
)
def test_pages_and_answers_are_compressed(client, path, accepted, used, decompress):
    found, body = fetch(client, path, accepted)
    assert found["content-encoding"] == used and "accept-encoding" in found["vary"].lower()
    assert int(found["content-length"]) == len(body) < 1500
    assert LONG.encode() in decompress(body)


def test_short_and_unaccepted_answers_are_sent_as_they_are(client):
    assert fetch(client, "/short", "gzip")[1] == b"{}"
    assert LONG.encode() in fetch(client, "/page", "identity")[1]


def test_page_has_its_style_before_its_scripts_arrive(client):
    assert b"<style>" in fetch(client, "/page", "")[1]


def test_the_docs_show_the_table_and_the_page_its_short_words():
    root = Path(__file__).parents[2]
    assert table() in (root / "docs/measurements.md").read_text(encoding="utf-8")
    page = assets.markup("view.html")
    shown = [definition.tile for definition in DEFINITIONS.values() if definition.tile]
    assert re.findall(r'data-tile="([\w-]+)"', page) == [tile.id for tile in sorted(shown, key=lambda tile: tile.more)]
    assert all(f"<p>{tile.text}</p>" in page for tile in shown) and "@" not in page.replace("@children", "")
    reference = assets.reference()
    anchors = {"h-" + title.lower().replace(" ", "-") for title in re.findall(r"^## (.+)$", reference, re.M)}
    assert table() in reference and {*re.findall(r"\(#(h-[\w-]+)\)", reference)} == anchors
