"""What the page's address keeps: tab, preset, edits and prompt, through Back, a reload and a restart of the server;
Stop, a second visitor and a closed tab, on a stand-in engine that waits for the test before every step.
"""

import re
import socket
import threading
from contextlib import suppress

import pytest
from playwright.sync_api import expect

from tests.e2e.conftest import choose_example, edit, expect_example, show_in_real_time, visitors, wait_for_text
from tests.e2e.test_controls import choose
from tests.traces import HOSTILE

ARABIC = "مرحبا بالعالم & more"


def tab(page):
    return page.locator('[role=tab][aria-selected="true"]')


def prompt(page):
    return page.locator("#prompt textarea")


def test_tab_preset_edits_and_prompt_survive_back_and_reload(visit_gated):
    page = visit_gated()
    wait_for_text(page, "^Recorded")
    start = page.url
    choose_example(page, "Prompt lookup")
    expect(page.locator(".sd-chips button")).to_have_text(["stories", "Prompt lookup", "k 8", "greedy · 96 tokens"])
    expect(page).to_have_url(start + "?preset=embedded-ngram")
    edit(page)
    prompt(page).fill(ARABIC)
    choose(page, "k-1", "5")
    expect(page).to_have_url(re.compile(r"\?preset=embedded-ngram&prompt=%D9.+%26\+more&k=5$"))
    edited = page.url
    page.get_by_role("tab", name="Other machines").click()
    expect(page).to_have_url(edited + "#machines")

    page.reload()
    expect(tab(page)).to_have_text("Other machines")
    page.go_back()
    expect(tab(page)).to_have_text("Race")
    expect_example(page, "Prompt lookup, changed")
    expect(page.locator(".sd-chips button")).to_have_text(["stories", "Prompt lookup", "k 5", "greedy · 96 tokens"])
    edit(page)
    expect(prompt(page)).to_have_value(ARABIC)
    expect(prompt(page)).to_have_css("direction", "rtl")
    for lane in (0, 1):
        expect(page.locator(f'[data-lane="{lane}"].sd-text')).to_have_attribute("dir", "auto")

    page.go_back()
    expect_example(page, "Draft model")
    expect(page.locator(".sd-chips button")).to_have_text(["stories", "1.3M draft", "k 4", "greedy · 160 tokens"])
    page.go_forward()
    expect(prompt(page)).to_have_value(ARABIC)
    choose_example(page, "Prompt lookup")  # restores the changed example
    expect_example(page, "Prompt lookup")
    expect(page.locator(".sd-chips button")).to_have_text(["stories", "Prompt lookup", "k 8", "greedy · 96 tokens"])


class Connection:
    """A proxy in front of a server, whose connections can be cut."""

    def __init__(self, server):
        self.server, self.open, self._sockets = server, True, []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listening.getsockname()[1]}/"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            client, _ = self._listening.accept()
            if not self.open:
                client.close()
                continue
            port = int(self.server.rstrip("/").rpartition(":")[2])
            server = socket.create_connection(("127.0.0.1", port))
            self._sockets += [client, server]
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    def _copy(self, source, sink):
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        close(source, sink)

    def cut(self):
        self.open = False
        close(*self._sockets)

    def restore(self, server=None):
        self.server, self.open = server or self.server, True


def close(*sockets):
    for one in sockets:
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def connection(gated_server):
    return Connection(gated_server[0])


def run_and_cut(page, gates, connection):
    page.locator("#run").click()
    assert gates.started.acquire(timeout=60)
    wait_for_text(page, "^Running")
    page.evaluate("window.before = true")
    connection.cut()
    expect(page.locator(".toast-body")).to_have_count(1)


def test_a_lost_connection_keeps_the_settings_and_the_run_and_a_restarted_server_the_settings(
    chromium, address, gates, connection
):
    with visitors(chromium, connection.address) as visit:
        page = visit("?preset=embedded-ngram&k=5#lab")
        expect(tab(page)).to_have_text("Training")
        page.get_by_role("tab", name="Race").click()
        expect_example(page, "Prompt lookup, changed")
        run_and_cut(page, gates, connection)
        connection.restore()
        page.wait_for_function("() => !window.before")  # Gradio reloads the page
        wait_for_text(page, "^Running")
        expect_example(page, "Prompt lookup, changed")
        expect(page.locator("#stop")).to_be_enabled()
        show_in_real_time(page)
        gates.open.set()
        wait_for_text(page, "^Finished")
        assert HOSTILE[-1].strip() in page.locator('[data-lane="1"].sd-text').text_content()
        expect(page.locator("#run")).to_be_enabled()
        assert not gates.stopped.acquire(blocking=False)  # the run was never cancelled

        gates.open.clear()
        run_and_cut(page, gates, connection)
        connection.restore(address)  # another process, which knows nothing of the run
        page.wait_for_function("() => !window.before")
        expect_example(page, "Prompt lookup, changed")
        wait_for_text(page, "^Ready")
        expect(page.locator("#run")).to_be_enabled()


def test_a_second_visitor_waits_in_line_gets_the_engine_of_the_first_one_and_rejoins_its_run(visit_gated, gates):
    first, second = visit_gated(), visit_gated()
    first.locator("#run").click()
    assert gates.started.acquire(timeout=60)
    second.locator("#run").click()
    wait_for_text(second, "^Waiting: place 1 of 1 in line")
    second.locator("#share").click()  # events without a model do not queue
    expect(second.locator("#link")).to_be_visible()
    second.locator("#stop").click()
    expect(second.locator("#run")).to_be_enabled()
    expect(second.locator("#stop")).to_be_disabled()
    wait_for_text(second, "^Stopped before the first token")
    wait_for_text(first, "^Running")
    second.locator("#run").click()
    wait_for_text(second, "^Waiting: ")
    first.close()
    assert gates.stopped.acquire(timeout=60)
    assert gates.started.acquire(timeout=60)
    wait_for_text(second, "^Running")
    second.reload()  # the page rejoins its run and can stop it
    wait_for_text(second, "^Running")
    second.locator("#stop:enabled").click()
    wait_for_text(second, "^Stopped")
    assert gates.stopped.acquire(timeout=60)
    second.reload()
    wait_for_text(second, "^Recorded")  # there is nothing to rejoin
    second.locator("#run").click()
    gates.open.set()
    wait_for_text(second, "^Finished")
