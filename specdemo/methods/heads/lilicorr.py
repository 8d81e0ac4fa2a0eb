"""LiLiCorr: a final stage of DFlash in which the most likely tokens of all slots attend to each other (2608.20530).

D draft slots, K candidates per slot, H hidden size of the drafter, E of this stage, F of a factor, W draft vocabulary.

The state of a candidate combines its token embedding, the state of its slot and its probability. All D K candidates
attend to each other in both directions. Each then gets an outgoing and an incoming unit vector; their product scores
how well one token follows another. The outgoing vector of the anchor is computed from the last token that the target
has read.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdemo.methods.heads.sampler import MASKED_LOGIT
from specdemo.models.packed import RMSNorm

Memory = Tensor | None  # recurrent state of a final stage
StageOutput = tuple[Tensor, Memory]  # logits and state
FEATURES = 5  # log q, q, log q minus the best log q, rank scaled to 0..1, 1 for the best


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes from config.json, where each key has the prefix `lilicorr_`."""

    hidden_size: int  # E; 0: H
    candidate_topk: int
    num_layers: int
    num_heads: int
    mlp_ratio: float
    factor_dim: int
    vector_eps: float
    logit_scale: float


@dataclass(frozen=True, slots=True)
class Lattice:
    """Scores of a block.

    tokens [..., D, K]: candidates. first [..., K]: scores of the first slot after the anchor. pairs [..., D - 1, K, K]:
    scores of the candidates of a slot after those of the slot before.
    """

    tokens: Tensor
    first: Tensor
    pairs: Tensor

    def __call__(self, slot: int, previous: Tensor, states: Tensor, logits: Tensor, memory: Memory) -> StageOutput:
        """Implement `Stage.forward`; only the shape of logits is used."""
        shape, tokens = previous.shape, self.tokens[..., slot, :]
        if slot:
            index = (self.tokens[..., slot - 1, :] == previous[..., None]).int().argmax(-1)[..., None, None]
            pairs = self.pairs[..., slot - 1, :, :].expand(*shape, -1, -1)
            scores = pairs.gather(-2, index.expand(*shape, 1, pairs.shape[-1])).squeeze(-2)
        else:
            scores = self.first.expand(*shape, -1)
        return torch.full_like(logits, MASKED_LOGIT).scatter(-1, tokens.expand(*shape, -1), scores), memory


class CandidateAttention(nn.Module):
    """Self-attention with an additive bias. Tensor names are those of torch's MultiheadAttention."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.zeros(3 * size, size))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * size))
        self.out_proj = nn.Linear(size, size)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """x [B, D K, E], bias [heads, D K, D K] -> [B, D K, E]"""
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.transpose(1, 3).unbind(2)
        attended = F.scaled_dot_product_attention(q, k, v, bias[None])
        out: Tensor = self.out_proj(attended.transpose(1, 2).flatten(2))
        return out


class LatticeLayer(nn.Module):
    def __init__(self, size: int, heads: int, inner: int, eps: float) -> None:
        super().__init__()
        self.attn_norm, self.attn = RMSNorm(size, eps), CandidateAttention(size, heads)
        self.mlp_norm = RMSNorm(size, eps)
        self.mlp = nn.Sequential(nn.Linear(size, inner), nn.SiLU(), nn.Linear(inner, size))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), bias)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Correlator(nn.Module):
    """The network of LiLiCorr. Tensor names are those of Model Optimizer."""

    def __init__(self, sizes: Sizes, hidden_size: int, block_size: int, eps: float) -> None:
        super().__init__()
        self.sizes, self.block_size = sizes, block_size
        size, heads, slots = sizes.hidden_size or hidden_size, sizes.num_heads, block_size - 1
        self.token_proj = nn.Linear(hidden_size, size) if size != hidden_size else nn.Identity()
        self.pass_hidden_proj = nn.Linear(hidden_size, size)
        self.context_proj = nn.Linear(hidden_size, size)
        self.feature_mlp = nn.Sequential(
            nn.LayerNorm(FEATURES), nn.Linear(FEATURES, size), nn.SiLU(), nn.Linear(size, size)
        )
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, slots, 1, size))
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, sizes.candidate_topk, size))
        self.relative_slot_bias = nn.Parameter(torch.zeros(heads, 2 * block_size - 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(heads))
        inner = int(size * sizes.mlp_ratio)
        self.layers = nn.ModuleList(LatticeLayer(size, heads, inner, eps) for _ in range(sizes.num_layers))
        self.output_norm, self.anchor_norm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.factor_input_proj = nn.Linear(3 * size, size)
        self.out_head, self.in_head, self.anchor_out_head = (nn.Linear(size, sizes.factor_dim) for _ in range(3))

    def build_lattice(
        self, states: Tensor, logits: Tensor, context: Tensor, embed: Callable[[Tensor], Tensor]
    ) -> Lattice:
        """Score a block with states [..., D, H], logits [..., D, W] and the context [..., H] of the token before the
        anchor. embed: looks up the target's embedding.
        """
        log_probs, tokens = logits.log_softmax(-1).topk(self.sizes.candidate_topk)
        candidates = self._candidates(embed(tokens), log_probs, states)
        hidden, bias = candidates.flatten(0, -4).flatten(1, 2), self._bias(tokens.shape[-2], candidates.dtype)
        for layer in self.layers:
            hidden = layer(hidden, bias)
        return Lattice(tokens, *self._scores(self.output_norm(hidden).view_as(candidates), context))

    def _candidates(self, rows: Tensor, log_probs: Tensor, states: Tensor) -> Tensor:
        """Return the candidate states [..., D, K, E]."""
        ranks = torch.linspace(0.0, 1.0, log_probs.shape[-1], device=log_probs.device).expand_as(log_probs)
        best = log_probs[..., :1]
        features = torch.stack([log_probs, log_probs.exp(), log_probs - best, ranks, (ranks == 0.0).float()], -1)
        candidates = self.token_proj(rows) + self.pass_hidden_proj(states)[..., None, :]
        candidates = candidates + self.feature_mlp(features.to(candidates.dtype))
        out: Tensor = candidates + self.slot_embedding[0, 0, : candidates.shape[-3]] + self.rank_embedding[0, 0]
        return out

    def _bias(self, slots: int, dtype: torch.dtype) -> Tensor:
        """Return the attention bias [heads, D K, D K] by the distance of slots."""
        slot_of_candidate = torch.arange(slots, device=self.same_slot_bias.device).repeat_interleave(
            self.sizes.candidate_topk
        )
        distance = slot_of_candidate[:, None] - slot_of_candidate
        bias = self.relative_slot_bias[:, distance + self.block_size - 1]
        return (bias + (distance == 0) * self.same_slot_bias[:, None, None]).to(dtype)

    def _scores(self, candidates: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        """Return `Lattice.first` and `Lattice.pairs` for candidates [..., D, K, E] and the context [..., H]."""
        anchor = self.anchor_norm(self.context_proj(context))
        anchor_rows = anchor[..., None, None, :].expand_as(candidates)
        mixed = F.silu(self.factor_input_proj(torch.cat([candidates, anchor_rows, candidates * anchor_rows], -1)))
        outgoing, incoming, start = (
            F.normalize(head(x), dim=-1, eps=self.sizes.vector_eps).float()
            for head, x in ((self.out_head, mixed), (self.in_head, mixed), (self.anchor_out_head, anchor))
        )
        first = (incoming[..., 0, :, :] @ start[..., None]).squeeze(-1)
        return self.sizes.logit_scale * first, self.sizes.logit_scale * outgoing[..., :-1, :, :] @ incoming[
            ..., 1:, :, :
        ].mT
