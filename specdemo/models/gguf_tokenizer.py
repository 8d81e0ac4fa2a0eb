"""Tokenizer of a GGUF file, by llama.cpp, with the methods of a transformers tokenizer that specdemo uses."""

import ctypes
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from transformers.utils.chat_template_utils import render_jinja_template

from specdemo.models.llamacpp import LlamaCppModel, library

if TYPE_CHECKING:
    from llguidance import LLTokenizer

BOS = b"tokenizer.ggml.bos_token_id"  # key of a GGUF header


class GGUFTokenizer:
    """Tokenizer with the vocabulary, special tokens and chat template of a GGUF file."""

    def __init__(self, model: LlamaCppModel) -> None:
        llama = library()
        self._model, self._llama, self._vocab = model, llama, model.vocab
        self.name_or_path = model.path
        bos, eos = int(llama.llama_vocab_bos(self._vocab)), int(llama.llama_vocab_eos(self._vocab))
        # llama.cpp has a default for files that state none
        stated = llama.llama_model_meta_val_str(model.handle, BOS, ctypes.create_string_buffer(16), 16) >= 0
        self.bos_token_id = bos if bos >= 0 and (stated or llama.llama_vocab_get_add_bos(self._vocab)) else None
        self.eos_token_id = eos if eos >= 0 else None
        template = llama.llama_model_chat_template(model.handle, None)
        self.chat_template = template.decode("utf-8", "replace") if template else None

    def __len__(self) -> int:
        return self._model.vocab_size

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = False) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text, add_special_tokens)}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Special tokens in the text are recognised."""
        data = text.encode()
        room = len(data) + 8
        buffer = (ctypes.c_int32 * room)()
        count = self._llama.llama_tokenize(self._vocab, data, len(data), buffer, room, add_special_tokens, True)
        if count < 0:
            raise ValueError(f"llama.cpp cannot tokenize a text of {len(text)} characters")
        return list(buffer[:count])

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        """Return the text of token ids. Incomplete characters become U+FFFD."""
        tokens, flags = (ctypes.c_int32 * len(ids))(*ids), (skip_special_tokens, not skip_special_tokens)
        write = partial(self._llama.llama_detokenize, self._vocab, tokens, len(ids))
        return _written(lambda *buffer: write(*buffer, *flags), 64 + 16 * len(ids)).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token writes; of a control token its text, of an unused one none."""
        return _written(lambda *buffer: self._llama.llama_token_to_piece(self._vocab, token, *buffer, 0, True), 64)

    def get_vocab(self) -> dict[str, int]:
        """Return token -> id."""
        return dict(self._words)

    @property
    def all_special_tokens(self) -> list[str]:
        """Return the text of all control tokens."""
        return [word for word, token in self._words.items() if self._llama.llama_vocab_is_control(self._vocab, token)]

    def apply_chat_template(
        self, chat: list[dict[str, str]], add_generation_prompt: bool, tokenize: bool, **arguments: bool
    ) -> str:
        """Return the conversation as text, formatted by the template of the file with these arguments."""
        special: dict[str, Any] = {
            name: self._text(token)
            for name, token in (("bos_token", self.bos_token_id), ("eos_token", self.eos_token_id))
            if token is not None
        }
        special |= arguments
        rendered = render_jinja_template(
            conversations=[chat],
            chat_template=self.chat_template,
            add_generation_prompt=add_generation_prompt,
            **special,
        )
        return str(rendered[0][0])

    def grammar_vocabulary(self, n_vocab: int, eos_token: list[int] | None) -> "LLTokenizer":
        """Return the vocabulary as llguidance reads it. Raises ImportError without llguidance."""
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(_ForGrammars(self)), n_vocab, eos_token)

    @cached_property
    def _words(self) -> dict[str, int]:
        return {self._text(token): token for token in range(len(self))}

    def _text(self, token: int) -> str:
        text: bytes = self._llama.llama_vocab_get_text(self._vocab, token)
        return text.decode("utf-8", "replace")


def _written(write: Callable[..., int], room: int) -> bytes:
    """Return what `write(buffer, room)` writes, in a larger buffer if it returns -(room that it needs)."""
    while True:
        buffer = ctypes.create_string_buffer(room)
        size = write(buffer, room)
        if size >= 0:
            return buffer.raw[:size]
        room = -size


class _ForGrammars:
    """A tokenizer as llguidance wraps it."""

    def __init__(self, tokenizer: GGUFTokenizer) -> None:
        words = tokenizer.get_vocab()
        self.tokens = [tokenizer.token_bytes(token) for token in range(len(tokenizer))]
        self.special_token_ids = [words[word] for word in tokenizer.all_special_tokens]
        self.eos_token_id, self.bos_token_id = tokenizer.eos_token_id, tokenizer.bos_token_id
        self._encode = tokenizer.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text, False)
