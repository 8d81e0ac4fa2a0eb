"""Draft models with another vocabulary than the target's (Timor et al. 2502.05202).

The draft model's distribution is restricted to tokens with the same bytes in both vocabularies and renormalised. This
is a valid q over the target's tokens, so sampling stays exact. The draft model reads the target's text in its own
tokenization. W tokens are shared.
"""

import json
import re
from codecs import IncrementalDecoder, getincrementaldecoder
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from specdemo.core.protocol import Target
from specdemo.core.tree import chain_parents

MIN_TAIL, MAX_TAIL = 24, 96  # characters at the end of a text that are tokenized again: least, most
SAMPLE_TEXT = (
    "Once upon a time, there was a little girl who lived near the sea. Every day, she and her friends asked: why?"
)
BYTE_OF_CHARACTER = {character: byte for byte, character in bytes_to_unicode().items()}  # of byte-level tokenizers
SENTENCE_PIECE_SPACE, BYTE_SPACE = "\u2581", "\u0120"  # a space in SentencePiece and in byte-level tokenizers
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# tokens without a meaning, which fill a vocabulary up to its size: [PAD151665], <unused7>, <|dummy_3|>
PADDING = re.compile(r"[\[<]\|?(pad|unused|dummy)(_token)?_?\d+\|?[\]>]", re.IGNORECASE)
# texts that tokenizers with the same vocabulary may still split differently
PROBES = (
    "Once upon a time, there was a little girl named Lily.",
    "  two spaces\n\n\ta tab, CAPITALS and camelCase don't",
    "for i in range(10):\n    x[i] += 3.14159e-10  # 1234567",
    "naïve café, Ünïcödé, 日本語のテキスト, Привет, مرحبا, 🐉🏰",
    "e\u0301 is é twice; \u00a0 and \u200b hide",
)


def real_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return token -> id, without padding."""
    return {token: i for token, i in tokenizer.get_vocab().items() if not PADDING.fullmatch(token)}


def tokenizer_difference(target: Target, draft: Target) -> str | None:
    """Describe how the tokenizers differ; None if token ids mean the same. Vocabulary sizes may differ by padding.

    Raises ValueError when the sizes differ and a model has no tokenizer.
    """
    if target.tokenizer is not None and draft.tokenizer is not None:
        return _compare_tokenizers(target.tokenizer, draft.tokenizer)
    if draft.vocab_size != target.vocab_size:
        raise ValueError(
            f"{draft.name or 'the draft model'} has a vocabulary of {draft.vocab_size}, {target.name or 'the target'} "
            f"one of {target.vocab_size}, and no tokenizer maps them; choose a draft model of the same family"
        )
    return None


def _compare_tokenizers(
    target_tokenizer: PreTrainedTokenizerBase, draft_tokenizer: PreTrainedTokenizerBase
) -> str | None:
    """Compare vocabularies without padding, then the encoding of PROBES and the special tokens."""
    a, b = real_tokens(target_tokenizer), real_tokens(draft_tokenizer)
    if a != b:
        differing = sum(b.get(word) != index for word, index in a.items())
        if not differing:
            return f"it has {len(b) - len(a)} more tokens"
        word = min((w for w, i in a.items() if b.get(w) != i), key=a.__getitem__)
        in_draft = b.get(word, "absent")
        ids = f"id {a[word]} in the target, {in_draft} in the draft"
        return f"{differing} of {len(a)} tokens differ (first {word!r}: {ids})"
    for text in (*PROBES, "".join(map(str, target_tokenizer.all_special_tokens))):
        in_target, in_draft = (t.encode(text, add_special_tokens=False) for t in (target_tokenizer, draft_tokenizer))
        if in_target != in_draft:
            return f"{text[:24]!r} has {len(in_target)} tokens in the target, {len(in_draft)} others in the draft"
    return None


class TokenBytes:
    """The bytes of every token of a tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, num_rows: int) -> None:
        """num_rows: rows of the model's embedding; larger ids are left out."""
        self._tokenizer = tokenizer
        vocabulary = {i: token for token, i in real_tokens(tokenizer).items() if i < num_rows}
        decode = token_decoder(tokenizer)
        spellings = {i: decode(i, vocabulary[i]) for i in sorted(vocabulary)}
        self.bytes_of = {i: spelling for i, spelling in spellings.items() if spelling}
        self._byte_tokens = {i for i, token in vocabulary.items() if BYTE_TOKEN.fullmatch(token)}
        self._newline_ids = self._encode("\n")
        with_special = list(tokenizer.encode("\n"))
        start = next((n for n, i in enumerate(with_special) if i in self._newline_ids), 0)
        self._prefix = with_special[:start]  # tokens that the tokenizer puts in front of a text

    @cached_property
    def id_of(self) -> dict[bytes, int]:
        """Bytes -> the lowest id with these bytes; as in an encoding, <0x39> only where no other token is spelled 9."""
        ids = sorted(self.bytes_of, key=lambda i: (i in self._byte_tokens, i), reverse=True)
        return {self.bytes_of[i]: i for i in ids}

    def encode_continuation(self, text: str) -> list[int]:
        """Encode a text that continues another one. A newline in front keeps tokenizers from adding a space."""
        ids = self._encode("\n" + text)
        return (
            ids[len(self._newline_ids) :] if ids[: len(self._newline_ids)] == self._newline_ids else self._encode(text)
        )

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def encode_from_start(self, text: str) -> list[int]:
        """Encode a text from its beginning, with the BOS token if the tokenizer adds one."""
        return [*self._prefix, *self._encode(text)]

    def decode_from_start(self, ids: list[int]) -> bytes:
        """Return the bytes of tokens at the beginning of a text, without the BOS token if the tokenizer adds it."""
        start = len(self._prefix)
        return self.decode(ids[start:] if ids[:start] == self._prefix else ids)

    def decode(self, ids: list[int]) -> bytes:
        """Return the bytes of tokens that continue a text."""
        return b"".join(self.bytes_of.get(i, b"") for i in ids)


@dataclass(slots=True)
class RowText:
    """The text of one row in the draft model's tokens. Only the tail is tokenized again when the text grows."""

    tokens: TokenBytes
    ids: list[int] = field(default_factory=list)
    tail: str = ""
    decoder: IncrementalDecoder = field(default_factory=lambda: getincrementaldecoder("utf-8")("ignore"))

    def extend(self, new_bytes: bytes) -> list[int]:
        """Append bytes; return the ids of the complete text."""
        self.tail += self.decoder.decode(new_bytes)
        if len(self.tail) > MAX_TAIL:
            split = self.tail.rfind(" ", 0, len(self.tail) - MIN_TAIL)
            split = split if split > 0 else len(self.tail) - MIN_TAIL
            self.ids += self._encode(self.tail[:split])
            self.tail = self.tail[split:]
        return self.ids + self._encode(self.tail)

    def _encode(self, text: str) -> list[int]:
        return self.tokens.encode_continuation(text) if self.ids else self.tokens.encode_from_start(text)


class VocabBridge:
    """Maps tokens between a target and its draft model."""

    def __init__(self, target: Target, draft: Target) -> None:
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
            pairs[target_eos] = draft_eos  # EOS tokens are equivalent even if their bytes differ
        ids = torch.tensor(sorted(pairs.items()), dtype=torch.int64, device=target.device).view(-1, 2)
        self.target_ids, self.draft_ids = ids.T.contiguous()  # [W] each: ids in the target, ids in the draft model
        self.target_overlap, self.draft_overlap = (
            len(shared) / len(side.bytes_of) for side in (self.target_tokens, self.draft_tokens)
        )

    def shared_mass(self, target: Target, draft: Target) -> tuple[float, float]:
        """Return the mean probability of the shared tokens in the target and in the draft model, on SAMPLE_TEXT."""
        return _mass_on(target, self.target_tokens, self.target_ids), _mass_on(draft, self.draft_tokens, self.draft_ids)


def _mass_on(model: Target, token_bytes: TokenBytes, ids: Tensor) -> float:
    tokens = torch.tensor([token_bytes.encode_from_start(SAMPLE_TEXT)], device=model.device)[:, : model.max_length]
    model.start(tokens[:, :1])
    logits = model.forward(tokens[:, 1:], chain_parents(1, tokens.shape[1] - 2, tokens.device)).logits
    model.release()
    return float(logits.float().softmax(-1)[..., ids].sum(-1).mean())


def token_decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[int, str], bytes]:
    """Return the function (id, token) -> bytes of a tokenizer: its own, or that of its decoder's kind.

    A vocabulary alone does not show its kind: SentencePiece vocabularies also have the letters of byte-level ones.
    """
    if hasattr(tokenizer, "token_bytes"):
        return lambda i, token: tokenizer.token_bytes(i)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder else {}
        byte_level = "ByteLevel" in (part.get("type") for part in (decoder, *decoder.get("decoders", ())))
    else:
        vocabulary = tokenizer.get_vocab()
        byte_level = BYTE_SPACE in vocabulary and not {SENTENCE_PIECE_SPACE, "<0x0A>"} & vocabulary.keys()
    return _decode_byte_level if byte_level else _decode_sentence_piece


def _decode_byte_level(_: int, token: str) -> bytes:
    values = [BYTE_OF_CHARACTER.get(character, -1) for character in token]
    return token.encode() if -1 in values else bytes(values)


def _decode_sentence_piece(_: int, token: str) -> bytes:
    if BYTE_TOKEN.fullmatch(token):
        return bytes.fromhex(token[3:5])
    return token.replace(SENTENCE_PIECE_SPACE, " ").encode()
