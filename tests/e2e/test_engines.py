"""Lanes on engines that the page starts, with a stand-in for vLLM."""

import re
import signal

import pytest
from playwright.sync_api import expect

from tests.completion_server import completion_server, piece
from tests.e2e.conftest import edit, visitors
from tests.e2e.test_controls import choose
from tests.processes import served
from tests.servers.stand_in import gone, make, started


@pytest.fixture
def engine(tmp_path):
    return make(tmp_path)


@pytest.fixture
def page_with_engine(engine):
    """Start a page with this engine and yield its process and address."""
    with served("--engines", f"vllm={engine}", GATE=str(engine.parent / "gate")) as started_page:
        yield started_page


def test_a_lane_is_started_on_an_engine_used_again_and_ended(chromium, page_with_engine, engine):
    serving, address = page_with_engine
    with visitors(chromium, address) as visit:
        page = visit()
        edit(page)
        choose(page, "server-1", "vLLM")
        page.locator("#run").click()
        status = page.locator(".sd-status")
        expect(status).to_contain_text(re.compile(r"Starting vLLM, 1 of 2: baseline, \d+ s: listening"))
        page.locator("#stop").click()
        expect(status).to_contain_text("Stopped")
        assert gone(engine)  # it was still loading

        (engine.parent / "gate").touch()
        page.locator("#run").click()
        expect(status).to_contain_text("Finished")
        expect(page.locator('[data-lane="1"].sd-text')).to_contain_text("Once upon a time")
        expect(page.locator("#run")).to_be_enabled()
        _, plain, drafting = started(engine)
        assert "--speculative-config" not in plain["args"] and "--speculative-config" in drafting["args"]
        page.locator("#run").click()
        expect(page.locator("#stop")).to_be_enabled()
        expect(page.locator("#run")).to_be_enabled()
        assert len(started(engine)) == 3  # the same two servers are used again
        page.locator("#free-memory").click()
        expect(page.get_by_text("servers stopped: 2")).to_be_visible()
        assert gone(engine)

        page.locator("#run").click()
        expect(page.locator("#stop")).to_be_enabled()
        expect(page.locator("#run")).to_be_enabled()
        assert len(started(engine)) == 5
        serving.send_signal(signal.SIGKILL)
        serving.wait(60)
        assert gone(engine)


def test_no_engine_is_offered_or_linked_to_unless_allowed(visit):
    page = visit("?preset=embedded-draft&server=vllm")
    expect(page.locator(".sd-notes")).to_contain_text("this page does not start vllm; its operator can allow it")
    edit(page)
    expect(page.locator("#server-1")).to_be_hidden()


def counted(text, drafted, accepted, **more):
    """Return a chunk of llama.cpp's server with its draft counts so far."""
    return piece(text, timings={"draft_n": drafted, "draft_n_accepted": accepted} if drafted else {}, **more)


def test_a_server_lane_is_coloured_at_the_end_of_its_answer(chromium):
    pieces = [counted("Once", 0, 0), *(counted(text, 4, 2) for text in (" upon", " a", " time"))]
    pieces += [counted(", <b>", 6, 2), counted(" there", 6, 2, finish="length"), counted("", 6, 2, total=6)]
    with (
        completion_server(pieces) as server,
        served("--server", server.address) as (_, address),
        visitors(chromium, address) as visit,
    ):
        page = visit()
        edit(page)
        choose(page, "server-1", f"server {server.address.removeprefix('http://')}")
        page.locator("#run").click()
        expect(page.locator(".sd-status")).to_contain_text("Finished")
        text = page.locator('[data-lane="1"].sd-text')
        expect(text.locator("[data-kind=accepted]")).to_have_text([" upon", " a"])
        expect(text.locator("[data-kind=corrected]")).to_have_text([" time", ", <b>"])
        expect(text.locator("[data-kind=target]")).to_have_text(["Once", " there"])
        expect(text.locator("del")).to_have_text(["?", "?"])
        assert text.locator("del").first.get_attribute("data-more") == "+1"
        expect(page.locator(".sd-lane").nth(1).locator(".sd-remote")).not_to_contain_text("unknown")
        expect(page.locator(".sd-accepted-chart")).to_be_visible()
