"""Training on the page, with a stand-in trainer."""

import re

from playwright.sync_api import expect

from tests.e2e.conftest import expect_example


def test_a_head_is_trained_and_raced(visit_gated):
    page = visit_gated(viewport={"width": 390, "height": 800})
    page.get_by_role("tab", name="Lab").click()
    expect(page.locator("#recipe input")).to_have_value("Medusa, 4 heads")
    expect(page.locator("#lab .sd-status")).to_have_text(re.compile("^Training of the shipped head"))
    expect(page.locator("#race-head")).to_be_disabled()
    page.locator("#train").click()
    expect(page.locator("#lab .sd-status")).to_have_text(re.compile("^Done. Saved to runs/medusa-"))
    expect(page.locator("#lab .sd-figure").first).to_have_attribute("aria-label", "1st token 30 %, 2nd 15 %")
    expect(page.locator("#lab .sd-facts")).to_have_text("120 of 120 s · 3 steps · 1,536 tokens")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.locator("#race-head").click()
    expect(page.locator("#model-1 input")).to_have_value(re.compile(r"^medusa-\d+-\d+$"))
    expect(page.locator("#run")).to_be_visible()
    expect_example(page, "Custom (from Draft model)")
    page.locator("#share").click()  # the new model is accepted
    expect(page.locator("#link")).to_be_visible()
    expect(page.locator("#view .sd-alert")).to_be_hidden()


def test_the_lab_leads_to_depth_against_width_and_tests_losslessness(visit_gated, gates):
    page = visit_gated(viewport={"width": 390, "height": 800})
    page.get_by_role("tab", name="Lab").click()
    page.locator("#losslessness-run").click()
    status = page.locator("#losslessness .sd-status")
    expect(status).to_have_text("Done. No difference was found between 1024 continuations of each.")
    expect(page.locator("#losslessness tbody tr").first).to_have_text("<b>bold</b>275.0 %70.0 %")
    expect(page.locator("#losslessness .sd-chart .sd-chart-name")).to_have_text(["plain", "speculative"])
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.locator("#depth-width").click()
    expect(page.locator("#question")).to_contain_text("One layer against four")
    expect(page.get_by_label("Depth or width")).to_be_checked()
    expect(page.locator("#sweep-preset")).to_be_hidden()
    gates.open.set()
    page.locator("#sweep-run").click()
    expect(page.locator("#sweep .sd-status")).to_have_text(re.compile("^Done"))
