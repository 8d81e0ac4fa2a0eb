"""How often the settings of a run are validated on the way from a user to the lanes."""

from collections import Counter

import pytest

from specdemo import run
from specdemo.__main__ import main
from specdemo.engine import comparison
from specdemo.engine.comparison import Comparison, Lane, Settings
from specdemo.presets.drafters import all_published
from specdemo.presets.files import Preset, load_presets, preset
from specdemo.ui.race import Log, Races
from specdemo.ui.setup import changed, to_values
from tests.ui.stand_ins import sync

ID = "embedded-three-lanes"


def finished(log):
    return [*sync(log.follow())] and log.result()


def on_the_page(values=None):
    values = values or to_values(preset(ID)) | {"max_new_tokens": 4}
    assert finished(Races(preset(ID), False).race(values, None))


def over_the_api():
    assert finished(Log(spec=changed(ID, {"max_new_tokens": 4}, False)))


RUNS = {
    "command line": lambda: main(["run", ID, "--max-new-tokens", "4"]),
    "command line, settings of lanes": lambda: main(["run", ID, "--max-new-tokens", "4", "--k", "2"]),
    "page": on_the_page,
    "API": over_the_api,
    "library": lambda: run(ID, max_new_tokens=4),
}


@pytest.mark.parametrize("start", RUNS)
def test_a_run_validates_its_comparison_once(monkeypatch, start):
    load_presets()
    all_published()
    counts = Counter()
    build, parse = Settings.build.__func__, comparison.parse_options

    def count_build(cls, data):
        counts[cls] += 1
        return build(cls, data)

    def count_parse(name, values):
        counts[name] += 1
        return parse(name, values)

    monkeypatch.setattr(Settings, "build", classmethod(count_build))
    monkeypatch.setattr(comparison, "parse_options", count_parse)
    RUNS[start]()
    methods = Counter(["none", *(lane.method for lane in preset(ID).lanes)])
    assert counts == methods | Counter({Preset: 1})


@pytest.mark.parametrize(("value", "mode"), [(True, "on"), (False, "off"), ("off", "off"), ("default", "default")])
def test_thinking_may_be_a_boolean_as_yaml_reads_it(value, mode):
    settings = {"id": "x", "target": "stories", "prompt": "x", "lanes": [{"method": "ngram"}]}
    assert Comparison.build({**settings, "thinking": value}).thinking == mode
    with pytest.raises(ValueError, match=r"thinking must be 'default', 'on' or 'off'"):
        Comparison.build({**settings, "thinking": "maybe"})


def test_a_changed_copy_of_a_lane_parses_its_own_options():
    lane = Lane(method="ngram", options={"max_n": 3})
    assert lane.parsed.max_n == 3 and lane.parsed is lane.parsed
    assert lane.model_copy(update={"options": {"max_n": 5}}).parsed.max_n == 5
    assert lane.model_copy(update={"method": "suffix", "options": {}}).parsed.nodes == 0
    assert lane == Lane(method="ngram", options={"max_n": 3}) and lane.model_dump() == lane.model_copy().model_dump()
