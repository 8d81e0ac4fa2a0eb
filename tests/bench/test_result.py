"""Result files, and files of other kinds that are rejected; results as charts, tables, Markdown, JSON and page."""

import json
from dataclasses import replace

import pytest
import torch

import benchmarks
from benchmarks import fairness, floor, peers
from benchmarks.gpu import run
from benchmarks.pairs import Size, random_pair
from specdemo.__main__ import main
from specdemo.bench import plot, sweeps
from specdemo.bench.plot import chart, write_page
from specdemo.bench.report import bench_report, markdown, race_report, texts
from specdemo.bench.result import Result, best, intervals, read_result, recorded_suite, to_json, write_result
from specdemo.bench.suites import suite, suites
from specdemo.core.estimate import Estimate
from specdemo.core.safe_io import FILE_BYTES
from specdemo.core.trace import LaneTrace, RunTrace, StepEvent
from specdemo.engine.loop import never_cancelled
from tests.ui.stand_ins import swept

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
        (
            Result(
                "k",
                3,
                {},
                {},
                [{"lane": "a", "k": k, "speed-up": Estimate(2.0 - k / 100, 1.9, 2.1)} for k in (5, 4, 6)],
                [],
                "k",
            ),
            "no clear difference between the fastest, a at k = 5, 4 and 6: about 1.96x plain decoding.",
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
        (b"\xff", "not a specdemo result: its content is not JSON, or only a part of it"),
        (stored(schema=2), "this result has schema 2; this version reads schema 1"),
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


def step(index, drafted, accepted, ms):
    """Return a chain step whose first `accepted` draft tokens are accepted."""
    nodes = [100 + i for i in range(drafted)]
    probs = [[0.5] * drafted]
    emitted = [[*nodes[:accepted], 7]]
    path = [list(range(accepted + 1))]
    return StepEvent(index, [nodes], [list(range(drafted))], path, emitted, probs, probs, ms)


def lane(name, events, method="draft_model", **more):
    ids = [t for e in events for t in e.emitted[0]]
    pieces = [f"<{t}>" for t in ids]
    return LaneTrace(
        name, method, {}, True, [1], ids, "".join(pieces), more.pop("finish", "length"), events, pieces=pieces, **more
    )


PREFILL = step(0, 0, 0, {"prefill": 30.0})
PLAIN = lane("Baseline", [PREFILL, *(step(i, 0, 0, {"verify": 10.0}) for i in range(1, 7))], "none")


def trace(*lanes, verdict="identical", temperature=0.0):
    return RunTrace(
        "demo",
        {"target": "stories", "temperature": temperature},
        {"device": "Test CPU", "threads": 1, "dtype": "float32"},
        "race",
        [PLAIN, *lanes],
        [{"lane": lane.name, "verdict": verdict} for lane in lanes],
        prompt="Once",
    )


def rows(report):
    lines = report.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("lane "))
    return [line.split() for line in lines[start + 1 :] if line][: len(lines)]


def test_a_faster_lane():
    fast = lane("fast", [PREFILL, *(step(i, 2, 2, {"draft": 3.0, "verify": 12.0}) for i in (1, 2))])
    report = race_report(trace(fast))
    assert report.startswith("demo | target stories | float32 | Test CPU, 1 thread | greedy | race | wall time\n")
    baseline, first, *_ = rows(report)
    assert baseline == ["Baseline", "7", "100.0", "1.00x", "-", "-", "1.00", "30.0", "-", "-"]
    assert first == ["fast", "7", "200.0", "2.00x", "100%", "25%", "3.00", "30.0", "-", "identical"]
    assert (
        "fast: No clear difference (2.00x): a step takes as long as plain decoding of 1.50 tokens" in report
    )  # two steps are too few


def test_slower_lane_is_reported_with_its_reason():
    slow = lane("slow", [PREFILL, *(step(i, 2, 0, {"draft": 15.0, "verify": 10.0}) for i in range(1, 7))])
    report = race_report(trace(slow, verdict="same distribution", temperature=0.8))
    speed = "0.40x, 0.40 to 0.40".split()
    assert rows(report)[1] == ["slow", "7", "40.0", *speed, "0%", "75%", "1.00", "30.0", "-", "same", "distribution"]
    assert "| temperature 0.8 |" in report
    cost = "a step takes as long as plain decoding of 2.50 tokens and yields 1.00 tokens; 0 %"
    assert f"slow: Slower (0.40x, 0.40 to 0.40): {cost}" in report

    assert "not worth it here: no draft length is predicted to beat plain decoding." in report


def test_failed_and_stopped_lanes_are_labelled():
    report = race_report(trace(lane("broken", [], finish="error", note="out of memory"), verdict="differs"))
    assert rows(report)[1] == ["broken", "0", "-", "-", "-", "-", "-", "-", "-", "error"]
    assert "broken: out of memory" in report
    failed = trace(lane("fast", [PREFILL]), verdict="unknown")
    failed.lanes[0] = replace(PLAIN, finish="error", note="out of patience")
    assert "Baseline: out of patience" in race_report(failed).splitlines()


def test_lanes_as_the_readmes_table():
    rows = [
        {"lane": "Baseline", "tokens/s": Estimate(100.4, 99.0, 101.0), "speed-up": Estimate(1.0, 1.0, 1.0)},
        {
            "lane": "fast",
            "tokens/s": Estimate(197.0, 190.0, 204.0),
            "speed-up": Estimate(1.97, 1.86, 2.07),
            "accepted": 0.5,
        },
    ]
    where = {"device": "Test CPU", "threads": 1, "dtype": "float32", "clock": "thread CPU time"}
    text = markdown(
        Result("methods", 3, {"prompts": 8}, where, [row | {"tokens/pass": 2.0} for row in rows], ["Quiet."])
    )
    first, _, *table = text.splitlines()
    assert first == "Test CPU, 1 thread, float32, 8 prompts, 3 repeats, thread CPU time, 95 % intervals. Quiet."
    assert table[2:] == [
        "| fast | 197, 190 to 204 | 1.97x, 1.86 to 2.07 | 50% | 2.00 |",
        "| Baseline | 100, 99 to 101 | 1 |  | 2.00 |",
    ]


def test_equal_texts_are_shown_once():
    fast = lane("fast", [PREFILL, *(step(i, 0, 0, {"verify": 5.0}) for i in range(1, 7))])
    assert texts(trace(fast)) == "[Baseline, fast]\nOnce" + "<7>" * 7
    other = lane("other", [PREFILL])
    assert texts(trace(other)) == f"[Baseline]\nOnce{'<7>' * 7}\n\n[other]\nOnce<7>"


def test_an_answer_is_a_paragraph_of_its_own():
    asked = trace()
    asked.lanes[0] = replace(PLAIN, messages=[{"role": "user", "content": "Once"}])
    assert texts(asked) == "[Baseline]\nOnce\n\n" + "<7>" * 7


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
    assert drawn["title"] == "Speed-up over draft length" and drawn["label"].startswith(f"{drawn['title']}: wide, ")


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


def test_categories_are_left_to_the_table():
    result = swept()
    more = [row | {"category": name} for row in result.rows for name in ("math", "all")]
    assert [len(line["points"]) for line in chart(replace(result, rows=more))["lines"]] == [4, 4, 4]


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


RECORDED = ("k", "methods", "batch", "prompt", "temperature", "losslessness")
TINY = Size(layers=2, hidden=32, feed_forward=48, heads=2, kv_heads=1, vocabulary=97, draft_layers=1)


def silent(share, what, so_far=None):
    assert 0.0 <= share <= 1.0


def short(name, **options):
    return suite(name, **{"repeats": 1, **options}).run(silent, never_cancelled)


def pair():
    return random_pair("tiny", TINY, torch.device("cpu"), torch.float32, texts=1)


def fairness_result(patch, folder):
    patch.setattr(fairness, "NEW_TOKENS", 4)
    patch.setattr(fairness, "STALL_MS", 1.0)
    patch.setattr(fairness, "PROMPTS", fairness.PROMPTS[:1])
    return short("race-fairness")


MAKERS = {
    "peers": lambda *_: peers.compete(pair(), 1, 6, silent, never_cancelled),
    "floor": lambda *_: floor.floor(pair(), 1, 6, silent, never_cancelled),
    "race-fairness": fairness_result,
    "gpu": lambda _, folder: run.measure(folder / "gpu", "cpu", 0.0, 1, silent, never_cancelled),
}


def no_constant(name):
    raise AssertionError(f"{name} is no JSON")


def test_every_suite_is_rendered():
    own = {"thinking", "context", "load", "busy-core", "models", "page"}  # that have tests of their own
    assert {*RECORDED, *MAKERS, *own} == {*suites()}
    assert {suite.name for suite in benchmarks.SUITES} <= {*MAKERS, *own}


@pytest.mark.parametrize("name", [*RECORDED, *MAKERS])
def test_a_result_is_rendered_in_every_form(name, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sweeps, "PROBES", 1)
    result = MAKERS[name](monkeypatch, tmp_path) if name in MAKERS else recorded_suite(name)
    assert result.suite == name and result.rows
    report = bench_report(result).split("\n")
    assert all(report[2 : len(result.rows) + 3]) and not report[len(result.rows) + 3]  # one line per row
    table = [line for line in markdown(result).splitlines() if line.startswith("|")]
    assert len(table) >= 3 and len({line.replace("\\|", "").count("|") for line in table}) == 1
    assert json.loads(to_json(result), parse_constant=no_constant)["suite"] == name
    assert bench_report(replace(result, rows=[], remarks=["too short"])).endswith("\n\ntoo short")
    # a kind of work is named by a file of prompts
    assert "\x1b" not in bench_report(replace(result, remarks=["For \x1b[31mmine decode plainly."]))
    write_result(result, tmp_path / "result.json")
    assert main(["replay", str(tmp_path / "result.json")]) == 0 and capsys.readouterr().out == "\n".join([*report, ""])
    write_page(result, tmp_path / "page.html")
    assert f"<h1>specdemo bench {name}</h1>" in (tmp_path / "page.html").read_text(encoding="utf-8")
