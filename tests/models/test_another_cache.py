"""A cache of another kind: one file, and the line that selects it (CONTRIBUTING.md)."""

import pytest

import specdemo.models.target
from specdemo.core.protocol import Budget, GenerationConfig
from specdemo.kv.cache import SlabCache
from specdemo.methods import BASELINE
from specdemo.models.target import HFTarget
from specdemo.testing import make_drafter, output_tokens
from tests.models.tiny import build, texts


class HalfCache(SlabCache):
    """A cache that stores keys and values in half the bytes and returns them in the layer's dtype."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        cached = super().update(key_states.bfloat16(), value_states.bfloat16(), layer_idx)
        return tuple(states.to(key_states.dtype) for states in cached)


@pytest.fixture
def half(monkeypatch):
    monkeypatch.setattr(specdemo.models.target, "SlabCache", HalfCache)
    return HFTarget(build("llama"))


@pytest.mark.parametrize("name", ["ngram", "draft_model", "medusa", "eagle", "layer_skip"])
@pytest.mark.parametrize("rows", [1, 3])
def test_chains_trees_and_batches_are_exact_on_it(half, name, rows):
    prompts, config = texts(rows, 13), GenerationConfig(24)
    plain = output_tokens(half, make_drafter(BASELINE, half), config, prompts)
    speculative = GenerationConfig(24, budget=Budget(6, 4))
    assert output_tokens(half, make_drafter(name, half), speculative, prompts) == plain
