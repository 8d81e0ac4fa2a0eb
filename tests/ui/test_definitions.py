"""The table that defines every number, used by docs and page."""

from pathlib import Path

from specdemo.core.definitions import DEFINITIONS, table
from specdemo.ui.assets import reference


def test_the_docs_show_the_table_and_the_page_its_short_words():
    root = Path(__file__).parents[2]
    assert table() in (root / "docs/measurements.md").read_text(encoding="utf-8")
    page = (root / "specdemo/ui/view.html").read_text(encoding="utf-8")
    assert all(f"<p>{definition.short}</p>" in page for definition in DEFINITIONS.values() if definition.short)
    assert table() in reference()
