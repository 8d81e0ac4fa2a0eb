"""Draft models, beyond the contract of all methods."""

import pytest

from specdemo.core.protocol import Budget, GenerationConfig
from specdemo.engine.loop import generate
from specdemo.methods import load_drafter
from specdemo.models.target import HFTarget
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
