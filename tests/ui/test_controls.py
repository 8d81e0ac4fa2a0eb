"""Properties and updates of the controls."""

import json
from dataclasses import replace

import pytest

from specdemo.methods import method_options, model_method
from specdemo.models.packaged import embedded_folder
from specdemo.models.ref import ModelRef
from specdemo.presets.files import load_presets, preset
from specdemo.presets.pair import prompt_for
from specdemo.ui import controls, model_menus, setup
from specdemo.ui.controls import fill
from specdemo.ui.setup import from_values, to_values

DRAWN = dict.fromkeys(controls.DRAWN, 0)
FIELD = {"target", "start-with"}  # what a target that is refused updates
REQUEST = preset("embedded-three-lanes").with_changes(k=9, temperature=0.5)


def test_another_method_starts_with_its_own_options():
    lane = {"target": "stories", "last-method": "eagle", "drawn": 3}
    switched = controls._switch(None, lane | {"method": "ngram"})
    assert switched["options"] == {} and switched["drawn"] == 4 and switched["model"]["visible"] is False
    model = controls._switch(None, lane | {"method": "draft_model"})["model"]
    assert model["visible"] is True and model["value"] == "stories-draft-wide"


def test_a_menu_that_is_left_without_a_choice_changes_nothing():
    """Gradio reports an input whenever a menu loses the focus."""
    values = {name: look["value"] for name, look in controls.component_props(REQUEST).items() if "value" in look}
    lane = {name: values.get(f"{name}-1", 0) for name in ("method", "acceptance", "drawn", *controls.LAST)}
    assert {*controls._refit(None, values)} == FIELD
    assert controls._switch(None, lane) == controls._switch_rule(None, lane) == {}
    other = controls._switch_rule(None, lane | {"acceptance": "typical"})
    assert other == {"acceptance_options": {}, "drawn": 1, "last-acceptance": "typical"}


@pytest.mark.parametrize("local", [True, False])
def test_a_target_that_the_page_does_not_offer_is_refused_at_its_field_and_leaves_the_lanes_alone(local, monkeypatch):
    monkeypatch.setenv("SPECDEMO_FILES", "1" if local else "0")
    monkeypatch.setattr(model_menus, "pairs", None)  # nothing is read
    missing = "/home/ann/deep er/" + "does-not-exist.gguf"
    values = to_values(REQUEST) | {"target": missing, "last-target": "stories"}
    refused = controls._refit(None, values)
    assert {*refused} == FIELD and controls.offer(None, values) == {}
    assert "value" not in refused["target"]  # the field keeps what was typed
    command = f"python app.py --target '{missing}'"
    reason = f"{missing} does not exist; type the path" if local else f"to use this file, start with `{command}`"
    assert reason in refused["target"]["info"]
    assert (refused["start-with"]["visible"], refused["start-with"]["value"]) == (not local, command)
    obstacle = json.loads(setup.show_setup(None, values, allow_any_model=False)["setup"])["obstacle"]
    assert reason in obstacle
    with pytest.raises(ValueError, match="does-not-exist"):
        setup.from_values(values)  # no other model is raced
    again = controls._refit(None, values | {"target": "stories"})
    assert {*again} == FIELD and not again["start-with"]["visible"] and "exist" not in (again["target"]["info"] or "")
    values = to_values(REQUEST) | {"model-2": missing}
    assert missing in json.loads(setup.show_setup(None, values, allow_any_model=False)["setup"])["obstacle"]


def test_a_file_of_this_machine_that_is_typed_may_race_and_other_files_are_no_models(monkeypatch, tmp_path):
    page = to_values(REQUEST) | {"last-target": "stories"}
    folder = str(embedded_folder() / "stories-bytes")
    typed = controls._refit(None, page | {"target": folder, "method-1": "mtp"})
    assert typed["last-target"] == folder and "stories-bytes-heads" in typed["model-1"]["value"]
    assert typed["prompt"] == prompt_for(ModelRef(folder))
    assert "prompt" not in controls._refit(None, page | {"target": folder, "prompt": "Mine"})
    own = to_values(preset("embedded-ngram")) | {"target": folder}
    assert setup.from_values(own).target == folder
    for file in ("notes.txt", "bad.gguf", "folder/config.json"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("{}")
    for file, reason in (("notes.txt", "is not a GGUF file"), ("bad.gguf", "is not a GGUF file"), ("folder", "")):
        refused = controls._refit(None, page | {"target": str(tmp_path / file)})["target"]["info"]
        assert reason in refused and "type the path of a GGUF file" in refused and "\n" not in refused
    changes = {"target": folder, "method": "ngram"}
    with pytest.raises(ValueError, match="is not on this page's list"):  # typed on the page only, not in a call
        setup.changed("embedded-ngram", changes, False)
    monkeypatch.setenv("SPECDEMO_FILES", "0")
    with pytest.raises(ValueError, match="start with `python app.py --target"):
        setup.from_values(own)


def test_wrapped_method_decides_whether_a_model_is_shown():
    lane, (_, drafter) = {"target": "stories", "method": "adaptive", "options": {}}, method_options("adaptive")
    assert (drafter.name, drafter.default) == ("drafter", "draft_model")
    changed = controls._set(drafter, None, lane | {"value": "ngram"})
    assert changed["options"] == {"drafter": "ngram"} and changed["model"]["visible"] is False
    back = controls._set(drafter, None, lane | {"options": {"drafter": "ngram", "x": 1}, "value": "draft_model"})
    assert back["options"] == {"x": 1} and back["model"]["visible"]  # an option at its default is left out
    assert "model" not in controls._set(replace(drafter, name="k_max"), None, lane | {"value": 9})


def test_another_target_takes_another_drafter_or_none():
    lanes = {f"method-{n}": "mtp" for n in setup.NUMBERS} | {f"options-{n}": {} for n in setup.NUMBERS}
    lanes |= {"last-target": "stories", "method-2": "dflash", "preset": "embedded-draft", "prompt": "Once"}
    fitted = controls._refit(None, lanes | {"target": "stories-bytes"})
    assert fitted["model-1"]["value"] == "stories-bytes-heads" and fitted["model-1"]["visible"]
    assert fitted["model-2"]["visible"] and fitted["model-2"]["value"] is None
    shown = controls._fit_model(ModelRef("stories"), "gemma4_assistant", {})
    assert shown["visible"] and shown["value"] is None
    assert "<b title='stories-draft-wide'>stories-draft-wide</b> another tokenizer" in fitted["unfit"]


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("layer_skip", "Layer skip runs layers of the target by themselves, which GGUF files do not support"),
        ("gemma4_assistant", "Gemma 4 assistant reads the target's KV cache, which GGUF files do not support"),
        ("medusa", "Medusa needs a drafter for model.gguf; name one under Drafter"),
        ("draft_model", "Draft model needs a drafter for model.gguf"),
        ("adaptive", "Adaptive length needs a drafter"),
        ("ngram", ""),
        ("suffix", ""),
    ],
)
def test_a_method_that_cannot_run_on_a_target_says_why_before_run(method, reason, monkeypatch):
    monkeypatch.setenv("SPECDEMO_FILES", "0")  # the file does not exist
    values = to_values(preset("embedded-draft")) | {"target": "/models/model.gguf", "method-1": method}
    values |= {"model-1": controls._fit_model(ModelRef(values["target"]), method, {})["value"], "options-1": {}}
    shown = json.loads(setup.show_setup(None, values)["setup"])["obstacle"]
    assert shown.startswith(reason) if reason else not shown
    label = {name: title for title, name in model_menus.method_choices(ModelRef(values["target"]))}[method]
    assert ("do not support" in reason) == label.endswith(model_menus.GREY + reason)


@pytest.mark.parametrize("name", list(load_presets()))
def test_a_lane_offers_the_models_of_its_method_alone(name):
    values = to_values(preset(name))
    before = controls.offer(None, values)
    for n in setup.NUMBERS:
        offered = [model for _, model in before[f"model-{n}"]["choices"]]
        reads = model_method(values[f"method-{n}"], values[f"options-{n}"])
        fitting = {pair.drafter for pair in model_menus.pairs(ModelRef(values["target"])) if pair.method == reads}
        assert {*offered} <= fitting | {values[f"model-{n}"]}
        assert (values[f"method-{n}"] in dict(map(reversed, before[f"method-{n}"]["choices"]))) != (reads == "none")


def test_lanes_are_added_and_removed_within_limits():
    assert [controls._lane_looks(n)["count"]["value"] for n in (0, 99)] == [1, setup.LANES]
    shown = controls._lane_looks(2)
    assert [shown[f"lane-{n}"]["visible"] for n in setup.NUMBERS] == [True, True, False]


def test_the_prompt_is_a_message_where_the_target_has_a_template():
    large = load_presets()["qwen3-8b"]
    values = to_values(large)
    assert values["chat"] == setup.CHAT and from_values(values).chat is None
    values["chat"] = setup.TEXT
    assert from_values(values).chat is False
    values["target"] = "stories"
    assert from_values(values).chat is None  # the model has no chat template
    radio, system, _, tasks = controls._chat_looks(ModelRef("stories"), None).values()
    assert tasks == {"visible": False}  # they are messages
    assert radio["interactive"] is False and "no chat template" in radio["info"] and system["visible"] is False
    updates = fill(large.with_changes(chat=False, system="Be brief."), DRAWN)
    assert updates["chat"]["value"] == setup.TEXT and updates["system"]["value"] == "Be brief."


def test_a_lane_may_run_on_a_server_that_the_operator_listed(monkeypatch):
    values = to_values(preset("embedded-three-lanes"))
    monkeypatch.setenv("SPECDEMO_SERVERS", "gpu-box:8000")
    values["server-2"] = "http://gpu-box:8000"
    assert [lane.server for lane in from_values(values).lanes] == [None, "http://gpu-box:8000"]
    assert controls._servers(None) == [("this machine", ""), ("server gpu-box:8000", "http://gpu-box:8000")]
    monkeypatch.delenv("SPECDEMO_SERVERS")
    assert controls._servers(None) == [("this machine", "")]
