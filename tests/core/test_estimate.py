"""Confidence intervals: values, widths and labels."""

import random
from dataclasses import replace
from math import sqrt
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdemo.core import timing_spread
from specdemo.core.definitions import DEFINITIONS, by_key, table
from specdemo.core.estimate import (
    Estimate,
    RunTiming,
    fastest,
    over_repeats,
    rate,
    speedup,
    t_quantile,
    waited_share,
)
from specdemo.engine.clock import WAITED_SHARE

STEADY = [(0, 3.0)] * 60
DRAFTING = [(4, 6.0), (4, 6.0), (2, 5.0)] * 8


def timed(steps, tokens=60, **more):
    return RunTiming(steps, tokens, **more)


def slower_from(steps, share, by):
    """Return the steps with those after the fraction `share` slowed down by the factor `by`."""
    return [(size, ms * (by if index >= share * len(steps) else 1.0)) for index, (size, ms) in enumerate(steps)]


@pytest.mark.parametrize(("freedom", "t"), [(1, 12.706), (2, 4.303), (3, 3.182), (6, 2.447), (10, 2.228), (100, 1.984)])
def test_students_t(freedom, t):
    assert t_quantile(freedom) == pytest.approx(t, rel=2e-3)


OTHER_PROGRAMS = "as when other programs run; close those, or set fewer threads than cores"


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ([Estimate(1.0, 0.9, 1.1), Estimate(2.0, 1.9, 2.1)], [1]),
        ([Estimate(1.95, 1.8, 2.0), Estimate(2.0, 1.9, 2.1), Estimate(1.0, 0.5, 1.5)], [1, 0]),
        ([Estimate(1.0), Estimate(2.0, 1.9, 2.1)], [1, 0]),
        ([Estimate(1.0, 0.9, 1.1), Estimate(2.0)], [1, 0]),
    ],
)
def test_fastest_lists_all_that_overlap_the_greatest_value(speeds, expected):
    assert fastest(speeds) == expected


def test_steps_that_differ_by_their_shape_alone_are_known_exactly():
    seen = speedup([timed(STEADY)], [timed(DRAFTING)], shared=True)
    assert seen.value == pytest.approx(180.0 / 136.0)
    assert seen.low == pytest.approx(seen.value) == seen.high and seen.label == "faster"
    assert rate([timed(STEADY)]).value == pytest.approx(1000.0 / 3.0)


def test_shared_slowdown_widens_interleaved_intervals_less():
    """The machine is 1.5 times as slow in the second half of the race, equally for both lanes."""
    plain, lane = (timed(slower_from(steps, 0.5, 1.5)) for steps in ([(0, 3.0)] * 60, [(4, 6.0)] * 30))
    shared, separate = (speedup([plain], [lane], together) for together in (True, False))
    assert shared.value == pytest.approx(1.0) and shared.width < 0.05 < 0.2 < separate.width
    assert shared.label == separate.label == "no clear difference"


def test_a_drift_widens_the_interval_of_lanes_that_ran_one_after_the_other():
    """Every step takes longer than the one before. The second lane is slower for that reason, and its interval must
    contain 1.
    """
    times = [3.0 * (1.0 + 0.002 * i) for i in range(120)]
    plain, lane = ([(0, ms) for ms in times[:60]], [(0, ms) for ms in times[60:]])
    seen = speedup([timed(plain)], [timed(lane)], shared=False)
    assert seen.value < 0.95 and seen.low < 1.0 < seen.high


def test_a_thread_that_waited_widens_the_interval():
    alone, contended = (speedup([timed(STEADY, waited_ms=ms)], [timed(DRAFTING)], True) for ms in (0.0, 180.0))
    assert alone.width < 1e-6 and contended.width == pytest.approx(0.025, rel=0.01)
    assert waited_share([timed(STEADY, waited_ms=180.0)]) == 0.5 and waited_share([timed(STEADY)]) is None


def disturbed_lanes(seed, schedule, share, begin, end):
    """Return plain decoding and a lane on a simulated wall clock, and their true ratio without the second program.

    That program takes bursts of 10 ms, `share` of a core, from `begin` to `end` of the race. A step waits for them.
    """
    rng, now, wander = random.Random(seed), 0.0, 0.0
    lanes, tokens, clocks, true_ms = ([], []), [0, 0], [0.0, 0.0], [0.0, 0.0]
    while min(tokens) < 120:
        left = [lane for lane in (0, 1) if tokens[lane] < 120]
        lane = min(left, key=lambda i: clocks[i]) if schedule == "race" else left[0]
        nodes = rng.choice((0, 4, 4, 4)) if lane else 0
        wander = 0.9 * wander + rng.gauss(0.0, 0.02)
        work, ms, waited = (20.0 + 0.5 * nodes) * (1.0 + wander + rng.gauss(0.0, 0.02)), 0.0, 0.0
        while work > 0.0:
            time = now + ms
            taken = 3600.0 * begin <= time < 3600.0 * end and time % (10.0 / share) < 10.0
            speed = rng.choice((0.2, 0.5)) if taken else 1.0
            passed = min(4.0, work / speed)
            work, ms, waited = work - speed * passed, ms + passed, waited + 0.8 * (1.0 - speed) * passed
        lanes[lane].append((nodes, ms, waited >= WAITED_SHARE * ms))
        now, clocks[lane], true_ms[lane] = now + ms, clocks[lane] + ms, true_ms[lane] + 20.0 + 0.5 * nodes
        tokens[lane] += rng.choice((1, 2, 3, 3)) if nodes else 1
    marks = [frozenset(index for index, step in enumerate(lane) if step[2]) for lane in lanes]
    runs = [timed([step[:2] for step in lanes[i]], tokens[i], disturbed=marks[i]) for i in (0, 1)]
    return *runs, tokens[1] / true_ms[1] * true_ms[0] / tokens[0]


@pytest.mark.parametrize(
    ("schedule", "share", "begin", "end"),
    [("race", 0.2, 0.5, 9.0), ("race", 1.0, 0.6, 9.0), ("race", 1.0, 0.3, 0.5), ("sequential", 0.2, 0.0, 0.6)],
)
def test_intervals_cover_the_truth_while_a_second_program_starts_and_stops(schedule, share, begin, end):
    """The times of marked steps do not count; with them the values are wrong."""
    covered, errors, unmarked_errors = [], [], []
    for seed in range(60):
        plain, lane, truth = disturbed_lanes(seed, schedule, share, begin, end)
        assert plain.disturbed or lane.disturbed
        seen = speedup([plain], [lane], schedule == "race")
        unmarked = (replace(run, disturbed=frozenset()) for run in (plain, lane))
        covered.append(seen.low <= truth <= seen.high)
        errors.append(seen.value / truth - 1.0)
        unmarked_errors.append(speedup(*([run] for run in unmarked), schedule == "race").value / truth - 1.0)
    assert fmean(covered) >= 0.9 and abs(fmean(errors)) < 0.01
    assert abs(fmean(unmarked_errors)) > 0.03


def test_a_lane_that_was_disturbed_all_the_time_has_no_interval():
    plain, lane, _ = disturbed_lanes(1, "race", 1.0, 0.0, 99.0)
    seen = speedup([plain], [lane], True)
    assert seen.low is None and rate([lane]).low is None
    reasons = timing_spread.reasons([plain], [lane], seen)
    assert "CPU contention: other programs took the cores in 100 % of the steps of this lane" in reasons


def test_few_steps_have_no_interval_but_several_runs_do():
    few = timed([(0, 3.0)] * 3, 3)
    assert speedup([few], [few], True) == Estimate(1.0) and rate([few]).low is None
    runs = [timed([(0, 3.0 + 0.1 * i)] * 3, 3) for i in range(3)]
    assert rate(runs).low < rate(runs).value < rate(runs).high


def test_ratios_of_several_runs_are_pooled_and_not_averaged():
    plain = [timed([(0, 10.0)] * 10, 10), timed([(0, 30.0)] * 10, 10)]
    lane = [timed([(0, 10.0)] * 10, 10), timed([(0, 10.0)] * 10, 10)]
    assert speedup(plain, lane, True).value == pytest.approx(2.0)  # of runs 1 and 3: 400 ms / 200 ms
    lane[1] = timed([(0, 20.0)] * 10, 10)
    assert speedup(plain, lane, True).value == pytest.approx(4 / 3)  # of runs 1 and 1.5, whose mean is 1.25


@pytest.mark.parametrize("ms", [0.0, 5e-324, 1e308, 1.7e308])
def test_impossible_times_give_no_interval_or_no_estimate(ms):
    run = timed([(0, ms), (4, ms)] * 10, 20)
    seen = speedup([timed(STEADY)], [run], True)
    assert seen is None or seen.low is None or 0.0 <= seen.low <= seen.high


def test_a_number_that_was_measured_several_times():
    assert over_repeats([2.0, 4.0]) == Estimate(3.0)  # two repeats give no spread
    assert over_repeats([1.0, 0.0, 2.0]) == Estimate(1.0)
    assert over_repeats([1.5] * 3) == Estimate(1.5, 1.5, 1.5)
    estimate = over_repeats([1.0, 2.0, 4.0])  # ln 2 apart; t = 4.303 for two degrees of freedom
    assert estimate.value == 2.0 and estimate.high == pytest.approx(2.0 * 2.0 ** (4.3027 / 3**0.5), rel=1e-3)
    assert estimate.low * estimate.high == pytest.approx(4.0, rel=1e-3)


STEPS = st.lists(st.tuples(st.integers(0, 8), st.floats(0.5, 50.0)), min_size=1, max_size=40)
RUN = st.builds(RunTiming, STEPS, st.integers(1, 200), st.sampled_from([0.0, 7.0]), st.sampled_from([None, 0.0, 90.0]))


def strictly_inside(estimate):
    """Return whether the estimate is the middle of its interval on a logarithmic scale, or the interval is a point."""
    if estimate is None or estimate.low is None:
        return True
    point = estimate.high - estimate.low <= 1e-9 * estimate.value
    middle = sqrt(estimate.low * estimate.high) == pytest.approx(estimate.value, rel=1e-6)
    return middle and (point or estimate.low < estimate.value < estimate.high)


@given(runs=st.lists(st.tuples(RUN, RUN), min_size=1, max_size=6), shared=st.booleans())
def test_a_speed_and_a_speedup_lie_strictly_inside_their_intervals(runs, shared):
    plain, lane = zip(*runs, strict=True)
    assert strictly_inside(rate(lane))
    assert strictly_inside(speedup(plain, lane, shared))


@given(st.lists(st.floats(0.1, 1000.0), min_size=1, max_size=8))
def test_a_repeated_number_lies_strictly_inside_its_interval(values):
    """A rounded end may equal the rounded value only where the interval is narrower than the rounding."""
    seen = over_repeats(values)
    assert seen.low is None or seen.low < seen.value < seen.high or seen.high - seen.low <= 3e-4


def test_number_formatting():
    assert Estimate(1.974, 1.86, 2.071).format() == "1.97x, 1.86 to 2.07"
    assert Estimate(7.5).format() == "7.50x" and Estimate(7.5).label == "no clear difference"
    assert Estimate(0.8, 0.7, 0.9).label == "slower"


@pytest.mark.parametrize(
    ("plain", "lane", "reasons"),
    [
        (timed(STEADY), timed(DRAFTING), []),
        (timed(STEADY), timed(DRAFTING, waited_ms=61.1), ["CPU contention: this lane waited for 31 % of its time"]),
        (timed(STEADY, waited_ms=60.0), timed(DRAFTING), ["CPU contention: the baseline waited for 25 % of its time"]),
        (timed([(0, 3.0), (0, 7.0)] * 30), timed(DRAFTING), [f"baseline step time varied by 80 %, {OTHER_PROGRAMS}"]),
        (
            timed([(0, 3.0), (0, 7.0)] * 30, waited_ms=0.0),  # of one thread
            timed(DRAFTING),
            ["baseline step time varied by 80 %, as when other programs run; close those"],
        ),
        (timed(slower_from(STEADY, 0.7, 1.3)), timed(DRAFTING), ["the baseline became 30 % slower during the run"]),
        (timed(STEADY), timed([(4, 2.0)] * 20), ["implausible timing: a speculative step cost only 0.67 plain tokens"]),
    ],
)
def test_noise_is_named(plain, lane, reasons):
    found = timing_spread.reasons([plain], [lane], Estimate(speedup([plain], [lane], True).value))
    assert [*found] == reasons


def test_a_wide_interval_is_named():
    assert [*timing_spread.wide_interval(Estimate(2.0, 1.5, 2.5))] == ["wide interval, 1.50 to 2.50"]
    assert not [*timing_spread.wide_interval(Estimate(2.0, 1.9, 2.1))] and not [
        *timing_spread.wide_interval(Estimate(2.0))
    ]


def test_every_number_of_a_summary_and_of_a_comparison_is_defined():
    from specdemo.core.tally import summarise
    from specdemo.core.trace import compare
    from tests.traces import plain_lane

    lane = plain_lane()
    known = {*by_key(), "lane"}
    assert {*summarise(lane)} <= known and {*compare(lane, lane, True)} <= known
    assert all(f"| {name} | " in table() for name in DEFINITIONS)
