"""The page under its content security policy: the browser must not block anything."""

import re

from playwright.sync_api import expect

LISTEN = "window.refused = []; addEventListener('securitypolicyviolation', e => refused.push(e.violatedDirective))"


def test_nothing_on_the_page_breaks_its_policy(visit_gated, gates):
    gates.open.set()
    violations = []

    def listen(page):
        page.on("console", lambda message: violations.append(message.text))
        page.add_init_script(LISTEN)

    page = visit_gated("?k=3&method=ngram", before=listen)
    page.locator(".sd-edit").click()
    expect(page.locator("#option-max_n-1")).to_be_visible()
    page.locator("#run").click()
    expect(page.locator("#view .sd-status")).to_have_text(re.compile("^Finished"))
    expect(page.locator("#chart svg").first).to_be_visible()
    page.locator("#share").click()
    expect(page.locator("#link")).to_be_visible()
    with page.expect_download():
        page.locator("#save-csv").click()
    for tab, button, status in (
        ("Sweep", "#sweep-run", "#sweep .sd-status"),
        ("Lab", "#train", "#lab .sd-status"),
    ):
        page.get_by_role("tab", name=tab).click()
        page.locator(button).click()
        expect(page.locator(status)).to_have_text(re.compile("^(Finished|Done)"))
    expect(page.locator("#sweep .sd-chart svg")).to_be_attached()
    assert page.evaluate("refused") == []
    assert not [text for text in violations if "Content Security Policy" in text]
    with page.expect_console_message(lambda message: "Content Security Policy" in message.text):
        page.evaluate("document.body.append(Object.assign(document.createElement('object'), {data: 'favicon.ico'}))")
