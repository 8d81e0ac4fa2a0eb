from copy import deepcopy

import pytest
import torch

from specdemo.core.accept import Lossless
from specdemo.core.protocol import Budget, GenerationConfig
from specdemo.core.sampling import Sampling, to_probs
from specdemo.engine.loop import generate
from specdemo.methods import load_drafter
from specdemo.models.target import HFTarget
from specdemo.models.toy import ToyTarget
from tests.models.tiny import Replayed, build, texts


@pytest.fixture(scope="module")
def llama():
    return build("llama")


def shortened(model, layers):
    """Return the early-exit model of transformers: the same model with fewer layers in its config."""
    short = deepcopy(model)
    short.config.num_hidden_layers = layers
    return short


def record(target, prompts, sampling=None, **options):
    """Run one generation. Return the texts and the draft of every step, and the events."""
    drafter = load_drafter("layer_skip", target, **options)
    steps = []
    propose = drafter.propose
    written = prompts.tolist()

    def proposing(budget):
        draft = propose(budget)
        steps.append(([row.copy() for row in written], draft))
        return draft

    drafter.propose = proposing
    config = GenerationConfig(16, sampling or Sampling(), Budget(4, 4), stop_token_ids=())
    events = []
    for event in generate(target, drafter, prompts, config, accept=Lossless()):
        written = [row + new for row, new in zip(written, event.emitted, strict=True)]
        events.append(event)
    return steps, events, written


def test_the_draft_is_that_of_the_shortened_model(llama):
    """Compares every token with a pass of the shortened model over the whole text without a cache."""
    short = shortened(llama, 2)
    steps, events, _ = record(HFTarget(llama), texts(2, 7), exit_layer=2)
    assert any(len(path[0]) != len(path[1]) for path in (event.path for event in events))  # ragged rows
    for written, draft in steps:
        if not draft.nodes:
            continue  # one token is left
        assert draft.probs is None
        for row, text in enumerate(written):
            if len(text) >= 7 + 16:
                continue  # finished
            for token, confidence in zip(draft.tokens[row].tolist(), draft.confidence[row], strict=True):
                logits = short(torch.tensor([text]), use_cache=False).logits[0, -1]
                assert token == int(logits.argmax())
                torch.testing.assert_close(confidence, logits.softmax(-1)[token], rtol=1e-3, atol=1e-4)
                text = [*text, token]


def test_sampled_drafts_carry_what_they_were_drawn_from(llama):
    short = shortened(llama, 1)
    sampling = Sampling(temperature=0.8, top_k=7)
    steps, _, _ = record(HFTarget(llama), texts(2, 5), sampling, exit_layer=1)
    for written, draft in steps[:3]:
        for row, text in enumerate(written):
            for token, q in zip(draft.tokens[row].tolist(), draft.probs[row], strict=True):
                logits = short(torch.tensor([text]), use_cache=False).logits[0, -1]
                torch.testing.assert_close(q, to_probs(logits, sampling), rtol=1e-3, atol=1e-4)
                assert q[token] > 0
                text = [*text, token]


def test_drafters_that_end_after_other_layers_have_graphs_of_their_own(llama):
    drafts = []
    for target in (HFTarget(llama), HFTarget(llama, capture=Replayed())):
        events = [record(target, texts(1, 7), exit_layer=layers)[1] for layers in (1, 2)]
        drafts.append([[event.drafted for event in run] for run in events])
    assert drafts[0] == drafts[1] and drafts[0][0] != drafts[0][1]


def test_a_third_of_the_layers_by_default():
    drafter = load_drafter("layer_skip", ToyTarget())
    assert drafter.exit_layer == 1
    assert drafter.note == "The first 1 of 3 layers draft."


def test_targets_it_does_not_fit():
    with pytest.raises(ValueError, match="'exit_layer' \\(3\\) must be below the 3 layers of toy"):
        load_drafter("layer_skip", ToyTarget(), exit_layer=3)
    with pytest.raises(ValueError, match="runs layers of the target by themselves, which .* does not support; choose"):
        load_drafter("layer_skip", HFTarget(build("mamba")))
