"""Messages as lines, outcomes of draft tokens."""

import json
import math
import random
import re
from dataclasses import replace

import pytest

from specdemo.__main__ import main
from specdemo.core.trace import StepEvent, compare, draft_outcomes, from_json, output_outcomes, to_json
from specdemo.engine.messages import Finished, Note, replay
from specdemo.ui.job import to_line
from specdemo.ui.race import Log, replayed
from specdemo.ui.views import Failed, Loading, finish, summary, view
from tests.simulated_runs import simulated
from tests.simulated_runs import trace as simulated_trace
from tests.traces import HOSTILE, PROMPT, hostile_trace
from tests.ui.stand_ins import remote_trace


@pytest.fixture
def lines():
    return [json.loads(line) for line in replayed(hostile_trace()).text.splitlines()]


def step(drafted, parents, path, emitted=()):
    probs = [[0.5] * len(drafted)]
    return StepEvent(1, [drafted], [parents], [path], [list(emitted)], probs, probs, {"verify": 1.0})


def test_a_log_opens_with_its_run_and_closes_with_the_comparison(lines):
    assert [line["type"] for line in lines[:2]] == ["run", "start"] and lines[-1]["type"] == "end"
    assert lines[0]["recorded"] is True
    assert lines[1]["prompt"] == PROMPT and lines[1]["greedy"] is True and lines[1]["limit"] == len(HOSTILE)
    assert lines[-1]["comparison"][0]["verdict"] == "identical" and "Faster" in lines[-1]["comparison"][0]["why"]


def test_the_costs_of_passes_are_known_at_the_start_or_follow_from_the_steps():
    trace = hostile_trace()
    first, *_, last = map(view, replay(trace))
    assert first["passes"] == [] and last["passes"] == [(1.0, 1.0), (3.0, 1.125)]  # 14 drafted in 7 steps of 4.5 ms
    trace.lanes[0].events = []
    assert view(Finished(trace))["passes"] == []
    trace.environment["pass_ms"] = {"4": 8.0, "1": 5.0}
    assert view(next(iter(replay(trace))))["passes"] == [(1, 1.0), (4, 1.6)]


@pytest.mark.parametrize(
    ("method", "options", "expected"),
    [
        ("none", {}, {"Model": "stories"}),
        ("ngram", {}, {"Method": "Prompt lookup"}),
        ("adaptive", {"drafter": "ngram"}, {"Method": "Adaptive length with Prompt lookup"}),
        (
            "online",
            {"drafter": "draft_model", "model": "stories-draft-wide"},
            {"Method": "Online learning with Draft model", "Model": "stories-draft-wide"},
        ),
        ("synthetic", {"drafter": "none"}, {"Method": "Synthetic acceptance"}),
        ("of-another-package", {}, {}),
    ],
)
def test_the_details_of_a_lane_have_the_full_names_of_its_method_and_model(method, options, expected):
    trace = hostile_trace()
    trace.config["target"] = "stories"
    lane = trace.lanes[method != "none"]
    lane.method, lane.options = method, options
    details = dict(view(next(iter(replay(trace))))["lanes"][method != "none"]["details"])
    assert {name: details[name] for name in ("Method", "Model") if name in details} == expected


def test_server_lane_shows_only_reported_values():
    trace = remote_trace()
    assert from_json(to_json(trace)) == trace
    lines = [json.loads(line) for line in replayed(trace).text.splitlines()]
    assert lines[1]["lanes"][0]["remote"] is None and lines[1]["lanes"][1]["remote"]["server"] == "<b>host</b>:8000"
    steps = [line for line in lines if line["type"] == "step" and line["lane"] == 1]
    assert {outcome for line in steps for outcome in line["output_outcomes"]} == {"unknown"}
    assert "".join(text for line in steps for text in line["text"]) == "".join(HOSTILE)
    assert (
        "requests of other users are included"
        in next(line for line in lines if line["type"] == "done" and line["lane"] == 1)["remote"]["source"]
    )
    why = lines[-1]["comparison"][0]["why"]
    assert (
        "45 % of the draft tokens were accepted, 11 % would break even; mean accepted length 2.50" in why
        and why.endswith("are included.")
    )


def test_logs_have_different_openings():
    assert Log().text != Log().text


def test_the_text_of_a_lane_is_the_text_of_its_steps(lines):
    for lane in (0, 1):
        steps = [line for line in lines if line["type"] == "step" and line["lane"] == lane]
        assert "".join(text for line in steps for text in line["text"]) == "".join(HOSTILE)
        assert all(len(line["output_outcomes"]) == len(line["text"]) for line in steps)


@pytest.mark.parametrize(
    ("drafted", "parents", "path", "expected"),
    [
        ([], [], [0], []),
        ([5, 6, 7], [0, 1, 2], [0, 1], ["accepted", "rejected", "not reached"]),
        ([5, 6], [0, 1], [0, 1, 2], ["accepted", "accepted"]),
        ([5, 6], [0, 1], [0], ["rejected", "not reached"]),
        ([5, -1], [0, 1], [0, 1], ["accepted", None]),
        ([5, 6, 7], [0, 0, 0], [0, 2], ["rejected", "accepted", "not reached"]),  # a star: tried in order
        ([5, 6, 7, 8], [0, 0, 1, 2], [0, 2], ["rejected", "accepted", "not reached", "rejected"]),
        ([5, 6], [0, 0], [0], ["rejected", "rejected"]),
    ],
)
def test_outcomes_of_draft_tokens(drafted, parents, path, expected):
    assert draft_outcomes(step(drafted, parents, path, [9] * len(path))) == expected


def test_tokens_after_the_end_are_not_verified():
    assert draft_outcomes(step([5, 6, 7], [0, 1, 2], [0, 1, 2, 3], [5])) == ["accepted", "not reached", "not reached"]


def test_accepted_tokens_that_a_grammar_drafted_are_forced():
    event = replace(step([5, 6, 7], [0, 1, 2], [0, 1, 2], [5, 6, 9]), forced=[[1, 3]])
    assert draft_outcomes(event) == ["forced", "accepted", "rejected"]
    assert output_outcomes(event) == ["forced", "accepted", "corrected"]


def test_small_messages():
    assert view(Loading(0.51234, "loading x")) == {"type": "loading", "share": 0.512, "text": "loading x"}
    assert view(Failed("no")) == {"type": "error", "text": "no"}
    assert view(Note("slow", 1)) == {"type": "note", "lane": 1, "text": "slow"}
    assert to_line({"a": "é\n", "b": math.nan}) == '{"a":"é\\n"}\n'
    with pytest.raises(ValueError, match="JSON"):
        to_line({"a": {"b": math.nan}})


@pytest.mark.parametrize(
    ("ends", "expected"),
    [(("stop", "length"), "done"), (("cancelled", "stop"), "cancelled"), (("cancelled", "error"), "error")],
)
def test_run_status_is_that_of_its_worst_lane(ends, expected):
    trace = hostile_trace()
    for lane, end in zip(trace.lanes, ends, strict=True):
        lane.finish = end
    assert finish(trace) == expected


def test_lossy_lane_is_marked_in_trace_log_and_summary():
    trace = hostile_trace()
    trace.lanes[1].exact = False
    assert from_json(to_json(trace)).lanes[1].exact is False
    assert [lane["exact"] for lane in json.loads(replayed(trace).text.splitlines()[1])["lanes"]] == [True, False]
    assert [lane["exact"] for lane in summary(trace)["lanes"]] == [True, False]


def test_the_summary_is_the_run_without_its_steps():
    trace = hostile_trace(lanes=2)
    short = summary(trace)
    assert json.loads(json.dumps(short)) == short
    assert [lane["summary"] for lane in short["lanes"]] == [lane.summary for lane in trace.lanes]
    assert [row["speedup"] for row in short["comparison"]] == [row["speedup"] for row in trace.comparison]


def test_a_run_that_ended_has_a_headline_and_a_stopped_one_no_verdict():
    trace = hostile_trace()
    name = trace.lanes[1].name
    end = view(Finished(trace))
    result = f"{name} is {end['comparison'][0]['speedup']:.2f}× as fast as plain decoding"
    interval = end["comparison"][0]["interval"]
    assert end["headline"] == {
        "lane": 1,
        "tone": "gain",
        "caption": f"{result} ({interval}), 1.28× in all with the prompt, output identical",
        "sentence": f"{result} (95 % interval {interval}), 1.28× in all with the prompt. Output: identical.",
    }
    assert summary(trace)["headline"]["sentence"] == end["headline"]["sentence"].replace("×", "x")
    trace.lanes[0].finish = "cancelled"
    stopped = view(Finished(trace))
    assert stopped["comparison"][0]["word"] == "so far" and stopped["comparison"][0]["why"] == ""
    for lane in trace.lanes:
        lane.events[1:] = []
    trace.comparison[0].update(speedup=None)
    assert view(Finished(trace))["comparison"][0]["word"] == "so far"  # the outputs so far are no verdict either
    assert stopped["headline"]["tone"] == "" and stopped["headline"]["sentence"].startswith("No verdict")


def test_a_stored_run_without_numbers_still_shows():
    trace = hostile_trace()
    trace.lanes[1].summary = {"tokens_per_s": 9.0}
    assert view(list(replay(trace))[-1])["comparison"][0]["why"].startswith("Faster (1.33×")  # computed from the events


@pytest.mark.parametrize(
    ("row", "pieces", "words"),
    [
        ({"verdict": "rounding", "divergence_margin": 0.0213}, " a", "a near-tie: 0.021 between “bold” and “a”"),
        (
            {"verdict": "differs", "divergence_margin": 1.25},
            "\n",
            "1.2 between “bold” and a line break, more than rounding explains",
        ),
        ({"verdict": "unknown", "divergence_margin": None}, "bold ", "“bold” or “bold ”"),
        ({"verdict": "rounding", "divergence_margin": 0.5}, None, "a near-tie: 0.5 between “bold” and the end"),
        ({"verdict": "identical", "first_divergence": None}, "a", None),
        (
            {"verdict": "lossy", "divergence_margin": 0.53},
            "a",
            "0.53 between “bold” and “a”, accepted by the lossy rule",
        ),
    ],
)
def test_where_texts_part_both_tokens_and_their_gap_are_named(row, pieces, words):
    trace = hostile_trace()
    trace.lanes[1].exact = row["verdict"] != "lossy"
    trace.lanes[0].pieces[0] = "bold"
    trace.lanes[1].pieces[0:] = [] if pieces is None else [pieces]
    trace.comparison[0] |= {"first_divergence": 0} | row
    assert view(Finished(trace))["comparison"][0].get("parting") == words


def test_a_stored_trace_that_parts_before_its_start_is_shown_without_tokens(tmp_path, capsys):
    trace = hostile_trace()
    trace.comparison[0] |= {"verdict": "differs", "first_divergence": -len(HOSTILE) - 1}
    stored = tmp_path / "trace.json"
    stored.write_text(to_json(trace))
    row = json.loads(replayed(from_json(stored.read_text())).text.splitlines()[-1])["comparison"][0]
    assert row["verdict"] == "differs" and "parting" not in row
    assert main(["replay", str(stored)]) == 0 and "differs" in capsys.readouterr().out


@pytest.mark.parametrize(("k", "advice"), [(8, True), (1, False)])
def test_a_shorter_draft_is_advised_where_it_is_predicted_to_be_faster(k, advice):
    events = simulated(random.Random(0), [0.6] * 8, k, steps=200)
    trace = simulated_trace(("drafted", events), options={"k": k})
    trace.comparison = [compare(*trace.lanes, greedy=True)]
    rows = view(Finished(trace))["comparison"]
    assert ("advice" in rows[0]) == advice
    words = r"A step costs \d\.\d\d plain tokens and yields \d\.\d\d(: k = 8 is too large)?\."
    assert re.fullmatch(words, rows[0]["cause"])
    if advice:
        assert 1 <= rows[0]["advice"]["k"] < 4 and re.fullmatch(r"[01]\.\d\d×", rows[0]["advice"]["speed"])
