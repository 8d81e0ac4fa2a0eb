"""Encoding and decoding: the pieces of any token sequence add up to its text, even if tokens split characters."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from specdemo.models.text import Detokenizer, encode, sample_tokens, token_text

TEXTS = ["Once upon a time there was a dog. " * 4, "def f(x):\n    return x\n" * 4]
HARD = "naïve café — 日本語のテキスト 🙂👩‍👩‍👧‍👦 Ω≈ç√ \t\n  end"


def byte_level():
    """Return a byte-level BPE tokenizer trained only on English: all other characters are split into bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )


def word_pieces():
    """Return a tokenizer that marks spaces at the start of words and drops the first one, like SentencePiece models."""
    words = {w: i for i, w in enumerate(["<s>", "▁the", "▁dog", "s", "▁", "."])}
    tokenizer = Tokenizer(models.BPE(words, []))
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", clean_up_tokenization_spaces=False)


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level()


def pieces(tokenizer, prompt, ids):
    detokenizer = Detokenizer(tokenizer, prompt)
    added = detokenizer.push(ids)
    assert len(added) == len(ids)
    return [*added, detokenizer.flush()]


@given(text=st.text(min_size=1, max_size=60), cut=st.integers(0, 20))
@example(text="𐀀𐀀", cut=11)  # the last 6 prompt tokens are 3 bytes of each character
def test_pieces_add_up_to_the_text(text, cut):
    tokenizer = BYTE_LEVEL
    ids = tokenizer("A dog. " + text)["input_ids"]
    cut = min(cut, len(ids) - 1)
    joined = "".join(pieces(tokenizer, ids[:cut], ids[cut:]))
    decoded, before = tokenizer.decode(ids), tokenizer.decode(ids[:cut]).rstrip("\ufffd")
    assert joined == decoded[len(before) :]


BYTE_LEVEL = byte_level()


def test_split_character_appears_when_complete(tokenizer):
    ids = tokenizer("a🙂b")["input_ids"]
    assert len(ids) == 6
    assert pieces(tokenizer, [], ids) == ["a", "", "", "", "🙂", "b", ""]


def test_hard_text_survives_every_way_of_being_pushed(tokenizer):
    ids = tokenizer(HARD)["input_ids"]
    detokenizer = Detokenizer(tokenizer, ids[:1])
    text = ""
    for start in range(1, len(ids), 5):
        text += "".join(detokenizer.push(ids[start : start + 5]))
    assert tokenizer.decode(ids[:1]) + text + detokenizer.flush() == HARD


def test_bytes_that_never_become_a_character_come_at_the_end(tokenizer):
    ids = tokenizer("a🙂")["input_ids"][:-1]
    *added, rest = pieces(tokenizer, [], ids)
    assert added == ["a", "", "", ""] and rest == "\ufffd"
    assert Detokenizer(tokenizer, []).flush() == ""


def test_special_tokens_add_no_text_and_have_a_name(tokenizer):
    dog = tokenizer("dog")["input_ids"]
    assert "".join(pieces(tokenizer, [], [*dog, 0, *dog])) == "dogdog"
    assert token_text(tokenizer, 0) == "<|endoftext|>"


def test_leading_spaces_are_preserved():
    tokenizer = word_pieces()
    assert pieces(tokenizer, [0, 1], [2, 3, 1, 2, 5]) == [" dog", "s", " the", " dog", ".", ""]
    assert [token_text(tokenizer, t) for t in (1, 2, 3, 5)] == [" the", " dog", "s", "."]


def test_token_text_of_bytes(tokenizer):
    byte = tokenizer("🙂")["input_ids"][0]
    assert token_text(tokenizer, byte) == "\ufffd"
    assert token_text(tokenizer, tokenizer(" dog")["input_ids"][0]).startswith(" ")


@pytest.mark.parametrize(
    ("pattern", "before", "after"), [("$0", [], []), ("$A", [], []), ("<s> $A", [0], []), ("<s> $A </s>", [0], [1])]
)
def test_a_text_gets_the_special_tokens_that_its_tokenizer_adds(pattern, before, after):
    """Models such as SmolLM2 and GPT-2 name a beginning-of-sequence token and were trained on texts without it."""
    words = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "dog": 3}, "a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    if pattern != "$0":  # a tokenizer without a post-processor adds nothing
        words.post_processor = processors.TemplateProcessing(pattern, special_tokens=[("<s>", 0), ("</s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>")
    assert encode(tokenizer, "a dog", 100) == [*before, 2, 3, *after] == tokenizer("a dog")["input_ids"]
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert encode(tokenizer, chat("a dog"), 100) == [2, 3]  # a template writes its special tokens itself


def chat(*texts):
    return [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, texts, strict=False)]


def test_a_conversation_is_written_by_the_chat_template():
    tokenizer = byte_level()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]"
    text = chat("A dog.", "Yes?", "A dog, I say.")
    ids = encode(tokenizer, text, 100)
    assert ids == tokenizer.apply_chat_template(text, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert tokenizer.decode(ids) == "[user] A dog.\n[assistant] Yes?\n[user] A dog, I say.\n[assistant]"
    assert encode(tokenizer, "A dog.", 100) == tokenizer("A dog.")["input_ids"]  # plain text does not use the template
    with pytest.raises(ValueError, match=f"the conversation has {len(ids)} tokens, the limit is 9"):
        encode(tokenizer, text, 9)


THINKING = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}[assistant]"


def test_thinking_is_an_argument_of_the_chat_template():
    tokenizer = byte_level()
    tokenizer.chat_template = THINKING
    written = {
        mode: tokenizer.decode(encode(tokenizer, chat("A dog."), 100, mode)) for mode in ("default", "on", "off")
    }
    assert written == {"default": "[assistant]", "on": "[assistant]", "off": "<think></think>[assistant]"}
    for template, prompt in ((THINKING, "A dog."), ("[assistant]", chat("A dog."))):
        tokenizer.chat_template = template
        with pytest.raises(ValueError, match="has no thinking mode here; leave thinking at default"):
            encode(tokenizer, prompt, 100, "off")


def test_a_conversation_that_the_template_does_not_take_is_one_line():
    tokenizer = byte_level()
    tokenizer.chat_template = "{{ raise_exception('system prompts are not supported') }}"
    with pytest.raises(ValueError, match="rejects this conversation: system prompts are not supported"):
        encode(tokenizer, chat("A dog."), 100)
    with pytest.raises(ValueError, match="the prompt is empty"):
        encode(tokenizer, chat(" "), 100)


def test_encode_refuses_what_cannot_be_continued(tokenizer):
    with pytest.raises(ValueError, match="the prompt is empty"):
        encode(tokenizer, " \n", 100)
    length = len(encode(tokenizer, "A dog.", 100))
    assert len(encode(tokenizer, "A dog.", length)) == length
    with pytest.raises(ValueError, match=f"has {length} tokens, the limit is {length - 1}; shorten it"):
        encode(tokenizer, "A dog.", length - 1)
    with pytest.raises(ValueError, match="max_new_tokens fills the model's context; reduce it"):
        encode(tokenizer, "A dog.", -7)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([5, 6, 90, 5], [5, 6, 29, 5, 7, 14]),
        ([], [7, 14, 21, 28, 35, 42]),
        ([0] * 9, [7, 14, 21, 28, 35, 42]),  # nothing but the unknown word
        ([None, 3, 4, 5], [7, 14, 21, 28, 35, 42]),
        ([[3, 4, 5]], [7, 14, 21, 28, 35, 42]),
    ],
)
def test_texts_for_checks_come_from_any_tokenizer(ids, expected):
    assert sample_tokens(lambda *_, **__: {"input_ids": ids}, 6, 61) == expected


@pytest.mark.parametrize("size", range(2, 22))
def test_texts_for_checks_have_different_tokens_in_small_vocabularies(size):
    assert len({*sample_tokens(None, 16, size)}) >= min(size, 2)
