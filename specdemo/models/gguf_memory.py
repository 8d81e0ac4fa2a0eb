"""Memory of GGUF models: weights, KV caches, and what to choose if they do not fit."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdemo.core.shapes import HEADROOM
from specdemo.models.devices import DEVICE_KINDS, best_device, device_kind
from specdemo.models.gguf_files import local_header, stored_bytes
from specdemo.models.llamacpp import CACHE_BYTES, LlamaCppSettings, cache_type_of, library
from specdemo.models.sizes import Footprint, free_bytes, gigabytes

SHORT_CONTEXT = 256  # tokens; a shorter context is no advice
OUTPUTS = 256  # rows of logits that llama.cpp allocates per context, one for each sequence


@dataclass(frozen=True, slots=True)
class GGUFNeeds:
    """Memory of a target and its drafters in bytes.

    tokens: expected length of a lane. lanes: number of KV caches of the target; each drafter has one.
    """

    name: str
    target: Footprint
    drafters: Sequence[Footprint]
    tokens: int
    lanes: int

    @property
    def weights(self) -> int:
        """Return the size of all weights."""
        return self.target.weights + sum(drafter.weights for drafter in self.drafters)

    @property
    def per_token(self) -> int:
        """Return the size of one token in all caches."""
        return self.lanes * self.target.per_token + sum(drafter.per_token for drafter in self.drafters)

    @property
    def buffers(self) -> int:
        """Return the size of the buffers of all contexts."""
        return self.lanes * self.target.per_lane + sum(drafter.per_lane for drafter in self.drafters)

    def check(self, free: int) -> None:
        """Raise ValueError if they do not fit, with a context that fits or the advice to choose smaller weights."""
        weights, cache = HEADROOM * self.weights, HEADROOM * self.tokens * self.per_token
        if weights + cache + self.buffers <= free:
            return
        context = int((free - weights - self.buffers) / HEADROOM / max(self.per_token, 1))
        fix = f"at most {context:,} tokens of prompt and output, or " if context >= SHORT_CONTEXT else ""
        other = size_text(cache + self.buffers)
        raise ValueError(
            f"{self.name} needs {size_text(weights)} for weights and {other} for the KV cache and buffers, this "
            f"machine has {size_text(free)} free; choose {fix}a smaller quantisation such as Q4_K_M"
        )

    def describe(self) -> str:
        """Return weights, cache, and the context that the drafters displace."""
        cache = self.tokens * self.per_token
        words = f"{size_text(self.weights)} of weights and {size_text(cache)} of KV cache for {self.tokens:,} tokens"
        if not self.drafters or not self.target.per_token:
            return words
        extra = sum(drafter.weights + self.tokens * drafter.per_token for drafter in self.drafters)
        return f"{words}; the drafter takes the memory of {extra // self.target.per_token:,} tokens of context"


def gguf_footprint(name: str, settings: LlamaCppSettings) -> Footprint:
    """Return the memory of a model's weights, of its KV cache per token and of its buffers: 0 before the download.

    Raises ValueError for another kind of file.
    """
    header = local_header(name)
    if header is None:
        return Footprint(stored_bytes(name), 0)
    per_token = header.cache_bytes(CACHE_BYTES[cache_type_of(header, settings.cache_type)])
    return Footprint(stored_bytes(name), per_token, OUTPUTS * header.tokens * 4)


def free_memory() -> int:
    """Return the free memory that llama.cpp can use: main memory, and that of GPUs if it was built for them."""
    gpu = best_device()
    separate = device_kind(gpu).separate_memory and library().llama_supports_gpu_offload()
    return DEVICE_KINDS["cpu"].free(torch.device("cpu")) + (sum(free_bytes(gpu)) if separate else 0)


def size_text(count: float) -> str:
    """Format bytes in MB or GB."""
    return gigabytes(count) if count >= 100_000_000 else f"{count / 1e6:.1f} MB"
