"""Captured passes against eager passes."""

import shutil

import pytest
import torch

from specdemo.core.tree import chain_parents
from specdemo.kv import graphs as module
from specdemo.kv.graphs import GRAPH_WIDTHS, covering_widths
from specdemo.kv.store import cache_argument
from specdemo.models import packed
from specdemo.models.fused import fuse_layers
from specdemo.models.target import HFTarget
from tests.models.test_kernels import MODELS
from tests.models.tiny import Replayed, build, failing, force_layout, forgetful, texts, without_memory

TREE = torch.tensor([[0, 0, 1, 1, 2, 5]])
TAPS = (0, 2, -1)


def fast(name="llama", recorder=None, kind=HFTarget):
    model = MODELS[name]()
    fuse_layers(model)
    return kind(model, capture=recorder)


def chain(rows, nodes):
    return chain_parents(rows, nodes, torch.device("cpu"))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_replays_equal_eager_for_trees_chains_and_ragged_rows(name, rows):
    recorder = Replayed()
    plain, recorded = fast(name), fast(name, recorder)
    assert recorded.facts.kernels == plain.facts.kernels + ", graphs"
    lengths = []
    for step, slots in enumerate((9, 7, 1, 4, 7, 10)):
        forwards = []
        for target in (plain, recorded):
            tokens = texts(rows, slots, step)
            parents = TREE.expand(rows, -1) if slots == 7 else chain(rows, slots - 1)
            forwards.append(target.forward(tokens, parents, TAPS) if step else target.start(tokens, TAPS))
            if step:
                target.commit([[0, 2, 5][: 1 + (row if slots == 7 else 0)] for row in range(rows)])
        torch.testing.assert_close(forwards[1].logits, forwards[0].logits, rtol=1e-4, atol=2e-4)
        for tap in TAPS:
            torch.testing.assert_close(forwards[1].hidden[tap], forwards[0].hidden[tap], rtol=1e-4, atol=2e-4)
        lengths.append((forwards[1].logits, forwards[1].logits.clone()))
    assert recorder.recorded == 4  # for trees of 8 slots, and for chains of 1, 4 and 12
    for result, as_it_was in lengths:
        assert torch.equal(result, as_it_was), "a later replay wrote over it"


def test_a_text_after_another_needs_no_recording():
    recorder = Replayed()
    target = fast(recorder=recorder)
    outputs = []
    for _ in range(2):
        target.start(texts(1, 9), reserve=20)
        outputs.append(target.forward(texts(1, 5, 1), chain(1, 4)).logits)
        target.release()
        assert target.length == []
    assert recorder.recorded == 1
    assert torch.equal(*outputs)


def test_growing_the_cache_captures_again(monkeypatch):
    monkeypatch.setattr("specdemo.models.target.GRAPH_WIDTHS", (2,))  # slots reserved for padding
    recorder = Replayed()
    plain, target = fast(), fast(recorder=recorder)
    for step in range(40):
        for each in (plain, target):
            if not step:
                each.start(texts(1, 30), reserve=1)
            logits = each.forward(texts(1, 2, step), chain(1, 1)).logits
            each.commit([[0, 1]])
            if each is plain:
                expected = logits
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=2e-4)
        if plain.length == [94]:
            break
    assert recorder.recorded == 2


def test_shorter_passes_use_a_recording_that_is_there():
    recorder = Replayed()
    target = fast(recorder=recorder)
    target.start(texts(1, 9))
    for slots in (6, 5, 3, 2, 1):
        target.forward(texts(1, slots), chain(1, slots - 1))
    assert recorder.recorded == 1
    target.forward(texts(1, 1), chain(1, 0), TAPS)
    target.forward(texts(1, 2), chain(1, 1), TAPS)
    assert recorder.recorded == 3  # with these taps, for one slot and for two


def test_every_width_has_a_recording_that_is_not_much_wider():
    assert covering_widths(1) == [1]
    assert covering_widths(6) == [1, 6]
    assert covering_widths(33) == [1, 8, 24, 48]
    for slots in range(1, 65):
        assert any(slots <= width <= 2 * slots + 6 for width in covering_widths(64))


def test_passes_wider_than_the_widest_run_as_they_are():
    recorder = Replayed()
    plain, target = fast(), fast(recorder=recorder)
    slots = GRAPH_WIDTHS[-1] + 1
    outputs = []
    for each in (plain, target):
        each.start(texts(1, 9))
        outputs.append(each.forward(texts(1, slots), chain(1, slots - 1)).logits)
    torch.testing.assert_close(outputs[1], outputs[0])
    assert recorder.recorded == 0


@pytest.mark.parametrize(
    ("recorder", "reason"),
    [
        (failing, "CUDA graph capture failed (operation not permitted when stream is capturing)"),
        (forgetful, "returned another result"),
        (without_memory, "no memory for the CUDA graphs of size 5"),
    ],
)
def test_failed_capture_falls_back_to_eager_with_a_note(recorder, reason):
    plain, target = fast(), fast(recorder=recorder)
    for _ in range(2):
        outputs = []
        for each in (plain, target):
            each.start(texts(1, 9))
            outputs.append(each.forward(texts(1, 5), chain(1, 4)).logits)
        torch.testing.assert_close(outputs[1], outputs[0])
    assert reason in target.note
    assert target.facts.kernels == plain.facts.kernels + ", graphs" * (recorder is without_memory)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral", "gpt2", "gpt_oss"])
def test_models_of_transformers_own_layers_and_with_windows_are_recorded_too(name, rows):
    plain, target = HFTarget(build(name)), HFTarget(build(name), capture=Replayed())
    for step, slots in enumerate((13, 7, 1, 4, 7)):
        outputs = []
        for each in (plain, target):
            tokens = texts(rows, slots, step)
            parents = TREE.expand(rows, -1) if slots == 7 else chain(rows, slots - 1)
            outputs.append(each.forward(tokens, parents, (1,)) if step else each.start(tokens, (1,)))
            if step:
                each.commit([[0, 2, 5][: 1 + (row if slots == 7 else 0)] for row in range(rows)])
        torch.testing.assert_close(outputs[1].logits, outputs[0].logits, rtol=1e-4, atol=5e-4)
        torch.testing.assert_close(outputs[1].hidden[1], outputs[0].hidden[1], rtol=1e-4, atol=5e-4)
    assert target.note == ""
    assert target.facts.kernels == "transformers, graphs"


def test_stateful_model_is_not_captured():
    recorder = Replayed()
    target = HFTarget(build("gpt_neo"), capture=recorder)
    target.start(texts(1, 9))
    target.forward(texts(1, 5), chain(1, 4))
    assert recorder.recorded == 0
    assert "graphs" not in target.facts.kernels
    assert target.note == "its cache cannot be rewritten in place, so every operation is launched separately"


def test_model_on_several_devices_is_not_captured():
    recorder, model = Replayed(), build("llama")
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    target = HFTarget(model, capture=recorder)
    target.start(texts(1, 9))
    target.forward(texts(1, 5), chain(1, 4))
    assert recorder.recorded == 0
    assert target.note.startswith("its layers are on several devices")


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # warnings of torch's compiler about torch
@pytest.mark.release
def test_passes_can_be_compiled_first(monkeypatch):
    # Packed weights are for CPUs, compilation for GPUs.
    force_layout(monkeypatch, packed.PLAIN)
    monkeypatch.setenv(module.ENVIRONMENT_VARIABLE, "compile")
    passes = []
    monkeypatch.setattr(
        torch, "compile", lambda f, _compile=torch.compile, **how: passes.append(f) or _compile(f, **how)
    )
    plain, target = fast(), fast(recorder=Replayed())
    outputs = []
    for each in (plain, target):
        each.start(texts(1, 9), TAPS)
        outputs.append(each.forward(texts(1, 7, 1), TREE, TAPS))
    torch.testing.assert_close(outputs[1].logits, outputs[0].logits, rtol=1e-4, atol=2e-4)
    assert len(passes) == 1
    assert target.note == ""


class WithNumbers(Replayed):
    """A recorder whose replays use the length that Python read during the capture, as a CUDA graph does."""

    target = None

    def __call__(self, run):
        store = self.target._store
        captured = store.longest

        def run_with_captured_length():
            current, store.longest = store.longest, captured
            try:
                return run()
            finally:
                store.longest = current

        return super().__call__(run_with_captured_length)


@pytest.mark.parametrize("reads_length", [False, True])
def test_graph_must_agree_with_eager_pass_at_two_lengths(reads_length):
    model, recorder = build("gpt2"), WithNumbers()
    if reads_length:

        def scale(_, inputs, options, outputs):
            outputs.logits.mul_(1 + options[cache_argument(model.forward)].get_seq_length())

        model.register_forward_hook(scale, with_kwargs=True)
    recorder.target = target = HFTarget(model, capture=recorder)
    target.start(texts(1, 9))
    target.forward(texts(1, 5), chain(1, 4))
    assert recorder.recorded == 1
    assert ("returned another result than the eager pass" in target.note) == reads_length
