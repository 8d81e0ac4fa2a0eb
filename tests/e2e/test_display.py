"""The display of a log in a real Chromium, with no page around it and a clock that the tests move."""

from dataclasses import replace

import pytest

from specdemo.engine.messages import replay
from specdemo.ui import assets
from specdemo.ui.job import refusal
from specdemo.ui.log import Log, notes, replayed
from specdemo.ui.views import Failed, Loading
from tests.traces import HOSTILE, hostile_trace

LOAD = """scripts => {
  window.props = { value: "" };
  new Function("element", "props", "watch", scripts)(document.body, props, (name, read) => (window.read = read));
}"""


class Display:
    def __init__(self, page):
        self._page = page

    def show(self, log):
        self._page.evaluate("log => { props.value = log; read(); }", log)

    def pace(self, value):
        self._page.locator(f'[name=sd-pace][value="{value}"]').check()

    def wait(self, ms):
        self._page.clock.run_for(ms)

    def read(self, selector):
        return self._page.locator(selector).all_inner_texts()

    def text(self, lane):
        kept = f'[data-lane="{lane}"] span:not([data-kind="prompt"], [data-kind="rejected"])'
        return "".join(self._page.locator(kept).all_text_contents())


@pytest.fixture
def display(chromium):
    page = chromium.new_page()
    wrong = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.clock.install(time=0)
    page.set_content(assets.text("view.html"))
    page.evaluate(LOAD, "\n".join(map(assets.text, assets.RACE)))
    yield Display(page)
    page.close()
    assert not wrong


def slow_start(prefill_ms=60_000.0):
    """A run whose lanes take a minute to their first token and milliseconds to each other one."""
    trace = hostile_trace()
    for lane in trace.lanes:
        lane.events[0].ms["prefill"] = prefill_ms
    return trace


def test_a_slower_pace_goes_on_from_what_is_shown(display):
    log, messages = Log(), list(replay(slow_start()))
    display.show(log.add(messages[:5]))
    for pace in ("0.0625", "1", "0.0625"):
        display.pace(pace)
        display.wait(100)
    display.show(log.add(messages[5:]))
    display.wait(100)
    assert display.text(0) != "".join(HOSTILE)
    display.wait(3000)
    assert [display.text(lane) for lane in (0, 1)] == ["".join(HOSTILE)] * 2
    assert display.read(".sd-status")[0].startswith("Finished.")


@pytest.mark.parametrize("refused", [refusal(ValueError("no")), notes(["no"])], ids=["error", "note"])
def test_a_refusal_leaves_the_run_on_show_going(display, refused):
    display.pace("0.0625")
    display.show(Log().add(replay(hostile_trace())))
    display.wait(100)
    begun = display.text(0)
    display.show(refused)
    assert display.read(".sd-alert, .sd-notes") != ["", ""]
    display.wait(3000)
    assert begun != display.text(0) == "".join(HOSTILE)
    assert all(words.startswith("done") for words in display.read(".sd-pill"))


def test_the_next_run_ends_the_one_on_show(display):
    display.pace("0.0625")
    display.show(Log().add(replay(hostile_trace())))
    log, messages = Log(), list(replay(hostile_trace()))
    display.show(log.add([Loading(0.5, "loading a model")]))
    display.wait(3000)
    assert display.text(0) == "".join(HOSTILE)
    assert display.read(".sd-status") == ["Loading a model, 50 %"]
    display.show(log.add(messages[:1]))
    assert display.text(0) == "" and display.read(".sd-status")[0].startswith("Running")


def test_a_run_that_fails_shows_what_there_was_and_ends(display):
    display.pace("0.0625")
    messages = list(replay(hostile_trace()))
    display.show(Log().add([*messages[:9], Failed("out of memory")]))
    shown = display.text(0)
    assert shown == "".join(message.pieces[0] for message in messages[1:9] if message.lane == 0)
    display.wait(3000)
    assert (display.text(0), display.read(".sd-pill")) == (shown, ["failed", "failed"])
    assert display.read(".sd-status, .sd-alert") == ["Out of memory", "The run failed."]


def test_a_verdict_nobody_knows_is_shown_as_it_is(display, verdict="constructor"):
    trace = hostile_trace()
    trace.comparison[0]["verdict"] = verdict
    display.show(replayed(trace, still=True).text)
    display.wait(100)
    assert display.read('[data-tile="output"] b') == [verdict]


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ("def add(a, b):\n    return", True),
        ("# Two numbers.\nclass Pair:\n", True),
        ("import os\n", True),
        ("Once upon a time, a class of children (and a dog) ran.", False),
        ("from the house to the river\nand back", False),
    ],
)
def test_code_prompt_preserves_its_lines(display, prompt, code):
    display.show(Log().add(replay(replace(hostile_trace(), prompt=prompt))))
    display.wait(3000)
    assert len(display.read(".sd-text.sd-code")) == (2 if code else 0)
