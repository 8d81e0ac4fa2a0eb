"""Result files, and files of other kinds that are rejected."""

import json
from dataclasses import replace

import pytest

from specdemo.bench import plot
from specdemo.bench.report import bench_report
from specdemo.bench.result import Result, best, intervals, read_result, write_result
from specdemo.core.estimate import Estimate
from specdemo.core.safe_io import FILE_BYTES

RESULT = Result(
    "k",
    3,
    {"target": "stories"},
    {"device": "CPU <1>", "threads": 1, "dtype": "float32", "commit": "abc"},
    [
        {
            "lane": "a",
            "k": 1,
            "tokens/s": Estimate(3.0, 2.0, 4.0),
            "speed-up": Estimate(1.5, 1.4, 1.6, ("it waited",)),
            "predicted": 1.5,
        }
    ],
    ["Fine."],
    "k",
)


def stored(**changes):
    return json.dumps({"schema": 1, "suite": "k", "repeats": 1, "config": {}, "environment": {}, "rows": []} | changes)


def test_a_result_comes_back_as_it_was(tmp_path):
    write_result(RESULT, tmp_path / "r.json")
    assert read_result(tmp_path / "r.json") == RESULT
    assert read_result(str(tmp_path / "r.json")) == RESULT
    assert read_result((tmp_path / "r.json").read_text(encoding="utf-8")) == RESULT


def test_fewer_than_three_repeats_have_no_brackets():
    assert "[" not in bench_report(sped(1, a=Estimate(7.5)))


def sped(repeats=3, **speeds):
    rows = [{"lane": name, "speed-up": speed} for name, speed in speeds.items()]
    return Result("methods", repeats, {}, {"device": "d", "threads": 1, "dtype": "t"}, rows, [], "lane")


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (
            sped(a=Estimate(2.0, 1.9, 2.1), b=Estimate(1.5, 1.4, 1.6)),
            "fastest: a, 2.00x plain decoding (1.90 to 2.10).",
        ),
        (
            sped(a=Estimate(2.0, 1.9, 2.1), b=Estimate(1.9, 1.8, 2.0)),
            "no clear difference between the fastest, a and b:",
        ),
        (sped(a=Estimate(1.02, 0.9, 1.1), b=Estimate(0.9, 0.8, 1.0)), "nothing was clearly faster"),
        (sped(1, a=Estimate(7.5), b=Estimate(1.5)), "measured 1 time; 3 repeats are needed to find the best."),
        (sped(a=Estimate(1.0, 1.0, 1.0)), ""),
    ],
)
def test_a_best_one_is_named_only_where_it_is_separated(result, words):
    assert best(result).startswith(words)


@pytest.mark.parametrize("repeats", [2, 3])
def test_quartiles_of_an_older_result_are_no_interval(repeats):
    """Quartiles contain half of the repeats; the median of three repeats can equal one of them."""
    lanes = [{"lane": name, "speed-up": dict(zip(("median", "q1", "q3"), speeds, strict=True))} for name, speeds in OLD]
    where = {"device": "d", "threads": 1, "dtype": "t"}
    old = read_result(stored(suite="methods", repeats=repeats, environment=where, rows=lanes, axis="lane"))
    assert [row["speed-up"] for row in old.rows] == [Estimate(1.0), Estimate(1.0574), Estimate(1.3713)]
    assert not intervals(old)
    report = bench_report(old)
    assert "95 % intervals |" not in report and "[" not in report
    words = {2: "measured 2 times; ", 3: "measured before 95 % intervals were; run it again"}
    assert best(old).startswith(words[repeats])


OLD = [("Baseline", [1.0] * 3), ("medusa", [1.0574, 1.0558, 1.3662]), ("eagle", [1.3713, 1.367, 1.4301])]


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("none.json", "cannot read 'none.json': No such file or directory"),
        ("a\0b", "cannot read "),
        (b"[]", "not a specdemo result: the file: "),
        (b"\xff", "not a specdemo result: the file: "),
        (stored(schema=2), "not a specdemo result: schema: "),
        (stored(repeats=0), "not a specdemo result: repeats: "),
        (stored(rows=[{"a": [1]}]), "not a specdemo result: rows.0.a."),
        (stored(rows=[{"a": {"median": 1.0}}]), "not a specdemo result: rows.0.a."),
        (stored(axis="k"), "not a specdemo result: no row has its axis 'k'"),
        (stored(extra=1), "not a specdemo result: extra: "),
        (stored(suite="x" * 5000), "not a specdemo result: suite: "),
        (b" " * (FILE_BYTES + 1), "a result may hold 16 MB at most"),
    ],
)
def test_anything_else_is_one_line(source, line):
    with pytest.raises(ValueError) as refused:
        read_result(source)
    assert str(refused.value).startswith(line)
    assert "\n" not in str(refused.value)


def test_the_page_holds_plot_table_and_machine(tmp_path):
    plot.write_page(RESULT, tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert '"points": [[1, 1.5]]' in text and "CPU &lt;1&gt;" in text and "<dd>abc</dd>" in text and "3 [2 4]" in text
    assert "src=" not in text and "href=" not in text  # nothing is loaded from elsewhere


def test_no_text_of_a_result_ends_the_script_of_the_page(tmp_path):
    rows = [row | {"lane": "</script><script>alert(1)</script>"} for row in RESULT.rows]
    plot.write_page(replace(RESULT, rows=rows), tmp_path / "r.html")
    assert (tmp_path / "r.html").read_text(encoding="utf-8").count("</script>") == 1


def test_a_suite_without_a_plot_has_its_table(tmp_path):
    rows = [{name: value for name, value in row.items() if name != "speed-up"} for row in RESULT.rows]
    plot.write_page(replace(RESULT, rows=rows), tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "3 [2 4]" in text and 'class="sd-figure"' not in text


def test_a_result_that_is_not_finite_is_stored_as_unknown(tmp_path):
    stored = Result("k", 1, {}, {}, [{"lane": "a", "ms": float("nan")}])
    write_result(stored, tmp_path / "a.json")
    assert read_result(tmp_path / "a.json").rows == [{"lane": "a", "ms": None}]
