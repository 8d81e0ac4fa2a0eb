"""The drafters of a target, which every command and the page show from one search."""

import json
from dataclasses import replace

import pytest

from specdemo.__main__ import main
from specdemo.bench.tune import Tune
from specdemo.models.ref import ModelRef
from specdemo.presets.drafters import drafters_of
from specdemo.presets.files import load_presets
from specdemo.presets.link import OWN
from specdemo.presets.pair import add_race, pair
from specdemo.ui import model_menus
from tests.traces import hostile_trace

CASES = {  # the method, place and file of each drafter, by target
    "stories": None,
    "smollm2_folder": None,
    "big.gguf": {("draft_model", "its folder", "small.gguf")},
    "layer.gguf": {("mtp", "in the target", "layer.gguf")},
    "alone.gguf": set(),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("llama_cpp", reason="llama.cpp is not installed: pip install llama-cpp-python gguf")
    from tests.gguf_random import shape_of, write_random

    folder = tmp_path_factory.mktemp("models")
    for name, blocks in (("pair/big", 8), ("pair/small", 4), ("one/alone", 4)):
        (folder / name).parent.mkdir(exist_ok=True)
        write_random(folder / f"{name}.gguf", "qwen35", shape_of("qwen35") | {"block_count": blocks})
    (folder / "own").mkdir()
    write_random(folder / "own" / "layer.gguf", "qwen35", shape_of("qwen35", prediction=True))
    return folder


@pytest.mark.parametrize("case", CASES)
def test_every_command_and_the_page_show_the_same_drafters(case, request, monkeypatch, capsys):
    if case.endswith(".gguf"):
        (path,) = request.getfixturevalue("folder").glob(f"*/{case}")
    else:
        path = request.getfixturevalue(case) if case == "smollm2_folder" else case
    target = ModelRef(path)
    monkeypatch.setattr("specdemo.bench.doctor._passes", lambda target: "")
    model_menus._pairs.cache_clear()
    fits = [fit for fit in drafters_of(target) if fit.fits is not False]
    if CASES[case] is not None:
        assert {(fit.method, fit.place, fit.drafter.label) for fit in fits} == CASES[case]
    drafters = {fit.drafter for fit in fits}
    menu = {(fit.method, model) for fit in fits for model in model_menus.fitting_models(target, fit.method)}
    assert menu == {(fit.method, fit.drafter) for fit in fits}
    assert main(["doctor", target]) == 0
    table = [line.split()[:3] for line in capsys.readouterr().out.partition("\n\n")[0].splitlines()[1:]]
    assert {(method, name) for name, method, word in table if word != "no" and name != "none"} == menu
    assert {lane.model for lane in Tune.build({"target": target}).lanes(fits).values() if lane.model} == drafters
    assert main(["drafters", target, "--json"]) == 0
    assert {row["drafter"] for row in json.loads(capsys.readouterr().out)} == drafters
    lanes = {lane.model for lane in pair(target).lanes if lane.model}
    assert lanes == {fit.drafter for fit in fits if fit.place == "in the target"}
    trace = hostile_trace()
    facts = dict(model_menus.model_card(replace(trace, config=trace.config | {"target": target})).get("card", ()))
    shown = facts.get("Drafters for it", "")
    assert all(fit.drafter.short_name in shown for fit in fits[: model_menus.CARD_MODELS if facts else 0])


@pytest.mark.parametrize(
    ("case", "methods"), [("big.gguf", ["draft_model", "adaptive"]), ("alone.gguf", ["suffix", "adaptive"])]
)
def test_a_page_races_the_draft_model_beside_its_target_and_adaptive_lookup(case, methods, folder, monkeypatch):
    monkeypatch.setitem(load_presets(), OWN, None)
    (path,) = folder.glob(f"*/{case}")
    lanes = add_race(ModelRef(path)).lanes
    assert [lane.method for lane in lanes] == methods and load_presets()[OWN].lanes == lanes
    assert lanes[0].model == (str(path.with_name("small.gguf")) if case == "big.gguf" else None)
    assert lanes[1].options == {"drafter": "ngram"}


def test_a_draft_model_for_which_there_is_no_room_is_left_out_unless_it_was_named(folder, monkeypatch):
    def check_room(_, spec):
        if any(lane.model for lane in spec.lanes):
            raise ValueError("no room")

    monkeypatch.setitem(load_presets(), OWN, None)
    monkeypatch.setattr("specdemo.engine.session.Session.check_room", check_room)
    big = ModelRef(folder / "pair" / "big.gguf")
    assert [lane.method for lane in add_race(big).lanes] == ["suffix", "adaptive"]
    with pytest.raises(ValueError, match="no room"):
        add_race(big, ModelRef(big.replace("big", "small")))
