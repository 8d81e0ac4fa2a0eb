"""Losses of language models and of drafts. Pure functions; N rows, V vocabulary, K kept entries."""

from torch import Tensor
from torch.nn import functional as F


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """logits [..., V], labels [...] int64 -> mean nats per token."""
    return F.cross_entropy(logits.float().flatten(0, -2), labels.flatten())


def sparse_forward_kl(logits: Tensor, indices: Tensor, probs: Tensor) -> Tensor:
    """KL(p || q) where p is known on its K largest entries; the unknown rest is matched as one lump.

    logits [..., V] of q, indices [..., K] int64, probs [..., K] of p -> mean nats per token (up to p's entropy,
    which has no gradient). Forward KL: Hinton et al. 2015; for drafts DistillSpec, arXiv 2310.08461, section 3.
    """
    log_q = F.log_softmax(logits.float(), dim=-1)
    kept = log_q.gather(-1, indices.long())
    p = probs.float()
    p_rest = (1.0 - p.sum(-1)).clamp_min(0.0)
    q_rest = (1.0 - kept.exp().sum(-1)).clamp_min(1e-6)
    return -((p * kept).sum(-1) + p_rest * q_rest.log()).mean()
