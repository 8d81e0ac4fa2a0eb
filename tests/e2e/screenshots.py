"""Screenshots for docs/: `python tests/e2e/screenshots.py [ADDRESS]`, with a page running at the address."""

import os
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

DOCS = Path(__file__).parents[2] / "docs"
FLAGS = ["--no-sandbox", "--disable-gpu"]
SIZES = {1920: 1080, 1280: 900, 1024: 768, 820: 1180, 390: 844, 360: 740}


def main(address: str) -> None:
    (DOCS / "page").mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        path = os.environ.get("SPECDEMO_CHROMIUM", "/usr/bin/chromium")
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        for theme in ("light", "dark"):
            page = browser.new_page(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
            page.set_default_timeout(120_000)
            page.goto(f"{address}?preset=embedded-draft&__theme={theme}")
            page.locator(".sd-status", has_text="Recorded").wait_for()
            for width, height in SIZES.items():
                page.set_viewport_size({"width": width, "height": height})
                page.wait_for_timeout(400)
                page.screenshot(path=DOCS / "page" / f"{theme}-{width}.png")
            page.set_viewport_size({"width": 1280, "height": 900})
            page.evaluate("scrollTo(0, 0)")
            page.wait_for_timeout(400)
            page.screenshot(path=DOCS / f"race-{theme}.png")
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:7860/")
