"""The results from which the README's chart, the table of methods and the recorded sweeps are made."""

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from benchmarks import readme
from benchmarks.chart import chart
from specdemo.bench.result import Result, read_result, recorded_suite, write_result
from specdemo.bench.sweeps import shipped_lanes
from specdemo.core.estimate import Estimate

PAGE = readme.PAGES["methods"]
PLACE = "# Title\n\n<!-- bench methods -->\nold text\n\n| old | table |\n<!-- end of bench methods -->\n\nMore.\n"
NOISE = ("CPU contention: this lane waited for 31 % of its time",)
RESULT = Result(
    "methods",
    3,
    {"target": "stories", "new_tokens": 96},
    {"device": "Test CPU", "threads": 1, "dtype": "float32", "commit": "0123456789abcdef", "date": "2026-11-24"},
    [
        {
            "lane": "Baseline",
            "tokens/s": Estimate(100.0, 99.0, 101.0),
            "speed-up": Estimate(1.0, 1.0, 1.0),
            "accepted": None,
            "tokens/pass": 1.0,
            "output": None,
        },
        {
            "lane": "fast",
            "tokens/s": Estimate(197.0, 190.0, 204.0),
            "speed-up": Estimate(1.974, 1.86, 2.071),
            "accepted": 0.5,
            "tokens/pass": 2.0,
            "output": "identical",
        },
    ],
    [],
    "lane",
)


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "presets" / "recorded" / "suites").mkdir(parents=True)
    (tmp_path / PAGE).parent.mkdir()
    (tmp_path / PAGE).write_text(PLACE, encoding="utf-8")
    return tmp_path


def recorded(result, checkout):
    write_result(result, checkout / "result.json")
    return readme.record(checkout / "result.json", checkout)


def test_table_and_recorded_sweep_come_from_one_result(checkout):
    assert recorded(RESULT, checkout) == RESULT
    assert read_result(checkout / "presets" / "recorded" / "suites" / "methods.json") == RESULT
    text = (checkout / PAGE).read_text(encoding="utf-8")
    assert text.startswith(
        "# Title\n\n<!-- bench methods -->\nTest CPU, 1 thread, float32, 2026-11-24, commit `0123456`"
    )
    assert "| fast | 197, 190 to 204 | 1.97x, 1.86 to 2.07 | 50% | 2.00 |\n| Baseline | 100, 99 to 101 | 1 |" in text
    assert "Every output is identical to that of plain decoding. | lane |" in " ".join(text.split())
    assert text.endswith("|\n<!-- end of bench methods -->\n\nMore.\n") and "old" not in text
    recorded(RESULT, checkout)
    assert (checkout / PAGE).read_text(encoding="utf-8") == text


def test_noise_and_an_output_that_differs_are_in_both(checkout):
    speed = replace(RESULT.rows[1]["speed-up"], reasons=NOISE)
    rows = [RESULT.rows[0], RESULT.rows[1] | {"speed-up": speed, "output": "7 identical, 1 differs"}]
    recorded(replace(RESULT, rows=rows), checkout)
    text = " ".join((checkout / PAGE).read_text(encoding="utf-8").split())
    assert f"Noisy machine, run again: a second run may not confirm 1 of 2 rows, such as fast: {NOISE[0]}." in text
    assert "Every output is identical" not in text
    stored = read_result(checkout / "presets" / "recorded" / "suites" / "methods.json")
    assert stored.rows[1]["speed-up"].reasons == NOISE


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"suite": "k"}, "this is suite k on stories; run python -m specdemo bench methods --repeats 3"),
        ({"config": {"target": "code"}}, "this is suite methods on code; run"),
        ({"config": {"target": "stories", "prompts": 2}}, "this result has custom prompts; run"),
        ({"repeats": 2}, "a recorded result needs a commit and at least 3 repeats; run"),
        ({"environment": RESULT.environment | {"commit": None}}, "a recorded result needs a commit"),
    ],
)
def test_a_result_that_cannot_be_recorded_changes_nothing(checkout, changes, line):
    with pytest.raises(ValueError, match=line):
        recorded(replace(RESULT, **changes), checkout)
    assert (checkout / PAGE).read_text(encoding="utf-8") == PLACE
    assert not [*(checkout / "presets" / "recorded" / "suites").iterdir()]


def test_a_page_without_a_place_is_one_line(checkout, capsys):
    (checkout / PAGE).write_text("# Title\n", encoding="utf-8")
    with pytest.raises(ValueError, match="has no place for the result; add <!-- bench methods -->"):
        recorded(RESULT, checkout)
    assert readme.main(["nothing.json"]) == 2
    assert capsys.readouterr().err.startswith("error: cannot read 'nothing.json'")


@pytest.mark.parametrize("suite", [*filter(recorded_suite, readme.COMMANDS)])
def test_the_page_of_a_suite_shows_what_is_recorded(suite):
    text = (readme.ROOT / readme.PAGES[suite]).read_text(encoding="utf-8")
    assert text.count(f"<!-- bench {suite} -->") == text.count(f"<!-- end of bench {suite} -->") == 1
    assert readme.section(recorded_suite(suite)) in text


def row(lane, category, speed_up):
    return {"model": "A & B", "category": category, "lane": lane, "speed-up": speed_up}


MODELS = replace(
    RESULT,
    suite="models",
    config={"prompts": 6, "new_tokens": 48},
    environment=RESULT.environment | {"versions": {"torch": "2.13"}},
    rows=[
        row(lane, category, speed_up)
        for category in ("chat", "code")
        for lane, speed_up in {
            "plain": Estimate(1.0, 1.0, 1.0),
            "n-gram": Estimate(2.0, 1.0, 4.0),
            "engine: plain": Estimate(0.5, 0.25, 1.0),
        }.items()
    ]
    + [row("layer skip", "chat", Estimate(9.0, 8.0, 10.0))],
)


def drawn(result, name):
    return ElementTree.fromstring(chart(result)).iter(f"{{http://www.w3.org/2000/svg}}{name}")


def test_the_chart_has_a_dot_and_an_interval_per_lane_that_ran_all_kinds():
    legend = 2
    dots = [[float(dot.get("cx")), float(dot.get("cy"))] for dot in drawn(MODELS, "circle")][legend:]
    lines = [line.get("d") for line in drawn(MODELS, "path") if line.get("stroke")]
    assert len(dots) == len(lines) == 4 and dots[0][0] < dots[1][0] < dots[2][0] < dots[3][0]
    ends = [[float(end) for end in re.findall(r"[\d.]+", line)] for line in lines]
    for (x, y), (line_x, bottom, top) in zip(dots, ends, strict=True):  # on a logarithmic scale
        assert x == line_x and y == pytest.approx((bottom + top) / 2, abs=0.11) and bottom > top
    assert dots[0][1] == dots[2][1] < dots[1][1] == dots[3][1]
    words = [text.text for text in drawn(MODELS, "text")]
    assert words[:5] == ["n-gram", "engine: plain", "chat", "code", "A & B"]


def test_the_readme_has_the_chart_and_its_conditions(tmp_path):
    (tmp_path / "presets" / "recorded" / "suites").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(PLACE.replace("methods", "models"), encoding="utf-8")
    recorded(MODELS, tmp_path)
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert f": A & B]({readme.CHART})\n\nTest CPU, torch 2.13, 2026-11-24, commit `0123456`, 6 prompts" in text
    assert (tmp_path / readme.CHART).read_text(encoding="utf-8") == chart(MODELS)


def test_the_chart_is_that_of_the_recorded_result():
    assert (readme.ROOT / readme.CHART).read_text(encoding="utf-8") == chart(recorded_suite("models"))


def test_the_recorded_sweep_has_every_lane_of_the_suite():
    assert [row["lane"] for row in recorded_suite("methods").rows[1:]] == [lane.name for lane in shipped_lanes()]
