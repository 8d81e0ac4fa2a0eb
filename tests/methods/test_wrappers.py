"""Methods that wrap other drafters: router, gated lookup, cascade and online learning."""

from copy import deepcopy

import pytest
import torch

from specdemo import testing
from specdemo.core.protocol import Budget, GenerationConfig, Progress
from specdemo.core.sampling import Sampling
from specdemo.core.tree import ABSENT
from specdemo.engine.loop import generate
from specdemo.methods import METHODS, load_drafter, method
from specdemo.methods.heads.head import Head
from specdemo.methods.online import MIN_COLUMNS, WINDOW
from specdemo.methods.wrapper import Confident
from specdemo.models.target import HFTarget
from specdemo.models.toy import ToyTarget
from tests.engine.test_loop import Oracle
from tests.generation import rows_of
from tests.methods.test_adaptive import Watch
from tests.models import tiny

PROMPTS = torch.randint(3, 61, (3, 9), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def folders(tiny_llama, tmp_path):
    """Save a draft model that equals the target and a random one, and return their folders."""
    good, bad = tiny_llama(61), tiny_llama(61)
    bad.lm_head.weight.data = torch.randn(61, 16, generator=torch.Generator().manual_seed(0))
    for name, model in (("good", good), ("bad", bad)):
        model.save_pretrained(tmp_path / name)
    return {name: str(tmp_path / name) for name in ("good", "bad")}


def output_and_events(target, drafter, prompts=PROMPTS, tokens=40, k=3, **config):
    config = GenerationConfig(tokens, budget=Budget(k, k), **config)
    events = list(generate(target, drafter, prompts, config))
    return rows_of(events), events


@pytest.mark.parametrize("first, others, best", [("bad", "good", 1), ("good", "bad", 0), ("bad", "ngram, good", 2)])
def test_most_accepted_drafter_is_selected(folders, first, others, best, tiny_llama):
    target = HFTarget(tiny_llama(61))
    drafts = ", ".join(folders.get(name, name) for name in others.split(", "))
    drafter = load_drafter("router", target, folders[first], drafts=drafts, trial=2)
    got, events = output_and_events(target, drafter, stop_token_ids=(5, 9))
    assert got == output_and_events(target, load_drafter("none", target), stop_token_ids=(5, 9))[0]
    routes = [int(e.notes["route"]) for e in events[1:]]
    count = len(drafter.drafters)
    assert routes[: 2 * count] == [route for route in range(count) for _ in range(2)]
    assert set(routes[2 * count :]) == {best}


@pytest.mark.parametrize("right, lookups", [("lookup", 30), ("drafter", 3)])
def test_a_lookup_drafts_while_it_gives_more_tokens_per_second(right, lookups):
    """Of 30 steps. A lookup that loses takes turns with the drafter at first; then it is compared with the text."""
    target = ToyTarget(16, seed=1)
    prompt, config = torch.tensor([[3, 1, 4, 1, 5]]), GenerationConfig(200, budget=Budget(3, 3), stop_token_ids=())
    (answer,) = rows_of([*generate(target, load_drafter("none", target), prompt, config)])
    drafter = load_drafter("gated", target, drafter="ngram", lookup="ngram", length=2)
    drafter.drafters = [Oracle(answer, wrong=lambda _, bad=name != right: bad) for name in ("drafter", "lookup")]
    events = list(generate(target, drafter, prompt, config, stopwatch=Watch()))
    routes = [int(e.notes["route"]) for e in events[1:31]]
    assert routes[0]
    assert sum(routes) == lookups
    assert all(len(e.drafted[0]) <= (3 if e.notes["route"] else 2) for e in events[1:])
    assert rows_of(events) == [answer]


def test_a_gated_lookup_drafts_for_rows_with_a_match(folders, tiny_llama):
    target = HFTarget(tiny_llama(61))
    drafter = load_drafter("gated", target, folders["bad"], lookup="suffix")
    got, events = output_and_events(target, drafter, tokens=80)
    assert got == output_and_events(target, load_drafter("none", target), tokens=80)[0]
    assert {e.notes["route"] for e in events[1:]} == {0, 1}


@pytest.mark.parametrize("name, p_min", [("draft_model", 0.072), ("layer_skip", 0.3), ("medusa", 0.3), ("eagle", 0.11)])
def test_a_draft_ends_before_an_unlikely_token(name, p_min, monkeypatch):
    """In a chain and in a tree, with rows that end at different tokens."""
    target, prompts = ToyTarget(16, seed=4), PROMPTS % 16
    drafter = testing.make_drafter(name, target)
    drafts = []
    propose = drafter.propose
    monkeypatch.setattr(drafter, "propose", lambda budget: drafts.append(propose(budget)) or drafts[-1])
    config = {"tokens": 40, "k": 4, "stop_token_ids": ()}
    expected = output_and_events(target, load_drafter("none", target), prompts, **config)[0]
    got, events = output_and_events(target, Confident(drafter, p_min), prompts, **config)
    assert got == expected
    kinds = set()
    for event, draft in zip(events[1:], drafts, strict=True):
        shown = [p for row in event.draft_probs for p in row if p is not None]
        assert all(p >= p_min - 1e-4 for p in shown)  # rounded
        left_out = len(prompts) * event.notes.get("unverified", 0.0)
        assert left_out <= int((draft.tokens != ABSENT).sum()) - len(shown) + 1e-6  # others are beyond a row's limit
        kinds.add((bool(left_out), bool(shown)))
    assert kinds >= {(True, True), (True, False)}


@pytest.mark.parametrize("name", ["eagle", "mtp", "mlp_speculator", "layer_skip", "draft_model"])
def test_a_chain_is_drafted_no_further_than_a_token_of_which_no_row_is_sure(name):
    target = ToyTarget(16, seed=4)
    options = {"draft": "chain"} if name in ("eagle", "mlp_speculator") else {}
    drafter = Confident(testing.make_drafter(name, target, **options), 1.0)
    _, events = output_and_events(target, drafter, PROMPTS[:1] % 16, tokens=20, k=4, stop_token_ids=())
    assert [event.notes["unverified"] for event in events[1:-2]] == [1.0] * 17


def test_every_text_is_routed_separately(tiny_llama):
    target = HFTarget(tiny_llama(61))
    drafter = load_drafter("router", target, drafter="ngram", drafts="suffix", trial=3)
    _, events = output_and_events(target, drafter)
    assert len({e.notes["route"] for e in events[1:7]}) == 2
    _, again = output_and_events(target, drafter)
    assert [e.notes["route"] for e in again[1:]] == [e.notes["route"] for e in events[1:]]


def test_memory_of_all_drafters_is_counted(folders, tiny_llama):
    target = HFTarget(tiny_llama(61))
    one = load_drafter("router", target, folders["good"])
    two = load_drafter("router", target, folders["good"], drafts=folders["bad"])
    assert two.weight_bytes == 2 * one.weight_bytes > 0
    list(generate(target, two, PROMPTS, GenerationConfig(8)))
    assert two.history_bytes == 0  # released


def test_a_draft_that_does_not_fit_is_refused(folders, tiny_llama):
    with pytest.raises(ValueError, match="vocabulary of 61"):
        load_drafter("router", ToyTarget(16), tiny_llama(16), drafts=folders["good"])


def noisy(model, scale):
    model.lm_head.weight.data += scale * torch.randn(61, 16, generator=torch.Generator().manual_seed(0))
    return model


def run_cascade(target, drafter, tokens=40):
    return output_and_events(target, drafter, tokens=tokens, k=5, stop_token_ids=(5, 9))


@pytest.mark.parametrize("options", [{}, {"inner": "suffix"}])
def test_the_draft_is_the_draft_models_own(options, tiny_llama):
    """Compares step by step, with rows of different lengths and with wrong guesses."""
    target, draft = HFTarget(tiny_llama(61)), noisy(tiny_llama(61), 0.01)
    alone, expected = run_cascade(target, load_drafter("draft_model", target, draft))
    got, events = run_cascade(target, load_drafter("cascade", target, draft, **options))
    assert got == alone == run_cascade(target, load_drafter("none", target))[0]
    assert [e.drafted for e in events] == [e.drafted for e in expected]
    for event, other in zip(events, expected, strict=True):
        for row, confidence in enumerate(event.draft_probs):
            assert confidence == pytest.approx(other.draft_probs[row], abs=1e-3)
    passes = [e.notes["passes"] for e in events[1:]]
    assert min(passes) < 3 and max(passes) == 5  # some guesses are accepted, some rejected


def test_a_third_model_may_guess(tiny_llama, tmp_path):
    target = HFTarget(tiny_llama(61))
    draft = tiny_llama(61)
    draft.save_pretrained(tmp_path)
    drafter = load_drafter("cascade", target, draft, inner="draft_model", inner_model=str(tmp_path))
    got, events = run_cascade(target, drafter)
    assert got == run_cascade(target, load_drafter("none", target))[0]
    assert {e.notes["passes"] for e in events[1:]} == {1.0}  # the guess of an equal model is always accepted
    assert drafter.weight_bytes == 2 * load_drafter("draft_model", target, draft).weight_bytes


def test_sampled_drafts_follow_the_draft_models_distribution(tiny_llama):
    rows, vocabulary = 6000, 6
    target, draft = ToyTarget(vocabulary), tiny_llama(vocabulary)
    draft.lm_head.weight.data *= 12.0  # far from uniform
    drafter = load_drafter("cascade", target, draft)
    ids = torch.tensor([[1, 2, 3, 4, 1, 2]])
    text = ids.expand(rows, -1)
    drafter.start(rows, Sampling(1.0), torch.Generator().manual_seed(0))
    drafter.observe(Progress(text[:, :-1], text[:, 1:], [5] * rows))
    with torch.no_grad():
        drafted = drafter.propose(Budget(3, 3))
        first = draft(ids).logits[0, -1].softmax(-1)
        pairs = torch.cat([ids.expand(vocabulary, -1), torch.arange(vocabulary)[:, None]], 1)
        second = draft(pairs).logits[:, -1].softmax(-1)
    assert drafted.notes["passes"] == 3
    torch.testing.assert_close(drafted.probs[0, 0], first)
    torch.testing.assert_close(drafted.probs[:, 1], second[drafted.tokens[:, 0]])
    joint = torch.zeros(vocabulary, vocabulary)
    joint.index_put_((drafted.tokens[:, 0], drafted.tokens[:, 1]), torch.tensor(1.0 / rows), accumulate=True)
    torch.testing.assert_close(joint, first[:, None] * second, atol=0.02, rtol=0.0)


def test_a_draft_model_that_reads_chains_only():
    model = tiny.build("mamba")
    target = HFTarget(tiny.build("llama"))
    alone, expected = run_cascade(target, load_drafter("draft_model", target, model), 12)
    got, events = run_cascade(target, load_drafter("cascade", target, model), 12)
    assert got == alone == run_cascade(target, load_drafter("none", target), 12)[0]
    assert [e.drafted for e in events] == [e.drafted for e in expected]


def test_random_draft_model_learns_to_be_accepted(tiny_llama):
    target = ToyTarget(16, seed=3, order=1)
    drafter = load_drafter("online", target, tiny_llama(16), every=2, lr=0.01)
    prompt = torch.tensor([[3, 1, 4, 1]])
    _, events = output_and_events(target, drafter, prompt, 120, sampling=Sampling(1.0), stop_token_ids=())
    early = next(e for e in events if e.notes.get("updates") == 5)
    late = events[-1]
    assert late.notes["accepted"] > early.notes["accepted"] + 0.1
    assert late.notes["train_loss"] < early.notes["train_loss"] - 0.3
    trained = [e for e in events if e.notes.get("train_ms")]
    assert len(trained) == pytest.approx(late.notes["updates"], abs=1)


def test_learned_weights_persist_unless_reset(tiny_llama):
    target = ToyTarget(16, seed=3)
    for reset in (False, True):
        drafter = load_drafter("online", target, tiny_llama(16), every=4, reset=reset)
        before = [w.clone() for w in drafter.drafters[0].head.parameters()]
        output_and_events(target, drafter, PROMPTS[:1] % 16)
        drafter.start(1, Sampling(), torch.Generator())
        after = list(drafter.drafters[0].head.parameters())
        assert all(map(torch.equal, before, after)) is reset


def learnt_batches(drafter, monkeypatch):
    """Return a list to which every batch that the drafter learns from is added."""
    learner, batches = drafter.drafters[0], []
    loss = learner.loss
    monkeypatch.setattr(learner, "loss", lambda batch: (batches.append(batch), loss(batch))[1])
    return batches


def test_it_learns_the_target_distribution_at_accepted_tokens(tiny_llama, monkeypatch):
    """The loss gets the latest columns of text in order, with exactly the target's probabilities."""
    target = ToyTarget(16, seed=5)
    drafter = load_drafter("online", target, tiny_llama(16), every=3)
    batches = learnt_batches(drafter, monkeypatch)
    prompt = PROMPTS[:1] % 16
    text, _ = output_and_events(target, drafter, prompt, 100, stop_token_ids=())
    full_text = prompt[0].tolist() + text[0]
    assert MIN_COLUMNS <= batches[0].inputs.shape[1] < batches[-1].inputs.shape[1] == WINDOW
    for batch in batches:
        inputs, outputs = batch.inputs[0].tolist(), batch.outputs[0].tolist()
        assert inputs[1:] == outputs[:-1]
        end = next(i for i in range(len(full_text)) if full_text[i : i + len(inputs)] == inputs) + len(inputs)
        assert outputs[-1] == full_text[end]
        for column in range(len(inputs)):
            place = end - len(inputs) + column
            got = batch.probs[0, column]
            if place < prompt.shape[1]:  # in the prompt the text itself is the label
                assert int(got.argmax()) == full_text[place + 1] and float(got.max()) == 1.0
            else:
                torch.testing.assert_close(got, target.next_probs(full_text[: place + 1]))


def test_earlier_texts_are_read_again(tiny_llama, monkeypatch):
    target = ToyTarget(16, seed=5)
    drafter = load_drafter("online", target, tiny_llama(16), every=8)
    batches = learnt_batches(drafter, monkeypatch)
    first, _ = output_and_events(target, drafter, PROMPTS[:1] % 16, 80, stop_token_ids=())
    assert {len(batch.inputs) for batch in batches} == {1}
    batches.clear()
    output_and_events(target, drafter, PROMPTS[1:2] % 16, 30, stop_token_ids=())
    length = batches[0].inputs.shape[1]
    assert batches[0].inputs.shape[0] == 2
    assert batches[0].outputs[1].tolist() == first[0][-length:]


@pytest.mark.parametrize(
    "name",
    ["draft_model", *(n for n in METHODS if issubclass(method(n), Head) and hasattr(method(n), "loss"))],
)
def test_what_was_loaded_learns_without_a_change(name, tiny_llama):
    target = ToyTarget(16, seed=3)
    torch.manual_seed(0)
    head = tiny_llama(16).requires_grad_(False) if name == "draft_model" else method(name).fresh(target)
    before = deepcopy(head.state_dict())
    drafter = load_drafter("online", target, head, drafter=name, every=2, lr=0.003)
    prompt = PROMPTS[:1] % 16
    got, events = output_and_events(target, drafter, prompt, 30, stop_token_ids=())
    assert got == output_and_events(target, load_drafter("none", target), prompt, 30, stop_token_ids=())[0]
    assert events[-1].notes["updates"] > 3
    assert all(torch.equal(before[key], weight) for key, weight in head.state_dict().items())
    assert not any(weight.requires_grad for weight in head.parameters())
    losses = [e.notes["train_loss"] for e in events if "train_loss" in e.notes]
    assert min(losses[-3:]) < losses[0]


def test_half_precision_weights_keep_small_steps(tiny_llama):
    target = HFTarget(tiny_llama(61))
    drafter = load_drafter("online", target, tiny_llama(61).bfloat16(), every=1, lr=0.00002)
    output_and_events(target, drafter)
    learner = drafter._trainer
    assert all(w.dtype == torch.bfloat16 for w in learner.weights)
    assert all(m.dtype == torch.float32 for m in learner._masters)
    assert any(bool((m != w.float()).any()) for m, w in zip(learner._masters, learner.weights, strict=True))


def test_a_drafter_without_weights_is_refused():
    with pytest.raises(ValueError, match="'ngram' has no weights to train; choose a drafter with weights"):
        load_drafter("online", ToyTarget(16), drafter="ngram")
