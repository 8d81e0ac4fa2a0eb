"""Presets, lanes, options and share links in the browser."""

import json
import re
from itertools import pairwise

import pytest
from playwright.sync_api import expect

from tests.e2e.conftest import choose_example, edit, expect_example


def set_number(page, elem_id, value):
    box = page.locator(f"#{elem_id} input[type=number]")
    box.fill(str(value))
    box.press("Enter")
    box.blur()


def choose(page, elem_id, label):
    page.locator(f"#{elem_id} input").click()
    page.get_by_role("listbox").get_by_role("option", name=label, exact=True).click()


def settings(page):
    ids = ("target", "method-1", "method-2", "model-2")
    numbers = ("k-1", "k-2", "option-max_n-1", "temperature", "seed", "max_new_tokens")
    places = [f"#{i} input" for i in ids] + [f"#{i} input[type=number]" for i in numbers] + ["#prompt textarea"]
    return {place: page.locator(place).input_value() for place in places}


def test_a_link_restores_every_setting(visit):
    page = visit()
    edit(page)
    choose_example(page, "Prompt lookup")
    expect(page.locator("#about")).to_contain_text("Prompt lookup where text repeats")
    expect(page.locator("#model-1")).to_be_hidden()
    expect(page.locator(".hidden-counter:visible")).to_have_count(0)
    set_number(page, "option-max_n-1", 5)
    expect_example(page, "Custom (from Prompt lookup)")
    expect(page.locator("#about")).to_have_text(
        "Custom (from Prompt lookup where text repeats). stories + Prompt lookup · k 8 · greedy · 96 tokens"
    )
    page.locator("#add-lane").click()
    choose(page, "model-2", "stories-draft-deep")
    set_number(page, "k-2", 9)
    set_number(page, "k-1", 7)
    set_number(page, "temperature", 0.7)
    set_number(page, "seed", 11)
    set_number(page, "max_new_tokens", 40)
    line = "stories + Prompt lookup, 4-layer draft · k 7, 9 · temperature 0.7 · seed 11 · 40 tokens"
    expect(page.locator(".sd-summary")).to_have_text(line)
    page.locator("#prompt textarea").fill("A <b> & ${x} {{y}} 日本 👩‍👧\n\ttab")
    page.locator("#share").click()
    link = page.locator("#link textarea, #link input")
    expect(link).to_have_value(re.compile(r"^http://127.+\?preset=embedded-ngram&.*max_n=5"))
    expect(page).to_have_url(link.input_value())

    other = visit("?" + link.input_value().partition("?")[2])
    expect(other.locator("#k-2 input[type=number]")).to_have_value("9")
    expect(other.locator("#option-max_n-1 input[type=number]")).to_have_value("5")
    expect(other.locator(".sd-summary")).to_have_text(line)
    for place, value in settings(page).items():
        expect(other.locator(place)).to_have_value(value)  # method titles arrive later
    expect(other.locator(".sd-notes")).to_be_hidden()


def test_missing_link_shows_the_reason(visit_gated):
    page = visit_gated("?__theme=dark")
    link = page.locator("#link")
    message = link.locator("textarea, input")
    expect(page.locator(".sd-status")).to_have_text(re.compile("^Recorded"))
    page.locator("#share").click()
    expect(message).to_have_value(re.compile("preset=embedded-draft$"))
    shown = f"{message.input_value()}&__theme=dark"  # the theme is not part of the link
    expect(page).to_have_url(shown)
    edit(page)
    page.locator("#prompt textarea").fill("<u>" * 1000)
    page.locator("#share").click()
    expect(link).to_contain_text("No link")
    expect(message).to_have_value(re.compile("^the prompt of a link can have 2000 characters, this one has 3000"))
    expect(page.locator(".sd-status")).to_have_text(re.compile("^Recorded"))
    expect(page).to_have_url(shown)
    page.locator("#prompt textarea").fill("short")
    page.locator("#share").click()
    expect(message).to_have_value(re.compile("prompt=short$"))
    expect(link).not_to_contain_text("No link")
    choose_example(page, "Sampling")
    expect(link).to_be_hidden()  # the comparison has changed


def test_error_disappears_with_the_preset(visit):
    page = visit()
    edit(page)
    page.locator("#prompt textarea").fill(" ")
    page.locator("#run").click()
    expect(page.locator(".sd-alert")).to_have_text(re.compile("^The prompt is empty"))
    choose_example(page, "Sampling")
    expect(page.locator(".sd-alert")).to_be_hidden()


def test_a_preset_that_cannot_run_here_has_a_reason_and_a_replacement(visit_gated, gates):
    gates.open.set()
    page = visit_gated()
    choose_example(page, "Qwen3 8B with Qwen3 0.6B")
    expect(page.locator("#target input")).to_have_value("Qwen/Qwen3-8B")
    expect(page.locator("#run")).to_be_disabled()
    expect(page.locator(".sd-obstacle")).to_contain_text("This machine cannot run it: it needs a GPU")
    expect(page.locator("#view .sd-status")).to_contain_text("This machine cannot run this preset: it needs a GPU")
    instead = page.get_by_role("button", name=re.compile("^Run instead: "))
    title = instead.inner_text().removeprefix("Run instead: ")
    instead.click()
    expect(page.locator("#view .sd-status")).to_have_text(re.compile("^Finished"))
    expect(page.locator(".sd-obstacle")).to_be_hidden()
    expect(page.locator("#run")).to_be_enabled()
    expect_example(page, title)


def drafters(page):
    """Return the models that lane 1 offers."""
    page.locator("#model-1 input").click()
    options = page.get_by_role("listbox").get_by_role("option")
    expect(options.first).to_be_visible()
    found = options.all_inner_texts()
    page.keyboard.press("Escape")
    page.locator("#model-1 input").blur()
    return [name.lstrip("✓ ").strip() for name in found]


def test_a_lane_offers_only_models_that_fit(visit_gated):
    page = visit_gated()
    expect(page.locator("#view .sd-status")).to_have_text(re.compile("^Recorded"))
    edit(page)
    first = drafters(page)
    assert "stories-draft-wide" in first and not [name for name in first if "draft" not in name]
    for target in ("code", "stories"):
        choose(page, "target", target)
        expect(page.locator("#model-1 input")).to_have_value("code-draft" if target == "code" else "stories-draft-wide")
    assert drafters(page) == first
    choose_example(page, "Edit code")
    expect(page.locator("#target input")).to_have_value("code")
    expect(page.locator("#option-max_n-2 input").first).to_be_visible()
    expect(page.locator(".toast-body")).to_have_count(0)


def test_wrapped_method_decides_whether_a_model_is_shown(visit_gated):
    page = visit_gated()
    edit(page)
    choose(page, "method-1", "Adaptive length")
    expect(page.locator("#model-1")).to_be_visible()
    choose(page, "option-drafter-1", "ngram")
    expect(page.locator("#model-1")).to_be_hidden()
    choose(page, "method-1", "Draft model")
    expect(page.locator("#model-1")).to_be_visible()


def test_a_hostile_link_is_refused_with_notes(visit):
    page = visit("?preset=../../etc&k=9999&target=evil/model&onload=<img src=x onerror=alert(1)>&temperature=nan")
    notes = page.locator(".sd-notes li")
    expect(notes).to_have_count(5)
    expect(page.locator(".sd-notes")).to_contain_text("9999")
    assert page.locator(".sd-notes img").count() == 0
    # the page would clear the notes to rejoin a run
    assert page.evaluate("sessionStorage.getItem('specdemo.race')") is None
    expect(page.locator("#k-1 input[type=number]")).to_have_value("4")
    expect(page.locator("#target input")).to_have_value("stories")


def test_lanes_come_and_go(visit):
    page = visit()
    expect(page.locator("#drawer")).to_be_hidden()
    edit(page)
    page.locator("#add-lane").click()
    expect(page.locator(".sd-summary")).to_contain_text("1-layer draft, 1-layer draft · k 4, measured ·")
    expect(page.locator("#lane-2")).to_be_visible()
    page.locator("#add-lane").click()
    expect(page.locator("#lane-3")).to_be_visible()
    expect(page.locator("#add-lane")).to_be_hidden()
    choose(page, "method-3", "Prompt lookup")
    expect(page.locator("#model-3")).to_be_hidden()
    expect(page.locator("#option-min_n-3")).to_be_visible()
    page.locator("#remove-lane").click()
    expect(page.locator("#lane-3")).to_be_hidden()


def test_every_input_has_a_name(visit):
    page = visit()
    edit(page)
    unnamed = page.evaluate(
        """[...document.querySelectorAll('input, textarea, button, select')].filter(e => e.checkVisibility()
           && !e.labels?.length && !e.ariaLabel && !e.title && !e.textContent.trim()
           && !e.getAttribute('aria-labelledby')).map(e => e.outerHTML.slice(0, 120))"""
    )
    assert unnamed == []
    expect(page.get_by_role("combobox", name="Example", exact=True)).to_be_visible()
    levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map(e => Number(e.tagName[1]))")
    assert levels[0] == 1 and all(below - above <= 1 for above, below in pairwise(levels))


def test_a_family_of_drafters_is_raced_from_how_it_works(visit_gated, gates):
    gates.open.set()
    page = visit_gated("#how")
    for family, title in (("Lookup", "Prompt lookup"), ("Draft model", "Draft model")):
        page.get_by_role("button", name=f"Race it: {family}").click()
        expect(page.get_by_role("tab", name="Race")).to_have_attribute("aria-selected", "true")
        expect_example(page, title)
        expect(page.locator("#view .sd-status")).to_have_text(re.compile("^Finished"))
        expect(page.locator("#run")).to_be_enabled()
        page.get_by_role("tab", name="How it works").click()
    page.get_by_role("button", name="Race it: Draft model").click()  # it is selected already
    expect(page.locator("#stop")).to_be_enabled()


MENUS = {"target": "stories", "method": "draft_model", "drafter": "stories-draft-wide", "acceptance rule": "coupled"}


@pytest.mark.parametrize("menu", MENUS)
@pytest.mark.parametrize("lanes", ["all lanes", "hidden lanes"])
def test_a_value_that_its_menu_does_not_have_never_blocks_run(visit_gated, gates, menu, lanes):
    """A menu may get other choices while Run is pressed; the browser then sends a value that is not among them."""
    gates.open.set()
    page = visit_gated()
    status, alert = page.locator("#view .sd-status"), page.locator("#view .sd-alert")
    expect(status).to_have_text(re.compile("^Recorded"))

    def unknown(route):
        sent = route.request.post_data_json
        places = [i for i, value in enumerate(sent["data"]) if value == MENUS[menu]]
        for place in places if lanes == "all lanes" else places[1:]:
            sent["data"][place] = "not-in-the-menu"
        route.continue_(post_data=json.dumps(sent))

    page.route("**/queue/join*", unknown)
    page.locator("#run").click()
    if lanes == "all lanes":
        expect(alert).to_contain_text("not-in-the-menu")
        expect(page.locator("#run")).to_be_enabled()
        page.unroute("**/queue/join*")
        page.locator("#run").click()
    expect(status).to_have_text(re.compile("^Finished"))
    expect(alert).to_be_hidden()
    expect(page.locator(".toast-body")).to_have_count(0)


def test_run_can_be_pressed_again_after_a_failed_event(visit_gated, gates):
    gates.open.set()
    page = visit_gated()
    expect(page.locator("#view .sd-status")).to_have_text(re.compile("^Recorded"))

    def foreign(route):
        sent = route.request.post_data_json
        sent["data"] = [{"no": "text"} if part == "stories" else part for part in sent["data"]]
        route.continue_(post_data=json.dumps(sent))

    page.route("**/queue/join*", foreign)
    page.locator("#run").click()
    expect(page.locator("#stop")).to_be_enabled()
    expect(page.locator("#run")).to_be_enabled()
    page.unroute("**/queue/join*")
    page.locator("#run").click()
    expect(page.locator("#view .sd-status")).to_have_text(re.compile("^Finished"))
