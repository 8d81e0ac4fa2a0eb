"""A draft model of another vocabulary than the target's (Timor et al. 2502.05202).

Two ways. Tokens: the draft's distribution is cut to the tokens that both spell alike and renormalised, so it is a true
q over the target's tokens, and sampling stays exact as with any q. Text: what the draft writes is cut anew by the
target's tokenizer; such drafts are one-hot, which is exact for every draft. Either way the draft reads the text of the
target cut by its own tokenizer. W tokens are shared.
"""

from bisect import bisect_left
from codecs import IncrementalDecoder, getincrementaldecoder
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from specdemo.core.tree import chain_parents
from specdemo.models.target import HFTarget

ENOUGH = 0.8  # of either model's probability on the shared tokens: below, drafts go through the text
SHORT, LONG = 24, 96  # characters at the end of a text that are cut again, at least and at most
SAMPLE = "Once upon a time, there was a little girl who lived near the sea. Every day, she and her friends asked: why?"
ALPHABET = {character: byte for byte, character in bytes_to_unicode().items()}  # of byte-level tokenizers
SPACE, BYTE_SPACE = "\u2581", "\u0120"  # how SentencePiece and byte-level tokenizers write a space


class Spelling:
    """What the tokens of a tokenizer write, as bytes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, size: int) -> None:
        """size: rows of the model; ids beyond are left out."""
        self._tokenizer = tokenizer
        vocabulary = {token: i for token, i in tokenizer.get_vocab().items() if i < size}
        read = _byte_level if BYTE_SPACE in vocabulary else _sentence_piece
        self.of = {i: read(token) for token, i in sorted(vocabulary.items(), key=lambda item: item[1])}
        self._line = self._plain("\n")

    @cached_property
    def ids(self) -> dict[bytes, int]:
        """The first id of every spelling."""
        return {spelled: i for i, spelled in reversed(self.of.items())}

    @cached_property
    def _sorted(self) -> tuple[list[bytes], list[int]]:
        pairs = sorted(self.ids.items())
        return [spelled for spelled, _ in pairs], [i for _, i in pairs]

    def agreeing(self, begun: bytes) -> list[int]:
        """The tokens that write what a text has begun with, or its beginning."""
        spelled, ids = self._sorted
        longer = ids[bisect_left(spelled, begun) : bisect_left(spelled, begun + b"\xff" * 8)]
        shorter = (self.ids.get(begun[:n]) for n in range(1, len(begun)))
        return longer + [i for i in shorter if i is not None]

    def cut(self, text: str) -> list[int]:
        """The ids of a text that goes on another one: some tokenizers would put a space before a text of its own."""
        ids = self._plain("\n" + text)
        return ids[len(self._line) :] if ids[: len(self._line)] == self._line else self._plain(text)

    def _plain(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def whole(self, text: str) -> list[int]:
        """The ids of a text from its beginning."""
        bos = self._tokenizer.bos_token_id
        return [*([] if bos is None else [bos]), *self._plain(text)]

    def begins(self, ids: list[int]) -> bytes:
        """What tokens at the beginning of a text write."""
        bos = self._tokenizer.bos_token_id
        return self.written(ids[1:] if ids and ids[0] == bos else ids)

    def written(self, ids: list[int]) -> bytes:
        """What tokens write that go on a text."""
        return b"".join(self.of.get(i, b"") for i in ids)


@dataclass(slots=True)
class RowText:
    """One row's text as the draft reads it. What is before the tail stays as it was cut."""

    spelling: Spelling
    ids: list[int] = field(default_factory=list)
    tail: str = ""
    characters: IncrementalDecoder = field(default_factory=lambda: getincrementaldecoder("utf-8")("ignore"))

    def extend(self, written: bytes) -> list[int]:
        """Go on with what was written -> the ids of the whole text."""
        self.tail += self.characters.decode(written)
        if len(self.tail) > LONG:
            place = self.tail.rfind(" ", 0, len(self.tail) - SHORT)
            place = place if place > 0 else len(self.tail) - SHORT
            self.ids += self._cut(self.tail[:place])
            self.tail = self.tail[place:]
        return self.ids + self._cut(self.tail)

    def before_word(self) -> tuple[list[int], bytes]:
        """ids of the text without its last word, and that word; where there is nothing else, all of it and nothing."""
        place = self.tail.rfind(" ")
        if place <= 0:
            return self.ids + self._cut(self.tail), b""
        return self.ids + self._cut(self.tail[:place]), self.tail[place:].encode()

    def _cut(self, text: str) -> list[int]:
        return self.spelling.cut(text) if self.ids else self.spelling.whole(text)


class Bridge:
    """Between a target's tokens and those of its draft."""

    def __init__(self, target: HFTarget, draft: HFTarget) -> None:
        assert target.tokenizer is not None and draft.tokenizer is not None
        self.ours = Spelling(target.tokenizer, target.vocab_size)
        self.theirs = Spelling(draft.tokenizer, draft.vocab_size)
        alike = [(i, self.theirs.ids[s]) for s, i in self.ours.ids.items() if s in self.theirs.ids]
        pairs, (end, other) = dict(alike), (target.tokenizer.eos_token_id, draft.tokenizer.eos_token_id)
        if end in self.ours.of and end not in pairs and other in self.theirs.of and other not in pairs.values():
            pairs[end] = other  # they end a text, however they are spelled
        ids = torch.tensor(sorted(pairs.items()), dtype=torch.int64, device=target.device).view(-1, 2)
        self.shared, self.there = ids.T.contiguous()  # [W] ids of the target, and the draft's
        self.known = torch.tensor(list(self.theirs.of), device=target.device)  # ids of the draft that are no padding
        self.share, self.own_share = (len(alike) / len(side.of) for side in (self.ours, self.theirs))

    def held(self, target: HFTarget, draft: HFTarget) -> tuple[float, float]:
        """Which part of the target's and of the draft's probability the shared tokens hold, on a sample of text."""
        return _held(target, self.ours, self.shared), _held(draft, self.theirs, self.there)

    def unfinished(self, root: int) -> bool:
        """Whether a text that ends with this token of the target's may end within a word."""
        last = self.ours.of.get(root, b"")
        return last == b" " or last[:1].isalpha()

    def cut(self, root: int, written: bytes) -> list[int]:
        """What the draft wrote behind the target's token `root`, as the target's tokens."""
        text = written.decode("utf-8", "ignore")
        before = self.ours.of.get(root, b"").decode("utf-8", "ignore")
        together = self.ours.cut(before + text)
        return together[1:] if together[:1] == [root] else self.ours.cut(text)


def _held(model: HFTarget, spelling: Spelling, ids: Tensor) -> float:
    tokens = torch.tensor([spelling.whole(SAMPLE)], device=model.device)[:, : model.max_length]
    model.start(tokens[:, :1])
    logits = model.forward(tokens[:, 1:], chain_parents(1, tokens.shape[1] - 2, tokens.device)).logits
    model.release()
    return float(logits.float().softmax(-1)[..., ids].sum(-1).mean())


def _byte_level(token: str) -> bytes:
    known = [ALPHABET.get(character, -1) for character in token]
    return token.encode() if -1 in known else bytes(known)


def _sentence_piece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x"):
        return bytes.fromhex(token[3:5])
    return token.replace(SPACE, " ").encode()
