"""Presets, lanes, options and share links in the browser."""

import re

from playwright.sync_api import expect

from tests.e2e.conftest import choose_example, edit, expect_example, wait_for_text


def set_number(page, elem_id, value):
    box = page.locator(f"#{elem_id} input[type=number]")
    box.fill(str(value))
    box.blur()


def choose(page, elem_id, label):
    page.locator(f"#{elem_id} input").click()
    page.get_by_role("listbox").get_by_role("option", name=label, exact=True).click()
    expect(page.get_by_role("listbox")).to_have_count(0)  # two lists may be open for a moment


def drop(field, text):
    """Drop a text file on a field."""
    field.evaluate(
        """(field, text) => {
          const dataTransfer = new DataTransfer();
          dataTransfer.items.add(new File([text], "file.txt"));
          field.dispatchEvent(new DragEvent("drop", { bubbles: true, cancelable: true, dataTransfer }));
        }""",
        text,
    )
    expect(field).to_have_value(text)


def test_a_hostile_link_is_refused_with_notes_and_every_setting_reaches_the_link(visit):
    page = visit("?preset=../../etc&k=9999&target=evil/model&onload=<img src=x onerror=alert(1)>&temperature=nan")
    expect(page.locator(".sd-notes li")).to_have_count(5)
    expect(page.locator(".sd-notes")).to_contain_text("9999")
    assert page.locator(".sd-notes img").count() == 0
    # the page would clear the notes to rejoin a run
    assert page.evaluate("sessionStorage.getItem('specdemo.race')") is None
    expect(page.locator("#k-1 input")).to_have_value("4")
    expect(page.locator("#target input")).to_have_value("stories")

    edit(page)
    choose_example(page, "Prompt lookup")
    expect(page.locator("#about")).to_contain_text("Prompt lookup where text repeats")
    expect(page.locator("#model-1")).to_be_hidden()
    expect(page.locator(".hidden-counter:visible")).to_have_count(0)
    drop(page.locator("#option-corpus-1 textarea"), "one\ntwo")
    set_number(page, "option-max_n-1", 5)
    expect_example(page, "Prompt lookup, changed")
    expect(page.locator("#about")).to_contain_text(
        "Prompt lookup where text repeats, changed. stories · Prompt lookup · k 8 · greedy · 96 tokens Memory:"
    )
    for _ in range(2):
        page.locator("#add-lane").click()
    expect(page.locator("#lane-3")).to_be_visible()
    expect(page.locator("#add-lane")).to_be_hidden()
    page.locator("#remove-lane").click()
    expect(page.locator("#lane-3")).to_be_hidden()
    choose(page, "model-2", "stories-draft-deep")
    choose(page, "k-2", "9")
    choose(page, "k-1", "7")
    set_number(page, "temperature", 0.7)
    set_number(page, "seed", 11)
    set_number(page, "max_new_tokens", 40)
    lanes = ["stories", "Prompt lookup", "k 7", "1.3M draft", "k 9"]
    expect(page.locator(".sd-chips button")).to_have_text([*lanes, "temperature 0.7 · seed 11 · 40 tokens"])
    page.locator("#prompt textarea").fill("A <b> & ${x} {{y}} 日本 👩‍👧\n\ttab")
    page.locator("#share").click()
    link = page.locator("#link textarea, #link input")
    expect(link).to_have_value(re.compile(r"^http://127.+\?preset=embedded-ngram&.*corpus=one%0Atwo.*max_n=5"))
    expect(page).to_have_url(link.input_value())
    expect(page.locator("#command textarea, #command input")).to_have_value("python app.py --preset embedded-ngram")


def test_a_preset_that_cannot_run_here_has_a_replacement_and_run_can_be_pressed_again_after_a_failed_event(
    visit_gated, gates
):
    """And targets have headings, a wrong path is told once, and the chips of three lanes fit in a line."""
    gates.open.set()
    page = visit_gated("?preset=embedded-draft&lanes=3", viewport={"width": 1280, "height": 800})
    expect(page.locator(".sd-chips button")).to_have_count(8)
    assert page.locator(".sd-setup").bounding_box()["height"] < 40
    page.locator(".sd-chips button").first.click()
    shown = "nodes => nodes.map(node => node.ariaDescription)"
    headings = page.locator("#target [data-first]")
    expect(headings.first).to_be_visible()
    every = page.locator("#target [role=option]").evaluate_all(shown)
    assert headings.evaluate_all(shown) == [*dict.fromkeys(every)]  # each group is in one place
    assert every[0] == "On this machine" and len({*every}) > 1
    headings.nth(1).click(position={"x": 20, "y": 8})
    expect(headings.first).to_be_visible()  # a heading is no choice, and the list stays open
    expect(page.locator("#target input")).to_have_value("stories")

    page.locator("#target input").fill("/none.gguf")
    page.keyboard.press("Enter")
    expect(page.locator("#target")).to_contain_text("/none.gguf does not exist")
    expect(page.locator("#run")).to_be_disabled()
    expect(page.locator(".sd-obstacle")).to_be_hidden()
    page.locator(".sd-edit").click()
    expect(page.locator(".sd-obstacle")).to_contain_text("/none.gguf does not exist")  # where the field is hidden

    choose_example(page, "Qwen3 8B with Qwen3 0.6B")
    expect(page.locator("#target input")).to_have_value(re.compile("^Qwen3 8B — download about 16.0 GB"))
    expect(page.locator("#run")).to_be_disabled()
    expect(page.locator(".sd-obstacle")).to_contain_text("This machine cannot run it: it needs a GPU")
    expect(page.locator("#view .sd-status")).to_contain_text("This machine cannot run this preset: it needs a GPU")
    instead = page.get_by_role("button", name=re.compile("^Run instead: "))
    title = instead.inner_text().removeprefix("Run instead: ")
    instead.click()
    wait_for_text(page, "^Finished")
    expect(page.locator(".sd-obstacle")).to_be_hidden()
    expect(page.locator("#run")).to_be_enabled()
    expect_example(page, title)
    assert gates.started.acquire(timeout=60)
    expect(page.locator("[id^=option-]").first).to_be_attached()  # drawing waits in the queue, too

    page.route("**/queue/join*", lambda route: route.fulfill(status=500, body="{}"))
    page.locator("#run").click()
    expect(page.locator(".toast-body")).not_to_have_count(0)
    expect(page.locator("#run")).to_be_enabled()
    page.unroute("**/queue/join*")
    page.locator("#run").click()
    assert gates.started.acquire(timeout=60)
    wait_for_text(page, "^Finished")
    expect(page.locator("#run")).to_be_enabled()
    page.evaluate("document.dispatchEvent(new CustomEvent('specdemo:change', { detail: { k: 2 } }))")  # an advice
    assert gates.started.acquire(timeout=60)
    expect(page).to_have_url(re.compile(r"[?&]k=2$"))
    expect(page.locator("#k-1 input")).to_have_value("2")

    # a preset whose models could not be loaded moves below the others, with the reason
    choose_example(page, "Prompt lookup")
    expect(page.locator(".sd-chips button")).to_have_text(["stories", "Prompt lookup", "k 8", "greedy · 96 tokens"])
    page.evaluate("document.dispatchEvent(new CustomEvent('specdemo:failed', { detail: 'no such file' }))")
    expect(page.locator(".sd-examples optgroup option")).to_have_text("Prompt lookup: no such file")
    assert page.locator(".sd-examples > :last-child").get_attribute("label") == "Failed here"
    expect(page.locator(".sd-examples")).to_have_value("embedded-ngram")


def test_a_link_to_how_it_works_adds_no_history_and_races_a_family_of_drafters(visit_gated, gates):
    page = visit_gated("#how")
    tab = page.locator('[role=tab][aria-selected="true"]')
    expect(tab).to_have_text("How it works")
    assert page.evaluate("history.length") == 2  # the blank page and this one
    page.get_by_role("tab", name="Race").click()
    expect(page).not_to_have_url(re.compile("#"))
    page.go_back()
    expect(tab).to_have_text("How it works")
    for family, title in (("Lookup", "Prompt lookup"), ("Draft model", "Draft model"), ("Draft model", "Draft model")):
        page.get_by_role("button", name=f"Race it: {family}").click()  # the third is selected already
        expect(page.get_by_role("tab", name="Race")).to_have_attribute("aria-selected", "true")
        expect_example(page, title)
        expect(page.locator("#stop")).to_be_enabled()  # the run goes on until the test has seen it
        gates.open.set()
        expect(page.locator("#run")).to_be_enabled()
        wait_for_text(page, "^Finished")
        gates.open.clear()
        page.get_by_role("tab", name="How it works").click()
