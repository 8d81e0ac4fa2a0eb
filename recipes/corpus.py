"""Corpus processing from text to tokens: retold copies, tokenizers, and epochs of windows of T + 1 tokens.

Every document starts with `<|endoftext|>` (id 0) in the token stream.
"""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

from specdemo.training.collect import END, windows

VOCAB_SIZE = 2048

# Words that may replace each other when a story is repeated.
NAMES = (
    "Lily Tom Ben Mia Timmy Sara Max Anna Sam Lucy Tim Jack Sue Amy Bob Jane John Emma Leo Billy Molly Mary Spot Daisy"
).split()
THINGS = (
    "dog cat bird rabbit bear frog fish lion mouse ball car doll kite book hat cake cookie apple flower boat train "
    "truck box bike"
).split()


def retell(story: str, rng: random.Random, max_characters: int) -> str | None:
    """Return an excerpt of `story` and the same excerpt with one name or thing changed; None if nothing can be changed.

    These documents add long exact copies to the corpus, so that prompt lookup finds matches.
    """
    excerpt = ""
    for sentence in re.split(r"(?<=[.!?\"])\s+", story):
        if len(excerpt) + len(sentence) > max_characters:
            break
        excerpt = f"{excerpt} {sentence}".strip()
    words = set(re.findall(r"[A-Za-z]+", excerpt))
    candidates = [(w, pool) for pool in (NAMES, THINGS) for w in pool if w in words]
    if not candidates or len(excerpt) < 80:
        return None
    old, pool = rng.choice(candidates)
    new = rng.choice([w for w in pool if w not in words])
    again = re.sub(rf"\b{old}(?=s?\b)", new, excerpt)
    return f"{excerpt}\n\nTell it again with {new}, not {old}.\n\n{again}"


def own_words() -> pre_tokenizers.PreTokenizer:
    """Split into words, single digits, runs of punctuation, and line breaks with indent; a word includes its leading
    space.
    """
    pattern = Regex(r"'(?:[sdmt]|ll|ve|re)| ?[A-Za-z]+|\d| ?[^\sA-Za-z\d]+|\n+ *|\s+(?!\S)|\s+")
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, behavior="isolated"), plain])


def gpt2_words() -> pre_tokenizers.PreTokenizer:
    """Split like GPT-2: digits together, line breaks separate from the indent that follows."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def train_tokenizer(
    documents: list[str], vocab_size: int = VOCAB_SIZE, words: Callable[[], pre_tokenizers.PreTokenizer] = own_words
) -> Tokenizer:
    """Train a byte-level BPE of the given size within `words`. `<|endoftext|>` is id 0 and starts every encoded
    text.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = words()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", pair=f"{END} $A {END} $B", special_tokens=[(END, 0)]
    )
    return tokenizer


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per byte. `<|endoftext|>` is id 0 and starts every encoded text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({END: 0} | {c: i for i, c in enumerate(alphabet, start=1)}, []))
    tokenizer.add_special_tokens([END])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    return tokenizer


def token_stream(documents: list[str], tokenizer: Tokenizer) -> Tensor:
    """Encode documents as one int64 stream [N], each document after its `<|endoftext|>`."""
    ids = [i for e in tokenizer.encode_batch(documents) for i in e.ids]
    return torch.tensor(ids, dtype=torch.int64)


Again = Callable[[str, random.Random], str | None]


def retell_some(story: str, rng: random.Random) -> str | None:
    """Apply `retell` to an excerpt of random length."""
    return retell(story, rng, rng.choice([250, 400, 600]))


@dataclass(frozen=True, slots=True)
class Epochs:
    """Endless epochs of shuffled documents. A fraction `copies` of them is retold, different ones in every epoch.

    parts: number of pieces per epoch, so that a large corpus need not be read before the first batch.
    """

    documents: list[str]
    tokenizer: Tokenizer
    again: Again = retell_some
    copies: float = 0.1
    parts: int = 1

    def stream(self, epoch: int, length: int) -> Tensor:
        """Return one epoch's documents, newly shuffled and partly retold, in windows of `length` tokens."""
        rng = random.Random(f"epoch {epoch // self.parts}")
        documents = self.documents.copy()
        rng.shuffle(documents)
        documents = documents[epoch % self.parts :: self.parts]
        rng = random.Random(f"part {epoch}") if self.parts > 1 else rng
        copy_count = int(len(documents) * self.copies)
        copies = (self.again(d, rng) for d in documents)
        retold = list(islice((c for c in copies if c is not None), copy_count))
        documents = documents[: len(documents) - len(retold)] + retold
        rng.shuffle(documents)
        return token_stream(documents, self.tokenizer)[rng.randrange(length) :]

    def batches(self, epoch: int, batch: int, length: int) -> Iterator[Tensor]:
        """Yield batches [batch, length + 1] of one epoch in random order."""
        rows = windows(self.stream(epoch, length), length + 1)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(epoch))
        for start in range(0, len(rows) - batch + 1, batch):
            yield rows[order[start : start + batch]]
