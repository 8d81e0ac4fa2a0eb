"""Draft models, also with another vocabulary: text of tokens, retokenization of a growing text, lossless output."""

from collections import Counter

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdemo.bench.losslessness import chi_square
from specdemo.bench.prompts import PROMPTS
from specdemo.core.protocol import Budget, GenerationConfig, Progress
from specdemo.core.sampling import Sampling
from specdemo.core.tree import ABSENT
from specdemo.engine.loop import generate
from specdemo.methods import load_drafter, vocabularies
from specdemo.methods.vocabularies import MAX_TAIL, RowText, TokenBytes, VocabBridge
from specdemo.models.load import load_target
from specdemo.models.target import HFTarget
from specdemo.models.text import encode
from specdemo.presets.files import preset
from specdemo.training.losses import LOSSES, Objective
from tests.generation import output, rows_of
from tests.models.tiny import build, texts

LETTERS = "abcd"
BYTE_LEVEL = pre_tokenizers.ByteLevel(False, use_regex=False), decoders.ByteLevel()


def byte_level(*words):
    """Return a tokenizer of letters, a space and some words in GPT-2's byte-level form."""
    tokens = ["<end>", *LETTERS, "Ġ", *words]
    return wrapped(
        {t: i for i, t in enumerate(tokens)}, pre_tokenizers.ByteLevel(False, use_regex=False), decoders.ByteLevel()
    )


def sentence_piece(*words):
    tokens = ["</s>", "▁", *LETTERS, *(f"<0x{i:02X}>" for i in (0x0A, 0xC3, 0xA9)), *words]
    split = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    return wrapped({t: i for i, t in enumerate(tokens)}, split, decoders.Metaspace())


def wrapped(vocabulary, split, decoder):
    merges = []
    for token in vocabulary:  # merges of words, letter by letter from the left
        if len(token) > 1 and not token.startswith("<"):
            merges += [(token[:n], token[n]) for n in range(1, len(token)) if token[:n] in vocabulary]
    tokenizer = Tokenizer(models.BPE(vocabulary, list(dict.fromkeys(merges)), byte_fallback="<0x0A>" in vocabulary))
    tokenizer.pre_tokenizer, tokenizer.decoder = split, decoder
    end = next(iter(vocabulary))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{end} $A", special_tokens=[(end, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, bos_token=end)


def renamed(tokenizer, names):
    vocabulary = {names.get(t, t): i for t, i in tokenizer.get_vocab().items()}
    return wrapped(dict(sorted(vocabulary.items(), key=lambda item: item[1])), *BYTE_LEVEL)


def model(tokenizer, seed):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=256, initializer_range=0.5, **sizes)
    return HFTarget(LlamaForCausalLM(config).eval().requires_grad_(False), tokenizer, f"model {seed}")


TARGET_WORDS = ("Ã", "©", "Ġa", "Ġab", "ab", "Ġabc", "cd")
DRAFT_WORDS = ("▁a", "▁ab", "ab", "▁abd", "▁b")


@pytest.fixture(scope="module")
def pair():
    return model(byte_level(*TARGET_WORDS), 1), model(sentence_piece(*DRAFT_WORDS), 2)


def test_tokens_are_shared_by_what_they_write(pair):
    bridge = VocabBridge(*pair)
    words = pair[0].tokenizer.convert_ids_to_tokens(bridge.target_ids.tolist())
    draft_tokens = pair[1].tokenizer.convert_ids_to_tokens(bridge.draft_ids.tolist())
    assert dict(zip(words, draft_tokens, strict=True)) == {
        "<end>": "</s>", **{c: c for c in LETTERS}, "Ġ": "▁", "Ã": "<0xC3>", "©": "<0xA9>",
        "Ġa": "▁a", "Ġab": "▁ab", "ab": "ab",
    }  # fmt: skip
    assert (bridge.target_overlap, bridge.draft_overlap) == (10 / 13, 10 / 14)  # the end tokens are spelled differently


GEMMA = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


class WordList:
    """A tokenizer that shows its vocabulary only."""

    def __init__(self, *words):
        self.words = words

    def get_vocab(self):
        return {word: i for i, word in enumerate(self.words)}

    def encode(self, text, add_special_tokens=False):
        return [0]


class OfFile(WordList):
    """A tokenizer that reads its own tokens, as those of GGUF files do."""

    def token_bytes(self, token):
        return [b"\n", b" the", b"", b"x"][token]


def decoded(decoder, *words):
    return wrapped({word: i for i, word in enumerate(words)}, pre_tokenizers.ByteLevel(False), decoder)


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        (WordList("\n", "▁the", "<0x0A>", "Ġ"), {0: b"\n", 1: b" the", 2: b"\n", 3: "Ġ".encode()}),
        (WordList("Ċ", "Ġthe", "▁"), {0: "Ċ".encode(), 1: "Ġthe".encode(), 2: b" "}),
        (WordList("Ċ", "Ġthe", "Ġ"), {0: b"\n", 1: b" the", 2: b" "}),
        (decoded(GEMMA, "\n", "▁the", "<0x0A>", "Ġ"), {0: b"\n", 1: b" the", 2: b"\n", 3: "Ġ".encode()}),
        (decoded(decoders.ByteLevel(), "a", "Ġthe", "Ċ", "日本"), {0: b"a", 1: b" the", 2: b"\n", 3: "日本".encode()}),
        (decoded(decoders.Sequence([decoders.ByteLevel()]), "a", "Ċ"), {0: b"a", 1: b"\n"}),
        (OfFile("Ċ", "Ġthe", "[PAD2]", "[PAD3]"), {0: b"\n", 1: b" the"}),
    ],
)
def test_tokens_have_the_bytes_that_the_decoder_writes(tokenizer, expected):
    assert TokenBytes(tokenizer, 9).bytes_of == expected


def test_byte_tokens_stand_only_for_bytes_without_another_token():
    """As SentencePiece encodes: <0x39> comes first in Gemma's vocabulary, but 9 is written with the token 9."""
    tokens = TokenBytes(decoded(GEMMA, "<0x0A>", "<0x39>", "<0xC3>", "▁", "9", "\n", "9"), 9)
    assert tokens.id_of == {b"\n": 5, b"9": 6, b"\xc3": 2, b" ": 3}


def test_a_real_byte_level_file_and_folder_agree_with_decode():
    tokenizer = load_target("stories").tokenizer
    spelling = TokenBytes(tokenizer, len(tokenizer))
    for token, written in spelling.bytes_of.items():
        assert written.decode("utf-8", "replace") == tokenizer.decode([token])


@pytest.mark.parametrize(
    ("target", "draft", "difference"),
    [
        (("a", "b"), ("a", "b", "[PAD2]"), None),
        (("a", "b", "[PAD2]", "[PAD3]"), ("a", "b", "[PAD2]"), None),
        (("a", "b", "<unused2>"), ("a", "b", "<|dummy_7|>"), None),
        (("a", "b"), ("a", "b", "[PAD]"), "it has 1 more tokens"),  # a token with a meaning
        (("a", "b", "[PAD2]"), ("a", "c", "[PAD2]"), "1 of 2 tokens differ (first 'b': id 1 in the target, absent"),
    ],
)
def test_padding_makes_no_other_vocabulary(target, draft, difference):
    class Plain(WordList):
        all_special_tokens = ()

    found = vocabularies._compare_tokenizers(Plain(*target), Plain(*draft))
    assert found == difference or found.startswith(difference)


def test_continued_text_gets_no_extra_space(pair):
    spelling = TokenBytes(pair[1].tokenizer, pair[1].vocab_size)
    tokens = pair[1].tokenizer.convert_ids_to_tokens
    assert tokens(spelling.encode_continuation("ab")) == ["ab"] and tokens(spelling.encode_continuation(" ab")) == [
        "▁ab"
    ]
    assert tokens(spelling.encode_from_start("ab")) == ["</s>", "▁ab"]
    assert spelling.decode(spelling.encode_continuation(" abé")) == " abé".encode()


def test_row_equals_full_text_tokenization(pair):
    text, generator = "", torch.Generator().manual_seed(0)
    reading = RowText(TokenBytes(pair[1].tokenizer, pair[1].vocab_size))
    for _ in range(4 * MAX_TAIL):
        letter = "abcd é"[int(torch.randint(0, 6, (1,), generator=generator))]
        text += letter
        for byte in letter.encode():
            ids = reading.extend(bytes([byte]))
    assert ids == reading.tokens.encode_from_start(text)
    assert len(reading.tail) <= MAX_TAIL and ids[: len(reading.ids)] == reading.ids


@pytest.mark.parametrize("swapped", [False, True])
def test_greedy_output_equals_plain_decoding(pair, swapped):
    target, draft = reversed(pair) if swapped else pair
    ids = torch.tensor([target.tokenizer.encode(text)[:4] for text in ("ab abc d", "d cab ab")])
    config = GenerationConfig(40, budget=Budget(4, 4), stop_token_ids=())
    drafter = load_drafter("draft_model", target, draft)
    events = list(generate(target, drafter, ids, config))
    assert rows_of(events) == output(target, load_drafter("none", target), ids, config)
    drafts = [[t for t in row if t != ABSENT] for e in events for row in e.drafted]
    assert any(drafts)
    assert "The draft model has another tokenizer" in drafter.note and drafter.max_length == draft.max_length
    assert "drafts only the shared tokens" in drafter.note


def test_models_without_a_shared_token_are_refused(pair):
    other = wrapped({"<none>": 0, "é": 1, "ü": 2}, *BYTE_LEVEL)
    with pytest.raises(ValueError, match="model 4 shares no token with model 1; choose a draft model of the same"):
        load_drafter("draft_model", pair[0], model(other, 4))


def test_equal_model_with_another_vocabulary_is_accepted(pair):
    """The same weights with two tokenizers that number the letters differently: all draft tokens are the target's
    tokens.
    """
    first, mixed = model(byte_level(), 3), byte_level()
    letters = dict(zip("abcd", "dcba", strict=True))
    mixed = renamed(mixed, letters)
    order = [first.tokenizer.convert_tokens_to_ids(t) for t in mixed.convert_ids_to_tokens(range(len(mixed)))]
    second = model(mixed, 3)
    second.model.model.embed_tokens.weight.copy_(first.model.model.embed_tokens.weight[order])
    second.model.lm_head.weight.copy_(first.model.lm_head.weight[order])
    drafter = load_drafter("draft_model", first, second)
    assert "drafts only the shared tokens" in drafter.note and "100 % of the target's tokens" in drafter.note
    ids = torch.tensor([first.tokenizer.encode("ab abc d")])
    for temperature in (0.0, 1.0):
        config = GenerationConfig(40, Sampling(temperature), Budget(3, 3), stop_token_ids=())
        events = [e for e in generate(first, drafter, ids, config) if e.index]
        accepted = sum(len(e.path[0]) - 1 for e in events) / sum(len(e.drafted[0]) for e in events)
        assert accepted == 1.0


def test_sampling_is_exact(pair):
    target, draft = pair
    ids = torch.tensor([target.tokenizer.encode("ab abc d")] * 2048)
    counts = []
    for seed, drafter in enumerate((load_drafter("none", target), load_drafter("draft_model", target, draft))):
        config = GenerationConfig(3, Sampling(1.0), Budget(2, 2), seed=seed, stop_token_ids=())
        rows = output(target, drafter, ids, config)
        counts.append({pair: rows.count(list(pair)) for pair in {tuple(row) for row in rows}})
    assert chi_square(*counts).p > 0.001


@pytest.fixture(scope="module")
def shipped():
    chosen = preset("embedded-other-vocabulary")
    target = load_target(chosen.target)
    return target, load_drafter("draft_model", target, chosen.lanes[0].model), chosen.lanes[0].budget


def test_the_shipped_pair_writes_the_targets_text(shipped):
    target, drafter, budget = shipped
    assert "drafts only the shared tokens. 76 % of the target's tokens are shared" in drafter.note
    accepted = 0
    for prompt in PROMPTS[:3]:
        ids = torch.tensor([encode(target.tokenizer, prompt, target.max_length)])
        config = GenerationConfig(32, budget=budget, stop_token_ids=())
        drafted = list(generate(target, drafter, ids, config))
        assert rows_of(drafted) == output(target, load_drafter("none", target), ids, config)
        accepted += sum(len(e.path[0]) - 1 for e in drafted)
    assert accepted > 3 * 32 / 3  # at least a third of the text is drafted


@pytest.mark.release
def test_the_shipped_pair_samples_as_its_target(shipped):
    target, drafter, budget = shipped
    ids = torch.tensor([encode(target.tokenizer, PROMPTS[0], target.max_length)] * 512)
    samples = []
    for seed, of in enumerate((load_drafter("none", target), drafter)):
        config = GenerationConfig(3, Sampling(0.8), budget, seed=seed, stop_token_ids=())
        samples.append(output(target, of, ids, config))
    for place in (1, 2):
        counts = [Counter(row[place] for row in rows) for rows in samples]
        assert chi_square(*counts).p > 0.001


def test_a_draft_of_another_vocabulary_does_not_learn(pair):
    target, draft = pair
    drafter = load_drafter("draft_model", target, draft)
    with pytest.raises(ValueError, match="cannot learn from the target's tokens"):
        drafter.loss(None)
    with pytest.raises(ValueError, match="has another tokenizer than model 1: .*; choose a draft model of the same"):
        load_drafter("cascade", target, draft)


@pytest.mark.parametrize("context, drafted", [(48, [4, 0]), (32, [0, 0])])
def test_drafts_end_with_the_draft_context(context, drafted):
    target, short = HFTarget(build("llama")), build("llama")
    short.config.max_position_embeddings = context
    drafter = load_drafter("draft_model", target, short)
    assert drafter.max_length == context
    config = GenerationConfig(20, budget=Budget(4, 4), stop_token_ids=())
    events = list(generate(target, drafter, texts(1, 40), config))
    assert [len(events[i].drafted[0]) for i in (1, -1)] == drafted
    assert rows_of(events) == output(target, load_drafter("none", target), texts(1, 40), config)


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_compares_the_next_tokens_of_both_models(loss):
    target = HFTarget(build("llama"))
    drafter = load_drafter("draft_model", target, build("llama"))
    drafter.objective = Objective(loss)
    inputs = texts(2, 20)
    probs = torch.randn(2, 20, target.vocab_size, generator=torch.Generator().manual_seed(0)).softmax(-1)
    value, _ = drafter.loss(Progress(inputs, inputs.roll(-1, 1), [20, 20], probs=probs))
    with torch.no_grad():
        logits = drafter.head(inputs).logits.view(40, 1, -1)
        expected = LOSSES[loss](logits, probs.view(40, 1, -1), torch.ones(40, 1, dtype=torch.bool)).mean()
    torch.testing.assert_close(value.detach(), expected)
    hard, metrics = drafter.loss(Progress(inputs, inputs.roll(-1, 1), [20, 20]))
    one_hot = torch.nn.functional.one_hot(inputs.roll(-1, 1), target.vocab_size).float().view(40, 1, -1)
    expected = LOSSES[loss](logits, one_hot, torch.ones(40, 1, dtype=torch.bool)).mean()
    torch.testing.assert_close(hard.detach(), expected)
    agree = (logits.argmax(-1) == one_hot.argmax(-1)).float().mean()
    assert metrics["agree_1"] == pytest.approx(float(agree))
