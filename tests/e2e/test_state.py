"""What the page's address keeps: tab, preset, edits and prompt, through Back, a reload and a restart of the server."""

import re

from playwright.sync_api import expect

from tests.e2e.conftest import choose_example, edit, expect_example

ARABIC = "مرحبا بالعالم & more"


def tab(page):
    return page.locator('[role=tab][aria-selected="true"]')


def prompt(page):
    return page.locator("#prompt textarea")


def test_tab_preset_edits_and_prompt_survive_back_and_reload(visit_gated):
    page = visit_gated(reduced_motion="reduce")
    expect(page.locator("#view .sd-status")).to_have_text(re.compile("^Recorded"))
    start = page.url
    choose_example(page, "Prompt lookup")
    expect(page.locator(".sd-summary")).to_have_text("stories + Prompt lookup · k 8 · greedy · 96 tokens")
    expect(page).to_have_url(start + "?preset=embedded-ngram")
    edit(page)
    prompt(page).fill(ARABIC)
    page.locator("#k-1 input[type=number]").fill("5")
    expect(page).to_have_url(re.compile(r"\?preset=embedded-ngram&prompt=%D9.+%26\+more&k=5$"))
    edited = page.url
    page.get_by_role("tab", name="Lab").click()
    expect(page).to_have_url(edited + "#lab")

    page.reload()
    expect(tab(page)).to_have_text("Lab")
    page.go_back()
    expect(tab(page)).to_have_text("Race")
    expect_example(page, "Custom (from Prompt lookup)")
    expect(page.locator(".sd-summary")).to_have_text("stories + Prompt lookup · k 5 · greedy · 96 tokens")
    edit(page)
    expect(prompt(page)).to_have_value(ARABIC)

    page.go_back()
    expect_example(page, "Draft model")
    expect(page.locator(".sd-summary")).to_have_text("stories + 1-layer draft · k 4 · greedy · 160 tokens")
    page.go_forward()
    expect(prompt(page)).to_have_value(ARABIC)
    choose_example(page, "Prompt lookup")  # restores the changed example
    expect_example(page, "Prompt lookup")
    expect(page.locator(".sd-summary")).to_have_text("stories + Prompt lookup · k 8 · greedy · 96 tokens")


def test_a_link_to_a_tab_opens_it_and_does_not_add_to_the_history(visit_gated):
    page = visit_gated("#how", reduced_motion="reduce")
    expect(tab(page)).to_have_text("How it works")
    assert page.evaluate("history.length") == 2  # the blank page and this one
    page.get_by_role("tab", name="Race").click()
    expect(page).not_to_have_url(re.compile("#"))
    page.go_back()
    expect(tab(page)).to_have_text("How it works")


def test_the_reference_has_contents(visit_gated):
    page = visit_gated("#reference", reduced_motion="reduce")
    page.locator("#reference").get_by_role("link", name="Training a head").click()
    expect(page.get_by_role("heading", name="Training a head")).to_be_in_viewport()
    expect(tab(page)).to_have_text("Reference")
    page.reload()
    expect(tab(page)).to_have_text("Reference")
