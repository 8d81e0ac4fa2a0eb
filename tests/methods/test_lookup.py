"""Drafters that look up the text: prompt lookup, suffix decoding and lookahead decoding."""

import gc
from collections import Counter
from dataclasses import replace

import pytest
import torch

from specdemo.core.protocol import Budget, Forward, GenerationConfig, Progress
from specdemo.core.sampling import Sampling
from specdemo.core.tree import ABSENT, depths, is_chain
from specdemo.engine.loop import generate
from specdemo.methods import load_drafter, suffix
from specdemo.models.target import HFTarget
from specdemo.models.toy import ToyTarget
from tests.generation import output, rows_of
from tests.models.tiny import VOCABULARY, build, texts


def propose(text, k, **options):
    drafter = load_drafter("ngram", ToyTarget(64), **options)
    drafter.start(1, Sampling(), torch.Generator())
    ids = torch.tensor([text])
    drafter.observe(Progress(ids[:, :-1], ids[:, 1:], [len(text) - 1]))
    return drafter.propose(Budget(k, k)).tokens[0].tolist()


REPEATED = [1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3]


@pytest.mark.parametrize(
    ("text", "k", "options", "drafted"),
    [
        ([1, 2, 3, 4, 8, 2, 9, 3, 5, 7, 1, 2, 3], 1, {}, [4]),  # the longest suffix, not the more recent short one
        ([1, 2, 5, 1, 2, 6, 1, 2], 1, {}, [6]),  # the most recent of equal matches
        ([1, 5, 2, 1], 2, {}, [5, 2]),
        ([1, 5, 2, 1], 2, {"min_n": 2}, []),
        (REPEATED, 1, {"max_n": 3}, [4]),
        (REPEATED, 1, {"max_n": 2}, [5]),
        ([9, 1, 2, 1, 2], 5, {}, [1, 2, 1, 2, 1]),  # a loop is drafted completely
        ([1, 2, 3, 4], 4, {}, []),
    ],
)
def test_prompt_lookup(text, k, options, drafted):
    assert propose(text, k, **options) == drafted


def with_tokenizer(target):
    """Return the target with a tokenizer of numbers."""
    target.tokenizer = lambda text, **_: {"input_ids": [int(word) for word in text.split()]}
    return target


@pytest.mark.parametrize("name", ["ngram", "suffix"])
@pytest.mark.parametrize(
    ("text", "corpus", "drafted"),
    [
        ([1, 2, 3], "9 2 3 5 6 7", [5, 6]),  # nothing repeats in the text
        ([8, 1, 2, 3, 4, 8, 1, 2, 3], "9 7 3 5 6 7", [4, 8]),  # the longer match, in the text
        ([3, 4, 4, 1, 2, 3], "9 1 2 3 5 6 7", [5, 6]),  # the longer match, in the corpus
        ([1, 2, 7], "5 6", []),
        ([4, 5, 6], "4 5 6", []),  # it ends there
    ],
)
def test_drafts_are_copied_from_a_corpus_too(name, text, corpus, drafted):
    drafter = load_drafter(name, with_tokenizer(ToyTarget(64)), corpus=corpus)
    for _ in range(2):  # the next run begins anew
        drafter.start(1, Sampling(), torch.Generator())
        ids = torch.tensor([text])
        drafter.observe(Progress(ids[:, :-1], ids[:, 1:], [len(text) - 1]))
        assert drafter.propose(Budget(2, 2)).tokens[0].tolist() == drafted


@pytest.mark.parametrize("name", ["ngram", "suffix"])
def test_an_expected_answer_is_drafted_and_the_text_stays_that_of_plain_decoding(name):
    target = with_tokenizer(HFTarget(build("llama")))
    prompt, config = texts(1, 9), GenerationConfig(40, stop_token_ids=(), budget=Budget(5, 5))
    plain = output(target, load_drafter("none", target), prompt, config)
    answer = " ".join(map(str, plain[0]))
    events = list(generate(target, load_drafter(name, target, corpus=answer), prompt, config))
    assert rows_of(events) == plain
    assert accepted(events) >= 25


@pytest.mark.parametrize("lookup", ["ngram", "suffix"])
@pytest.mark.parametrize(
    ("name", "options", "place"),
    [("adaptive", ["drafter"], 0), ("gated", ["drafter", "lookup"], 1), ("cascade", ["inner"], 0)],
)
def test_a_wrapper_passes_the_corpus_on_to_its_lookup(lookup, name, options, place):
    target = with_tokenizer(HFTarget(build("llama")))
    model = HFTarget(build("llama")) if name == "cascade" else None
    wrapper = load_drafter(name, target, model, corpus="9 2 3 5 6 7", **dict.fromkeys(options, lookup))
    inner = (wrapper.parts[1] if name == "cascade" else wrapper).drafters[place]
    inner.start(1, Sampling(), torch.Generator())
    inner.observe(Progress(torch.tensor([[1, 2]]), torch.tensor([[2, 3]]), [2]))
    assert inner.propose(Budget(2, 2)).tokens[0].tolist() == [5, 6]


def test_a_wrapper_around_a_draft_model_takes_no_corpus():
    with pytest.raises(ValueError, match="option 'corpus' is for 'suffix' and 'ngram', not for 'draft_model'"):
        load_drafter("adaptive", with_tokenizer(ToyTarget(64)), ToyTarget(64), corpus="9 2 3")


@pytest.mark.parametrize("name", ["ngram", "suffix"])
def test_a_corpus_is_limited_and_needs_a_tokenizer(name):
    with pytest.raises(ValueError, match="the corpus has 200,001 characters, the limit is 200,000; give fewer files"):
        load_drafter(name, ToyTarget(8), corpus="a" * 200_001)
    with pytest.raises(ValueError, match="has no tokenizer, which a corpus needs; leave the corpus out"):
        load_drafter(name, ToyTarget(8), corpus="a")


def test_options_must_agree():
    with pytest.raises(ValueError, match="must not exceed"):
        load_drafter("ngram", ToyTarget(8), min_n=4, max_n=2)


def drafter_after(text, target=None, **options):
    """Return a drafter that has observed one text."""
    drafter = load_drafter("suffix", target or ToyTarget(64), **options)
    drafter.start(1, Sampling(), torch.Generator())
    ids = torch.tensor([text])
    drafter.observe(Progress(ids[:, :-1], ids[:, 1:], [len(text) - 1]))
    return drafter


def propose_suffix(text, k, nodes=0, **options):
    return drafter_after(text, nodes=nodes, **options).propose(Budget(k, max(k, nodes)))


def drafted(*args, **options):
    return propose_suffix(*args, **options).tokens[0].tolist()


def answered(target, prompt, **options):
    drafter = load_drafter("suffix", target, remember=True, **options)
    return list(generate(target, drafter, prompt, GenerationConfig(30, stop_token_ids=())))


def accepted(events):
    return sum(len(e.path[0]) - 1 for e in events)


def test_a_longer_match_drafts_more():
    loop = [1, 2, 3, 1, 2, 3, 1, 2]
    assert drafted([1, 2, 3, 1], 9) == [2]
    assert drafted([1, 2, 3, 1, 2], 9) == [3, 1]
    assert drafted(loop, 9) == [3, 1, 2]  # the text ends there
    assert drafted(loop, 2) == [3, 1]
    assert drafted([1, 2, 3, 1], 9, max_spec_factor=2.0) == [2, 3]
    assert drafted([1, 2, 3, 1], 9, max_spec_offset=1.5) == [2, 3]


def test_the_probability_is_how_often_it_followed():
    text = [1, 2, 1, 3, 1, 2, 1]
    draft = propose_suffix(text, 4)
    assert draft.probs is None
    assert draft.tokens.tolist() == [[3, 1, 2]]  # after 1 2 1; after 1 alone 2 is more probable, but only for one token
    assert draft.confidence.tolist() == [[0.5, 1.0, 1.0]]  # at one of the two occurrences the text ended
    draft = propose_suffix([1, 2, 1, 3, 1, 2, 4, 1], 4)
    assert draft.tokens.tolist() == [[2]]
    assert draft.confidence[0].tolist() == pytest.approx([1 / 2])


def test_unlikely_paths_are_not_drafted():
    text = [1, 2, 1, 3, 1, 4, 1]
    assert len(drafted(text, 4)) == 1
    assert drafted(text, 4, min_token_prob=0.5) == []


def test_match_and_draft_are_no_longer_than_the_depth():
    loop = list(range(8)) * 4
    assert len(drafted(loop, 20, max_depth=8)) == 4
    assert len(drafted(loop, 20, max_depth=24)) == 12
    assert drafted([1, 2, 1, 2, 1], 5, max_depth=2) == [2]


def test_a_tree_takes_the_likeliest_paths_first():
    #       5 -> 1 three times, then 7 or 8; 5 -> 2 once
    text = [5, 1, 7, 5, 1, 7, 5, 1, 8, 5, 2, 9, 6, 5]
    draft = propose_suffix(text, 3, nodes=4, max_spec_factor=8.0)
    assert draft.tokens.tolist() == [[1, 7, 5, 2]]
    assert draft.parents.tolist() == [[0, 1, 2, 0]]
    assert draft.confidence[0].tolist() == pytest.approx([3 / 5, 2 / 3, 1, 1 / 5])
    assert propose_suffix(text, 1, nodes=5, max_spec_factor=8.0).tokens.tolist() == [[1, 2]]


def test_rows_may_draft_differently_in_suffix():
    drafter = load_drafter("suffix", ToyTarget(64))
    drafter.start(2, Sampling(), torch.Generator())
    ids = torch.tensor([[1, 2, 1, 2, 1], [1, 2, 3, 4, 1]])
    drafter.observe(Progress(ids[:, :-1], ids[:, 1:], [4, 3]))
    assert drafter.propose(Budget(2, 2)).tokens.tolist() == [[2, 1], [ABSENT, ABSENT]]


def test_the_tree_counts_every_piece():
    """Compares with direct counts while texts are added, extended and removed."""
    depth, tree = 5, suffix._SuffixTree(5)
    several = [row.tolist() for row in torch.randint(0, 3, (4, 60), generator=torch.Generator().manual_seed(0))]
    for ids in several:
        text = suffix._GrowingText()
        for place, token in enumerate(ids, start=1):
            tree.extend(text, token)
            for length, node in enumerate(reversed(text.endings), start=1):
                if length < depth:
                    assert node.children.keys() == following(several[: several.index(ids)], ids[:place], length).keys()
    check_counts(tree, several, depth)
    tree.remove(several[0])
    check_counts(tree, several[1:], depth)
    for ids in several[1:]:
        tree.remove(ids)
    assert not tree._root.children


def following(texts, growing, length):
    """Count the tokens that follow the last `length` tokens of the growing text, in it and in the other texts."""
    end = growing[-length:]
    pairs = [(t[i : i + length], t[i + length]) for t in (*texts, growing) for i in range(len(t) - length)]
    return Counter(token for piece, token in pairs if piece == end)


def check_counts(tree, several, depth):
    pieces = Counter(tuple(t[i : i + n]) for t in several for n in range(1, depth + 1) for i in range(len(t) - n + 1))
    for piece, count in pieces.items():
        node = tree._root
        for token in piece:
            node = node.children[token]
        assert node.count == count
        assert len(piece) == depth or all((*piece, t) in pieces for t in node.children)


def test_earlier_outputs_are_used_only_on_request():
    target, prompt = ToyTarget(64, seed=3), texts(1, 8)
    first, plain = (list(generate(target, load_drafter("suffix", target), prompt, GenerationConfig(30))) for _ in "ab")
    assert accepted(first) == accepted(plain)
    first, again = answered(target, prompt), answered(target, prompt)
    assert accepted(first) == accepted(plain)
    assert accepted(again) > accepted(first)
    assert [e.emitted for e in answered(ToyTarget(64, seed=3), prompt)] == [e.emitted for e in first]  # another model


def test_only_answers_are_remembered_and_only_long_ones():
    target = ToyTarget(64)
    drafter_after([1, 2, 3] * 10, target, remember=True).release()  # a prompt of 29 tokens, one output token
    assert propose_suffix([1, 2], 3, target=target, remember=True).nodes == 0


def test_the_oldest_answer_is_forgotten(monkeypatch):
    monkeypatch.setattr(suffix, "MAX_ANSWERS", 2)
    target = ToyTarget(64)
    for start in (10, 30, 50):
        drafter = drafter_after([0, start], target, remember=True, max_depth=3)
        ids = torch.arange(start, start + suffix.MIN_ANSWER_TOKENS)[None]
        drafter.observe(Progress(ids[:, :-1], ids[:, 1:], [suffix.MIN_ANSWER_TOKENS - 1]))
        drafter.release()
    options = {"target": target, "remember": True, "max_depth": 3}
    assert [drafted([0, start + 1], 3, **options) for start in (10, 30, 50)] == [[], [32], [52]]


def test_the_memory_ends_with_the_model():
    target = ToyTarget(64)
    before = len(suffix._AnswerMemory.of_models)
    drafter = load_drafter("suffix", target, remember=True)
    assert len(suffix._AnswerMemory.of_models) == before + 1
    del target, drafter
    gc.collect()
    assert len(suffix._AnswerMemory.of_models) == before


def test_greedy_output_of_trees_with_remembered_text_is_that_of_plain_decoding():
    options = {"nodes": 12, "max_spec_factor": 4.0, "remember": True}
    target = HFTarget(build("llama"))
    prompts = texts(3, 4).repeat(1, 3)
    config = GenerationConfig(30, budget=Budget(5, 12), stop_token_ids=())
    expected = rows_of(list(generate(target, load_drafter("none", target), prompts, config)))
    for _ in range(2):  # with and without remembered text
        events = list(generate(target, load_drafter("suffix", target, **options), prompts, config))
        assert rows_of(events) == expected
        assert accepted(events) > 0
    assert all(t < VOCABULARY for e in events for t in e.drafted[0])


K = Budget(7, 32)


def drafter_after_lookahead(prompts, **options):
    """Return a drafter that has observed the prompts, with the root 9 after them."""
    drafter = load_drafter("lookahead", ToyTarget(64), **options)
    drafter.start(len(prompts), Sampling(), torch.Generator())
    inputs = torch.tensor(prompts)
    roots = torch.full((len(prompts), 1), 9)
    drafter.observe(Progress(inputs, torch.cat([inputs[:, 1:], roots], 1), [inputs.shape[1]] * len(prompts)))
    return drafter


def observe_output(drafter, draft, outputs):
    """Observe a step without accepted draft tokens, in which outputs[s] is the target's argmax after slot s of the only
    row.
    """
    logits = torch.nn.functional.one_hot(torch.tensor([outputs]), 64).float()
    root = torch.tensor([[9]])
    drafter.observe(Progress(root, root, [1], forward=Forward(logits), slots=torch.zeros(1, 1, dtype=torch.int64)))


def run(target, prompts, name="lookahead", budget=K, **options):
    drafter = load_drafter(name, target, **options)
    return list(generate(target, drafter, prompts, GenerationConfig(40, budget=budget, stop_token_ids=())))


def test_the_window_hangs_below_the_root():
    drafter = drafter_after_lookahead([[4, 5, 6]], window=3, ngram=3, guesses=2)
    draft = drafter.propose(K)
    assert draft.probs is None
    assert (draft.tokens.tolist(), draft.parents.tolist()) == ([[4, 5, 6]], [[0, 1, 2]])
    observe_output(drafter, draft, [60, 14, 15, 16])
    draft = drafter.propose(K)  # 4 5 6, with the second level 14 15 16
    assert draft.tokens.tolist() == [[4, 14, 5, 15, 6, 16]]
    assert draft.parents.tolist() == [[0, 1, 1, 3, 3, 5]]
    observe_output(drafter, draft, [60, 61, 24, 61, 25, 61, 26])
    draft = drafter.propose(K)  # the oldest level moved into the pool
    assert draft.tokens.tolist() == [[14, 24, 15, 25, 16, 26]]


def test_columns_become_ngrams_that_are_checked():
    drafter = drafter_after_lookahead([[9, 5]], window=2, ngram=3, guesses=2)
    for outputs in ([0, 31, 32], [0, 0, 41, 0, 42]):  # 9 31 41 and 5 32 42
        observe_output(drafter, drafter.propose(K), outputs)
    # The guess after the root, then the window. 31 after the root occurs once.
    draft = drafter.propose(K)
    assert draft.tokens.tolist() == [[31, 41, 32, 42]]
    assert draft.parents.tolist() == [[0, 1, 1, 3]]


def test_pool_evicts_old_ngrams():
    drafter = drafter_after_lookahead([[9]], window=1, ngram=2, guesses=2)
    for token in (9, 9, 20, 9, 21, 9, 22, 9, 20):  # 9 20, 9 21, 9 22, and again 9 20
        draft = drafter.propose(K)
        observe_output(drafter, draft, [token] * (draft.nodes + 1))
    assert drafter.propose(K).tokens[0].tolist() == [20, 22]


def test_ngrams_are_the_targets_own_text():
    """The toy's next token depends only on the last token, so a column gives the continuation of its first token."""
    target = ToyTarget(32, seed=4, order=1)
    drafter = load_drafter("lookahead", target)
    for _ in generate(target, drafter, texts(1, 6) % 32, GenerationConfig(25, budget=Budget(10, 56))):
        grams = [(first, gram) for row in drafter._rows for first, grams_of in row.pool.items() for gram in grams_of]
    assert grams
    for first, gram in grams:
        for token in gram:
            assert int(target.next_probs([first]).argmax()) == token
            first = token


@pytest.mark.parametrize("supports_trees", [True, False])
@pytest.mark.parametrize(
    "budget", [Budget(d, n) for d, n in [(1, 1), (1, 7), (2, 2), (4, 4), (5, 31), (12, 12), (12, 90)]]
)
def test_any_budget(supports_trees, budget):
    target = ToyTarget(32, seed=5)
    target.capabilities = replace(target.capabilities, trees=supports_trees)
    drafter = load_drafter("lookahead", target)
    prompts = texts(2, 5) % 32
    plain = rows_of(run(target, prompts, "none"))
    emitted = [[], []]
    drafts = []
    propose = drafter.propose
    drafter.propose = lambda budget: drafts.append((budget, propose(budget))) or drafts[-1][1]
    for event in generate(target, drafter, prompts, GenerationConfig(40, budget=budget, stop_token_ids=())):
        emitted = [row + new for row, new in zip(emitted, event.emitted, strict=True)]
    assert emitted == plain
    for ceiling, draft in drafts:
        assert draft.nodes <= ceiling.nodes
        assert not draft.nodes or int(depths(draft.parents).max()) <= ceiling.depth
        assert supports_trees or is_chain(draft.parents)
        for tokens, parents in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
            nodes = [(p, t) for p, t in zip(parents, tokens, strict=True) if t != ABSENT]
            assert len(set(nodes)) == len(nodes)  # nothing is verified twice


def test_chains_too_fill_the_pool():
    target = ToyTarget(8, seed=5, order=1)
    target.capabilities = replace(target.capabilities, trees=False)
    assert any(len(e.path[0]) > 2 for e in run(target, texts(1, 5) % 8))


def test_a_pass_over_another_draft_is_not_read():
    drafter = drafter_after_lookahead([[4, 5, 6]], window=3, ngram=3)
    drafter.propose(K)
    root = torch.tensor([[9]])
    for forward in (None, Forward(torch.zeros(1, 2, 64))):
        drafter.observe(Progress(root, root, [1], forward=forward))
    assert drafter.propose(K).tokens.tolist() == [[4, 5, 6]]
