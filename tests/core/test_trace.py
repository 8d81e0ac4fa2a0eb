"""Traces: numbers from hand-made events, round trips, and malformed files."""

import copy
import json
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdemo.bench.report import race_report, texts
from specdemo.core.definitions import by_key
from specdemo.core.tally import Tally, summarise
from specdemo.core.trace import LaneTrace, RunTrace, StepEvent, compare, from_json, output_outcomes, to_json
from specdemo.ui.race import replayed
from specdemo.ui.whatif import start_of
from tests.traces import hostile_trace


def step(index, drafted, parents, path, emitted, **ms):
    nothing = [None] * len(drafted)
    return StepEvent(index, [drafted], [parents], [path], [emitted], [nothing], [[0.5] * len(drafted)], ms)


def prefill(token):
    return step(0, [], [], [0], [token], prefill=40.0, observe=2.0)


CHAIN = [
    prefill(1),
    step(
        1, [2, 3, 4], [0, 1, 2], [0, 1, 2, 3], [2, 3, 4, 5], draft=2.0, verify=6.0, accept=0.5, commit=0.5, observe=1.0
    ),
    step(2, [6, 7, -1], [0, 1, 2], [0, 1], [6, 8], draft=2.0, verify=6.0, observe=2.0),
    step(3, [9, 9, 9], [0, 1, 2], [0], [10], draft=1.0, verify=4.0),
    step(4, [], [], [0], [11], verify=5.0),
]
TREE = [
    prefill(1),
    step(1, [2, 3, 4, 5, 6], [0, 0, 2, 2, 4], [0, 2, 4], [3, 5, 7], verify=9.0),
    step(2, [2, 3, 4], [0, 0, 1], [0, 2], [3, 8], verify=6.0),
]


def lane(events, name="lane", finish="length"):
    tokens = [t for e in events for t in e.emitted[0]]
    pieces = [f" {t}" for t in tokens]
    return LaneTrace(name, "ngram", {"max_n": 3}, True, [7], tokens, "".join(pieces), finish, events, {}, pieces)


def run():
    lanes = [lane([prefill(1)], "plain"), lane(CHAIN, "chain"), lane(TREE, "tree")]
    for one in lanes:
        one.summary = summarise(one, 1000)
    rows = [compare(lanes[0], other, greedy=True) | {"verdict": "differs"} for other in lanes[1:]]
    config, environment = {"k": 3, "sampling": {"temperature": 0.0}}, {"device": "cpu"}
    return RunTrace("demo", config, environment, "race", lanes, rows, "hi <b>\n🐉", {"2": "<b>"})


def test_kinds():
    assert output_outcomes(CHAIN[0]) == ["target"]
    assert output_outcomes(CHAIN[1]) == ["accepted", "accepted", "accepted", "bonus"]
    assert output_outcomes(CHAIN[2]) == ["accepted", "corrected"]
    assert output_outcomes(CHAIN[3]) == ["corrected"]
    assert output_outcomes(CHAIN[4]) == ["target"]
    assert output_outcomes(TREE[1]) == ["accepted", "accepted", "corrected"]
    assert output_outcomes(TREE[2]) == ["accepted", "bonus"]


def test_kinds_of_a_row_that_drafted_less_or_was_cut():
    assert output_outcomes(step(1, [2, -1], [0, 1], [0, 1], [2, 9])) == ["accepted", "bonus"]
    assert output_outcomes(step(1, [-1, -1], [0, 1], [0], [9])) == ["target"]
    assert output_outcomes(step(1, [2, 3], [0, 1], [0, 1, 2], [2])) == ["accepted"]
    assert output_outcomes(step(1, [], [], [0], [])) == []


def test_summary_of_a_chain():
    summary = summarise(lane(CHAIN), peak_memory_bytes=12)
    expected = {
        "tokens": 9,
        "steps": 4,
        "tokens_per_s": round(8 / 0.030, 4),
        "tokens_per_s_low": None,  # four steps are too few
        "tokens_per_s_high": None,
        "waited_share": None,
        "ttft_ms": 42.0,
        "itl_ms_p50": 3.75,  # the steps' 10, 10, 5, 5 ms per token: 2.5 2.5 2.5 2.5 5 5 5 5
        "itl_ms_p95": 5.0,
        "drafted": 8,
        "accepted": 4,
        "acceptance_rate": 0.5,
        "tokens_per_step": 2.0,
        "accept_histogram": [2, 1, 0, 1],
        "accept_by_position": [round(2 / 3, 4), round(1 / 3, 4), 0.5],
        "ms_draft": 8.0,
        "ms_verify": 21.0,
        "ms_other": 1.0,
        "peak_memory_bytes": 12,
    }
    assert {name: summary[name] for name in expected} == expected
    assert set(summary) <= set(by_key())  # a number without a definition is not shown


def test_draft_tokens_after_the_stop_token_are_not_accepted():
    """The target agreed with all three draft tokens, but the first of them is a stop token."""
    stopped = step(1, [2, 3, 4], [0, 1, 2], [0, 1, 2, 3], [2], verify=6.0)
    summary = summarise(lane([prefill(1), stopped]))
    assert (summary["accepted"], summary["drafted"], summary["accept_histogram"]) == (1, 3, [0, 1, 0, 0])
    assert output_outcomes(stopped) == ["accepted"]


def test_steps_in_which_a_row_of_a_batch_had_finished_are_not_counted():
    summary = summarise(lane([*CHAIN, *(step(i, [], [], [0], []) for i in (5, 6))]))
    assert (summary["steps"], summary["tokens_per_step"]) == (4, 2.0)


def test_gaps_between_their_neighbours():
    events = [prefill(1), *(step(i, [], [], [0], [i], verify=10.0 * i) for i in range(1, 5))]
    summary = summarise(lane(events))
    assert (summary["itl_ms_p50"], summary["itl_ms_p95"]) == (25.0, 38.5)  # percentiles of 10, 20, 30 and 40 ms


def test_summary_of_a_tree():
    summary = summarise(lane(TREE))
    assert summary["drafted"] == 8
    assert summary["accepted"] == 3
    assert summary["accept_histogram"] == [0, 1, 1, 0]
    assert summary["accept_by_position"] == [1.0, 0.5, 0.0]
    assert summary["tokens_per_step"] == 2.5


def test_summary_before_the_first_step_has_no_rates():
    for events in ([], [prefill(1)]):
        summary = summarise(lane(events))
        assert summary["steps"] == 0
        assert summary["ttft_ms"] == (42.0 if events else None)
        assert all(summary[k] is None for k in ("tokens_per_s", "itl_ms_p50", "acceptance_rate", "tokens_per_step"))
        assert summary["accept_histogram"] == [0]


def lanes_of(own, other, finish="length"):
    lanes = [
        LaneTrace(n, "none", {}, True, [1], ids, finish=f) for n, ids, f in (("a", own, "length"), ("b", other, finish))
    ]
    for one, tokens in zip(lanes, (1, 5), strict=True):  # 100 and 250 tokens/s
        ms = {"verify": 10.0 if one is lanes[0] else 20.0}
        one.events = [prefill(1), StepEvent(1, [[]], [[]], [[0]], [[2] * tokens], [[]], [[]], ms)]
    return lanes


@pytest.mark.parametrize("own, other, finish, first", [
    ([1, 2, 3], [1, 2, 3], "length", None),
    ([1, 2, 3], [1, 9, 3], "length", 1),
    ([1, 2, 3], [1, 2], "length", 2),
    ([1, 2], [1, 2, 3], "stop", 2),
    ([1, 2, 3], [1, 2], "cancelled", None),
    ([1, 2, 3], [1, 9], "cancelled", 1),
    ([1, 2, 3], [], "cancelled", None),
])  # fmt: skip
def test_compare(own, other, finish, first):
    row = compare(*lanes_of(own, other, finish), greedy=True, margin=0.25)
    assert row == {
        "lane": "b",
        "speedup": 2.5,
        "speedup_low": None,
        "speedup_high": None,
        "noisy": False,
        "reasons": [],
        "identical": first is None,
        "first_divergence": first,
        "divergence_margin": 0.25,
    }


def test_comparison_under_sampling_ignores_tokens():
    row = compare(*lanes_of([1], [2]), greedy=False, margin=1.0)
    assert row["identical"] is row["first_divergence"] is row["divergence_margin"] is None


def test_compare_without_speeds():
    a, b = lanes_of([1], [1])
    a.events = a.events[:1]  # nothing after the prefill
    assert compare(a, b, greedy=True)["speedup"] is None


@pytest.mark.parametrize("indent", [None, 2])
def test_round_trip(indent):
    text = to_json(run(), indent)
    assert from_json(text) == run()
    assert from_json(text.encode()) == run()
    assert json.loads(text)["schema"] == 1


def test_the_most_likely_tokens_are_optional():
    """A trace of an earlier version has no `top`."""
    trace, data = run(), json.loads(to_json(run()))
    for events in (lane["events"] for lane in data["lanes"]):
        for event in events:
            del event["top"]
    assert from_json(json.dumps(data)) == trace
    event = trace.lanes[1].events[1]
    trace.lanes[1].events[1] = replace(event, top=[[(2, 0.5), (3, 0.25)]] * len(event.path[0]))
    assert from_json(to_json(trace)) == trace


def refused(text):
    with pytest.raises(ValueError) as caught:
        from_json(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    return str(caught.value)


def changed(**fields):
    """Return the trace with replaced fields in step 1 of the chain."""
    data = json.loads(to_json(run()))
    data["lanes"][1]["events"][1].update(fields)
    return json.dumps(data)


@pytest.mark.parametrize("fields", [
    {"drafted": []}, {"drafted": [[2, 3]]}, {"drafted": [[2, 3, -1]]}, {"drafted": [[2, 3, 4], [1]]},
    {"parents": [[0, 1, 3]]}, {"parents": [[0, -1, 2]]}, {"path": []}, {"path": [[]]}, {"path": [[1, 2, 3]]},
    {"path": [[0, 1, 3]]}, {"path": [[0, 1, 2, 9]]}, {"path": [[0, 1, 0, 1]]}, {"path": [[0]]}, {"emitted": []},
    {"draft_probs": [[]]}, {"target_probs": [[0.5], []]}, {"top": [[[2, 0.5]]]},
    {f: [] for f in ("drafted", "parents", "path", "emitted", "draft_probs", "target_probs")},
])  # fmt: skip
def test_a_step_that_does_not_hold_together_is_refused(fields):
    assert "lane 'chain': step 1 is inconsistent" in refused(changed(**fields))


@pytest.mark.parametrize("fields, reason", [
    ({"ms": {"verify": -1.0}}, "lanes.1.events.1.ms.verify: Input should be greater than or equal to 0"),
    ({"emitted": [[2, 3, 4, 6]]}, "token_ids differ"),
    ({"top": [[[1, 0.2]] * 5]}, "lanes.1.events.1.top.0: List should have at most 4 items"),
    ({"top": [[[1, 0.2, 3]]]}, "lanes.1.events.1.top.0.0"),
    ({"drafted": "no"}, "lanes.1.events.1.drafted: Input should be a valid array"),
    ({"a\nkey": 1}, "lanes.1.events.1.a key: Unexpected keyword argument"),
])  # fmt: skip
def test_other_faults_are_named(fields, reason):
    assert reason in refused(changed(**fields))


@pytest.mark.parametrize("field, value", [("text", "other"), ("pieces", [])])
def test_a_text_that_is_not_its_pieces_is_refused(field, value):
    data = json.loads(to_json(run()))
    data["lanes"][1][field] = value
    assert "lane 'chain': pieces differ from text" in refused(json.dumps(data))


@pytest.mark.parametrize("part, name, value", [
    ("summary", "accept_by_position", 5), ("summary", "tokens_per_s", [5.0]), ("options", "drafts", {"toString": 1}),
])  # fmt: skip
def test_a_value_that_no_reader_expects_is_refused(part, name, value):
    data = json.loads(to_json(run()))
    data["lanes"][1][part][name] = value
    assert f"lane 'chain': '{name}' has a value of the wrong type" in refused(json.dumps(data))


def test_a_list_too_long_to_draw_is_refused():
    data = json.loads(to_json(run()))
    data["lanes"][1]["summary"]["accept_histogram"] = [0] * 1025
    assert "lane 'chain': 'accept_histogram' has more than 1,024 entries" in refused(json.dumps(data))


def test_files_that_are_no_traces_are_refused():
    assert "its content is not JSON" in refused("")
    assert "its content is not JSON" in refused(b"\xff\xfe\x00")
    assert "recursion limit" in refused("[" * 100_000)
    assert "the file" in refused("[]")
    assert "Field required" in refused("{}")
    assert "16 MB at most" in refused(" " * 16_000_001)
    assert refused("\ud800")


@pytest.mark.parametrize("place", [("environment",), ("config",), ("lanes", 1, "options")])
@pytest.mark.parametrize("number", ["NaN", "1e999"])
def test_a_number_that_json_does_not_know_is_refused_anywhere(place, number):
    document = copy.deepcopy(DOCUMENT)
    mutate(document, (*place, "x"), "replace", [{"y": "?"}])
    assert "NaN or infinity" in refused(json.dumps(document).replace('"?"', number))


def test_a_later_schema_is_refused_by_its_number():
    data = json.loads(to_json(run())) | {"schema": 2, "news": True}
    assert refused(json.dumps(data)) == "this trace has schema 2; this version reads schema 1"


def test_a_large_broken_file_is_refused_cheaply():
    data = json.loads(to_json(run()))
    data["lanes"][0]["token_ids"] = ["x"] * 200_000
    assert "lanes.0.token_ids.0" in refused(json.dumps(data))
    data["vocabulary"] = {str(n): n for n in range(2000)}
    assert "fields are wrong" in refused(json.dumps(data))


def places(node, at=()):
    """Yield the path of every value in a JSON document."""
    yield at
    inside = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in inside:
        yield from places(child, (*at, key))


DOCUMENT = json.loads(to_json(run()))
PLACES = list(places(DOCUMENT))[1:]
NUMBERS = st.integers(-(10**30), 10**30) | st.sampled_from([10**400, -(10**400), 1e308, 5e-324, 2**63])
values = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def mutate(document, place, action, value):
    *above, key = place
    for step_down in above:
        document = document[step_down]
    if action == "delete":
        del document[key]
    elif action == "repeat" and isinstance(document, list):
        document.insert(key, document[key])
    else:
        document[key] = value


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.sampled_from(PLACES), st.sampled_from(["replace", "delete", "repeat"]), values)
def test_a_mutated_trace_is_usable_or_refused_in_one_line(place, action, value):
    document = copy.deepcopy(DOCUMENT)
    mutate(document, place, action, value)
    text = json.dumps(document)
    try:
        trace = from_json(text)
    except ValueError:
        refused(text)
        return
    for one in trace.lanes:
        summarise(one)
        compare(trace.lanes[0], one, greedy=True)
        for event in one.events:
            for row, emitted in enumerate(event.emitted):
                assert len(output_outcomes(event, row)) == len(emitted)
    assert from_json(to_json(trace)) == trace
    try:
        race_report(trace), texts(trace), replayed(trace)
        start_of(trace, 1, "", allow_any_model=True)
    except ValueError as error:
        assert "\n" not in str(error) and len(str(error)) < 300


def test_recent_speed_does_not_count_the_prefill():
    """Reading the prompt takes 42 ms here, and a step of four tokens 10 ms."""
    speeds = [Tally.of(CHAIN[:n]).recent_tokens_per_s for n in (1, 2)]
    assert speeds == [None, pytest.approx(400.0)]


def test_a_notebook_shows_a_trace_as_a_table():
    shown = hostile_trace()._repr_markdown_().splitlines()
    assert len(shown) == 2 + 2 and shown[2].endswith("| 1 |") and re.search(r"\d\.\d\dx, ", shown[3])
