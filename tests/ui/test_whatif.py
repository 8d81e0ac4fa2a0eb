"""Other machines without a browser: initial values, answers, rejected input, and diagnoses of an engine's output."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from specdemo.methods.facts import PREDICTED
from specdemo.presets.files import DEFAULT, load_presets, preset, recorded
from specdemo.presets.link import OWN
from specdemo.ui import model_menus, whatif
from specdemo.ui.race import Log, Races, replayed
from specdemo.ui.whatif import (
    PUBLISHED,
    Questions,
    answer,
    diagnose_output,
    predict_for,
    recorded_start,
    start_of,
    starts,
)
from tests.traces import hostile_trace

VISITOR = SimpleNamespace(session_hash="a", query_params={})
VALUES = {
    "state": None, "start": DEFAULT, "machine": "h100-sxm", "dtype": "bfloat16", "batch": 1, "context": 1024, "k": 4,
    "target": "stories", "draft": "run", "kept": "run", "rate": 0.8,
}  # fmt: skip


def questions(trace=None, own=True, allow_any_model=False):
    return Questions(lambda request: (trace, own) if trace else None, allow_any_model)


def recorded_starts():
    return [id for id in starts() if id in load_presets() and id != OWN]


def shown(updates):
    return json.loads(updates["view"])


def changed(**values):
    start = recorded_start(DEFAULT)
    return shown(answer(VISITOR, VALUES | {"state": start} | values))


@pytest.fixture
def race():
    return recorded("embedded-three-lanes")


def test_every_recorded_race_of_a_known_method_can_be_started_from():
    assert next(iter(recorded_starts())) == DEFAULT
    adaptive = {id for id, p in load_presets().items() if p.lanes[0].method not in PREDICTED}
    assert "embedded-adaptive" in adaptive and not adaptive & {*recorded_starts()}
    unknown = questions().begin(VISITOR, VALUES | {"start": "../x"})
    assert unknown["start"]["value"] == PUBLISHED and "rows" in shown(unknown)
    for id in recorded_starts():
        start = recorded_start(id)
        view = shown(questions().begin(VISITOR, VALUES | {"start": id}))
        assert view["from"].endswith(load_presets()[id].title) and view["known"]["k"] == start.k
        assert all(s["low"] <= s["value"] <= s["high"] for s in (row["speedup"] for row in view["rows"]))


def test_the_run_on_show_comes_first_and_fills_the_controls(race):
    asking = questions(race)
    updates = asking.open(VISITOR, VALUES)
    labels = [words for words, _ in updates["start"]["choices"]]
    assert updates["start"]["value"] == "lane-1" and labels[0] == f"Your last run: stories, {race.lanes[1].name}"
    assert len(labels) == 3 + len(recorded_starts())
    state = updates["state"]
    assert (updates["k"]["value"], state.given["method"]) == (state.k, race.lanes[1].method)
    assert state.target == "stories"
    again = asking.open(VISITOR, VALUES | {"state": state, "start": "lane-1", "k": 9, "batch": 8})
    assert "k" not in again and shown(again)["at"] == {"k": 9, "batch": 8}  # the selected values stay
    other = asking.open(VISITOR, VALUES | {"state": recorded_start("embedded-bytes"), "start": "embedded-bytes"})
    assert other["start"]["value"] == "embedded-bytes"


def test_the_models_of_the_page_come_first_and_a_gguf_file_is_read_from_its_header(smollm2_gguf, monkeypatch):
    own = preset(DEFAULT).with_changes(target=str(smollm2_gguf), lanes=[{"method": "suffix", "k": 7}])
    monkeypatch.setitem(load_presets(), OWN, own.changed(id=OWN))
    updates = questions().open(VISITOR, VALUES | {"start": PUBLISHED})
    view = shown(updates)
    assert updates["start"]["value"] == OWN and updates["target"]["value"] == str(smollm2_gguf)
    assert (
        view["from"].startswith("Your model: SmolLM2 135M · Q4_1, Suffix decoding;") and view["target"] in view["from"]
    )
    assert "assumed" in view["from"] and view["known"] is None
    assert view["at"]["k"] == 7 and view["memory_gb"] < 0.2  # the weights have 5.8 bits
    assert str(Path(smollm2_gguf).parent) not in json.dumps([view, updates["target"]["choices"][0][0]])


def test_a_first_visit_starts_from_a_published_pair_of_real_models(race, monkeypatch):
    monkeypatch.delitem(load_presets(), OWN, raising=False)
    for asking in (questions(), questions(race, own=False)):
        updates = asking.open(VISITOR, VALUES)
        view = shown(updates)
        assert updates["start"]["value"] == whatif.PUBLISHED and updates["target"]["value"].startswith("meta-llama/")
        assert "Llama-3.1-8B" in view["from"] and "https://" in view["from"]
        assert view["known"] == {"k": 4, "speedup": 1.746, "source": "published"} and view["recorded_k"] == 7
        assert "so it gained less" in view["from"]
        assert [round(row["tokens"]["value"], 2) for row in view["rows"][1:7]] == [2.36, 2.79, 3.08, 3.32, 3.46, 3.54]
        labels = [words for words, _ in updates["start"]["choices"]]
        assert ("Run shown in Race: " in labels[0]) == (len(labels) > 1 + len(recorded_starts()))


def test_race_is_predicted_on_an_h100(race):
    updates = questions(race, own=False).start_from_race(
        VISITOR, VALUES | {"machine": "l4", "k": 12, "batch": 64, "draft": "eagle"}
    )
    assert updates["machine"] == whatif.ELSEWHERE and updates["draft"] == "run"
    view = shown(updates)
    assert view["where"].startswith("NVIDIA H100") and view["from"].startswith("Run shown in Race: stories")
    assert view["at"] == {"k": updates["state"].k, "batch": 1} and updates["batch"] == 1  # not of an earlier visit


def test_unpredictable_lane_is_one_line(race, monkeypatch):
    race.lanes[1].method, race.lanes[2].exact = "adaptive", False
    try:
        assert questions(race).open(VISITOR, VALUES)["start"]["value"] == whatif.PUBLISHED
        with pytest.raises(ValueError, match="chooses drafts at run time and cannot be predicted"):
            start_of(race, 1, "")
    finally:
        recorded.cache_clear()
    strange = hostile_trace()
    strange.config["target"] = "../../etc"
    with pytest.raises(ValueError, match="model '../../etc' is not on this page's list"):
        start_of(strange, 1, "")
    monkeypatch.setattr(model_menus, "on_this_machine", lambda: {"../../etc": None})  # the menu of targets lists it
    assert start_of(strange, 1, "").target == "../../etc"


def test_every_control_changes_the_answer():
    base = changed()
    gain = base["rows"][3]["speedup"]["value"]
    assert changed(k=2)["at"]["k"] == 2 and changed(k=2)["rows"] == base["rows"]
    assert changed(machine="t4", dtype="float16")["plain_ms"] != base["plain_ms"]
    assert changed(batch=32)["at"]["batch"] == 32
    assert changed(context=65536)["memory_gb"] > base["memory_gb"]
    assert changed(kept="own", rate=0.98)["rows"][3]["speedup"]["value"] > gain
    assert changed(kept="own", rate=0.05)["best_k"] == 0
    assert changed(draft="ngram")["rows"][3]["draft_ms"] < base["rows"][3]["draft_ms"]
    large = changed(target="llama-8b", draft="eagle")
    assert large["memory_gb"] > 15 and large["where"] == "NVIDIA H100 SXM · bfloat16 · from its spec sheet"


def test_a_tree_is_predicted_at_every_depth_up_to_its_own():
    updates = questions().begin(VISITOR, VALUES | {"start": "embedded-medusa"})
    assert updates["k"]["maximum"] == updates["k"]["value"] == 2 and "tree (6 nodes)" in updates["k"]["label"]
    views = [shown(answer(VISITOR, VALUES | {"state": updates["state"], "k": k})) for k in (1, 2, 5)]
    assert [view["at"]["k"] for view in views] == [1, 2, 2]
    first, second = views[0]["rows"]
    assert first["tokens"]["value"] < second["tokens"]["value"] and first["verify_ms"] <= second["verify_ms"]
    assert views[0]["sentence"] != views[1]["sentence"]


def test_unsupported_precision_is_replaced():
    updates = answer(VISITOR, VALUES | {"state": recorded_start(DEFAULT), "machine": "t4"})
    assert updates["dtype"]["value"] == "float16" and "bfloat16" not in updates["dtype"]["choices"]
    assert shown(updates)["where"].startswith("NVIDIA T4 · float16")


@pytest.mark.parametrize(
    ("values", "words"), [({"target": "../x"}, "'../x' is not on this page's list"), ({"draft": "magic"}, "magic")]
)
def test_values_without_control_are_rejected(values, words):
    view = changed(**values)
    assert [*view] == ["error"] and words in view["error"] and "\n" not in view["error"]


def test_sentence_names_bottleneck_and_better_k():
    start = recorded_start(DEFAULT)
    view = changed(kept="own", rate=0.3, k=16)
    best = predict_for(start, VALUES | {"state": start, "kept": "own", "rate": 0.3}).best_k
    assert "With k = 16 and batch size 1, a step costs" in view["sentence"] and "; bottleneck: " in view["sentence"]
    assert (f"with k = {best}; bottleneck: " if best else "No draft length gains on") in view["sentence"]
    full = changed(target="llama-8b", draft="eagle", context=65536, batch=256)["sentence"]
    assert "does not fit into this machine's memory" in full


def test_the_race_of_a_visitor_is_on_show_once_it_has_ended():
    visits = Races(load_presets()[DEFAULT], False)
    assert visits.on_show(VISITOR) is None
    visits.keep(VISITOR, Log())
    assert visits.on_show(VISITOR) is None
    visits.keep(VISITOR, replayed(recorded(DEFAULT)))
    trace, own = visits.on_show(VISITOR)
    assert own and trace == recorded(DEFAULT)
    visits.keep(VISITOR, replayed(recorded(DEFAULT), still=True))
    assert not visits.on_show(VISITOR)[1]


SAMPLES = Path(__file__).parents[1] / "analysis" / "samples"


def diagnosed(**values):
    empty = {"output": "", "file": None, "plain": None, "k": None}
    return json.loads(diagnose_output(None, empty | values)["view"])


def test_a_fast_run_needs_no_change_and_a_diagnosis_is_needed_to_know():
    fast = (SAMPLES / "llamacpp-good.log").read_text(encoding="utf-8")
    assert diagnosed(output=fast, plain=150)["changes"] == ["Nothing has to change."]
    impossible = diagnosed(output=fast, plain=60)
    assert ["acceptance rate", "56 %", ""] in impossible["numbers"] and impossible["tone"] == ""
    assert diagnosed(file=str(SAMPLES / "sglang.log"))["changes"] == []


def test_dropped_file_is_read_and_numbers_fill_gaps():
    found = diagnosed(file=str(SAMPLES / "sglang.log"), k=3, plain=160)
    assert found["sentence"].startswith("Faster (1.11x)") and "draft length k" not in found["missing"]


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({}, "no output given"),
        ({"output": "x" * 3_000_000}, "2 MB at most"),
        ({"output": "Decode batch gen throughput (token/s): 3", "k": 2.5}, "whole number"),
    ],
)
def test_mistakes_are_one_line(values, line):
    found = diagnosed(**values)
    assert line in found["error"] and "\n" not in found["error"]


def test_the_folder_of_an_upload_is_not_shown(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    assert diagnosed(file=str(tmp_path / "notes.txt"))["error"].startswith("notes.txt: this output is of no known kind")
