"""The real page in a real Chromium. One server and one browser for all tests; every visitor has a context of its own."""

import os
import shutil
import socket
from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright
from tests.traces import hostile_trace

from specdemo.core.trace import to_json

FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
PATIENCE_MS = 60_000  # the page shares a busy core with its browser

expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="session")
def chromium():
    names = (os.environ.get("SPECDEMO_CHROMIUM"), "/usr/bin/chromium", shutil.which("chromium"), shutil.which("google-chrome"))
    path = next((name for name in names if name and Path(name).exists()), None)
    if path is None:
        pytest.fail("no Chromium; name one in SPECDEMO_CHROMIUM, or run bash tests/run")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def address():
    from specdemo.ui.page import serve

    page = serve(port=free_port(), block=False)
    yield page.local_url
    page.close()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def visit(chromium, address):
    """Open the page as a new visitor. What goes wrong in any of them fails the test: an outside request, a script
    error, a dialog."""
    contexts, wrong = [], []

    def opened(query="", **settings):
        context = chromium.new_context(viewport={"width": 1280, "height": 900}, accept_downloads=True) if not settings else (
            chromium.new_context(**settings)
        )
        contexts.append(context)
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        page.on("request", lambda r: wrong.append(r.url) if not r.url.startswith((address, "blob:", "data:")) else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
        page.goto(address + query)
        expect(page.locator('[data-lane="1"].sd-text')).to_be_attached()
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not wrong


@pytest.fixture
def trace_file(tmp_path):
    path = tmp_path / "hostile.json"
    path.write_text(to_json(hostile_trace()), encoding="utf-8")
    return path
