"""Columns placed with lengths on the host, against columns placed inside a CUDA graph and against the definition."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdemo.core.tree import chain_parents
from specdemo.kv.cache import SlabCache
from specdemo.kv.store import KVStore, ProvisionalColumns

CPU = torch.device("cpu")
KINDS = [(0, True), (3, True), (0, False), (3, False)]


def store_of(lengths, spare=40):
    store = KVStore(CPU, torch.float32, lambda rows, columns: SlabCache(1, rows, columns, CPU))
    store.start(len(lengths), max(lengths) + spare)
    store.lengths = list(lengths)
    return store


def both(lengths):
    """Return provisional columns of both kinds in one store."""
    store = store_of(lengths)
    return store.provisional(), ProvisionalColumns(store, torch.tensor(lengths))


def visible(columns, kind, rows, width, total):
    """Return which of the first `total` keys each new column sees, bool [B, S, W]."""
    mask = columns.mask(kind)
    if mask is None:
        return torch.ones(rows, width, total, dtype=torch.bool)
    return (mask[:, 0, :, :total] == 0.0).expand(rows, width, -1)


def positions(columns, rows):
    return columns.positions.expand(rows, -1).tolist()


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 5), st.sampled_from(KINDS))
def test_chains_are_equal_in_a_graph(lengths, width, kind):
    eager, captured = both(lengths)
    for step in range(2):
        new, same = eager.chain(width), captured.chain(width)
        total = max(lengths) + (step + 1) * width
        assert positions(new, len(lengths)) == positions(same, len(lengths))
        seen = visible(new, kind, len(lengths), width, total)
        expected = visible(same, kind, len(lengths), width, total)
        for row, length in enumerate(lengths):
            end = length + (step + 1) * width
            assert torch.equal(seen[row, :, :end], expected[row, :, :end])
            assert kind[1] is False or not expected[row, :, end:].any()


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.data(), st.sampled_from([0, 3]))
def test_tree_levels_are_equal_in_a_graph(lengths, data, window):
    eager, captured = both(lengths)
    rows, width, drafted = len(lengths), 1, 0
    for _ in range(3):
        parents = torch.tensor(
            [data.draw(st.lists(st.integers(0, width - 1), min_size=2, max_size=2)) for _ in range(rows)]
        )
        width = 2
        new, same = eager.level(parents), captured.level(parents)
        drafted += width
        assert positions(new, rows) == positions(same, rows)
        total = max(lengths) + drafted
        seen = visible(new, (window, True), rows, width, total)
        assert torch.equal(seen, visible(same, (window, True), rows, width, total))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.data(), st.sampled_from([0, 3]))
def test_trees_are_equal_in_a_graph(lengths, data, window):
    eager, captured = both(lengths)
    nodes, rows = data.draw(st.integers(0, 6)), len(lengths)
    parents = [[data.draw(st.integers(0, node)) for node in range(nodes)] for _ in range(rows)]
    tree = torch.tensor(parents, dtype=torch.int64).reshape(rows, nodes)
    new, same = eager.tree(tree), captured.tree(tree)
    assert positions(new, rows) == positions(same, rows)
    total = max(lengths) + nodes + 1
    seen = visible(new, (window, True), rows, nodes + 1, total)
    expected = visible(same, (window, True), rows, nodes + 1, total)
    for row, length in enumerate(lengths):
        end = length + nodes + 1
        assert torch.equal(seen[row, :, :end], expected[row, :, :end])


def test_padding_of_shorter_rows_is_overwritten():
    store = store_of([4, 6])
    provisional = store.provisional()
    inputs = provisional.chain(3, [1, 3])
    assert inputs.positions.tolist() == [[4, 5, 6], [6, 7, 8]]
    assert inputs.last(torch.arange(6.0).view(2, 3, 1)).flatten().tolist() == [0.0, 5.0]
    assert provisional.chain().positions.tolist() == [[5], [9]]
    assert store.lengths == [4, 6]


def test_positions_stop_at_the_limit():
    store = KVStore(CPU, torch.float32, lambda rows, columns: SlabCache(1, rows, columns, CPU), limit=5)
    store.start(1, 20)
    store.lengths = [4]
    assert store.provisional().chain(3).positions.tolist() == [[4, 4, 4]]
    assert ProvisionalColumns(store, torch.tensor([4])).tree(chain_parents(1, 2, CPU)).positions.tolist() == [[4, 4, 4]]


@pytest.mark.parametrize("lengths", [[5, 5], [3, 5]])
def test_a_cache_that_grows_keeps_its_columns(lengths):
    store = store_of(lengths, spare=2)
    cache = store.cache
    columns = store.provisional().chain(2)
    columns.cache.update(*torch.rand(2, len(lengths), 1, 2, 4), 0)
    store.commit([[0, 1]] * len(lengths))
    before = [cache.slabs[0].keys[row, :, : length + 2].clone() for row, length in enumerate(lengths)]
    store.provisional().chain(90)
    assert store.capacity >= max(lengths) + 92 == len(store.positions) - (store.capacity - max(lengths) - 92)
    for row, length in enumerate(lengths):
        assert torch.equal(store.cache.slabs[0].keys[row, :, : length + 2], before[row])
