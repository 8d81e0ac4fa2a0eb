"""Stop, a second visitor, a closed tab: on a stand-in engine whose every step waits for the test."""

import re
import threading

import pytest
from playwright.sync_api import expect
from tests.traces import HOSTILE, hostile_trace

from specdemo.engine.session import Finished, replay
from specdemo.ui import live


class Gated:
    """A session whose runs stay at their first tokens until `gate` opens."""

    def __init__(self):
        self.gate = threading.Event()
        self.stopped = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)

    def stream(self, spec, cancelled, progress):
        progress(0.5, "loading stories")
        messages = list(replay(hostile_trace()))
        yield from messages[:5]
        self.begun.release()
        while not self.gate.wait(0.01):
            if cancelled():
                trace = hostile_trace()
                for lane in trace.lanes:
                    lane.finish = "cancelled"
                self.stopped.release()
                yield Finished(trace)
                return
        yield from messages[5:]


@pytest.fixture
def engine(monkeypatch):
    gated = Gated()
    monkeypatch.setattr(live, "session", lambda: gated)
    yield gated
    gated.gate.set()


def said(page, words):
    expect(page.locator(".sd-status")).to_have_text(re.compile(words))


def begin(page, engine):
    page.locator("#run").click()
    expect(page.locator("#stop")).to_be_enabled()
    assert engine.begun.acquire(timeout=60)


def test_stop_and_run_again(visit, engine):
    page = visit()
    begin(page, engine)
    said(page, "^Running")
    expect(page.locator("#run")).to_be_disabled()
    page.locator("#stop").click()
    said(page, "^Stopped")
    expect(page.locator(".sd-pill").first).to_have_text(re.compile("stopped"))
    expect(page.locator("#stop")).to_be_disabled()
    expect(page.locator("#run")).to_be_enabled()
    assert engine.stopped.acquire(timeout=60)

    engine.gate.set()
    begin(page, engine)
    said(page, "^Finished")
    expect(page.locator("#run")).to_be_enabled()
    text = page.evaluate(
        "[...document.querySelectorAll('[data-lane=\"0\"] [data-kind=target]')].map(s => s.textContent).join('')"
    )
    assert text == "".join(HOSTILE)


def test_a_second_visitor_sees_the_queue_and_gets_the_engine_when_the_first_one_leaves(visit, engine):
    first, second = visit(), visit()
    begin(first, engine)
    second.locator("#run").click()
    expect(second.locator("#queue")).to_contain_text(re.compile(r"queue: \d/\d", re.I))
    second.locator("#share").click()  # light events do not queue
    expect(second.locator("#link")).to_be_visible()
    first.close()
    assert engine.stopped.acquire(timeout=60)
    assert engine.begun.acquire(timeout=60)
    said(second, "^Running")


def test_run_by_keyboard_alone(visit, engine):
    engine.gate.set()
    page = visit()
    page.locator("#prompt textarea").focus()
    page.keyboard.press("Tab")
    expect(page.locator("#run")).to_be_focused()
    page.keyboard.press("Space")
    said(page, "^Finished")
    page.keyboard.press("Tab")
