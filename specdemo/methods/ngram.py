"""Prompt lookup: drafts the tokens that followed the most recent occurrence of the current suffix (Saxena 2023).

The longest suffix of `min_n` to `max_n` tokens that occurred before is used. A match that reaches the end of the text
continues with its own output, like an LZ77 copy, so that loops are drafted to full length. A longer match in the corpus
comes before a shorter one in the text.
"""

from typing import Self

from pydantic import model_validator
from torch import Generator

from specdemo.core.host_copy import padded
from specdemo.core.protocol import Budget, Progress, Target
from specdemo.core.sampling import Sampling
from specdemo.core.tree import ABSENT, Draft
from specdemo.methods import setting
from specdemo.methods.base import LookupOptions, Method, corpus_ids


class _NGramIndex:
    """The tokens of a row or a corpus, and for every n-gram with a continuation the position after its last one."""

    def __init__(self, sizes: range) -> None:
        self.ids: list[int] = []
        self._sizes = sizes
        self._ends: dict[tuple[int, ...], int] = {}

    def extend(self, ids: list[int]) -> None:
        for token in ids:
            for n in self._sizes:  # an n-gram is indexed when the token after it is known
                if len(self.ids) >= n:
                    self._ends[tuple(self.ids[-n:])] = len(self.ids)
            self.ids.append(token)

    def match(self, ids: list[int]) -> tuple[int, int]:
        """Return the length of the longest suffix of a text that occurs here, and the position after it."""
        for n in reversed(self._sizes):
            end = self._ends.get(tuple(ids[-n:])) if len(ids) >= n else None
            if end is not None:
                return n, end
        return 0, 0

    def continuation(self, length: int, corpus: Self) -> list[int]:
        """Return what followed the last occurrence of the longest suffix of this text, here or in the corpus."""
        size, end = self.match(self.ids)
        corpus_size, corpus_end = corpus.match(self.ids)
        if corpus_size > size:
            return corpus.ids[corpus_end : corpus_end + length]
        period = len(self.ids) - end
        return [self.ids[end + i % period] for i in range(length)] if size else []


class NGramOptions(LookupOptions):
    max_n: int = setting(8, "longest suffix to match, in tokens", low=1, high=8, step=1)
    min_n: int = setting(1, "shortest suffix to match, in tokens", low=1, high=8, step=1)

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.min_n > self.max_n:
            raise ValueError(f"option 'min_n' ({self.min_n}) must not exceed 'max_n' ({self.max_n})")
        return self


class NGram(Method, method="ngram"):
    looks_up = True
    summary = "Drafts what followed the last occurrence of the current words; free, and useful where text repeats."

    Options = NGramOptions

    def __init__(self, target: Target, model: object = None, options: NGramOptions | None = None) -> None:
        options = options or self.Options()
        self._sizes = range(options.min_n, options.max_n + 1)
        self._device = target.device
        self._rows: list[_NGramIndex] = []
        self._corpus_ids = corpus_ids(options, target)

    def start(self, batch: int, sampling: Sampling, rng: Generator) -> None:
        self._corpus = _NGramIndex(self._sizes)
        self._corpus.extend(self._corpus_ids)  # here, so that the lane's clock counts it
        self._rows = [_NGramIndex(self._sizes) for _ in range(batch)]

    def observe(self, progress: Progress) -> None:
        if not self._rows[0].ids:
            for row, first in zip(self._rows, progress.inputs[:, :1].tolist(), strict=True):
                row.extend(first)
        for row, new_ids in zip(self._rows, progress.output_ids(), strict=True):
            row.extend(new_ids)

    def propose(self, budget: Budget) -> Draft:
        continuations = [row.continuation(budget.chain, self._corpus) for row in self._rows]
        return Draft.chain(padded(continuations, self._device, ABSENT))
