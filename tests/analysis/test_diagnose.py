"""Diagnoses of runs with known numbers: ranking, flags, uncertainty, missing values, and no torch; parts of a run in
which a drafter works worse."""

import random

import pytest

from specdemo.analysis.attribution import step_costs
from specdemo.analysis.diagnose import diagnose
from specdemo.analysis.observation import Observation, complete
from specdemo.analysis.parts import Part, contrast
from specdemo.analysis.readers import read_output
from specdemo.bench.report import NOTHING, changes, why_report
from specdemo.core.estimate import Estimate

FOUR = {"k": 4, "accepted_length": 2.0, "plain_tokens_per_s": 100.0, "tokens_per_s": 80.0}
MEASURED = {"draft_cost": 0.05, "verify_cost": 1.05, "overhead": 0.05}


def observation(**changes):
    return Observation(**FOUR | changes)


def measured(**changes):
    """Return an observation with known costs; the speed-up follows from them."""
    costs = MEASURED | {name: value for name, value in changes.items() if name in MEASURED}
    others = {name: value for name, value in changes.items() if name not in MEASURED}
    k, length = others.pop("k", 4), others.pop("accepted_length", 3.0)
    total = costs["draft_cost"] * k + costs["verify_cost"] + costs["overhead"]
    return Observation(k=k, accepted_length=length, speedup=Estimate(length / total), **costs, **others)


def test_values_that_follow_from_others():
    one = complete(Observation(by_position=(0.8, 0.6, 0.4), tokens_per_s=120.0, plain_tokens_per_s=80.0))
    assert (one.k, one.accepted_length, one.speedup.value) == (3, pytest.approx(2.8), 1.5)
    assert one.acceptance_rate == pytest.approx(0.6)
    early = complete(Observation(k=16, accepted_length=2.92, acceptance_rate=0.64))
    assert early.drafted_per_step == pytest.approx(3.0)
    assert complete(Observation(k=4, acceptance_rate=0.5)).accepted_length == pytest.approx(3.0)
    assert complete(Observation(accepted_length=2.5, acceptance_rate=0.5)).k == 3


def test_the_training_mode_of_a_published_drafter_is_known():
    assert complete(Observation(drafter="z-lab/Qwen3-8B-DFlash-b16")).trained_thinking is False
    assert complete(Observation(drafter="no/such-model")).trained_thinking is None


@pytest.mark.parametrize(
    "bad",
    [
        {"accepted_length": 9.0},
        {"accepted_length": float("nan")},
        {"tokens_per_s": 0.0},
        {"acceptance_rate": 1.5},
        {"k": 10**9},
    ],
)
def test_impossible_numbers_are_refused_in_one_line(bad):
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        diagnose(observation(**bad))


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"accepted_length": 1.1}, "acceptance"),
        ({"draft_cost": 0.8}, "drafting"),
        ({"verify_cost": 4.0}, "verification"),
        ({"verify_cost": 4.0, "batch_size": 64}, "batch size"),
        ({"verify_cost": 4.0, "moe": True}, "experts"),
        ({"overhead": 3.0}, "overhead"),
        ({"overhead": 3.0, "offloaded": True}, "memory"),
        ({"k": 16, "accepted_length": 2.0, "draft_cost": 0.15}, "draft length"),
        ({"accepted_length": 1.2, "thinking": True, "trained_thinking": False}, "thinking"),
        ({"accepted_length": 1.2, "random_prompts": True}, "random prompts"),
        ({"accepted_length": 1.2, "draft_cache": "q4_0"}, "draft cache"),
    ],
)
def test_each_cause_is_found_where_the_costs_are_known(changes, cause):
    found = diagnose(measured(**changes))
    assert found.cause is not None and found.cause.name == cause
    assert found.measured and f"main cause: {found.cause.title}" in found.sentence


@pytest.mark.parametrize(("tokens_per_s", "first"), [(92.0, "batch size"), (120.0, "draft length")])
def test_draft_length_precedes_larger_gains_only_in_a_run_that_pays(tokens_per_s, first):
    """A smaller k would also help the slow run, but the batch costs more."""
    one = observation(k=4, accepted_length=2.8, tokens_per_s=tokens_per_s, batch_size=16, method="mtp")
    gains = {cause.name: cause.gain for cause in diagnose(one).causes}
    assert gains["batch size"] > gains["draft length"] and next(iter(gains)) == first


def test_a_quantised_draft_cache_is_replaced_before_speculation_is_turned_off():
    found = diagnose(measured(accepted_length=1.0, draft_cache="q8_0", engine="llama-server"))
    assert found.recommendations == (
        "Keep it in 16 bits (-ctkd f16 -ctvd f16): some drafters lose half of their accepted tokens with it, or all. "
        "Then measure again.",
    )
    assert "0 % of the draft tokens were accepted, and the cache is q8_0" in found.causes[0].evidence
    assert "draft cache" not in [one.name for one in diagnose(measured(accepted_length=4.0, draft_cache="q8_0")).causes]
    lookup = diagnose(measured(accepted_length=1.2, draft_cache="q8_0", method="ngram"))
    assert "draft cache" not in [cause.name for cause in lookup.causes]


def test_drafts_that_are_verified_in_part_have_no_cliff_and_no_other_length():
    run = {
        "by_position": (0.8, 0.6, 0.0, 0.0, 0.0, 0.0),
        "steps": 2000,
        "tokens_per_s": 90.0,
        "plain_tokens_per_s": 100.0,
    }
    assert "later positions" in [cause.name for cause in diagnose(Observation(**run)).causes]
    found = diagnose(Observation(**run, verified_in_part=True, engine="vllm"))
    assert not {"later positions", "draft length"} & {cause.name for cause in found.causes}
    assert any("does not report which draft tokens it verified" in note for note in found.notes)


def test_recommended_length_is_the_best_of_the_cost_model():
    found = diagnose(
        measured(k=16, accepted_length=2.0, draft_cost=0.15, engine="vllm", method="eagle3", drafter="org/d")
    )
    assert found.best_k == 2
    flags = '"method":"eagle3","model":"org/d","num_speculative_tokens":2'
    assert found.recommendations[0].startswith("Draft 2 tokens per step (vLLM: --speculative-config ") and (
        flags in found.recommendations[0]
    )


@pytest.mark.parametrize(
    ("engine", "off"),
    [("vllm", "--speculative-config"), ("sglang", "--speculative-algorithm"), ("llama-server", "--spec-type")],
)
def test_off_is_recommended_with_the_flag_of_the_engine(engine, off):
    found = diagnose(measured(overhead=8.0, engine=engine))
    assert found.best_k == 0 and off in found.recommendations[0]


RARE = {"accepted_length": 1.05, "drafting_share": 0.01, "acceptance_rate": 0.1}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "draft_model"}, "unsure (--spec-draft-p-min 0.75, 0 now)"),
        ({"method": "draft_model", "threshold": 0.1}, "unsure (--spec-draft-p-min 0.75, 0.1 now)"),
        ({"method": "draft-mtp and ngram-mod"}, "unsure (--spec-draft-p-min 0.75, 0 now)"),
        ({"method": "ngram-mod"}, "(--spec-ngram-mod-n-max 4 --spec-ngram-mod-n-min 1); --spec-draft-p-min acts on"),
        ({"method": "ngram-simple"}, "(--spec-ngram-simple-size-m 4); --spec-draft-p-min acts on draft models"),
        (RARE | {"method": "ngram-mod"}, "(--spec-ngram-mod-n-max 6 --spec-ngram-mod-n-min 1); "),
        ({"method": "draft_model", "acceptance_rate": 0.6}, ""),
        ({"method": "draft_model", "k": 4, "accepted_length": 1.3}, ""),
        ({"method": "draft_model", "engine": "vllm"}, ""),
    ],
)
def test_long_drafts_that_are_mostly_rejected_hear_of_what_ends_them(changes, words):
    run = {"k": 64, "accepted_length": 5.0, "engine": "llama-server", "tokens_per_s": 30.0} | changes
    advice = [text for text in diagnose(observation(**run)).recommendations if "p-min" in text]
    assert len(advice) == bool(words) and all(words in text for text in advice)


def test_unknown_engine_gets_the_flags_of_several():
    (first, *_) = diagnose(measured(overhead=8.0)).recommendations
    assert all(name in first for name in ("vLLM", "SGLang", "llama-server"))


def test_the_parts_of_a_step_add_up_to_its_measured_cost():
    for more in ({}, {"tokens_per_s": 20.0}, {"tokens_per_s": 180.0}, {"method": "mtp"}, {"moe": True}):
        one = complete(observation(**more))
        for cost in step_costs(one):
            assert cost.total == pytest.approx(one.accepted_length / one.speedup.value)
            assert cost.drafting >= 0.0 <= cost.overhead and cost.verify >= 0.99


def test_missing_values_are_listed():
    found = diagnose(Observation(tokens_per_s=80.0))
    assert found.sentence.startswith("No diagnosis: mean accepted length and draft length k unknown")
    assert found.cause is None and "mean accepted length" in found.missing
    without_baseline = diagnose(Observation(k=4, accepted_length=2.0))
    assert "speed without speculation" in without_baseline.missing
    assert without_baseline.sentence.startswith("Expected to be faster (")


@pytest.mark.parametrize(
    ("length", "label"), [(2.0, "faster (1.49x"), (1.35, "about as fast (1.01x"), (1.2, "slower (0.89x")]
)
def test_an_unknown_speed_without_speculation_is_replaced_by_the_expected_one(length, label):
    found = diagnose(Observation(k=4, accepted_length=length))
    assert found.sentence.startswith(f"Expected to be {label} on an H100, not measured): a step is")
    assert (found.cause is None) == found.healthy == (length == 2.0)
    assert ("main cause" in found.sentence) == (length < 2.0)


def test_a_step_without_extra_cost_has_no_rate_that_breaks_even():
    found = diagnose(observation(tokens_per_s=201.0))
    assert found.break_even == 0.0
    assert "25 % of the draft tokens were accepted; no extra cost over plain decoding" in found.sentence


def test_the_speed_that_is_missing_is_named():
    found = diagnose(Observation(k=4, accepted_length=2.0, plain_tokens_per_s=60.0))
    assert "speed with speculation" in found.missing and "speed without speculation" not in found.missing
    assert found.notes[0].startswith("The speed with speculation is unknown")
    with pytest.raises(ValueError, match=r"^the baseline \(golden\) contains no tokens/s; give the speed itself$"):
        observation().merged(Observation(source="golden"))


def test_an_output_of_plain_decoding_is_a_baseline():
    assert (
        "this output is of plain decoding; use it as the baseline"
        in diagnose(Observation(accepted_length=1.0)).sentence
    )
    unknown = diagnose(Observation(accepted_length=2.0)).sentence
    assert unknown == (
        "No diagnosis: draft length k unknown; the mean accepted length of 2.00 needs a k of at least 1; give it too, "
        "or read another output of the engine."
    )


@pytest.mark.parametrize("length", [1.0, 1.3, 2.0, 4.0])
def test_sentence_and_recommendations_agree_on_turning_speculation_off(length):
    for speed in (20.0, 90.0, 97.0, 100.0, 103.0, 110.0, 200.0):
        found = diagnose(observation(accepted_length=length, tokens_per_s=speed))
        off = any(advice.startswith("Turn speculation off") for advice in found.recommendations)
        assert off == ("not worth it here" in found.sentence)
        assert not (off and found.healthy)


def test_a_cause_that_is_estimated_is_called_likely():
    assert "; likely main cause: drafting is too slow; " in diagnose(observation(tokens_per_s=50.0)).sentence
    faulty = diagnose(observation(tokens_per_s=50.0, random_prompts=True))
    assert "; main cause: the prompts are random tokens" in faulty.sentence


def test_a_speed_that_no_draft_can_reach_is_to_be_measured_again():
    for length in (1.0, 2.0):
        found = diagnose(observation(accepted_length=length, tokens_per_s=300.0))
        assert found.sentence.endswith("; impossible, so the two speeds are of different prompts or load.")
        (advice,) = found.recommendations
        assert advice.startswith("Measure both speeds again with the same prompts and load")


def test_sampling_error_of_the_length_is_shown():
    found = diagnose(Observation(by_position=(0.5, 0.25), steps=400, speedup=Estimate(1.2)))
    assert "yields 1.75 ± 0.08 tokens" in found.sentence
    assert any("Only 9 steps" in note for note in diagnose(Observation(by_position=(0.5,), steps=9)).notes)


GOOD, DEAD, HALF = Part(600.0, 460.0, 300.0, 85.0), Part(600.0, 0.0, 300.0, 30.0), Part(600.0, 200.0, 300.0, 40.0)


def slot(part, number):
    return Part(part.drafted, part.accepted, part.drafts, part.tokens_per_s, f"slot {number}")


@pytest.mark.parametrize(
    ("parts", "where", "counts"),
    [
        ([GOOD] * 5 + [DEAD] * 5, "since reading 6 of 10", (3000, 0)),
        ([DEAD] * 2 + [GOOD] * 8, "until reading 2 of 10", (1200, 0)),
        ([GOOD] + [DEAD] * 99, "since reading 2 of 100", (59400, 0)),
        ([GOOD] * 9 + [HALF], "since reading 10 of 10", (600, 200)),
        ([GOOD] * 4 + [HALF] * 4 + [DEAD] * 2, "since reading 9 of 10", (1200, 0)),  # what does not work comes first
        ([slot(GOOD, 0), slot(DEAD, 1), slot(GOOD, 2)] * 3, "in slot 1", (1800, 0)),
        ([GOOD, DEAD, GOOD, GOOD, DEAD, GOOD], "in 2 of 6 readings", (1200, 0)),
        ([Part(1200.0, 460.0, 0.0)] * 5 + [Part(1200.0, 0.0, 0.0)], "since reading 6 of 6", (1200, 0)),
        ([GOOD] * 10, None, None),
        ([DEAD] * 10, None, None),
        ([GOOD] * 5 + [Part(600.0, 300.0, 300.0)] * 5, None, None),  # prose after code
        ([GOOD] * 5 + [Part(150.0, 0.0, 75.0)], None, None),  # too few to tell
        ([Part(0.0, 0.0, 0.0)] * 5, None, None),
        ([GOOD], None, None),
    ],
)
def test_the_parts_that_accept_far_less_are_found(parts, where, counts):
    found = contrast(parts, "reading")
    assert (found and found.where) == where
    assert (found and (found.drafted, found.accepted)) == counts


def test_many_short_requests_do_not_differ_by_chance():
    rng = random.Random(0)
    requests = [Part(12.0, float(sum(rng.random() < 0.4 for _ in range(4))), 4.0) for _ in range(3000)]
    assert contrast(requests, "request") is None


def reading(length, accepted, drafted, speed, engine="000"):
    load = f"Engine {engine}: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: {speed} tokens/s"
    drafts = f"Mean acceptance length: {length}, Accepted throughput: {accepted / 10} tokens/s, "
    drafts += f"Drafted throughput: {drafted / 10} tokens/s, Accepted: {accepted} tokens, Drafted: {drafted} tokens, "
    shares = "0.850, 0.702" if accepted else "0.000, 0.000"
    return f"{load}, Running: 1 reqs\nSpecDecoding metrics: {drafts}Per-position acceptance rate: {shares}\n"


FALLING = [(2.9, 570, 600), (2.5, 450, 600), (2.2, 360, 600), (2.0, 300, 600)]


@pytest.mark.parametrize(
    ("readings", "fall"),
    [
        (FALLING + FALLING[-1:] * 2, "from 2.70 in the first third of the readings to 2.00 in the last"),
        (FALLING[::-1] + FALLING[:2], ""),  # it rises
        (FALLING, ""),  # too few readings
        (FALLING[1:2] * 2 + FALLING[:1] * 2 + FALLING[2:3] * 2, ""),  # not in every third
        ([(2.9, 570, 600)] * 3 + [(2.7, 510, 600)] * 3, ""),  # hardly
        ([(2.9, 57, 60), (2.5, 45, 60)] + [(2.0, 30, 60)] * 4, ""),  # too few draft tokens to tell
    ],
)
def test_readings_that_get_worse_with_time_are_told(readings, fall):
    notes = diagnose(read_output("".join(reading(*one, 50.0) for one in readings))).notes
    (found,) = [note for note in notes if note.startswith("The accepted length falls")] or [""]
    assert (fall in found and found.endswith("plain decoding is faster.")) if fall else not found


WORKS, STOPPED = (2.55, 517, 666, 85.0), (1.0, 0, 600, 30.0)
LOG = reading(*WORKS) * 5 + reading(*STOPPED) * 5


def test_a_drafter_that_stops_in_the_middle_of_a_log_is_the_fault_of_a_fast_run():
    """vLLM issue 58080: requests longer than the drafter's context."""
    found = diagnose(read_output(LOG).changed(plain_tokens_per_s=33.0))
    assert found.sentence.startswith("Faster (1.74x)") and found.cause.name == "stopped drafter"
    assert "fault: since reading 6 of 10, almost no draft token is accepted" in found.sentence
    assert found.cause.gain == pytest.approx(85.0 / 57.5)
    assert found.cause.evidence == (
        "0 of 3,000 draft tokens were accepted there, 78 % otherwise; 30 tokens/s (slower, 0.91x) there, "
        "85 tokens/s (faster, 2.58x) otherwise"
    )
    (change,) = changes(found)
    assert "max_model_len" in change and change.endswith("Then measure again.")
    json = found.as_dict()["observation"]
    assert json["contrast"][0] == "since reading 6 of 10"


def test_parts_are_named_without_a_diagnosis_and_without_a_speed():
    lines = "Decode batch, #running-req: 2, accept len: {}, gen throughput (token/s): {}, #queue-req: 0\n"
    text = lines.format(2.9, 150.0) * 5 + lines.format(1.0, 50.0) * 5
    found = diagnose(read_output(text))
    assert found.sentence.startswith("No diagnosis: draft length k unknown")
    assert found.notes[0].startswith("Since reading 6 of 10, 0 of 400 draft tokens were accepted there")
    assert diagnose(read_output(text).changed(k=3)).cause.name == "stopped drafter"
    engines = (reading(*WORKS) + reading(*STOPPED, "001")) * 3
    cause = diagnose(read_output(engines).changed(plain_tokens_per_s=50.0)).cause
    assert cause.title == "in Engine 001, almost no draft token is accepted" and "tokens/s" not in cause.evidence


def test_a_slot_whose_drafter_does_not_work_is_named():
    lines = "slot print_timing: id  {} | task 0 | {}\n"
    text = ""
    for number, accepted, ms in [(0, 200, 4000), (1, 1, 4000), (0, 210, 4000), (1, 0, 4000)]:
        tokens = accepted + 101
        speed = f"{ms}.0 ms / {tokens} tokens (9 ms per token, {1000 * tokens / ms:.2f} tokens per second)"
        drafts = f"0.5 ({accepted} accepted / 300 generated), mean len = {1 + accepted / 100}"
        text += lines.format(number, f" eval time = {speed}") + lines.format(number, f"draft acceptance = {drafts}")
    found = diagnose(read_output(text).changed(plain_tokens_per_s=40.0))
    assert found.cause.title == "in slot 1, almost no draft token is accepted"
    assert "1 of 600 draft tokens" in found.cause.evidence and "(slower, 0.63x) there" in found.cause.evidence
    lookup = diagnose(read_output(text).changed(plain_tokens_per_s=40.0, method="ngram-mod"))
    assert "stopped drafter" not in [cause.name for cause in lookup.causes]


def test_a_part_that_is_slower_than_plain_decoding_is_no_reason_to_change_nothing():
    text = reading(*WORKS) * 5 + reading(1.33, 110, 666, 40.0).replace("0.850, 0.702", "0.250, 0.080")
    found = diagnose(read_output(text).changed(plain_tokens_per_s=50.0))
    assert found.sentence.startswith("Faster (1.55x)")
    assert changes(found) == ["Check what differs since reading 6 of 6: it is slower than plain decoding there."]
    assert "Since reading 6 of 6, 110 of 666 draft tokens were accepted there, 78 % otherwise;" in why_report(found)
    assert changes(diagnose(read_output(text).changed(plain_tokens_per_s=40.0))) == [NOTHING]
