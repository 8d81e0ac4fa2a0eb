"""Conversion of prompts to token ids, and of token ids to text in pieces that always add up to the text."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from transformers import PreTrainedTokenizerBase

from specdemo.core.generation import Thinking, template_arguments
from specdemo.core.suggest import EMPTY
from specdemo.models.errors import first_line, tokenizer_errors

SENTENCE = (
    "The weather was fine, so the whole family walked along the river to the old bridge and had lunch under the trees."
)
SPREAD = 7  # step between token ids where there is no tokenizer; the first ids are often special tokens
LEAST_KINDS = 3  # different ids of a text; where almost all are the unknown word, a lost history makes no difference
UNFINISHED = "\ufffd"  # shown by decoders for an incomplete character
# Prompt tokens decoded with the first piece, because some tokenizers drop a leading space at the start. More than 6, so
# that the window holds a complete character even if it starts and ends inside one of 4 bytes.
CONTEXT = 7
MAX_TEMPLATE_OUTPUT = 4_000_000  # characters


def tokenizer_of(model: Any) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a target or a loaded model. Raises ValueError with one line if it has none."""
    tokenizer: PreTrainedTokenizerBase | None = model.tokenizer
    if tokenizer is None:
        raise ValueError(f"{model.name} has no tokenizer; put its tokenizer.json into the same folder")
    return tokenizer


def encode(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Sequence[Mapping[str, str]],
    max_length: int,
    thinking: Thinking = "default",
) -> list[int]:
    """Return the token ids of a text to complete, or of a conversation (messages with role and content) to answer.

    A text gets the special tokens that the tokenizer adds to a text; a conversation is formatted by the model's chat
    template, which writes them itself. Raises ValueError for an empty prompt, for more than max_length tokens, for a
    conversation that the template rejects, and for a thinking mode that it does not have.
    """
    last = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    if not last.strip():
        raise ValueError(f"the prompt {EMPTY}")
    ids = _ids(tokenizer, prompt, thinking)
    if max_length < 1:
        raise ValueError("max_new_tokens fills the model's context; reduce it")
    if len(ids) > max_length:
        what = "prompt" if isinstance(prompt, str) or len(prompt) == 1 else "conversation"
        raise ValueError(
            f"the {what} has {len(ids)} tokens, the limit is {max_length}; shorten it or reduce max_new_tokens"
        )
    return ids


def _ids(
    tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[Mapping[str, str]], thinking: Thinking
) -> list[int]:
    is_text = isinstance(prompt, str)
    if thinking != "default" and (isinstance(prompt, str) or not has_thinking_modes(tokenizer)):
        raise ValueError(f"{tokenizer.name_or_path} has no thinking mode here; leave thinking at default")
    text = prompt if isinstance(prompt, str) else _apply_template(tokenizer, [dict(m) for m in prompt], thinking)
    with tokenizer_errors(f"the tokenizer of {tokenizer.name_or_path}"):
        return list(tokenizer(text, add_special_tokens=is_text, verbose=False)["input_ids"])


def has_thinking_modes(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template writes another prompt with thinking on than with thinking off."""
    chat = [{"role": "user", "content": "Hello"}]
    return bool(tokenizer.chat_template) and (
        _apply_template(tokenizer, chat, "on") != _apply_template(tokenizer, chat, "off")
    )


def _apply_template(tokenizer: PreTrainedTokenizerBase, chat: list[dict[str, str]], thinking: Thinking) -> str:
    """Apply the model's chat template; an answer at the end of the chat has only begun. Raises ValueError, one line, if
    the template fails or its output is too long."""
    arguments: dict[str, Any] = {**template_arguments(thinking)}
    answer = chat.pop()["content"] if chat[-1]["role"] == "assistant" else ""
    try:
        text = str(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False, **arguments))
    except Exception as error:  # a template is a program
        raise ValueError(f"the model's chat template rejects this conversation: {first_line(error)[:200]}") from None
    if len(text) > MAX_TEMPLATE_OUTPUT:
        raise ValueError(f"the model's chat template generates {len(text):,} characters; choose another model")
    return text + answer


def sample_tokens(tokenizer: PreTrainedTokenizerBase | None, count: int, vocab_size: int) -> list[int]:
    """Return `count` token ids of a sentence; spread ids without a tokenizer.

    For checks: on a text a model is sure of its next tokens. On ids that form none rounding decides.
    """
    ids: list[int] = []
    if tokenizer is not None:
        with suppress(Exception):  # a tokenizer that fails is no reason to refuse the model
            ids = [*map(int, tokenizer(SENTENCE, verbose=False)["input_ids"])]
    if len({*ids}) < LEAST_KINDS:
        ids = []
    step = SPREAD if vocab_size % SPREAD else SPREAD + 1
    ids += [step * n for n in range(1, count + 1)]
    return [token % vocab_size for token in ids[:count]]


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the special token with which the chat template ends an answer; None without one."""
    if not tokenizer.chat_template:
        return None
    answer = "Hello"
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": answer}]
    try:
        text = str(tokenizer.apply_chat_template(chat, tokenize=False))
        first = next(iter(tokenizer(text.rpartition(answer)[2], add_special_tokens=False)["input_ids"]), -1)
    except Exception:  # a template is a program
        return None
    token = tokenizer.added_tokens_decoder.get(first)
    return first if token is not None and token.special else None


class Detokenizer:
    """Incremental decoder. Bytes of an unfinished character give "" until a later token completes it.

    Each step decodes a short window of the last tokens, so that the total time is linear in the length of the text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt_ids[-CONTEXT:])
        self._shown = self._decode().rstrip(UNFINISHED)  # text of the window that was returned already

    def push(self, ids: list[int]) -> list[str]:
        """Return one piece of text per id."""
        return [self._push(token) for token in ids]

    def flush(self) -> str:
        """Return the rest: bytes that never became a character, as the decoder shows them."""
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
    """Return the text of one token with its leading space; special tokens by name.

    Decodes it twice in a row, because some tokenizers drop the space of the first token.
    """
    once = _decode(tokenizer, [token], skip_special_tokens=False)
    return _decode(tokenizer, [token, token], skip_special_tokens=False)[len(once) :] or once


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int], skip_special_tokens: bool) -> str:
    text: object = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    return str(text)
