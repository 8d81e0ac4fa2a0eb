"""Round trips from presets to values of controls, their descriptions, and values that the page rejects."""

import json
import re
from pathlib import Path

import pytest

from specdemo.models import packaged
from specdemo.presets.files import load_presets, preset
from specdemo.presets.limits import LIMITS
from specdemo.ui import setup
from specdemo.ui.setup import COMPARISON_FIELDS, LANE, changed, from_values, to_values


def test_every_control_has_a_value_by_its_name():
    values = to_values(preset("embedded-ngram"))
    assert (values["preset"], values["count"]) == ("embedded-ngram", 1) and {*values} == {*setup.NAMES}
    assert len(values) == 2 + len(COMPARISON_FIELDS) + setup.LANES * len(LANE)


@pytest.mark.parametrize("name", list(load_presets()))
def test_controls_give_back_the_preset(name):
    assert from_values(to_values(preset(name))) == preset(name).with_changes()  # without options at their default


def place(name, lane=None):
    return name if lane is None else f"{name}-{lane + 1}"


@pytest.fixture
def values():
    return to_values(preset("embedded-three-lanes"))


def test_browser_integers_may_arrive_as_floats(values):
    values[place("k", 1)], values[place("seed")] = 7, 3
    chosen = from_values(values)
    assert (chosen.lanes[1].k, chosen.seed) == (7, 3) and type(chosen.seed) is int


@pytest.mark.parametrize(
    ("name", "changes", "line"),
    [
        ("embedded-draft", {}, "stories · 1.3M draft · k 4 · greedy · 160 tokens"),
        (
            "embedded-draft",
            {"k-1": 7, "temperature": 0.8, "top_p": 0.9, "max_new_tokens": 1, "schedule": "sequential"},
            "stories · 1.3M draft · k 7 · temperature 0.8 · top-p 0.9 · 1 token · sequential",
        ),
        ("embedded-code", {}, "code · 2.6M draft · k 8 · EAGLE · k 3 · Prompt lookup · k 6 · greedy · 120 tokens"),
        ("embedded-ngram", {}, "stories · Prompt lookup · k 8 · greedy · 96 tokens"),
        ("qwen3-8b", {}, "Qwen3 8B · 0.6B draft · k 4 · Prompt lookup · k 6 · chat template · greedy · 256 tokens"),
    ],
)
def test_settings_are_named_in_chips(name, changes, line):
    row = json.loads(setup.show_setup(None, to_values(preset(name)) | changes)["setup"])
    assert " · ".join(words for _, words in row["chips"]) == line and row["custom"] is bool(changes)


def test_the_address_follows_valid_settings(values):
    def query(**changes):
        return json.loads(setup.show_setup(None, values | changes)["setup"])["query"]

    assert query() == "preset=embedded-three-lanes"
    assert query(**{"k-2": 9}) == "preset=embedded-three-lanes&k2=9"
    assert query(seed=None) is None and query(**{"k-1": None}) is None  # half typed


@pytest.mark.parametrize("made", [set(), {"smollm2", "smollm2.gguf"}, {"smollm2.gguf"}])
def test_the_menu_has_every_preset_once_and_those_of_a_real_model_that_is_here_first(made, monkeypatch):
    monkeypatch.setattr(packaged, "local", lambda name: Path(name) if name in made else None)
    examples, others = setup.menus()
    first = [load_presets()[id].target in made for _, id in examples]
    assert sum(first) == {0: 0, 2: 3, 1: 1}[len(made)] and first == sorted(first, reverse=True)
    assert sorted(id for _, id in (*examples, *others)) == sorted(load_presets())
    few = [load_presets()[id] for _, id in examples]
    assert 6 <= sum(preset.embedded for preset in few) <= 8 and all(preset.here for preset in few)
    needs = {title: load_presets()[id].group for title, id in others if " · needs " in title}
    assert needs and all(("GPU" in title) != ("RAM" in wanted) for title, wanted in needs.items())


def test_method_without_a_model_drops_the_hidden_model(values):
    values[place("method", 0)] = "ngram"
    values[place("options", 0)] = {"max_n": 5, "left over": 1}
    lane = from_values(values).lanes[0]
    assert lane.model is None and lane.options == {"max_n": 5}


@pytest.mark.parametrize(
    ("name", "lane", "value", "message"),
    [
        ("k", 0, 99, "k must be 16 or less"),
        ("k", 0, 2.5, "k must be a whole number"),
        ("max_new_tokens", None, 10**9, f"max_new_tokens must be {LIMITS.max_new_tokens} or less"),
        ("prompt", None, "  ", "the prompt is empty; write at least one word"),
        ("method", 0, "dept", "unknown method"),
        ("target", None, "/etc/passwd", "/etc/passwd is not a GGUF file"),
        ("model", 0, "evil/model", "not on this page's list"),
    ],
)
def test_limits_are_checked_in_python(values, name, lane, value, message):
    values[place(name, lane)] = value
    with pytest.raises(ValueError, match=message) as caught:
        from_values(values)
    assert "\n" not in str(caught.value)


def test_overrides_of_the_endpoints():
    assert changed("embedded-draft", {"k": 6, "temperature": 0.5}, False).lanes[0].k == 6
    assert changed("embedded-draft", None, False) == preset("embedded-draft")
    for value in ([1, 2], "k", 5):
        with pytest.raises(ValueError, match="overrides must be an object of settings"):
            changed("embedded-draft", value, False)
    with pytest.raises(ValueError, match="must be text, not 5"):
        changed(5, None, False)
    with pytest.raises(ValueError, match="did you mean 'temperature'"):
        changed("embedded-draft", {"temprature": 1}, False)
    with pytest.raises(ValueError, match="not on this page's list"):
        changed("embedded-draft", {"target": "../../x"}, False)


def test_memory_is_stated_before_a_model_is_loaded_or_downloaded(values, monkeypatch):
    """A model that is not here is named by its size and its known config, without the hub."""
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", None)
    here = setup.show_setup(None, values)["about"]
    assert re.search(r"Memory: target 39.5 MB, drafter .*; fits into the free [\d.]+ GB\.$", here)
    monkeypatch.setattr("specdemo.engine.session.free_bytes", lambda device: [20 * 10**9])
    absent = setup.show_setup(None, to_values(preset("qwen3-8b")))["about"]
    assert re.search(r"Memory: target (16|32).0 GB, drafter .*, KV cache of \d+ tokens .*; does not fit into", absent)
    monkeypatch.setenv("SPACE_ID", "a/b")
    assert "Memory" not in setup.show_setup(None, values)["about"]
