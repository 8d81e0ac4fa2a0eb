"""The tab Tune without a browser."""

import json
from dataclasses import replace

import pytest

from specdemo.bench.result import read_result
from specdemo.bench.tune import Tune
from specdemo.engine.messages import Finished
from specdemo.ui.sweep import Sweeps
from specdemo.ui.tune import begin
from specdemo.ui.views import view
from tests.traces import hostile_trace
from tests.ui.stand_ins import VISITOR, lines, played, tuned

VALUES = {"target": "code", "work": [], "minutes": 2.0}


def test_the_table_grows_and_the_result_is_a_file(monkeypatch):
    seen = []

    def run(self, report, cancelled):
        seen.append((self.target, self.work, self.minutes))
        report(0.5, "chat, 4 candidates", lambda: tuned(["chat"]))
        return tuned()

    monkeypatch.setattr(Tune, "run", run)
    jobs = Sweeps("tune")
    log = lines([*played(jobs, begin, VISITOR, VALUES | {"work": ["code edit"]})][-1]["view"])
    assert seen == [("code", "code edit", 2.0)]
    assert [line["type"] for line in log] == ["run", "start", "loading", "result", "result"]
    assert [(len(line["rows"]), line["partial"]) for line in log[3:]] == [(4, True), (8, False)]
    assert log[-1]["verdict"].startswith("For mixed work use ngram, k=7")
    saved = jobs.save(VISITOR)
    assert saved["name"] == "specdemo-tune.json" and read_result(saved["text"]) == tuned()
    assert json.loads(saved["text"])["rows"][0]["race"] == "preset=embedded-ngram&method=ngram&k=7"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"target": "some/model"}, "not on this page's list"),
        ({"minutes": 500.0}, "15 minutes at most"),
    ],
)
def test_refusals_have_one_line(values, reason):
    with pytest.raises(ValueError, match=reason) as refused:
        begin(VALUES | values, None)
    assert "\n" not in str(refused.value)


def test_a_public_page_measures_models_at_hand_only(monkeypatch):
    monkeypatch.setenv("SPECDEMO_PUBLIC", "1")
    with pytest.raises(ValueError, match="not available on this public page"):
        begin(VALUES | {"target": "google/gemma-3-27b-it", "minutes": 1.0}, None)
    with pytest.raises(ValueError, match="1 minutes at most"):
        begin(VALUES, None)


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
