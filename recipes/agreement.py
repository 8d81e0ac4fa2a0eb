"""Agreement of a draft model with its target, teacher-forced on held-out rows. N rows, T tokens, V vocabulary.

`greedy_agreement`: share of positions where both models have the same most probable token, that is the probability that
a greedy draft token is accepted. `overlap`: mean of sum(min(p, q)), the acceptance probability at temperature 1
(Leviathan et al. 2023, arXiv 2211.17192, theorem 3.5).
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel


@torch.no_grad()
def next_probs(model: PreTrainedModel, rows: Tensor) -> Tensor:
    """Return the next-token probabilities of rows [N, T] as [N, T, V], in the model's precision and on its device."""
    chunks = [model(input_ids=chunk.to(model.device), use_cache=False).logits for chunk in rows.split(4)]
    return torch.cat([torch.softmax(logits.float(), dim=-1) for logits in chunks])


def agreement(draft: PreTrainedModel, target_probs: Tensor, rows: Tensor) -> dict[str, float]:
    """Compare a draft with target_probs [N, T, V] on rows [N, T]; return `greedy_agreement` and `overlap`, both in
    0..1.
    """
    same = shared = 0.0
    for chunk, p in zip(rows.split(4), target_probs.split(4), strict=True):
        q = next_probs(draft, chunk)
        same += float((q.argmax(-1) == p.argmax(-1)).float().sum())
        shared += float(torch.minimum(p, q).sum())
    return {"greedy_agreement": round(same / rows.numel(), 4), "overlap": round(shared / rows.numel(), 4)}
