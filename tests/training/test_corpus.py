import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from specdemo.training.corpus import (
    END,
    VOCAB_SIZE,
    Epochs,
    byte_tokenizer,
    read_corpus,
    retell,
    token_stream,
    train_tokenizer,
    windows,
)

STORY = (
    "Once upon a time, Lily had a red ball. She took the ball to the park. "
    "Lily saw a bird on the path. The bird wanted the ball. Lily was kind."
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([STORY, "The cat sat on the mat, and the dog ran 12 miles.\n\nThe end."])


def test_a_corpus_is_split_by_its_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(f"one{END}\ntwo\n{END}{END}", encoding="utf-8")
    (tmp_path / "a_valid.txt").write_text("three", encoding="utf-8")
    corpus = read_corpus(tmp_path)
    assert corpus.train == ["one", "two"]
    assert corpus.valid == ["three"]


def test_without_a_held_out_file_every_hundredth_document_is_held_out(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("seed", range(8))
def test_retelling_changes_one_word_and_copies_the_rest(seed: int) -> None:
    told = retell(STORY, random.Random(seed), 400)
    assert told is not None
    first, order, again = told.split("\n\n")
    new, old = order.removeprefix("Tell it again with ").removesuffix(".").split(", not ")
    assert STORY.startswith(first)
    assert old in first and new not in first
    changed = {(a, b) for a, b in zip(first.split(), again.split(), strict=True) if a != b}
    assert changed and all(b == a.replace(old, new) for a, b in changed)


def test_a_story_without_a_word_to_change_is_not_retold() -> None:
    assert retell("It rained. " * 20, random.Random(0), 400) is None


@pytest.mark.parametrize("text", ["Lily ran.", "naïve 東京 🐉 e\u0301", "a  b\t\n\n  c ", "3.14 <b>&amp;</b>"])
def test_the_tokenizer_gives_any_text_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_every_text_begins_with_the_end_of_the_one_before(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_to_id(END) == 0
    assert tokenizer.encode("Lily").ids[0] == 0
    assert tokenizer.encode("Lily", add_special_tokens=False).ids[0] != 0
    assert tokenizer.get_vocab_size() <= VOCAB_SIZE


def test_a_stream_is_cut_into_windows_in_order(tokenizer: Tokenizer) -> None:
    stream = token_stream([STORY, STORY], tokenizer)
    assert int((stream == 0).sum()) == 2
    rows = windows(stream, 7)
    assert rows.shape == (len(stream) // 7, 7)
    assert torch.equal(rows.flatten(), stream[: rows.numel()])


def test_epochs_differ_and_repeat(tokenizer: Tokenizer) -> None:
    epochs = Epochs([STORY.replace("park", f"park{i}") for i in range(30)], tokenizer)
    assert torch.equal(epochs.stream(3, 16), epochs.stream(3, 16))
    assert not torch.equal(epochs.stream(3, 16)[:50], epochs.stream(4, 16)[:50])
    batches = list(epochs.batches(0, 4, 16))
    assert all(b.shape == (4, 17) for b in batches)
    assert "Tell it again with" in tokenizer.decode(epochs.stream(0, 16).tolist())


def test_the_byte_tokenizer_gives_a_token_a_byte() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.get_vocab_size() == 257
    for text in ("a b\n\n", "naïve “quotes” 日本 🐉", "<b>&amp;"):
        ids = tokenizer.encode(text).ids
        assert ids[0] == 0 and len(ids) == 1 + len(text.encode())
        assert tokenizer.decode(ids) == text
