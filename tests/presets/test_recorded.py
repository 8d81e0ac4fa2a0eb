"""The shipped recordings: they load, are complete, and match the current presets."""

from pathlib import Path

import pytest

from specdemo.core.rules import RULES
from specdemo.engine.comparison import Comparison
from specdemo.presets import recorded as module
from specdemo.presets.files import FOLDER, preset
from specdemo.presets.recorded import recorded
from specdemo.ui.views import finish

SHIPPED = sorted((FOLDER / "recorded").glob("*.json"))


def test_at_least_three_ship():
    assert len(SHIPPED) >= 3 and FOLDER / "recorded" / "embedded-draft.json" in SHIPPED


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_recorded_run_is_a_run_of_its_preset(path):
    assert path.stat().st_size < 300_000
    trace, spec = recorded(path.stem), preset(path.stem)
    assert isinstance(spec, Comparison) and trace.preset == path.stem
    assert trace.prompt == spec.prompt and trace.schedule == spec.schedule
    assert {name: trace.config[name] for name in ("target", "max_new_tokens", "seed", "temperature")} == {
        "target": spec.target,
        "max_new_tokens": spec.max_new_tokens,
        "seed": spec.seed,
        "temperature": spec.sampling.temperature,
    }
    assert [lane.method for lane in trace.lanes[1:]] == [lane.method for lane in spec.lanes]
    for recorded_lane, lane in zip(trace.lanes[1:], spec.lanes, strict=True):
        assert {"k": lane.k, **lane.options}.items() <= recorded_lane.options.items()
    verdicts = ["identical" if RULES[lane.acceptance].lossless else "lossy" for lane in spec.lanes]
    assert finish(trace) == "done" and [row["verdict"] for row in trace.comparison] == verdicts
    assert trace.environment["device"] and trace.environment["date"] and trace.environment["commit"]


def test_a_damaged_recording_names_itself(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    Path(tmp_path / "recorded").mkdir()
    Path(tmp_path / "recorded" / "odd.json").write_text("{}", encoding="utf-8")
    recorded.cache_clear()
    with pytest.raises(ValueError, match="odd.json: not a specdemo trace"):
        recorded("odd")
    assert recorded("absent") is None
    recorded.cache_clear()
