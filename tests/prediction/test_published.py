"""Published speed-ups against predictions from model shapes, datasheets and the published mean accepted length.

A row of published.json names its source, device, models, method, draft length or tree, and tokens per pass. The
measured speed-up is not used for the prediction. old: an EAGLE-1 or -2 head, which has no vocabulary of its own.
"""

import json
from pathlib import Path
from statistics import median

from specdemo.prediction.acceptance import from_mean
from specdemo.prediction.predict import predict
from specdemo.prediction.profiles import profiles
from specdemo.prediction.work import known

RESULTS = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
EAGLE_1 = {"architectures": ["LlamaForCausalLM"]}


def predicted(result):
    """Return the predicted speed-up of a published result."""
    settings = {name: result[name] for name in ("device", "method", "dtype", "engine", "context", "nodes")}
    model = result.get("model") or (EAGLE_1 if result.get("old") else None)
    acceptance = from_mean(result["tokens"], result["k"])
    return predict(result["target"], model=model, acceptance=acceptance, ks=(result["k"],), **settings).rows[0].speedup


def test_published_results_name_source_and_device():
    for one in RESULTS:
        assert one["source"].startswith("https://") and one["device"] in profiles() and one["target"] in known()
        assert 1.0 <= one["tokens"] <= one["k"] + 1


def test_published_results_are_predicted_as_documented():
    """docs/what-if.md states a median error of 12 %, a worst one of 44 %, and 82 % inside the intervals."""
    found = [(predicted(one), one["speedup"]) for one in RESULTS]
    errors = sorted(abs(guess.value / speedup - 1.0) for guess, speedup in found)
    inside = sum(guess.low <= speedup <= guess.high for guess, speedup in found)
    assert len(errors) == 39 and round(median(errors), 2) == 0.12 and round(errors[-1], 2) == 0.44
    assert round(inside / len(found), 2) == 0.82
