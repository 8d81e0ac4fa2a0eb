"""The Lab's test of losslessness without a browser, with a stand-in for what measures."""

import json
from types import SimpleNamespace

import pytest

from specdemo.presets.schema import preset
from specdemo.ui import losslessness
from specdemo.ui.losslessness import begin
from specdemo.ui.sweep import Sweeps
from tests.ui.stand_ins import Bench

VISITOR = SimpleNamespace(session_hash="a")
VALUES = ("embedded-draft", "typical", 0.7, 0.9, 512)


@pytest.fixture
def bench(monkeypatch):
    stand_in = Bench()
    monkeypatch.setattr(losslessness, "suite", stand_in)
    monkeypatch.delenv("SPACE_ID", raising=False)
    return stand_in


def lines(text):
    return [json.loads(line) for line in text.splitlines()]


def test_the_visitors_sampling_and_rule_are_tested(bench):
    outputs = list(Sweeps(begin).run(VISITOR, *VALUES))
    wanted = preset("embedded-draft").with_changes(acceptance="typical", temperature=0.7, top_p=0.9)
    assert bench.asked == ("losslessness", {"preset": wanted, "repeats": 2})
    last = lines(outputs[-1][0])[-1]
    assert last["type"] == "result" and last["axis"] == "token" and last["rows"][0]["plain"] == 0.75
    assert len(outputs[-1][1]["value"].data) == 2


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, "evil/model", "unknown preset"),
        (0, "qwen3-8b", "on the models that ship with the project"),
        (1, "elephant", "acceptance must be"),
        (2, 99.0, "temperature must be 5.0 or less"),
        (2, None, "temperature"),
        (3, 0.0, "top_p must be above 0"),
        (4, 100_000, "continuations must be 256 to 2560 on this page"),
        (4, 0, "continuations must be 256 to 2560 on this page"),
        (4, 300.5, "continuations must be a whole number"),
    ],
)
def test_limits_hold_whatever_a_client_sends(bench, at, value, message):
    values = [*VALUES[:at], value, *VALUES[at + 1 :]]
    ((text, _),) = Sweeps(begin).run(VISITOR, *values)
    assert lines(text)[-1]["type"] == "error" and message in lines(text)[-1]["text"] and bench.asked is None


def test_a_public_page_tests_less(bench, monkeypatch):
    monkeypatch.setenv("SPECDEMO_PUBLIC", "1")
    ((text, _),) = Sweeps(begin).run(VISITOR, *VALUES[:4], 1024)
    assert "continuations must be 256 to 768 on this page, not 1024" in text
