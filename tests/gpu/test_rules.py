"""Mistakes of code for CUDA that real GPUs have shown, on the simulated GPU."""

import gc

import pytest
import torch

from specdemo.core.protocol import Budget, GenerationConfig
from specdemo.core.sampling import Sampling
from specdemo.kv.graphs import CudaGraphs
from specdemo.methods import load_drafter
from specdemo.models.target import HFTarget
from tests.generation import output
from tests.gpu.device import STREAMS, move, pretended
from tests.gpu.test_graphs import fused_target, make_drafter_for
from tests.models.tiny import build, texts


@pytest.fixture
def world():
    with pretended() as made:
        yield made


@pytest.fixture
def ones(world):
    return torch.ones(2, 2, device="cuda:0")


def text_of(target, drafter=None, rows=1, sampling=None):
    config = GenerationConfig(24, sampling=sampling or Sampling(), budget=Budget(3, 3), stop_token_ids=())
    drafter = drafter or load_drafter("none", target)
    return output(target, drafter, texts(rows, 9).cuda(), config)


def slow(*names):
    """Return parameters of tests that run before a release."""
    return [pytest.param(name, marks=pytest.mark.release) for name in names]


@pytest.mark.parametrize("name", ["eagle", *slow("draft_model", "dflash", "lookahead")])
def test_sampled_texts_repeat_with_their_seed_and_memory_does_not_grow(world, name):
    target = fused_target("llama")
    drafter = make_drafter_for(name, target)
    seen, used = [], []
    for _ in range(4):
        seen.append(text_of(target, drafter, sampling=Sampling(0.8, 20, 0.9)))
        gc.collect()
        used.append(world.allocated)
    assert seen == seen[:1] * 4
    assert used[2:] == used[1:3]
    assert target.note == drafter.graph_note == ""


def test_a_recorder_orders_streams_and_pools(world, ones):
    record = CudaGraphs(ones.device)
    replay = record(lambda: (ones @ ones,))
    assert replay()[0].tolist() == [[2.0, 2.0], [2.0, 2.0]]
    stream = record.stream.index
    assert world.joins == [(stream, 0), (0, stream)]  # the capture waits for its inputs, the caller for the warm-up
    for _ in range(2 * STREAMS):  # torch reuses its streams in turn, and destroying a graph frees their workspaces
        CudaGraphs(ones.device)(lambda: (ones @ ones,))
    assert replay()[0].tolist() == [[2.0, 2.0], [2.0, 2.0]]
    del replay
    assert record(lambda: (ones @ ones,))()[0].tolist() == [[2.0, 2.0], [2.0, 2.0]]  # in a new pool
    world.joins.clear()
    with pytest.raises(ZeroDivisionError):
        CudaGraphs(ones.device)(lambda: 1 / 0)
    assert len(world.joins) == 2  # it may have written to memory of the caller


def test_without_a_free_stream_passes_run_as_they_are(world, ones):
    replays = [CudaGraphs(ones.device)(lambda: (ones @ ones,)) for _ in range(4 * STREAMS)]
    target = fused_target("llama")
    text = text_of(target)
    assert "every CUDA stream of the device has CUDA graphs of another model" in target.note
    replays[0]()
    del replays
    other = fused_target("llama")
    assert text_of(other) == text and other.note == ""


@pytest.mark.parametrize(
    ("dtype", "capability", "captured"),
    [(torch.bfloat16, (9, 0), True), (torch.float32, (9, 0), False), (torch.bfloat16, (8, 9), False)],
)
def test_experts_that_wait_for_the_device_are_not_captured(dtype, capability, captured, world):
    world.capability = capability
    target = HFTarget(move(build("gpt_oss").to(dtype)))
    text_of(target)
    assert bool(world.replays) == captured == target.uses_cuda_graphs
    assert target.note.startswith("" if captured else f"its experts wait for the device in {str(dtype)[6:]}")
    assert len(world.recorded) == world.captures  # no capture was tried and failed
