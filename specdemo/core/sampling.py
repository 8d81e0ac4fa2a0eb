"""Conversion of logits to probabilities to tokens. Target (p) and sampled drafts (q) use the same transform."""

import torch
from torch import Generator, Tensor

from specdemo.core.sampling_settings import Sampling as Sampling

MANY_SCORES = 32_768


def to_probs(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return float32 probabilities [..., V] of logits [..., V]; a one-hot if greedy."""
    if sampling.greedy:
        return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    scores = logits.float() / sampling.temperature
    minus_infinity = float("-inf")
    if 0 < sampling.top_k < scores.shape[-1]:
        smallest = scores.topk(sampling.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < smallest, minus_infinity)
    if sampling.top_p < 1.0:
        ascending, order = scores.sort(dim=-1, descending=False)
        outside = ascending.softmax(-1).cumsum(-1) <= 1.0 - sampling.top_p
        outside[..., -1] = False  # the most likely token always stays
        scores = scores.masked_fill(outside.scatter(-1, order, outside), minus_infinity)
    probs = scores.softmax(-1)
    if sampling.min_p > 0.0:
        probs = probs.masked_fill(probs < sampling.min_p * probs.amax(-1, keepdim=True), 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def argmax(scores: Tensor) -> Tensor:
    """Return the index of the first largest score in each row, [...] int64 for scores [..., V].

    numpy's argmax is several times as fast as torch's on a CPU. After a forward pass its code is in no cache, so few
    scores are faster with torch.
    """
    if scores.shape[-1] < MANY_SCORES or not scores.is_cpu or scores.dtype != torch.float32 or scores.requires_grad:
        return scores.argmax(-1)
    return torch.from_numpy(scores.numpy().argmax(-1, keepdims=True)).squeeze(-1)


def draw(probs: Tensor, rng: Generator | None) -> Tensor:
    """Sample tokens [...] int64 from probs [..., V], which need not be normalised.

    Uses the exponential race, argmax of p / e, which needs no host synchronisation. For a one-hot it is the argmax for
    any noise, so greedy decoding needs none (`rng` None).
    """
    if rng is None:
        return argmax(probs)
    return draw_with_noise(probs, exponential_noise(probs, rng))


def exponential_noise(like: Tensor, rng: Generator) -> Tensor:
    """Return the noise to sample from probabilities with the shape of `like`."""
    return torch.empty_like(like).exponential_(generator=rng)


def draw_with_noise(probs: Tensor, noise: Tensor) -> Tensor:
    """Sample as `draw` does, with the given noise."""
    return (probs / noise.clamp_min(torch.finfo(noise.dtype).tiny)).argmax(-1)
