"""Pictures for docs/: `python tests/e2e/screenshots.py [ADDRESS]`, with a page running at the address.

Stills of the page at two widths, and the README's animation of a recorded race at the automatic speed.
"""

import io
import os
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, FloatRect, sync_playwright

DOCS = Path(__file__).parents[2] / "docs"
FLAGS = ["--no-sandbox", "--disable-gpu"]
SIZES = {1280: 900, 390: 844}
PRESET = "embedded-draft"
WIDTH, HEIGHT, MARGIN = 1280, 800, 7  # page of the animation, which shows the part from the setup to the player
FRAMES_PER_S, LONGEST_S, HOLD_MS = 12, 20, 3000  # the last frame is held
QUALITY = 60
CLOCK = """() => {
  let now = 0;
  const due = new Map();
  let last = 0;
  performance.now = () => now;
  window.requestAnimationFrame = (call) => (due.set(++last, call), last);
  window.cancelAnimationFrame = (id) => due.delete(id);
  window.stepClock = (ms) => {
    now += ms;
    const calls = [...due.values()];
    due.clear();
    calls.forEach((call) => call(now));
    document.getAnimations().forEach((one) => { one.pause(); one.currentTime = (one.currentTime ?? 0) + ms; });
  };
}"""


def stills(browser: Browser, address: str) -> None:
    """Write the page at two widths, in both colour schemes."""
    (DOCS / "page").mkdir(exist_ok=True)
    for theme in ("light", "dark"):
        page = browser.new_page(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
        page.set_default_timeout(120_000)
        page.goto(f"{address}?preset={PRESET}&__theme={theme}")
        page.locator(".sd-status", has_text="Recorded").wait_for()
        for width, height in SIZES.items():
            page.set_viewport_size({"width": width, "height": height})
            page.wait_for_timeout(400)
            page.screenshot(path=DOCS / "page" / f"{theme}-{width}.png")


def animation(browser: Browser, address: str) -> None:
    """Write the replay of the recorded race as an animated WebP.

    A screenshot takes longer than a frame lasts, so the page runs on a clock that advances by one frame per picture.
    """
    page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
    page.set_default_timeout(120_000)
    page.goto(f"{address}?preset={PRESET}&__theme=light")
    page.locator(".sd-status", has_text="Recorded").wait_for()
    page.locator(".sd-playback button").last.wait_for()
    setup, player = (page.locator(part).first.bounding_box() for part in (".sd-setup", ".sd-transport"))
    assert setup and player
    bottom = player["y"] + player["height"] + MARGIN
    clip: FloatRect = {"x": 0, "y": setup["y"], "width": WIDTH, "height": bottom - setup["y"]}
    page.evaluate(CLOCK)
    page.locator(".sd-playback button").last.click()  # Replay
    frames = []
    ended = 0
    while ended < FRAMES_PER_S and len(frames) < FRAMES_PER_S * LONGEST_S:  # a second more, for the final numbers
        page.evaluate(f"stepClock({1000 / FRAMES_PER_S})")
        ended += "Replaying" not in page.locator("#view .sd-status").inner_text()
        picture = page.screenshot(clip=clip)
        frames.append(Image.open(io.BytesIO(picture)).convert("RGB"))
    durations = [1000 // FRAMES_PER_S] * (len(frames) - 1) + [HOLD_MS]
    path = DOCS / "race.webp"
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=durations, loop=0, quality=QUALITY, method=4)
    print(f"{path}: {len(frames)} frames, {path.stat().st_size / 1e6:.2f} MB")


def main(address: str, kinds: str) -> None:
    with sync_playwright() as playwright:
        path = os.environ.get("SPECDEMO_CHROMIUM", "/usr/bin/chromium")
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        if kinds != "animation":
            stills(browser, address)
        animation(browser, address)
        browser.close()


if __name__ == "__main__":
    main(*[*sys.argv[1:], "http://127.0.0.1:7860/", "all"][:2])
