"""CUDA graphs against eager execution, on a GPU."""

import gc
from dataclasses import replace

import pytest
import torch

from specdemo.core.protocol import Budget, GenerationConfig
from specdemo.engine.loop import generate
from specdemo.kv.graphs import ENVIRONMENT_VARIABLE
from specdemo.methods import load_drafter
from specdemo.methods.heads.dflash import DFlash
from specdemo.methods.heads.eagle import Eagle
from specdemo.methods.heads.gemma4_assistant import Gemma4Assistant
from specdemo.methods.heads.medusa import Medusa
from specdemo.methods.heads.mlp_speculator import MLPSpeculator
from specdemo.methods.heads.mtp import MTP
from specdemo.models.fused import fuse_layers
from specdemo.models.target import HFTarget
from tests.generation import output
from tests.gpu.device import no_synchronisation
from tests.models.tiny import build, texts

pytestmark = pytest.mark.gpu


def fused_target(name, dtype=torch.float32):
    model = build(name).to("cuda", dtype)
    fuse_layers(model)
    return HFTarget(model)


@pytest.fixture
def without_graphs(monkeypatch):
    def make(name, dtype=torch.float32):
        with monkeypatch.context() as patch:
            patch.setenv(ENVIRONMENT_VARIABLE, "0")
            return fused_target(name, dtype)

    return make


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_texts_are_the_same(name, rows, without_graphs):
    config = GenerationConfig(60, budget=Budget(5, 5), stop_token_ids=())
    written = []
    for make in (without_graphs, fused_target):
        target, draft = make(name), make(name)
        for method, model in (("none", None), ("ngram", None), ("draft_model", draft)):
            written.append(output(target, load_drafter(method, target, model), texts(rows, 9).cuda(), config))
    assert target.note == draft.note == ""
    assert target.facts.kernels.endswith("graphs")
    assert all(text == written[0] for text in written)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_replay_equals_eager_pass(dtype, without_graphs):
    tree = torch.tensor([[0, 0, 1, 1, 2, 5]]).cuda()
    outputs = []
    for target in (without_graphs("llama", dtype), fused_target("llama", dtype)):
        target.start(texts(1, 13).cuda(), (2, -1))
        for step in range(3):
            forward = target.forward(texts(1, 7, step).cuda(), tree, (2, -1))
            target.commit([[0, 2, 5]])
        outputs.append(forward)
    assert target.note == ""
    tolerance = (1e-4 if dtype == torch.float32 else 0.1) * float(outputs[0].logits.float().std())
    torch.testing.assert_close(outputs[1].logits, outputs[0].logits, rtol=0, atol=tolerance)


def p_eagle_head(target):
    """Return an EAGLE head that drafts all tokens in one pass."""
    head = Eagle.fresh(target, draft_vocab=40)
    head.mask_hidden = torch.nn.Parameter(torch.randn_like(head.fc.weight[0]))
    head.convention = replace(head.convention, mask=3)
    return head


HEADS = {
    "eagle": lambda target: Eagle.fresh(target, draft_vocab=40),
    "p-eagle": p_eagle_head,
    "gemma4_assistant": Gemma4Assistant.fresh,
    "mtp": MTP.fresh,
    "dflash": lambda target: DFlash.fresh(target, layers=2, block_size=6),
    "medusa": lambda target: Medusa.fresh(target, heads=3),
    "mlp_speculator": lambda target: MLPSpeculator.fresh(target, n_predict=3),
}


def make_drafter_for(name, target, **options):
    """Return a drafter for the target, always with the same weights."""
    torch.manual_seed(3)
    if name in HEADS:
        return load_drafter(name.removeprefix("p-"), target, HEADS[name](target).fuse(), **options)
    draft = fused_target("llama") if name in ("draft_model", "pard", "cascade") else None
    if draft:
        draft.model.config.pard_token = 3
    return load_drafter(name, target, draft, **options)


@pytest.mark.parametrize("name", [*HEADS, "draft_model", "pard", "layer_skip"])
def test_a_recorded_draft_is_the_draft(name, without_graphs):
    """Compares drafts token by token too: in fp32 the logits of these models never differ as little as rounding
    errors.
    """
    config = GenerationConfig(40, budget=Budget(3, 3), stop_token_ids=())
    drafted = []
    for target in (without_graphs("llama"), fused_target("llama")):
        drafter = make_drafter_for(name, target)
        events = list(generate(target, drafter, texts(1, 9).cuda(), config))
        compared = events[:-4] if name == "eagle" else events  # a smaller tree has other nodes
        drafted.append([(event.drafted, event.emitted) for event in compared])
    assert target.note == drafter.graph_note == ""
    assert drafted[0] == drafted[1]


@pytest.mark.parametrize("name", [*HEADS, "draft_model", "pard", "none"])
def test_memory_does_not_grow_with_the_runs(name):
    """Graphs are freed with their lane by reference counting, without the garbage collector."""
    config = GenerationConfig(16, budget=Budget(3, 3), stop_token_ids=())
    memory = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(4):
            target = fused_target("llama")
            drafter = make_drafter_for(name, target)
            list(generate(target, drafter, texts(1, 9).cuda(), config))
            del target, drafter
            torch.cuda.synchronize()
            torch._C._cuda_clearCublasWorkspaces()  # workspaces of up to 32 streams
            torch.cuda.empty_cache()
            memory.append(torch.cuda.memory_allocated())
    finally:
        gc.enable()
    assert memory[3] == memory[1]  # the first run allocates permanent library memory


@pytest.mark.parametrize("slots", [1, 4])
def test_a_replay_does_not_wait_for_the_device(slots):
    target = fused_target("llama")
    target.start(texts(1, 13).cuda())
    tree = torch.zeros(1, slots - 1, dtype=torch.int64).cuda()
    tokens = texts(1, slots).cuda()
    target.forward(tokens, tree)  # captures
    with no_synchronisation():
        target.forward(tokens, tree)
