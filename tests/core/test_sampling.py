"""`to_probs` against the processors of transformers, and `draw` against its distribution."""

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdemo.core.sampling import FINALISER, PositionNoise, Sampling, argmax, draw, draw_with_noise, to_probs

VOCABULARY = 50


def oracle(logits, sampling):
    """Return probabilities from the processors of transformers, in the order in which its `generate` applies them."""
    steps = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        steps.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        steps.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0.0:
        steps.append(MinPLogitsWarper(sampling.min_p))
    return steps(torch.zeros(len(logits), 1, dtype=torch.int64), logits).softmax(-1)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.integers(0, 10_000),
    st.sampled_from([0.1, 0.7, 1.0, 2.5]),
    st.sampled_from([0, 1, 5, VOCABULARY, 1000]),
    st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    st.sampled_from([0.0, 0.02, 0.3, 0.99]),
    st.sampled_from([0.5, 3.0, 20.0]),
)
def test_the_same_as_transformers(seed, temperature, top_k, top_p, min_p, spread):
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * spread
    sampling = Sampling(temperature, top_k, top_p, min_p)
    probs, expected = to_probs(logits, sampling), oracle(logits, sampling)
    assert torch.equal(probs > 0, expected > 0)
    assert torch.allclose(probs, expected, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_logits_become_float32_rows_that_sum_to_one(dtype):
    logits = torch.randn(2, 3, VOCABULARY, generator=torch.Generator().manual_seed(1)).to(dtype)
    for sampling in (Sampling(), Sampling(0.8, 7, 0.9, 0.1), Sampling(0.001)):
        probs = to_probs(logits, sampling)
        assert probs.dtype == torch.float32
        assert probs.shape == logits.shape
        assert torch.allclose(probs.sum(-1), torch.ones(2, 3))


def test_greedy_is_a_one_hot_on_the_argmax_with_any_other_settings():
    logits = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(2))
    probs = to_probs(logits, Sampling(0.0, 3, 0.5, 0.5))
    assert torch.equal(probs.argmax(-1), logits.argmax(-1))
    assert probs.sum() == 4
    assert probs.max() == 1
    assert torch.equal(to_probs(logits, Sampling(0.001)).argmax(-1), logits.argmax(-1))


def test_draw_follows_the_distribution(fits):
    probs = torch.tensor([0.02, 0.0, 0.18, 0.5, 0.3])
    rng = torch.Generator().manual_seed(3)
    assert fits(draw(probs.expand(20_000, 5), rng), probs)
    assert fits(draw(7 * probs.expand(20_000, 5), rng), probs)


def noise_of(rows=3, position=5, seed=1, size=VOCABULARY):
    return PositionNoise(seed, rows, position, size, torch.device("cpu"))


@pytest.mark.parametrize("size, places", [(5, 20_000), (300, 20_000)])
def test_noise_by_position_samples_a_distribution_and_pairs_of_tokens_independently(fits, size, places):
    """The order of the first two tokens of a race follows sampling without replacement."""
    probs = torch.linspace(0.1, 1.0, size) ** 3
    probs /= probs.sum()
    noise = noise_of(1, 0, size=size).ahead(places)[0]
    assert fits(draw_with_noise(probs, noise), probs)
    best = (probs / noise).topk(2).indices
    pairs = probs[:, None] * probs / (1.0 - probs[:, None])
    assert fits(best[:, 0] * size + best[:, 1], pairs.fill_diagonal_(0.0).flatten())
    assert fits(
        draw_with_noise(probs, noise)[1:] + size * draw_with_noise(probs, noise)[:-1],
        (probs[:, None] * probs).flatten(),
    )


def test_noise_depends_on_seed_row_position_and_token_only():
    noise = noise_of().ahead(9)
    one_by_one = noise_of()
    for place in range(9):
        assert torch.equal(one_by_one.ahead(1)[:, 0], noise[:, place])
        one_by_one.advance([1, 1, 1])
    ragged = noise_of()
    ragged.ahead(2)
    ragged.advance([0, 2, 5])
    assert all(torch.equal(ragged.ahead(4)[row], noise[row, n : n + 4]) for row, n in enumerate([0, 2, 5]))
    torch.rand(3, generator=ragged)
    assert torch.equal(noise_of(2).ahead(9), noise[:2])
    assert torch.equal(noise_of(position=7).ahead(7), noise[:, 2:])
    assert torch.equal(noise_of(size=20).ahead(9), noise[..., :20])
    assert len(torch.cat([noise, noise_of(seed=2).ahead(9)]).unique()) > 0.999 * 2 * noise.numel()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda noise: pickle.loads(pickle.dumps(noise))])
def test_a_copied_noise_is_the_same(copied):
    noise = noise_of(2)
    noise.ahead(3)
    noise.advance([1, 4])
    torch.rand(3, generator=noise)
    twin = copied(noise)
    assert torch.equal(twin.ahead(5), noise.ahead(5))
    assert torch.equal(torch.rand(3, generator=twin), torch.rand(3, generator=noise))


def test_noise_is_finite_and_independent_for_tokens_that_differ_in_any_bit(fits):
    """Ids 39,402 and 24,640 differ only in the highest bit of a hash."""
    places, end, noise = 40, 2_000, noise_of(1, 0, size=49_152)
    pairs = torch.tensor([(39_402, 24_640), *((12_345, 12_345 ^ 1 << bit) for bit in range(16))])
    gaps = []
    for _ in range(0, end, places):
        ahead = noise.ahead(places)[0]
        assert ahead.amin() > 0.0 and ahead.amax() < 17.0  # one that is infinite lets tokens of probability 0 win
        first, second = torch.exp(-ahead[:, pairs]).unbind(-1)
        gaps.append((first - second) % 1.0)
        noise.advance([places])
    for bins in (4, 16):
        counts = (torch.cat(gaps) * bins).long().clamp_max(bins - 1)
        assert all(fits(counts[:, pair], torch.full((bins,), 1.0 / bins)) for pair in range(len(pairs)))


def test_noise_is_that_of_whole_numbers_without_overflow():
    """A device that multiplies 64-bit integers gives the same noise as one that keeps the low 32 bits."""
    noise = noise_of(1, 0)
    mask, factor = noise._key(0, 0)
    for token, e in enumerate(noise.ahead(1)[0, 0].double().tolist()):
        hashed = (token ^ mask) * factor % 2**31
        for shift, multiplier in FINALISER:
            hashed = (hashed ^ hashed >> shift) * multiplier % 2**31
        assert e == pytest.approx(-math.log1p(-(hashed + 0.5) / 2**31), rel=1e-6)


@pytest.mark.parametrize("wrong, message", [
    ({"temperature": -1.0}, "temperature must be 0"), ({"temperature": 1e-9}, "between 0.001 and 100"),
    ({"temperature": float("nan")}, "temperature"), ({"temperature": float("inf")}, "temperature"),
    ({"top_k": -1}, "top_k must be 0"), ({"top_p": 0.0}, "top_p must be above 0"), ({"top_p": 1.5}, "top_p"),
    ({"min_p": 1.0}, "min_p must be at least 0"), ({"min_p": float("nan")}, "min_p"),
])  # fmt: skip
def test_invalid_sampling_settings_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**wrong)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 3, 7), (2, 0, 7)])
@pytest.mark.parametrize("many", [1, 1000])
def test_argmax_is_that_of_torch_and_the_first_of_equal_scores(shape, dtype, many, monkeypatch):
    monkeypatch.setattr("specdemo.core.sampling.MANY_SCORES", many)
    scores = torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    best = argmax(scores)
    assert best.dtype == torch.int64 and torch.equal(best, scores.argmax(-1))
    assert torch.equal(argmax(scores.transpose(0, -1).clone().transpose(0, -1)), best)
    assert not best.numel() or int(argmax(torch.tensor([[0.0, 2.0, 2.0]]))) == 1
