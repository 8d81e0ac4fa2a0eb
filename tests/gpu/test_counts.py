"""Limits on launches and synchronisations per step of each method, counted on the simulated GPU."""

import pytest
import torch

from specdemo.core.tree import chain_parents
from specdemo.models import operations
from specdemo.models.fused import fuse_layers
from specdemo.models.target import HFTarget
from tests.gpu.device import OnDevice, move, pretended
from tests.gpu.pretend import CASES, counted, qwen

# launches outside graphs, and syncs, while the clock runs, of a step whose draft tokens are all rejected. Which are
# accepted depends on how the CPU rounds bfloat16; joining them with the next token is one launch
LIMITS = {
    "plain": (4, 0),
    "plain T=0.8": (10, 0),
    "draft_model k=5": (12, 1),
    "draft_model k=5 T=0.8": (43, 2),
    "ngram k=6": (6, 1),
    "suffix k=6": (7, 1),
    "eagle-3 tree k=6 nodes=32": (19, 1),
    "eagle-3 chain k=5": (15, 1),
    "eagle-3 chain k=5 T=0.8": (46, 2),
    "mtp k=3": (15, 1),
    "layer_skip k=4": (11, 1),
    "gemma4_assistant k=4": (13, 1),
    "gemma4_assistant k=4 T=0.8": (44, 2),
    "dflash block=16": (17, 1),
    "medusa tree nodes=24": (17, 1),
    "mlp_speculator k=4": (12, 1),
    "lookahead": (14, 2),
    "cascade ngram k=4": (31, 3),
    "unfused 36 layers, plain": (4, 0),
}


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_a_step_starts_few_operations_and_hardly_waits(name):
    (row,) = counted(lambda case: case.name == name)
    launches, syncs = LIMITS[name]
    assert row.launches - row.accepting <= launches, row.laps
    assert row.syncs <= syncs, row.laps
    assert row.replays >= 1
    assert row.recordings_in_race == 0
    assert row.note == ""


@pytest.mark.parametrize(
    ("slots", "tree", "kernels", "limit"),
    [
        (1, False, True, 340),
        (6, False, True, 340),
        (32, True, True, 360),
        (1, False, False, 736),
        (32, True, False, 790),
    ],
)
def test_operations_of_a_captured_pass(slots, tree, kernels, limit, monkeypatch):
    """36 layers, as many as Qwen3-8B has. Nine operations per layer with Triton's kernels, 20 without."""
    monkeypatch.setattr(operations, "works", lambda *_: kernels)
    device = torch.device("cuda:0")
    with pretended() as world, torch.no_grad():
        model = move(qwen(36, 1), device)
        fuse_layers(model)
        target = HFTarget(model)
        target.start(OnDevice(torch.arange(3, 13)[None], device))
        parents = chain_parents(1, slots - 1, device)
        target.forward(OnDevice(torch.arange(3, 3 + slots)[None], device), parents.clone() if tree else parents)
        assert target.note == ""
        (graph,) = world.recorded
        assert len(graph().tape) <= limit
