"""The real page in Chromium. All tests share one browser; every visitor has its own browser context."""

import os
import re
import shutil
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from playwright.sync_api import expect, sync_playwright

from specdemo.core.trace import to_json
from specdemo.servers.process import free_port
from tests.e2e.gated import GATES, Manager
from tests.processes import served, start
from tests.traces import hostile_trace
from tests.ui.stand_ins import chat_trace, remote_trace, tree_trace

FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
DEFAULTS = {"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce"}
NEXT_FRAME = "() => new Promise(drawn => requestAnimationFrame(() => requestAnimationFrame(drawn)))"
SHIFTS = """window.shifts = []; new PerformanceObserver((list) => shifts.push(...list.getEntries().map((e) => e.value)))
  .observe({ type: "layout-shift", buffered: true });"""
PATIENCE_MS = 120_000  # the page shares a busy core with its browser

expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")  # its event loop runs until it ends, and tests of other files start their own
def chromium():
    names = (
        os.environ.get("SPECDEMO_CHROMIUM"),
        shutil.which("chromium-headless-shell"),
        "/usr/bin/chromium",
        shutil.which("chromium"),
        shutil.which("google-chrome"),
    )
    path = next((name for name in names if name and Path(name).exists()), None)
    if path is None:
        pytest.fail("no Chromium; name one in SPECDEMO_CHROMIUM, or run bash tests/run")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def address():
    with served() as (_, address):
        yield address


@pytest.fixture
def visit(chromium, address):
    with visitors(chromium, address) as opened:
        yield opened


@contextmanager
def visitors(chromium, address):
    """Yield a function that opens the page as a new visitor, with reduced motion: drawing a replay takes much CPU time.

    The page shows the steps of a run as they arrive, unless `playback` is set. `before` is called with the page before
    it loads. A request to another host, a script error or a dialog of any visitor fails the test.
    """
    contexts, wrong = [], []

    def opened(query="", playback=False, before=lambda page: None, **settings):
        context = chromium.new_context(**{**DEFAULTS, **settings})
        contexts.append(context)
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        page.on("request", lambda r: wrong.append(r.url) if not r.url.startswith((address, "blob:", "data:")) else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
        before(page)
        page.goto(address + query)
        expect(page.locator('[data-lane="1"].sd-text')).to_be_attached()
        if not playback:
            show_in_real_time(page)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not wrong


def show_in_real_time(page):
    """Show the steps of runs as they arrive. At the default speed, a run is played back for up to 12 seconds."""
    page.locator('[name=sd-pace][value="1"]').evaluate("pace => pace.click()")


def wait_for_text(page, words):
    """Wait for the status of the race. words: a regular expression."""
    expect(page.locator("#view .sd-status")).to_have_text(re.compile(words))


def lane_text(page, lane):
    """Return the text of a lane as the model wrote it."""
    return page.evaluate(
        """lane => [...document.querySelectorAll(`[data-lane="${lane}"] span[data-outcome]`)]
           .map(s => s.textContent).join("")""",
        lane,
    )


def edit(page):
    """Open the controls of the settings, with those under Advanced."""
    if not page.locator("#drawer").is_visible():
        page.locator(".sd-edit").click()
    if not page.locator("#advanced").is_visible():
        page.locator("#advanced-toggle").click()
    expect(page.locator("#advanced")).to_be_visible()


def choose_example(page, title):
    """Choose a preset in the menu, or one that is not in it among all presets, in the drawer."""
    menu = page.get_by_label("Example", exact=True)
    if title in menu.locator("option:not(.sd-custom)").all_inner_texts():
        menu.select_option(label=title)
        return
    was_open = page.locator("#drawer").is_visible()
    edit(page)
    page.locator("#more input").fill(title)
    page.get_by_role("option", name=re.compile(f"^{re.escape(title)}( · |$)")).click()
    if not was_open:
        page.locator(".sd-edit").click()


def expect_example(page, title):
    expect(page.locator(".sd-examples option:checked")).to_have_text(title)


def stored(make):
    """Return a fixture: the file of the trace that `make` returns."""

    @pytest.fixture
    def file(tmp_path):
        path = tmp_path / f"{make.__name__}.json"
        path.write_text(to_json(make()), encoding="utf-8")
        return path

    return file


trace_file, tree_file, chat_file, remote_file = map(stored, (hostile_trace, tree_trace, chat_trace, remote_trace))


@pytest.fixture(scope="session")
def gated_server():
    """Run the page on the stand-in engine of gated.py in a separate process."""
    port, gates = free_port(), Manager(("127.0.0.1", 0), b"gates").get_server()
    threading.Thread(target=gates.serve_forever, daemon=True).start()
    with start("-m", "tests.e2e.gated", port, gates.address[1]) as server:
        assert GATES["up"].wait(120)
        yield f"http://127.0.0.1:{port}/", SimpleNamespace(**GATES)
        server.terminate()


@pytest.fixture
def gates(gated_server):
    gates = gated_server[1]
    gates.open.clear()
    gates.warm.set()
    for counted in (gates.started, gates.stopped):
        while counted.acquire(blocking=False):  # left over from earlier tests
            pass
    yield gates
    gates.open.set()


@pytest.fixture
def visit_gated(chromium, gated_server, gates):
    with visitors(chromium, gated_server[0]) as opened:
        yield opened
