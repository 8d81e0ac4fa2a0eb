"""Conversion of logits to probabilities to tokens. Target (p) and sampled drafts (q) use the same transform.

B rows, V vocabulary.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Self

import torch
from torch import Generator, Tensor

from specdemo.core.generation import Sampling as Sampling
from specdemo.core.host_copy import to_device

MANY_SCORES = 32_768
BITS = (1 << 31) - 1  # of a hash; int32 without the sign, because torch shifts it arithmetically
# (shift, multiplier) of the finaliser lowbias32 (C. Wellons, hash-prospector; constants of its issue 19)
FINALISER = (16, 0x21F0AAAD), (15, 0x735A2D97)
UNIT = (1.0 - 2.0**-24) / (BITS + 1)  # exact in float32; no uniform number rounds to 1, whose noise is infinite
BLOCK = 1 << 15  # numbers that one call computes at least, because small calls cost as much


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

    numpy's argmax is several times as fast as torch's on a CPU, in half precision 20 times with the conversion. After a
    forward pass its code is in no cache, so few scores are faster with torch.
    """
    if scores.shape[-1] < MANY_SCORES or not scores.is_cpu or not scores.is_floating_point() or scores.requires_grad:
        return scores.argmax(-1)
    return torch.from_numpy(scores.float().numpy().argmax(-1, keepdims=True)).squeeze(-1)


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


class PositionNoise(Generator):
    """Exponential noise that depends on seed, row, position in the text and token id only.

    It is the same for every drafter, width of a pass and number of draws so far, and on every device up to the last
    bit of the logarithm. Row, seed and position choose a random bijection of the 31-bit integers (xor and multiply,
    then a finaliser), which gives every token its own uniform number. Token ids enter as they are: they differ in low
    bits, which the products spread, whereas hashed ids may differ in the highest bit alone. As a generator it draws
    numbers in sequence, for code that needs no positions.
    """

    def __new__(cls, seed: int, rows: int, position: int, vocab_size: int, device: torch.device) -> Self:
        return super().__new__(cls, device)  # type: ignore[call-arg]  # missing in torch's stubs

    def __init__(self, seed: int, rows: int, position: int, vocab_size: int, device: torch.device) -> None:
        """position: of the next token in every row."""
        self._seed, self._positions, self._ids = (
            self.manual_seed(seed).initial_seed(),
            [position] * rows,
            torch.arange(vocab_size, dtype=torch.int32, device=device),
        )
        self._buffer = torch.empty(rows, 0, vocab_size, device=device)  # of the next positions

    def ahead(self, count: int) -> Tensor:
        """Return the noise [B, count, V] of the next `count` tokens of every row."""
        size = self._buffer.shape[1]
        if size < count:
            more = max(count - size, BLOCK // (len(self._positions) * len(self._ids)))
            computed = self._compute(range(size, size + more))
            self._buffer = torch.cat([self._buffer, computed], 1) if size else computed
        return self._buffer[:, :count]

    def advance(self, lengths: Sequence[int]) -> None:
        """Move row b forward by lengths[b] tokens."""
        self._positions = [position + n for position, n in zip(self._positions, lengths, strict=True)]
        self._buffer = self._buffer[:, lengths[0] if len({*lengths}) == 1 else self._buffer.shape[1] :]

    def __reduce__(self) -> tuple[object, ...]:  # type: ignore[override]  # torch rebuilds generators only
        # torch would copy a plain generator, without seed and positions
        shape = len(self._positions), 0, len(self._ids)
        return _restore, (self._seed, *shape, self.device, self._positions, self.get_state())

    def _compute(self, offsets: range) -> Tensor:
        keys = [[self._key(row, position + i) for i in offsets] for row, position in enumerate(self._positions)]
        mask, factor = to_device(keys, self._ids.device, torch.int32).unbind(-1)
        hashed = (self._ids ^ mask[..., None]).mul_(factor[..., None]).bitwise_and_(BITS)
        for shift, multiplier in FINALISER:
            hashed ^= hashed >> shift
            hashed.mul_(multiplier).bitwise_and_(BITS)
        return hashed.float().add_(0.5).mul_(-UNIT).log1p_().neg_()

    def _key(self, row: int, position: int) -> tuple[int, int]:
        """Return a random number and a random odd number of 31 bits."""
        digest = blake2b(f"{self._seed} {row} {position}".encode(), digest_size=8).digest()
        number = int.from_bytes(digest)
        return number & BITS, number >> 32 & BITS | 1


def _restore(
    seed: int, rows: int, start: int, vocab_size: int, device: torch.device, lengths: list[int], state: Tensor
) -> PositionNoise:
    """Return a copy of a noise. lengths: positions of its rows, after `start`. state: of the generator."""
    noise = PositionNoise(seed, rows, start, vocab_size, device)
    noise.advance(lengths)
    noise.set_state(state)
    return noise
