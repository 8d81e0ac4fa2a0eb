"""Sampling of draft tokens, with their distribution q.

B rows, D consecutive tokens, V vocabulary size of the target, W of the draft.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

import torch
from torch import Generator, Tensor

from specdemo.core.protocol import DraftPlan, ReadFunction, Target, Tensors
from specdemo.core.sampling import PositionNoise, Sampling, argmax, draw_with_noise, exponential_noise, to_probs
from specdemo.core.tree import Draft, chain_parents

MASKED_LOGIT = -1e4  # logit of a token outside the draft vocabulary; finite, so that losses stay finite


@dataclass(frozen=True, slots=True)
class TokenSampler:
    """Draws draft tokens with the target's sampling settings; greedy if the target is.

    With noise by position (`PositionNoise`) the drafts are coupled: they take the token that the target would draw if
    q were p, which is greedy decoding of q / e.
    """

    sampling: Sampling = field(default_factory=Sampling)
    rng: Generator | None = None  # None: greedy
    predrawn: Tensor | None = None  # noise [B, D, V] drawn before the draft, because CUDA graphs do not draw

    @property
    def active_rng(self) -> Generator | None:
        """The generator, or None if decoding is greedy."""
        return None if self.sampling.greedy else self.rng

    @property
    def coupled(self) -> bool:
        """Return True if drafts share the target's noise."""
        return isinstance(self.active_rng, PositionNoise)

    @property
    def independent(self) -> bool:
        """Return True if drafts are samples of q with noise of their own, so that they report q."""
        return self.active_rng is not None and not self.coupled

    @property
    def kind(self) -> Hashable:
        """Return what determines the operations of a draft."""
        return self.sampling, self.coupled

    def draft_distribution(
        self, logits: Tensor, first: int = 0, vocab: "DraftVocab | None" = None, levels: int | None = None
    ) -> Tensor:
        """Return q for logits [B, n, W]; the logits themselves if greedy; q / e, normalised, if coupled.

        first: number of draft tokens before these. levels: 1 if they are nodes of one tree level; None: a token in each
        of n levels. vocab: None for the target's.
        """
        if self.active_rng is None:
            return logits
        q = to_probs(logits, self.sampling)
        if self.coupled:
            q = q / self._noise(q[:, :levels], first, vocab)
            q /= q.sum(-1, keepdim=True)
        return q

    def log_probs(
        self, logits: Tensor, level: int = 0, vocab: "DraftVocab | None" = None, levels: int | None = 1
    ) -> Tensor:
        """Return scores [B, K, W] to rank the children of K nodes with logits [B, K, W]: log-probabilities, at
        temperature 1 if not coupled. Parameters as of `draft_distribution`."""
        if self.coupled:
            return self.draft_distribution(logits, level, vocab, levels).log()
        return logits.float().log_softmax(-1)

    def sample(self, distribution: Tensor, first: int = 0) -> Tensor:
        """Draw tokens [B, n] from draft distributions [B, n, W] after `first` draft tokens."""
        return self.repeatable_draw(distribution, first)(distribution)

    def repeatable_draw(self, like: Tensor, first: int = 0) -> Callable[[Tensor], Tensor]:
        """Return a function that draws tokens from draft distributions of one shape, always with the same noise."""
        if not self.independent:
            return argmax
        noise = self._noise(like, first, None)
        return lambda distribution: draw_with_noise(distribution, noise)

    def _noise(self, like: Tensor, first: int, vocab: "DraftVocab | None") -> Tensor:
        """Return noise for distributions [B, n, W] after `first` draft tokens."""
        rng, end = self.active_rng, first + like.shape[1]
        if self.predrawn is not None:
            noise = self.predrawn[:, first:end]
        elif isinstance(rng, PositionNoise):
            noise = rng.ahead(end)[:, first:]
        else:
            assert rng is not None
            return exponential_noise(like, rng)
        return noise[..., : like.shape[-1]] if vocab is None or vocab.ids is None else noise[..., vocab.ids]

    def probs(self, distribution: Tensor) -> Tensor:
        """Return a draft distribution as probabilities."""
        return distribution if self.active_rng else distribution.float().softmax(-1)

    def top_prob(self, distribution: Tensor) -> list[float]:
        """Return the largest probability per row of a draft distribution [B, W]; independent of the sample."""
        probs: list[float] = self.probs(distribution).amax(-1).tolist()
        return probs

    def predraw_noise(self, rows: int, tokens: int, vocab_size: int, device: torch.device, first: int = 0) -> Tensors:
        """Draw the noise for `tokens` samples per row; empty if greedy."""
        template = torch.empty(0, device=device).new_empty(rows, tokens, vocab_size)
        return (self._noise(template, first, None),) if self.active_rng else ()

    def with_noise(self, noise: Tensors) -> "TokenSampler":
        """Return a sampler that uses the noise of `predraw_noise`."""
        return replace(self, predrawn=noise[0]) if noise else self

    def make_draft(self, tokens: Tensor, distribution: Tensor, vocab: "DraftVocab | None" = None) -> Draft:
        """Make a chain of tokens [B, D] with their draft distribution [B, D, W]. vocab: None for the target's."""
        q = self.probs(distribution)
        confidence = q.gather(-1, tokens[..., None])[..., 0]

        def in_target_vocab() -> Tensor:
            return q if vocab is None else vocab.to_target_vocab(q, 0.0)

        target_ids = tokens if vocab is None else vocab.to_target_ids(tokens)
        if self.independent:
            return Draft.chain(target_ids, in_target_vocab(), confidence)
        return replace(Draft.chain(target_ids, None, confidence), ranking=in_target_vocab)


class ChainBuilder:
    """Builds a chain, one or several tokens at a time. vocab: None for the target's vocabulary."""

    def __init__(self, sampler: TokenSampler, vocab: "DraftVocab | None" = None) -> None:
        self._sampler, self._vocab = sampler, vocab
        self._distributions: list[Tensor] = []
        self._tokens: list[Tensor] = []

    def __len__(self) -> int:
        return sum(tokens.shape[1] for tokens in self._tokens)

    @property
    def tokens(self) -> Tensor:
        """All tokens so far, [B, D]."""
        return self._tokens[0] if len(self._tokens) == 1 else torch.cat(self._tokens, 1)

    def append(self, logits: Tensor) -> Tensor:
        """Draw tokens [B, n] from logits [B, n, W]."""
        first = len(self)
        self._distributions.append(self._sampler.draft_distribution(logits, first, self._vocab))
        self._tokens.append(self._sampler.sample(self._distributions[-1], first))
        return self._tokens[-1]

    def extend(
        self,
        decode_step: Callable[[Tensor], Tensor],
        depth: int,
        should_stop: Callable[[list[float]], bool] | None = None,
    ) -> None:
        """Decode until the chain has `depth` tokens or `should_stop` returns True.

        decode_step: last tokens [B, 1] -> logits [B, V]. should_stop: as in `Budget`.
        """
        for _ in range(len(self), depth):
            if should_stop and should_stop(self._sampler.top_prob(self._distributions[-1].select(1, -1))):
                break
            self.append(decode_step(self._tokens[-1])[:, None])

    def build(self) -> Draft:
        """Return the draft."""
        distributions = self._distributions[0] if len(self._distributions) == 1 else torch.cat(self._distributions, 1)
        return self._sampler.make_draft(self.tokens, distributions, self._vocab)


@dataclass(frozen=True, slots=True)
class DraftVocab:
    """Vocabulary of a draft. ids [W]: the ids of its tokens in the target; None: the first W."""

    ids: Tensor | None
    size: int  # V

    def to_target_ids(self, tokens: Tensor) -> Tensor:
        """Map draft token ids to the target's."""
        return tokens if self.ids is None else self.ids[tokens]

    def to_target_vocab(self, values: Tensor, fill_value: float = MASKED_LOGIT) -> Tensor:
        """Scatter values [..., W] to the target's vocabulary [..., V]."""
        if self.ids is None:
            return torch.nn.functional.pad(values, (0, self.size - values.shape[-1]), value=fill_value)
        return values.new_full((*values.shape[:-1], self.size), fill_value).index_copy(-1, self.ids, values)


def run_chain_graph(
    model: Target,
    tokens: Tensor,
    counts: list[int],
    plan: DraftPlan,
    sampler: TokenSampler,
    vocab: DraftVocab | None = None,
    first: int = 0,
) -> Draft | None:
    """Read `tokens` and draft a chain in one CUDA graph replay. None if graphs are disabled. first: number of draft
    tokens before them."""
    vocab_size = vocab.size if vocab else model.vocab_size

    def draft_fn(decode_step: ReadFunction, depth: int, *noise: Tensor) -> Tensors:
        builder = ChainBuilder(sampler.with_noise(noise), vocab)
        builder.append(decode_step(None)[:, None, :vocab_size])
        builder.extend(lambda tokens: decode_step(tokens)[:, :vocab_size], depth)
        return flatten_draft(builder.build())

    noise = sampler.predraw_noise(len(tokens), plan.depth, vocab_size, model.device, first)
    outputs = model.draft(tokens, counts, draft_fn, noise, plan)
    return None if outputs is None else unflatten_draft(outputs, plan.depth)


def flatten_draft(draft: Draft) -> Tensors:
    """Convert a draft to tensors, as outputs of a CUDA graph. Missing parts and a chain's parents are empty."""
    empty = draft.tokens.new_empty(0, dtype=torch.float32)
    is_chain = draft.parents is chain_parents(*draft.tokens.shape, draft.tokens.device)
    parents = draft.tokens.new_empty(0) if is_chain else draft.parents
    return draft.tokens, parents, *(empty if x is None else x for x in (draft.probs, draft.confidence))


def unflatten_draft(tensors: Tensors, depth: int) -> Draft:
    """Restore a draft from copies of its tensors. A chain is cut at `depth`."""
    tokens, parents, probs, confidence = tensors
    if parents.numel():
        return Draft(tokens.clone(), parents.clone(), None, confidence.clone() if confidence.numel() else None)
    chain_probs, chain_confidence = (x[:, :depth].clone() if x.numel() else None for x in (probs, confidence))
    return Draft.chain(tokens[:, :depth].clone(), chain_probs, chain_confidence)
