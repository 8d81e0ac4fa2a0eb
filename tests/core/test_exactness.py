"""Losslessness by chi-square: the first three tokens of speculative decoding against their joint distribution, and
proof that the test detects wrong rules.

The language is a Markov chain over V = 4 tokens that starts from token 0: P[c] is the target's distribution after c,
Q[c] the drafter's. The draws are the rows of one batch.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdemo.core import accept
from specdemo.core.accept import AcceptResult, Lossless
from specdemo.core.block import Block
from specdemo.core.coupled import Coupled
from specdemo.core.fly import Fly
from specdemo.core.sampling import PositionNoise, draw
from specdemo.core.speculative_cascade import SpeculativeCascade
from specdemo.core.tree import ABSENT, Draft, depths
from specdemo.core.typical import Typical

DRAWS = 12_500
V = 4
P = torch.tensor([[0.35, 0.05, 0.35, 0.25], [0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1], [0.0, 0.05, 0.9, 0.05]])
Q = torch.tensor([[0.2, 0.5, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1], [0.5, 0.3, 0.0, 0.2], [0.25, 0.25, 0.25, 0.25]])
JOINT = (P[0][:, None, None] * P[:, :, None] * P[None]).flatten()  # [V ** 3], three tokens

CHAIN = [0, 1, 2, 3]
STAR = [0, 0, 0]
BUSH = [0, 0, 0, 1, 2, 3, 3, 5]


def in_slots(tokens):
    """Return the token in each slot, [B, S], for tokens [B, N]. The root's is 0."""
    return torch.cat([torch.zeros(len(tokens), 1, dtype=torch.int64), tokens.clamp_min(0)], 1)


def grow(shape, choose, rng):
    """Return a draft of DRAWS rows over the tree `shape`.

    choose(context [B], elder siblings, rng) returns token [B] and q [B, V].
    """
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
    """Choose the most probable draft token that no elder sibling has, without a draw."""
    return Q[context].argsort(descending=True, stable=True)[:, len(elder)], None


def ranked_and_one_drawn(context, elder, rng):
    """Choose the two most probable tokens, each with a one-hot q, then draw one of the others."""
    if len(elder) < 2:
        token = ranked(context, elder, rng)[0]
        return token, torch.eye(V)[token]
    return without_replacement(context, elder, rng)


def repetitive(context, elder, rng):
    return Q[context].argmax(-1), None


def coupled(shape):
    """Return a function that chooses the tokens that are best with the shared noise of their level."""
    levels = iter(depths(torch.tensor([shape]))[0, 1:].tolist())

    def choose(context, elder, rng):
        level = next(levels) - 1
        ranking = (Q[context] / rng.ahead(level + 1)[:, level]).argsort(descending=True, stable=True)
        return ranking[:, len(elder)], None

    return choose


def by_position(seed):
    return PositionNoise(seed, DRAWS, 0, V, torch.device("cpu"))


def first_three_tokens(rule, draft, rng):
    """Return codes [DRAWS] of the first three tokens: those of the verdict, continued by plain sampling."""
    slots = in_slots(draft.tokens)
    verdict = rule(draft, P[slots], rng)
    accepted = [
        [slot_tokens[s] for s in path[1:]] for slot_tokens, path in zip(slots.tolist(), verdict.path, strict=True)
    ]
    slot_tokens = [([*k, b] + [-1] * 3)[:3] for k, b in zip(accepted, verdict.next_token.tolist(), strict=True)]
    code, context = torch.zeros(DRAWS, dtype=torch.int64), torch.zeros(DRAWS, dtype=torch.int64)
    for column in torch.tensor(slot_tokens).T:
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
    assert fits(first_three_tokens(Lossless(), draft, rng), JOINT)


@pytest.mark.parametrize("shape, choose", [
    (CHAIN, coupled(CHAIN)), (STAR, coupled(STAR)), (BUSH, coupled(BUSH)), (BUSH, ranked), (CHAIN, independent),
])  # fmt: skip
def test_the_coupled_rule_is_lossless_and_its_text_does_not_depend_on_the_draft(fits, shape, choose):
    noise = by_position(2)
    draft = grow(shape, choose, noise)
    verdict = Coupled()(draft, P[in_slots(draft.tokens)], noise)
    plain = Coupled()(Draft.empty(DRAWS), P[:1].expand(DRAWS, 1, V), by_position(2))
    assert [tokens[0] for tokens in verdict.output_tokens] == plain.next_token.tolist()
    assert fits(first_three_tokens(Coupled(), draft, noise), JOINT)


@pytest.mark.parametrize("shape, choose", [(CHAIN, independent), (CHAIN[:2], independent), (CHAIN, ranked),
                                           (BUSH, independent)])  # fmt: skip
def test_the_block_rule_is_lossless(fits, shape, choose):
    rng = torch.Generator().manual_seed(11 + len(shape))
    assert fits(first_three_tokens(Block(), grow(shape, choose, rng), rng), JOINT)


def test_blocks_cut_by_what_was_drafted_are_lossless(fits):
    """The end of a draft may depend on its earlier tokens and on a coin."""
    rng = torch.Generator().manual_seed(12)
    draft = grow(CHAIN, independent, rng)
    ends = (draft.tokens == 2) | (torch.rand(draft.tokens.shape, generator=rng) < 0.2)
    after_end = ends.cumsum(1) - ends.long() > 0
    draft = Draft(draft.tokens.masked_fill(after_end, ABSENT), draft.parents, draft.probs)
    assert fits(first_three_tokens(Block(), draft, rng), JOINT)


@pytest.mark.parametrize("choose", [independent, ranked])
def test_ragged_drafts_are_lossless(fits, choose):
    """A node may be missing at random, independent of its token."""
    rng = torch.Generator().manual_seed(5)
    draft = grow(BUSH, choose, rng)
    missing = torch.rand(draft.tokens.shape, generator=rng) < 0.3
    for node, parent in enumerate(BUSH):
        if parent:
            missing[:, node] |= missing[:, parent - 1]
    draft = Draft(draft.tokens.masked_fill(missing, ABSENT), draft.parents, draft.probs)
    assert fits(first_three_tokens(Lossless(), draft, rng), JOINT)


def test_sampled_tokens_declared_as_one_hot_are_lossless_too(fits):
    rng = torch.Generator().manual_seed(6)
    draft = grow(BUSH, independent, rng)
    assert fits(first_three_tokens(Lossless(), Draft(draft.tokens, draft.parents), rng), JOINT)


# The same without random draws: every draft of a small tree, weighted by its probability


@st.composite
def languages(pick, vocabulary=3):
    """Draw a tree, and the next-token distributions of target and drafter, both [V, V]."""
    shape = [pick(st.integers(0, node)) for node in range(pick(st.integers(1, 4)))]
    rng = torch.Generator().manual_seed(pick(st.integers(0, 10_000)))
    weights = torch.rand(2, vocabulary, vocabulary, generator=rng) ** 2
    weights *= torch.rand(weights.shape, generator=rng) >= pick(st.sampled_from([0.0, 0.3]))
    weights[..., 0] += weights.sum(-1) == 0.0
    return shape, *(weights / weights.sum(-1, keepdim=True))


def drafts_with_drawn_last_children(shape, q):
    """Return all drafts in which only last children are drawn, one per row, and their probabilities.

    An elder child is the most probable token that its elder siblings leave. The last one is drawn from the remaining
    distribution if there is any.
    """
    drafts = [([0], [], 1.0)]  # the tokens in the slots, the q of the nodes, the chance
    for node, parent in enumerate(shape):
        grown = []
        for slots, probs, chance in drafts:
            left = q[slots[parent]].clone()
            left[[slots[i + 1] for i in range(node) if shape[i] == parent]] = 0.0
            own = torch.eye(len(q))[left.argmax()]
            if parent not in shape[node + 1 :] and left.sum() > 0.0:
                own = left / left.sum()
            grown += [([*slots, x], [*probs, own], chance * own[x]) for x in own.nonzero()[:, 0].tolist()]
        drafts = grown
    slots, probs, chances = zip(*drafts, strict=True)
    parents = torch.tensor(shape).repeat(len(drafts), 1)
    draft = Draft(torch.tensor(slots)[:, 1:], parents, torch.stack([torch.stack(row) for row in probs]))
    return draft, torch.tensor(chances)


def verdict_with_coins(draft, p, coins):
    """Return the rule's paths for every draft under each of its coins [B * R, N], and the bonus distributions [B * R,
    V].
    """
    times, left = len(coins) // len(draft.tokens), []
    many = Draft(*(x.repeat_interleave(times, 0) for x in (draft.tokens, draft.parents, draft.probs)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accept, "coins", lambda draft, rng: coins)
        patch.setattr(accept, "draw", lambda probs, rng: left.append(probs) or probs.argmax(-1))
        verdict = Lossless()(many, p[in_slots(many.tokens)], torch.Generator())
    return verdict.path, left[0] / left[0].sum(-1, keepdim=True)


def exact_distribution(shape, draft, chances, p):
    """Return the joint distribution [V, V, V] of the first three tokens.

    The coin up to which a node is accepted, given accepted ancestors and rejected elder siblings, is found by
    bisection.
    """
    count, nodes = draft.tokens.shape
    ways = torch.zeros(nodes + 1, nodes)  # the nodes accepted on the path to a slot
    for node, parent in enumerate(shape):
        ways[node + 1] = ways[parent]
        ways[node + 1, node] = 1.0
    bars, own = torch.zeros(count * nodes), torch.arange(nodes).repeat(count)
    for halving in range(1, 25):
        coins = (1.0 - ways[1:]).repeat(count, 1)
        coins[range(count * nodes), own] = bars + 0.5**halving
        paths, _ = verdict_with_coins(draft, p, coins)
        accepted = [node + 1 in path for node, path in zip(own.tolist(), paths, strict=True)]
        bars += torch.tensor(accepted) * 0.5**halving
    _, bonus = verdict_with_coins(draft, p, (1.0 - ways).repeat(count, 1))
    bars, bonus, distribution = bars.view(count, nodes), bonus.view(count, nodes + 1, -1), torch.zeros(*(len(p),) * 3)
    for row, chance in enumerate(chances):
        # ended: the probability that the path ends in a slot
        ended, tokens_by_slot = [chance] + [None] * nodes, [()] * (nodes + 1)
        for node, parent in enumerate(shape):
            tokens_by_slot[node + 1] = (*tokens_by_slot[parent], int(draft.tokens[row, node]))
            ended[node + 1] = ended[parent] * bars[row, node]
            ended[parent] = ended[parent] * (1.0 - bars[row, node])
        for slot, tokens in enumerate(tokens_by_slot):
            after_end = ended[slot]
            if len(tokens) < 3:
                after_end = after_end * bonus[row, slot]
                for _ in range(2 - len(tokens)):
                    after_end = after_end[..., None] * p
            distribution[tokens[:3]] += after_end
    return distribution


@settings(max_examples=60, deadline=None, derandomize=True)
@given(languages())
def test_tree_with_drawn_last_children_keeps_the_targets_distribution(language):
    shape, p, q = language
    draft, chances = drafts_with_drawn_last_children(shape, q)
    assert float(chances.sum()) == pytest.approx(1.0, abs=1e-5)
    expected = p[0][:, None, None] * p[:, :, None] * p[None]
    torch.testing.assert_close(exact_distribution(shape, draft, chances, p), expected, atol=2e-6, rtol=0.0)


def test_last_child_with_unrestricted_q_is_not_lossless():
    draft, chances = drafts_with_drawn_last_children([0, 0], Q)
    wrong_draft = Draft(
        draft.tokens, draft.parents, torch.stack([draft.probs[:, 0], Q[:1].expand(len(chances), -1)], 1)
    )
    distribution, correct_distribution = (
        exact_distribution([0, 0], x, chances, P).sum((1, 2)) for x in (wrong_draft, draft)
    )
    torch.testing.assert_close(correct_distribution, P[0], atol=2e-6, rtol=0.0)
    assert float((distribution - P[0]).abs().max()) > 0.05


def no_residual(draft, target, rng):
    verdict = Lossless()(draft, target, rng)
    return AcceptResult(verdict.path, draw(accept.end_probs(target, verdict.path), rng))


def fresh_final_token(draft, target, rng):
    """Accept as the coupled rule does, but draw the final token without the noise that rejected a node."""
    path = Coupled()(draft, target, by_position(7)).path
    return AcceptResult(path, draw(accept.end_probs(target, path), rng))


def favourites_declared_as_drawn(context, elder, rng):
    return ranked(context, elder, rng)[0], Q[context]


def without_replacement_declared_as_with(context, elder, rng):
    return without_replacement(context, elder, rng)[0], Q[context]


@pytest.mark.parametrize("rule, shape, choose", [
    (no_residual, CHAIN, independent),
    (no_residual, STAR[:2], ranked),
    (fresh_final_token, CHAIN, ranked),
    (Typical(), CHAIN, independent),
    (Fly(window=1), CHAIN, independent),
    (Fly(window=1), CHAIN, ranked),
    (SpeculativeCascade(), CHAIN, independent),
    (SpeculativeCascade(alpha=0.9), CHAIN, ranked),
    (SpeculativeCascade(deferral="opt"), CHAIN, independent),
    (Lossless(), CHAIN, favourites_declared_as_drawn),
    (Block(), CHAIN, favourites_declared_as_drawn),
    (Lossless(), STAR, without_replacement_declared_as_with),
])  # fmt: skip
def test_chi_square_test_detects_wrong_rules_and_wrong_q(fits, rule, shape, choose):
    rng = torch.Generator().manual_seed(7)
    assert not fits(first_three_tokens(rule, grow(shape, choose, rng), rng), JOINT)


@pytest.mark.parametrize("choose", [independent, ranked])
def test_fly_that_never_defers_is_lossless(fits, choose):
    rng = torch.Generator().manual_seed(12)
    assert fits(first_three_tokens(Fly(threshold=5.0), grow(CHAIN, choose, rng), rng), JOINT)


@pytest.mark.parametrize("p, q", [(P[0], Q[0]), (P[2], Q[2]), (P[3], Q[3]), (Q[0], P[3])])
def test_coupled_drafts_are_accepted_as_often_as_the_theory_says(p, q):
    """Daliri et al., 2408.07978: 1 / sum over y of max(p(y) / p(x), q(y) / q(x)), summed over x."""
    noise = by_position(3).ahead(1)[:, 0]
    equal = ((p / noise).argmax(-1) == (q / noise).argmax(-1)).float().mean()
    distance = 0.5 * float((p - q).abs().sum())
    expected = sum(float(1.0 / torch.maximum(p / p[x], q / q[x]).sum()) for x in range(V) if p[x] > 0.0 and q[x] > 0.0)
    assert (1.0 - distance) / (1.0 + distance) <= expected <= 1.0 - distance
    assert float(equal) == pytest.approx(expected, abs=4.0 * (0.25 / DRAWS) ** 0.5)


def first_tokens(rule, rng):
    """Return the first output token of every row of a sampled chain."""
    draft = grow(CHAIN, independent, rng)
    slots = in_slots(draft.tokens)
    verdict = rule(draft, P[slots], rng)
    accepted = torch.tensor([len(path) > 1 for path in verdict.path])
    return torch.where(accepted, slots[:, 1], verdict.next_token)


def test_the_opt_cascade_follows_its_mixture(fits):
    alpha = 0.1
    defers = Q.amax(-1) < P.amax(-1) - alpha * 0.5 * (P - Q).abs().sum(-1)
    assert defers.tolist() == [False, False, True, True]
    tokens = first_tokens(SpeculativeCascade(deferral="opt", alpha=alpha), torch.Generator().manual_seed(13))
    assert fits(tokens, Q[0]) and not fits(tokens, P[0])


def test_the_top_token_cascade_follows_its_mixture(fits):
    alpha = 0.6
    top = P[0] >= (1.0 - alpha) * P[0].max()
    mixture = Q[0] * top + P[0] * (Q[0] * ~top).sum()
    tokens = first_tokens(SpeculativeCascade(alpha=alpha), torch.Generator().manual_seed(14))
    assert fits(tokens, mixture) and not fits(tokens, P[0]) and not fits(tokens, Q[0])


def test_unrenormalised_siblings_fail_the_chi_square_test(fits, monkeypatch):
    target_probs = P[:1].expand(DRAWS, 3, V)
    monkeypatch.setattr(accept, "_residuals_after_siblings", lambda draft, probs, target, nodes: target_probs)
    rng = torch.Generator().manual_seed(8)
    assert not fits(first_three_tokens(Lossless(), grow(STAR, independent, rng), rng), JOINT)


def test_the_chi_square_itself(fits):
    rng = torch.Generator().manual_seed(9)
    probs = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.0])
    right = sum(fits(torch.multinomial(probs, 2000, replacement=True, generator=rng), probs) for _ in range(300))
    assert right >= 298
    shifted = torch.tensor([0.12, 0.18, 0.3, 0.4, 0.0])
    assert not fits(torch.multinomial(shifted, DRAWS, replacement=True, generator=rng), probs)
    assert not fits(torch.tensor([4] + [3] * 100), probs)
