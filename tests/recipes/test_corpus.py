import random

import pytest
import torch
from tokenizers import Tokenizer

from recipes.corpus import VOCAB_SIZE, Epochs, byte_tokenizer, retell, token_stream, train_tokenizer
from specdemo.training.collect import END, windows

STORY = (
    "Once upon a time, Lily had a red ball. She took the ball to the park. "
    "Lily saw a bird on the path. The bird wanted the ball. Lily was kind."
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([STORY, "The cat sat on the mat, and the dog ran 12 miles.\n\nThe end."])


@pytest.mark.parametrize("seed", range(8))
def test_rewriting_changes_one_word_and_copies_the_rest(seed: int) -> None:
    edited = retell(STORY, random.Random(seed), 400)
    assert edited is not None
    first, order, again = edited.split("\n\n")
    new, old = order.removeprefix("Tell it again with ").removesuffix(".").split(", not ")
    assert STORY.startswith(first)
    assert old in first and new not in first
    changed = {(a, b) for a, b in zip(first.split(), again.split(), strict=True) if a != b}
    assert changed and all(b == a.replace(old, new) for a, b in changed)


def test_story_without_a_replaceable_word_is_not_rewritten() -> None:
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
