"""The distribution of sampled output of every exact method: chi-square over the first tokens of many runs on a toy
target with known probabilities.

Rejection sampling detects a wrong q, a bias from a confidence threshold, and a node whose existence depends on its own
token. With coupling the text is that of plain decoding, whatever the draft.
"""

import pytest
import torch
from scipy.stats import chi2

from specdemo import testing
from specdemo.core.protocol import Budget, GenerationConfig
from specdemo.core.rules import accept_rule
from specdemo.core.sampling import Sampling
from specdemo.methods import METHODS, method
from specdemo.methods.wrapper import Confident
from specdemo.models.toy import ToyTarget
from tests.generation import output

VOCABULARY = 5
DRAWS = 6_000
BATCH = 3_000
PROMPT = [3, 1, 4, 1, 3, 1]


def joint(target, drafter, rule, tokens, temperature=1.0):
    """Return counts of the first `tokens` new tokens over all draws, coded as one number in base V."""
    counts = torch.zeros(VOCABULARY**tokens, dtype=torch.int64)
    powers = VOCABULARY ** torch.arange(tokens)
    prompt = torch.tensor([PROMPT] * BATCH)
    for seed in range(DRAWS // BATCH):
        config = GenerationConfig(tokens, Sampling(temperature), Budget(2, 6), seed, stop_token_ids=())
        rows = output(target, drafter, prompt, config, accept=accept_rule(rule))
        counts += torch.bincount((torch.tensor(rows) * powers).sum(1), minlength=len(counts))
    return counts


def expected(target, tokens, temperature=1.0):
    """Return the exact joint distribution, coded in the same way."""
    chances = {(): 1.0}
    for _ in range(tokens):
        chances = {
            (*path, token): chance * float(p)
            for path, chance in chances.items()
            for token, p in enumerate((target.next_probs(PROMPT + list(path)).log() / temperature).softmax(-1))
        }
    probs = torch.zeros(VOCABULARY**tokens)
    for path, chance in chances.items():
        probs[sum(t * VOCABULARY**i for i, t in enumerate(path))] = chance
    return probs


EXACT = [name for name in METHODS if name != "none" and method(name).exact]


@pytest.mark.parametrize(
    "name, rule, p_min, temperature",
    [
        ("none", "coupled", 0.0, 1.0),
        ("eagle", "coupled", 0.0, 0.5),
        *((name, "lossless", 0.0, 1.0) for name in EXACT),
        ("draft_model", "lossless", 0.0, 0.5),
        ("draft_model", "lossless", 0.208, 1.0),  # some drafts are cut
        ("pard", "lossless", 0.208, 1.0),
        ("layer_skip", "lossless", 0.4, 1.0),
        ("mlp_speculator", "lossless", 0.235, 1.0),
    ],
)
def test_the_first_tokens_are_drawn_from_the_target(name, rule, p_min, temperature):
    target = ToyTarget(VOCABULARY, seed=6)
    drafter = testing.make_drafter(name, target)
    counts = joint(target, Confident(drafter, p_min) if p_min else drafter, rule, 3, temperature)
    expected_counts = expected(target, 3, temperature) * DRAWS
    common = expected_counts >= 5.0  # rarer outcomes are pooled
    observed = torch.cat([counts[common].double(), counts[~common].sum()[None].double()])
    pooled = torch.cat([expected_counts[common].double(), expected_counts[~common].sum()[None].double()])
    statistic = float(((observed - pooled) ** 2 / pooled.clamp_min(1e-9)).sum())
    assert statistic < chi2.ppf(0.9999, len(pooled) - 1)
