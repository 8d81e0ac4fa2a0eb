"""Losses of language models and of drafts. Pure functions; N tokens, H hidden, V vocabulary, K kept entries."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specdemo.models.machine import matmul_dtype

CHUNK = 256  # tokens whose V logits are worked on at once: 2 MB in fp32, what a core's own cache holds
TINY = 1e-6


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """logits [..., V], labels [...] int64 -> mean nats per token."""
    return F.cross_entropy(logits.float().flatten(0, -2), labels.flatten())


def likeliest(said: Tensor) -> Tensor:
    """[..., V] probabilities or [...] tokens -> tokens [...]"""
    return said.argmax(-1) if said.is_floating_point() else said


def compare(logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """logits [R, A, V]; wanted [R, A, V] probabilities or [R, A] tokens -> mean nats, and the share that agrees."""
    logits = logits.float()
    nats = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1))
    return nats, (logits.argmax(-1) == likeliest(wanted)).float().mean()


def steps_loss(steps: Iterable[tuple[Tensor, Tensor]], weights: Iterable[float]) -> tuple[Tensor, dict[str, float]]:
    """What `compare` says of every step of a draft -> the weighted sum of the nats, and agree_1, agree_2, .."""
    total, metrics = torch.zeros(()), {}
    for i, ((nats, agreed), weight) in enumerate(zip(steps, weights, strict=False), start=1):
        total = weight * nats if i == 1 else total + weight * nats  # on one device from the first: it may be a lent one
        metrics[f"agree_{i}"] = float(agreed)
    return total, metrics


def sparse_forward_kl(logits: Tensor, indices: Tensor, probs: Tensor) -> Tensor:
    """KL(p || q) where p is known on its K largest entries; the unknown rest is matched as one lump.

    logits [..., V] of q, indices [..., K] int, probs [..., K] of p -> mean nats per token (up to p's entropy,
    which has no gradient). Forward KL: Hinton et al. 2015; for drafts DistillSpec, arXiv 2310.08461, section 3.
    The readable reference of `head_forward_kl`.
    """
    log_q = F.log_softmax(logits.float(), dim=-1)
    kept = log_q.gather(-1, indices.long())
    p = probs.float()
    p_rest = (1.0 - p.sum(-1)).clamp_min(0.0)
    q_rest = (1.0 - kept.exp().sum(-1)).clamp_min(TINY)
    return -((p * kept).sum(-1) + p_rest * q_rest.log()).mean()


class _HeadForwardKL(torch.autograd.Function):
    """The gradient at the logits is known in closed form, so the forward pass finds it chunk by chunk.

    It is q - p on the kept entries and q * (1 - p_rest / q_rest) on the others.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, indices: Tensor, probs: Tensor) -> Tensor:
        dtype = matmul_dtype(hidden.device)
        h, w = hidden.to(dtype), weight.to(dtype)
        gradient = h.new_empty(len(h), len(w))
        total = hidden.new_zeros((), dtype=torch.float32)
        for start in range(0, len(h), CHUNK):
            part = slice(start, start + CHUNK)
            kept, p = indices[part].long(), probs[part].float()
            q = torch.softmax((h[part] @ w.T).float(), dim=-1)
            q_kept = q.gather(1, kept)
            p_rest = (1.0 - p.sum(1)).clamp_min(0.0)
            q_rest = (1.0 - q_kept.sum(1)).clamp_min(TINY)
            total -= (p * q_kept.clamp_min(1e-30).log()).sum() + (p_rest * q_rest.log()).sum()
            gradient[part] = q.mul_((1.0 - p_rest / q_rest)[:, None]).scatter_(1, kept, q_kept - p)
        ctx.save_for_backward(gradient @ w, gradient.T @ h)
        return total / len(h)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        at_hidden, at_weight = ctx.saved_tensors
        scale = outer[0] / len(at_hidden)
        return at_hidden.float() * scale, at_weight.float() * scale, None, None


def head_forward_kl(hidden: Tensor, weight: Tensor, indices: Tensor, probs: Tensor) -> Tensor:
    """`sparse_forward_kl` of the logits `hidden @ weight.T`, which never exist as a whole (1.2x as fast on a CPU).

    hidden [N, H], weight [V, H], both fp32, multiplied in `matmul_dtype`; indices [N, K], probs [N, K] -> mean nats.
    With K = 1 and probs 1 it is the cross-entropy to `indices`.
    """
    value: Tensor = _HeadForwardKL.apply(hidden, weight, indices, probs)  # type: ignore[no-untyped-call]
    return value


def toward_argmax(probs: Tensor, weight: float) -> Tensor:
    """probs [..., K], largest first -> (1 - weight) * probs + weight * one-hot of the largest.

    Forward KL to it is forward KL to `probs` with a share of cross-entropy to the target's greedy choice.
    """
    mixed = probs.float() * (1.0 - weight)
    mixed[..., 0] += weight
    return mixed
