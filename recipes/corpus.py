"""Corpus processing from text to tokens: retold copies, tokenizers, epochs of windows of T + 1 tokens, and the batches
of a training.

Every document starts with `<|endoftext|>` (id 0) in the token stream.
"""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

from recipes.llama import VOCAB_SIZE, toward_argmax
from specdemo.training.collect import END, Corpus, TeacherData, windows
from specdemo.training.fit import Batch

START = processors.TemplateProcessing(  # END starts every encoded text
    single=f"{END} $A", pair=f"{END} $A {END} $B", special_tokens=[(END, 0)]
)
ALPHABET = pre_tokenizers.ByteLevel.alphabet()
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2_WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)  # digits together, line breaks without the next indent
SPLIT = Regex(r"'(?:[sdmt]|ll|ve|re)| ?[A-Za-z]+|\d| ?[^\sA-Za-z\d]+|\n+ *|\s+(?!\S)|\s+")
# words, single digits, runs of punctuation, and line breaks with indent; a word includes its leading space
OWN_WORDS = pre_tokenizers.Sequence([pre_tokenizers.Split(SPLIT, behavior="isolated"), BYTES])
Again = Callable[[str, random.Random], str | None]  # a document repeated with a change; None: nothing to change
LONG_FROM = 0.7  # share of the time after which windows are long
WORDS: dict[str, list[str]] = yaml.safe_load(Path(__file__).with_name("words.yaml").read_text(encoding="utf-8"))


def retell(story: str, rng: random.Random, max_characters: int = 0) -> str | None:
    """Return an excerpt of `story` and the same excerpt with one name or thing changed; None if nothing can be changed.

    These documents add long exact copies to the corpus, so that prompt lookup finds matches. max_characters: of the
    excerpt; 0: a random number.
    """
    max_characters = max_characters or rng.choice([250, 400, 600])
    excerpt = ""
    for sentence in re.split(r"(?<=[.!?\"])\s+", story):
        if len(excerpt) + len(sentence) > max_characters:
            break
        excerpt = f"{excerpt} {sentence}".strip()
    words = set(re.findall(r"[A-Za-z]+", excerpt))
    candidates = [(w, pool) for pool in (WORDS["names"], WORDS["things"]) for w in pool if w in words]
    if not candidates or len(excerpt) < 80:
        return None
    old, pool = rng.choice(candidates)
    new = rng.choice([w for w in pool if w not in words])
    again = re.sub(rf"\b{old}(?=s?\b)", new, excerpt)
    return f"{excerpt}\n\nTell it again with {new}, not {old}.\n\n{again}"


def _tokenizer(model: models.Model, words: pre_tokenizers.PreTokenizer) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder, tokenizer.post_processor = words, decoders.ByteLevel(), START
    return tokenizer


def train_tokenizer(
    documents: list[str], vocab_size: int = VOCAB_SIZE, words: pre_tokenizers.PreTokenizer = OWN_WORDS
) -> Tokenizer:
    """Train a byte-level BPE of the given size within `words`. `<|endoftext|>` is id 0 and starts every encoded
    text.
    """
    tokenizer = _tokenizer(models.BPE(), words)
    known: dict[str, Any] = {"special_tokens": [END], "initial_alphabet": ALPHABET, "show_progress": False}
    tokenizer.train_from_iterator(documents, trainers.BpeTrainer(vocab_size=vocab_size, **known))
    return tokenizer


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per byte. `<|endoftext|>` is id 0 and starts every encoded text."""
    tokenizer = _tokenizer(models.BPE({END: 0} | {c: i for i, c in enumerate(sorted(ALPHABET), start=1)}, []), BYTES)
    tokenizer.add_special_tokens([END])
    return tokenizer


def token_stream(documents: list[str], tokenizer: Tokenizer) -> Tensor:
    """Encode documents as one int64 stream [N], each document after its `<|endoftext|>`."""
    ids = [i for e in tokenizer.encode_batch(documents) for i in e.ids]
    return torch.tensor(ids, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class Epochs:
    """Endless epochs of shuffled documents. A fraction `copies` of them is retold, different ones in every epoch.

    parts: number of pieces per epoch, so that a large corpus need not be read before the first batch.
    """

    documents: list[str]
    tokenizer: Tokenizer
    again: Again = retell
    copies: float = 0.1
    parts: int = 1

    def stream(self, epoch: int, length: int) -> Tensor:
        """Return one epoch's documents, newly shuffled and partly retold, in windows of `length` tokens."""
        rng = random.Random(f"epoch {epoch // self.parts}")
        documents = self.documents.copy()
        rng.shuffle(documents)
        documents = documents[epoch % self.parts :: self.parts]
        rng = random.Random(f"part {epoch}") if self.parts > 1 else rng
        copies = (copy for d in documents if (copy := self.again(d, rng)) is not None)
        retold = list(islice(copies, int(len(documents) * self.copies)))
        documents = documents[: len(documents) - len(retold)] + retold
        rng.shuffle(documents)
        return token_stream(documents, self.tokenizer)[rng.randrange(length) :]

    def batches(self, epoch: int, batch: int, length: int) -> Iterator[Tensor]:
        """Yield batches [batch, length + 1] of one epoch in random order."""
        rows = windows(self.stream(epoch, length), length + 1)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(epoch))
        for start in range(0, len(rows) - batch + 1, batch):
            yield rows[order[start : start + batch]]


@dataclass(slots=True)
class GrowingWindows:
    """Batches with a constant number of tokens: short windows first (cheaper), then the full context."""

    epochs: Epochs
    tokens_per_batch: int
    device: torch.device
    short: int
    long: int
    first_epoch: int = 0

    _epoch: int = -1
    _length: int = 0
    _queue: list[Tensor] = field(default_factory=list)

    def __call__(self, progress: float, step: int) -> Batch:
        length = self.long if progress >= LONG_FROM else self.short
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
