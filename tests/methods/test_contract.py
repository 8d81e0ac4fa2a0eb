"""The contract of all methods: `specdemo.testing` on every entry of METHODS, also on a target of few abilities."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from specdemo import testing
from specdemo.core.protocol import Budget, Capabilities, Forward, GenerationConfig, Target
from specdemo.core.sampling import PositionNoise, Sampling
from specdemo.core.tree import ABSENT
from specdemo.engine.loop import generate, warm_up
from specdemo.methods import BUILT_IN, METHODS, load_drafter, method, model_method, parse_options
from specdemo.methods.adaptive import Adaptive
from specdemo.models.toy import ToyTarget
from specdemo.testing import tiny_llama


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
    with pytest.raises(ValueError, match="must be a number"):
        parse_options("ngram", {"max_n": "many"})
    assert parse_options("suffix", {"remember": "True"}).remember is True
    with pytest.raises(ValueError, match="option 'remember' must be true or false, not 'yes'"):
        parse_options("suffix", {"remember": "yes"})
    with pytest.raises(ValueError, match="needs a model"):
        load_drafter("draft_model", ToyTarget(16))
    with pytest.raises(ValueError, match="takes no model"):
        load_drafter("ngram", ToyTarget(16), "stories")


PROMPT = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]])
WITHOUT_WEIGHTS = [name for name in BUILT_IN if not method(model_method(name)).needs_model and name != "layer_skip"]
WRAPPERS = [name for name in BUILT_IN if model_method(name) == "draft_model" and name != "draft_model"]
HEADS = ["medusa", "mlp_speculator", "mtp", "eagle", "dflash", "gemma4_assistant"]


class UncachedTarget(Target):
    """Llama without a KV cache: every pass reads the whole text. It verifies chains only."""

    name = "uncached"
    capabilities = Capabilities(trees=False)
    stop_token_ids = ()
    device, dtype = torch.device("cpu"), torch.float32
    vocab_size, hidden_size, num_layers, max_length = 16, 32, 2, 512

    def __init__(self):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=64,
            num_hidden_layers=self.num_layers,
            num_attention_heads=2,
            initializer_range=0.5,
        )
        self.llama = LlamaForCausalLM(config).eval()
        self.embed: nn.Module = self.llama.get_input_embeddings()
        self.lm_head: nn.Module = self.llama.get_output_embeddings()
        self.text, self.slots = [], []

    def start(self, tokens, taps=(), reserve=0):
        self.text = tokens[0].tolist()
        return self._read([])

    def forward(self, tokens, parents, taps=()):
        self.slots = [token for token in tokens[0].tolist() if token != ABSENT]
        return self._read(self.slots)

    def commit(self, path):
        self.text += [self.slots[slot] for slot in path[0]]

    def crop(self, lengths):
        del self.text[lengths[0] :]

    def release(self):
        self.text = []

    def _read(self, slots):
        with torch.no_grad():
            logits = self.llama(torch.tensor([self.text + slots]), use_cache=False).logits
        return Forward(logits[:, -max(1, len(slots)) :])


def text(target, drafter, sampling=None, new_tokens=48):
    config = GenerationConfig(new_tokens, sampling or Sampling(), Budget(4, 8), seed=7)
    return [token for event in generate(target, drafter, PROMPT, config) for token in event.emitted[0]]


def draft_of(name):
    return tiny_llama(UncachedTarget.vocab_size) if method(model_method(name)).needs_model else None


@pytest.mark.parametrize("name", [*WITHOUT_WEIGHTS, "draft_model", "pard", *WRAPPERS])
def test_greedy_output_is_that_of_transformers(name):
    target = UncachedTarget()
    drafter = load_drafter(name, target, draft_of(name))
    expected = target.llama.generate(PROMPT, max_new_tokens=48, do_sample=False, pad_token_id=0, eos_token_id=None)
    warm_up(target, drafter, PROMPT, GenerationConfig(16))
    output = text(target, drafter)
    if method(name).exact:
        assert output == expected[0, PROMPT.shape[1] :].tolist()
    else:
        assert len(output) == 48


@pytest.mark.parametrize("name", HEADS)
def test_heads_are_rejected_before_their_weights_are_loaded(name):
    with pytest.raises(ValueError, match="reads the target's hidden states, which uncached does not support; choose"):
        load_drafter(name, UncachedTarget(), "a/head-that-does-not-exist")


def test_a_head_of_layers_that_are_not_returned_is_rejected():
    target = UncachedTarget()
    target.capabilities = Capabilities(trees=False, hidden_states=frozenset({-1}))
    eagle = method("eagle")
    with pytest.raises(ValueError, match="reads the hidden states of layers .*, which uncached does not return"):
        load_drafter("eagle", target, eagle.fresh(target, "eagle3"))
    assert load_drafter("eagle", target, eagle.fresh(target, "eagle1")).taps == (-1,)


def test_a_batch_beyond_the_target_is_rejected():
    target = UncachedTarget()
    with pytest.raises(ValueError, match="uncached decodes 1 text at a time, not 2; lower the batch size"):
        list(generate(target, load_drafter("ngram", target), PROMPT.repeat(2, 1), GenerationConfig(4)))
