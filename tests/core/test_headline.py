"""The one-sentence result of a comparison."""

from dataclasses import asdict

import pytest

from specdemo.core.headline import headline, settled
from specdemo.core.trace import LaneTrace, RunTrace


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
        ([(0.8, 0.7, 0.9)], "Plain decoding is faster: A is 0.80x as fast (95 % interval 0.70 to 0.90)."),
        (
            [(3.8, 3.6, 4.0), (3.7, 3.5, 3.9)],
            "No clear difference between A (3.80x) and B (3.70x); both are faster than plain decoding.",
        ),
        ([(1.1, 0.9, 1.3)], "No clear difference between A (1.10x) and plain decoding."),
        ([(3.8, 3.6, 4.0), (3.7, 0.9, 9.0)], "No clear difference between A (3.80x) and B (3.70x)."),
    ],
)
def test_the_sentence(speeds, sentence):
    assert headline(trace(*speeds)).sentence == f"{sentence} Output: identical."


def test_outputs_that_differ_are_listed_by_lane():
    run = trace((3.8, 3.7, 3.9), (2.6, 2.5, 2.7))
    run.comparison[1]["verdict"] = "lossy"
    assert headline(run).sentence.endswith(". Output: A identical, B lossy.")
    assert headline(run).caption.endswith(", output A identical, B lossy")


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
