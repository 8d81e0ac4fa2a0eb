import pytest
import torch

from specdemo.core.protocol import Budget, GenerationConfig, Progress
from specdemo.core.sampling import Sampling
from specdemo.engine.loop import generate
from specdemo.methods import load_drafter
from specdemo.models.target import HFTarget
from specdemo.models.toy import ToyTarget
from tests.generation import rows_of
from tests.models import tiny

PROMPTS = torch.randint(3, 61, (3, 9), generator=torch.Generator().manual_seed(3))


def noisy(model, scale):
    model.lm_head.weight.data += scale * torch.randn(61, 16, generator=torch.Generator().manual_seed(0))
    return model


def output_and_events(target, drafter, tokens=40, **config):
    config = GenerationConfig(tokens, budget=Budget(5, 5), stop_token_ids=(5, 9), **config)
    events = list(generate(target, drafter, PROMPTS, config))
    return rows_of(events), events


@pytest.mark.parametrize("options", [{}, {"inner": "suffix"}])
def test_the_draft_is_the_draft_models_own(options, tiny_llama):
    """Compares step by step, with rows of different lengths and with wrong guesses."""
    target, draft = HFTarget(tiny_llama(61)), noisy(tiny_llama(61), 0.01)
    alone, expected = output_and_events(target, load_drafter("draft_model", target, draft))
    got, events = output_and_events(target, load_drafter("cascade", target, draft, **options))
    assert got == alone == output_and_events(target, load_drafter("none", target))[0]
    assert [e.drafted for e in events] == [e.drafted for e in expected]
    for event, other in zip(events, expected, strict=True):
        for row, confidence in enumerate(event.draft_probs):
            assert confidence == pytest.approx(other.draft_probs[row], abs=1e-3)
    passes = [e.notes["passes"] for e in events[1:]]
    assert min(passes) < 3 and max(passes) == 5  # some guesses are accepted, some rejected


def test_a_third_model_may_guess(tiny_llama, tmp_path):
    target = HFTarget(tiny_llama(61))
    draft = tiny_llama(61)
    draft.save_pretrained(tmp_path)
    drafter = load_drafter("cascade", target, draft, inner="draft_model", inner_model=str(tmp_path))
    got, events = output_and_events(target, drafter)
    assert got == output_and_events(target, load_drafter("none", target))[0]
    assert {e.notes["passes"] for e in events[1:]} == {1.0}  # the guess of an equal model is always accepted
    assert drafter.weight_bytes == 2 * load_drafter("draft_model", target, draft).weight_bytes


def test_sampled_drafts_follow_the_draft_models_distribution(tiny_llama):
    rows, vocabulary = 6000, 6
    target, draft = ToyTarget(vocabulary), tiny_llama(vocabulary)
    draft.lm_head.weight.data *= 12.0  # far from uniform
    drafter = load_drafter("cascade", target, draft)
    ids = torch.tensor([[1, 2, 3, 4, 1, 2]])
    text = ids.expand(rows, -1)
    drafter.start(rows, Sampling(1.0), torch.Generator().manual_seed(0))
    drafter.observe(Progress(text[:, :-1], text[:, 1:], [5] * rows))
    with torch.no_grad():
        drafted = drafter.propose(Budget(3, 3))
        first = draft(ids).logits[0, -1].softmax(-1)
        pairs = torch.cat([ids.expand(vocabulary, -1), torch.arange(vocabulary)[:, None]], 1)
        second = draft(pairs).logits[:, -1].softmax(-1)
    assert drafted.notes["passes"] == 3
    torch.testing.assert_close(drafted.probs[0, 0], first)
    torch.testing.assert_close(drafted.probs[:, 1], second[drafted.tokens[:, 0]])
    joint = torch.zeros(vocabulary, vocabulary)
    joint.index_put_((drafted.tokens[:, 0], drafted.tokens[:, 1]), torch.tensor(1.0 / rows), accumulate=True)
    torch.testing.assert_close(joint, first[:, None] * second, atol=0.02, rtol=0.0)


def test_a_draft_model_that_reads_chains_only():
    model = tiny.build("mamba")
    target = HFTarget(tiny.build("llama"))
    alone, expected = output_and_events(target, load_drafter("draft_model", target, model), 12)
    got, events = output_and_events(target, load_drafter("cascade", target, model), 12)
    assert got == alone == output_and_events(target, load_drafter("none", target), 12)[0]
    assert [e.drafted for e in events] == [e.drafted for e in expected]


def test_inner_method_without_model_is_rejected(tiny_llama):
    with pytest.raises(ValueError, match="'draft_model' needs a model"):
        load_drafter("cascade", ToyTarget(16), tiny_llama(16), inner="draft_model")
    with pytest.raises(ValueError, match="'ngram' takes no model"):
        load_drafter("cascade", ToyTarget(16), tiny_llama(16), inner_model="stories")
