"""Tree shapes and tree growth, against definitions on sizes small enough to enumerate."""

import itertools

import pytest
import torch

from specdemo.core.protocol import Budget
from specdemo.core.tree import depths
from specdemo.methods.heads.sampler import TreeShape, chain, clip_shape, grow_tree, optimal_shape


def test_a_shape_is_its_paths():
    paths = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
    shape = TreeShape.from_paths(list(reversed(paths)))
    assert shape.paths() == sorted(paths, key=lambda p: (len(p), p))
    assert shape.parents == (0, 0, 1, 1, 2, 3)
    assert (shape.width, shape.depth) == (2, 3)
    assert chain(3) == TreeShape.from_paths([(0,), (0, 0), (0, 0, 0)])


def test_an_orphan_is_refused():
    with pytest.raises(ValueError, match=r"the tree has \(1, 0\) but not its parent \(1,\)"):
        TreeShape.from_paths([(0,), (1, 0)])


def test_a_budget_cuts_depth_and_nodes():
    shape = TreeShape.from_paths([p for n in (1, 2, 3) for p in itertools.product(range(3), repeat=n)])
    for depth, nodes in itertools.product(range(4), (0, 1, 2, 5, 40)):
        cut = clip_shape(shape, Budget(depth, nodes))
        assert len(cut.parents) <= nodes
        assert cut.depth <= depth
        assert set(cut.paths()) <= set(shape.paths())


def test_the_fitted_tree_is_the_best_of_all_trees():
    rates = [[0.6, 0.2, 0.1], [0.5, 0.1], [0.3]]
    every = [p for n in (1, 2, 3) for p in itertools.product(*(range(len(r)) for r in rates[:n]))]

    def gain(paths):
        return sum(torch.tensor([rates[i][r] for i, r in enumerate(p)]).prod() for p in paths)

    def closed(paths):
        return all(len(p) == 1 or p[:-1] in paths for p in paths)

    for nodes in (1, 2, 4, 5):
        best = max(gain(c) for c in itertools.combinations(every, nodes) if closed(c))
        assert float(gain(optimal_shape(rates, nodes).paths())) == pytest.approx(float(best))


def table_drafter(order, vocabulary=6, batch=2, seed=0):
    """Return a Markov drafter whose q depends on the last `order` tokens, and a list of its expanded frontiers."""
    rng = torch.Generator().manual_seed(seed)
    table = torch.randn(batch, vocabulary, vocabulary, generator=rng).log_softmax(-1)
    expanded = []

    def expand(tokens, parents):
        expanded.append((tokens, parents))
        return table[torch.arange(batch)[:, None], tokens]

    return table[:, 0], expand, table, expanded


@pytest.mark.parametrize("nodes", [1, 3, 7, 20])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_growth_keeps_the_likeliest_paths(depth, nodes):
    first, expand, table, expanded = table_drafter(1)
    draft = grow_tree(first, expand, Budget(depth, nodes), top_k=6)  # K = V: the first two levels are complete
    assert len(expanded) == depth - 1
    assert int(depths(draft.parents).max()) <= depth
    for row in range(2):
        paths, scores = [()], [0.0]
        for token, parent in zip(draft.tokens[row].tolist(), draft.parents[row].tolist(), strict=True):
            before = paths[parent][-1] if paths[parent] else 0
            paths.append((*paths[parent], token))
            scores.append(scores[parent] + float(table[row, before, token]))
        assert len(set(paths)) == len(paths) == draft.nodes + 1
        if depth <= 2:
            every = [p for n in range(1, depth + 1) for p in itertools.product(range(6), repeat=n)]
            chance = {p: sum(float(table[row, a, b]) for a, b in itertools.pairwise((0, *p))) for p in every}
            assert sorted(scores[1:]) == pytest.approx(sorted(sorted(chance.values())[-draft.nodes :]), abs=1e-5)


def test_a_frontier_of_one_is_a_greedy_chain():
    first, expand, table, _ = table_drafter(1)
    draft = grow_tree(first, expand, Budget(4, 4), top_k=1)
    assert draft.parents.tolist() == [[0, 1, 2, 3]] * 2
    for row in range(2):
        last = 0
        for token in draft.tokens[row].tolist():
            assert token == int(table[row, last].argmax())
            last = token


def test_parents_point_into_the_frontier_before():
    first, expand, _, expanded = table_drafter(1)
    grow_tree(first, expand, Budget(4, 9), top_k=3)
    for (tokens, _), (_, parents) in itertools.pairwise(expanded):
        assert parents.shape == tokens.shape == (2, 3)
        assert int(parents.max()) < 3


def test_no_budget_no_nodes():
    first, expand, _, expanded = table_drafter(1)
    assert grow_tree(first, expand, Budget(0, 0), top_k=3).nodes == 0
    assert not expanded
