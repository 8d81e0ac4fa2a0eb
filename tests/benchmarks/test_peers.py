"""Peer comparisons and the overhead floor on a tiny random pair: participants, agreement, capture and replay."""

import copy
from importlib.util import find_spec

import pytest
import torch

from benchmarks import floor as floors
from benchmarks import llamacpp
from benchmarks.floor import FixedTree, RecordingTarget, overhead
from benchmarks.llamacpp import LlamaCpp
from benchmarks.pairs import Size, agreement, make_pair, random_pair
from benchmarks.peers import OUR_DRAFT, OUR_PLAIN, PLAIN, compete, contest, read_bytes, transformers_peer
from specdemo.core.protocol import Budget, GenerationConfig
from specdemo.engine.loop import never_cancelled
from specdemo.kv.store import cache_argument
from specdemo.methods import load_drafter
from specdemo.models.fused import fuse_layers
from tests.models.tiny import Replayed

TINY = Size(layers=4, hidden=64, feed_forward=96, heads=4, kv_heads=2, vocabulary=211, draft_layers=1)
CPU = torch.device("cpu")


def silent(share, what, so_far=None):
    assert 0.0 <= share <= 1.0


@pytest.fixture(scope="module")
def pair():
    return random_pair("tiny", TINY, CPU, torch.float32, texts=2)


def test_random_pair_reaches_the_requested_agreement(pair):
    assert 0.6 < pair.agreement < 0.95
    assert agreement(pair.target, pair.draft, torch.cat(pair.prompts)) == pytest.approx(pair.agreement, abs=0.2)
    assert pair.draft.num_parameters() < pair.target.num_parameters()
    assert pair.target.get_input_embeddings().weight is not pair.draft.get_input_embeddings().weight


def test_the_same_pair_every_time(pair):
    again = random_pair("tiny", TINY, CPU, torch.float32, texts=2)
    assert torch.equal(again.target.lm_head.weight, pair.target.lm_head.weight)
    assert [p.tolist() for p in again.prompts] == [p.tolist() for p in pair.prompts]


@pytest.mark.parametrize(
    ("name", "device", "line"),
    [("98mm", "cpu", "unknown pair '98mm'; did you mean '98m'?"), (None, "gpu", "unknown device 'gpu'; use auto, cpu")],
)
def test_an_unknown_pair_or_device_is_one_line(name, device, line):
    with pytest.raises(ValueError, match=line.replace("?", "\\?")):
        make_pair(name, device, "auto")


def test_a_pair_that_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setattr("benchmarks.pairs.free_bytes", lambda where: [10_000_000])
    with pytest.raises(ValueError, match="pair '98m' needs .* GB, 0.0 GB are free on cpu; choose a smaller --pair"):
        make_pair("98m", "cpu", "auto")


def test_all_peers_write_the_same_text(pair):
    result = compete(pair, 1, 20, silent, never_cancelled)
    assert result.rows[0]["lane"] == OUR_PLAIN
    count = 8 if find_spec("xllamacpp") else 7
    assert [row["output"] for row in result.rows] == ["identical"] * count
    by_name = {row["lane"]: row for row in result.rows}
    assert by_name[PLAIN]["speed-up"].value == 1.0
    assert by_name[OUR_DRAFT]["tokens/pass"] > 1.5
    for name in (OUR_PLAIN, OUR_DRAFT):
        assert by_name[name]["overhead"].value > 0.0
    assert by_name[OUR_DRAFT]["of drafting"].value > 0.0
    assert result.remarks[0].startswith("Models: random, 0.2 M and 0.1 M parameters; the draft's first choice is ")


def test_the_order_changes_from_repeat_to_repeat_and_the_clock_is_read_around_each_peer(pair):
    called = []
    peers = {name: lambda prompt, n, name=name: called.append(name) or [1] * n for name in "abcd"}
    ticks = iter(range(10_000))
    timed = contest(peers, pair.prompts, 5, 0, lambda share: None, lambda: float(next(ticks)))
    assert called[:4] == called[4:]  # all prompts of a repeat have the same order
    assert {name: t.tokens_per_s for name, t in timed.items()} == dict.fromkeys("abcd", 10 / 2)
    contest(peers, pair.prompts[:1], 5, 1, lambda share: None, lambda: float(next(ticks)))
    assert sorted(called[8:]) == sorted(called[:4]) and called[8:] != called[:4]


def test_the_forwards_of_a_run_are_made_again_on_caches_set_back(pair):
    target, draft = RecordingTarget(pair.target), RecordingTarget(pair.draft)
    drafter = load_drafter("draft_model", target, draft)
    config = GenerationConfig(16, budget=Budget(3, 3), stop_token_ids=())

    def shape(inputs, named):
        return inputs[0].shape[1], named[cache_argument(pair.target.forward)].longest

    seen = []
    handle = pair.target.register_forward_pre_hook(
        lambda _, inputs, named: seen.append(shape(inputs, named)), with_kwargs=True
    )
    found = overhead(target, drafter, draft, pair.prompts[0], config)
    handle.remove()
    _prefill, *calls = seen
    assert found.steps > 1
    assert calls[: found.steps] == calls[found.steps :]  # the same widths in the same order
    assert found.total == pytest.approx(found.step_ms / found.floor_ms)
    assert found.draft is not None


def test_recorded_passes_are_replayed_again(pair, monkeypatch):
    recorder = Replayed()
    monkeypatch.setattr(floors, "capture_for", lambda device: recorder)
    model = copy.deepcopy(pair.target)
    fuse_layers(model)
    target = RecordingTarget(model)
    config = GenerationConfig(16, stop_token_ids=())
    plain = load_drafter("none", target)
    # A capture on the way is not counted as a step's forward pass.
    overhead(target, plain, None, pair.prompts[0], config)
    assert recorder.recorded == 1  # a graph for one slot
    before = recorder.replayed
    found = overhead(target, plain, None, pair.prompts[0], config)
    assert found.steps == 15
    assert recorder.replayed - before == 30
    assert recorder.recorded == 1


def test_a_fixed_tree_is_verified_and_changes_nothing(pair):
    target = RecordingTarget(pair.target)
    config = GenerationConfig(8, budget=Budget(10, 10), stop_token_ids=())
    assert overhead(target, FixedTree(target), None, pair.prompts[0], config).steps <= 7


def test_the_floor_suite_has_a_row_per_shape_and_mode():
    pair = random_pair("tiny", TINY, CPU, torch.float32, texts=1)
    result = floors.floor(pair, 1, 6, silent, never_cancelled)
    assert [(row["lane"], row["sampling"]) for row in result.rows] == [
        (lane, mode) for lane in ("plain", "chain, k=5", "tree of 10") for mode in ("greedy", "temperature 1")
    ]
    assert all(row["overhead"].value > 0.0 for row in result.rows)
    assert [row["of drafting"] is not None for row in result.rows] == [False, False, True, True, False, False]


def test_a_token_reads_every_weight_but_the_embedding_table(pair):
    total = sum(p.numel() for p in pair.target.parameters())
    assert read_bytes(pair.target) == 4 * (total - TINY.vocabulary * TINY.hidden)


def test_llama_cpp_writes_what_transformers_writes(pair):
    pytest.importorskip("xllamacpp", reason="llama.cpp's own loop is not installed: pip install xllamacpp")
    peer = LlamaCpp(pair.target)
    for prompt in pair.prompts:
        assert peer(prompt, 24) == transformers_peer(pair, {})(prompt, 24)


def test_without_its_packages_or_in_half_precision_llama_cpp_does_not_take_part(pair, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(llamacpp, "find_spec", lambda name: None)
        with pytest.raises(ValueError, match="needs xllamacpp and gguf; pip install xllamacpp gguf"):
            LlamaCpp(pair.target)
    pytest.importorskip("xllamacpp", reason="llama.cpp's own loop is not installed: pip install xllamacpp")
    with pytest.raises(ValueError, match="needs a Llama in float32 on a CPU"):
        LlamaCpp(copy.deepcopy(pair.target).to(torch.bfloat16))
