"""Losslessness by chi-square: three tokens of speculative decoding against their joint distribution, and the proof that
the test sees wrong rules.

The language is a Markov chain over V = 4 tokens that starts from token 0: P[c] is what follows c, Q[c] what the draft
believes. The draws are the rows of one batch.
"""

import pytest
import torch

from specdemo.core import accept
from specdemo.core.accept import Block, Lossless, Typical, Verdict
from specdemo.core.sampling import draw
from specdemo.core.tree import ABSENT, Draft

DRAWS = 12_500
V = 4
P = torch.tensor([[0.35, 0.05, 0.35, 0.25], [0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1], [0.0, 0.05, 0.9, 0.05]])
Q = torch.tensor([[0.2, 0.5, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1], [0.5, 0.3, 0.0, 0.2], [0.25, 0.25, 0.25, 0.25]])
JOINT = (P[0][:, None, None] * P[:, :, None] * P[None]).flatten()  # [V ** 3] of three tokens

CHAIN = [0, 1, 2, 3]
STAR = [0, 0, 0]
BUSH = [0, 0, 0, 1, 2, 3, 3, 5]


def in_slots(tokens):
    """tokens [B, N] -> [B, S] the token in each slot, 0 in the root's."""
    return torch.cat([torch.zeros(len(tokens), 1, dtype=torch.int64), tokens.clamp_min(0)], 1)


def grow(shape, choose, rng):
    """A draft of DRAWS rows over the tree `shape`; choose(context [B], elder siblings, rng) -> token [B], q [B, V]."""
    parents = torch.tensor(shape).expand(DRAWS, -1)
    slots, probs = [torch.zeros(DRAWS, dtype=torch.int64)], []
    for node, parent in enumerate(shape):
        elder = [slots[i + 1] for i in range(node) if shape[i] == parent]
        token, q = choose(slots[parent], elder, rng)
        slots.append(token)
        probs.append(q)
    return Draft(torch.stack(slots[1:], 1), parents, None if probs[0] is None else torch.stack(probs, 1))


def independent(context, elder, rng):
    return draw(Q[context], rng), Q[context]


def without_replacement(context, elder, rng):
    q = Q[context]
    for token in elder:
        q = q.scatter(1, token[:, None], 0.0)
    q = q / q.sum(-1, keepdim=True)
    return draw(q, rng), q


def ranked(context, elder, rng):
    """The draft's favourites, best first: chosen, not drawn."""
    return Q[context].argsort(descending=True, stable=True)[:, len(elder)], None


def ranked_and_one_drawn(context, elder, rng):
    """The favourites, each of its own one-hot q, and then a draw from what they leave."""
    if len(elder) < 2:
        token = ranked(context, elder, rng)[0]
        return token, torch.eye(V)[token]
    return without_replacement(context, elder, rng)


def repetitive(context, elder, rng):
    return Q[context].argmax(-1), None


def three_tokens(rule, draft, rng):
    """[DRAWS] codes of the first three tokens: the verdict's, then plain sampling."""
    slots = in_slots(draft.tokens)
    verdict = rule(draft, P[slots], rng)
    kept = [[said[s] for s in path[1:]] for said, path in zip(slots.tolist(), verdict.path, strict=True)]
    said = [([*k, b] + [-1] * 3)[:3] for k, b in zip(kept, verdict.bonus.tolist(), strict=True)]
    code, context = torch.zeros(DRAWS, dtype=torch.int64), torch.zeros(DRAWS, dtype=torch.int64)
    for column in torch.tensor(said).T:
        context = torch.where(column >= 0, column, draw(P[context], rng))
        code = code * V + context
    return code


@pytest.mark.parametrize("shape, choose", [
    (CHAIN, independent), (STAR, independent), (BUSH, independent),
    (STAR, without_replacement), (BUSH, without_replacement),
    (STAR, ranked_and_one_drawn), (BUSH, ranked_and_one_drawn),
    (CHAIN, ranked), (STAR, ranked), (BUSH, ranked), (BUSH, repetitive), ([], independent),
])  # fmt: skip
def test_the_lossless_rule_is_lossless(fits, shape, choose):
    rng = torch.Generator().manual_seed(len(shape))
    draft = grow(shape, choose, rng) if shape else Draft.empty(DRAWS)
    assert fits(three_tokens(Lossless(), draft, rng), JOINT)


@pytest.mark.parametrize("shape, choose", [(CHAIN, independent), (CHAIN[:2], independent), (CHAIN, ranked),
                                           (BUSH, independent)])  # fmt: skip
def test_the_block_rule_is_lossless(fits, shape, choose):
    rng = torch.Generator().manual_seed(11 + len(shape))
    assert fits(three_tokens(Block(), grow(shape, choose, rng), rng), JOINT)


def test_blocks_cut_by_what_was_drafted_are_lossless(fits):
    """Whether there is a next token may depend on those before it, and on a coin."""
    rng = torch.Generator().manual_seed(12)
    draft = grow(CHAIN, independent, rng)
    ends = (draft.tokens == 2) | (torch.rand(draft.tokens.shape, generator=rng) < 0.2)
    behind = ends.cumsum(1) - ends.long() > 0
    draft = Draft(draft.tokens.masked_fill(behind, ABSENT), draft.parents, draft.probs)
    assert fits(three_tokens(Block(), draft, rng), JOINT)


@pytest.mark.parametrize("choose", [independent, ranked])
def test_ragged_drafts_are_lossless(fits, choose):
    """A node may be missing, by a coin that does not look at its token."""
    rng = torch.Generator().manual_seed(5)
    draft = grow(BUSH, choose, rng)
    missing = torch.rand(draft.tokens.shape, generator=rng) < 0.3
    for node, parent in enumerate(BUSH):
        if parent:
            missing[:, node] |= missing[:, parent - 1]
    draft = Draft(draft.tokens.masked_fill(missing, ABSENT), draft.parents, draft.probs)
    assert fits(three_tokens(Lossless(), draft, rng), JOINT)


def test_sampled_tokens_declared_as_one_hot_are_lossless_too(fits):
    rng = torch.Generator().manual_seed(6)
    draft = grow(BUSH, independent, rng)
    assert fits(three_tokens(Lossless(), Draft(draft.tokens, draft.parents), rng), JOINT)


def no_residual(draft, target, rng):
    verdict = Lossless()(draft, target, rng)
    return Verdict(verdict.path, draw(accept._ends(target, verdict.path), rng))


def favourites_declared_as_drawn(context, elder, rng):
    return ranked(context, elder, rng)[0], Q[context]


def without_replacement_declared_as_with(context, elder, rng):
    return without_replacement(context, elder, rng)[0], Q[context]


@pytest.mark.parametrize("rule, shape, choose", [
    (no_residual, CHAIN, independent),
    (no_residual, STAR[:2], ranked),
    (Typical(), CHAIN, independent),
    (Lossless(), CHAIN, favourites_declared_as_drawn),
    (Block(), CHAIN, favourites_declared_as_drawn),
    (Lossless(), STAR, without_replacement_declared_as_with),
])  # fmt: skip
def test_the_test_sees_wrong_rules_and_drafts_that_lie(fits, rule, shape, choose):
    rng = torch.Generator().manual_seed(7)
    assert not fits(three_tokens(rule, grow(shape, choose, rng), rng), JOINT)


def test_the_test_sees_siblings_tried_against_the_whole_target(fits, monkeypatch):
    monkeypatch.setattr(accept, "_given_elders", lambda draft, probs, target, nodes: P[:1].expand(DRAWS, 3, V))
    rng = torch.Generator().manual_seed(8)
    assert not fits(three_tokens(Lossless(), grow(STAR, independent, rng), rng), JOINT)


def test_the_chi_square_itself(fits):
    rng = torch.Generator().manual_seed(9)
    probs = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.0])
    right = sum(fits(torch.multinomial(probs, 2000, replacement=True, generator=rng), probs) for _ in range(300))
    assert right >= 298
    shifted = torch.tensor([0.12, 0.18, 0.3, 0.4, 0.0])
    assert not fits(torch.multinomial(shifted, DRAWS, replacement=True, generator=rng), probs)
    assert not fits(torch.tensor([4] + [3] * 100), probs)
