"""Which token, and with which q.

B rows, D tokens that follow each other, V vocabulary, W the part of it that a head knows.
"""

from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor

from specdemo.core.sampling import Sampling, draw, to_probs
from specdemo.core.tree import Draft

NEVER = -1e4  # the logit of a token that a head does not know; finite, so that a loss stays so


@dataclass(frozen=True, slots=True)
class Choice:
    """How tokens are taken from logits: the likeliest when the target is greedy, else drawn as the target draws."""

    sampling: Sampling = field(default_factory=Sampling)
    rng: Generator | None = None

    @property
    def noise(self) -> Generator | None:
        """None: nothing is drawn."""
        return None if self.sampling.greedy else self.rng

    def said(self, logits: Tensor) -> Tensor:
        """Logits [..., V] -> what is chosen from: q, or where nothing is drawn the logits themselves."""
        return to_probs(logits, self.sampling) if self.noise else logits

    def token(self, said: Tensor) -> Tensor:
        """[..., V] -> [...]"""
        return draw(said, self.noise)

    def chain(self, tokens: Tensor, said: Tensor, vocabulary: "Vocabulary | None" = None) -> Draft:
        """tokens [B, D] taken from what was said [B, D, W], where `vocabulary` is not the target's."""
        q = said if self.noise else said.float().softmax(-1)
        confidence = q.gather(-1, tokens[..., None])[..., 0]
        if vocabulary is not None:
            tokens = vocabulary.in_target(tokens)
            q = vocabulary.spread(q, 0.0) if self.noise else q
        return Draft.chain(tokens, q if self.noise else None, confidence)


class Writing:
    """A chain as it is written: tokens are taken one or several at a time, the draft is made of all."""

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self._said: list[Tensor] = []
        self._tokens: list[Tensor] = []

    def __len__(self) -> int:
        return sum(tokens.shape[1] for tokens in self._tokens)

    @property
    def tokens(self) -> Tensor:
        """[B, D]"""
        return self._tokens[0] if len(self._tokens) == 1 else torch.cat(self._tokens, 1)

    def take(self, logits: Tensor) -> Tensor:
        """logits [B, n, W] -> tokens [B, n]"""
        self._said.append(self._choice.said(logits))
        self._tokens.append(self._choice.token(self._said[-1]))
        return self._tokens[-1]

    def draft(self, vocabulary: "Vocabulary | None" = None) -> Draft:
        """vocabulary: of the logits, where it is not the target's."""
        said = self._said[0] if len(self._said) == 1 else torch.cat(self._said, 1)
        return self._choice.chain(self.tokens, said, vocabulary)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The words of a head among the target's. ids [W]: what they are there; None: the first W."""

    ids: Tensor | None
    size: int  # V

    def in_target(self, tokens: Tensor) -> Tensor:
        """Token ids of the draft's vocabulary as the target's."""
        return tokens if self.ids is None else self.ids[tokens]

    def spread(self, values: Tensor, elsewhere: float = NEVER) -> Tensor:
        """values [..., W] -> [..., V]"""
        if self.ids is None:
            return torch.nn.functional.pad(values, (0, self.size - values.shape[-1]), value=elsewhere)
        return values.new_full((*values.shape[:-1], self.size), elsewhere).index_copy(-1, self.ids, values)
