"""The one-sentence result of a comparison."""

from dataclasses import asdict

import pytest

from specdemo.core.headline import LOOPS, headline, loops, settled
from specdemo.core.tally import summarise
from specdemo.core.trace import LaneTrace, RunTrace, StepEvent, compare, from_json, to_json


def trace(*speeds, finish=None, verdicts="identical"):
    """Return a comparison with one speed-up, or (value, low, high), per speculative lane.

    finish: finish reasons by lane name, `length` for the others.
    """
    names = [chr(ord("A") + i) for i in range(len(speeds))]
    lanes = [
        LaneTrace(name, "ngram", {}, True, [1], [], "", (finish or {}).get(name, "length"), [])
        for name in ("Baseline", *names)
    ]
    rows = []
    for name, speed in zip(names, speeds, strict=True):
        value, low, high = speed if isinstance(speed, tuple) else (speed, None, None)
        rows.append({"lane": name, "speedup": value, "speedup_low": low, "speedup_high": high, "verdict": verdicts})
    return RunTrace("demo", {"temperature": 0.0}, {}, "race", lanes, rows)


def result(*speeds, **more):
    found = headline(trace(*speeds, **more))
    return found and (found.lane, found.tone, found.caption)


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ([(1.8, 1.7, 1.9)], (1, "gain", "A is 1.80x as fast as plain decoding (1.70 to 1.90)")),
        (
            [(2.6, 2.5, 2.7), (3.3, 3.2, 3.4), (3.8, 3.7, 3.9)],
            (3, "gain", "C is fastest: 3.80x as fast as plain decoding (3.70 to 3.90)"),
        ),
        (
            [(3.8, 3.7, 3.9), (2.6, 2.5, 2.7)],
            (1, "gain", "A is fastest: 3.80x as fast as plain decoding (3.70 to 3.90)"),
        ),
        (
            [(3.8, 3.6, 4.0), (3.7, 3.5, 3.9), (2.0, 1.9, 2.1)],
            (1, "", "No clear difference between A (3.80x) and B (3.70x); both are faster than plain decoding"),
        ),
        (
            [(3.8, 3.6, 4.0), (3.7, 3.5, 3.9), (3.6, 3.5, 3.9)],
            (
                1,
                "",
                "No clear difference between A (3.80x), B (3.70x) and C (3.60x); all are faster than plain decoding",
            ),
        ),
        ([(1.05, 0.9, 1.2)], (1, "", "No clear difference between A (1.05x) and plain decoding")),
        ([(0.97, 0.9, 1.04), (0.5, 0.4, 0.6)], (1, "", "No clear difference between plain decoding and A (0.97x)")),
        ([(0.8, 0.75, 0.85)], (1, "bad", "Plain decoding is faster: A is 0.80x as fast (0.75 to 0.85)")),
        (
            [(0.6, 0.5, 0.7), (0.8, 0.75, 0.85)],
            (2, "bad", "Plain decoding is fastest: B is 0.80x as fast (0.75 to 0.85)"),
        ),
        ([7.5], (1, "", "No clear difference between A (7.50x) and plain decoding")),  # too few steps for an interval
        ([(3.8, 3.7, 3.9), 1.2], (1, "", "No clear difference between A (3.80x) and B (1.20x)")),
    ],
)
def test_the_winner_is_named_only_where_its_interval_is_separate(speeds, expected):
    lane, tone, line = expected
    assert result(*speeds) == (lane, tone, f"{line}, output identical")


@pytest.mark.parametrize(
    ("speeds", "sentence"),
    [
        ([(1.8, 1.7, 1.9)], "A is 1.80x as fast as plain decoding (95 % interval 1.70 to 1.90)."),
        (
            [(3.8, 3.6, 4.0), (3.7, 3.5, 3.9)],
            "No clear difference between A (3.80x) and B (3.70x); both are faster than plain decoding.",
        ),
    ],
)
def test_the_sentence(speeds, sentence):
    assert headline(trace(*speeds)).sentence == f"{sentence} Output: identical."


def test_outputs_that_differ_are_listed_by_lane():
    run = trace((3.8, 3.7, 3.9), (2.6, 2.5, 2.7))
    run.comparison[1]["verdict"] = "lossy"
    assert headline(run).sentence.endswith(". Output: A identical, B lossy.")
    assert headline(run).caption.endswith(", outputs: A identical, B lossy")


def test_the_same_bits_are_named_as_such():
    run = trace((2.0, 1.9, 2.1))
    run.comparison[0]["bit_for_bit"] = True
    assert headline(run).sentence.endswith("Output: identical, bit for bit.")
    run.comparison[0]["bit_for_bit"] = False
    assert headline(run).sentence.endswith("Output: identical.")


def test_lanes_with_the_same_name_show_their_number():
    run = trace((3.8, 3.7, 3.9), (2.6, 2.5, 2.7))
    run.lanes[2].name = "A"
    assert headline(run).caption.startswith("A (lane 1) is fastest: ")


@pytest.mark.parametrize("name", ["Baseline", "A", "B"])
def test_a_stopped_run_has_no_verdict(name):
    run = trace((2.0, 1.9, 2.1), (3.0, 2.9, 3.1), finish={name: "cancelled"})
    assert asdict(headline(run)) == {
        "lane": 2,
        "tone": "",
        "caption": "B is 3.00x as fast as plain decoding so far",
        "sentence": "No verdict, because not all lanes finished; so far: A (2.00x) and B (3.00x).",
    }
    assert not any(settled(run, lane) for lane in run.lanes[1:])


def test_a_lane_that_failed_does_not_compete():
    assert result((2.0, 1.9, 2.1), (3.0, 2.9, 3.1), finish={"B": "error"}) == (
        1,
        "gain",
        "A is 2.00x as fast as plain decoding (1.90 to 2.10), output identical",
    )
    assert result((2.0, 1.9, 2.1), finish={"Baseline": "error"}) is None


def test_without_a_speed_up_there_is_no_headline():
    assert result() is None
    assert result(None) is None


def timed(prompt_ms, step_ms, tokens=21):
    """Return a lane with a prefill and steps of one token."""
    times = [{"prefill": prompt_ms}, *[{"verify": step_ms}] * (tokens - 1)]
    events = [StepEvent(i, [[]], [[]], [[0]], [[7]], [[]], [[]], ms) for i, ms in enumerate(times)]
    lane = LaneTrace(f"{step_ms} ms", "none", {}, True, [1], [7] * tokens, "a" * tokens, "length", events)
    lane.pieces = ["a"] * tokens
    lane.summary = summarise(lane)
    return lane


def raced(*lanes):
    rows = [compare(lanes[0], lane, greedy=True) | {"verdict": "identical"} for lane in lanes[1:]]
    return RunTrace("demo", {"temperature": 0.0}, {}, "race", [*lanes], rows)


@pytest.mark.parametrize(
    ("prompt_ms", "step_ms", "more"),
    [
        (100.0, 5.0, ", 1.50x in all with the prompt"),
        (100.0, 20.0, ", 0.60x in all with the prompt"),
        (24.0, 5.0, ", 1.81x in all with the prompt"),  # 19 % of the lane's time, 11 % of the baseline's
        (9.0, 5.0, ""),
        (0.0, 5.0, ""),
    ],
)
@pytest.mark.parametrize("repeats", [0, 2])
def test_the_speed_up_in_all_counts_the_prompt_where_it_matters(prompt_ms, step_ms, more, repeats):
    lanes = timed(prompt_ms, 10.0), timed(prompt_ms, step_ms)
    for lane in lanes:
        lane.repeats = [lane.events] * repeats
    found = headline(raced(*lanes))
    decoding = f"{10.0 / step_ms:.2f}x as fast"
    assert decoding in found.caption and decoding in found.sentence
    assert found.caption.partition(", output")[0].endswith(more or ")")
    assert ("in all" in found.sentence) is bool(more) is (more in found.sentence and bool(more))


def test_the_speed_up_in_all_needs_prompts_of_which_both_lanes_read_as_much():
    lanes = timed(100.0, 10.0), timed(100.0, 5.0)
    lanes[0].events[0].notes["kept"] = 90.0
    assert "in all" not in headline(raced(*lanes)).sentence
    lanes[1].events[0].notes["kept"] = 90.0
    assert "in all" in headline(raced(*lanes)).sentence


def test_texts_of_different_lengths_are_compared_in_tokens_per_time():
    found = headline(raced(timed(100.0, 10.0, 41), timed(100.0, 10.0, 21)))
    assert "No clear difference" in found.caption  # the shorter text took less time


HAPPY = [5, 8, 2, 8, 1]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([3, 4, *HAPPY * 7], True),
        ([*range(40), *HAPPY * 7, 5, 8], True),  # cut by the limit inside a round
        ([9] * 32, True),
        ([9] * 31, False),
        ([*HAPPY * 7, 7], False),  # it went on
        ([*range(20)] * 3, False),  # a table with three equal rows
        ([-1] * 90, False),  # a server sends no ids
        ([], False),
    ],
)
def test_a_text_that_loops_is_recognised(tokens, expected):
    assert loops(tokens) is expected


def test_a_gain_on_a_text_that_loops_is_not_typical_and_a_loss_needs_no_such_words():
    run = trace((1.8, 1.7, 1.9))
    run.lanes[0].token_ids = HAPPY * 8
    assert headline(run).caption == f"A is 1.80x as fast as plain decoding (1.70 to 1.90); {LOOPS}, output identical"
    assert f"; {LOOPS}. Output" in headline(run).sentence
    run.comparison[0].update(speedup=0.8, speedup_low=0.75, speedup_high=0.85)
    assert LOOPS not in headline(run).sentence


def test_lanes_with_different_prompts_have_no_speed_up_and_no_verdict():
    plain, lane = timed(1.0, 10.0), timed(1.0, 5.0)
    for change in ({"prompt_ids": [2]}, {"messages": [{"role": "user", "content": "Why?"}]}):
        other = LaneTrace(**{name: getattr(lane, name) for name in lane.__slots__} | change)
        trace = raced(plain, other)
        row = trace.comparison[0]
        assert row["speedup"] is row["identical"] is None
        trace.comparison[0] = compare(plain, lane, greedy=True) | {"verdict": "differs"}  # as older versions wrote it
        read = from_json(to_json(trace))
        assert read.comparison[0]["speedup"] is None and read.comparison[0]["verdict"] == "unknown"
        found = headline(read)
        assert (found.tone, found.caption) == ("", "No verdict, because the lanes answered different prompts")
