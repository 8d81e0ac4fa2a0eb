"""The contract of all methods: `specdemo.testing` on every entry of METHODS."""

import pytest
import torch

from specdemo import testing
from specdemo.core.sampling import PositionNoise
from specdemo.methods import METHODS, load_drafter, method, parse_options
from specdemo.methods.adaptive import Adaptive
from specdemo.models.toy import ToyTarget


@pytest.mark.parametrize("check", [c for c in testing.CHECKS if c is not testing.sampling_is_reproducible])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_keeps_the_contract(name, check):
    check(name)


@pytest.mark.parametrize("name", METHODS)
def test_sampling_repeats_with_the_seed(name, monkeypatch):
    """The draft length of `adaptive` depends on measured times, so all steps take the same here."""
    timed = Adaptive.on_step_timed
    monkeypatch.setattr(Adaptive, "on_step_timed", lambda self, ms: timed(self, dict.fromkeys(ms, 1.0)))
    testing.sampling_is_reproducible(name)


def test_the_contract_test_finds_what_is_broken(monkeypatch):
    """Each fault is inserted into a method that fulfils the contract."""
    ngram = method("ngram")
    testing.check_method("ngram")
    faults = {
        "propose": lambda self, budget, propose=ngram.propose: propose(self, type(budget)(budget.depth + 1, 99)),
        "start": lambda self, batch, sampling, rng, start=ngram.start: self._rows or start(self, batch, sampling, rng),
        "summary": "no sentence",
    }
    for name, fault in faults.items():
        with monkeypatch.context() as patched, pytest.raises((AssertionError, ValueError)):
            patched.setattr(ngram, name, fault)
            testing.check_method("ngram")


@pytest.mark.parametrize("fault", [
    lambda noise, count: noise._compute(range(count)).exponential_(generator=noise),  # by the draws so far
    lambda noise, count: noise._compute(range(count)) * torch.arange(1, 17).roll(count),  # by the width
], ids=["draws", "width"])  # fmt: skip
def test_the_contract_test_finds_noise_that_depends_on_more_than_the_position(monkeypatch, fault):
    monkeypatch.setattr(PositionNoise, "ahead", fault)
    with pytest.raises(AssertionError):
        testing.output_matches_baseline("ngram")


def test_unknown_names_get_suggestions():
    with pytest.raises(ValueError, match="did you mean 'draft_model'"):
        method("draft-model")
    with pytest.raises(ValueError, match="unknown option 'max_m' of method 'ngram'; did you mean 'max_n'"):
        parse_options("ngram", {"max_m": 3})
    with pytest.raises(ValueError, match="between 1 and 8"):
        parse_options("ngram", {"max_n": 99})
    with pytest.raises(ValueError, match="must be a number"):
        parse_options("ngram", {"max_n": "many"})
    assert parse_options("suffix", {"remember": "True"}).remember is True
    with pytest.raises(ValueError, match="option 'remember' must be true or false, not 'yes'"):
        parse_options("suffix", {"remember": "yes"})
    with pytest.raises(ValueError, match="needs a model"):
        load_drafter("draft_model", ToyTarget(16))
    with pytest.raises(ValueError, match="takes no model"):
        load_drafter("ngram", ToyTarget(16), "stories")
