"""Attention masks against their definition, slot by slot."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdemo.core.tree import depths
from specdemo.kv.masks import Masks, ancestry

CPU = torch.device("cpu")


@st.composite
def trees(draw, rows=1):
    nodes = draw(st.integers(0, 12))
    parents = [[draw(st.integers(0, node)) for node in range(nodes)] for _ in range(rows)]
    return torch.tensor(parents, dtype=torch.int64).reshape(rows, nodes)


def ancestors(parents):
    """Return a mask [B, S, S], computed node by node: True at [b, s, t] if t is s or an ancestor of s."""
    rows, nodes = parents.shape
    mask = torch.eye(nodes + 1, dtype=torch.bool).repeat(rows, 1, 1)
    for node in range(nodes):
        mask[:, node + 1] |= mask[torch.arange(rows), parents[:, node]]
    return mask


def visible(parents, lengths, window):
    """Return a mask [B, S, longest + S] of what each slot may see, from the definition."""
    above, depth = ancestors(parents), depths(parents)
    rows, slots = depth.shape
    seen = torch.zeros(rows, slots, max(lengths) + slots, dtype=torch.bool)
    for row, length in enumerate(lengths):
        for slot in range(slots):
            position = length + int(depth[row, slot])
            for column in range(length):
                seen[row, slot, column] = not window or position - column < window
            for other in range(slots):
                near = not window or int(depth[row, slot] - depth[row, other]) < window
                seen[row, slot, length + other] = above[row, slot, other] and near
    return seen


@given(trees(rows=3))
def test_ancestry_equals_the_reference(parents):
    assert torch.equal(ancestry(parents) > 0, ancestors(parents))


@given(trees(), st.integers(1, 9), st.sampled_from([0, 1, 3, 7]))
def test_a_mask_shows_what_may_be_seen(parents, length, window):
    masks = Masks(torch.float32, CPU)
    masks.reserve(9)
    plan = masks.plan(parents)
    mask = masks.mask(plan, window, length, None)
    expected = visible(parents, [length], window)
    if mask is None:
        assert bool(expected.all())
    else:
        assert torch.equal(mask[:, 0] == 0.0, expected)
        assert mask[mask != 0.0].eq(torch.finfo(torch.float32).min).all()


@given(trees(rows=3), st.tuples(*[st.integers(1, 9)] * 3), st.sampled_from([0, 3]))
def test_rows_of_unequal_length_have_masks_of_their_own(parents, lengths, window):
    masks = Masks(torch.float32, CPU)
    masks.reserve(9)
    mask = masks.mask(masks.plan(parents), window, max(lengths), torch.tensor(lengths))
    assert torch.equal(mask[:, 0] == 0.0, visible(parents, list(lengths), window))


def test_plans_are_remembered_until_the_history_outgrows_them():
    masks = Masks(torch.float32, CPU)
    masks.reserve(8)
    first = masks.plan(torch.tensor([[0, 0, 1]]))
    assert masks.plan(torch.tensor([[0, 0, 1]])) is first
    assert masks.plan(torch.tensor([[0, 0, 1], [0, 0, 1]])) is first  # equal rows share a plan
    masks.reserve(9)
    assert masks.plan(torch.tensor([[0, 0, 1]])) is not first


@pytest.mark.parametrize("nodes", [0, 1, 5])
def test_plan_cache_is_bounded(nodes):
    masks = Masks(torch.float32, CPU)
    masks.reserve(4)
    first = masks.plan(torch.arange(nodes)[None])
    for other in range(40):
        masks.plan(torch.zeros(1, 2 + other, dtype=torch.int64))
    assert masks.plan(torch.arange(nodes)[None]) is not first
