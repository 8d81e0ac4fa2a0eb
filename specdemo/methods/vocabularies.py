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

MIN_SHARED_MASS = 0.8  # of either model's probability on the shared tokens: below, drafts go through the text
MIN_TAIL, MAX_TAIL = 24, 96  # characters at the end of a text that are cut again, at least and at most
SAMPLE_TEXT = (
    "Once upon a time, there was a little girl who lived near the sea. Every day, she and her friends asked: why?"
)
BYTE_OF_CHARACTER = {character: byte for byte, character in bytes_to_unicode().items()}  # of byte-level tokenizers
SENTENCE_PIECE_SPACE, BYTE_SPACE = "\u2581", "\u0120"  # how SentencePiece and byte-level tokenizers write a space


class TokenBytes:
    """What the tokens of a tokenizer write, as bytes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, num_rows: int) -> None:
        """size: rows of the model; ids beyond are left out."""
        self._tokenizer = tokenizer
        vocabulary = {token: i for token, i in tokenizer.get_vocab().items() if i < num_rows}
        decode = _decode_byte_level if BYTE_SPACE in vocabulary else _decode_sentence_piece
        self.bytes_of = {i: decode(token) for token, i in sorted(vocabulary.items(), key=lambda item: item[1])}
        self._newline_ids = self._encode("\n")

    @cached_property
    def id_of(self) -> dict[bytes, int]:
        """The first id of every spelling."""
        return {spelling: i for i, spelling in reversed(self.bytes_of.items())}

    @cached_property
    def _sorted(self) -> tuple[list[bytes], list[int]]:
        pairs = sorted(self.id_of.items())
        return [spelling for spelling, _ in pairs], [i for _, i in pairs]

    def prefix_matches(self, prefix: bytes) -> list[int]:
        """The tokens that write what a text has begun with, or its beginning."""
        spellings, ids = self._sorted
        longer = ids[bisect_left(spellings, prefix) : bisect_left(spellings, prefix + b"\xff" * 8)]
        shorter = (self.id_of.get(prefix[:n]) for n in range(1, len(prefix)))
        return longer + [i for i in shorter if i is not None]

    def encode_continuation(self, text: str) -> list[int]:
        """The ids of a text that goes on another one: some tokenizers would put a space before a text of its own."""
        ids = self._encode("\n" + text)
        return (
            ids[len(self._newline_ids) :] if ids[: len(self._newline_ids)] == self._newline_ids else self._encode(text)
        )

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def encode_from_start(self, text: str) -> list[int]:
        """The ids of a text from its beginning."""
        bos = self._tokenizer.bos_token_id
        return [*([] if bos is None else [bos]), *self._encode(text)]

    def decode_from_start(self, ids: list[int]) -> bytes:
        """What tokens at the beginning of a text write."""
        bos = self._tokenizer.bos_token_id
        return self.decode(ids[1:] if ids and ids[0] == bos else ids)

    def decode(self, ids: list[int]) -> bytes:
        """What tokens write that go on a text."""
        return b"".join(self.bytes_of.get(i, b"") for i in ids)


@dataclass(slots=True)
class RowText:
    """One row's text as the draft reads it. What is before the tail stays as it was cut."""

    tokens: TokenBytes
    ids: list[int] = field(default_factory=list)
    tail: str = ""
    decoder: IncrementalDecoder = field(default_factory=lambda: getincrementaldecoder("utf-8")("ignore"))

    def extend(self, new_bytes: bytes) -> list[int]:
        """Go on with what was written -> the ids of the whole text."""
        self.tail += self.decoder.decode(new_bytes)
        if len(self.tail) > MAX_TAIL:
            split = self.tail.rfind(" ", 0, len(self.tail) - MIN_TAIL)
            split = split if split > 0 else len(self.tail) - MIN_TAIL
            self.ids += self._encode(self.tail[:split])
            self.tail = self.tail[split:]
        return self.ids + self._encode(self.tail)

    def split_last_word(self) -> tuple[list[int], bytes]:
        """ids of the text without its last word, and that word; where there is nothing else, all of it and nothing."""
        split = self.tail.rfind(" ")
        if split <= 0:
            return self.ids + self._encode(self.tail), b""
        return self.ids + self._encode(self.tail[:split]), self.tail[split:].encode()

    def _encode(self, text: str) -> list[int]:
        return self.tokens.encode_continuation(text) if self.ids else self.tokens.encode_from_start(text)


class VocabBridge:
    """Between a target's tokens and those of its draft."""

    def __init__(self, target: HFTarget, draft: HFTarget) -> None:
        assert target.tokenizer is not None and draft.tokenizer is not None
        self.target_tokens = TokenBytes(target.tokenizer, target.vocab_size)
        self.draft_tokens = TokenBytes(draft.tokenizer, draft.vocab_size)
        shared = [
            (i, self.draft_tokens.id_of[s]) for s, i in self.target_tokens.id_of.items() if s in self.draft_tokens.id_of
        ]
        pairs, (target_eos, draft_eos) = dict(shared), (target.tokenizer.eos_token_id, draft.tokenizer.eos_token_id)
        if (
            target_eos in self.target_tokens.bytes_of
            and target_eos not in pairs
            and draft_eos in self.draft_tokens.bytes_of
            and draft_eos not in pairs.values()
        ):
            pairs[target_eos] = draft_eos  # they end a text, however they are spelled
        ids = torch.tensor(sorted(pairs.items()), dtype=torch.int64, device=target.device).view(-1, 2)
        self.target_ids, self.draft_ids = ids.T.contiguous()  # [W] ids of the target, and the draft's
        self.real_draft_ids = torch.tensor(
            list(self.draft_tokens.bytes_of), device=target.device
        )  # ids of the draft that are no padding
        self.target_overlap, self.draft_overlap = (
            len(shared) / len(side.bytes_of) for side in (self.target_tokens, self.draft_tokens)
        )

    def shared_mass(self, target: HFTarget, draft: HFTarget) -> tuple[float, float]:
        """Which part of the target's and of the draft's probability the shared tokens hold, on a sample of text."""
        return _mass_on(target, self.target_tokens, self.target_ids), _mass_on(draft, self.draft_tokens, self.draft_ids)

    def may_end_inside_word(self, root: int) -> bool:
        """Whether a text that ends with this token of the target's may end within a word."""
        ending = self.target_tokens.bytes_of.get(root, b"")
        return ending == b" " or ending[:1].isalpha()

    def to_target_ids(self, root: int, text_bytes: bytes) -> list[int]:
        """What the draft wrote behind the target's token `root`, as the target's tokens."""
        text = text_bytes.decode("utf-8", "ignore")
        root_text = self.target_tokens.bytes_of.get(root, b"").decode("utf-8", "ignore")
        combined = self.target_tokens.encode_continuation(root_text + text)
        return combined[1:] if combined[:1] == [root] else self.target_tokens.encode_continuation(text)


def _mass_on(model: HFTarget, token_bytes: TokenBytes, ids: Tensor) -> float:
    tokens = torch.tensor([token_bytes.encode_from_start(SAMPLE_TEXT)], device=model.device)[:, : model.max_length]
    model.start(tokens[:, :1])
    logits = model.forward(tokens[:, 1:], chain_parents(1, tokens.shape[1] - 2, tokens.device)).logits
    model.release()
    return float(logits.float().softmax(-1)[..., ids].sum(-1).mean())


def _decode_byte_level(token: str) -> bytes:
    values = [BYTE_OF_CHARACTER.get(character, -1) for character in token]
    return token.encode() if -1 in values else bytes(values)


def _decode_sentence_piece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x"):
        return bytes.fromhex(token[3:5])
    return token.replace(SENTENCE_PIECE_SPACE, " ").encode()
