"""Published speed-ups against predictions from model shapes, datasheets and the published mean accepted length.

The measured speed-up is not used for the prediction.
"""

from statistics import median

import pytest

from specdemo.analysis.acceptance import from_mean, of_lengths
from specdemo.analysis.predict import predict, published
from specdemo.analysis.profiles import profiles
from specdemo.analysis.work import known

RESULTS = published()
EAGLE_1 = {"architectures": ["LlamaForCausalLM"]}


def predicted(result):
    """Return the predicted speed-up of a published result."""
    settings = {name: getattr(result, name) for name in ("device", "method", "dtype", "engine", "context", "nodes")}
    model = result.model or (EAGLE_1 if result.old else None)
    acceptance = from_mean(result.tokens, result.k)
    return predict(result.target, model=model, acceptance=acceptance, ks=(result.k,), **settings).rows[0].speedup


def test_published_results_name_source_and_device():
    for one in RESULTS:
        assert one.source.startswith("https://") and one.device in profiles() and one.target in known()
        assert 1.0 <= one.tokens <= one.k + 1


def test_published_results_are_predicted_as_documented():
    """docs/what-if.md states a median error of 11 %, a worst one of 47 %, and 90 % inside the error band."""
    found = [(predicted(one), one.speedup) for one in RESULTS]
    errors = sorted(abs(guess.value / speedup - 1.0) for guess, speedup in found)
    inside = sum(guess.low <= speedup <= guess.high for guess, speedup in found)
    assert len(errors) == 39 and round(median(errors), 2) == 0.11 and round(errors[-1], 2) == 0.47
    assert round(inside / len(found), 2) == 0.9


def test_rates_by_position_reproduce_the_published_lengths():
    chains = [one for one in RESULTS if one.what == "vLLM, EAGLE-3"]
    acceptance = of_lengths({one.k: one.tokens for one in chains})
    assert len(chains) == 6 and acceptance.longest == 7
    for one in chains:
        assert acceptance.tokens(one.k).value == pytest.approx(one.tokens)
