import gc
from collections import Counter

import pytest
import torch

from specdemo.core.protocol import Budget, GenerationConfig, Progress
from specdemo.core.sampling import Sampling
from specdemo.core.tree import ABSENT
from specdemo.engine.loop import generate
from specdemo.methods import load_drafter, suffix
from specdemo.models.target import HFTarget
from specdemo.models.toy import ToyTarget
from tests.generation import rows_of
from tests.models.tiny import VOCABULARY, build, texts


def drafter_after(text, target=None, **options):
    """Return a drafter that has observed one text."""
    drafter = load_drafter("suffix", target or ToyTarget(64), **options)
    drafter.start(1, Sampling(), torch.Generator())
    ids = torch.tensor([text])
    drafter.observe(Progress(ids[:, :-1], ids[:, 1:], [len(text) - 1]))
    return drafter


def propose(text, k, nodes=0, **options):
    return drafter_after(text, nodes=nodes, **options).propose(Budget(k, max(k, nodes)))


def drafted(*args, **options):
    return propose(*args, **options).tokens[0].tolist()


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
    draft = propose(text, 4)
    assert draft.probs is None
    assert draft.tokens.tolist() == [[3, 1, 2]]  # after 1 2 1; after 1 alone 2 is more probable, but only for one token
    assert draft.confidence.tolist() == [[0.5, 1.0, 1.0]]  # at one of the two occurrences the text ended
    draft = propose([1, 2, 1, 3, 1, 2, 4, 1], 4)
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
    draft = propose(text, 3, nodes=4, max_spec_factor=8.0)
    assert draft.tokens.tolist() == [[1, 7, 5, 2]]
    assert draft.parents.tolist() == [[0, 1, 2, 0]]
    assert draft.confidence[0].tolist() == pytest.approx([3 / 5, 2 / 3, 1, 1 / 5])
    assert propose(text, 1, nodes=5, max_spec_factor=8.0).tokens.tolist() == [[1, 2]]


def test_rows_may_draft_differently():
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
    assert propose([1, 2], 3, target=target, remember=True).nodes == 0


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
    before = len(suffix._memories)
    drafter = load_drafter("suffix", target, remember=True)
    assert len(suffix._memories) == before + 1
    del target, drafter
    gc.collect()
    assert len(suffix._memories) == before


@pytest.mark.parametrize("options", [{}, {"nodes": 12, "max_spec_factor": 4.0, "remember": True}])
def test_greedy_output_equals_plain_decoding(options):
    target = HFTarget(build("llama"))
    prompts = texts(3, 4).repeat(1, 3)
    config = GenerationConfig(30, budget=Budget(5, 12), stop_token_ids=())
    expected = rows_of(list(generate(target, load_drafter("none", target), prompts, config)))
    for _ in range(2):  # with and without remembered text
        events = list(generate(target, load_drafter("suffix", target, **options), prompts, config))
        assert rows_of(events) == expected
        assert accepted(events) > 0
    assert all(t < VOCABULARY for e in events for t in e.drafted[0])
