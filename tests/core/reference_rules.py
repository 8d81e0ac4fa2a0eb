"""The lossless rule and block verification, row by row and node by node. Slow; the fast rules must agree with them."""

import torch

from specdemo.core import accept
from specdemo.core.accept import AcceptResult, or_target
from specdemo.core.sampling import draw
from specdemo.core.tree import ABSENT


def lossless_reference(draft, target, rng):
    """Apply `Lossless`, normalising every residual."""
    numbers = torch.zeros(draft.tokens.shape) if rng is None else accept.coins(draft, rng)
    path, residuals = [], []
    for row in range(len(target)):
        slots, p = [0], target[row, 0]
        for node in range(draft.nodes):
            x = int(draft.tokens[row, node])
            if x == ABSENT or int(draft.parents[row, node]) != slots[-1]:
                continue
            q = torch.arange(len(p), device=p.device).eq(x).float() if draft.probs is None else draft.probs[row, node]
            if numbers[row, node] * q[x] < p[x]:  # strict: a zero-probability token is never accepted
                slots.append(node + 1)
                p = target[row, node + 1]
            else:
                residual = (p - q).clamp_min(0.0)
                p = residual / residual.sum().clamp_min(torch.finfo(residual.dtype).tiny)
        path.append(slots)
        residuals.append(or_target(p, target[row, slots[-1]]))
    return AcceptResult(path, draw(torch.stack(residuals), rng))


def block_reference(draft, target, rng):
    """Apply `Block` to a sampled chain."""
    numbers, path, residuals = accept.coins(draft, rng), [], []
    for row, (p, q) in enumerate(zip(target, draft.probs, strict=True)):
        tokens = [x for x in draft.tokens[row].tolist() if x != ABSENT]
        joint = [torch.ones(())]
        for i, x in enumerate(tokens):
            joint.append((joint[i] * p[i, x] / q[i, x].clamp_min(torch.finfo(q.dtype).tiny)).clamp_max(1.0))
        accepted = 0
        for i in range(1, len(tokens) + 1):
            accept_prob = joint[i]
            if i < len(tokens):
                left, lost = (joint[i] * p[i] - q[i]).clamp_min(0.0).sum(), 1.0 - joint[i]
                accept_prob = left / (left + lost) if left + lost > 0.0 else 1.0
            if numbers[row, i - 1] < accept_prob:  # a later success overrides earlier failures
                accepted = i
        path.append(list(range(accepted + 1)))
        scaled = joint[accepted] * p[accepted]
        residual = (scaled - q[accepted]).clamp_min(0.0) if accepted < len(tokens) else scaled
        residuals.append(or_target(residual, p[accepted]))
    return AcceptResult(path, draw(torch.stack(residuals), rng))
