"""Rules of CUDA on the simulated device: regressions and likely mistakes."""

import gc
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch.utils._pytree import tree_map

from specdemo.core.host_copy import AsyncHostCopy, pinned, to_device
from specdemo.core.protocol import Budget, GenerationConfig
from specdemo.core.sampling import Sampling
from specdemo.core.tree import chain_parents
from specdemo.engine.clock import stopwatch_for
from specdemo.engine.loop import generate, warm_up
from specdemo.kv.graphs import CudaGraphs, GraphCache, covering_widths
from specdemo.methods import load_drafter
from specdemo.methods.heads.dflash import DFlash
from specdemo.methods.heads.eagle import Eagle
from specdemo.methods.heads.medusa import Medusa
from specdemo.methods.heads.mlp_speculator import MLPSpeculator
from specdemo.methods.heads.mtp import MTP
from specdemo.methods.heads.orthrus import Orthrus
from specdemo.methods.heads.uno import Uno
from specdemo.models import operations
from specdemo.models.fused import fuse_layer, fuse_layers
from specdemo.models.pass_cost import rounding_noise
from specdemo.models.prefix_reuse import PrefixCachedTarget
from specdemo.models.target import HFTarget
from tests.gpu import device
from tests.gpu.device import STREAMS, OnDevice, Race, move, no_synchronisation, pretended
from tests.models.tiny import build, texts

GREEDY = Sampling()


def p_eagle_head(target):
    """Return a P-EAGLE head."""
    head = Eagle.fresh(target, draft_vocab=40)
    head.mask_hidden = torch.nn.Parameter(torch.randn_like(head.fc.weight[0]))
    head.convention = replace(head.convention, mask=3)
    return head


HEADS = {
    "eagle": lambda target: Eagle.fresh(target, draft_vocab=40),
    "p-eagle": p_eagle_head,
    "mtp": MTP.fresh,
    "dflash": lambda target: DFlash.fresh(target, layers=2, block_size=6),
    "medusa": lambda target: Medusa.fresh(target, heads=3),
    "mlp_speculator": lambda target: MLPSpeculator.fresh(target, n_predict=3),
    "orthrus": Orthrus.fresh,
    "uno": Uno.fresh,
}


@pytest.fixture
def world():
    with pretended(devices=2) as made:
        yield made


def fused_target(name="llama", device="cuda:0"):
    model = move(build(name), device)
    fuse_layers(model)
    return HFTarget(model)


def cuda_texts(rows, tokens, seed=0, device="cuda:0"):
    return OnDevice(texts(rows, tokens, seed), torch.device(device))


def drafter(name, target):
    if name in HEADS:
        torch.manual_seed(3)
        head = HEADS[name](target)
        return load_drafter(name.removeprefix("p-"), target, head.fuse())
    return load_drafter(name, target, fused_target("llama") if name in ("draft_model", "cascade", "adaptive") else None)


def output_ids_of(target, drafter, rows=1, sampling=GREEDY):
    config = GenerationConfig(24, sampling=sampling, budget=Budget(3, 3), stop_token_ids=())
    events = list(generate(target, drafter, cuda_texts(rows, 9), config))
    return [[t for event in events for t in event.emitted[row]] for row in range(rows)]


METHODS = [*HEADS, "none", "draft_model", "ngram", "suffix", "layer_skip", "lookahead", "cascade", "adaptive"]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", METHODS)
def test_recorded_drafts_leave_a_greedy_text_as_it_is(world, name, rows):
    target = fused_target()
    plain = output_ids_of(target, load_drafter("none", target), rows)
    made = drafter(name, target)
    assert output_ids_of(target, made, rows) == plain
    assert target.note == made.graph_note == ""


@pytest.mark.parametrize("name", [name for name in METHODS if name != "adaptive"])  # its k depends on time
def test_sampled_texts_repeat_with_their_seed(world, name):
    target = fused_target()
    made = drafter(name, target)
    first = output_ids_of(target, made, sampling=Sampling(0.8, 20, 0.9))
    assert output_ids_of(target, made, sampling=Sampling(0.8, 20, 0.9)) == first
    assert target.note == made.graph_note == ""


@pytest.mark.parametrize("name", ["ngram", "draft_model", "eagle", "adaptive"])
def test_nothing_is_recorded_while_the_clock_runs(world, name, monkeypatch):
    # One warm-up step: all shapes of later steps must be captured in advance.
    monkeypatch.setattr("specdemo.engine.loop.WARM_UP_TOKENS", 3)
    target = fused_target()
    made = drafter(name, target)
    config = GenerationConfig(40, budget=Budget(6, 6), stop_token_ids=())
    warm_up(target, made, cuda_texts(1, 9), config)
    before = len(world.recorded)
    assert before
    list(generate(target, made, cuda_texts(1, 9), config))
    assert len(world.recorded) == before


def test_a_draft_model_reads_two_slots_after_a_draft_and_more_after_a_pause(world):
    target = fused_target()
    made = drafter("draft_model", target)
    config = GenerationConfig(40, budget=Budget(3, 3), stop_token_ids=())
    steps = generate(target, made, cuda_texts(1, 9), config)
    next(steps)
    with torch.no_grad():
        made.capture_graphs(Budget(3, 3))
        before = len(world.recorded)
        expected = made.propose(Budget(3, 3)).tokens.tolist()
        made._common_lengths, made._cached_ids = [5], [made._cached_ids[0][:5]]  # five tokens are missing
        assert made.propose(Budget(3, 3)).tokens.tolist() == expected
    assert len(world.recorded) == before == 2
    assert {kind[2] for kind, _ in made.model._store.graphs._graphs} == {2, 8}
    steps.close()


def test_graphs_are_freed_with_their_lane_without_a_collector(world):
    gc.collect()
    gc.disable()
    try:
        for name in ("none", "draft_model", "eagle", "layer_skip"):
            target = fused_target()
            made = drafter(name, target)
            output_ids_of(target, made)
            assert world.alive
            del target, made
            assert world.alive == 0, name
    finally:
        gc.enable()


def test_the_end_of_one_lane_leaves_the_workspace_of_others(world):
    """Destroying a graph frees the workspaces of its stream for every other graph on it (pytorch #193402)."""
    lanes = [(fused_target(), fused_target()) for _ in range(2)]
    texts_of = [output_ids_of(target, load_drafter("draft_model", target, draft)) for target, draft in lanes]
    assert texts_of[0] == texts_of[1]
    target, draft = lanes[1]
    lanes.clear()
    assert output_ids_of(target, load_drafter("draft_model", target, draft)) == texts_of[1]


def test_a_recorder_starts_a_new_pool_when_its_recordings_are_gone(world):
    record, x = CudaGraphs(torch.device("cuda:0")), torch.ones(2, 2, device="cuda:0")
    replay = record(lambda: (x @ x,))
    assert replay()[0].tolist() == [[2.0, 2.0], [2.0, 2.0]]
    del replay
    assert record(lambda: (x @ x,))()[0].tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_recorders_share_no_stream(world):
    """torch reuses its streams in turn, and destroying a graph frees the workspaces of its stream."""
    x = torch.ones(2, 2, device="cuda:0")
    waiting = CudaGraphs(x.device)(lambda: (x @ x,))
    for _ in range(2 * STREAMS):
        CudaGraphs(x.device)(lambda: (x @ x,))  # freed immediately
    assert waiting()[0].tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_without_a_free_stream_passes_run_as_they_are(world):
    x = torch.ones(2, 2, device="cuda:0")
    replays = [CudaGraphs(torch.device("cuda:0"))(lambda: (x @ x,)) for _ in range(4 * STREAMS)]
    target = fused_target()
    text = output_ids_of(target, load_drafter("none", target))
    assert target.note == (
        "CUDA graph capture failed (every CUDA stream of the device has CUDA graphs of another model), "
        "so every operation is launched separately"
    )
    for replay in replays:
        replay()
    del replays, replay
    other = fused_target()
    assert output_ids_of(other, load_drafter("none", other)) == text
    assert other.note == ""


def test_the_streams_of_another_device_are_free(world):
    kept = [torch.ones(2, 2, device=f"cuda:{index}") for index in (0, 1)]
    replays = [CudaGraphs(x.device)(lambda x=x: (x @ x,)) for x in kept for _ in range(4 * STREAMS)]
    assert len(replays) == 8 * STREAMS


def test_without_memory_for_recordings_passes_run_as_they_are(world):
    target = fused_target()
    plain = output_ids_of(target, load_drafter("none", target))
    other = fused_target()
    world.refuse = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 0 bytes free")
    assert output_ids_of(other, load_drafter("none", other)) == plain
    assert other.note == "no memory for the CUDA graphs of size 1, so their operations are launched separately"
    world.refuse = None
    other.release_graphs()
    assert output_ids_of(other, load_drafter("none", other)) == plain
    assert other.note == ""


def test_failed_capture_restores_the_state(world):
    """torch leaves the thread on the capture's stream and its allocator in the capture."""
    target = fused_target()
    plain = output_ids_of(target, load_drafter("none", target))
    del target
    before, refused = torch.cuda.current_stream().index, fused_target()
    world.refuse = RuntimeError("operation not permitted when stream is capturing")
    assert output_ids_of(refused, load_drafter("none", refused)) == plain
    assert refused.note.startswith("CUDA graph capture failed (operation not permitted")
    assert torch.cuda.current_stream().index == before
    assert world.underway == []
    assert world.pools.total() == 0
    world.refuse = None
    later = fused_target()
    assert output_ids_of(later, load_drafter("none", later)) == plain
    assert later.note == ""


def test_a_host_read_in_a_capture_is_named_as_the_reason(world):
    record, x = CudaGraphs(torch.device("cuda:0")), torch.ones(2, 2, device="cuda:0")
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing: item of a tensor"):
        record(lambda: (x * x[0, 0].item(),))


def test_a_failed_capture_keeps_the_pool_that_others_use(world):
    record, x = CudaGraphs(torch.device("cuda:0")), torch.ones(2, 2, device="cuda:0")
    replay = record(lambda: (x @ x,))
    world.refuse = RuntimeError("operation not permitted when stream is capturing")
    with pytest.raises(RuntimeError, match="not permitted"):
        record(lambda: (x @ x,))
    assert world.underway == []
    assert world.pools.total() == 2  # the graph's pool, and a permanent one
    assert replay()[0].tolist() == [[2.0, 2.0], [2.0, 2.0]]


@pytest.mark.parametrize("name", [*HEADS, "draft_model", "layer_skip"])
def test_heads_that_cannot_be_recorded_draft_as_they_are(world, name):
    target = fused_target()
    plain = output_ids_of(target, load_drafter("none", target))
    made = drafter(name, target)
    world.refuse = RuntimeError("operation not permitted when stream is capturing")
    assert output_ids_of(target, made) == plain
    note = made.graph_note or target.note
    assert note.startswith("CUDA graph capture failed (operation not permitted")


@pytest.mark.parametrize("name", [*HEADS, "draft_model", "layer_skip"])
def test_second_proposal_after_the_same_text_is_equal(world, name):
    """A shorter draft, for which there is no graph, must be equal too."""
    target = fused_target()
    made = drafter(name, target)
    config = GenerationConfig(40, budget=Budget(3, 3), stop_token_ids=())
    steps = generate(target, made, cuda_texts(1, 9), config)
    for _ in range(5):
        next(steps)
    with torch.no_grad():
        first, again, short = (made.propose(Budget(k, k)).tokens.tolist() for k in (3, 3, 2))
    steps.close()
    assert again == first
    assert short[0] == first[0][:2] or name == "eagle"  # EAGLE's smaller tree differs
    assert made.graph_note == ""


def test_a_draft_model_remembers_what_recorded_drafts_read(world):
    """Only the new tokens of the next chat turn are read, and the drafts are those after reading all of it."""
    target, drafts = fused_target(), []
    prompt, config = cuda_texts(1, 9), GenerationConfig(20, budget=Budget(3, 3), stop_token_ids=())
    for kind in (HFTarget, PrefixCachedTarget):
        draft = kind(fused_target().model)
        made = load_drafter("draft_model", target, draft)
        output_ids = [t for event in generate(target, made, prompt, config) for t in event.emitted[0]]
        longer = torch.cat([prompt, to_device([output_ids], prompt.device), cuda_texts(1, 4, 5)], 1)
        drafts.append([event.drafted for event in generate(target, made, longer, config)])
        if kind is PrefixCachedTarget:
            assert draft.cached_tokens > prompt.shape[1] + 10
    assert drafts[0] == drafts[1]


@pytest.mark.parametrize("name", ["eagle", "draft_model"])
def test_on_another_device_than_the_first(world, name):
    """The first device stays the current one, as it is by default."""
    model = move(build("llama"), "cuda:1")
    fuse_layers(model)
    target = HFTarget(model)
    made = load_drafter(name, target, HEADS[name](target).fuse() if name in HEADS else fused_target(device="cuda:1"))
    config = GenerationConfig(16, budget=Budget(3, 3), stop_token_ids=())
    watch = stopwatch_for(target.device)
    steps = list(generate(target, made, cuda_texts(1, 9, device="cuda:1"), config, stopwatch=watch))
    assert world.alive
    assert all(event.ms["verify"] > 0.0 for event in steps[1:])
    assert target.note == made.graph_note == ""


def test_a_clock_reads_its_own_device(world):
    watch = stopwatch_for(torch.device("cuda:1"))
    watch.start()
    torch.ones(3, device="cuda:1").add_(1)
    watch.lap("work")
    torch.ones(3, device="cuda:0").add_(1)
    watch.lap("of another")
    assert watch.read() == {"work": pytest.approx(0.02), "of another": 0.0}


def test_model_on_several_devices_is_not_captured(world):
    model = move(build("llama"), "cuda:0")
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    target = HFTarget(model)
    target.start(cuda_texts(1, 9))
    target.forward(cuda_texts(1, 1), chain_parents(1, 0, target.device))
    assert target.note == "its layers are on several devices, so every operation is launched separately"
    assert not world.recorded


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_layer_in_16_bits_is_few_kernels(world, name):
    """The norms of a Qwen3 layer were 50 kernels: transformers needs eight for each."""
    model = build(name).bfloat16()
    fuse_layers(move(model, "cuda:0"))
    target = HFTarget(model)
    target.start(cuda_texts(1, 9))
    with patch.object(target._store, "graphs", None):
        kernels = []
        for layers in (1, 2):
            before = world.launches
            target.early_exit_logits(cuda_texts(1, 1), layers)
            kernels.append(world.launches - before)
    assert kernels[1] - kernels[0] <= {"llama": 20, "qwen3": 24}[name]


def test_models_are_placed_where_tensors_are_only_emulated(world):
    """To C++, ZeroGPU tensors are CPU tensors before a GPU is attached: `.to(like)` would read the wrong device."""
    model = move(build("llama"), "cuda:0")
    fuse_layers(model)
    assert "fused" in HFTarget(model).kernels


def test_rounding_is_measured_on_passes_of_one_token(world):
    target, widths = fused_target(), []
    forward = target.forward
    with patch.object(
        target, "forward", lambda tokens, *more: widths.append(tokens.shape[1]) or forward(tokens, *more)
    ):
        rounding_noise(target, cuda_texts(1, 14))
    assert widths == [*[1] * 10, 5, 5]  # the text after its first tokens, by both widths
    assert len(world.recorded) == 2


def test_numbers_are_sent_without_a_wait_and_returned_with_one(world):
    sent = to_device([1, 2, 3], torch.device("cuda:0"))
    assert world.syncs == 0
    reading = AsyncHostCopy(sent)
    assert sent.tolist() == [1, 2, 3]
    assert reading.tolist() == [1, 2, 3]
    assert world.syncs == 1


def test_only_pinned_numbers_are_copied_into_a_tensor_without_a_wait(world):
    x, numbers = torch.zeros(3, dtype=torch.int64, device="cuda:0"), pinned([1, 2, 3], torch.device("cuda:0"))
    x.copy_(numbers, non_blocking=True)
    assert world.syncs == 0
    assert x.tolist() == [1, 2, 3]
    waits = world.syncs
    x.copy_(torch.tensor([4, 5, 6]), non_blocking=True)
    x.copy_(numbers)
    assert world.syncs == waits + 2


def test_numbers_reach_a_graph_in_one_copy(world):
    device = torch.device("cuda:0")
    graphs = GraphCache(CudaGraphs(device), device, torch.float32)
    x = torch.ones(2, 2, device=device)

    def scaled(numbers):
        return graphs("scale", 1, lambda numbers, x: (numbers * x,), (pinned(numbers, device), x), [(2, 1), (2, 2)])[0]

    scaled([[0], [1]])  # captures
    launches, waits = world.launches, world.syncs
    result = scaled([[3], [4]])
    assert (world.launches, world.syncs) == (launches + 2, waits)
    assert result.tolist() == [[3.0, 3.0], [4.0, 4.0]]


def test_every_width_has_a_recording_that_is_not_much_wider():
    assert covering_widths(1) == [1]
    assert covering_widths(6) == [1, 6]
    assert covering_widths(33) == [1, 8, 24, 48]
    for slots in range(1, 65):
        assert any(slots <= width <= 2 * slots + 6 for width in covering_widths(64))


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_layers_are_fused_as_they_are(bits):
    nn = pytest.importorskip("bitsandbytes").nn
    linear = {4: partial(nn.Linear4bit, quant_type="nf4"), 8: partial(nn.Linear8bitLt, has_fp16_weights=False)}[bits]
    packed = {4: partial(nn.Params4bit, quant_type="nf4"), 8: partial(nn.Int8Params, has_fp16_weights=False)}[bits]
    model = build("llama")
    layer = model.model.layers[0]
    for part in (layer.self_attn, layer.mlp):
        for name, plain in list(part.named_children()):
            if type(plain) is torch.nn.Linear:
                made = linear(plain.in_features, plain.out_features, bias=False)
                made.weight = packed(plain.weight.data, requires_grad=False)
                setattr(part, name, made.to("cpu"))  # packing happens on the CPU
    made = fuse_layer(layer.requires_grad_(False), model.model.rotary_emb)
    assert type(made).__name__ == "FusedLayer"
    assert len(made.self_attn.qkv.layers) == 3


def test_a_synchronisation_is_an_error_only_inside_no_synchronisation(world):
    x = torch.ones(2, 2, device="cuda:0")
    with pytest.raises(RuntimeError, match="synchronizing"), no_synchronisation():
        x.sum().item()
    assert x.sum().item() == 4.0


def test_the_pretended_device_keeps_the_rules(world):
    x = torch.ones(2, 2, device="cuda:0")
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(2, 2)
    with pytest.raises(RuntimeError, match="same device"):
        x @ torch.ones(2, 2, device="cuda:1")
    default = torch.cuda.current_stream()
    for wrong in (lambda: x.sum().item(), lambda: torch.tensor([1], device="cuda:0"), lambda: x.nonzero()):
        pool = torch.cuda.graph_pool_handle()
        with pytest.raises(RuntimeError, match="previous error during capture") as caught:  # noqa: SIM117
            with torch.cuda.graph(torch.cuda.CUDAGraph(), pool, torch.cuda.Stream()):
                wrong()
        assert "not permitted when stream is capturing" in str(caught.value.__context__)
        with pytest.raises(RuntimeError, match="still serves"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            pass
        assert torch.cuda.current_stream() is not default
        torch.cuda.set_stream(default)
        torch._C._cuda_endAllocateToPool(0, pool)
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    results = []
    for graph in graphs:
        with torch.cuda.graph(graph, pool=graphs[0].pool()):
            results.append(x @ x)
    graphs[0].replay()
    assert results[0].sum().item() == 8.0
    graphs[1].replay()
    assert results[0].isnan().all(), "another graph of the pool was replayed"
    del graph, graphs[0]
    with pytest.raises(RuntimeError, match="workspace"):
        graphs.pop().replay()


@pytest.mark.parametrize(
    ("dtype", "capability", "captured"),
    [(torch.bfloat16, (9, 0), True), (torch.float32, (9, 0), False), (torch.bfloat16, (8, 9), False)],
)
def test_experts_that_wait_for_the_device_are_not_captured(dtype, capability, captured, world):
    world.capability = capability
    target = HFTarget(move(build("gpt_oss").to(dtype), "cuda:0"))
    plain = output_ids_of(target, load_drafter("none", target))
    assert bool(world.replays) == captured == target.uses_cuda_graphs
    reason = f"its experts wait for the device in {str(dtype)[6:]} on this GPU"
    assert target.note == ("" if captured else f"{reason}, so every operation is launched separately")
    assert len(plain[0]) == 24
    assert world.underway == []  # no capture was tried and failed


def test_products_of_integers_are_rejected(world):
    x = torch.ones(2, 2, dtype=torch.int64, device="cuda:0")
    with pytest.raises(RuntimeError, match="not implemented"):
        x @ x


def test_a_synchronisation_can_warn(world):
    x = torch.ones(2, device="cuda:0")
    with pytest.warns(UserWarning, match="prototype"):
        torch.cuda.set_sync_debug_mode("warn")
    with pytest.warns(UserWarning, match="called a synchronizing CUDA operation"):
        x.tolist()
    torch.cuda.set_sync_debug_mode("default")


def test_async_copy_must_be_waited_for(world):
    numbers = OnDevice(torch.arange(4), torch.device("cuda:0"))
    copy = AsyncHostCopy(numbers)
    assert copy._host_tensor.tolist() != [0, 1, 2, 3]
    assert copy.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("method", ["none", "draft_model", "eagle", "medusa"])
def test_memory_does_not_grow_from_text_to_text(method, world):
    target = fused_target()
    made = drafter(method, target)
    used = []
    for _ in range(4):
        output_ids_of(target, made)
        gc.collect()
        used.append(torch.cuda.memory_allocated())
    assert used[2:] == used[1:3]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("method", ["none", "draft_model", "eagle", "ngram"])
def test_passes_that_read_visible_columns_only_give_the_same_text(method, rows, world, monkeypatch):
    texts, columns = [], []
    for triton in (True, False):
        monkeypatch.setattr(operations, "works", lambda *_, triton=triton: triton)
        world.columns.clear()
        target = fused_target()
        texts.append(output_ids_of(target, drafter(method, target), rows))
        columns.append(dict(world.columns))
    assert texts[0] == texts[1]
    assert "tree" not in columns[1]
    assert sum(columns[0].values()) < 0.8 * columns[1]["efficient"]  # eager passes are masked


@pytest.mark.parametrize(
    ("dtype", "capability", "size", "masked", "expected"),
    [
        (torch.bfloat16, (9, 0), 16, False, "flash"),
        (torch.bfloat16, (9, 0), 16, True, "efficient"),
        (torch.float32, (9, 0), 16, False, "efficient"),
        (torch.float16, (7, 5), 16, True, "efficient"),
        (torch.bfloat16, (7, 5), 16, True, "math"),  # it is emulated there
        (torch.bfloat16, (9, 0), 12, True, "math"),
    ],
)
def test_kernel_of_attention_is_chosen_as_in_torch(dtype, capability, size, masked, expected, world):
    world.capability = capability
    query, key = (torch.ones(1, 2, length, size, dtype=dtype, device="cuda:0") for length in (8, 24))
    mask = torch.zeros(1, 1, 8, 24, dtype=dtype, device="cuda:0") if masked else None
    before = world.launches
    torch.nn.functional.scaled_dot_product_attention(query, key, key, mask)
    assert world.columns == {expected: 24}
    assert (world.launches - before > 1) == (expected == "math")


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("method", ["none", "draft_model", "eagle", "mtp", "dflash", "layer_skip"])
def test_triton_kernels_give_the_same_text(method, rows, world, monkeypatch):
    texts = []
    for used in (True, False):
        monkeypatch.setattr(operations, "works", lambda *_, used=used: used)
        world.kernels.clear()
        target = fused_target("qwen3")
        texts.append(output_ids_of(target, drafter(method, target), rows))
        assert target.note == ""
        assert [name for name in operations.KERNELS if world.kernels[name]] == [*operations.KERNELS][: 4 * used]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(("setting", "expected"), [(None, True), ("silu_mul,add_rms_norm", True), ("0", False)])
def test_a_triton_kernel_is_compared_before_it_is_used(setting, expected, world, monkeypatch):
    monkeypatch.setattr(operations, "find_spec", lambda name: name)
    if setting is not None:
        monkeypatch.setenv(operations.TRITON_VARIABLE, setting)
    for name in operations.KERNELS:
        operations.works.cache_clear()
        enabled = expected and (setting is None or name in setting)
        assert operations.works(name, torch.device("cuda:0"), torch.float16) == enabled
        operations.works.cache_clear()
        with monkeypatch.context() as other:  # another result than plain operations
            plain = operations.PLAIN[name]
            other.setitem(operations.PLAIN, name, lambda *a, plain=plain: tree_map(lambda x: x + 1, plain(*a)))
            assert not operations.works(name, torch.device("cuda:0"), torch.float16)
    operations.works.cache_clear()


def test_memory_of_another_stream_must_be_waited_for(world):
    x, other = torch.ones(2, 2, device="cuda:0"), torch.cuda.Stream()
    with torch.cuda.stream(other), pytest.raises(Race):
        x + 1
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        y = x + 1
    with pytest.raises(Race):
        y + 1
    torch.cuda.current_stream().wait_stream(other)
    assert (y + 1).tolist() == [[3.0, 3.0], [3.0, 3.0]]


def test_a_capture_waits_for_its_inputs_and_its_caller_for_the_warm_up(world, monkeypatch):
    x = torch.ones(2, 2, device="cuda:0")
    assert CudaGraphs(x.device)(lambda: (x @ x,))()[0].tolist() == [[2.0, 2.0], [2.0, 2.0]]
    x += 1
    monkeypatch.setattr(device.Stream, "wait_stream", lambda self, other: None)
    with pytest.raises(Race):
        CudaGraphs(x.device)(lambda: (x @ x,))


def test_a_failed_warm_up_is_waited_for(world):
    x, passes = torch.ones(2, 2, device="cuda:0"), iter("ab")

    def run():
        x.add_(1)
        next(passes)
        return (x,)

    with pytest.raises(StopIteration):
        CudaGraphs(x.device)(run)
    assert x.tolist() == [[4.0, 4.0], [4.0, 4.0]]


def test_a_stream_writes_after_the_reads_of_another(world):
    x, other = torch.ones(2, 2, device="cuda:0"), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        y = x + 1
    with pytest.raises(Race, match="still reads"):
        x.add_(1)
    other.synchronize()
    x.add_(1)
    assert y.tolist() == x.tolist()


def test_an_event_covers_what_its_stream_has_waited_for(world):
    x, event = torch.ones(2, 2, device="cuda:0"), torch.cuda.Event()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        x.add_(1)
    event.record(second)
    event.synchronize()
    with pytest.raises(Race):
        x + 1
    second.wait_stream(first)
    event.record(second)
    event.synchronize()
    assert (x + 1).tolist() == [[3.0, 3.0], [3.0, 3.0]]


def test_memory_must_not_be_freed_while_another_stream_uses_it(world):
    x, other = torch.ones(2, 2, device="cuda:0"), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        x + 1
    del x
    with pytest.raises(Race, match="freed"):
        torch.ones(2, 2, device="cuda:0")


def test_pinned_memory_must_not_change_before_it_is_copied(world):
    pinned = torch.tensor([1, 2], pin_memory=True)
    sent = pinned.to("cuda:0", non_blocking=True)
    assert sent.tolist() == [1, 2]
    pinned.add_(1)  # the host has waited
    sent = pinned.to("cuda:0", non_blocking=True)
    pinned.add_(1)
    with pytest.raises(Race, match="pinned"):
        sent.tolist()


def test_a_capture_runs_nothing(world):
    x, graph = torch.ones(2, 2, device="cuda:0"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x.add_(1) * 2
    assert x.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert y.isnan().all()
    graph.replay()
    assert y.tolist() == [[4.0, 4.0], [4.0, 4.0]]


def test_memory_of_graphs_is_counted_until_their_pool_ends(world):
    x = torch.ones(100, 100, device="cuda:0")
    before = torch.cuda.mem_get_info()[0]
    record = CudaGraphs(x.device)
    replays = [record(lambda: ((x * 2) * 3,)) for _ in range(2)]
    assert before - torch.cuda.mem_get_info()[0] == 3 * x.nbytes  # the second graph reuses temporary memory
    replays.pop()
    assert before - torch.cuda.mem_get_info()[0] == 3 * x.nbytes
    del replays
    assert torch.cuda.mem_get_info()[0] == before


def test_memory_is_limited(world):
    world.total = world.memory.allocated + 1000
    assert torch.cuda.mem_get_info()[0] == 1000
    with pytest.raises(torch.OutOfMemoryError):
        torch.ones(1001, dtype=torch.uint8, device="cuda:0")
    kept = torch.ones(1000, dtype=torch.uint8, device="cuda:0")
    assert torch.cuda.mem_get_info()[0] == 0
    del kept
    assert torch.cuda.mem_get_info()[0] == 1000
