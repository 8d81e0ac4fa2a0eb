"""Prefix reuse: the logits equal those of a fresh target, and only the new tokens are read."""

import gc
import weakref

import pytest
import torch

from specdemo.core.tree import chain_parents
from specdemo.models.prefix_reuse import PrefixCachedTarget
from specdemo.models.runner import Runner
from specdemo.models.target import HFTarget
from tests.models.tiny import CHAINS, TREES, VOCABULARY, build, fresh, texts

PROMPT, ANSWER, QUESTION = 13, 4, 6  # in tokens; longer than every window of the tiny models
TAPS = (0, 2, -1)


@pytest.fixture(scope="module", params=[*TREES, *CHAINS])
def model(request):
    return request.param, build(request.param)


@pytest.fixture
def target():
    return PrefixCachedTarget(build("llama"))


@pytest.fixture
def tokens_read(monkeypatch):
    """Record the number of tokens in every pass of a prefix-caching target."""
    seen, inside = [], []
    run = Runner.__call__

    def watched(method):
        def called(self, *given, **named):
            inside.append(method)
            try:
                return method(self, *given, **named)
            finally:
                inside.pop()

        return called

    def counted(self, tokens, *more, **named):
        if inside:
            seen.append(tokens.shape[1])
        return run(self, tokens, *more, **named)

    for name in ("start", "forward", "commit"):
        monkeypatch.setattr(PrefixCachedTarget, name, watched(getattr(PrefixCachedTarget, name)))
    monkeypatch.setattr(Runner, "__call__", counted)
    return seen


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=3e-4)


def write_turn(target, prompt, seed=1, taps=TAPS):
    """Read a prompt, write an answer in two passes with one rejected draft token each, release, and return the text in
    the history.
    """
    target.start(prompt, taps, reserve=8)
    text = prompt
    for step in range(2):
        tokens = texts(1, 3, seed=seed + step)
        target.forward(tokens, chain_parents(1, 2, tokens.device), taps)
        target.commit([[0, 1]])
        text = torch.cat([text, tokens[:, :2]], 1)
    target.release()
    return text


def ids_of(text, seed=9):
    return torch.cat([text, texts(1, QUESTION, seed=seed)], 1)


def check_equals_fresh(target, text, taps=TAPS, **named):
    """Check that the target gives the same logits and hidden states as a fresh one."""
    forward, expected = target.start(text, taps, **named), HFTarget(target.model).start(text, taps)
    close(forward.logits, expected.logits)
    assert forward.hidden.keys() == expected.hidden.keys()
    for tap, hidden in expected.hidden.items():
        close(forward.hidden[tap], hidden)
    following = texts(1, 1, seed=99)
    logits = target.forward(following, following[:, 1:], taps).logits[0, 0]
    close(logits, fresh(target.model, [*text[0].tolist(), *following[0].tolist()]))


def test_the_next_turns_are_read_from_where_they_are_new(model, tokens_read):
    name, weights = model
    target = PrefixCachedTarget(weights)
    text = write_turn(target, texts(1, PROMPT))
    for seed in (20, 30):
        prompt = ids_of(text, seed)
        tokens_read.clear()
        check_equals_fresh(target, prompt)
        at_once = name in TREES or target._multi_token  # some continue one token at a time
        assert target.cached_tokens == (text.shape[1] if at_once else 0)
        assert tokens_read == [QUESTION if at_once else prompt.shape[1], 1]
        text = write_turn(target, prompt, seed)
        assert target.length == [text.shape[1]]


def test_an_answer_that_was_written_otherwise_is_read_from_there(target, tokens_read):
    text = write_turn(target, texts(1, PROMPT))
    prompt = ids_of(text)
    prompt[0, PROMPT + 1] = (prompt[0, PROMPT + 1] + 1) % VOCABULARY
    tokens_read.clear()
    check_equals_fresh(target, prompt)
    assert target.cached_tokens == PROMPT + 1 and tokens_read[0] == ANSWER - 1 + QUESTION


def test_a_replayed_answer_that_was_written_otherwise_is_read_from_a_snapshot_or_from_the_start():
    target = PrefixCachedTarget(build("gpt_neo"))
    text = write_turn(target, texts(1, PROMPT))
    # A token of the last pass, and of the one before.
    for place, cached in ((PROMPT + ANSWER - 1, PROMPT + ANSWER - 2), (PROMPT + 1, 0)):
        prompt = ids_of(text)
        prompt[0, place] = (prompt[0, place] + 1) % VOCABULARY
        check_equals_fresh(target, prompt)
        assert target.cached_tokens == cached
        text = write_turn(target, text[:, :PROMPT])


@pytest.mark.parametrize("name", ["llama", "gpt_neo"])
def test_the_same_text_again_is_read_in_its_last_token(name, tokens_read):
    target = PrefixCachedTarget(build(name))
    text = texts(1, PROMPT)
    target.start(text)
    following = texts(1, 3, seed=2)
    target.forward(following, chain_parents(1, 2, following.device))  # a pass that is not committed
    target.release()
    again = torch.cat([text, texts(1, 1, seed=5)], 1)
    tokens_read.clear()
    check_equals_fresh(target, again, ())
    assert target.cached_tokens == PROMPT and tokens_read[0] == 1
    target.release()
    check_equals_fresh(target, text, ())
    assert target.cached_tokens == (PROMPT - 1 if name == "llama" else 0)


def test_cropped_tokens_are_not_cached(target):
    """This is what a draft model does after a rejection."""
    text, guess, other = texts(1, PROMPT), texts(1, 4, seed=2), texts(1, 2, seed=3)
    alone = text[:, :0]
    target.start(text, TAPS)
    for token in guess.split(1, 1):
        target.forward(token, alone, TAPS)
        target.commit([[0]])
    target.crop([PROMPT + 1])
    target.forward(other, chain_parents(1, 1, other.device), TAPS)
    target.commit([[0, 1]])
    target.crop([PROMPT + 2])
    target.release()
    check_equals_fresh(target, ids_of(torch.cat([text, guess[:, :1], other], 1)))
    assert target.cached_tokens == PROMPT + 2


def test_other_taps_other_texts_and_batches_are_read_from_their_start(target):
    text = write_turn(target, texts(1, PROMPT))
    check_equals_fresh(target, ids_of(text), (1, *TAPS))
    assert target.cached_tokens == 0
    target.release()
    check_equals_fresh(target, ids_of(text), (2,))  # a subset of the cached taps
    assert target.cached_tokens == text.shape[1] + QUESTION - 1
    target.release()
    check_equals_fresh(target, (texts(1, PROMPT) + 1) % VOCABULARY)
    assert target.cached_tokens == 0
    rows = texts(2, PROMPT, seed=4)
    target.release()
    target.start(rows)
    assert target.cached_tokens == 0 and target.length == [PROMPT] * 2
    target.forward(rows[:, :1], rows[:, :0])
    target.commit([[0], [0]])
    target.release()
    assert target.history_bytes == 0


@pytest.mark.parametrize("name", ["llama", "gpt_neo", "qwen3_next"])
def test_discard_turn_preserves_the_cached_prefix(name):
    target = PrefixCachedTarget(build(name))
    text = write_turn(target, texts(1, PROMPT))
    prompt = ids_of(text)
    for _ in range(2):  # like a warm-up and a run
        write_turn(target, prompt)
        assert target.cached_tokens == text.shape[1]
        target.discard_turn()
        assert target.length == [text.shape[1]]
    check_equals_fresh(target, prompt)
    assert target.cached_tokens == text.shape[1]
    target.forget()
    write_turn(target, prompt)
    target.discard_turn()
    assert target.history_bytes == 0 and target.length == []


def test_memory_grows_by_what_follows_and_is_freed(target):
    prompt, other = ids_of(write_turn(target, texts(1, PROMPT))), HFTarget(target.model)
    for reserve in (50, 60):
        target.start(prompt, TAPS, reserve=reserve)
        other.start(prompt, TAPS, reserve=reserve)
        hidden = len(TAPS) * 4 * target.hidden_size * prompt.shape[1]
        assert target.history_bytes == other.history_bytes + hidden
    target.release()
    slab = weakref.ref(target._history.store.slabs[0].keys)
    target.forget()
    gc.collect()
    assert slab() is None and target.history_bytes == 0


def test_short_memory_disables_the_prefix_cache(target, monkeypatch):
    def full(*tensors):
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("specdemo.models.prefix_reuse._joined", full)
        text = write_turn(target, texts(1, PROMPT))
    assert target.history_bytes == 0
    check_equals_fresh(target, ids_of(text))
    assert target.cached_tokens == 0


def test_a_text_that_could_not_be_read_leaves_nothing(target):
    text = write_turn(target, texts(1, PROMPT))
    with pytest.raises(ValueError, match="is 96 tokens, not 97"):
        target.start(torch.cat([text, texts(1, 97 - text.shape[1])], 1))
    target.release()
    assert target.history_bytes == 0
    check_equals_fresh(target, ids_of(text))
