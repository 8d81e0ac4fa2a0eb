"""Decoding under a grammar: identical to plain decoding under the mask, exact in distribution, and forced tokens."""

import pytest
import torch

from specdemo.core.accept import Lossless
from specdemo.core.block import Block
from specdemo.core.constraint import MOST_FORCED, Constraint, mask
from specdemo.core.protocol import Budget, GenerationConfig
from specdemo.core.sampling import Sampling, to_probs
from specdemo.core.tree import Draft
from specdemo.engine.loop import generate
from specdemo.methods import load_drafter
from specdemo.models.toy import ToyTarget

V, END = 6, 0
PROMPT = torch.tensor([[3, 1, 4, 1, 5]])


class Pattern:
    """Grammar over tokens: at every position a set of allowed tokens. A single one is forced. Then the stop token."""

    def __init__(self, *sets, place=0):
        self._sets, self._place = sets, place

    def __call__(self):
        return self

    def allowed(self):
        tokens = self._sets[self._place] if self._place < len(self._sets) else {END}
        return torch.tensor([token in tokens for token in range(V)])

    def forced(self):
        run = []
        for tokens in self._sets[self._place :]:
            if len(tokens) > 1:
                break
            run += tokens
        return run

    def after(self, token):
        if token == END or not self.allowed()[token]:
            return None
        return Pattern(*self._sets, place=self._place + 1)


GRAMMAR = Pattern({1, 2}, {3}, {4}, {1, 2, 5}, {1, 3, 4, 5}, {2}, {1, 4}, {5}, {5}, {1, 2, 3})


def run(method, grammar=GRAMMAR, k=4, temperature=0.0, seed=0, prompts=PROMPT, tokens=20, accept=None, **options):
    target = ToyTarget(V, seed=1)
    drafter = load_drafter(method, target, **options)
    sampling, budget = Sampling(temperature), Budget(k, max(k, 8) if k else 0)
    config = GenerationConfig(tokens, sampling, budget, seed, (END,), grammar)
    return list(generate(target, drafter, prompts, config, accept=accept))


def constraint(grammar, rows=1, room=8, rng=None):
    """Return a started constraint whose rows still need `room` draft tokens."""
    started = Constraint(grammar, room + 1, trees=True)
    started.start(rows, rng)
    return started


def output(events, row=0):
    return [token for event in events for token in event.emitted[row]]


@pytest.mark.parametrize("method", ["ngram", "suffix", "lookahead", "adaptive"])
def test_greedy_output_is_that_of_plain_decoding_under_the_mask(method):
    options = {"drafter": "ngram"} if method == "adaptive" else {}
    plain = output(run("none", k=0))
    assert len(plain) == 11 and plain[-1] == END and plain[1:3] == [3, 4]
    assert output(run(method, **options)) == plain


def test_forced_tokens_are_drafted_and_accepted_without_a_drafter():
    events = run("ngram")
    forced = [(event.forced[0], event.path[0], event.drafted[0]) for event in events if event.index and event.forced[0]]
    assert forced[0][0] == [1, 2] and forced[0][2][:2] == [3, 4]
    assert all(set(slots) <= {*path} for slots, path, _ in forced)
    assert len(events) < len(run("none", k=0))
    assert all(not event.forced or not event.forced[0] for event in run("none", k=0))


def test_rows_of_a_batch_have_their_own_states():
    prompts = torch.tensor([[3, 1, 4, 1, 5], [2, 2, 1, 5, 4], [1, 1, 1, 1, 1]])
    together = run("ngram", prompts=prompts)
    for row in range(3):
        assert output(together, row) == output(run("none", k=0, prompts=prompts[row : row + 1]))


def test_the_text_ends_at_the_limit_within_forced_tokens():
    for limit in range(1, 6):
        events = run("ngram", tokens=limit)
        assert output(events) == output(run("none", k=0))[:limit]
        assert all(len(event.drafted[0]) <= limit for event in events)


def test_a_run_of_forced_tokens_is_cut():
    events = run("ngram", Pattern(*[{1}] * 80), tokens=90)
    assert max(len(event.drafted[0]) for event in events) == MOST_FORCED and output(events) == [1] * 80 + [END]


CHOICE = Pattern({1, 2, 3, 4}, {3}, {1, 2, 4, 5}, {1, 2, 3})


@pytest.mark.parametrize("rule", [Lossless(), Block()], ids=["lossless", "block"])
def test_a_sampled_chain_follows_the_masked_distribution(fits, rule):
    torch.manual_seed(0)
    draws, grammar = 12_000, Pattern({1, 2, 3}, {2, 4, 5}, {5})
    p, q = torch.rand(3, V).softmax(-1), torch.rand(3, V).mul(3).softmax(-1)
    rng = torch.Generator().manual_seed(5)
    first = torch.multinomial(q[0], draws, replacement=True, generator=rng)
    second = torch.multinomial(q[1], draws, replacement=True, generator=rng)
    draft = Draft.chain(torch.stack([first, second], 1), q[:2].expand(draws, 2, V))
    masked = constraint(grammar, draws, rng=rng)
    draft = masked.apply(draft, Budget(8, 8))
    logits = p.log()[None].expand(draws, 3, V)
    width = draft.nodes + 1
    logits = torch.cat([logits, logits[:, -1:].expand(draws, max(width - 3, 0), V)], 1)[:, :width]
    target = to_probs(masked.mask(logits), Sampling(1.0))
    result = rule(draft, target, rng)
    tokens = [
        (row[0] if len(path) > 1 else int(last))
        for row, path, last in zip(draft.tokens.tolist(), result.path, result.next_token, strict=True)
    ]
    expected = p[0] * grammar.allowed()
    assert fits(torch.tensor(tokens), expected / expected.sum())
    seconds = [
        (row[1] if len(path) > 2 else int(last))
        for row, path, last in zip(draft.tokens.tolist(), result.path, result.next_token, strict=True)
        if len(path) > 1
    ]
    allowed = torch.tensor([token in (2, 4, 5) for token in range(V)])
    assert fits(torch.tensor(seconds), p[1] * allowed / (p[1] * allowed).sum())


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_sampled_output_follows_the_masked_distribution(fits, method):
    prompts = PROMPT.expand(1500, -1)
    plain, drafted = (
        run(name, CHOICE, k=k, temperature=1.0, seed=seed, prompts=prompts, tokens=4)
        for name, k, seed in (("none", 0, 1), (method, 3, 2))
    )
    for place in (0, 2, 3):
        counts = torch.bincount(torch.tensor([output(plain, row)[place] for row in range(1500)]), minlength=V)
        assert fits(torch.tensor([output(drafted, row)[place] for row in range(1500)]), counts / 1500)


def test_a_greedy_draft_takes_the_best_allowed_token():
    ranking = torch.tensor([[[0.1, 0.1, 0.2, 0.1, 0.5, 0.0]] * 2])
    draft = Draft(torch.tensor([[4, 4]]), torch.tensor([[0, 1]]), ranking=lambda: ranking)
    constrained = constraint(Pattern({1, 2}, {3}, {4, 5})).apply(draft, Budget(8, 8))
    assert constrained.tokens.tolist() == [[2, 3]] and constrained.forced == [[2]]
    without = constraint(Pattern({1, 2}, {3})).apply(Draft.chain(torch.tensor([[4, 4]])), Budget(8, 8))
    assert without.nodes == 0


def test_forced_tokens_are_added_below_the_nodes_of_a_tree():
    tree = Draft(torch.tensor([[1, 2, 5]]), torch.tensor([[0, 0, 1]]))
    constrained = constraint(Pattern({1, 2}, {3}, {4, 5})).apply(tree, Budget(8, 8))
    assert constrained.tokens.tolist() == [[1, 2, 5, 3, 3]]
    assert constrained.parents.tolist() == [[0, 0, 1, 1, 2]] and constrained.forced == [[4, 5]]
    shallow = constraint(Pattern({1, 2}, {3}, {4, 5}), room=1).apply(tree, Budget(8, 8))
    assert shallow.nodes == 3 and shallow.forced == [[]]


def test_unreachable_slots_are_not_masked():
    logits = mask(torch.zeros(1, 2, V), [[Pattern({1}), None]])
    assert logits[0, 0].isfinite().tolist() == [False, True, *[False] * 4] and logits[0, 1].isfinite().all()
