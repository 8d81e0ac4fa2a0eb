"""Draft models, beyond the contract of all methods."""

import pytest
import torch

from specdemo.core.protocol import Budget, GenerationConfig, Progress
from specdemo.engine.loop import generate
from specdemo.methods import load_drafter
from specdemo.models.target import HFTarget
from specdemo.training.losses import LOSSES, Objective
from tests.models.tiny import build, texts


@pytest.mark.parametrize("context, drafted", [(48, [4, 0]), (32, [0, 0])])
def test_drafts_end_with_the_draft_context(context, drafted):
    target, short = HFTarget(build("llama")), build("llama")
    short.config.max_position_embeddings = context
    drafter = load_drafter("draft_model", target, short)
    assert drafter.max_length == context
    config = GenerationConfig(20, budget=Budget(4, 4), stop_token_ids=())
    events = list(generate(target, drafter, texts(1, 40), config))
    assert [len(events[i].drafted[0]) for i in (1, -1)] == drafted
    plain = generate(target, load_drafter("none", target), texts(1, 40), config)
    assert [t for e in events for t in e.emitted[0]] == [t for e in plain for t in e.emitted[0]]


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_compares_the_next_tokens_of_both_models(loss):
    target = HFTarget(build("llama"))
    drafter = load_drafter("draft_model", target, build("llama"))
    drafter.objective = Objective(loss)
    inputs = texts(2, 20)
    probs = torch.randn(2, 20, target.vocab_size, generator=torch.Generator().manual_seed(0)).softmax(-1)
    value, _ = drafter.loss(Progress(inputs, inputs.roll(-1, 1), [20, 20], probs=probs))
    with torch.no_grad():
        logits = drafter.head(inputs).logits.view(40, 1, -1)
        expected = LOSSES[loss](logits, probs.view(40, 1, -1), torch.ones(40, 1, dtype=torch.bool)).mean()
    torch.testing.assert_close(value.detach(), expected)
