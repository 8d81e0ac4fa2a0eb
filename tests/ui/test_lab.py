"""Training on the page, with a stand-in trainer."""

import math
from itertools import pairwise

import pytest

from specdemo.engine.session import session
from specdemo.presets.files import preset
from specdemo.ui import controls, lab, model_menus
from specdemo.ui.lab import Lab, Training, train
from tests.ui.stand_ins import VISITOR, Trainer, lines, played, sync

REQUEST = {"recipe": "medusa", "minutes": 1.0}


@pytest.fixture
def trainer(monkeypatch):
    stand_in = Trainer()
    monkeypatch.setattr(lab, "recipes", stand_in)
    monkeypatch.setattr(lab, "TRAINED", [])
    monkeypatch.delenv("SPACE_ID", raising=False)
    return stand_in


def last(request):
    return list(played(Lab("training"), train, VISITOR, request))[-1]["view"]


def test_stand_in_has_the_interface_of_the_lab():
    real = lab.recipes
    assert all(callable(getattr(real, name)) for name in ("recipes", "head_recipe", "train_live"))
    assert all(real.head_recipe(name).method for name in real.recipes())


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


def test_engine_is_locked_during_training(trainer):
    lock = session().lock
    training = Training("medusa", 1.0)
    with lock:
        texts = sync(training.follow())
        assert next(texts) == next(texts) == training.text and not trainer.started
    list(texts)
    assert trainer.started and lock.acquire(blocking=False)
    lock.release()


def test_invalid_input_is_one_line(trainer, monkeypatch):
    assert "unknown recipe" in last(REQUEST | {"recipe": "elephant"})
    trainer.fails = True
    assert lines(last(REQUEST))[-1]["text"] == "no text to learn from"
    monkeypatch.setenv("SPACE_ID", "someone/specdemo")
    assert "Training is disabled" in last(REQUEST)


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
