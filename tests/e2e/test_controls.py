"""Presets, lanes, options and share links in the browser."""

import re
from itertools import pairwise

from playwright.sync_api import expect


def set_number(page, elem_id, value):
    box = page.locator(f"#{elem_id} input[type=number]")
    box.fill(str(value))
    box.press("Enter")
    box.blur()


def unfold(page):
    """Open the settings and wait until Gradio has set their values.

    Gradio sets the values of controls two frames after they are first shown, and would overwrite earlier input.
    """
    button = page.locator("#sampling button").first
    button.click()
    expect(page.locator("#seed input[type=number]")).to_be_visible()
    page.evaluate("async () => { for (let i = 0; i < 5; i++) await new Promise(requestAnimationFrame); }")
    return button


def edit(page):
    page.locator(".sd-edit").click()
    expect(page.locator("#drawer")).to_be_visible()


def choose(page, elem_id, label):
    page.locator(f"#{elem_id} input").click()
    page.get_by_role("option", name=label, exact=True).click()


def settings(page):
    ids = ("target", "method-1", "method-2", "model-2")
    numbers = ("k-1", "k-2", "option-max_n-1", "temperature", "seed", "max_new_tokens")
    places = [f"#{i} input" for i in ids] + [f"#{i} input[type=number]" for i in numbers] + ["#prompt textarea"]
    return {place: page.locator(place).input_value() for place in places}


def test_a_link_restores_every_setting(visit):
    page = visit()
    edit(page)
    page.get_by_label("Prompt lookup", exact=True).check()
    expect(page.locator("#about")).to_contain_text("Prompt lookup where text repeats")
    expect(page.locator("#model-1")).to_be_hidden()
    expect(page.locator(".hidden-counter:visible")).to_have_count(0)
    set_number(page, "option-max_n-1", 5)
    expect(page.locator("#about")).to_have_text("Custom (from Prompt lookup where text repeats).")
    page.locator("#add-lane").click()
    choose(page, "model-2", "stories-draft-deep")
    set_number(page, "k-2", 9)
    set_number(page, "k-1", 7)
    fold = unfold(page)
    set_number(page, "temperature", 0.7)
    set_number(page, "seed", 11)
    set_number(page, "max_new_tokens", 40)
    expect(fold).to_contain_text("temperature 0.7 · seed 11 · max 40 tokens")
    page.locator("#prompt textarea").fill("A <b> & ${x} {{y}} 日本 👩‍👧\n\ttab")
    page.locator("#share").click()
    link = page.locator("#link textarea, #link input")
    expect(link).to_have_value(re.compile(r"^http://127.+\?preset=embedded-ngram&.*max_n=5"))
    expect(page).to_have_url(link.input_value())

    other = visit("?" + link.input_value().partition("?")[2])
    expect(other.locator("#k-2 input[type=number]")).to_have_value("9")
    expect(other.locator("#option-max_n-1 input[type=number]")).to_have_value("5")
    folded = other.locator("#sampling button").first
    expect(folded).to_contain_text("temperature 0.7 · seed 11 · max 40 tokens")
    folded.click()
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
    page.get_by_label("Sampling", exact=True).check()
    expect(link).to_be_hidden()  # the comparison has changed


def test_error_disappears_with_the_preset(visit):
    page = visit()
    page.locator("#prompt textarea").fill(" ")
    page.locator("#run").click()
    expect(page.locator(".sd-alert")).to_have_text(re.compile("^The prompt is empty"))
    page.get_by_label("Sampling", exact=True).check()
    expect(page.locator(".sd-alert")).to_be_hidden()


def test_edits_made_before_the_link_was_read_stay(visit_gated, gates):
    gates.warm.clear()
    page = visit_gated("?preset=embedded-draft&k=7&temperature=0.5&prompt=theirs")
    page.locator("#prompt textarea").fill("mine")
    gates.warm.set()
    expect(page.locator("#k-1 input[type=number]")).to_have_value("7")
    expect(page.locator("#prompt textarea")).to_have_value("mine")


def test_presets_of_larger_models_are_in_a_list(visit_gated):
    page = visit_gated()
    choose(page, "more", "24 GB Qwen3 8B with Qwen3 0.6B")
    expect(page.locator("#target input")).to_have_value("Qwen/Qwen3-8B")
    expect(page.locator("#presets input[type=radio]:checked")).to_have_count(0)
    expect(page.locator("#run")).to_be_disabled()
    expect(page.locator("#view .sd-status")).to_contain_text("This machine cannot run this preset: it needs a GPU")
    page.get_by_label("Sampling", exact=True).check()
    expect(page.locator("#target input")).to_have_value("stories")
    expect(page.locator("#run")).to_be_enabled()
    expect(page.locator("#more input")).to_have_value(re.compile("^More examples"))


def drafters(page):
    """Return the models that lane 1 offers."""
    page.locator("#model-1 input").click()
    expect(page.get_by_role("option").first).to_be_visible()
    found = page.get_by_role("option").all_inner_texts()
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
    page.get_by_label("Edit code", exact=True).check()
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
    expect(page.locator("#k-1 input[type=number]")).to_have_value("4")
    expect(page.locator("#target input")).to_have_value("stories")


def test_lanes_come_and_go(visit):
    page = visit()
    expect(page.locator("#drawer")).to_be_hidden()
    edit(page)
    page.locator("#add-lane").click()
    expect(page.locator(".sd-setup-summary")).to_contain_text("Lane 2 ")
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
    page.locator("#sampling button").first.click()
    unnamed = page.evaluate(
        """[...document.querySelectorAll('input, textarea, button, select')].filter(e => e.checkVisibility()
           && !e.labels?.length && !e.ariaLabel && !e.title && !e.textContent.trim()
           && !e.getAttribute('aria-labelledby')).map(e => e.outerHTML.slice(0, 120))"""
    )
    assert unnamed == []
    expect(page.get_by_role("group", name="Preset", exact=True)).to_be_visible()
    levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map(e => Number(e.tagName[1]))")
    assert levels[0] == 1 and all(below - above <= 1 for above, below in pairwise(levels))
