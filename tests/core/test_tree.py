"""Draft trees against their definitions."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdemo.core.tree import ABSENT, Draft, depths, first_branch, is_chain
from specdemo.kv.masks import ancestry

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


def test_first_branch_of_a_tree_with_no_node_present():
    branch = first_branch(Draft(torch.full((2, 3), ABSENT), torch.zeros(2, 3, dtype=torch.int64)))
    assert branch.tokens.shape == (2, 0)
    assert branch.probs is None


def test_chain_definition():
    chain = Draft.chain(torch.tensor([[5, 6, 7], [8, ABSENT, ABSENT]]))
    assert chain.parents.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert is_chain(chain.parents)
    assert is_chain(Draft.empty(3).parents)
    assert Draft.empty(3).nodes == 0
    assert not is_chain(torch.tensor([[0, 1], [0, 0]]))
