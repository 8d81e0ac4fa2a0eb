import pytest
import torch

from specdemo.core.protocol import Budget, Progress
from specdemo.core.sampling import Sampling
from specdemo.methods import load_drafter
from specdemo.models.toy import ToyTarget


def propose(text, k, **options):
    drafter = load_drafter("ngram", ToyTarget(64), **options)
    drafter.start(1, Sampling(), torch.Generator())
    ids = torch.tensor([text])
    drafter.observe(Progress(ids[:, :-1], ids[:, 1:], [len(text) - 1]))
    return drafter.propose(Budget(k, k)).tokens[0].tolist()


def test_longest_suffix_wins_over_the_more_recent_short_one():
    #       1 2 3 -> 4       2 9 3 -> 5        suffix 1 2 3
    assert propose([1, 2, 3, 4, 8, 2, 9, 3, 5, 7, 1, 2, 3], 1) == [4]


def test_most_recent_of_equal_matches_wins():
    assert propose([1, 2, 5, 1, 2, 6, 1, 2], 1) == [6]


def test_min_n_refuses_short_matches():
    assert propose([1, 5, 2, 1], 2) == [5, 2]
    assert propose([1, 5, 2, 1], 2, min_n=2) == []


def test_max_n_limits_the_suffix():
    text = [1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3]
    assert propose(text, 1, max_n=3) == [4]
    assert propose(text, 1, max_n=2) == [5]


def test_loop_is_drafted_completely():
    assert propose([9, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]


def test_nothing_known_nothing_drafted():
    assert propose([1, 2, 3, 4], 4) == []


def test_rows_may_draft_differently():
    drafter = load_drafter("ngram", ToyTarget(64))
    drafter.start(2, Sampling(), torch.Generator())
    ids = torch.tensor([[1, 2, 1, 2], [1, 2, 3, 4]])
    drafter.observe(Progress(ids[:, :-1], ids[:, 1:], [3, 3]))
    assert drafter.propose(Budget(2, 2)).tokens.tolist() == [[1, 2], [-1, -1]]


def test_options_must_agree():
    with pytest.raises(ValueError, match="must not exceed"):
        load_drafter("ngram", ToyTarget(8), min_n=4, max_n=2)
