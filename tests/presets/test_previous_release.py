"""Files and links that the previous release (commit 0cca016) wrote, which this one must open."""

import json
from pathlib import Path

import pytest

from specdemo.core.rules import DEFAULT_RULE
from specdemo.core.trace import compare, from_json, to_json, token_kinds
from specdemo.presets.files import load_presets, read_presets
from specdemo.presets.link import from_query, to_query

FOLDER = Path(__file__).parent / "previous_release"
LINKS = json.loads((FOLDER / "links.json").read_text(encoding="utf-8"))


def test_a_trace_opens_and_keeps_its_keys():
    text = (FOLDER / "trace.json").read_text(encoding="utf-8")
    trace = from_json(text)
    baseline, lane = trace.lanes
    assert lane.token_ids == baseline.token_ids and lane.method == "medusa" and lane.summary["accepted"] > 0
    assert {"accepted", "corrected"} & {kind for event in lane.events for kind in token_kinds(event)}
    assert compare(baseline, lane, greedy=True, schedule=trace.schedule)["identical"] is True
    before, after = json.loads(text), json.loads(to_json(trace))
    assert before.keys() <= after.keys()
    for old, new in zip(before["lanes"], after["lanes"], strict=True):
        assert old.keys() <= new.keys() and old["summary"].keys() <= new["summary"].keys()
        assert old["token_ids"] == new["token_ids"] and len(old["events"]) == len(new["events"])
    assert before["comparison"][0].keys() <= after["comparison"][0].keys()


@pytest.mark.parametrize("base", LINKS)
def test_a_link_opens_with_every_setting(base):
    preset, notes = from_query(LINKS[base], load_presets())
    assert not notes
    assert (preset.prompt, preset.temperature, preset.top_p) == ("Once & again", 0.7, 0.9)
    assert (preset.max_new_tokens, preset.seed) == (48, 5)
    assert to_query(preset, load_presets()[base]) == LINKS[base]


def test_a_preset_opens_with_every_key():
    preset = json.loads(read_presets(FOLDER / "preset.yaml")[0].model_dump_json())
    expected = json.loads((FOLDER / "preset.json").read_text(encoding="utf-8")) | {"id": preset["id"]}
    for lane, old in zip(preset["lanes"], expected["lanes"], strict=True):
        assert not any(lane.pop(name) for name in lane.keys() - old.keys())  # later settings are at their defaults
        if old["acceptance"] == "lossless":  # the default of that release
            old["acceptance"] = DEFAULT_RULE
    assert {name: preset[name] for name in expected} == expected
