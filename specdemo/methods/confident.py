"""Drafts that end before a token of which the drafter is not sure (`p_min` of llama.cpp).

B rows, N draft nodes. Whether a token is left out depends on the distribution that it was drawn from, not on the token,
so that rejection sampling stays exact.
"""

from dataclasses import replace

import torch

from specdemo.core.protocol import Budget
from specdemo.core.tree import ABSENT, Draft, chain_parents, is_chain, select_nodes
from specdemo.methods.base import Method
from specdemo.methods.wrapper import Choice, Wrapper


class Confident(Wrapper):
    """A drafter whose drafts end before the first token below `p_min`."""

    def __init__(self, drafter: Method, p_min: float) -> None:
        super().__init__(drafter)
        self._p_min = p_min

    def choose(self, budget: Budget) -> Choice:
        """Draft until no row is sure of its last token."""

        def unsure(top_probs: list[float]) -> bool:
            return max(top_probs) < self._p_min or bool(budget.enough and budget.enough(top_probs))

        return Choice(0, replace(budget, enough=unsure))

    def propose(self, budget: Budget) -> Draft:
        """Draft without the tokens below `p_min`. Notes: unverified, their number per row."""
        return confident(super().propose(budget), self._p_min)


def confident(draft: Draft, p_min: float) -> Draft:
    """Return a draft without the nodes below `p_min`, and without what follows them."""
    sure = draft.confidence if draft.probs is None else draft.probs.amax(-1)
    if sure is None or not draft.nodes:
        return draft
    present = draft.tokens != ABSENT
    kept = present & ~(sure < p_min)  # one that is not a number stays, so that the loop reports it
    if is_chain(draft.parents):
        kept = kept.int().cumprod(1).bool()
    else:
        reached = torch.cat([kept.new_ones(len(kept), 1), kept], 1)  # of every slot
        for node in range(draft.nodes):
            reached[:, node + 1] &= reached.gather(1, draft.parents[:, node : node + 1])[:, 0]
        kept = reached[:, 1:]
    notes = {**draft.notes, "unverified": float((present & ~kept).sum()) / len(kept)}
    index = kept.any(0).nonzero()[:, 0].expand(len(kept), -1)  # nodes that are kept in some row
    selection = select_nodes(replace(draft, tokens=draft.tokens.masked_fill(~kept, ABSENT), notes=notes), index)
    if is_chain(draft.parents):
        selection = replace(selection, parents=chain_parents(*selection.tokens.shape, index.device))
    return selection
