"""Charts of results."""

from dataclasses import replace

import pytest

from specdemo.bench.plot import chart
from specdemo.core.estimate import Estimate
from tests.ui.stand_ins import swept


def bars(*lanes, **more):
    rows = [{"lane": lane, "speed-up": Estimate(x, x - 0.1, x + 0.2)} | more for lane, x in lanes]
    plain = {"lane": "Baseline", "speed-up": Estimate(1.0, 1.0, 1.0)}
    return replace(swept(), suite="methods", axis="lane", rows=[plain, *rows])


def test_a_line_per_lane_with_intervals_and_predictions():
    drawn = chart(swept())
    deep = "<i>deep</i> & co"
    wide, *_, predicted = drawn["lines"]
    assert [line["name"] for line in drawn["lines"]] == ["wide", deep, f"{deep}, predicted"]
    row = next(row for row in swept().rows if (row["lane"], row["k"]) == ("wide", 2))
    assert drawn["places"] == [1, 2, 4, 8] and wide["points"][1] == [2, row["speed-up"].value]
    assert wide["band"][1] == [2, row["speed-up"].low, row["speed-up"].high]
    assert predicted["dashed"] and not wide.get("dashed") and predicted["series"] == drawn["lines"][1]["series"]
    assert (drawn["level"], drawn["baseline"]) == (1.0, "plain decoding")


@pytest.mark.parametrize("axis", ["batch", "prompt tokens"])
def test_doubling_values_get_a_logarithmic_axis(axis):
    drawn = chart(swept(axis, (1, 2, 4, 32)))
    assert drawn["doubling"] and drawn["places"] == [1, 2, 4, 32]
    assert not chart(swept())["doubling"] and not chart(swept(axis, (0, 1, 2, 4)))["doubling"]


def test_lanes_are_compared_by_bars():
    slow, fast = 0.7, 1.5
    drawn = chart(bars(("slow", slow), ("fast", fast), predicted=1.1))  # sorted by value
    assert [group["name"] for group in drawn["groups"]] == ["fast", "slow"]
    (first,), (last,) = (group["bars"] for group in drawn["groups"])
    assert (first["value"], first["low"], first["high"], first["predicted"]) == (fast, fast - 0.1, fast + 0.2, 1.1)
    assert first["series"] != last["series"] and drawn["level"] == 1.0


def test_words_on_the_axis_are_bars_of_a_lane_and_the_best_lane_is_first():
    speeds = {("off", "slow"): 0.9, ("off", "fast"): 1.2, ("on", "slow"): 1.1, ("on", "fast"): 2.0}
    rows = [
        {"lane": lane, "thinking": on, "speed-up": Estimate(x, x - 0.1, x + 0.1)} for (on, lane), x in speeds.items()
    ]
    groups = chart(replace(swept(), suite="thinking", axis="thinking", rows=rows))["groups"]
    best = [max(bar["value"] for bar in group["bars"]) for group in groups]
    assert best == sorted(best, reverse=True) and [bar["name"] for bar in groups[0]["bars"]] == ["off", "on"]
    colours = {(bar["name"], bar["series"]) for group in groups for bar in group["bars"]}
    assert len(colours) == len({name for name, _ in colours})  # one colour for each kind


def test_title_and_description_name_the_axis_and_the_lanes():
    drawn = chart(swept())
    assert drawn["title"] == "Speed-up over draft length" and drawn["label"].startswith(f"{drawn['title']}: wide, ")


def test_categories_are_left_to_the_table():
    result = swept()
    more = [row | {"category": name} for row in result.rows for name in ("math", "all")]
    assert [len(line["points"]) for line in chart(replace(result, rows=more))["lines"]] == [4, 4, 4]


def test_more_lanes_than_colours():
    rows = [{"lane": f"lane {i}", "k": 1, "speed-up": Estimate(2.0, 2.0, 2.0)} for i in range(20)]
    lines = chart(replace(swept(), rows=rows))["lines"]
    assert len(lines) == 20 and all(line["series"] for line in lines)  # 0 is plain decoding


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"lane": "wide", "tokens/s": Estimate(1.0, 1.0, 1.0)}],
        [{"lane": "wide", "k": "<b>", "speed-up": Estimate(2.0, 2.0, 2.0)}],
        [{"k": 1, "speed-up": Estimate(2.0, 2.0, 2.0)}, {"lane": "wide", "k": 1, "speed-up": "2"}],
        [{"lane": "Baseline", "k": 1, "speed-up": Estimate(1.0, 1.0, 1.0)}],
    ],
)
def test_no_plot_without_speed_up(rows):
    with pytest.raises(ValueError, match="suite k measures no speed-up"):
        chart(replace(swept(), rows=rows))
