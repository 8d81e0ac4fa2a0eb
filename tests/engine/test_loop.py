"""The generation loop on the toy target with scripted drafters: every end of a generation, and the state after it."""

from dataclasses import replace

import pytest
import torch

from specdemo.core.accept import Lossless
from specdemo.core.protocol import Budget, Drafter, GenerationConfig
from specdemo.core.sampling import Sampling
from specdemo.core.trace import output_outcomes
from specdemo.core.tree import Draft
from specdemo.engine import loop
from specdemo.engine.loop import generate
from specdemo.methods import load_drafter
from specdemo.models.toy import ToyTarget
from tests.generation import rows_of

PROMPT = torch.tensor([[3, 1, 4, 1, 5]])


class Oracle(Drafter):
    """A drafter of the plain continuation, with chosen positions wrong. It records what it observes."""

    def __init__(self, answer, wrong=lambda position: False, vocab=16):
        self.answer, self.wrong, self.vocab = answer, wrong, vocab
        self.budgets, self.progress, self.released = [], [], False

    def start(self, batch, sampling, rng):
        self.at = 0

    def propose(self, budget):
        self.budgets.append(budget)
        tokens = []
        for position in range(self.at, min(self.at + budget.depth, len(self.answer))):
            right = self.answer[position]
            tokens.append((right + 1) % self.vocab if self.wrong(position) else right)
        return Draft.chain(torch.tensor([tokens], dtype=torch.int64).view(1, -1))

    def observe(self, progress):
        self.progress.append(progress)
        self.at = 1 if len(self.progress) == 1 else self.at + progress.lengths[0]

    def release(self):
        self.released = True


class Pair(Drafter):
    """A drafter for two rows: the first is always right, the second always wrong."""

    def __init__(self, answer, vocab=16):
        self.answer, self.vocab = answer, vocab

    def start(self, batch, sampling, rng):
        self.at = [0, 0]

    def propose(self, budget):
        right, other = (self.answer[at : at + budget.depth] for at in self.at)
        return Draft.chain(torch.tensor([right, [(token + 1) % self.vocab for token in other]]))

    def release(self):
        pass

    def observe(self, progress):
        first = self.at == [0, 0]
        self.at = [at + (1 if first else length) for at, length in zip(self.at, progress.lengths, strict=True)]


def plain(target, n=30, prompt=PROMPT):
    return tokens(generate(target, load_drafter("none", target), prompt, GenerationConfig(n)))


def tokens(events):
    return [t for e in events for t in e.emitted[0]]


@pytest.fixture
def target():
    return ToyTarget(16, seed=5)


def test_perfect_draft_is_fully_accepted(target):
    answer = plain(target)
    events = list(generate(target, Oracle(answer), PROMPT, GenerationConfig(30, budget=Budget(4, 4))))
    assert tokens(events) == answer
    assert [len(e.emitted[0]) for e in events[:6]] == [1, 5, 5, 5, 5, 5]
    assert output_outcomes(events[1]) == ["accepted"] * 4 + ["bonus"]


def test_an_event_has_the_most_likely_tokens_of_the_target(target):
    answer = plain(target, 31)
    drafter = Oracle(answer, wrong=lambda position: position % 3 == 0)
    first, *steps = generate(target, drafter, PROMPT, GenerationConfig(30, budget=Budget(4, 4)))
    assert first.top == []
    context = [*PROMPT[0].tolist(), *first.emitted[0]]
    for event in steps:
        assert len(event.top) == len(event.path[0]) if event.drafted[0] else event.top == []
        for row, token in zip(event.top, event.emitted[0], strict=False):
            p = target.next_probs(context)
            assert row == [(int(i), pytest.approx(float(p[i]), abs=1e-4)) for i in p.topk(3).indices]
            assert row[0][0] == token  # greedy
            context.append(token)
        context += event.emitted[0][len(event.top) :]


def test_a_sampled_token_is_listed_even_if_it_is_unlikely():
    target, config = ToyTarget(16, seed=5), GenerationConfig(60, Sampling(temperature=2.0), seed=3, budget=Budget(4, 4))
    events = list(generate(target, Oracle(plain(target, 60)), PROMPT, config))
    rows = [(row, token) for e in events for row, token in zip(e.top, e.emitted[0], strict=False)]
    assert all(token in dict(row) for row, token in rows)
    assert {len(row) for row, _ in rows} == {3, 4}


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 6, 7, 11])
def test_the_limit_is_exact_and_the_budget_never_exceeds_what_remains(target, limit):
    drafter = Oracle(plain(target))
    events = list(generate(target, drafter, PROMPT, GenerationConfig(limit, budget=Budget(5, 5))))
    assert len(tokens(events)) == limit
    assert tokens(events) == plain(target, limit)
    left = limit
    for event, budget in zip(events, [None, *drafter.budgets], strict=True):
        assert budget is None or budget.depth <= left - 1
        left -= len(event.emitted[0])


def test_a_stop_token_ends_the_text_at_every_place_of_an_accepted_draft():
    free = plain(ToyTarget(16, seed=5))
    places = [place for place, token in enumerate(free) if free.index(token) == place and place]
    assert max(places) > 5
    for place in places:
        target = ToyTarget(16, seed=5, stop_token_ids=(free[place],))
        for k in (place, place + 1, place + 4):  # it is the last token of the step, or is followed by others
            events = generate(target, Oracle(free), PROMPT, GenerationConfig(30, budget=Budget(k, k)))
            assert tokens(events) == free[: place + 1]


def test_a_prompt_of_one_token(target):
    one = PROMPT[:, :1]
    answer = plain(target, 20, one)
    assert tokens(generate(target, Oracle(answer), one, GenerationConfig(20))) == answer


def test_progress_is_aligned_and_complete(target):
    answer = plain(target)
    drafter = Oracle(answer, wrong=lambda position: position == 6)
    list(generate(target, drafter, PROMPT, GenerationConfig(20, budget=Budget(4, 4))))
    inputs = [t for p in drafter.progress for t in p.inputs[0].tolist()]
    outputs = [t for p in drafter.progress for t in p.outputs[0].tolist()]
    assert inputs[1:] == outputs[:-1]
    assert outputs == (PROMPT[0].tolist()[1:] + answer)[: len(outputs)]


class Reader(Drafter):
    """A drafter of the plain continuation whose tokens become wrong at another place in every row, as a chain or, with
    a wrong sibling in front, as a tree. It records the hidden states that it observes."""

    taps = (1, -1)

    def __init__(self, answer, rows, tree):
        self.answer, self.tree, self.at = answer, tree, [0] * rows
        self.read = {tap: [[] for _ in range(rows)] for tap in self.taps}

    def start(self, batch, sampling, rng):
        pass

    def propose(self, budget):
        depth = min(budget.depth, 4)
        if not depth:
            return Draft.empty(len(self.at), torch.device("cpu"))
        right = torch.tensor([(self.answer[at : at + depth] + [0] * depth)[:depth] for at in self.at])
        accepted = torch.tensor([(row + at) % 4 for row, at in enumerate(self.at)])[:, None]
        drafted = (right + (torch.arange(depth) >= accepted).long()) % 16
        if not self.tree:
            return Draft.chain(drafted)
        parents = torch.tensor([[0, 0, *range(2, depth + 1)]]).expand(len(drafted), -1)
        return Draft(torch.cat([(drafted[:, :1] + 2) % 16, drafted], 1), parents)

    def observe(self, progress):
        for row, length in enumerate(progress.lengths):
            self.at[row] += 1 if not self.at[row] else length
            for tap in self.taps:
                assert progress.hidden[tap].shape[:2] == progress.inputs.shape
                self.read[tap][row].append(progress.hidden[tap][row, :length])


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("tree", [False, True])
def test_the_hidden_states_of_rejected_slots_and_padding_do_not_reach_the_drafter(rows, tree):
    target, reference = ToyTarget(16, seed=5, order=3), ToyTarget(16, seed=5, order=3)
    answer = plain(target)
    drafter = Reader(answer, rows, tree)
    config = GenerationConfig(18, budget=Budget(4, 5))
    events = list(generate(target, drafter, PROMPT.expand(rows, -1), config))
    assert {len(path) for event in events for path in event.path} >= {1, 2, 3, 4}
    whole = reference.start(torch.tensor([[*PROMPT[0].tolist(), *answer]]), drafter.taps).hidden
    for tap, texts in drafter.read.items():
        for parts in texts:
            read = torch.cat(parts)
            assert len(read) > 18 and torch.equal(read, whole[tap][0, : len(read)])


def test_cancel_takes_effect_before_the_next_step(target):
    seen = []
    config = GenerationConfig(30, budget=Budget(2, 2))
    for event in generate(target, Oracle(plain(target)), PROMPT, config, cancelled=lambda: len(seen) >= 3):
        seen.append(event)
    assert len(seen) == 3


@pytest.mark.parametrize(("limit_ms", "steps"), [(1e9, 5), (0.0, 2)])
def test_a_slow_model_warms_up_for_few_steps(target, monkeypatch, limit_ms, steps):
    monkeypatch.setattr(loop, "WARM_UP_TOKENS", 6)
    monkeypatch.setattr(loop, "WARM_UP_MS", limit_ms)
    drafter = Oracle([])
    loop.warm_up(target, drafter, PROMPT, GenerationConfig(30, budget=Budget(2, 2)))
    assert len(drafter.budgets) == steps


def test_memory_is_released_however_it_ends(target, monkeypatch):
    released = []
    monkeypatch.setattr(ToyTarget, "release", lambda self: released.append(True))
    drafter = Oracle(plain(target))
    released.clear()
    events = generate(target, drafter, PROMPT, GenerationConfig(30))
    next(events)
    next(events)
    events.close()
    assert released and drafter.released
    released.clear()
    broken = Oracle([])
    broken.propose = lambda budget: 1 / 0
    with pytest.raises(ZeroDivisionError):
        list(generate(target, broken, PROMPT, GenerationConfig(30)))
    assert released and broken.released


def test_a_target_without_trees_gets_the_first_branch():
    target = ToyTarget(16, seed=5)
    answer = plain(target)
    target.capabilities = replace(target.capabilities, trees=False)

    class Star(Oracle):
        def propose(self, budget):
            chain = super().propose(budget)
            if not chain.nodes:
                return chain
            first = chain.tokens[:, :1]
            return Draft(torch.cat([first, (first + 1) % 16, first], 1), torch.tensor([[0, 0, 1]]))

    drafter = Star(answer)
    events = list(generate(target, drafter, PROMPT, GenerationConfig(20)))
    assert tokens(events) == answer[:20]
    assert all(len(e.drafted[0]) <= 2 for e in events)


def test_a_finished_row_stays_finished():
    free = plain(ToyTarget(16, seed=5))
    target = ToyTarget(16, seed=5, stop_token_ids=(free[2],))
    prompts = torch.stack([PROMPT[0], PROMPT[0].flip(0)])
    events = list(generate(target, load_drafter("ngram", target), prompts, GenerationConfig(25)))
    stopped = [sum(bool(e.emitted[row]) for e in events) for row in range(2)]
    assert stopped[0] != stopped[1]
    for row, prompt in enumerate(prompts):
        alone = plain(ToyTarget(16, seed=5, stop_token_ids=(free[2],)), 25, prompt[None])
        assert [t for e in events for t in e.emitted[row]] == alone


def test_refusals_name_the_fix(target):
    drafter = load_drafter("none", target)
    with pytest.raises(ValueError, match="the prompt is empty"):
        next(generate(target, drafter, PROMPT[:, :0], GenerationConfig(5)))
    for shapeless in ([1, 2, 3], torch.tensor([1, 2, 3])):
        with pytest.raises(ValueError, match=r"must be a tensor \[B, T\]; pass torch.tensor\(\[ids\]\) for a list"):
            next(generate(target, drafter, shapeless, GenerationConfig(5)))
    for strange in (-1, target.vocab_size):
        with pytest.raises(ValueError, match=f"must be 0 to {target.vocab_size - 1};"):
            next(generate(target, drafter, torch.tensor([[1, strange]]), GenerationConfig(5)))
    target.max_length = 8
    with pytest.raises(ValueError, match="leaves room for 3 of the 5 new tokens"):
        next(generate(target, drafter, PROMPT, GenerationConfig(5)))
    with pytest.raises(ValueError, match="shorten it"):
        next(generate(target, drafter, PROMPT.repeat(1, 2), GenerationConfig(5)))
    for wrong in ({"max_new_tokens": 0}, {"budget": Budget(1, 1), "sampling": Sampling(), "max_new_tokens": -1}):
        with pytest.raises(ValueError, match="1 or more"):
            GenerationConfig(**wrong)


@pytest.mark.parametrize("k", [2, 3, 5, 7])
def test_a_row_that_is_ahead_keeps_no_more_than_the_context_holds(k):
    """The budget follows the shorter row; the longer one has less room left."""
    target = ToyTarget(16, seed=5, max_length=PROMPT.shape[1] + 12)
    answer = plain(ToyTarget(16, seed=5), n=30)
    config = GenerationConfig(12, budget=Budget(k, k))
    events = list(generate(target, Pair(answer), PROMPT.expand(2, -1), config))
    assert rows_of(events) == [answer[:12]] * 2


def test_a_caller_keeps_gradients_and_threads_between_steps(target):
    threads = torch.get_num_threads()
    for _ in generate(target, load_drafter("none", target), PROMPT, GenerationConfig(4)):
        assert torch.is_grad_enabled() and torch.get_num_threads() == threads


class Recorder:
    """The lossless rule, or a lossy one. It counts the drafts that it sees."""

    note = ""

    def __init__(self, exact):
        self.exact, self.seen = exact, []

    def __call__(self, draft, target, rng):
        self.seen.append(draft.nodes)
        return Lossless()(draft, target, rng)


@pytest.mark.parametrize("exact", [True, False])
def test_an_exact_rule_sees_drafts_only(exact, target):
    """Without one the token is the argmax. The prefill is an empty draft."""
    answer = plain(target, 12)
    for drafter, drafts in ((load_drafter("none", target), [0] * 11), (Oracle(answer), [5, 4])):
        rule = Recorder(exact)
        config = GenerationConfig(12, budget=Budget(5, 5))
        assert tokens(generate(target, drafter, PROMPT, config, accept=rule)) == answer
        assert rule.seen == [0, *(n for n in drafts if n or not exact)]


def test_notes_that_are_not_finite_are_one_line(target):
    class Noted(Oracle):
        def propose(self, budget):
            return replace(super().propose(budget), notes={"depth": float("nan")})

    with pytest.raises(ValueError, match="of the drafter are not finite"):
        list(generate(target, Noted(plain(target)), PROMPT, GenerationConfig(4)))
