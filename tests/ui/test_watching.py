"""The card that watches a server: its text after every reading, and what it refuses."""

import asyncio
import json
from itertools import count

import pytest

from specdemo.diagnosis import watch as module
from specdemo.servers import address
from specdemo.ui import watching
from tests.completion_server import completion_server
from tests.diagnosis.test_watch import vllm


@pytest.fixture
def clock(monkeypatch):
    """Let a second pass between two readings."""
    seconds = map(float, count())
    monkeypatch.setattr(module, "monotonic", lambda: next(seconds))


def last_line(text):
    return json.loads(text.splitlines()[-1])


def test_every_reading_extends_the_chart_and_the_table(clock, monkeypatch):
    monkeypatch.setattr(address, "_added", {})
    with completion_server([], [vllm(300), vllm(600), vllm(1200)], models=("m",)) as server:
        address.allow([server.address])
        watch = watching.start(server.address, 500.0)
        shown = [last_line(asyncio.run(watching.tick(watch))[0]) for _ in range(3)]
    assert [len(line["rows"]) for line in shown] == [0, 1, 2] and "chart" not in shown[1]
    assert shown[2]["chart"]["lines"][0]["points"] == [[1.0, 600.0], [2.0, 1200.0]]
    assert [row["time"] for row in shown[2]["rows"]] == [2.0, 1.0]  # newest first
    assert (shown[2]["state"], shown[2]["verdict"]) == ("Watching", watch.sentence())
    assert shown[2]["conditions"].startswith("vLLM at 127.0.0.1:")


def test_a_server_that_is_not_listed_is_refused(monkeypatch):
    monkeypatch.setattr(address, "_added", {})
    with pytest.raises(ValueError, match="is not allowed; the operator can allow it"):
        watching.start("http://a:1", None)


@pytest.mark.parametrize("plain", [0.0, -1.0, float("inf"), float("nan")])
def test_a_speed_without_speculation_must_be_a_speed(plain):
    with pytest.raises(ValueError, match="must be more than 0"):
        watching.start("http://a:1", plain)


def test_a_server_without_metrics_ends_the_watch(monkeypatch):
    monkeypatch.setattr(address, "_added", {})
    with completion_server([], models=("m",)) as server:
        address.allow([server.address])
        text, timer = asyncio.run(watching.tick(watching.start(server.address, None)))
    assert last_line(text)["type"] == "error" and "has no metrics" in last_line(text)["text"]
    assert timer["active"] is False
