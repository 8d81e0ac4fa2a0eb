"""A lane on a server, on a page of its own."""

import pytest
from playwright.sync_api import expect

from tests.completion_server import completion_server, piece
from tests.e2e.conftest import edit
from tests.e2e.test_controls import choose
from tests.processes import served


def counted(text, drafted, accepted, **more):
    """Return a chunk of llama.cpp's server with its draft counts so far."""
    return piece(text, timings={"draft_n": drafted, "draft_n_accepted": accepted} if drafted else {}, **more)


PIECES = [counted("Once", 0, 0), *(counted(text, 4, 2) for text in (" upon", " a", " time"))]
PIECES += [counted(", <b>", 6, 2), counted(" there", 6, 2, finish="length"), counted("", 6, 2, total=6)]


@pytest.fixture(scope="module")
def server():
    with completion_server(PIECES) as server:
        yield server


@pytest.fixture(scope="module")
def address(server):
    """Start a page with a server."""
    with served("--server", server.address) as (_, address):
        yield address


def test_a_server_lane_is_coloured_at_the_end_of_its_answer(visit, server):
    page = visit()
    edit(page)
    choose(page, "server-1", f"server {server.address.removeprefix('http://')}")
    page.locator("#run").click()
    expect(page.locator(".sd-status")).to_contain_text("Finished")
    text = page.locator('[data-lane="1"].sd-text')
    expect(text.locator("span[data-outcome=accepted]")).to_have_text([" upon", " a"])
    expect(text.locator("span[data-outcome=corrected]")).to_have_text([" time", ", <b>"])
    expect(text.locator("span[data-outcome=target]")).to_have_text(["Once", " there"])
    expect(text.locator("del")).to_have_text(["?", "?"])
    assert text.locator("del").first.get_attribute("data-more") == "+1"
    expect(page.locator(".sd-lane").nth(1).locator(".sd-remote")).not_to_contain_text("unknown")
    expect(page.locator(".sd-accepted-chart")).to_be_visible()
