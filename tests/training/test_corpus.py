from pathlib import Path

import pytest

from specdemo.training.collect import END, read_corpus


def test_a_corpus_is_split_by_its_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(f"one{END}\ntwo\n{END}{END}", encoding="utf-8")
    (tmp_path / "a_valid.txt").write_text("three", encoding="utf-8")
    corpus = read_corpus(tmp_path)
    assert corpus.train == ["one", "two"]
    assert corpus.valid == ["three"]


def test_default_validation_split_is_every_hundredth_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(END.join(str(i) for i in range(150)), encoding="utf-8")
    corpus = read_corpus(tmp_path)
    assert corpus.valid == ["0", "100"]
    assert len(corpus.train) == 148 and not set(corpus.train) & set(corpus.valid)


def test_the_hash_of_a_corpus_follows_its_text(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one", encoding="utf-8")
    first = read_corpus(tmp_path).sha256
    file.write_text("two", encoding="utf-8")
    assert read_corpus(tmp_path).sha256 != first


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no training text"):
        read_corpus(tmp_path)
