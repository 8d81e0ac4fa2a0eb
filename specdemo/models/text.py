"""Prompt text -> token ids, and token ids -> text, piece by piece, so that the pieces always add up to the text."""

from typing import Any

from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"  # what a decoder shows for bytes that are not a character yet
CONTEXT = 6  # prompt tokens decoded along with the first piece: some tokenizers drop a leading space at the start


def encode(tokenizer: PreTrainedTokenizerBase, text: str, max_length: int) -> list[int]:
    """The prompt's token ids, in the model's own chat template when it has one.

    The beginning-of-sequence token comes first wherever the tokenizer has one. Raises ValueError for an empty prompt
    and for one of more than max_length tokens.
    """
    if not text.strip():
        raise ValueError("the prompt is empty; write at least one word")
    ids = _chat(tokenizer, text) if tokenizer.chat_template else tokenizer(text)["input_ids"]
    bos = tokenizer.bos_token_id
    if bos is not None and not tokenizer.chat_template and ids[:1] != [bos]:
        ids = [bos, *ids]
    if len(ids) > max_length:
        raise ValueError(
            f"the prompt has {len(ids)} tokens, there is room for {max(max_length, 0)}; "
            "shorten it or ask for fewer new tokens"
        )
    return list(ids)


def _chat(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    messages = [{"role": "user", "content": text}]
    written: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(written, add_special_tokens=False)["input_ids"])


class Detokenizer:
    """Token ids in, text out. Bytes that do not finish a character give "" until a later token finishes it.

    Each step decodes only a short window of the last tokens: linear in the length of the text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt_ids[-CONTEXT:])
        self._shown = self._decode().rstrip(UNFINISHED)  # how much of the window's text is out

    def push(self, ids: list[int]) -> list[str]:
        """One piece per id."""
        return [self._push(token) for token in ids]

    def flush(self) -> str:
        """The rest: bytes that never became a character, as the decoder shows them."""
        text = self._decode()
        rest = text[len(self._shown) :]
        self._shown = text
        return rest

    def _push(self, token: int) -> str:
        self._window.append(token)
        text = self._decode()
        finished = text.rstrip(UNFINISHED)
        piece = finished[len(self._shown) :]
        self._shown = max(self._shown, finished, key=len)
        if len(self._window) > 4 * CONTEXT and text == finished:
            self._window = self._window[-CONTEXT:]
            self._shown = self._decode()
        return piece

    def _decode(self) -> str:
        return _decode(self._tokenizer, self._window, skip_special_tokens=True)


def token_text(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """A token's own text, leading space included; special tokens by their name.

    Decoded twice in a row, since some tokenizers drop the space in front of the first token.
    """
    once = _decode(tokenizer, [token], skip_special_tokens=False)
    return _decode(tokenizer, [token, token], skip_special_tokens=False)[len(once) :] or once


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int], skip_special_tokens: bool) -> str:
    text: Any = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    return str(text)
