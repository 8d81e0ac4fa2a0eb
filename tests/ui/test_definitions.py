"""The table that defines every number, used by docs and page."""

import re
from pathlib import Path

from specdemo.core.definitions import DEFINITIONS, table
from specdemo.ui import assets


def test_the_docs_show_the_table_and_the_page_its_short_words():
    root = Path(__file__).parents[2]
    assert table() in (root / "docs/measurements.md").read_text(encoding="utf-8")
    page = assets.markup("view.html")
    shown = [definition.tile for definition in DEFINITIONS.values() if definition.tile]
    assert re.findall(r'data-tile="([\w-]+)"', page) == [tile.id for tile in shown]
    assert all(f"<p>{tile.text}</p>" in page for tile in shown) and "@" not in page.replace("@children", "")
    reference = assets.reference()
    anchors = {"h-" + title.lower().replace(" ", "-") for title in re.findall(r"^## (.+)$", reference, re.M)}
    assert table() in reference and {*re.findall(r"\(#(h-[\w-]+)\)", reference)} == anchors
