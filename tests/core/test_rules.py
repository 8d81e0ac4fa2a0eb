"""The registry of acceptance rules, their options, and the rules for chains."""

import pytest
import torch

from specdemo.core.fly import Fly
from specdemo.core.host_copy import to_lists
from specdemo.core.rules import RULES, accept_rule, rule_options
from specdemo.core.speculative_cascade import SpeculativeCascade
from specdemo.core.tree import ABSENT, Draft


def test_an_unknown_rule_is_one_line():
    with pytest.raises(ValueError, match="unknown acceptance rule 'tipical'; did you mean 'typical'\\?"):
        accept_rule("tipical")


def test_every_lossy_rule_has_options():
    assert [name for name in RULES if rule_options(name)] == [
        name for name, entry in RULES.items() if not entry.lossless
    ]


def test_options_are_parsed_and_rejected_in_one_line():
    assert accept_rule("fly", {"window": "4", "threshold": "0.5"}) == Fly(window=4, threshold=0.5)
    with pytest.raises(ValueError, match="unknown option 'windw' of acceptance rule 'fly'; did you mean 'window'\\?"):
        accept_rule("fly", {"windw": 4})
    with pytest.raises(ValueError, match="option 'window' must be between 0 and 15, not 99"):
        accept_rule("fly", {"window": 99})
    with pytest.raises(ValueError, match="option 'deferral' must be one of top_tokens, opt, not 'chow'"):
        accept_rule("speculative_cascade", {"deferral": "chow"})
    with pytest.raises(ValueError, match="acceptance rule 'block' has no options; leave out 'window'"):
        accept_rule("block", {"window": 4})


def rng():
    return torch.Generator().manual_seed(0)


UNCERTAIN, CERTAIN = [2.0, 1.9, 1.8, -9.0], [9.0, 0.0, 0.0, 0.0]  # logits; token 0 is the most likely one


@pytest.mark.parametrize(("logits", "tokens", "window", "length", "changed"), [
    ([UNCERTAIN, CERTAIN, CERTAIN], [1, 0, 0], 2, 3, 1),  # deferred: uncertain, and the next two tokens match
    ([CERTAIN, CERTAIN, CERTAIN], [1, 0, 0], 2, 0, 0),  # the target is certain
    ([UNCERTAIN, CERTAIN, CERTAIN], [1, 0, 1], 2, 0, 0),  # a rejection within the window
    ([UNCERTAIN, CERTAIN, CERTAIN], [1, 0, 1], 1, 2, 1),  # a shorter window
    ([CERTAIN, UNCERTAIN, CERTAIN], [0, 1, 0], 2, 1, 0),  # the window does not fit into the draft
    ([UNCERTAIN, CERTAIN, CERTAIN], [1, 0, ABSENT], 2, 0, 0),  # nor into the present part of a row
    ([UNCERTAIN, CERTAIN, CERTAIN], [1, 0, 0], 0, 3, 1),  # 0: min(6, draft length - 1)
])  # fmt: skip
def test_fly_defers_a_rejection_where_the_target_is_uncertain(logits, tokens, window, length, changed):
    target = torch.tensor([[*logits, CERTAIN]])
    result = Fly(window=window)(Draft.chain(torch.tensor([tokens])), target, None)
    assert result.path == [list(range(length + 1))] and result.changed == [changed]
    assert result.next_token.tolist() == [0]


def test_fly_never_accepts_a_token_that_the_target_cannot_output():
    flat = torch.tensor([0.5, 0.5, 0.0]).expand(1, 4, 3)
    tokens = torch.tensor([[2, 0, 1]])
    q = torch.eye(3)[tokens]
    for seed in range(20):
        result = Fly(window=2, threshold=0.0)(Draft.chain(tokens, q), flat, torch.Generator().manual_seed(seed))
        assert result.path == [[0]] and result.next_token.item() != 2


def test_a_greedy_cascade_accepts_top_tokens():
    target = torch.tensor([[UNCERTAIN, CERTAIN, UNCERTAIN]])
    draft = Draft.chain(torch.tensor([[2, 0]]))
    result = SpeculativeCascade(alpha=0.5)(draft, target, None)
    assert result.path == [[0, 1, 2]] and result.changed == [1] and result.next_token.tolist() == [0]
    strict = SpeculativeCascade(alpha=0.0)(draft, target, None)
    assert strict.path == [[0]] and strict.changed == [0] and strict.next_token.tolist() == [0]


def test_rows_of_a_batch_are_verified_separately():
    target = torch.tensor([[UNCERTAIN, CERTAIN, CERTAIN], [CERTAIN, CERTAIN, UNCERTAIN]])
    draft = Draft.chain(torch.tensor([[1, 0], [1, 0]]))
    for rule in (Fly(window=1), SpeculativeCascade()):
        result = rule(draft, target, None)
        assert result.path == [[0, 1, 2], [0]] and result.changed == [1, 0]


def test_the_opt_deferral_needs_the_distribution_of_the_drafter():
    draft, target = Draft.chain(torch.tensor([[1]])), torch.tensor([[CERTAIN, CERTAIN]])
    rule = SpeculativeCascade(deferral="opt")
    for generator in (None, rng()):
        with pytest.raises(ValueError, match="choose a temperature above 0 and a method that samples"):
            rule(draft, target.softmax(-1), generator)


@pytest.mark.parametrize("name", [name for name, entry in RULES.items() if not entry.trees])
def test_a_rule_for_chains_rejects_trees(name):
    tree = Draft(torch.tensor([[0, 1]]), torch.tensor([[0, 0]]))
    with pytest.raises(ValueError, match=f"'{name}' verifies chains only and this lane drafts trees"):
        accept_rule(name)(tree, torch.ones(1, 3, 4), rng())


@pytest.mark.parametrize("name", [name for name, entry in RULES.items() if not entry.trees])
def test_an_empty_draft_is_plain_decoding(name):
    result = accept_rule(name)(Draft.empty(2), torch.tensor([[CERTAIN], [CERTAIN]]), None)
    assert result.path == [[0], [0]] and result.next_token.tolist() == [0, 0]


def test_concatenated_matrices_are_split():
    first, second = torch.arange(6).view(2, 3), torch.arange(4).view(2, 2)
    assert to_lists(first, second) == [first.tolist(), second.tolist()]
