"""Predictions: monotonic, inside their interval, without torch, and one line for bad input."""

import json
from dataclasses import replace
from itertools import product
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdemo.__main__ import main
from specdemo.analysis.configs import drafting, shape
from specdemo.analysis.predict import predict, predict_scenario, published
from specdemo.costs.acceptance import from_mean, of_lengths, of_passes
from specdemo.costs.drafting import Drafting
from specdemo.costs.profiles import Figure, MeasuredStep, Passes, profile, profiles
from specdemo.costs.roofline import device_of, step_cost, work
from specdemo.costs.shapes import reference_configs
from specdemo.methods.facts import MODELS, PREDICTED
from specdemo.presets.files import FOLDER

RECORDED = str(FOLDER / "recorded" / "embedded-draft.json")
few = settings(max_examples=25, deadline=None)


def with_bandwidth(of, value):
    return of.model_copy(update={"bandwidth_gb_per_s": Figure(value=value, source="a test")})


@few
@given(st.sampled_from(sorted(profiles())), st.floats(10.0, 1e4), st.floats(1.01, 10.0), st.sampled_from([1, 4, 32]))
def test_more_bandwidth_never_predicts_slower(name, bandwidth, times, batch):
    slow, fast = (
        predict("llama-8b", model="llama-1b", device=with_bandwidth(profile(name), b), batch=batch, ks=(1, 4))
        for b in (bandwidth, bandwidth * times)
    )
    assert fast.plain_ms <= slow.plain_ms
    assert all(a.tokens_per_s.value >= b.tokens_per_s.value for a, b in zip(fast.rows, slow.rows, strict=True))


@few
@given(st.lists(st.floats(0.0, 0.9), min_size=1, max_size=6), st.integers(0, 5), st.floats(0.0, 0.1))
def test_more_acceptance_never_predicts_slower(rates, place, more):
    better = [rate + more * (i == place % len(rates)) for i, rate in enumerate(rates)]
    worse, found = (predict("llama-8b", method="ngram", acceptance=r, ks=(3, 6)) for r in (rates, better))
    for a, b in zip(found.rows, worse.rows, strict=True):
        assert a.tokens.value >= b.tokens.value and a.speedup.value >= b.speedup.value * (1.0 - 1e-9)


@pytest.mark.parametrize("k", [1, 4, 16])
def test_a_free_perfect_draft_gives_k_and_one(k):
    scenario = predict("llama-8b", method="ngram", acceptance=[1.0]).scenario
    device = scenario.device.changed(draft_ms=0.0)
    found = predict_scenario(replace(scenario, draft=Drafting(), device=device), (k,))
    assert found.best.tokens.value == k + 1.0
    assert found.best.speedup.value == pytest.approx(k + 1.0, rel=0.01)  # its passes are slightly wider


@pytest.mark.parametrize("method", PREDICTED)
@pytest.mark.parametrize("device", ["h100-sxm", "laptop-cpu"])
def test_every_method_has_a_cost_and_an_interval_around_its_value(method, device):
    model = "llama-1b" if method in MODELS else None
    found = predict("llama-8b", device=device, method=method, model=model, ks=(1, 2, 4))
    assert found.as_dict()["method"] == method
    passes = PREDICTED[method].cost(shape("llama-8b"), reference_configs()["llama-1b"], {})
    free = passes.first is None
    assert (not free and passes.further is None) == PREDICTED[method].parallel
    for row in found.rows:
        assert row.speedup.low < row.speedup.value < row.speedup.high
        assert row.v >= 1.0 and (row.draft_ms < 1.0 if free else row.c > 0.0)
    assert (
        found.memory_gb > 16.0 and found.loads[0].speedup.value >= max(row.speedup.value for row in found.rows) * 0.999
    )


def test_no_gain_when_passes_are_compute_bound():
    found = predict("llama-8b", model="llama-1b", device="laptop-cpu")
    assert found.break_even_batch is not None and found.break_even_batch > 1
    at, before = (
        predict_scenario(replace(found.scenario, batch=batch))
        for batch in (found.break_even_batch, found.break_even_batch - 1)
    )
    assert at.best_k == 0 and before.best_k > 0
    assert at.sentence.startswith("No draft length gains ") and "; bottleneck: " in at.sentence and at.loads[-1].k == 0


def test_trace_names_method_model_and_tokens():
    found = predict("stories", trace=RECORDED, device="laptop-cpu")
    assert found.scenario.draft.method == "draft_model" and not any("is assumed" in note for note in found.notes)
    assert found.scenario.acceptance.exact and found.rows[3].tokens.low is not None


def test_measured_passes_of_a_run_replace_the_roofline_on_a_cpu():
    in_fours = {1: 10.0, 4: 12.0, 5: 20.0, 8: 22.0}
    measured, roofline = (
        predict("stories", method="ngram", acceptance=[0.8], device="laptop-cpu", passes=p) for p in (in_fours, None)
    )
    assert [row.v for row in measured.rows][3:5] == pytest.approx([2.0, 2.0 + 2.0 / 3.0 / 10.0])
    assert measured.best_k in (3, 7) and measured.rows[2].v == pytest.approx(1.2)
    assert measured.plain_ms == roofline.plain_ms and "measured on its CPU" in measured.notes[0]
    gpu = predict("stories", method="ngram", acceptance=[0.8], device="l4", passes=in_fours)
    assert gpu.rows == predict("stories", method="ngram", acceptance=[0.8], device="l4").rows


def test_larger_k_than_recorded_is_marked_and_not_recommended_silently():
    found = predict("stories", trace=RECORDED, device="laptop-cpu")
    assert found.as_dict()["recorded_k"] == 4 and "The run recorded k = 4. Larger k are extrapolated" in found.notes[0]
    assert [row.extrapolated for row in found.rows] == [row.k > 4 for row in found.rows]
    assert [row["extrapolated"] for row in found.as_dict()["rows"]] == [row.k > 4 for row in found.rows]
    widths = {row.k: row.speedup.width for row in found.rows}
    assert widths[4] < widths[5] < widths[16]
    shorter = predict("stories", trace=RECORDED, device="laptop-cpu", ks=(2, 4))
    assert not shorter.notes and "extrapolated" not in shorter.sentence
    longer = predict("stories", trace=RECORDED, device="laptop-cpu", ks=(6,))
    assert longer.best_k == 6
    assert "k = 6 is extrapolated: the run recorded k = 4. Record a run with k = 6 to check it." in longer.sentence


def test_a_last_position_without_a_rejection_does_not_continue_as_certainty():
    """12 of 12 accepted at position 5 must not make k = 16 look best."""
    accepted = of_passes([(n, 5) for n in (5, 1, 0, 5, 2, 5, 3, 0) * 4], exact=True)
    assert accepted.rates[-1] == 1.0
    found = predict("stories", model="stories-draft-wide", acceptance=accepted, device="laptop-cpu")
    assert found.best_k <= 9 and found.rows[-1].speedup.value < found.rows[4].speedup.value


def test_measured_passes_and_steps_correct_the_constants():
    """The fit recovers a machine with half of the bandwidth, fast launches and more overhead."""
    truth = device_of(profile("laptop-cpu"), "float32", "eager")
    truth = truth.changed(bandwidth=0.45, operation_us=2.0, step_ms=0.3, draft_ms=0.5)
    passes, steps = [], []
    for name, context in product(("llama-100m", "llama-7m", "llama-1m"), (64, 256)):
        of = shape(name)
        ms = {b: {n: truth.ms(work(of, n, b, context, 4.0)) for n in (1, 2, 5, 9, 17)} for b in (1, 4)}
        ms[4][17] *= 3.0  # disturbed
        passes.append(Passes(model=name, dtype="float32", kernels="x", context=context, ms=ms))
    for k, method in ((0, "none"), (3, "draft_model")):
        draft = drafting(method, shape("llama-7m"), reference_configs()["llama-1m"] if k else None, {})
        step = step_cost(truth, shape("llama-7m"), draft, from_mean(2.0, max(k, 1)), k, 1, 80)
        laps = {"draft": step.drafting, "verify": step.verify, "commit": step.overhead}
        more = {"draft": "llama-1m"} if k else {}
        steps.append(
            MeasuredStep(model="llama-7m", method=method, dtype="float32", k=k, ms=laps, drafted=k, kept=k / 3, **more)
        )
    measured = profile("laptop-cpu").model_copy(update={"passes": tuple(passes), "steps": tuple(steps)})
    fitted = device_of(measured, "float32", "eager")
    other = work(shape("stories-draft-deep"), 3, 2, 64, 4.0)
    assert fitted.ms(other) == pytest.approx(truth.ms(other), rel=0.05)
    assert fitted.costs.bandwidth == pytest.approx(0.45, rel=0.1)
    assert (fitted.costs.step_ms, fitted.costs.draft_ms) == pytest.approx((0.3, 0.5), rel=0.1)


@pytest.mark.parametrize(
    "arguments, line",
    [
        (["storie"], "did you mean 'stories'?"),
        (["stories", "--device", "h100"], "unknown device 'h100'; did you mean 'h100-sxm'?"),
        (["stories", "--method", "adaptive"], "method 'adaptive' drafts adaptively and cannot be predicted"),
        (["stories", "--method", "draft_model"], "needs a draft model; name one with --model"),
        (["stories", "--batch", "0"], "batch must be from 1 to 4,096, not 0"),
        (["stories", "--price", "nan"], "price must be from 0 to 1,000,000,000 per hour, not nan"),
        (["stories", "--acceptance", "1.2"], "acceptance needs 1 to 64 numbers between 0 and 1"),
    ],
)
def test_bad_input_is_one_line_with_the_fix(capsys, monkeypatch, arguments, line):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["predict", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and line in err


def test_command_prints_text_and_json(capsys):
    arguments = "predict llama-8b --model llama-1b --device h100-sxm,l4 --batch 1,32 --price 2".split()
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert (
        printed.count("\nh100-sxm ") == printed.count("\nl4 ") == 2 and "0.75 is assumed at every position" in printed
    )
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["device"], one["batch"]) for one in found] == [(d, b) for d in ("h100-sxm", "l4") for b in (1, 32)]
    assert found[0]["rows"][3]["speedup"]["low"] < found[0]["rows"][3]["speedup"]["value"]
    assert found[0]["per_million"] < found[0]["plain_per_million"]


RESULTS = published()
EAGLE_1 = {"architectures": ["LlamaForCausalLM"]}


def speedup_of(result):
    """Return the predicted speed-up of a published result."""
    settings = {name: getattr(result, name) for name in ("device", "method", "dtype", "engine", "context", "nodes")}
    model = result.model or (EAGLE_1 if result.old else None)
    acceptance = from_mean(result.tokens, result.k)
    return predict(result.target, model=model, acceptance=acceptance, ks=(result.k,), **settings).rows[0].speedup


def test_published_results_name_source_and_device():
    for one in RESULTS:
        assert one.source.startswith("https://") and one.device in profiles() and one.target in reference_configs()
        assert 1.0 <= one.tokens <= one.k + 1


def test_published_results_are_predicted_as_documented():
    """docs/what-if.md states a median error of 11 %, a worst one of 47 %, and 90 % inside the error band."""
    found = [(speedup_of(one), one.speedup) for one in RESULTS]
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
