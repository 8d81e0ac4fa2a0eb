"""Training data per step, and the held-out text for evaluation."""

from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer
from torch import Tensor

from recipes.corpus import Epochs, token_stream
from recipes.losses import toward_argmax
from specdemo.training.collect import Corpus, TeacherData, windows
from specdemo.training.fit import Batch


@dataclass(slots=True)
class GrowingWindows:
    """Batches with a constant number of tokens: short windows first (cheaper), the full context from `long_from` on."""

    epochs: Epochs
    tokens_per_batch: int
    device: torch.device
    short: int
    long: int
    long_from: float = 0.7
    first_epoch: int = 0

    _epoch: int = -1
    _length: int = 0
    _queue: list[Tensor] = field(default_factory=list)

    def __call__(self, progress: float, step: int) -> Batch:
        length = self.long if progress >= self.long_from else self.short
        if not self._queue or length != self._length:
            if self._epoch < 0:  # a resumed run continues with epochs that it has not seen
                self._epoch = self.first_epoch + step
            self._epoch += 1
            self._length = length
            self._queue = list(self.epochs.batches(self._epoch, self.tokens_per_batch // length, length))
            if not self._queue:
                raise ValueError(f"the corpus is smaller than one batch of {self.tokens_per_batch} tokens: add text")
        return (self._queue.pop().to(self.device),)


@dataclass(frozen=True, slots=True)
class Lessons:
    """Training data of a draft at a share `progress` of its time. Pure, so that a resumed run continues exactly.

    Before `listen_from`: text for cross-entropy, in short rows. After it: text with the target's distributions, in rows
    of `context` tokens, because drafts are also used far into a text. From `samples_from` on, half of the rows are
    samples of the target, and the loss moves towards the target's greedy choice.
    """

    text: TeacherData  # rows of `context` tokens
    samples: TeacherData
    tokens_per_batch: int
    device: torch.device
    listen_from: float = 0.1
    samples_from: float = 0.5
    lean: float = 0.4

    def __call__(self, progress: float, step: int) -> Batch:
        if progress >= self.samples_from:
            half = max(1, self.tokens_per_batch // self.text.tokens.shape[1] // 2)
            a, b = self.text.batch(half, step), self.samples.batch(half, step)
            tokens, indices = torch.cat([a.tokens, b.tokens]), torch.cat([a.indices, b.indices])
            probs = toward_argmax(torch.cat([a.probs, b.probs]), self.lean)
        else:
            text = self.text if progress >= self.listen_from else self.text.split_rows(2)
            rows = text.batch(max(1, self.tokens_per_batch // text.tokens.shape[1]), step)
            tokens, indices, probs = rows.tokens, rows.indices, rows.probs
        if progress < self.listen_from:  # one-hot targets: the next token of the text
            tokens, indices = tokens[:, :-1], tokens[:, 1:, None]
            probs = torch.ones(indices.shape)
        return tokens.to(self.device), indices.to(self.device), probs.to(self.device)


def validation_rows(corpus: Corpus, tokenizer: Tokenizer, length: int) -> Tensor:
    """Return the held-out text as [N, length]; one shorter row if there is less text."""
    stream = token_stream(corpus.valid, tokenizer)
    return windows(stream, min(length, len(stream)))
