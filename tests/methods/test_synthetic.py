"""Synthetic acceptance: draft tokens are accepted at the requested rates for any drafter, without other claims."""

import pytest
import torch
from scipy.stats import binomtest

from specdemo import testing
from specdemo.core.protocol import Budget, GenerationConfig
from specdemo.core.sampling import Sampling
from specdemo.core.tally import StepCounts
from specdemo.costs.acceptance import expected_tokens
from specdemo.engine.comparison import Comparison, Lane
from specdemo.engine.loop import generate
from specdemo.engine.session import Session
from specdemo.methods import load_drafter, method
from specdemo.methods.synthetic import parse_rates, rates_of_length
from specdemo.models.target import HFTarget
from specdemo.models.toy import ToyTarget

PROMPTS = torch.randint(3, 61, (3, 9), generator=torch.Generator().manual_seed(3))


def events(target, drafter, prompts=PROMPTS, temperature=0.0, tokens=400, k=4, seed=0):
    config = GenerationConfig(tokens, Sampling(temperature), Budget(k, k), seed, stop_token_ids=())
    return list(generate(target, drafter, prompts, config))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"rates": "0.8,0.75,0.7"}, [0.8, 0.75, 0.7, 0.7]),
        ({"rates": "0.3,0.9"}, [0.3, 0.9, 0.9, 0.9]),
        ({"rates": "1,1,0"}, [1, 1, 0]),
        ({"length": 3.4}, [1, 1, 0.4]),
    ],
)
def test_acceptance_follows_the_given_rates(options, expected, temperature):
    target = ToyTarget(61, seed=1)
    steps_seen = events(target, load_drafter("synthetic", target, **options), PROMPTS.repeat(8, 1), temperature)
    steps = [StepCounts.of(event, row) for event in steps_seen[1:] for row in range(24)]
    accepted_counts = [step.accepted for step in steps if step.depth == 4]  # there is less room at the end of a text
    for depth, rate in enumerate(expected):
        tries, accepted = (sum(accepted >= n for accepted in accepted_counts) for n in (depth, depth + 1))
        assert tries > 500 and binomtest(accepted, tries, rate).pvalue > 1e-3, (depth, accepted / tries)


def test_correction_is_the_target_token():
    """The drafts repeat the prompt; after a rejection follows the target's token for the whole text."""
    target = ToyTarget(61, seed=1)
    steps_seen = events(target, load_drafter("synthetic", target, rates="0.7"), PROMPTS[:1])
    text = PROMPTS[0].tolist()
    for event in steps_seen:
        *accepted, own = event.emitted[0]
        assert accepted == event.drafted[0][: len(accepted)]
        assert own == int(target.next_probs(text + accepted).argmax())
        text += event.emitted[0]
    copied = [token for event in steps_seen[1:] for token in event.drafted[0]]
    assert set(copied) <= set(PROMPTS[0].tolist()) and all(event.notes["by_chance"] for event in steps_seen[1:])


def test_a_draft_of_another_method_costs_what_it_costs(tiny_llama):
    """The inner drafter drafts in every step, and its tokens are accepted as a chain regardless of the target's
    probabilities.
    """
    target = HFTarget(tiny_llama(61))
    for name, given in (("draft_model", tiny_llama(61)), ("lookahead", None)):
        drafter = load_drafter("synthetic", target, given, drafter=name, rates="0.9")
        steps_seen = events(target, drafter, tokens=60)
        assert drafter.weight_bytes == (target.weight_bytes if given else 0)
        assert all(event.parents[row] == [*range(len(event.parents[row]))] for event in steps_seen for row in range(3))
        assert any(len(path) > 1 for event in steps_seen[1:] for path in event.path)


def test_seed_makes_acceptance_reproducible():
    target = ToyTarget(61, seed=1)
    texts = [
        [event.emitted for event in events(target, load_drafter("synthetic", target), tokens=60, seed=seed)]
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("text", ["", "a", "0.5,", "1.1", "-0.1", "nan", "0.5,nan", "80 %"])
def test_invalid_rates_are_refused_in_one_line(text):
    with pytest.raises(ValueError, match=r"option 'rates' must be numbers from 0 to 1 .*, such as 0\.8,0\.75, not"):
        parse_rates(text)


def test_synthetic_wraps_and_cannot_be_wrapped():
    for name in ("adaptive", "online", "cascade", "router"):
        options = {option.name: option for option in testing.method_options(name)}
        assert "synthetic" not in options["inner" if name == "cascade" else "drafter"].choices
    assert not method("synthetic").exact and method("ngram").exact


def test_synthetic_lane_is_marked_lossy():
    lanes = [
        Lane(method="synthetic", k=3, options={"rates": "0.9,0.8"}),
        Lane(method="synthetic", k=3, model="stories-draft-wide", options={"rates": "1", "drafter": "draft_model"}),
    ]
    spec = Comparison.build({"id": "test", "target": "stories", "prompt": "Once upon a time", "lanes": lanes})
    trace = Session().run(spec.changed(max_new_tokens=40))
    for lane, row in zip(trace.lanes[1:], trace.comparison, strict=True):
        assert lane.exact is False and "accepted at random" in lane.note and lane.finish == "length"
        assert row["verdict"] == "lossy" and row["identical"] is None and row["first_divergence"] is not None
        assert row["speedup_low"] < row["speedup"] < row["speedup_high"]
    assert trace.lanes[2].summary["tokens_per_step"] > 3.5 and trace.lanes[2].summary["ms_draft"] > 1.0


@pytest.mark.parametrize(("length", "rates"), [
    (1.0, (0.0, 0.0)), (1.4, (0.4, 0.0)), (3.4, (1.0, 1.0, 0.4, 0.0)), (4.0, (1.0, 1.0, 1.0, 0.0, 0.0)),
])  # fmt: skip
def test_a_length_gives_the_rates_with_the_smallest_variance(length, rates):
    assert rates_of_length(length) == pytest.approx(rates)
    assert expected_tokens(rates)[-1] == pytest.approx(length)


def test_length_and_rates_exclude_each_other_and_k_bounds_the_length():
    for options, line in [
        ({"length": 3.0, "rates": "0.5"}, "option 'length' replaces 'rates'; give one of them"),
        ({"length": 0.5}, r"option 'length' must be 0 \(use rates\) or at least 1, not 0.5"),
        ({"length": 5.5}, "these options need a draft length of 5 or more, not 4; increase k"),
    ]:
        with pytest.raises(ValueError, match=line):
            _ = Lane(method="synthetic", k=4, options=options).parsed
