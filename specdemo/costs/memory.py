"""Memory of a model: its weights, and the cache and buffers of every text that it reads at the same time.

models/memory.py counts the weights of files before they are loaded. Both leave out activations: compare `HEADROOM`
times the bytes with the free memory.
"""

from dataclasses import dataclass

from specdemo.costs.shapes import Shape

HEADROOM = 1.1  # memory factor for activations, buffers and fragmentation


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of a model in bytes. A text may be a lane, or a row of a batch."""

    weights: int
    per_token: int  # keys and values per token of a text
    per_text: int = 0  # buffers of a text, whatever its length
    state: int = 0  # recurrent states of a text

    def bytes(self, tokens: int, texts: int = 1) -> int:
        """Return the size of the weights and of the caches of `texts` texts of so many tokens."""
        return self.weights + texts * (tokens * self.per_token + self.per_text + self.state)


def footprint_of(shape: Shape, context: int, dtype_bytes: float) -> Footprint:
    """Return the memory of a model that reads `context` tokens per text, of which windows keep the last ones only."""
    return Footprint(int(shape.weight_bytes(dtype_bytes)), 0, int(shape.kv_bytes(context, dtype_bytes)))
