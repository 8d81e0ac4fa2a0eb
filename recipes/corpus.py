"""Text -> tokens: retold copies, tokenizers, and epochs of windows of T + 1 tokens.

Every document begins with `<|endoftext|>` (id 0) in the token stream.
"""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

from specdemo.training.corpus import END, windows

VOCAB_SIZE = 2048

# Words that may stand in for each other when a story is told again.
NAMES = (
    "Lily Tom Ben Mia Timmy Sara Max Anna Sam Lucy Tim Jack Sue Amy Bob Jane John Emma Leo Billy Molly Mary Spot Daisy"
).split()
THINGS = (
    "dog cat bird rabbit bear frog fish lion mouse ball car doll kite book hat cake cookie apple flower boat train "
    "truck box bike"
).split()


def retell(story: str, rng: random.Random, max_characters: int) -> str | None:
    """An excerpt of `story`, then the same excerpt with one name or thing changed; None when nothing can be changed.

    These documents put long exact copies into the corpus, so that prompt lookup has something to find.
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
    """Words, single digits, runs of punctuation, a line break with its indent; a word carries the space before it."""
    pattern = Regex(r"'(?:[sdmt]|ll|ve|re)| ?[A-Za-z]+|\d| ?[^\sA-Za-z\d]+|\n+ *|\s+(?!\S)|\s+")
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, behavior="isolated"), plain])


def gpt2_words() -> pre_tokenizers.PreTokenizer:
    """As GPT-2 does: digits together, line breaks apart from the indent behind them."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def train_tokenizer(
    documents: list[str], vocab_size: int = VOCAB_SIZE, words: Callable[[], pre_tokenizers.PreTokenizer] = own_words
) -> Tokenizer:
    """Byte-level BPE of so many entries within `words`; `<|endoftext|>` is id 0 and is put before every text."""
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
    """One token a byte, `<|endoftext|>` is id 0 and is put before every encoded text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({END: 0} | {c: i for i, c in enumerate(alphabet, start=1)}, []))
    tokenizer.add_special_tokens([END])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    return tokenizer


def token_stream(documents: list[str], tokenizer: Tokenizer) -> Tensor:
    """Documents -> one int64 stream [N], each document behind its `<|endoftext|>`."""
    ids = [i for e in tokenizer.encode_batch(documents) for i in e.ids]
    return torch.tensor(ids, dtype=torch.int64)


Again = Callable[[str, random.Random], str | None]


def retell_some(story: str, rng: random.Random) -> str | None:
    """`retell` with an excerpt of a length that the dice choose."""
    return retell(story, rng, rng.choice([250, 400, 600]))


@dataclass(frozen=True, slots=True)
class Epochs:
    """Endless epochs of shuffled documents, `copies` of them (a fraction) told again, other ones in every epoch.

    parts: pieces that an epoch comes in, one after the other; a large corpus is not read whole before the first batch.
    """

    documents: list[str]
    tokenizer: Tokenizer
    again: Again = retell_some
    copies: float = 0.1
    parts: int = 1

    def stream(self, epoch: int, length: int) -> Tensor:
        """One epoch's documents in windows of `length` tokens, shuffled anew, some of them retold."""
        rng = random.Random(f"epoch {epoch // self.parts}")
        documents = self.documents.copy()
        rng.shuffle(documents)
        documents = documents[epoch % self.parts :: self.parts]
        rng = random.Random(f"part {epoch}") if self.parts > 1 else rng
        wanted = int(len(documents) * self.copies)
        copies = (self.again(d, rng) for d in documents)
        told = list(islice((c for c in copies if c is not None), wanted))
        documents = documents[: len(documents) - len(told)] + told
        rng.shuffle(documents)
        return token_stream(documents, self.tokenizer)[rng.randrange(length) :]

    def batches(self, epoch: int, batch: int, length: int) -> Iterator[Tensor]:
        """Batches [batch, length + 1] of one epoch in random order."""
        rows = windows(self.stream(epoch, length), length + 1)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(epoch))
        for start in range(0, len(rows) - batch + 1, batch):
            yield rows[order[start : start + batch]]
