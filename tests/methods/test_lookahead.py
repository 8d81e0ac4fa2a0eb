from dataclasses import replace

import pytest
import torch

from specdemo.core.protocol import Budget, Forward, GenerationConfig, Progress
from specdemo.core.sampling import Sampling
from specdemo.core.tree import ABSENT, depths, is_chain
from specdemo.engine.loop import generate
from specdemo.methods import load_drafter
from specdemo.models.target import HFTarget
from specdemo.models.toy import ToyTarget
from tests.generation import rows_of
from tests.models.tiny import build, texts

K = Budget(7, 32)


def drafter_after(prompts, **options):
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
    drafter = drafter_after([[4, 5, 6]], window=3, ngram=3, guesses=2)
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
    drafter = drafter_after([[9, 5]], window=2, ngram=3, guesses=2)
    for outputs in ([0, 31, 32], [0, 0, 41, 0, 42]):  # 9 31 41 and 5 32 42
        observe_output(drafter, drafter.propose(K), outputs)
    # The guess after the root, then the window. 31 after the root occurs once.
    draft = drafter.propose(K)
    assert draft.tokens.tolist() == [[31, 41, 32, 42]]
    assert draft.parents.tolist() == [[0, 1, 1, 3]]


def test_pool_evicts_old_ngrams():
    drafter = drafter_after([[9]], window=1, ngram=2, guesses=2)
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


def test_it_accepts_what_it_guessed():
    events = run(HFTarget(build("llama")), texts(1, 6), budget=Budget(10, 56))
    assert len(events) < 35


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


def test_rows_of_a_batch_are_as_if_alone():
    target = ToyTarget(16, seed=6)
    prompts = texts(3, 5) % 16
    together = run(target, prompts)
    for row in range(3):
        alone = [e for e in run(target, prompts[row : row + 1]) if e.emitted[0]]
        own_events = [e for e in together if e.emitted[row]]
        assert [e.emitted[row] for e in own_events] == [e.emitted[0] for e in alone]


def test_a_pass_over_another_draft_is_not_read():
    drafter = drafter_after([[4, 5, 6]], window=3, ngram=3)
    drafter.propose(K)
    root = torch.tensor([[9]])
    for forward in (None, Forward(torch.zeros(1, 2, 64))):
        drafter.observe(Progress(root, root, [1], forward=forward))
    assert drafter.propose(K).tokens.tolist() == [[4, 5, 6]]
