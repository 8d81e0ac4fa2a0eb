"""Parts of a run in which a drafter works worse: where they are, and what a diagnosis says of them."""

import random

import pytest

from specdemo.analysis.diagnose import diagnose
from specdemo.analysis.parts import Part, contrast
from specdemo.analysis.readers import read_output
from specdemo.bench.report import NOTHING, changes, why_report

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
