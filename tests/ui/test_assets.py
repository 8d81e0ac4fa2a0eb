"""Scripts and markup as the page sends them, and the preview card."""

import re
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import HTMLResponse
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


@pytest.fixture
def client():
    routes = [Route("/page", lambda _: HTMLResponse("<head><title>x</title></head><script>1</script>"))]
    return TestClient(Starlette(routes=routes, middleware=[Middleware(assets.Answers)]))


def test_page_has_its_style_before_its_scripts_arrive(client):
    assert b"<style>" in client.get("/page").content


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
