"""The acceptance rules, verdict by verdict: the fast rule equals the reference, and corner cases computed by hand;
draft trees against their definitions; the registry of rules, their options, and the rules for chains."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdemo.core import accept, block
from specdemo.core.accept import AcceptResult, Lossless, or_target
from specdemo.core.block import Block
from specdemo.core.fly import Fly
from specdemo.core.host_copy import AsyncHostCopy, pinned, to_lists
from specdemo.core.rules import RULES, accept_rule, rule_options
from specdemo.core.sampling import draw
from specdemo.core.speculative_cascade import SpeculativeCascade
from specdemo.core.tree import ABSENT, Draft, depths, first_branch, is_chain
from specdemo.core.typical import Typical
from specdemo.kv.masks import ancestry
from tests.gpu.device import pretended


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def set_coins(monkeypatch, coins):
    """Replace the random numbers of all rules."""
    for module in (accept, block):
        monkeypatch.setattr(module, "coins", coins)


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


def random_probs(shape, seed, zeros):
    """Return random distributions; a fraction `zeros` of their entries is zero, but never all of them."""
    generator = rng(seed)
    weights = torch.rand(shape, generator=generator) ** 2
    weights = weights * (torch.rand(shape, generator=generator) >= zeros) + 1e-12
    weights[weights <= 1e-12] = 0.0
    weights[..., 0] += (weights.sum(-1) == 0).float()
    return weights / weights.sum(-1, keepdim=True)


@st.composite
def trees(draw, max_nodes=7, vocabulary=4):
    """Draw tokens and parents [B, N], including empty, ragged and duplicate siblings. Descendants of an absent node are
    absent.
    """
    rows, nodes = draw(st.integers(1, 3)), draw(st.integers(0, max_nodes))
    chain = draw(st.booleans())
    tokens = torch.empty(rows, nodes, dtype=torch.int64)
    parents = torch.empty(rows, nodes, dtype=torch.int64)
    for row in range(rows):
        for node in range(nodes):
            parent = node if chain else draw(st.integers(0, node))
            orphan = parent > 0 and tokens[row, parent - 1] == ABSENT
            parents[row, node] = parent
            tokens[row, node] = ABSENT if orphan else draw(st.integers(ABSENT, vocabulary - 1))
    return tokens, parents


@st.composite
def cases(draw, one_hot_target=False):
    tokens, parents = draw(trees())
    rows, nodes = tokens.shape
    seed, zeros = draw(st.integers(0, 10_000)), draw(st.sampled_from([0.0, 0.3, 0.7]))
    target = random_probs((rows, nodes + 1, 4), seed, zeros)
    if one_hot_target:
        target = torch.zeros_like(target).scatter_(-1, target.argmax(-1, keepdim=True), 1.0)
    probs = random_probs((rows, nodes, 4), seed + 1, zeros) if draw(st.booleans()) else None
    return Draft(tokens, parents, probs), target, seed


@settings(max_examples=200, deadline=None, derandomize=True)
@given(cases())
def test_fast_rule_equals_the_reference(case):
    draft, target, seed = case
    fast, readable = Lossless()(draft, target, rng(seed)), lossless_reference(draft, target, rng(seed))
    assert fast.path == readable.path
    assert fast.next_token.tolist() == readable.next_token.tolist()


@pytest.mark.parametrize("sampled", [True, False])
def test_fast_rule_equals_the_reference_on_many_trees(sampled):
    """Hypothesis prefers small trees; here are 600 rows with different trees of up to 10 nodes."""
    tokens = torch.randint(ABSENT, 5, (600, 10), generator=rng(1))
    parents = (torch.rand(600, 10, generator=rng(2)) * torch.arange(1, 11) * 0.6).long()
    for node in range(1, 10):
        above = tokens.gather(1, (parents[:, node : node + 1] - 1).clamp_min(0))[:, 0]
        tokens[(parents[:, node] > 0) & (above == ABSENT), node] = ABSENT
    target, probs = random_probs((600, 11, 5), 3, 0.2), random_probs((600, 10, 5), 4, 0.2)
    draft = Draft(tokens, parents, probs if sampled else None)
    fast, readable = Lossless()(draft, target, rng(5)), lossless_reference(draft, target, rng(5))
    assert max(map(len, fast.path)) >= 4
    assert fast.path == readable.path
    assert torch.equal(fast.next_token, readable.next_token)


@st.composite
def chains(draw, vocabulary=4):
    """Draw chains of different lengths."""
    rows, nodes = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    seed, zeros = draw(st.integers(0, 10_000)), draw(st.sampled_from([0.0, 0.3, 0.7]))
    target, probs = random_probs((rows, nodes + 1, 4), seed, zeros), random_probs((rows, nodes, 4), seed + 1, zeros)
    tokens = torch.multinomial(probs.view(-1, 4), 1, generator=rng(seed)).view(rows, nodes)
    lengths = torch.tensor([draw(st.integers(0, nodes)) for _ in range(rows)])
    tokens = tokens.masked_fill(torch.arange(nodes) >= lengths[:, None], ABSENT)
    return Draft.chain(tokens, probs), target, seed


@settings(max_examples=300, deadline=None, derandomize=True)
@given(chains())
def test_fast_block_rule_equals_the_reference(case):
    draft, target, seed = case
    fast, readable = Block()(draft, target, rng(seed)), block_reference(draft, target, rng(seed))
    assert fast.path == readable.path
    assert fast.next_token.tolist() == readable.next_token.tolist()


@settings(max_examples=50, deadline=None, derandomize=True)
@given(cases())
def test_block_rule_falls_back_to_token_level_with_a_note(case):
    draft, target, seed = case
    rule, drawn_chain = Block(), draft.probs is not None and is_chain(draft.parents)
    if not drawn_chain:
        fast, expected = rule(draft, target, rng(seed)), Lossless()(draft, target, rng(seed))
        assert (fast.path, fast.next_token.tolist()) == (expected.path, expected.next_token.tolist())
        assert ("one by one" in rule.note) == bool(draft.nodes)


# Sun et al., a Markov chain of three tokens. Rows: after the start, after token 0, 1 and 2.
BLOCK_P = torch.tensor([[0.5, 0.3, 0.2], [0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.3, 0.3, 0.4]], dtype=torch.float64)
BLOCK_Q = torch.tensor([[0.2, 0.5, 0.3], [0.3, 0.6, 0.1], [0.5, 0.3, 0.2], [0.1, 0.2, 0.7]], dtype=torch.float64)


def block_chances(tokens):
    """Return the probability of each accepted length of a drafted chain, and the bonus tokens by length, from 20,000
    rows.
    """
    slots = [0, *(x + 1 for x in tokens)]
    rows = 20_000
    target = BLOCK_P[slots].expand(rows, -1, -1)
    draft = Draft.chain(torch.tensor([tokens]).expand(rows, -1), BLOCK_Q[slots[:-1]].expand(rows, -1, -1))
    verdict = Block()(draft, target, rng(3))
    lengths = torch.tensor([len(path) - 1 for path in verdict.path])
    shares = [float((lengths == n).double().mean()) for n in range(len(tokens) + 1)]
    return shares, {n: set(verdict.next_token[lengths == n].tolist()) for n in range(len(tokens) + 1)}


@pytest.mark.parametrize(("tokens", "h"), [
    ((2, 2), (3 / 13, 8 / 21)), ((1, 2), (0.0, 0.9)), ((0, 1), (1.0, 0.5)), ((2, 0), (3 / 13, 1.0)),
    ((2, 0, 1), (3 / 13, 1.0, 0.5)), ((0, 1, 0), (1.0, 0.0, 0.2)),
])  # fmt: skip
def test_block_acceptance_probabilities(tokens, h):
    shares, bonus = block_chances(tokens)
    longest = 1.0
    for n in range(len(tokens), 0, -1):
        assert shares[n] == pytest.approx(longest * h[n - 1], abs=0.015)
        longest *= 1 - h[n - 1]
    assert shares[0] == pytest.approx(longest, abs=0.015)
    assert bonus[0] <= {0} and (tokens != (2, 2) or bonus[1] == {0})


@settings(max_examples=100, deadline=None, derandomize=True)
@given(cases(one_hot_target=True))
def test_greedy_follows_the_argmax_with_or_without_coins(case):
    draft, target, seed = case
    verdict = Lossless()(draft, target, None)
    best = target.argmax(-1)
    for row, path in enumerate(verdict.path):
        accepted = [int(draft.tokens[row, slot - 1]) for slot in path[1:]]
        predicted = [int(best[row, slot]) for slot in path]
        assert [*accepted, int(verdict.next_token[row])] == predicted
    assert Typical()(draft, target, None).path == verdict.path
    if draft.probs is None:
        for other in (lossless_reference(draft, target, None), Lossless()(draft, target, rng(seed))):
            assert other.path == verdict.path
            assert other.next_token.tolist() == verdict.next_token.tolist()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(cases(), st.sampled_from([Lossless(), Block(), Typical()]))
def test_a_path_descends_over_possible_tokens_only(case, rule):
    draft, target, seed = case
    verdict = rule(draft, target, rng(seed))
    for row, path in enumerate(verdict.path):
        assert path[0] == 0
        for parent, slot in pairwise(path):
            token = int(draft.tokens[row, slot - 1])
            assert int(draft.parents[row, slot - 1]) == parent
            assert token != ABSENT
            assert target[row, parent, token] > 0
        assert target[row, path[-1], verdict.next_token[row]] > 0


@pytest.mark.parametrize("rule", [Lossless(), lossless_reference])
@pytest.mark.parametrize("probs", [None, torch.tensor([[[0.5, 0.5, 0.0]]])])
def test_a_coin_of_zero_does_not_keep_an_impossible_token(monkeypatch, rule, probs):
    set_coins(monkeypatch, lambda draft, rng: torch.zeros(draft.tokens.shape))
    draft = Draft.chain(torch.tensor([[0]]), probs)
    verdict = rule(draft, torch.tensor([[[0.0, 0.4, 0.6], [1.0, 0.0, 0.0]]]), rng())
    assert verdict.path == [[0]]
    assert verdict.next_token.item() != 0


@pytest.mark.parametrize("rule", [Lossless(), lossless_reference])
@pytest.mark.parametrize("nodes", [1, 3])
def test_a_residual_rounded_to_nothing_falls_back_to_the_target(monkeypatch, rule, nodes):
    # A coin of 1 rejects even where q == p.
    set_coins(monkeypatch, lambda draft, rng: torch.ones(draft.tokens.shape))
    p = torch.tensor([0.0, 0.25, 0.75])
    star = Draft(torch.full((1, nodes), 2), torch.zeros(1, nodes, dtype=torch.int64), p.expand(1, nodes, 3))
    verdicts = [rule(star, p.expand(1, nodes + 1, 3), rng(seed)) for seed in range(20)]
    assert {tuple(v.path[0]) for v in verdicts} == {(0,)}
    assert {v.next_token.item() for v in verdicts} == {1, 2}


def test_one_hot_mass_rounded_below_zero_keeps_no_impossible_token(monkeypatch):
    set_coins(monkeypatch, lambda draft, rng: torch.full(draft.tokens.shape, 1.5))
    p = torch.tensor([0.6, 0.4 + 1e-6, 0.0])
    star = Draft(torch.tensor([[0, 1, 2]]), torch.zeros(1, 3, dtype=torch.int64))
    verdict = Lossless()(star, p.expand(1, 4, 3), rng())
    assert verdict.path == [[0]]
    assert verdict.next_token.item() in (0, 1)


@pytest.mark.parametrize("p, accepted", [
    ([0.25, 0.25, 0.25, 0.25], {0, 1, 2, 3}),  # flat: the threshold 0.3 exp(-ln 4) = 0.075 accepts all
    ([0.97, 0.01, 0.01, 0.01], {0}),  # sharp: the threshold 0.09 accepts only the most probable token
])  # fmt: skip
def test_typical_thresholds(p, accepted):
    target = torch.tensor(p).expand(1, 2, 4)
    verdicts = {x: Typical()(Draft.chain(torch.tensor([[x]])), target, rng()) for x in range(4)}
    assert {x for x, verdict in verdicts.items() if verdict.path == [[0, 1]]} == accepted


def test_typical_takes_the_longest_path_then_the_likelier():
    target = torch.tensor([0.4, 0.35, 0.25]).expand(1, 5, 3)
    parents = torch.tensor([[0, 0, 2, 2]])
    longest = Typical()(Draft(torch.tensor([[0, 1, 2, 0]]), parents), target, rng())
    assert longest.path == [[0, 2, 4]]
    first = Typical()(Draft(torch.tensor([[0, 1, 2, 2]]), parents), target, rng())
    assert first.path == [[0, 2, 3]]


def test_typical_refuses_invalid_thresholds():
    with pytest.raises(ValueError, match="epsilon must be in"):
        Typical(epsilon=0.0)
    with pytest.raises(ValueError, match="delta above 0"):
        Typical(delta=-1.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("sampled", [True, False])
def test_fast_rule_on_a_gpu_equals_the_reference(sampled):
    tokens = torch.randint(0, 4, (8, 6), generator=rng()).cuda()
    parents = torch.tensor([0, 0, 1, 1, 2, 0]).expand(8, 6).cuda()
    target, probs = random_probs((8, 7, 4), 1, 0.3).cuda(), random_probs((8, 6, 4), 2, 0.3).cuda()
    draft = Draft(tokens, parents, probs if sampled else None)
    for seed in range(20):
        coins = [torch.Generator("cuda").manual_seed(seed) for _ in range(2)]
        fast, readable = Lossless()(draft, target, coins[0]), lossless_reference(draft, target, coins[1])
        assert fast.path == readable.path
        assert fast.next_token.tolist() == readable.next_token.tolist()


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_what_its_entry_says(name):
    rule = accept_rule(name)
    assert rule.exact is RULES[name].lossless
    lossy = name in ("typical", "fly", "speculative_cascade")
    assert RULES[name].label(name) == (name if name == "lossless" else f"{name} ({'lossy' if lossy else 'lossless'})")
    assert RULES[name].coupled is getattr(rule, "coupled", False)


quick = settings(max_examples=100, deadline=None, derandomize=True)


@st.composite
def parent_rows(draw, max_rows=3, max_nodes=8):
    rows, nodes = draw(st.integers(1, max_rows)), draw(st.integers(0, max_nodes))
    return [[draw(st.integers(0, node)) for node in range(nodes)] for _ in range(rows)]


def as_tensor(rows):
    return torch.tensor(rows, dtype=torch.int64).view(len(rows), -1)


def line(parents, slot):
    """Return the slots from a slot up to the root."""
    slots = [slot]
    while slots[-1]:
        slots.append(parents[slots[-1] - 1])
    return slots


@quick
@given(parent_rows())
def test_ancestors_and_depths(rows):
    mask, depth = ancestry(as_tensor(rows)), depths(as_tensor(rows))
    for row, parents in enumerate(rows):
        for slot in range(len(parents) + 1):
            up = line(parents, slot)
            assert mask[row, slot].nonzero().flatten().tolist() == sorted(up)
            assert depth[row, slot] == len(up) - 1


@quick
@given(parent_rows(), st.data())
def test_first_branch(rows, data):
    parents = as_tensor(rows)
    tokens = as_tensor([[data.draw(st.integers(ABSENT, 9)) for _ in row] for row in rows])
    nodes = tokens.shape[1]
    confidence = torch.arange(nodes).expand(len(rows), -1).float()
    probs = confidence[..., None].expand(-1, -1, 3)
    branch = first_branch(Draft(tokens, parents, probs, confidence, {"note": 1.0}))
    expected = []
    for row, row_parents in enumerate(rows):
        nodes_of_row, slot = [], 0
        while children := [n for n, p in enumerate(row_parents) if p == slot and tokens[row, n] != ABSENT]:
            nodes_of_row.append(children[0])
            slot = children[0] + 1
        expected.append(nodes_of_row)
    assert is_chain(branch.parents)
    assert branch.notes == {"note": 1.0}
    assert branch.nodes == max(map(len, expected))
    for row, chosen in enumerate(expected):
        present = [tokens[row, n].item() for n in chosen]
        assert branch.tokens[row].tolist() == present + [ABSENT] * (branch.nodes - len(chosen))
        assert branch.confidence[row, : len(chosen)].tolist() == chosen
        assert branch.probs[row, : len(chosen), 2].tolist() == chosen


def test_an_unknown_rule_is_one_line():
    with pytest.raises(ValueError, match="unknown acceptance rule 'tipical'; did you mean 'typical'\\?"):
        accept_rule("tipical")


def test_every_lossy_rule_has_options():
    assert [name for name in RULES if rule_options(name)] == [
        name for name, entry in RULES.items() if not entry.lossless
    ]


def test_options_are_parsed_and_rejected_in_one_line():
    assert accept_rule("fly", {"window": "4", "threshold": "0.5"}) == Fly(window=4, threshold=0.5)
    with pytest.raises(ValueError, match="unknown option 'windw' of acceptance rule 'fly'; did you mean 'window'\\?"):
        accept_rule("fly", {"windw": 4})
    with pytest.raises(ValueError, match="option 'window' must be between 0 and 15, not 99"):
        accept_rule("fly", {"window": 99})
    with pytest.raises(ValueError, match="option 'deferral' must be one of top_tokens, opt, not 'chow'"):
        accept_rule("speculative_cascade", {"deferral": "chow"})
    with pytest.raises(ValueError, match="acceptance rule 'block' has no options; leave out 'window'"):
        accept_rule("block", {"window": 4})


UNCERTAIN, CERTAIN = [2.0, 1.9, 1.8, -9.0], [9.0, 0.0, 0.0, 0.0]  # logits; token 0 is the most likely one


@pytest.mark.parametrize(("logits", "tokens", "window", "length", "changed"), [
    ([UNCERTAIN, CERTAIN, CERTAIN], [1, 0, 0], 2, 3, 1),  # deferred: uncertain, and the next two tokens match
    ([CERTAIN, CERTAIN, CERTAIN], [1, 0, 0], 2, 0, 0),  # the target is certain
    ([UNCERTAIN, CERTAIN, CERTAIN], [1, 0, 1], 2, 0, 0),  # a rejection within the window
    ([UNCERTAIN, CERTAIN, CERTAIN], [1, 0, 1], 1, 2, 1),  # a shorter window
    ([CERTAIN, UNCERTAIN, CERTAIN], [0, 1, 0], 2, 1, 0),  # the window does not fit into the draft
    ([UNCERTAIN, CERTAIN, CERTAIN], [1, 0, ABSENT], 2, 0, 0),  # nor into the present part of a row
    ([UNCERTAIN, CERTAIN, CERTAIN], [1, 0, 0], 0, 3, 1),  # 0: min(6, draft length - 1)
])  # fmt: skip
def test_fly_defers_a_rejection_where_the_target_is_uncertain(logits, tokens, window, length, changed):
    target = torch.tensor([[*logits, CERTAIN]])
    result = Fly(window=window)(Draft.chain(torch.tensor([tokens])), target, None)
    assert result.path == [list(range(length + 1))] and result.changed == [changed]
    assert result.next_token.tolist() == [0]


def test_fly_never_accepts_a_token_that_the_target_cannot_output():
    flat = torch.tensor([0.5, 0.5, 0.0]).expand(1, 4, 3)
    tokens = torch.tensor([[2, 0, 1]])
    q = torch.eye(3)[tokens]
    for seed in range(20):
        result = Fly(window=2, threshold=0.0)(Draft.chain(tokens, q), flat, torch.Generator().manual_seed(seed))
        assert result.path == [[0]] and result.next_token.item() != 2


def test_a_greedy_cascade_accepts_top_tokens():
    target = torch.tensor([[UNCERTAIN, CERTAIN, UNCERTAIN]])
    draft = Draft.chain(torch.tensor([[2, 0]]))
    result = SpeculativeCascade(alpha=0.5)(draft, target, None)
    assert result.path == [[0, 1, 2]] and result.changed == [1] and result.next_token.tolist() == [0]
    strict = SpeculativeCascade(alpha=0.0)(draft, target, None)
    assert strict.path == [[0]] and strict.changed == [0] and strict.next_token.tolist() == [0]


def test_rows_of_a_batch_are_verified_separately():
    target = torch.tensor([[UNCERTAIN, CERTAIN, CERTAIN], [CERTAIN, CERTAIN, UNCERTAIN]])
    draft = Draft.chain(torch.tensor([[1, 0], [1, 0]]))
    for rule in (Fly(window=1), SpeculativeCascade()):
        result = rule(draft, target, None)
        assert result.path == [[0, 1, 2], [0]] and result.changed == [1, 0]


def test_the_opt_deferral_needs_the_distribution_of_the_drafter():
    draft, target = Draft.chain(torch.tensor([[1]])), torch.tensor([[CERTAIN, CERTAIN]])
    rule = SpeculativeCascade(deferral="opt")
    for generator in (None, rng()):
        with pytest.raises(ValueError, match="choose a temperature above 0 and a method that samples"):
            rule(draft, target.softmax(-1), generator)


@pytest.mark.parametrize("name", [name for name, entry in RULES.items() if not entry.trees])
def test_a_rule_for_chains_rejects_trees(name):
    tree = Draft(torch.tensor([[0, 1]]), torch.tensor([[0, 0]]))
    with pytest.raises(ValueError, match=f"'{name}' verifies chains only and this lane drafts trees"):
        accept_rule(name)(tree, torch.ones(1, 3, 4), rng())


@pytest.mark.parametrize("name", [name for name, entry in RULES.items() if not entry.trees])
def test_an_empty_draft_is_plain_decoding(name):
    result = accept_rule(name)(Draft.empty(2), torch.tensor([[CERTAIN], [CERTAIN]]), None)
    assert result.path == [[0], [0]] and result.next_token.tolist() == [0, 0]


def test_numbers_cross_without_a_wait_and_return_with_one():
    with pretended() as gpu:
        x, numbers = torch.zeros(3, dtype=torch.int64, device="cuda:0"), pinned([1, 2, 3], torch.device("cuda:0"))
        x.copy_(numbers, non_blocking=True)
        reading = AsyncHostCopy(x)
        assert gpu.syncs == 0 and reading._host_tensor.tolist() != [1, 2, 3]
        assert reading.tolist() == [1, 2, 3] and gpu.syncs == 1


def test_concatenated_matrices_are_split():
    first, second = torch.arange(6).view(2, 3), torch.arange(4).view(2, 2)
    assert to_lists(first, second) == [first.tolist(), second.tolist()]
