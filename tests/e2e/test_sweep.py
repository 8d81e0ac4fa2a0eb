"""The Sweep tab in the browser, with a stand-in benchmark."""

import re

from playwright.sync_api import expect


def wait_for_text(page, words):
    expect(page.locator("#sweep .sd-status")).to_have_text(re.compile(words))


def test_run_stop_save_open_share(visit_gated, gates, tmp_path):
    page = visit_gated("?sweep=batch&preset=<b>&repeats=2&new_tokens=32")
    expect(page.locator("#sweep .sd-notes li")).to_have_count(1)
    expect(page.get_by_label("Batch size")).to_be_checked()
    expect(page.locator("#question")).to_contain_text("Where does the gain end?")
    expect(page.locator("#repeats input[type=number]")).to_have_value("2")
    wait_for_text(page, "^Ready")

    page.locator("#sweep-run").click()
    wait_for_text(page, r"^50 % done: repeat 2 of 2, k = 4\.")
    expect(page.locator("#sweep-run")).to_be_disabled()
    expect(page.locator("#sweep .sd-numbers")).to_be_hidden()
    page.locator("#sweep-stop").click()
    wait_for_text(page, r"^Stopped\. The table holds the finished repeats\.")
    assert gates.stopped.acquire(timeout=60)
    expect(page.locator("#sweep .sd-remarks")).to_have_text("Stopped after 1 of 2 repeats.")
    names = page.locator("#sweep .sd-chart .sd-line-name")
    expect(names).to_have_count(3)
    expect(names.filter(has_text="<i>deep</i> & co, predicted")).to_be_visible()
    page.locator("#sweep .sd-chart svg").hover(position={"x": 48, "y": 200})  # at the first value of k
    expect(page.locator("#sweep .sd-tip")).to_contain_text("<i>deep</i> & co 1.00×")
    cell = page.locator("#sweep tr", has_text="wide").nth(1).locator("td").nth(2)
    expect(cell).to_have_text("1.30")  # one repeat gives no interval
    expect(page.locator("#sweep-run")).to_be_enabled()

    page.locator("#sweep-run").click()  # the result disappears, and stays away until there is another
    wait_for_text(page, "^50 %")
    for part in (page.locator("#sweep .sd-result-chart"), page.locator("#sweep .sd-numbers")):
        expect(part).to_be_hidden()
    gates.open.set()
    wait_for_text(page, r"^Done\. Measured 2 times; 3 repeats are needed to find the best\.")
    with page.expect_download() as download:
        page.locator("#sweep-save").click()
    path = tmp_path / download.value.suggested_filename
    download.value.save_as(path)
    page.locator("#sweep-share").click()
    expect(page).to_have_url(re.compile(r"\?sweep=batch&preset=embedded-draft&repeats=2&new_tokens=32$"))

    other = visit_gated("?" + page.url.partition("?")[2], viewport={"width": 390, "height": 800})
    expect(other.locator("#repeats input[type=number]")).to_have_value("2")
    expect(other.locator("#sweep .sd-notes")).to_be_hidden()
    with other.expect_file_chooser() as chooser:
        other.locator("#sweep-open").click()
    chooser.value.set_files(path)
    wait_for_text(other, r"^Recorded result\. Measured 2 times")
    expect(other.locator("#sweep .sd-badge")).to_have_text("recorded · Test CPU <b> · 2026-11-21")
    expect(other.locator("#sweep tbody tr")).to_have_count(9)
    expect(other.locator("#sweep .sd-more")).to_have_text(re.compile("^Scroll the table for more columns"))
    expect(other.locator("#sweep .sd-chart .sd-chart-name")).to_have_count(3)
    assert other.evaluate("document.documentElement.scrollWidth") == 390


def test_every_suite_has_its_own_charts(visit_gated):
    page = visit_gated("#sweep")
    chart, second = page.locator("#sweep .sd-chart").first, page.locator("#sweep .sd-second")
    page.get_by_label("Methods").click()
    expect(chart.locator(".sd-bar-name")).not_to_have_count(0)
    page.get_by_label("Prompt length").click()
    expect(second.locator("svg .sd-curve")).to_have_count(3)
    page.get_by_label("Batch size", exact=True).click()
    expect(second).to_be_hidden()
    expect(chart.locator(".sd-curve")).not_to_have_count(0)
    assert chart.bounding_box()["height"] == 400
