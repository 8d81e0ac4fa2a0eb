import pytest
import torch

from specdemo.core.protocol import Budget, GenerationConfig
from specdemo.engine.loop import generate
from specdemo.methods import load_drafter
from specdemo.models.target import HFTarget
from specdemo.models.toy import ToyTarget
from tests.generation import rows_of

PROMPTS = torch.randint(3, 61, (3, 9), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def folders(tiny_llama, tmp_path):
    """Save a draft model that equals the target and a random one, and return their folders."""
    good, bad = tiny_llama(61), tiny_llama(61)
    bad.lm_head.weight.data = torch.randn(61, 16, generator=torch.Generator().manual_seed(0))
    for name, model in (("good", good), ("bad", bad)):
        model.save_pretrained(tmp_path / name)
    return {name: str(tmp_path / name) for name in ("good", "bad")}


def output_and_events(target, drafter, prompts=PROMPTS, **config):
    config = GenerationConfig(60, budget=Budget(3, 3), **config)
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
    with pytest.raises(ValueError, match="'draft_model' needs a model"):
        load_drafter("router", ToyTarget(16), tiny_llama(16), drafts="draft_model")
