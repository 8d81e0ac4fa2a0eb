"""A chat on the page with a model that has a chat template: several turns, with a bar that does not move."""

import json
import shutil
from urllib.parse import quote

import pytest
from playwright.sync_api import expect

from specdemo.models.shipped import embedded_folder
from tests.e2e.conftest import NEXT_FRAME, visitors
from tests.e2e.test_layout import CONTROLS, OVERFLOWING, SMALL, wait_for_text
from tests.processes import served

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture
def page(chromium, tmp_path):
    folder = tmp_path / "chat"
    shutil.copytree(embedded_folder() / "stories", folder)
    written = folder / "tokenizer_config.json"
    written.write_text(json.dumps({**json.loads(written.read_text()), "chat_template": TEMPLATE}))
    query = f"?preset=embedded-ngram&target={quote(str(folder))}&max_new_tokens=24&prompt=A+fox."
    with served("--allow-any-model") as (_, address), visitors(chromium, address) as opened:
        yield opened(query + "&chat=true")


def test_the_next_message_is_answered_below_the_bar(page):
    page.locator("#run:enabled").click()
    wait_for_text(page, "^Finished")
    expect(page.locator("#continue")).to_be_visible()
    for width, height in ((1280, 900), (390, 844)):
        page.set_viewport_size({"width": width, "height": height})
        page.evaluate(NEXT_FRAME)
        bar = page.locator(".sd-pace").bounding_box()
        assert bar["y"] + bar["height"] <= page.locator("#follow-row").bounding_box()["y"]
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert [page.evaluate(rule) for rule in (CONTROLS, SMALL, OVERFLOWING)] == [[], [], []]
    first = page.locator('[data-lane="1"] .sd-answer').inner_text()
    page.locator("#message textarea, #message input").fill("Why <b>so</b>?")
    page.locator("#continue").click()
    for lane in (0, 1):
        box = page.locator(f'[data-lane="{lane}"].sd-text')
        expect(box.locator(".sd-turn").last).to_have_text("userWhy <b>so</b>?")
        expect(box.locator("summary").first).to_have_text("2 earlier messages")
    wait_for_text(page, "^Finished")
    assert page.locator('[data-lane="1"] .sd-answer').inner_text() != first
