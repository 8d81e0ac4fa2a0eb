"""Stop, a second visitor and a closed tab, on a stand-in engine that waits for the test before every step."""

import re

from playwright.sync_api import expect

from tests.traces import HOSTILE


def wait_for_text(page, words):
    expect(page.locator(".sd-status")).to_have_text(re.compile(words))


def begin(page, gates):
    page.locator("#run").click()
    expect(page.locator("#stop")).to_be_enabled()
    assert gates.started.acquire(timeout=60)


def test_stop_and_run_again(visit_gated, gates):
    page = visit_gated()
    begin(page, gates)
    wait_for_text(page, "^Running")
    expect(page.locator("#run")).to_be_disabled()
    page.locator("#stop").click()
    wait_for_text(page, "^Stopped")
    expect(page.locator(".sd-pill").first).to_have_text(re.compile("stopped"))
    expect(page.locator("#stop")).to_be_disabled()
    expect(page.locator("#run")).to_be_enabled()
    assert gates.stopped.acquire(timeout=60)

    gates.open.set()
    page.locator("#run").click()
    wait_for_text(page, "^Finished")
    expect(page.locator("#run")).to_be_enabled()
    text = page.evaluate(
        "[...document.querySelectorAll('[data-lane=\"0\"] [data-kind=target]')].map(s => s.textContent).join('')"
    )
    assert text == "".join(HOSTILE)


def test_a_second_visitor_sees_the_queue_and_gets_the_engine_when_the_first_one_leaves(visit_gated, gates):
    first, second = visit_gated(), visit_gated()
    begin(first, gates)
    second.locator("#run").click()
    wait_for_text(second, "^Waiting: place 1 of 1 in line")
    second.locator("#share").click()  # events without a model do not queue
    expect(second.locator("#link")).to_be_visible()
    first.close()
    assert gates.stopped.acquire(timeout=60)
    assert gates.started.acquire(timeout=60)
    wait_for_text(second, "^Running")


def test_stop_leaves_the_queue_and_the_one_who_runs_alone(visit_gated, gates):
    first, second = visit_gated(), visit_gated()
    begin(first, gates)
    second.locator("#run").click()
    wait_for_text(second, "^Waiting: ")
    second.locator("#stop").click()
    expect(second.locator("#run")).to_be_enabled()
    expect(second.locator("#stop")).to_be_disabled()
    wait_for_text(second, "^Stopped before the first token")
    wait_for_text(first, "^Running")
    gates.open.set()
    wait_for_text(first, "^Finished")
    second.locator("#run").click()
    wait_for_text(second, "^Finished")
