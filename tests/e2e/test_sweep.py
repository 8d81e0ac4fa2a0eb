"""The tabs Sweep and Lab, the policy of the whole page, and the two endpoints."""

import itertools
import json
import re

import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError
from playwright.sync_api import expect

from tests.e2e.conftest import choose_example, edit, expect_example


def wait_for_text(page, words):
    expect(page.locator("#sweep .sd-status")).to_have_text(re.compile(words))


def test_run_stop_share(visit_gated, gates):
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
    wait_for_text(page, r"^Stopped\. Below is what was measured\.")
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
    page.locator("#sweep-share").click()
    expect(page).to_have_url(re.compile(r"\?sweep=batch&preset=embedded-draft&repeats=2&new_tokens=32$"))
    page.set_viewport_size({"width": 390, "height": 800})
    expect(page.locator("#sweep tbody tr")).to_have_count(9)
    expect(page.locator("#sweep .sd-more")).to_have_text(re.compile("^Scroll the table for more columns"))
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_which_method_fits_whether_it_is_lossless_and_a_head_that_is_trained_and_raced(visit_gated, gates):
    page = visit_gated("#tune", viewport={"width": 390, "height": 800})
    status, heat = page.locator("#tune .sd-status"), page.locator("#tune .sd-heat")
    bars, stages = page.locator("#tune .sd-method"), page.locator("#tune .sd-stages li")
    page.locator("#tune-run").click()
    expect(status).to_have_text("Chat, 4 candidates, 60 s left.")
    expect(stages.last).to_have_text(re.compile("^Racing 9[0-9] s$"))
    expect(bars).to_have_text(
        [
            re.compile(r"^Ngram, k=71\.31× 1\.26 to 1\.36$"),
            re.compile("^Suffix, k=3left out after 2 races1.12×"),
            re.compile("^Ngram, k=3left out after 1 race1.05×"),
            re.compile("^<i>head</i>, k=30.64×"),
            "Plain decoding90 tokens/s1.00×",
        ]
    )
    expect(page.locator("#tune .sd-idle li")).to_have_text("<u>slow</u>: not raced: <i>too</i> slow")
    expect(page.locator("#tune .sd-finding")).to_be_hidden()  # none while it runs
    page.locator("#tune-stop").click()
    assert gates.stopped.acquire(timeout=60)
    expect(status).to_have_text(re.compile("^Stopped"))
    page.get_by_role("tab", name="Race", exact=True).click()
    page.evaluate("document.getElementById('search').click()")  # of the race, as its button does
    page.get_by_role("tab", name="Find what pays").click()
    expect(status).to_have_text("Chat, 4 candidates, 60 s left.")
    gates.open.set()
    expect(status).to_have_text("Done.")
    expect(page.locator("#tune .sd-finding")).to_have_text(re.compile("^For mixed work use ngram, k=7"))
    expect(page.locator("#tune .sd-next button")).to_have_text(["Use this", "Copy for llama-server"])
    page.locator("#tune .sd-details summary").click()
    expect(page.locator("#tune .sd-remarks li").first).to_have_text("Passes: known.")
    expect(page.locator("#tune .sd-numbers tbody tr")).to_have_count(8)
    expect(heat.locator("tbody th")).to_have_text(["chat", "<b>edit</b>"])
    expect(heat.locator("thead th")).to_have_text(["", "ngram", "suffix", "<i>head</i>"])
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    heat.get_by_role("button", name="Open as a race: <b>edit</b>, suffix, k=3, 1.12×").click()
    expect(page.get_by_role("tab", name="Race", exact=True)).to_have_attribute("aria-selected", "true")
    # the method is that of the preset: the address may be shortened at once
    expect(page).to_have_url(re.compile(r"\?preset=embedded-ngram(&method=ngram)?&k=3$"))
    expect_example(page, "Prompt lookup, changed")
    choose_example(page, "Code")
    expect(page.locator("#tune-target input")).to_have_value("code")  # the model of the race

    page.get_by_role("tab", name="How it works").click()
    page.locator("#losslessness-run").click()
    status = page.locator("#losslessness .sd-status")
    expect(status).to_have_text("Done. No difference was found between 1024 continuations of each.")
    expect(page.locator("#losslessness tbody tr").first).to_have_text("<b>bold</b>275.0 %70.0 %")
    expect(page.locator("#losslessness .sd-chart .sd-chart-name")).to_have_text(["plain", "speculative"])
    assert page.evaluate("document.documentElement.scrollWidth") == 390

    page.get_by_role("link", name="Training", exact=True).click()
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
    expect_example(page, "Draft model, changed")
    page.locator("#share").click()  # the new model is accepted
    expect(page.locator("#link")).to_be_visible()
    expect(page.locator("#view .sd-alert")).to_be_hidden()


LISTEN = "window.refused = []; addEventListener('securitypolicyviolation', e => refused.push(e.violatedDirective))"


def test_every_suite_has_its_own_charts_and_nothing_on_the_page_breaks_its_policy(visit_gated, gates):
    gates.open.set()
    violations = []

    def listen(page):
        page.on("console", lambda message: violations.append(message.text))
        page.add_init_script(LISTEN)

    page = visit_gated("?k=3&method=ngram", before=listen)
    edit(page)
    expect(page.locator("#option-max_n-1")).to_be_visible()
    for menu in ("#method-1 input", "#target input"):  # closed without a choice, and Run at once
        page.locator(menu).click()
        page.keyboard.press("Escape")
    page.locator("#run").click()
    expect(page.locator("#view .sd-status")).to_have_text(re.compile("^Finished"))
    expect(page.locator("#chart svg").first).to_be_visible()
    page.locator("#share").click()
    expect(page.locator("#link")).to_be_visible()
    with page.expect_download():
        page.locator("#save-json").click()
    page.get_by_role("tab", name="Find what pays").click()
    chart = page.locator("#sweep .sd-chart").first
    page.get_by_role("radio", name="Methods", exact=True).click()
    expect(chart.locator(".sd-bar-name")).not_to_have_count(0)
    expect(page.locator("#sweep .sd-heat")).to_be_hidden()
    page.get_by_label("Batch size", exact=True).click()
    expect(chart.locator(".sd-curve")).not_to_have_count(0)
    assert chart.bounding_box()["height"] == 400
    for role, name, button, status in (
        ("tab", "Find what pays", "#sweep-run", "#sweep .sd-status"),
        ("link", "Training", "#train", "#lab .sd-status"),
    ):
        page.get_by_role(role, name=name, exact=True).click()
        page.locator(button).click()
        expect(page.locator(status)).to_have_text(re.compile("^(Finished|Done)"))
    expect(page.locator("#sweep .sd-chart svg")).to_be_attached()
    assert page.evaluate("refused") == []
    assert not [text for text in violations if "Content Security Policy" in text]
    with page.expect_console_message(lambda message: "Content Security Policy" in message.text):
        page.evaluate("document.body.append(Object.assign(document.createElement('object'), {data: 'favicon.ico'}))")


@pytest.fixture(scope="module")
def client(address):
    made = Client(address, verbose=False, analytics_enabled=False)
    yield made
    made.close()


def test_compare_returns_a_summary(client):
    result = client.predict("embedded-draft", {"max_new_tokens": 8, "k": 2}, api_name="/compare")
    assert [lane["summary"]["tokens"] for lane in result["lanes"]] == [8, 8]
    assert result["lanes"][0]["text"] == result["lanes"][1]["text"]
    assert result["comparison"][0]["verdict"] == "identical" and result["config"]["max_new_tokens"] == 8


def test_race_streams_lines(client):
    outputs = list(client.submit("embedded-draft", {"max_new_tokens": 8}, api_name="/race"))
    lines = [json.loads(line) for line in outputs[-1].splitlines()]
    assert all(after.startswith(before) for before, after in itertools.pairwise(outputs))
    assert {"run", "start", "step", "done", "end"} <= {line["type"] for line in lines}


def test_bad_input_is_one_line(client):
    with pytest.raises(AppError, match="k must be 16 or less, not 99"):
        client.predict("embedded-draft", {"k": 99}, api_name="/compare")
    with pytest.raises(AppError, match="did you mean"):
        client.predict("embeded-draft", None, api_name="/race")


def test_no_other_endpoint_is_public(client):
    assert set(client.view_api(return_format="dict")["named_endpoints"]) == {"/race", "/compare"}
