"""What every method must do, whatever it does: run over every entry of METHODS on the toy target."""

import pytest
import torch

from specdemo.core.protocol import Budget, GenerationConfig, Progress
from specdemo.core.sampling import Sampling
from specdemo.core.tree import ABSENT, depths
from specdemo.engine.loop import generate
from specdemo.methods import METHODS, knobs, load_drafter, method, reader, validate_options
from specdemo.models.toy import ToyTarget

VOCABULARY = 16
PROMPT = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]])


def drafter_for(name, target, tiny_llama, **options):
    cls = method(reader(name))
    if not cls.needs_model:
        return load_drafter(name, target, **options)
    torch.manual_seed(0)
    model = cls.fresh(target) if hasattr(cls, "fresh") else tiny_llama(target.vocab_size)
    return load_drafter(name, target, model, **options)


def run(target, drafter, prompt=PROMPT, **config):
    events = list(generate(target, drafter, prompt, GenerationConfig(**config)))
    return [[t for e in events for t in e.emitted[row]] for row in range(len(prompt))]


@pytest.fixture(params=METHODS)
def name(request):
    return request.param


def test_greedy_output_is_the_baseline(name, tiny_llama):
    target = ToyTarget(VOCABULARY, seed=1)
    plain = run(target, load_drafter("none", target), max_new_tokens=40)
    for k in (1, 2, 5, 12):
        drafter = drafter_for(name, target, tiny_llama)
        assert run(target, drafter, max_new_tokens=40, budget=Budget(k, k)) == plain


def test_greedy_batch_rows_are_independent(name, tiny_llama):
    target = ToyTarget(VOCABULARY, seed=2, stop_token_ids=(7,))
    prompts = torch.stack([PROMPT[0], PROMPT[0].flip(0), PROMPT[0].roll(3)])
    alone = [run(target, load_drafter("none", target), p[None], max_new_tokens=30)[0] for p in prompts]
    assert run(target, drafter_for(name, target, tiny_llama), prompts, max_new_tokens=30) == alone


def test_budget_is_a_ceiling(name, tiny_llama):
    target = ToyTarget(VOCABULARY)
    drafter = drafter_for(name, target, tiny_llama)
    drafter.start(1, Sampling(), torch.Generator().manual_seed(0))
    said = target.start(PROMPT[:, :-1], drafter.taps)
    drafter.observe(Progress(PROMPT[:, :-1], PROMPT[:, 1:], [PROMPT.shape[1] - 1], said.hidden))
    for budget in (Budget(0, 0), Budget(1, 1), Budget(3, 2), Budget(4, 4)):
        draft = drafter.propose(budget)
        assert draft.nodes <= budget.nodes
        assert int(depths(draft.parents).max()) <= budget.depth
        assert bool(((draft.tokens >= 0) | (draft.tokens == ABSENT)).all())
        assert bool((draft.tokens < VOCABULARY).all())


def test_second_start_is_clean(name, tiny_llama):
    target = ToyTarget(VOCABULARY, seed=3)
    drafter = drafter_for(name, target, tiny_llama)
    first = run(target, drafter, max_new_tokens=25)
    run(target, drafter, PROMPT.flip(1), max_new_tokens=9)
    assert run(target, drafter, max_new_tokens=25) == first


def test_sampling_repeats_with_the_seed(name, tiny_llama):
    target = ToyTarget(VOCABULARY, seed=4)
    config = {"max_new_tokens": 25, "sampling": Sampling(temperature=1.0), "seed": 11}
    options = {"policy": "heuristic"} if name == "adaptive" else {}  # goodput listens to the clock
    runs = [run(target, drafter_for(name, target, tiny_llama, **options), **config) for _ in range(2)]
    assert runs[0] == runs[1]


def test_confidence_is_a_probability(name, tiny_llama):
    target = ToyTarget(VOCABULARY, seed=5)
    for event in generate(target, drafter_for(name, target, tiny_llama), PROMPT, GenerationConfig(20)):
        assert len(event.draft_probs[0]) == len(event.target_probs[0]) == len(event.drafted[0])
        assert all(p is None or 0.0 <= p <= 1.0 for p in event.draft_probs[0] + event.target_probs[0])


def test_words_and_options(name):
    assert method(name).title and method(name).summary.endswith(".")
    for knob in knobs(name):
        assert knob.help
        assert knob.check(knob.default) == knob.default


def test_unknown_names_are_answered_with_the_cure():
    with pytest.raises(ValueError, match="did you mean 'draft_model'"):
        method("draft-model")
    with pytest.raises(ValueError, match="unknown option 'max_m' of method 'ngram'; did you mean 'max_n'"):
        validate_options("ngram", {"max_m": 3})
    with pytest.raises(ValueError, match="between 1 and 8"):
        validate_options("ngram", {"max_n": 99})
    with pytest.raises(ValueError, match="must be a number"):
        validate_options("ngram", {"max_n": "many"})
    with pytest.raises(ValueError, match="needs a model"):
        load_drafter("draft_model", ToyTarget(VOCABULARY))
    with pytest.raises(ValueError, match="takes no model"):
        load_drafter("ngram", ToyTarget(VOCABULARY), "stories")
