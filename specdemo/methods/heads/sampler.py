"""Sampling of draft tokens, with their distribution q, and shapes and growth of draft trees.

B rows, D consecutive tokens, V vocabulary size of the target, W of the draft. In trees: K frontier nodes, N nodes.
A `TreeShape` is static and places ranks of heads at nodes (Medusa, 2401.10774, section 2.3.3). `grow_tree` builds a
dynamic tree from the drafter's probabilities (EAGLE-2, 2406.16858, section 4).
"""

import heapq
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Generator, Tensor

from specdemo.core.protocol import Budget, Enough
from specdemo.core.sampling import PositionNoise, Sampling, argmax, draw_with_noise, exponential_noise, to_probs
from specdemo.core.tree import Draft, chain_parents, select_nodes
from specdemo.kv.graphs import Tensors
from specdemo.models.shared import DraftPlan, ReadFunction, SharedTarget

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
    """Builds a chain, some tokens at a time. vocab: None for the target's vocabulary. enough: see `Budget`."""

    def __init__(self, sampler: TokenSampler, vocab: "DraftVocab | None" = None, enough: Enough | None = None) -> None:
        self._sampler, self._vocab, self._enough = sampler, vocab, enough
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
        distribution = self._sampler.draft_distribution(logits, first, self._vocab)
        self.add(self._sampler.sample(distribution, first), distribution)
        return self._tokens[-1]

    def add(self, tokens: Tensor, distribution: Tensor) -> None:
        """Append tokens [B, n] that were drawn from draft distributions [B, n, W]."""
        self._tokens.append(tokens)
        self._distributions.append(distribution)

    @property
    def ended(self) -> bool:
        """Return True if the chain has enough tokens."""
        if self._enough is None or not self._distributions:
            return False
        return self._enough(self._sampler.top_prob(self._distributions[-1].select(1, -1)))

    def extend(self, decode_step: Callable[[Tensor], Tensor], depth: int) -> None:
        """Decode until the chain has `depth` or enough tokens. decode_step: last tokens [B, 1] -> logits [B, V]."""
        while len(self) < depth and not self.ended:
            self.append(decode_step(self._tokens[-1][:, -1:])[:, None])

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
    model: SharedTarget,
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


Path = tuple[int, ...]  # ranks from the root down
Expand = Callable[[Tensor, Tensor], Tensor]  # tokens [B, K], parents [B, K] -> log q [B, K, V]


@dataclass(frozen=True, slots=True)
class TreeShape:
    """A static tree: node i has parent slot `parents[i]`, level `levels[i]` (1: below the root), rank `ranks[i]`."""

    parents: tuple[int, ...]
    levels: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def width(self) -> int:
        """Number of ranks needed from a head."""
        return 1 + max(self.ranks, default=-1)

    @property
    def depth(self) -> int:
        """Levels below the root."""
        return max(self.levels, default=0)

    @property
    def last_children(self) -> tuple[bool, ...]:
        """True for nodes that are the last child of their slot."""
        last = {parent: node for node, parent in enumerate(self.parents)}
        return tuple(last[parent] == node for node, parent in enumerate(self.parents))

    @staticmethod
    def from_paths(paths: Sequence[Path]) -> "TreeShape":
        """Build the shape from paths in any order. Raises ValueError when the parent of a path is missing."""
        ordered = sorted(set(paths), key=lambda path: (len(path), path))
        slot = {(): 0} | {path: i + 1 for i, path in enumerate(ordered)}
        for path in ordered:
            if path[:-1] not in slot:
                raise ValueError(f"the tree has {path} but not its parent {path[:-1]}")
        return TreeShape(tuple(slot[p[:-1]] for p in ordered), tuple(map(len, ordered)), tuple(p[-1] for p in ordered))

    def paths(self) -> list[Path]:
        """Return the path of every node."""
        all_paths: list[Path] = [()]
        for parent, rank in zip(self.parents, self.ranks, strict=True):
            all_paths.append((*all_paths[parent], rank))
        return all_paths[1:]


@lru_cache(maxsize=256)
def clip_shape(shape: TreeShape, budget: Budget) -> TreeShape:
    """Cut a shape to a budget. Nodes of low rank are kept first."""
    paths = [path for path in shape.paths() if len(path) <= budget.depth]
    paths.sort(key=lambda path: (sum(path), len(path)))  # a parent comes before its children
    return TreeShape.from_paths(paths[: budget.nodes])


def chain(depth: int) -> TreeShape:
    """Return the shape of a chain."""
    return TreeShape(tuple(range(depth)), tuple(range(1, depth + 1)), (0,) * depth)


def optimal_shape(rates: Sequence[Sequence[float]], nodes: int) -> TreeShape:
    """Return the tree of `nodes` nodes with the largest expected accepted length.

    rates[i][r]: probability that rank r of head i is correct. Heads are assumed independent, as in Medusa's appendix:
    the gain of a node is the product along its path, so greedy selection is optimal.
    """
    best: list[tuple[float, Path]] = []

    def push_children(path: Path, prob: float) -> None:
        level = len(path)
        if level < len(rates):
            for rank, rate in enumerate(rates[level]):
                heapq.heappush(best, (-prob * rate, (*path, rank)))

    push_children((), 1.0)
    paths: list[Path] = []
    while best and len(paths) < nodes:
        neg_prob, path = heapq.heappop(best)
        if neg_prob < 0.0:
            paths.append(path)
            push_children(path, -neg_prob)
    return TreeShape.from_paths(paths)


def grow_tree(root_log_probs: Tensor, expand: Expand, budget: Budget, top_k: int) -> Draft:
    """Draft the `budget.nodes` most likely nodes of a dynamic tree.

    root_log_probs [B, V]: log q of the root. `expand` reads the tokens of a frontier, whose parents are indices into
    the previous frontier, and returns log q of each. The score of a node is the log-probability of its path. The
    `top_k` best nodes of a level are expanded; the best nodes of all levels are drafted. Nothing is sampled, so probs
    is None.
    """
    batch, vocabulary = root_log_probs.shape
    if budget.depth < 1 or budget.nodes < 1:
        return Draft.empty(batch, root_log_probs.device)
    width = min(top_k, budget.nodes, vocabulary)  # wider levels add no node to the best ones
    scores, tokens = root_log_probs.topk(width)  # the frontier: [B, K]
    frontier = torch.arange(width, device=root_log_probs.device).expand(batch, -1)  # indices into all nodes
    all_scores, all_tokens, all_log_probs = [scores], [tokens], [scores]
    all_parents = [torch.full_like(tokens, -1)]
    parents = torch.zeros_like(tokens)
    num_seen = width
    for _ in range(1, budget.depth):
        log_probs, children = expand(tokens, parents).topk(width)  # [B, K, K]
        paths = (scores[..., None] + log_probs).flatten(1)
        all_scores.append(paths)
        all_log_probs.append(log_probs.flatten(1))
        all_tokens.append(children.flatten(1))
        all_parents.append(frontier.repeat_interleave(width, 1))
        scores, best = paths.topk(width)
        parents = best // width
        tokens = children.flatten(1).gather(1, best)
        frontier = best + num_seen
        num_seen += paths.shape[1]
    parent_slots = torch.cat(all_parents, 1) + 1  # slot 0 is the root
    scored = torch.cat(all_scores, 1), torch.cat(all_log_probs, 1).exp().clamp_max(1.0)
    return prune_tree(torch.cat(all_tokens, 1), parent_slots, *scored, budget.nodes)


def prune_tree(tokens: Tensor, parents: Tensor, scores: Tensor, confidence: Tensor, nodes: int) -> Draft:
    """Keep the `nodes` best nodes of a tree [B, N]. A parent slot must not score lower than its children."""
    # a stable sort prefers the earlier of two equal scores, so a parent is kept before its child
    best = torch.argsort(scores, dim=1, descending=True, stable=True)[:, :nodes].sort(1).values
    return select_nodes(Draft(tokens, parents, confidence=confidence), best)
