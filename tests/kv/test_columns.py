"""Columns placed with lengths on the host, against columns placed inside a CUDA graph and against the definition."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdemo.core.tree import chain_parents, depths
from specdemo.kv.masks import ancestry, chain_mask, tree_mask
from specdemo.kv.store import KVStore
from specdemo.kv.view import View

CPU = torch.device("cpu")


def store_of(lengths, spare=40):
    store = KVStore(CPU, torch.float32, 1)
    store.start(len(lengths), max(lengths) + spare)
    store.lengths = list(lengths)
    return store


def test_padding_of_shorter_rows_is_overwritten():
    store = store_of([4, 6])
    inputs = View.after(store).chain(3, [1, 3])
    assert inputs.positions.tolist() == [[4, 5, 6], [6, 7, 8]]
    assert inputs.last(torch.arange(6.0).view(2, 3, 1)).flatten().tolist() == [0.0, 5.0]
    assert inputs.chain().positions.tolist() == [[5], [9]]
    assert store.lengths == [4, 6]


def test_positions_stop_at_the_limit():
    store = KVStore(CPU, torch.float32, 1, limit=5)
    store.start(1, 20)
    store.lengths = [4]
    assert View.after(store).chain(3).positions.tolist() == [[4, 4, 4]]
    tree = View.after(store, torch.tensor([4])).tree(chain_parents(1, 2, CPU))
    assert tree.positions.tolist() == [[4, 4, 4]]


@pytest.mark.parametrize("lengths", [[5, 5], [3, 5]])
def test_a_cache_that_grows_keeps_its_columns(lengths):
    store = store_of(lengths, spare=2)
    View.after(store).chain(2)
    store.update(*torch.rand(2, len(lengths), 1, 2, 4), 0)
    store.commit([[0, 1]] * len(lengths))
    before = [store.slabs[0].keys[row, :, : length + 2].clone() for row, length in enumerate(lengths)]
    View.after(store).chain(90)
    assert store.capacity >= max(lengths) + 92 == len(store.positions) - (store.capacity - max(lengths) - 92)
    for row, length in enumerate(lengths):
        assert torch.equal(store.slabs[0].keys[row, :, : length + 2], before[row])


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


def visible_slots(parents, lengths, window):
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


def seen(mask, rows):
    assert mask[mask != 0.0].eq(torch.finfo(torch.float32).min).all()
    return (mask[:, 0] == 0.0).expand(rows, -1, -1)


@given(trees(rows=3), st.tuples(*[st.integers(1, 9)] * 3), st.sampled_from([0, 1, 3, 7]), st.booleans())
def test_a_mask_shows_what_may_be_seen(parents, lengths, window, equal):
    lengths = lengths[:1] if equal else lengths
    above = ancestry(parents)
    keys = torch.arange(max(lengths) + parents.shape[1] + 3)  # a pass may read columns after the new ones
    mask = tree_mask(torch.tensor(lengths), above > 0, keys, torch.float32, window, above.sum(-1).long() - 1)
    expected = visible_slots(parents, list(lengths) * (3 if equal else 1), window)
    assert torch.equal(seen(mask, 3)[..., : expected.shape[2]], expected)
    assert not seen(mask, 3)[..., expected.shape[2] :].any()


@given(st.integers(0, 6), st.tuples(*[st.integers(1, 9)] * 3), st.sampled_from([0, 1, 3, 7]))
def test_a_chain_is_a_tree_with_one_branch(nodes, lengths, window):
    parents = torch.arange(nodes).expand(3, -1)
    positions = torch.tensor(lengths)[:, None] + torch.arange(nodes + 1)
    keys = torch.arange(max(lengths) + nodes + 1)
    mask = chain_mask(positions, keys, (window, True), torch.float32)
    assert torch.equal(seen(mask, 3), visible_slots(parents, list(lengths), window))
