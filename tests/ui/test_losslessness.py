"""The losslessness test in the Lab without a browser, with a stand-in benchmark."""

import pytest

from specdemo.presets.files import preset
from specdemo.servers import address
from specdemo.ui.lab import begin, begin_check
from specdemo.ui.sweep import Sweeps
from tests.completion_server import completion_server, piece
from tests.ui.stand_ins import VISITOR, lines, played

VALUES = {"preset": "embedded-draft", "acceptance": "typical", "temperature": 0.7, "top_p": 0.9, "draws": 512}


def last(values):
    return list(played(Sweeps("sweep"), begin, VISITOR, values))[-1]["view"]


def test_the_visitors_sampling_and_rule_are_tested(bench):
    outputs = list(played(Sweeps("sweep"), begin, VISITOR, VALUES))
    expected = preset("embedded-draft").with_changes(acceptance="typical", temperature=0.7, top_p=0.9)
    assert bench.options == ("losslessness", {"preset": expected, "repeats": 2})
    last = lines(outputs[-1]["view"])[-1]
    assert last["type"] == "result" and last["axis"] == "token" and last["rows"][0]["plain"] == 0.75
    assert [bar["name"] for bar in last["chart"]["groups"][0]["bars"]] == ["plain", "speculative"]


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        ("preset", "evil/model", "unknown preset"),
        ("preset", "qwen3-8b", "only with the shipped models"),
        ("acceptance", "elephant", "acceptance must be"),
        ("temperature", 99.0, "temperature must be 5.0 or less"),
        ("temperature", None, "temperature"),
        ("top_p", 0.0, "top_p must be above 0"),
        ("draws", 100_000, "continuations must be 256 to 2560 on this page"),
        ("draws", 0, "continuations must be 256 to 2560 on this page"),
        ("draws", 300.5, "continuations must be a whole number"),
    ],
)
def test_limits_hold_for_any_request(bench, at, value, message):
    text = last(VALUES | {at: value})
    assert lines(text)[-1]["type"] == "error" and message in lines(text)[-1]["text"] and bench.options is None


def test_a_public_page_tests_less(bench, monkeypatch):
    monkeypatch.setenv("SPECDEMO_PUBLIC", "1")
    assert "continuations must be 256 to 768 on this page, not 1024" in last(VALUES | {"draws": 1024})


CHECK = {"server": "", "reference": "", "preset": "embedded-draft", "prompts": 2}


def test_a_listed_server_is_checked(monkeypatch):
    monkeypatch.setattr(address, "_added", {})
    with completion_server([piece("a", total=1), piece(" b", total=2, finish="stop")]) as server:
        values = CHECK | {"server": server.address, "reference": server.address}
        refused = lines(list(played(Sweeps("server-check"), begin_check, VISITOR, values))[-1]["view"])
        assert refused[-1]["type"] == "error" and "is not allowed" in refused[-1]["text"]
        address.allow([server.address])
        shown = lines(list(played(Sweeps("server-check"), begin_check, VISITOR, values))[-1]["view"])
    assert shown[-1]["type"] == "result" and [row["output"] for row in shown[-1]["rows"]] == ["identical"] * 2
    assert shown[-1]["remarks"][0].startswith("No difference found")


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        ("server", "ftp://x", "server must have the form"),
        ("prompts", 10_001, "prompts must be"),
        ("preset", "x", "unknown"),
    ],
)
def test_a_check_has_valid_settings(at, value, message):
    values = CHECK | {"server": "http://a:1", at: value}
    text = list(played(Sweeps("server-check"), begin_check, VISITOR, values))[-1]["view"]
    assert lines(text)[-1]["type"] == "error" and message in lines(text)[-1]["text"]
