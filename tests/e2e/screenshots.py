"""Take the README's pictures: `python tests/e2e/screenshots.py [ADDRESS]`, with a page running there."""

import os
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

DOCS = Path(__file__).parents[2] / "docs"
FLAGS = ["--no-sandbox", "--disable-gpu"]


def main(address: str) -> None:
    with sync_playwright() as playwright:
        path = os.environ.get("SPECDEMO_CHROMIUM", "/usr/bin/chromium")
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        for theme in ("light", "dark"):
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.set_default_timeout(120_000)
            page.goto(f"{address}?preset=embedded-draft&__theme={theme}")
            page.locator("#run").click()
            page.locator(".sd-status", has_text="Finished").wait_for()
            page.locator('[data-lane="1"] [data-kind="corrected"]').nth(8).click()
            page.locator(".sd-step", has_text="Step").scroll_into_view_if_needed()
            page.mouse.move(0, 0)
            page.screenshot(path=DOCS / f"race-{theme}.png", full_page=True)
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:7860/")
