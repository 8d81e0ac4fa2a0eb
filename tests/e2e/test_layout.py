"""Layout: nothing clipped, covered, too small or moving, and every control reachable by keyboard."""

import re
from itertools import product
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.e2e.conftest import NEXT_FRAME, SHIFTS, choose_example, edit, lane_text, show_in_real_time, wait_for_text
from tests.traces import HOSTILE

SIZES = [(1920, 1080), (1280, 900), (1024, 768), (820, 1180), (390, 844), (360, 740)]
PLACES = [("tab", name) for name in ("Race", "Find what pays", "Other machines", "How it works")]
PLACES += [("link", name) for name in ("Training", "Reference")]
AXE = Path(__file__).parents[1] / "js/node_modules/axe-core/axe.min.js"
CONTROLS = """() => {
  const kinds = 'button, input:not([type=radio]), select, textarea, .sd-pace label, .sd-status, .sd-headline';
  const seen = [...document.querySelectorAll(kinds)]
    .filter(e => e.checkVisibility({ visibilityProperty: true, opacityProperty: true }) && e.getClientRects().length)
    .filter(e => !e.closest('footer, [role=tablist], .sd-text'));
  const boxes = seen.map(e => ({ e, name: e.id || e.className || e.closest('[id]').id, r: e.getBoundingClientRect() }))
    .filter(({ r }) => r.width > 2 && r.height > 2);
  const outside = ({ r }) => r.left < -0.5 || r.right > innerWidth + 0.5;
  const wrong = boxes.filter(outside).map(({ name }) => `${name} is cut off`);
  for (const a of boxes) for (const b of boxes) {
    if (a.e === b.e || a.e.contains(b.e) || b.e.contains(a.e)) continue;
    const across = Math.min(a.r.right, b.r.right) - Math.max(a.r.left, b.r.left);
    const down = Math.min(a.r.bottom, b.r.bottom) - Math.max(a.r.top, b.r.top);
    if (across > 1.5 && down > 1.5) wrong.push(`${a.name} covers ${b.name}`);
  }
  return wrong;
}"""
OVERFLOWING = """() => {
  const walker = document.createTreeWalker(document.querySelector('main'), NodeFilter.SHOW_TEXT);
  const range = document.createRange();
  const cut = (box) => getComputedStyle(box).overflowX !== 'visible' || (!box.matches('.sd') && cut(box.parentElement));
  const beyond = [];
  while (walker.nextNode()) {
    const { parentElement: box, textContent } = walker.currentNode;
    if (!textContent.trim() || !box.closest('.sd') || !box.checkVisibility() || cut(box)) continue;
    range.selectNodeContents(walker.currentNode);
    const [text, view] = [range, box.closest('.sd')].map((node) => node.getBoundingClientRect());
    if (view.width && text.right > view.right + 0.5) beyond.push(textContent.slice(0, 40));
  }
  return beyond;
}"""
SMALL = """() => {
  const walker = document.createTreeWalker(document.querySelector('main'), NodeFilter.SHOW_TEXT);
  const small = new Set();
  while (walker.nextNode()) {
    const { parentElement: box, textContent } = walker.currentNode;
    if (!textContent.trim() || !box.checkVisibility()) continue;
    if (box.closest('style, script, .sd-visually-hidden')) continue;
    const size = parseFloat(getComputedStyle(box).fontSize);
    if (size && size < 11.95) small.add(`${size} ${box.className || box.tagName} ${textContent.slice(0, 20)}`);
  }
  return [...small];
}"""


TARGETS = """() => {
  const kinds = 'button, select, textarea, summary, input:not([type=radio], [type=checkbox]), label:has(> input)';
  return [...document.querySelectorAll(kinds)]
    .filter(e => e.checkVisibility({ visibilityProperty: true, opacityProperty: true }) && e.getClientRects().length)
    .map(e => ({ name: e.id || e.className || e.tagName, r: e.getBoundingClientRect() }))
    .filter(({ r }) => r.width > 2 && (r.width < 23.5 || r.height < 23.5))
    .map(({ name, r }) => `${name} ${r.width}x${r.height}`);
}"""


RING = """() => { const at = document.activeElement;
  const ringed = [at, at.closest("label"), at.closest(".input-container")].filter(Boolean);
  return [...new Set(ringed.map((e) => getComputedStyle(e)).filter((s) => s.outlineStyle !== "none")
    .map((s) => s.outlineWidth))]; }"""


def test_the_focus_has_one_ring_the_title_names_the_result_and_nothing_is_clipped_covered_or_small(visit, pytestconfig):
    """In every other size, and in all sizes before a release."""
    sizes = SIZES if pytestconfig.getoption("--all") else SIZES[1::2]
    page = visit()
    wait_for_text(page, "^Recorded")
    seen = set()
    page.locator("[role=tab]").first.focus()
    for _ in range(26):  # the player is below the lanes
        page.keyboard.press("Tab")
        where = "document.activeElement.closest('#prompt-row, .sd-playback, .sd-pace')"
        seen.add(page.evaluate(f"{where}?.id || {where}?.className"))
        # a style that is about to change is read once more
        page.wait_for_function(f"() => JSON.stringify(({RING})()) === '[\"2px\"]'")
    assert {"prompt-row", "sd-playback", "sd-pace"} <= seen
    expect(page).to_have_title(re.compile(r"^\d\.\d× as fast - specdemo"))
    page.get_by_role("link", name="Training", exact=True).click()
    expect(page).to_have_title(re.compile("^Training - specdemo"))
    assert page.locator("#prompt textarea").get_attribute("dir") == "auto"

    page.get_by_role("tab", name="Race").click()
    page.locator(".sd-edit").click()
    for (width, height), (role, name) in product(sizes, PLACES):
        page.set_viewport_size({"width": width, "height": height})
        page.get_by_role(role, name=name, exact=True).click()
        page.evaluate(NEXT_FRAME)
        assert page.evaluate("document.documentElement.scrollWidth") == width, (width, name)
        assert [page.evaluate(rule) for rule in (CONTROLS, SMALL, OVERFLOWING, TARGETS)] == [[]] * 4, (width, name)


PLACES_OF_SKELETON = {
    "b": "#title h1",
    "p": "#title p",
    "ol": "[role=tablist]",
    "ul :last-child": "#run",
    "ul + i": "#prompt",
    "section :nth-child(1)": ".sd-lane",
    "section :nth-child(2)": ".sd-lane + .sd-lane",
    "section :nth-child(3)": ".sd-throughput",
}


def check_skeleton(page, width):
    """Load the page again without its scripts: the skeleton is painted, and has the places of the page."""
    expect(page.locator("#skeleton")).to_be_hidden()
    early = page.context.new_page()
    early.route("**/*.js", lambda route: route.abort())
    early.goto(page.url)
    early.wait_for_function("performance.getEntriesByName('first-contentful-paint').length")
    for shape, place in PLACES_OF_SKELETON.items():
        boxes = early.locator(f"#skeleton {shape}").bounding_box(), page.locator(place).first.bounding_box()
        near = [abs(boxes[0][side] - boxes[1][side]) < 12 for side in ("x", "y")]
        assert all(near), (shape, *boxes)
    assert early.evaluate("document.documentElement.scrollWidth") == width
    for scheme, dark in (("dark", True), ("light", False)):
        early.emulate_media(color_scheme=scheme)
        colour = early.evaluate("getComputedStyle(document.getElementById('skeleton')).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", colour))) < 100) == dark
    early.close()


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_the_first_screen_shows_the_race_where_the_skeleton_was_and_nothing_moves(visit_gated, gates, width, height):
    """Neither while the page loads nor when the race starts. On a computer all lanes and charts are on it, on a phone
    the beginning of the first lane.
    """
    gates.open.set()
    listen = {"before": lambda page: page.add_init_script(SHIFTS)}
    page = visit_gated(playback=True, viewport={"width": width, "height": height}, **listen)
    wait_for_text(page, "^Recorded")
    assert page.evaluate("shifts.reduce((a, b) => a + b, 0)") < 0.05  # "good" is below 0.1
    sizes = page.evaluate("performance.getEntries().map(e => e.transferSize || 0)")
    assert sum(sizes) < 417_000  # bytes before a run
    whole = [] if width == 390 else [".sd-lanes", ".sd-legend", ".sd-transport", ".sd-side"]
    for place in ("#run", ".sd-headline", ".sd-race", "#chart", "#title p", *whole):
        box = page.locator(place).first.bounding_box()
        assert box["y"] >= 0 and box["y"] + box["height"] <= height, place
    texts = [page.locator(f'[data-lane="{lane}"].sd-text') for lane in (0, 1)]
    assert texts[0].bounding_box()["y"] < height - 30
    check_skeleton(page, width)
    before = [text.bounding_box() for text in texts]
    page.locator("#run").click()
    wait_for_text(page, "^(Running|Run complete|Finished)")
    assert [text.bounding_box() for text in texts] == before
    show_in_real_time(page)
    wait_for_text(page, "^Finished")
    assert [text.bounding_box() for text in texts] == before
    assert page.evaluate("scrollY") == 0
    page.mouse.wheel(0, 400)
    page.wait_for_function("scrollY > 300")
    assert page.locator("#run").bounding_box()["y"] < 20  # the bar stays


CLICK_RUN = """new MutationObserver((_, observer) => {
  const run = document.getElementById("run");
  if (run) (observer.disconnect(), run.click());
}).observe(document, { childList: true, subtree: true });"""


def test_run_pressed_at_once_waits_for_the_link_an_outdated_result_is_marked_and_the_keyboard_is_enough(
    visit_gated, gates
):
    gates.open.set()
    gates.warm.clear()
    page = visit_gated("?preset=embedded-draft&k=7", before=lambda page: page.add_init_script(CLICK_RUN))
    wait_for_text(page, "^Reading the link")
    gates.warm.set()
    wait_for_text(page, "^(Running|Run complete|Finished)")
    expect(page.locator("#k-1 input")).to_have_value("7")
    wait_for_text(page, "^Finished")
    expect(page.locator(".sd-outdated-label")).to_be_hidden()  # the run matches the link's settings
    edit(page)
    prompt = page.locator("#prompt textarea").input_value()
    page.locator("#prompt textarea").fill("Another prompt")
    expect(page.locator(".sd-outdated-label")).to_have_text(
        re.compile("^Result of earlier settings: Speculative <em>lane</em>")
    )
    page.locator("#prompt textarea").fill(prompt)
    expect(page.locator(".sd-outdated-label")).to_be_hidden()

    page.locator(".sd-edit").click()
    gates.open.clear()
    assert gates.started.acquire(timeout=60)  # the run before
    page.locator("h1").click()
    focused = []
    while "run" not in focused and len(focused) < 11:
        page.keyboard.press("Tab")
        focused.append(page.evaluate("document.activeElement.id"))
    assert len(focused) < 10, focused  # example, chips, settings
    page.keyboard.press("Enter")
    assert gates.started.acquire(timeout=60)
    expect(page.locator("#stop")).to_be_focused()
    expect(page.locator("#run")).to_be_disabled()
    page.keyboard.press("Escape")
    wait_for_text(page, "^Stopped")
    expect(page.locator(".sd-pill").first).to_have_text(re.compile("stopped"))
    expect(page.locator("#stop")).to_be_disabled()
    expect(page.locator("#run")).to_be_focused()
    expect(page.locator("#run")).to_be_enabled()
    assert gates.stopped.acquire(timeout=60)

    gates.open.set()
    page.keyboard.press("Control+Enter")
    wait_for_text(page, "^Finished")
    assert lane_text(page, 0) == "".join(HOSTILE)
    expect(page.locator("#run")).to_be_focused()
    page.locator(".sd-pause").focus()
    for _ in range(2):
        page.keyboard.press(",")  # two steps back
    expect(page.locator(".sd-inspector")).to_be_visible()
    number = r"Step (\d+)/"
    first = int(re.search(number, page.locator(".sd-step").text_content())[1])
    page.keyboard.press(".")
    expect(page.locator(".sd-step")).to_contain_text(f"Step {first + 1}/")
    page.keyboard.press("Escape")
    expect(page.locator(".sd-inspector")).to_be_hidden()
    page.locator(".sd-replay").press("Enter")
    wait_for_text(page, "^Finished")


def test_a_first_visit_plays_the_recorded_race_once(visit_gated):
    page = visit_gated(playback=True, before=lambda page: page.clock.install(), reduced_motion="no-preference")
    wait_for_text(page, "^Playing a recorded run at 1/")
    page.clock.fast_forward("00:30")  # longer than any playback
    wait_for_text(page, "^Recorded run")
    still = visit_gated("?preset=embedded-draft", playback=True, reduced_motion="no-preference")
    wait_for_text(still, "^Recorded run")
    expect(still.locator(".sd-pause")).to_have_attribute("aria-label", "Play")


@pytest.mark.skipif(not AXE.exists(), reason="npm ci --prefix tests/js brings it")
def test_axe_finds_nothing_in_both_themes(visit_gated, gates):
    gates.open.set()
    page = visit_gated("?__theme=dark", playback=True)
    wait_for_text(page, "^Recorded")
    page.evaluate(AXE.read_text(encoding="utf-8") + "; null")

    def brightness():
        tile = page.evaluate("getComputedStyle(document.querySelector('.sd-side')).backgroundColor")
        return sum(map(int, re.findall(r"\d+", tile)[:3]))

    def violations():
        found = []
        colours = "runOnly: ['color-contrast', 'link-in-text-block'],"
        for theme, rules in (("dark", colours), ("light", "")):
            page.evaluate(f"document.body.classList.toggle('dark', {str(theme == 'dark').lower()})")
            page.evaluate("document.getAnimations().forEach(one => one instanceof CSSTransition && one.finish())")
            broken = f"axe.run(document, {{ {rules} resultTypes: ['violations'] }}).then(r => r.violations)"
            for rule in page.evaluate(broken):
                found.append(f"{theme}, {rule['id']}: {[node['html'][:120] for node in rule['nodes'][:3]]}")
        return found

    assert brightness() < 200
    assert violations() == [] and brightness() > 600
    for role, name in PLACES[1:]:
        page.get_by_role(role, name=name, exact=True).click()
        assert violations() == [], name
    page.get_by_role("tab", name="Race").click()
    page.locator("#run").click()
    wait_for_text(page, "^(Running|Run complete)")
    expect(page.locator("#run")).to_be_enabled()  # axe would read a button half before and half after its change
    assert violations() == []
    show_in_real_time(page)
    wait_for_text(page, "^Finished")
    page.locator('[data-lane="1"] span[data-outcome="accepted"]').first.click()
    assert violations() == []
    edit(page)
    page.locator("#prompt textarea").fill("Another prompt")
    choose_example(page, "Qwen3 8B with Qwen3 0.6B")
    for part in (".sd-outdated-label", ".sd-obstacle"):
        expect(page.locator(part)).to_be_visible()
    assert violations() == []
