"""Other machines in the browser: from a finished race to a prediction, by mouse and by keyboard."""

import re
from pathlib import Path

from playwright.sync_api import expect

from tests.e2e.conftest import NEXT_FRAME, wait_for_text
from tests.e2e.test_layout import CONTROLS, SMALL

SAMPLES = Path(__file__).parents[1] / "analysis" / "samples"


def gain(page):
    return page.locator('#whatif [data-tile="speedup"] b')


def test_from_a_finished_race_to_an_h100_and_from_pasted_output_to_its_diagnosis(visit):
    page = visit("?preset=embedded-draft&max_new_tokens=32")
    expect(page.locator(".sd-estimate")).to_be_hidden()
    page.locator("#run").click()
    wait_for_text(page, "^Finished")
    page.locator(".sd-estimate").click()
    expect(page.get_by_role("tab", name="Other machines")).to_have_attribute("aria-selected", "true")
    expect(page.locator("#whatif-start input")).to_have_value(re.compile("^Your last run: stories, Draft 1.3M"))
    expect(page.locator("#machine input")).to_have_value("NVIDIA H100 SXM")
    expect(page.locator("#whatif-k input[type=number]")).to_have_value("4")
    expect(gain(page)).to_have_text(re.compile(r"^\d+\.\d\d×$"))
    expect(page.locator(".sd-bottleneck")).to_contain_text("With k = 4 and batch size 1, a step costs")
    measured = page.locator(".sd-over-k .sd-count").last
    expect(measured).to_have_text(re.compile(r"^measured \d\.\d\d×$"))
    expect(page.locator(".sd-over-batch .sd-band")).to_have_count(1)

    before = page.locator(".sd-bottleneck").text_content()
    page.locator("#machine input").click()
    page.get_by_role("option", name="NVIDIA L4", exact=True).click()
    expect(page.locator(".sd-facts")).to_contain_text("NVIDIA L4 · bfloat16 · from its spec sheet")
    expect(page.locator(".sd-bottleneck")).not_to_have_text(before)
    page.locator('#batch [value="64"]').check(force=True)
    expect(page.locator(".sd-bottleneck")).to_contain_text("and batch size 64, a step")

    # the output of an engine gets a diagnosis, and with all sections open nothing is clipped or small
    page.locator("#why-card-toggle").click()
    page.locator("#why-output textarea").fill((SAMPLES / "llamacpp-long.log").read_text(encoding="utf-8"))
    page.locator("#why-plain input").fill("222.8")
    page.locator("#why-run").click()
    expect(page.locator(".sd-diagnosed")).to_contain_text("main cause: k = 27 is too large")
    expect(page.locator(".sd-changes")).to_contain_text("--spec-draft-n-max 3")
    expect(page.locator("#why .sd-table")).to_contain_text("break-even 36 %")

    page.locator("#whatif-draft-toggle").click()
    expect(page.locator("#rate")).to_be_hidden()
    page.get_by_label("custom rate").check(force=True)
    expect(page.locator("#rate")).to_be_visible()
    page.locator("#whatif summary").click()
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 844})
        page.evaluate(NEXT_FRAME)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert [page.evaluate(rule) for rule in (SMALL, CONTROLS)] == [[], []], width

    page.locator("#why-output textarea").fill("<img src=x onerror=alert(1)>")
    page.locator("#why-run").click()
    expect(page.locator("#why .sd-alert")).to_contain_text("of no known kind")
    expect(page.locator("#why img")).to_have_count(0)


def test_by_keyboard_alone(visit):
    page = visit()
    wait_for_text(page, "^Recorded")
    page.get_by_role("tab", name="Other machines").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#whatif-start input")).to_have_value(re.compile("^Published: EAGLE-3 for Llama"))
    expect(gain(page)).not_to_be_empty()
    page.locator("#whatif-k input[type=range]").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    expect(page.locator(".sd-bottleneck")).to_contain_text("With k = 7")
    page.locator("#batch input").first.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".sd-bottleneck")).to_contain_text("and batch size 2, a step")
    page.locator("#whatif-draft-toggle").press("Enter")
    page.locator("#acceptance-source input").first.focus()
    page.keyboard.press("ArrowRight")
    page.locator("#rate input[type=range]").focus()
    expect(page.locator(".sd-over-k")).to_have_attribute("aria-label", re.compile("^Speed-up by draft length"))
    page.keyboard.press("Home")  # all guesses are rejected
    expect(page.locator('#whatif [data-tile="best"] b')).to_have_text("off")
    page.locator("#whatif summary").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#whatif tbody tr")).to_have_count(16)
