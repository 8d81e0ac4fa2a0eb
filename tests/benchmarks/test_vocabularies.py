"""The suite for draft models with another vocabulary, with few prompts and draws."""

from benchmarks import vocabularies
from specdemo.engine.loop import never_cancelled


def test_the_shipped_pair_is_compared_with_universal_assisted_generation(monkeypatch):
    for name, few in (("PROMPTS", 2), ("GREEDY", 12), ("TIMED", 1), ("DRAWS", 1)):
        monkeypatch.setattr(vocabularies, name, few)
    monkeypatch.setattr("specdemo.bench.losslessness.ROWS", 16)
    result = vocabularies.vocabularies(1, 12, lambda share, what: None, never_cancelled)
    assert [line["lane"] for line in result.rows] == [
        "specdemo plain", "specdemo, other vocabulary", "transformers generate",
        "universal assisted", "universal assisted, default",
    ]  # fmt: skip
    assert all(line["output"] == "identical" for line in result.rows)
    assert result.remarks[0] == "0 differing tokens over 2 prompts of 12 tokens."
    assert result.remarks[1] == "No difference was found between 16 continuations of each."
