"""Grammars: a JSON schema or a regular expression, compiled for a tokenizer by llguidance (an optional package)."""

import json
from functools import cached_property, lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specdemo.core.protocol import Grammar
from specdemo.models.errors import first_line
from specdemo.models.gguf_tokenizer import GGUFTokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

JSON: Any = {"whitespace_flexible": False}  # one separator only, so that more text is forced
TOO_COMPLEX = "the grammar is too complex for this text: "


class MatcherState:
    """State of llguidance's parser after some tokens. Raises RuntimeError if the parser exceeds its limits."""

    def __init__(self, matcher: "LLMatcher", vocab_size: int, stop: frozenset[int]) -> None:
        self._matcher, self._vocab_size, self._stop = matcher, vocab_size, stop
        self._following: dict[int, MatcherState | None] = {}

    def allowed(self) -> Tensor:
        """Return True for the tokens that may come next [V], on the host."""
        return self._allowed

    def forced(self) -> list[int]:
        """Return the tokens that must come next, without a stop token."""
        return self._forced

    def after(self, token: int) -> "MatcherState | None":
        """Return the state after one more token; None if it is not allowed or ends the text."""
        if token not in self._following:
            self._following[token] = self._step(token)
        return self._following[token]

    def _step(self, token: int) -> "MatcherState | None":
        if token in self._stop or self._matcher.is_stopped() or not self._allowed[token]:
            return None
        matcher = self._matcher.deep_copy()
        if not matcher.consume_token(token):
            raise RuntimeError(TOO_COMPLEX + _reason(matcher.get_error()))
        return MatcherState(matcher, self._vocab_size, self._stop)

    @cached_property
    def _forced(self) -> list[int]:
        return [int(token) for token in self._matcher.compute_ff_tokens() if token not in self._stop]

    @cached_property
    def _allowed(self) -> Tensor:
        bits = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        if self._matcher.is_error():
            raise RuntimeError(TOO_COMPLEX + _reason(self._matcher.get_error()))
        allowed = ((bits[:, None] >> torch.arange(8)) & 1).bool().flatten()[: self._vocab_size]
        allowed = torch.cat([allowed, allowed.new_zeros(self._vocab_size - len(allowed))])
        return allowed if allowed.any() else ~allowed  # a complete text, and a model without stop tokens


@lru_cache(maxsize=4)
def compile_grammar(
    text: str, tokenizer: PreTrainedTokenizerBase, vocab_size: int, stop_token_ids: tuple[int, ...]
) -> Grammar:
    """Compile a JSON schema (text that begins with {) or a regular expression, which the output must match completely
    before a stop token is allowed.

    Raises ValueError with one line for an invalid one, for a tokenizer that llguidance cannot read, and without
    llguidance.
    """
    if find_spec("llguidance") is None:
        raise ValueError('a grammar needs llguidance; run: pip install llguidance, or "specdemo[grammar]"')
    from llguidance import LLMatcher

    kind, source = _source(text)
    vocabulary = _vocabulary(tokenizer, vocab_size, stop_token_ids)
    if error := LLMatcher.validate_grammar(source, vocabulary):
        raise ValueError(f"the grammar is not a valid {kind}: {_reason(error)}")
    matcher = LLMatcher(vocabulary, source, log_level=0)
    if matcher.is_error():
        raise ValueError(f"the grammar is not a valid {kind}: {_reason(matcher.get_error())}")
    return lambda: MatcherState(matcher.deep_copy(), vocab_size, frozenset(stop_token_ids))


def _source(text: str) -> tuple[str, str]:
    """Return the kind of a grammar, and its form for llguidance."""
    from llguidance import LLMatcher

    if not text.lstrip().startswith("{"):
        return "regular expression", LLMatcher.grammar_from_regex(text.strip())
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the grammar begins with {{ but is not JSON: {error}") from None
    return "JSON schema", LLMatcher.grammar_from_json_schema(schema, overrides=JSON)


@lru_cache(maxsize=4)
def _vocabulary(tokenizer: Any, vocab_size: int, stop_token_ids: tuple[int, ...]) -> "LLTokenizer":
    from llguidance.hf import from_tokenizer

    stop = list(stop_token_ids) or None
    try:
        if isinstance(tokenizer, GGUFTokenizer):
            return tokenizer.grammar_vocabulary(vocab_size, stop)
        read: LLTokenizer = from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=stop)
        return read
    except Exception as error:
        raise ValueError(f"llguidance cannot read this tokenizer: {first_line(error)}") from None


def _reason(message: str) -> str:
    """Return llguidance's message in one line, without the excerpt of the grammar."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    errors = [line.removeprefix("error:").strip() for line in lines if line.startswith("error:")]
    return (errors or lines or ["it is rejected"])[0][:200]
