"""Which token, and with which q.

B rows, D tokens that follow each other, V vocabulary, W the part of it that a head knows.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Generator, Tensor

from specdemo.core.sampling import Sampling, draw, drawn, exponential, to_probs
from specdemo.core.tree import Draft, chain_parents
from specdemo.models.graphs import Tensors
from specdemo.models.history import DraftPlan, Read
from specdemo.models.target import HFTarget

NEVER = -1e4  # the logit of a token that a head does not know; finite, so that a loss stays so


class Noise:
    """Of the draws of a draft, [B, D, V], made before it is written: a recorded pass draws nothing by itself."""

    def __init__(self, noise: Tensor) -> None:
        self._left = noise

    def take(self, probs: Tensor) -> Tensor:
        """For probs [B, n, W]."""
        _, tokens, words = probs.shape
        noise, self._left = self._left[:, :tokens, :words], self._left[:, tokens:]
        return noise


@dataclass(frozen=True, slots=True)
class Choice:
    """How tokens are taken from logits: the likeliest when the target is greedy, else drawn as the target draws."""

    sampling: Sampling = field(default_factory=Sampling)
    rng: Generator | None = None
    given: Noise | None = None  # instead of the generator's

    @property
    def noise(self) -> Generator | None:
        """None: nothing is drawn."""
        return None if self.sampling.greedy else self.rng

    def said(self, logits: Tensor) -> Tensor:
        """Logits [..., V] -> what is chosen from: q, or where nothing is drawn the logits themselves."""
        return to_probs(logits, self.sampling) if self.noise else logits

    def token(self, said: Tensor) -> Tensor:
        """[..., V] -> [...]"""
        return drawn(said, self.given.take(said)) if self.given else draw(said, self.noise)

    def surety(self, said: Tensor) -> list[float]:
        """What was said [B, W] -> per row the chance of its likeliest token: of the distribution, not of what was
        drawn."""
        chances: list[float] = (said if self.noise else said.float().softmax(-1)).amax(-1).tolist()
        return chances

    def beforehand(self, rows: int, tokens: int, words: int, device: torch.device) -> Tensors:
        """What is drawn for so many tokens of `words` words; nothing where nothing is drawn."""
        like = torch.empty(0, device=device).new_empty(rows, tokens, words)
        return (exponential(like, self.noise),) if self.noise else ()

    def by(self, noise: Tensors) -> "Choice":
        """As it is, with what `beforehand` made."""
        return replace(self, given=Noise(noise[0])) if noise else self

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

    def follow(
        self, read: Callable[[Tensor], Tensor], depth: int, enough: Callable[[list[float]], bool] | None = None
    ) -> None:
        """Up to `depth` tokens, or until `enough` of a `Budget`; read: the last [B, 1] -> logits [B, V] behind it."""
        for _ in range(len(self), depth):
            if enough and enough(self._choice.surety(self._said[-1].select(1, -1))):
                break
            self.take(read(self._tokens[-1])[:, None])

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


def replayed(
    model: HFTarget, tokens: Tensor, counts: list[int], plan: DraftPlan, choice: Choice, words: Vocabulary | None = None
) -> Draft | None:
    """A chain behind the tokens that the model reads first, as one recorded pass; None: it is not recorded."""
    known = words.size if words else model.vocab_size

    def write(read: Read, depth: int, *noise: Tensor) -> Tensors:
        written = Writing(choice.by(noise))
        written.take(read(None)[:, None, :known])
        written.follow(lambda tokens: read(tokens)[:, :known], depth)
        return parts(written.draft(words))

    noise = choice.beforehand(len(tokens), plan.depth, known, model.device)
    said = model.draft(tokens, counts, write, noise, plan)
    return None if said is None else whole(said, plan.depth)


def parts(draft: Draft) -> Tensors:
    """A draft as tensors, those that are not there empty, and the parents of a chain too."""
    none = draft.tokens.new_empty(0, dtype=torch.float32)
    chain = draft.parents is chain_parents(*draft.tokens.shape, draft.tokens.device)
    parents = draft.tokens.new_empty(0) if chain else draft.parents
    return draft.tokens, parents, *(none if x is None else x for x in (draft.probs, draft.confidence))


def whole(parts: Tensors, depth: int) -> Draft:
    """A draft from copies of its parts, a chain cut at `depth`."""
    tokens, parents, probs, confidence = parts
    if parents.numel():
        return Draft(tokens.clone(), parents.clone(), None, confidence.clone() if confidence.numel() else None)
    q, sure = (x[:, :depth].clone() if x.numel() else None for x in (probs, confidence))
    return Draft.chain(tokens[:, :depth].clone(), q, sure)
