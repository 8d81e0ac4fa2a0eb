"""Predictions and sentences about the lanes of a run."""

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from specdemo.analysis.diagnose import SMALLEST_GAIN, diagnose
from specdemo.analysis.lanes import break_even, explain, results
from specdemo.analysis.observation import Observation
from specdemo.analysis.readers import read_output, read_output_file
from specdemo.bench.report import NOTHING, changes, why_report
from specdemo.core.estimate import Estimate
from tests.simulated_runs import chain, prefill, simulated, speed, trace


@pytest.mark.parametrize("ms", [0.0, 5e-324, 1.7e308])
def test_impossible_times_are_handled(ms):
    lane = [prefill(), *(chain(i, 3, 1, ms, ms) for i in range(1, 9))]
    (entry,) = results(trace(("lane", lane), options={"k": 10**9}))
    assert isinstance(entry.why, str)


def test_the_prediction_of_a_run_agrees_with_its_own_measurement():
    lane = simulated(random.Random(2), [0.7] * 4, 4, 400)
    (entry,) = results(trace(("lane", lane)))
    predicted = entry.diagnosis.speed_at_best.value / entry.diagnosis.gain.value  # as it ran
    assert predicted == pytest.approx(speed(lane) * 10.0, rel=0.02)
    assert entry.diagnosis.gain.value >= 1.0


def test_a_step_that_costs_less_than_a_plain_token_has_no_extra_time():
    quick = simulated(random.Random(3), [0.3] * 4, 4, 200, v=lambda n: 8.0, c=0.1, fixed=0.0, other=0.1)
    (entry,) = results(trace(("lane", quick)))
    assert entry.why.startswith("Faster (") and ": a step takes as long as plain decoding of 0." in entry.why
    assert "; no extra cost over plain decoding; no other k is predicted" in entry.why
    assert "main cause" not in entry.why


@pytest.mark.parametrize(
    ("speed", "words"),
    [
        (Estimate(0.8, 0.7, 0.9), "Slower (0.80x, 0.70 to 0.90)"),
        (Estimate(1.05, 0.99, 1.11), "No clear difference (1.05x, 0.99 to 1.11)"),
        (Estimate(7.5), "No clear difference (7.50x)"),
        (Estimate(1.97, 1.86, 2.07), "Faster (1.97x, 1.86 to 2.07)"),
    ],
)
def test_faster_and_slower_only_where_the_interval_leaves_out_one(speed, words):
    lane = {"tokens_per_step": 1.0, "steps": 9, "drafted": 0, "ms_draft": 1.0}
    assert explain(lane, speed).startswith(f"{words}: ")


def test_a_lane_without_steps_has_no_report_of_its_drafts_or_too_few_tokens():
    lane = {"tokens_per_step": None, "steps": 0, "tokens": 40}
    found = "No clear difference (1.05x); the server does not report its drafts."
    assert explain(lane, Estimate(1.05)) == found
    assert explain(lane | {"tokens": 0}, Estimate(1.05)) == "Too few tokens for an explanation."


def test_a_lane_whose_drafts_were_all_left_out_has_drafted():
    steps = [chain(i, 0, 0, 1.0, 1.0) for i in range(1, 9)]
    left_out = [replace(step, notes={"unverified": 1.0}) for step in steps]
    for lane, words in ((steps, "nothing was drafted."), (left_out, "nothing was verified.")):
        (entry,) = results(trace(("lane", [prefill(), *lane])))
        assert entry.why.endswith(words)


def test_a_better_length_is_named():
    lane = simulated(random.Random(5), [0.8] * 8, 8, 400, c=3.0, fixed=0.0)
    (entry,) = results(trace(("lane", lane), options={"k": 8}))
    assert 0 < entry.diagnosis.best_k < 8
    assert f"; k = {entry.diagnosis.best_k} is predicted to be faster than k = 8 (1.26x, " in entry.why


def test_other_k_is_advised_only_if_significant():
    """One more token would be faster for both lanes, but only the long lane has enough steps for certainty."""
    few, many = (
        results(trace(("lane", simulated(random.Random(4), [0.8] * 8, 2, steps)), options={"k": 2}))[0]
        for steps in (20, 2500)
    )
    assert many.diagnosis.best_k > 2
    assert f"; k = {many.diagnosis.best_k} is predicted to be faster than k = 2 (" in many.why
    assert few.diagnosis.best_k != 2 and few.why.endswith("no other k is predicted to be clearly faster than k = 2.")


def test_the_break_even_rate_is_the_rate_of_a_lane_as_fast_as_plain_decoding():
    lane = {"tokens_per_step": 2.2, "drafted": 400, "steps": 100, "acceptance_rate": 0.3}
    assert break_even(lane, Estimate(1.0)) == pytest.approx(0.3)
    assert break_even(lane, Estimate(0.5)) == pytest.approx(0.85)
    assert break_even(lane, Estimate(3.0)) == 0.0
    assert break_even(lane | {"drafted": 0}, Estimate(1.0)) is break_even(lane, None) is None
    assert "30 % of the draft tokens were accepted, 85 % would break even" in explain(lane, Estimate(0.5))
    assert "not even 100 % would break even" in explain(lane, Estimate(0.1))


SAMPLES = Path(__file__).parent / "samples"
METHODS = ("", "ngram", "suffix", "draft_model", "eagle", "mtp", "draft-mtp and ngram-mod")


def some_run(rng):
    """Return a run with any acceptance, share of steps with a draft, early ends and speed."""
    k = rng.choice([1, 2, 3, 4, 5, 8, 16, 64, 300])
    share = rng.choice([1.0, 1.0, 0.6, 0.2, 0.01])
    drafted = share * max(1.0, k * rng.choice([1.0, 1.0, 0.7, 0.2]))
    rate = rng.choice([0.0, 0.001, 0.1, 0.5, 0.9, 1.0]) * rng.random()
    one = Observation(
        engine=rng.choice(["", "vllm", "sglang", "llama-server"]),
        method=rng.choice(METHODS),
        k=k,
        drafted_per_step=drafted,
        drafting_share=rng.choice([None, share]) if share == 1.0 else share,
        accepted_length=1.0 + drafted * rate,
        acceptance_rate=rate,
        steps=rng.choice([None, 30, 5000]),
        batch_size=rng.choice([None, 1.0, 32.0]),
        moe=rng.choice([None, True]),
        threshold=rng.choice([None, 0.8]),
        speedup=rng.choice([None, Estimate(rng.uniform(0.2, 3.0)), Estimate(rng.uniform(0.9, 1.1))]),
    )
    measured = {"draft_cost": rng.random(), "verify_cost": 1.0 + rng.random(), "overhead": rng.random()}
    return replace(one, **measured) if rng.random() < 0.2 else one


def check(found):
    one, words, advice = found.observation, found.sentence, changes(found)
    text = why_report(found)
    if advice == [NOTHING]:
        assert found.healthy and "too low" not in text and "too large" not in text and "main cause" not in words
    off = any(line.startswith("Turn speculation off") for line in advice)
    assert off <= ("not worth it here" in words) and not (off and re.search(r"k = \d+ is predicted", words))
    for k in re.findall(r"(?:than|as fast as) k = (\d+)|k = (\d+) is too", text):
        assert one.k == int(next(filter(None, k)))
    if suggested := re.search(r"k = (\d+) is predicted to be faster", words):
        speed = one.speedup.value if one.speedup else found.expected_speed
        assert found.best_k == int(suggested[1]) != one.k
        assert speed * found.gain.value >= SMALLEST_GAIN * (1.0 - 1e-9) or speed >= SMALLEST_GAIN
        assert not one.combined and "Turn speculation off" not in text
    assert not ("no extra cost" in words and "cost of the draft" in words)
    assert "draft token after position" not in text or any(one.by_position)
    assert text.isprintable() or "\n" in text


def test_no_sentence_contradicts_another():
    for seed in range(600):
        check(diagnose(some_run(random.Random(seed))))


@pytest.mark.parametrize("path", sorted(SAMPLES.glob("*[!d]")), ids=lambda path: path.name)
@pytest.mark.parametrize("plain", [30.0, 100.0, 1000.0])
def test_no_sentence_of_a_real_output_contradicts_another(path, plain):
    found = diagnose(read_output_file(path).changed(plain_tokens_per_s=plain))
    if found.causes:
        check(found)


@pytest.mark.parametrize(
    ("name", "plain", "cause", "words"),
    [
        ("llamacpp-ngram.log", 105.0, "few drafts", "4 of 879 steps had a draft (0.5 %), of 48.0 tokens each"),
        ("vllm-ngram.prom", 100.0, "few drafts", "4 of 884 steps had a draft (0.5 %), of 5.0 tokens each"),
        ("llamacpp-early.log", 33.0, "draft length", "k = 64 is too large"),
        ("llamacpp-dead.log", 70.0, "broken drafter", "0 of 2,697 draft tokens were accepted"),
        ("llamacpp-combined.log", 60.0, None, "draft-mtp and ngram-mod"),
    ],
)
def test_reported_runs_get_their_cause(name, plain, cause, words):
    found = diagnose(read_output_file(SAMPLES / name).changed(plain_tokens_per_s=plain))
    assert (found.cause and found.cause.name) == cause and words in why_report(found)


def test_a_method_with_an_underscore_is_known():
    text = (SAMPLES / "llamacpp-ngram.log").read_text(encoding="utf-8")
    assert read_output(text.replace("ngram-mod", "ngram_mod")) == read_output(text)


COSTLY = {"speedup": Estimate(0.8)}


@pytest.mark.parametrize(
    ("run", "cause"),
    [
        ({"k": 3, "steps": 100, "acceptance_rate": 0.0, "method": "mtp"}, "broken drafter"),
        ({"k": 3, "steps": 100, "acceptance_rate": 0.004}, "broken drafter"),
        ({"k": 3, "steps": 60, "acceptance_rate": 0.0}, "acceptance"),  # 180 tokens are too few
        ({"k": 3, "steps": 900, "acceptance_rate": 0.05}, "acceptance"),
        ({"k": 3, "steps": 900, "acceptance_rate": 0.0, "method": "ngram"}, "acceptance"),
        ({"k": 4, "by_position": (0.8, 0.6, 0.0, 0.0), "steps": 900}, "later positions"),
        ({"k": 3, "by_position": (0.9, 0.0, 0.0)}, "later positions"),
        ({"k": 8, "by_position": (0.8, 0.6, 0.0, 0.0), "steps": 60, "acceptance_rate": 0.9}, None),  # drafts end early
        (
            {"k": 16, "acceptance_rate": 0.95, "drafted_per_step": 1.5, "threshold": 0.9, "speedup": Estimate(2.0)},
            "confidence threshold",
        ),
        ({"k": 5, "acceptance_rate": 0.9, "drafted_per_step": 0.1, "drafting_share": 0.03}, "few drafts"),
    ],
)
def test_counted_causes(run, cause):
    found = diagnose(Observation(**COSTLY | run))
    named = {one.name for one in found.causes}
    if cause is None:
        assert "later positions" not in named
    else:
        assert cause in named and not named >= {"broken drafter", "acceptance"}
    if cause in ("broken drafter", "few drafts", "later positions"):
        assert found.cause.name == cause and f"main cause: {found.cause.title}" in found.sentence
