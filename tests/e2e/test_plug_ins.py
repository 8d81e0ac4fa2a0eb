"""A method of an installed plug-in, raced on the page like a built-in one."""

import re

from playwright.sync_api import expect

from tests.e2e.conftest import visitors
from tests.plug_in import install_bigram
from tests.processes import served


def test_a_method_of_another_package_races(chromium, tmp_path):
    site = install_bigram(tmp_path)
    link = "?preset=embedded-ngram&method=bigram&option.longest=3&max_new_tokens=24"
    with served(PYTHONPATH=str(site)) as (_, address), visitors(chromium, address) as visit:
        page = visit(link)
        page.locator("#run").click()
        expect(page.locator('[data-tile="output"] b')).to_have_text(re.compile("^✓ (identical|bit for bit)$"))
        expect(page.get_by_role("img", name="Throughput of Baseline, Bigrams")).to_be_visible()
        page.locator(".sd-edit").click()
        expect(page.locator("#option-longest-1 input[type=number]")).to_have_value("3")
