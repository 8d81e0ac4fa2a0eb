"""Regressions and likely mistakes of code for CUDA, on the simulated GPU, and the rules of that GPU."""

import gc

import pytest
import torch
from torch.utils._pytree import tree_map

from specdemo.core.host_copy import AsyncHostCopy, pinned
from specdemo.core.protocol import Budget, GenerationConfig
from specdemo.core.sampling import Sampling
from specdemo.engine.loop import generate
from specdemo.kv.graphs import CudaGraphs
from specdemo.methods import load_drafter
from specdemo.models import operations
from specdemo.models.target import HFTarget
from tests.generation import output
from tests.gpu.device import STREAMS, OnDevice, move, no_synchronisation, pretended
from tests.gpu.test_graphs import fused_target, make_drafter_for
from tests.models.tiny import build, texts

REFUSED = RuntimeError("operation not permitted when stream is capturing")


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


@pytest.mark.parametrize("name", ["draft_model", *slow("eagle", "layer_skip", "mtp")])
def test_second_proposal_after_the_same_text_is_equal(world, name):
    """A shorter draft, for which there is no graph, must be equal too."""
    target = fused_target("llama")
    made = make_drafter_for(name, target)
    config = GenerationConfig(40, budget=Budget(3, 3), stop_token_ids=())
    steps = generate(target, made, texts(1, 9).cuda(), config)
    for _ in range(5):
        next(steps)
    with torch.no_grad():
        first, again, short = (made.propose(Budget(k, k)).tokens.tolist() for k in (3, 3, 2))
    assert again == first
    assert short[0] == first[0][:2] or name == "eagle"  # EAGLE's smaller tree differs
    assert made.graph_note == ""


def test_a_draft_model_reads_two_slots_after_a_draft_and_more_after_a_pause(world):
    target = fused_target("llama")
    made = make_drafter_for("draft_model", target)
    steps = generate(target, made, texts(1, 9).cuda(), GenerationConfig(40, budget=Budget(3, 3), stop_token_ids=()))
    next(steps)
    with torch.no_grad():
        made.capture_graphs(Budget(3, 3))
        before = len(world.recorded)
        expected = made.propose(Budget(3, 3)).tokens.tolist()
        made._common_lengths, made._cached_ids = [5], [made._cached_ids[0][:5]]  # five tokens are missing
        assert made.propose(Budget(3, 3)).tokens.tolist() == expected
    assert len(world.recorded) == before == 2


@pytest.mark.parametrize("name", ["none", "eagle", *slow("draft_model", "medusa", "layer_skip")])
def test_failed_capture_restores_the_state(world, name):
    """torch leaves the thread on the capture's stream and its allocator in the capture."""
    plain = text_of(fused_target("llama"))
    before, refused = torch.cuda.current_stream(), fused_target("llama")
    drafter, world.refuse = make_drafter_for(name, refused), REFUSED
    assert text_of(refused, drafter) == plain
    note = drafter.graph_note or refused.note
    assert note.startswith("CUDA graph capture failed (operation not permitted")
    assert torch.cuda.current_stream() == before
    assert world.underway == []
    assert world.pools.total() == 0
    world.refuse = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 0 bytes free")
    other = fused_target("llama")
    assert text_of(other) == plain
    assert other.note.startswith("no memory for the CUDA graphs of size 1")
    world.refuse = None
    other.release_graphs()
    assert text_of(other) == plain and other.note == ""


def test_a_recorder_orders_streams_and_pools(world, ones):
    record = CudaGraphs(ones.device)
    replay = record(lambda: (ones @ ones,))
    assert replay()[0].tolist() == [[2.0, 2.0], [2.0, 2.0]]
    stream = record.stream.index
    assert world.joins == [(stream, 0), (0, stream)]  # the capture waits for its inputs, the caller for the warm-up
    for _ in range(2 * STREAMS):  # torch reuses its streams in turn, and destroying a graph frees their workspaces
        CudaGraphs(ones.device)(lambda: (ones @ ones,))
    assert replay()[0].tolist() == [[2.0, 2.0], [2.0, 2.0]]
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing: item of a tensor"):
        record(lambda: (ones * ones[0, 0].item(),))
    assert world.underway == []
    assert world.pools.total() == 2  # the graph's pool, and a permanent one
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


def test_model_on_several_devices_is_not_captured(world):
    model = move(build("llama"))
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    target = HFTarget(model)
    text_of(target)
    assert target.note.startswith("its layers are on several devices")
    assert not world.recorded


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
    assert world.underway == []  # no capture was tried and failed


def test_numbers_cross_without_a_wait_and_return_with_one(world):
    x, numbers = torch.zeros(3, dtype=torch.int64, device="cuda:0"), pinned([1, 2, 3], torch.device("cuda:0"))
    x.copy_(numbers, non_blocking=True)
    reading = AsyncHostCopy(x)
    assert world.syncs == 0
    assert reading._host_tensor.tolist() != [1, 2, 3]
    assert reading.tolist() == [1, 2, 3]
    assert world.syncs == 1


@pytest.mark.parametrize("rows", [3, *slow(1)])
@pytest.mark.parametrize("method", ["draft_model", *slow("none", "eagle")])
def test_triton_kernels_give_the_same_text(method, rows, world, monkeypatch):
    seen = []
    for used in (True, False):
        monkeypatch.setattr(operations, "works", lambda *_, used=used: used)
        world.kernels.clear()
        target = fused_target("qwen3")
        seen.append(text_of(target, make_drafter_for(method, target), rows))
        assert target.note == ""
        assert [name for name in operations.KERNELS if world.kernels[name]] == [*operations.KERNELS][: 4 * used]
    assert seen[0] == seen[1]


@pytest.mark.parametrize("setting", [None, "silu_mul,add_rms_norm", "0"])
def test_a_triton_kernel_is_compared_before_it_is_used(setting, world, monkeypatch):
    monkeypatch.setattr(operations, "find_spec", lambda name: name)
    if setting is not None:
        monkeypatch.setenv(operations.TRITON_VARIABLE, setting)
    for name, plain in operations.PLAIN.items():
        operations.works.cache_clear()
        enabled = setting is None or name in setting
        assert operations.works(name, torch.device("cuda:0"), torch.float16) == enabled
        operations.works.cache_clear()
        with monkeypatch.context() as other:  # another result than plain operations
            other.setitem(operations.PLAIN, name, lambda *a, plain=plain: tree_map(lambda x: x + 1, plain(*a)))
            assert not operations.works(name, torch.device("cuda:0"), torch.float16)
    operations.works.cache_clear()


def test_the_pretended_device_keeps_the_rules(ones):
    for wrong, why in (
        (lambda: ones + torch.ones(2, 2), "same device"),
        (lambda: ones.long() @ ones.long(), "not impl"),
    ):
        with pytest.raises(RuntimeError, match=why):
            wrong()
    with pytest.raises(RuntimeError, match="synchronizing"), no_synchronisation():
        ones.sum().item()
    graphs, results, pool = [torch.cuda.CUDAGraph() for _ in range(2)], [], torch.cuda.graph_pool_handle()
    for graph in graphs:
        with torch.cuda.graph(graph, pool, torch.cuda.current_stream()):
            results.append(ones @ ones)
    assert results[0].isnan().all(), "a capture runs nothing"
    graphs[0].replay()
    assert results[0].sum().item() == 8.0
    graphs[1].replay()
    assert results[0].isnan().all(), "another graph of the pool was replayed"
    del graph, graphs[0]
    with pytest.raises(RuntimeError, match="workspace"):
        graphs.pop().replay()
    lost = torch.cuda.graph(torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle(), torch.cuda.Stream())
    with pytest.raises(RuntimeError, match="previous error during capture"), lost:
        ones.nonzero()
    assert torch.cuda.current_stream() == lost.stream and lost.pool


def test_models_are_placed_where_tensors_are_only_emulated(world):
    """To C++, ZeroGPU tensors are CPU tensors before a GPU is attached: `.to(like)` would read the wrong device."""
    assert "fused" in fused_target("llama").facts.kernels
    assert OnDevice(torch.ones(1)).device.type == "cuda"
