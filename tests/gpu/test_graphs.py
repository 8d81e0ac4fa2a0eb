"""On a GPU: passes recorded as CUDA graphs against the same passes run one operation after the other."""

import pytest
import torch

from specdemo.core.protocol import Budget, GenerationConfig
from specdemo.engine.loop import generate
from specdemo.methods import load_drafter
from specdemo.models.fused import hasten
from specdemo.models.graphs import SWITCH
from specdemo.models.target import HFTarget
from tests.models.tiny import build, texts

pytestmark = pytest.mark.gpu


def fast(name, dtype=torch.float32):
    model = build(name).to("cuda", dtype)
    hasten(model)
    return HFTarget(model)


@pytest.fixture
def without_graphs(monkeypatch):
    def make(name, dtype=torch.float32):
        with monkeypatch.context() as patch:
            patch.setenv(SWITCH, "0")
            return fast(name, dtype)

    return make


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_texts_are_the_same(name, rows, without_graphs):
    config = GenerationConfig(60, budget=Budget(5, 5), stop_token_ids=())
    written = []
    for make in (without_graphs, fast):
        target, draft = make(name), make(name)
        for method, model in (("none", None), ("ngram", None), ("draft_model", draft)):
            events = list(generate(target, load_drafter(method, target, model), texts(rows, 9).cuda(), config))
            written.append([[t for event in events for t in event.emitted[row]] for row in range(rows)])
    assert target.note == draft.note == ""
    assert target.kernels.endswith("graphs")
    assert all(text == written[0] for text in written)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_replay_says_what_the_pass_says(dtype, without_graphs):
    tree = torch.tensor([[0, 0, 1, 1, 2, 5]]).cuda()
    said = []
    for target in (without_graphs("llama", dtype), fast("llama", dtype)):
        target.start(texts(1, 13).cuda(), (2, -1))
        for step in range(3):
            forward = target.forward(texts(1, 7, step).cuda(), tree, (2, -1))
            target.commit([[0, 2, 5]])
        said.append(forward)
    assert target.note == ""
    tolerance = (1e-4 if dtype == torch.float32 else 0.1) * float(said[0].logits.float().std())
    torch.testing.assert_close(said[1].logits, said[0].logits, rtol=0, atol=tolerance)


def test_a_replay_does_not_wait_for_the_device():
    target = fast("llama")
    target.start(texts(1, 13).cuda())
    parents = torch.arange(3).cuda()[None]
    tokens = texts(1, 4).cuda()
    target.forward(tokens, parents)  # recorded
    torch.cuda.set_sync_debug_mode("error")
    try:
        target.forward(tokens[:, :1], parents[:, :0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
