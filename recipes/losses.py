"""Losses of language models and drafts. Pure functions; N tokens, H hidden size, V vocabulary, K stored entries."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specdemo.models.machine import matmul_dtype

CHUNK = 256  # tokens per chunk of logits: 2 MB in fp32, the size of a core's cache
TINY = 1e-6


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return mean nats per token for logits [..., V] and labels [...] int64."""
    return F.cross_entropy(logits.float().flatten(0, -2), labels.flatten())


class _HeadForwardKL(torch.autograd.Function):
    """Forward KL with a closed-form gradient, computed chunk by chunk in the forward pass.

    The gradient at the logits is q - p on the stored entries and q * (1 - p_rest / q_rest) on the others.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, indices: Tensor, probs: Tensor) -> Tensor:
        dtype = matmul_dtype(hidden.device)
        h, w = hidden.to(dtype), weight.to(dtype)
        gradient = h.new_empty(len(h), len(w))
        total = hidden.new_zeros((), dtype=torch.float32)
        for start in range(0, len(h), CHUNK):
            part = slice(start, start + CHUNK)
            top_ids, p = indices[part].long(), probs[part].float()
            q = torch.softmax((h[part] @ w.T).float(), dim=-1)
            q_top = q.gather(1, top_ids)
            p_rest = (1.0 - p.sum(1)).clamp_min(0.0)
            q_rest = (1.0 - q_top.sum(1)).clamp_min(TINY)
            total -= (p * q_top.clamp_min(1e-30).log()).sum() + (p_rest * q_rest.log()).sum()
            gradient[part] = q.mul_((1.0 - p_rest / q_rest)[:, None]).scatter_(1, top_ids, q_top - p)
        ctx.save_for_backward(gradient @ w, gradient.T @ h)
        return total / len(h)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        at_hidden, at_weight = ctx.saved_tensors
        scale = outer[0] / len(at_hidden)
        return at_hidden.float() * scale, at_weight.float() * scale, None, None


def head_forward_kl(hidden: Tensor, weight: Tensor, indices: Tensor, probs: Tensor) -> Tensor:
    """Return KL(p || q) for q = softmax(hidden @ weight.T), where p is known on its K largest entries.

    The rest of the mass is matched as a whole. All logits are never stored (1.2x as fast on a CPU). Forward KL: Hinton
    et al. 2015; for drafts DistillSpec, arXiv 2310.08461, section 3. hidden [N, H], weight [V, H], both fp32,
    multiplied in `matmul_dtype`; indices [N, K], probs [N, K] -> mean nats, up to p's entropy, which has no gradient.
    With K = 1 and probs 1 it is the cross-entropy to `indices`.
    """
    value: Tensor = _HeadForwardKL.apply(hidden, weight, indices, probs)  # type: ignore[no-untyped-call]
    return value


def toward_argmax(probs: Tensor, weight: float) -> Tensor:
    """Return (1 - weight) * probs + weight * one-hot of the largest, for probs [..., K] in descending order.

    Forward KL to the result is forward KL to `probs` with a share of cross-entropy to the target's greedy choice.
    """
    mixed = probs.float() * (1.0 - weight)
    mixed[..., 0] += weight
    return mixed
