"""The tabs Sweep, Tune and Lab without a browser, with a stand-in benchmark and a stand-in trainer."""

import json
import math
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import gradio as gr
import pytest
from starlette.datastructures import QueryParams

from specdemo.bench import suites
from specdemo.bench.racer import STAGES
from specdemo.bench.result import read_result, recorded_suite, write_result
from specdemo.bench.suites import Sweep
from specdemo.bench.tune import YOURS, Tune
from specdemo.engine.messages import Finished
from specdemo.engine.session import session
from specdemo.presets.files import preset
from specdemo.ui import controls, lab, model_menus, sweep
from specdemo.ui.lab import Lab, Training, train
from specdemo.ui.lab import begin as begin_test
from specdemo.ui.race import Races
from specdemo.ui.setup import to_values
from specdemo.ui.sweep import OF_RACE, RACE, Sweeps, begin, restore, result_line
from specdemo.ui.tune import begin as begin_tune
from specdemo.ui.tune import begin_of_race
from specdemo.ui.views import Loading, view
from tests.traces import hostile_trace
from tests.ui.stand_ins import VISITOR, Trainer, lines, played, swept, sync, tuned

VALUES = {"sweep": "k", "preset": "embedded-draft", "repeats": 3, "new_tokens": 96}


def arguments(*values):
    return dict(zip(VALUES, values, strict=True))


def last(values):
    return list(played(Sweeps("sweep"), begin, VISITOR, values))[-1]["view"]


def visit(query):
    return SimpleNamespace(session_hash="a", request=None, query_params=QueryParams(query))


def test_a_recorded_result_stands_in_until_there_is_one_of_the_visitors(bench):
    sweeps, visitor = Sweeps("sweep"), visit("")
    assert sweeps.recorded(visit("sweep=batch"), {"sweep": "k"}) == {}  # the link requests a new sweep
    shown = sweeps.recorded(visitor, {"sweep": "k"})
    assert [line["type"] for line in lines(shown["view"])] == ["run", "result"]
    assert lines(shown["view"])[1]["recorded"] and "2026-" in lines(shown["view"])[1]["where"][1]
    assert sweeps.recorded(visitor, {"sweep": "batch"}) and json.loads(sweeps.save(visitor)["text"])["suite"] == "batch"
    list(played(sweeps, begin, visitor, arguments("batch", "embedded-ngram", 2, 32)))
    assert sweeps.recorded(visitor, {"sweep": "k"}) == {}
    # no embedded model can think
    assert all(recorded_suite(name) for name in suites.swept() if name != "thinking"), "every suite of the tab has one"


def test_a_sweep_is_a_growing_text_and_then_curves(bench):
    outputs = list(played(Sweeps("sweep"), begin, VISITOR, arguments("batch", "embedded-ngram", 2, 32)))
    texts = [output["view"] for output in outputs]
    assert all(after.startswith(before) for before, after in pairwise(texts))
    seen = lines(texts[-1])
    assert [line["type"] for line in seen] == ["run", "start", "loading", "loading", "result"]
    assert seen[3] == {"type": "loading", "share": 0.5, "text": "repeat 2 of 2, k = 4"}
    assert bench.options == ("batch", {"repeats": 2, "preset": "embedded-ngram", "new_tokens": 32})
    names = [line["name"] for line in seen[-1]["chart"]["lines"]]
    assert names == ["wide", "<i>deep</i> & co", "<i>deep</i> & co, predicted"]
    assert seen[-1]["rows"][2]["speed-up"] == {
        "value": 1.3,
        "low": None,
        "high": None,
        "interval": "",
    }  # two repeats give no interval
    assert seen[-1]["conditions"] == "2 repeats · target stories · prompts 8 · max new tokens 96"


def shown(suite):
    return lines(sweep.result_line(sweep.readable(recorded_suite(suite)), True))[0]


def test_lanes_have_names_of_models_and_are_sorted_by_speed():
    result = shown("methods")
    names = [row["lane"] for row in result["rows"]]
    assert names[0] == "Baseline" and {"Draft 1.3M, stories-draft-wide", "Prompt lookup"} <= {*names}
    assert len({*names}) == len(names)
    speeds = [row["speed-up"]["value"] for row in result["rows"][1:]]
    assert speeds == sorted(speeds, reverse=True)
    for suite in ("methods", "k", "temperature"):
        assert "embedded-" not in json.dumps(shown(suite))


def test_conditions_and_remarks_have_no_internals():
    result, repeats = shown("batch"), recorded_suite("batch").repeats
    title = preset("embedded-draft").title
    assert result["conditions"].startswith(f"{repeats} repeats · preset {title} · target stories · ")
    remarks = shown("k")["remarks"]
    assert len(remarks) == len({*remarks})


def test_too_frequent_progress_is_dropped(bench):
    running = begin(VALUES, None)
    running.add(Loading(0.001 * i, "repeat 1 of 1") for i in range(1000))
    assert running.text.count('"loading"') == 100


def test_the_race_is_swept_with_its_drafter_and_prompt_unless_a_preset_is_chosen(bench):
    race = to_values(preset("embedded-ngram")) | {"prompt": "Once more", "k-1": 3}
    values = VALUES | {"preset": RACE} | {OF_RACE + name: value for name, value in race.items()}
    seen = lines(last(values))
    assert seen[1]["name"] == "Draft length k, stories" and seen[-1]["type"] == "result"
    name, options = bench.options
    (lane,) = options["preset"].lanes
    assert name == "k" and options["prompts"] == ("Once more",) and options["new_tokens"] == 96
    assert (options["preset"].target, lane.method, lane.k, lane.name) == ("stories", "ngram", 3, "Prompt lookup")
    assert options["preset"] == suites.swept()["k"].build(options).comparison
    last(values | {"sweep": "context"})
    assert bench.options[0] == "context" and "prompts" not in bench.options[1]  # a prompt is no long text
    last(values | {"preset": "embedded-draft"})
    assert bench.options[1]["preset"] == "embedded-draft"
    with pytest.raises(ValueError, match="choose one in place of the race"):
        sweep.share(VALUES | {"preset": RACE})


def test_a_result_so_far_is_shown_as_soon_as_another_stage_begins():
    shown = []
    report = sweep.every_few_percent(lambda share, what, so_far: shown.append(so_far and so_far.environment["stages"]))
    stages = {"loading the model": 2.0, "measuring passes": 0.0}
    result = replace(tuned(), environment={"stages": stages})
    report(0.0, "reading a, 1 %", lambda: result)
    report(0.0, "reading a, 2 %", lambda: replace(result, environment={"stages": stages | {"loading the model": 3.0}}))
    report(0.01, "measuring passes", lambda: replace(result, environment={"stages": dict.fromkeys(stages, 4.0)}))
    report(0.02, "measuring passes", lambda: None)
    assert shown == [stages, None, dict.fromkeys(stages, 4.0), None]


def test_the_points_measured_so_far_are_shown_every_few_percent(bench):
    def measure(report, cancelled):
        for repeats in (1, 1, 2):
            report(0.0, "loading", lambda repeats=repeats: swept(repeats=repeats))
        for percent in range(1, 101):
            report(percent / 100, "k = 4", lambda percent=percent: swept(repeats=percent))
        return swept()

    sweeping = sweep.Sweeping.measuring("Draft length k", measure)
    *_, text = sync(sweeping.follow())
    *parts, result = [line for line in lines(text) if line["type"] == "result"]
    assert 22 <= len(parts) <= 27 and all(part["partial"] and part["chart"]["lines"] for part in parts)
    assert [part["conditions"].partition(" · ")[0] for part in parts[:2]] == ["1 repeat", "2 repeats"]  # while loading
    assert not result["partial"] and not parts[0]["recorded"]


def test_stop_keeps_the_finished_repeats(bench):
    sweeps, bench.endless = Sweeps("sweep"), True
    texts = played(sweeps, begin, VISITOR, VALUES)
    while "repeat 3" not in next(texts)["view"]:
        pass
    updates = [sweeps.stop(VISITOR), *texts]
    assert '"stopping"' in updates[0]["view"]
    text = updates[-1]["view"]
    assert [line["type"] for line in lines(text)][-2:] == ["result", "stopped"]
    assert lines(text)[-2]["remarks"] == ["Stopped after 1 of 3 repeats."] and lines(text)[-2]["chart"]


def test_stop_before_the_first_repeat_is_no_error(bench):
    sweeps, bench.endless, bench.finished = Sweeps("sweep"), True, 0
    texts = played(sweeps, begin, VISITOR, VALUES)
    next(texts)
    text = [sweeps.stop(VISITOR), *texts][-1]["view"]
    assert "error" not in text and lines(text)[-1]["type"] == "stopped" and '"result"' not in text


def test_a_borrowed_gpu_is_too_short_for_a_sweep(bench, monkeypatch):
    monkeypatch.setattr(sweep.space, "zero_gpu", lambda: True)
    assert "a sweep takes minutes" in last(VALUES)


def test_a_saved_result_opens_again(bench, tmp_path):
    sweeps = Sweeps("sweep")
    with pytest.raises(gr.Error, match="no result to save"):
        sweeps.save(VISITOR)
    list(played(sweeps, begin, VISITOR, VALUES))
    file = sweeps.save(VISITOR)
    path = tmp_path / file["name"]
    path.write_text(file["text"], encoding="utf-8")
    assert file["name"] == "specdemo-k.json" and read_result(path) == swept()
    shown = sweeps.open(VISITOR, {"file": str(path)})
    result = lines(shown["view"])[-1]
    assert result["recorded"] and result["rows"] and result["chart"]


def test_a_result_without_speed_ups_is_a_table_alone(bench, tmp_path):
    write_result(replace(swept(), axis=None, rows=[{"lane": "plain", "ms": 1.0}]), tmp_path / "r.json")
    shown = Sweeps("sweep").open(VISITOR, {"file": str(tmp_path / "r.json")})
    result = lines(shown["view"])[-1]
    assert result["rows"] == [{"lane": "plain", "ms": 1.0}] and "chart" not in result


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[" * 100_000, b'{"schema": 1}', b" " * 5_000_000])
def test_invalid_result_is_one_line_and_changes_nothing(bench, tmp_path, content):
    sweeps, path = Sweeps("sweep"), tmp_path / "r.json"
    list(played(sweeps, begin, VISITOR, VALUES))
    path.write_bytes(content)
    shown = sweeps.open(VISITOR, {"file": str(path)})
    assert lines(shown["view"])[-1]["type"] == "error"
    assert sweeps.save(VISITOR)["name"] == "specdemo-k.json"


def test_numbers_of_foreign_results_stay_readable():
    damaged = replace(swept(), config={"a": float("nan"), "b": [1]}, environment={"device": {"x": float("inf")}})
    assert lines(result_line(damaged, recorded=True))[0]["conditions"] == "3 repeats · a nan"


def test_a_link_fills_the_controls_and_runs_nothing(bench):
    values = restore(visit("sweep=batch&preset=embedded-ngram&repeats=2&new_tokens=32"), {})
    notes = values.pop("view")
    assert values == arguments("batch", "embedded-ngram", 2, 32)
    assert "note" not in notes and bench.options is None
    assert sweep.share(values) == "?sweep=batch&preset=embedded-ngram&repeats=2&new_tokens=32"


def test_race_and_sweep_links_are_independent():
    assert restore(visit("preset=embedded-draft&k=7"), {}) == {}
    assert Races(preset("embedded-draft"), False).open_link(visit("sweep=k&repeats=2"), {}) == {}


def test_a_hostile_link_leaves_notes():
    values = restore(visit("sweep=<b>&preset=../../etc&repeats=9999&new_tokens=nan&onload=x&repeats=2"), {})
    text = values.pop("view")
    assert values == Sweep().model_dump()
    assert [line["type"] for line in lines(text)] == ["run", *["note"] * 6]
    assert "repeats must be 10 or less, not 9999" in text


TEST = {"preset": "embedded-draft", "acceptance": "typical", "temperature": 0.7, "top_p": 0.9, "draws": 512}


def test_the_visitors_sampling_and_rule_are_tested(bench):
    outputs = list(played(Sweeps("sweep"), begin_test, VISITOR, TEST))
    expected = preset("embedded-draft").with_changes(acceptance="typical", temperature=0.7, top_p=0.9)
    assert bench.options == ("losslessness", {"preset": expected, "repeats": 2})
    last_test = lines(outputs[-1]["view"])[-1]
    assert last_test["type"] == "result" and last_test["axis"] == "token" and last_test["rows"][0]["plain"] == 0.75
    assert [bar["name"] for bar in last_test["chart"]["groups"][0]["bars"]] == ["plain", "speculative"]


TUNED = {"target": "code", "work": [], "minutes": 2.0, "prompt": "def add(a, b):"}


def test_a_search_is_that_of_the_controls_or_of_the_race(monkeypatch):
    seen = []

    def run(self, report, cancelled):
        seen.append((self.target, self.work, self.prompt, [*self.drafts], self.minutes))
        return tuned()

    monkeypatch.setattr(Tune, "run", run)
    race = to_values(preset("embedded-draft")) | {"prompt": "Once", "minutes": 1.5}
    starts = [
        (begin_tune, TUNED | {"work": [YOURS, "code edit"]}),
        (partial(begin_of_race, allow_any_model=False), race),
    ]
    for start, values in starts:
        [*played(Sweeps("tune"), start, VISITOR, values)]
    assert seen == [
        ("code", f"{YOURS},code edit", "def add(a, b):", [], 2.0),
        ("stories", YOURS, "Once", ["stories-draft-wide"], 1.5),
    ]
    for start, values in starts:
        with pytest.raises(ValueError, match="the prompt is empty"):
            start(values | {"prompt": " "}, None)


def test_the_first_search_that_is_seen_is_a_recorded_one():
    shown = lines(Sweeps("tune").recorded(visit(""), {"sweep": Tune.name})["view"])[1]
    assert shown["recorded"] and shown["chart"]["lines"] and [*shown["stages"]] == [*STAGES]
    assert shown["target"] == "stories" and shown["verdict"].startswith("For its prompt use")
    bars = [row for row in shown["rows"] if row["category"] == "mixed"]
    assert len([row for row in bars if row["place"] and row["race"]]) > 2 and bars[-1]["lane"] == "plain decoding"


def test_the_table_grows_and_the_result_is_a_file(monkeypatch):
    seen = []

    def run(self, report, cancelled):
        seen.append((self.target, self.work, self.minutes))
        report(0.5, "chat, 4 candidates", lambda: tuned(["chat"]))
        return tuned()

    monkeypatch.setattr(Tune, "run", run)
    jobs = Sweeps("tune")
    log = lines([*played(jobs, begin_tune, VISITOR, TUNED | {"work": ["code edit"]})][-1]["view"])
    assert seen == [("code", "code edit", 2.0)]
    assert [line["type"] for line in log] == ["run", "start", "loading", "result", "result"]
    assert [(len(line["rows"]), line["partial"]) for line in log[3:]] == [(10, True), (14, False)]
    assert (
        log[-1]["verdict"].startswith("For mixed work use ngram, k=7") and log[-1]["verdict"] not in log[-1]["remarks"]
    )
    assert log[-1]["commands"] == {"llama-server": "llama-server --spec <b>"} and log[-1]["stages"]["racing"] == 90.4
    assert [line["points"][-1] for line in log[-1]["chart"]["lines"]] == [[8, 5.0], [8, 8]]
    assert log[-1]["rows"][0]["speed-up"] == {"value": 1.31, "low": 1.26, "high": 1.36, "interval": "1.26 to 1.36"}
    saved = jobs.save(VISITOR)
    assert saved["name"] == "specdemo-tune.json" and read_result(saved["text"]) == tuned()
    assert json.loads(saved["text"])["rows"][0]["race"] == "preset=embedded-ngram&method=ngram&k=7"


SUITES = [*map(repr, suites.swept())]
DRAWS = "continuations must be 256 to 2560 on this page"
REFUSED = [  # start, changes, whether the page is public, reason
    (begin, VALUES | {"sweep": "elephant"}, False, f"sweep must be {', '.join(SUITES[:-1])} or {SUITES[-1]}"),
    (begin, VALUES | {"repeats": 11}, False, "repeats must be 10 or less, not 11"),
    (begin_test, TEST | {"preset": "evil/model"}, False, "unknown preset"),
    (begin_test, TEST | {"preset": "qwen3-8b"}, False, "only with the shipped models"),
    (begin_test, TEST | {"draws": 100_000}, False, DRAWS),
    (begin_test, TEST | {"draws": 300.5}, False, DRAWS),
    (begin_test, TEST | {"draws": 1024}, True, "continuations must be 256 to 768 on this page, not 1024"),
    (begin_tune, TUNED | {"target": "some/model"}, False, "not on this page's list"),
    (begin_tune, TUNED | {"minutes": 500.0}, False, "15 minutes at most"),
    (begin_tune, TUNED | {"target": "google/gemma-3-27b-it", "minutes": 1.0}, True, "not available on this public"),
    (begin_tune, TUNED, True, "1 minutes at most"),
]


@pytest.mark.parametrize(("start", "values", "public", "reason"), REFUSED)
def test_limits_hold_for_any_request_and_refusals_have_one_line(bench, monkeypatch, start, values, public, reason):
    if public:
        monkeypatch.setenv("SPECDEMO_PUBLIC", "1")
    last_line = lines([*played(Sweeps("sweep"), start, VISITOR, values)][-1]["view"])[-1]
    assert last_line["type"] == "error" and reason in last_line["text"] and "\n" not in last_line["text"]
    assert bench.options is None


def test_the_card_of_a_model_repeats_what_tune_found_last_for_this_file_on_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tmp_path / "mine"
    model.mkdir()
    (model / "config.json").write_text("{}")
    trace = hostile_trace()
    trace = replace(trace, config=trace.config | {"target": str(model)})

    def card():
        end = view(Finished(trace))
        return dict(end["card"]), end["found"]

    facts, query = card()
    assert "Found here" not in facts and not query
    assert facts["Drafters for it"].startswith("none is known; it would be a draft model of the same family")
    for other in ({"prompt_file": model / "config.json"}, {"target": "stories"}, {"engine": "vllm"}):
        Tune.build({"target": str(model), **other})._keep(tuned())
    assert card() == (facts, query)  # found on servers, with a user's prompts, or for another model
    Tune.build({"target": str(model)})._keep(tuned())
    assert card() == (facts, query)  # found on another machine
    here = {"device": trace.environment["device"], "date": "2026-11-21"}
    Tune.build({"target": str(model)})._keep(replace(tuned(), environment=here))
    facts, query = card()
    assert facts["Found here"] == "For mixed work use ngram, k=7: 1.31x as fast as plain decoding. (tune, 2026-11-21)"
    assert query == "preset=embedded-ngram&method=ngram&k=7"
    (model / "config.json").write_text('{"another": "model"}')
    assert not card()[1]


REQUEST = {"recipe": "medusa", "minutes": 1.0}


@pytest.fixture
def trainer(monkeypatch):
    stand_in = Trainer()
    monkeypatch.setattr(lab, "recipes", stand_in)
    monkeypatch.setattr(lab, "TRAINED", [])
    monkeypatch.delenv("SPACE_ID", raising=False)
    return stand_in


def last_training(request):
    return list(played(Lab("training"), train, VISITOR, request))[-1]["view"]


def test_training_is_a_growing_text(trainer):
    texts = [shown["view"] for shown in played(Lab("training"), train, VISITOR, REQUEST)]
    assert all(after.startswith(before) for before, after in pairwise(texts))
    seen = lines(texts[-1])
    assert [line["type"] for line in seen] == ["run", "note", *["tick"] * 4, "done"]
    assert "loss" not in seen[2] and seen[3]["loss"] == 3.0  # JSON has no NaN
    assert [seen[-1]["folder"]] == lab.TRAINED and "medusa-" in seen[-1]["folder"]


def test_curve_has_one_line_per_point(trainer):
    training = Training("medusa", 1.0)
    steps = [{"type": "tick", "seconds": 0.001 * i, "of_seconds": 60.0, "step": i, "loss": 1.0} for i in range(1000)]
    training.add([*steps, {**steps[-1], "agree_1": 0.5}])
    points = [line for line in lines(training.text) if line["type"] == "tick"]
    assert len(points) == 1000 * 0.001 * lab.POINTS // 60 + 2 and points[-1]["agree_1"] == 0.5


def test_stop_saves_the_partly_trained_head(trainer):
    visits, trainer.endless = Lab("training"), True
    shown = played(visits, train, VISITOR, REQUEST)
    while '"step":1' not in (update := next(shown))["view"]:
        pass
    assert update["race"]["interactive"] is False
    updates = [visits.stop(VISITOR), *shown]
    assert "the partly trained head will be saved" in updates[0]["view"]
    update = updates[-1]
    assert [line["type"] for line in lines(update["view"])][-2:] == ["done", "stopped"]
    assert update["race"]["interactive"] is True


def test_closing_the_tab_stops_training(trainer):
    trainer.endless = True
    training = Training("medusa", 1.0)
    texts = sync(training.follow())
    while '"step":1' not in next(texts):
        pass
    texts.close()
    training.end(10.0)
    assert trainer.stopped


def test_engine_is_locked_during_training(trainer, monkeypatch):
    monkeypatch.setattr("specdemo.ui.job.SILENT_S", 0.1)
    lock = session().lock
    training = Training("medusa", 1.0)
    with lock:
        texts = sync(training.follow())
        assert next(texts) == next(texts) == training.text and not trainer.started
    list(texts)
    assert trainer.started and lock.acquire(blocking=False)
    lock.release()


def test_invalid_input_is_one_line(trainer, monkeypatch):
    assert "unknown recipe" in last_training(REQUEST | {"recipe": "elephant"})
    trainer.fails = True
    assert lines(last_training(REQUEST))[-1]["text"] == "no text to learn from"
    monkeypatch.setenv("SPACE_ID", "someone/specdemo")
    assert "Training is disabled" in last_training(REQUEST)


def test_minutes_have_limits(trainer):
    list(sync(Training("medusa", math.inf).follow()))
    assert trainer.minutes == 30.0


def test_the_new_head_takes_lane_one(trainer, monkeypatch):
    visits = Lab("training")
    list(played(visits, train, VISITOR, REQUEST))
    [folder] = lab.TRAINED
    monkeypatch.setattr(model_menus, "TRAINED", [folder])
    updates = visits.race_head(VISITOR, dict.fromkeys(controls.DRAWN, 0))
    model = updates["model-1"]
    assert model["value"] == folder and model["visible"] and (folder.partition("/")[2], folder) in model["choices"]
    assert updates["preset"]["value"] == preset("embedded-draft").id


def test_until_a_visitor_trains_the_shipped_head_shows_how_it_learned(trainer):
    visits = Lab("training")
    seen = lines(visits.recorded(VISITOR, {"recipe": "eagle-3"})["view"])
    assert [seen[0]["recorded"], seen[0]["recipe"], seen[-1]["type"]] == [True, "eagle-3", "done"]
    agreed = [line["agree_1"] for line in seen if line["type"] == "tick"]
    assert len(agreed) == 18 and agreed[-1] > agreed[0]
    assert visits.recorded(VISITOR, {"recipe": "parrot"}) == {"view": ""}  # there is no recording
    (opening, *_) = lines(visits.recorded(VISITOR, {"recipe": None})["view"])  # the tab was opened before its menu
    assert opening["recipe"] == next(iter(lab.recipes.recipes()))
    list(played(visits, train, VISITOR, REQUEST))
    assert visits.recorded(VISITOR, {"recipe": "eagle-3"}) == {}
