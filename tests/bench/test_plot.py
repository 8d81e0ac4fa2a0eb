"""Plots of results."""

import math
from dataclasses import replace

import pytest

from specdemo.bench.plot import figure
from specdemo.core.estimate import Estimate
from tests.ui.stand_ins import swept


def named(drawn):
    return {trace.name: trace for trace in drawn.data}


def bars(*lanes, **more):
    rows = [{"lane": lane, "speed-up": Estimate(x, x - 0.1, x + 0.2)} | more for lane, x in lanes]
    plain = {"lane": "Baseline", "speed-up": Estimate(1.0, 1.0, 1.0)}
    return replace(swept(), suite="methods", axis="lane", rows=[plain, *rows])


def test_a_line_per_lane_with_intervals_and_predictions():
    drawn = figure(swept())
    deep = "&lt;i&gt;deep&lt;/i&gt; &amp; co"
    traces = named(drawn)
    assert list(traces) == ["plain decoding", "wide", deep, f"{deep}, predicted"]
    wide = traces["wide"]
    row = next(row for row in swept().rows if (row["lane"], row["k"]) == ("wide", 2))
    assert list(wide.x) == [1, 2, 4, 8] and wide.y[1] == row["speed-up"].value
    assert wide.error_y.array[1] == pytest.approx(row["speed-up"].high - row["speed-up"].value)
    assert wide.error_y.arrayminus[1] == pytest.approx(row["speed-up"].value - row["speed-up"].low)
    assert traces[f"{deep}, predicted"].line.dash == "dash" and wide.line.dash is None
    assert list(traces["plain decoding"].y) == [1.0, 1.0]
    assert len({traces[name].marker.symbol for name in list(traces)[1:]}) == 3


@pytest.mark.parametrize("axis", ["batch", "prompt tokens"])
def test_doubling_values_get_a_logarithmic_axis(axis):
    drawn = figure(swept(axis, (1, 2, 4, 32)))
    assert drawn.layout.xaxis.type == "log" and drawn.layout.xaxis.ticktext == ("1", "2", "4", "32")
    assert figure(swept()).layout.xaxis.type is None


def test_lanes_are_compared_by_bars():
    drawn = figure(bars(("slow", 0.7), ("fast", 1.5), predicted=1.1))  # sorted by value
    bar, predicted = drawn.data
    assert list(bar.y) == ["fast", "slow"] and list(bar.x) == [1.5, 0.7] and bar.text == ("1.50×", "0.70×")
    assert len(set(bar.marker.color)) == 2
    assert list(predicted.x) == [1.1, 1.1]
    assert [line.x0 for line in drawn.layout.shapes] == [1.0]


def test_title_names_suite_machine_and_date():
    title = figure(swept()).layout.title.text
    assert "Speed-up over draft length" in title
    assert "Test CPU &lt;b&gt;, 1 thread, float32" in title and "suite k, 2026-11-21, commit 0123456<" in title


def test_categories_are_left_to_the_table():
    result = swept()
    more = [row | {"category": name} for row in result.rows for name in ("math", "all")]
    assert [len(trace.x) for trace in figure(replace(result, rows=more)).data] == [2, 4, 4, 4]


def test_a_figure_reads_on_any_background():
    layout = figure(swept()).layout
    assert layout.paper_bgcolor == layout.plot_bgcolor == "rgba(0,0,0,0)"
    assert layout.font.family.startswith("system-ui")


def test_more_lanes_than_colours():
    rows = [{"lane": f"lane {i}", "k": 1, "speed-up": Estimate(2.0, 2.0, 2.0)} for i in range(20)]
    assert len(figure(replace(swept(), rows=rows)).data) == 21


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
        figure(replace(swept(), rows=rows))


def test_conditions_that_are_not_known_are_left_out():
    title = figure(replace(swept(), environment={"commit": None, "device": math.nan})).layout.title.text
    assert "nan" in title and "commit" not in title and "None" not in title
