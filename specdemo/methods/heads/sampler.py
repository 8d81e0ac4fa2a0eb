"""Which token, and with which q.

B rows, D tokens that follow each other, V vocabulary, W the part of it that a head knows.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Generator, Tensor

from specdemo.core.sampling import Sampling, draw, draw_with_noise, exponential_noise, to_probs
from specdemo.core.tree import Draft, chain_parents
from specdemo.models.graphs import Tensors
from specdemo.models.history import DraftPlan, ReadFunction
from specdemo.models.target import HFTarget

MASKED_LOGIT = -1e4  # the logit of a token that a head does not know; finite, so that a loss stays so


class Noise:
    """Of the draws of a draft, [B, D, V], made before it is written: a recorded pass draws nothing by itself."""

    def __init__(self, noise: Tensor) -> None:
        self._remaining = noise

    def take(self, probs: Tensor) -> Tensor:
        """For probs [B, n, W]."""
        _, tokens, vocab_size = probs.shape
        noise, self._remaining = self._remaining[:, :tokens, :vocab_size], self._remaining[:, tokens:]
        return noise


@dataclass(frozen=True, slots=True)
class TokenSampler:
    """How tokens are taken from logits: the likeliest when the target is greedy, else drawn as the target draws."""

    sampling: Sampling = field(default_factory=Sampling)
    rng: Generator | None = None
    predrawn: Noise | None = None  # instead of the generator's

    @property
    def active_rng(self) -> Generator | None:
        """None: nothing is drawn."""
        return None if self.sampling.greedy else self.rng

    def draft_distribution(self, logits: Tensor) -> Tensor:
        """Logits [..., V] -> what is chosen from: q, or where nothing is drawn the logits themselves."""
        return to_probs(logits, self.sampling) if self.active_rng else logits

    def sample(self, distribution: Tensor) -> Tensor:
        """[..., V] -> [...]"""
        return (
            draw_with_noise(distribution, self.predrawn.take(distribution))
            if self.predrawn
            else draw(distribution, self.active_rng)
        )

    def top_prob(self, distribution: Tensor) -> list[float]:
        """What was said [B, W] -> per row the chance of its likeliest token: of the distribution, not of what was
        drawn."""
        probs: list[float] = (distribution if self.active_rng else distribution.float().softmax(-1)).amax(-1).tolist()
        return probs

    def predraw_noise(self, rows: int, tokens: int, vocab_size: int, device: torch.device) -> Tensors:
        """What is drawn for so many tokens of `words` words; nothing where nothing is drawn."""
        template = torch.empty(0, device=device).new_empty(rows, tokens, vocab_size)
        return (exponential_noise(template, self.active_rng),) if self.active_rng else ()

    def with_noise(self, noise: Tensors) -> "TokenSampler":
        """As it is, with what `beforehand` made."""
        return replace(self, predrawn=Noise(noise[0])) if noise else self

    def make_draft(self, tokens: Tensor, distribution: Tensor, vocab: "DraftVocab | None" = None) -> Draft:
        """tokens [B, D] taken from what was said [B, D, W], where `vocabulary` is not the target's."""
        q = distribution if self.active_rng else distribution.float().softmax(-1)
        confidence = q.gather(-1, tokens[..., None])[..., 0]
        if vocab is not None:
            tokens = vocab.to_target_ids(tokens)
            q = vocab.to_target_vocab(q, 0.0) if self.active_rng else q
        return Draft.chain(tokens, q if self.active_rng else None, confidence)


class ChainBuilder:
    """A chain as it is written: tokens are taken one or several at a time, the draft is made of all."""

    def __init__(self, sampler: TokenSampler) -> None:
        self._sampler = sampler
        self._distributions: list[Tensor] = []
        self._tokens: list[Tensor] = []

    def __len__(self) -> int:
        return sum(tokens.shape[1] for tokens in self._tokens)

    @property
    def tokens(self) -> Tensor:
        """[B, D]"""
        return self._tokens[0] if len(self._tokens) == 1 else torch.cat(self._tokens, 1)

    def append(self, logits: Tensor) -> Tensor:
        """logits [B, n, W] -> tokens [B, n]"""
        self._distributions.append(self._sampler.draft_distribution(logits))
        self._tokens.append(self._sampler.sample(self._distributions[-1]))
        return self._tokens[-1]

    def extend(
        self,
        decode_step: Callable[[Tensor], Tensor],
        depth: int,
        should_stop: Callable[[list[float]], bool] | None = None,
    ) -> None:
        """Up to `depth` tokens, or until `enough` of a `Budget`; read: the last [B, 1] -> logits [B, V] behind it."""
        for _ in range(len(self), depth):
            if should_stop and should_stop(self._sampler.top_prob(self._distributions[-1].select(1, -1))):
                break
            self.append(decode_step(self._tokens[-1])[:, None])

    def build(self, vocab: "DraftVocab | None" = None) -> Draft:
        """vocabulary: of the logits, where it is not the target's."""
        distributions = self._distributions[0] if len(self._distributions) == 1 else torch.cat(self._distributions, 1)
        return self._sampler.make_draft(self.tokens, distributions, vocab)


@dataclass(frozen=True, slots=True)
class DraftVocab:
    """The words of a head among the target's. ids [W]: what they are there; None: the first W."""

    ids: Tensor | None
    size: int  # V

    def to_target_ids(self, tokens: Tensor) -> Tensor:
        """Token ids of the draft's vocabulary as the target's."""
        return tokens if self.ids is None else self.ids[tokens]

    def to_target_vocab(self, values: Tensor, fill_value: float = MASKED_LOGIT) -> Tensor:
        """values [..., W] -> [..., V]"""
        if self.ids is None:
            return torch.nn.functional.pad(values, (0, self.size - values.shape[-1]), value=fill_value)
        return values.new_full((*values.shape[:-1], self.size), fill_value).index_copy(-1, self.ids, values)


def run_chain_graph(
    model: HFTarget,
    tokens: Tensor,
    counts: list[int],
    plan: DraftPlan,
    sampler: TokenSampler,
    vocab: DraftVocab | None = None,
) -> Draft | None:
    """A chain behind the tokens that the model reads first, as one recorded pass; None: it is not recorded."""
    vocab_size = vocab.size if vocab else model.vocab_size

    def draft_fn(decode_step: ReadFunction, depth: int, *noise: Tensor) -> Tensors:
        builder = ChainBuilder(sampler.with_noise(noise))
        builder.append(decode_step(None)[:, None, :vocab_size])
        builder.extend(lambda tokens: decode_step(tokens)[:, :vocab_size], depth)
        return flatten_draft(builder.build(vocab))

    noise = sampler.predraw_noise(len(tokens), plan.depth, vocab_size, model.device)
    outputs = model.draft(tokens, counts, draft_fn, noise, plan)
    return None if outputs is None else unflatten_draft(outputs, plan.depth)


def flatten_draft(draft: Draft) -> Tensors:
    """A draft as tensors, those that are not there empty, and the parents of a chain too."""
    empty = draft.tokens.new_empty(0, dtype=torch.float32)
    is_chain = draft.parents is chain_parents(*draft.tokens.shape, draft.tokens.device)
    parents = draft.tokens.new_empty(0) if is_chain else draft.parents
    return draft.tokens, parents, *(empty if x is None else x for x in (draft.probs, draft.confidence))


def unflatten_draft(tensors: Tensors, depth: int) -> Draft:
    """A draft from copies of its parts, a chain cut at `depth`."""
    tokens, parents, probs, confidence = tensors
    if parents.numel():
        return Draft(tokens.clone(), parents.clone(), None, confidence.clone() if confidence.numel() else None)
    chain_probs, chain_confidence = (x[:, :depth].clone() if x.numel() else None for x in (probs, confidence))
    return Draft.chain(tokens[:, :depth].clone(), chain_probs, chain_confidence)
