"""The terminal report of a trace."""

from dataclasses import replace

from specdemo.bench.report import markdown, race_report, table, texts, visible
from specdemo.bench.result import Result
from specdemo.core.estimate import Estimate
from specdemo.core.trace import LaneTrace, RunTrace, StepEvent


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


def test_the_result_stands_in_one_sentence_and_is_missing_from_a_stopped_run():
    fast = lane("fast", [PREFILL, *(step(i, 2, 2, {"draft": 3.0, "verify": 12.0}) for i in range(1, 8))])
    speeds = "2.00x as fast as plain decoding (95 % interval 2.00 to 2.00), 1.50x in all with the prompt"
    sentence = f"fast is {speeds}. Output: identical."
    assert f"\n\n{sentence}\nfast: Faster (2.00x" in race_report(trace(fast))
    fast.finish = "cancelled"
    report = race_report(trace(fast))
    assert "\n\nNo verdict, because not all lanes finished; so far: fast (2.00x)." in report
    assert "aster" not in report


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


def test_control_characters_do_not_reach_the_terminal():
    assert visible("a\x1b[2J\tb\n\x00é😀") == "a\\x1b[2J\tb\n\\x00é😀"


def test_columns_are_aligned():
    assert table(("name", "n", "x"), [("a", "10", "b"), ("long name", "5", "")]) == (
        "name        n  x\na          10  b\nlong name   5"
    )
