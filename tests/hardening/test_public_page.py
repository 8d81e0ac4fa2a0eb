"""A public page: rejected requests, response headers, and the order of visitors' turns."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from specdemo.presets import limits
from specdemo.presets.files import preset
from specdemo.ui import live, sweep
from specdemo.ui.page import Visits
from specdemo.ui.security import policy
from specdemo.ui.setup import changed, from_values, to_values
from specdemo.ui.turns import VISITOR_PLACES
from tests.hardening.public import visitors
from tests.processes import served

CLASS = 30


PUBLIC = {"SPECDEMO_PUBLIC": "1", "HF_HUB_OFFLINE": "1", "SPECDEMO_BEHIND_PROXY": "127.0.0.1"}


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """Return the path of the file with the page's stderr."""
    return tmp_path_factory.mktemp("page") / "log"


@pytest.fixture(scope="module")
def page(log):
    with log.open("w") as file, served(log=file, **PUBLIC) as (_, address):
        yield address


@pytest.fixture
def visit(page):
    with visitors(page) as opened:
        yield opened


def ends(messages):
    return next(message for message in messages if message["msg"] == "process_completed")


def text(messages):
    return ends(messages)["output"]["data"][0]


def lines_of(message):
    """Return the types of the lines that a message adds to the log."""
    return set(re.findall(r'"type": ?"(\w+)"', json.dumps(message["output"]).replace("\\", "")))


# Hidden parts


def test_hidden_functions_reject_calls(visit):
    caller = visit()
    free = ends(caller.call(caller.fn("click", "free-memory"), []))
    assert not free["success"] and "they stay" in free["output"]["error"]
    train = caller.after(caller.fn("click", "train"))
    assert "Training is disabled" in text(caller.call(train, [None, 2, None]))
    raced = caller.now(caller.fn("click", "race-head"), [0, 0, 0])
    assert raced.status_code == 500 and "no trained head yet" in raced.json()["error"]


def test_queued_and_direct_calls_cannot_be_exchanged(visit):
    caller = visit()
    run, quiet = caller.after(caller.fn("click", "run")), caller.fn("click", "stop")
    assert caller.now(run, caller.values(run)).status_code == 404
    assert ends(caller.call(quiet, []))["success"]


def test_a_bad_call_is_one_line_of_the_log(visit, log):
    caller = visit()
    share = caller.fn("click", "share")
    before = len(log.read_text().splitlines())
    assert caller.now(share, ["\x1b[2J\nnope"] * len(share["inputs"])).status_code == 200  # values no menu holds
    assert caller.now(share, []).json()["error"] == "the call failed; see the log of the server"
    assert caller.client.post("gradio_api/run/nope", json={"data": []}).status_code == 500
    assert not ends(caller.call(caller.fn("race"), []))["success"]
    lines = log.read_text().splitlines()
    assert len(lines) == before + 3 and "Traceback" not in log.read_text()
    assert all(" failed: " in line and len(line) < 400 for line in lines[before:])


# Limits


def test_a_turn_is_two_minutes_at_most(monkeypatch):
    monkeypatch.setenv("SPECDEMO_PUBLIC", "1")
    assert sweep.Engine(lambda *_: iter(()))._limit_s == 120.0


# Input of one visitor


REMEMBER = {"method": "suffix", "options": {"remember": True}}


@pytest.fixture
def public(monkeypatch):
    monkeypatch.setenv("SPECDEMO_PUBLIC", "1")


def test_remember_is_off_for_every_request(public, monkeypatch):
    line = "remember is off on this public page"
    with pytest.raises(ValueError, match=line):
        changed("embedded-draft", {"lanes": [REMEMBER]}, False)
    values = to_values(preset("embedded-draft")) | {"method-1": "suffix", "options-1": {"remember": True}}
    with pytest.raises(ValueError, match=line):
        from_values(values)
    visits = Visits(preset("embedded-draft"), False)
    query = {"preset": "embedded-draft", "method": "suffix", "option.remember": "True"}
    chosen, refused = visits.read_link(SimpleNamespace(session_hash="a", query_params=query))
    assert not limits.shares(chosen) and ["remember" in note for note in refused] == [True]
    comparison = preset("embedded-draft").with_changes(lanes=[REMEMBER])
    assert limits.shares(comparison) and not limits.shares(limits.fit(comparison))
    monkeypatch.delenv("SPECDEMO_PUBLIC")
    assert from_values(values).lanes[0].options == {"remember": True}


def test_online_learning_is_reset_between_visitors(public, monkeypatch):
    outputs = []
    engine = SimpleNamespace(
        forget_learned=lambda: outputs.append("forget_learned"), stream=lambda *_: outputs.append("run") or iter(())
    )
    monkeypatch.setattr(live, "session", lambda: engine)
    list(live.run(preset("embedded-draft"), live.Log()))
    assert outputs == ["forget_learned", "run"]


# Response headers


def test_headers(visit):
    answer = visit().client.get("")
    directives = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert directives["default-src"].startswith("'self'") and directives["object-src"] == "'none'"
    assert directives["script-src"] == "'self' 'unsafe-inline' 'unsafe-eval'"
    assert directives["frame-ancestors"] == "'self' https://huggingface.co https://*.hf.space"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


def test_answers_are_compressed_and_scripts_of_tabs_are_cached(visit):
    client = visit().client
    assert client.get("config").headers["content-encoding"] == "br" and client.get("config").json()["components"]
    (path,) = re.findall(r"scripts/whatif-\w+\.js", client.get("").text)
    script = client.get(path)
    assert script.headers["content-encoding"] == "br" and "immutable" in script.headers["cache-control"]
    assert script.headers["content-type"].startswith("text/javascript") and "function drawOverK" in script.text
    assert client.get(path, headers={"Accept-Encoding": "identity"}).text == script.text
    assert client.get("scripts/other.js").status_code == 404


def test_local_page_cannot_be_framed(monkeypatch):
    monkeypatch.delenv("SPACE_ID", raising=False)
    monkeypatch.delenv("SPECDEMO_PUBLIC", raising=False)
    assert "frame-ancestors 'self'" in policy() and "huggingface" not in policy()
    assert not re.search("  | ;| $", policy())  # servers reject such a header


@pytest.mark.parametrize("host", ["127.0.0.1:7860", "someone-specdemo.hf.space"])
def test_other_origins_cannot_read_answers(visit, host):
    headers = {"Origin": "https://evil.example", "Host": host}
    client = visit().client
    for answer in (
        client.get("config", headers=headers),
        client.options("gradio_api/queue/join", headers=headers | {"Access-Control-Request-Method": "POST"}),
    ):
        assert not [name for name in answer.headers if name.startswith("access-control-")]


# Turns


def test_simultaneous_visitors_all_get_a_turn(visit):
    pupils = [visit("8.8.8.8") for _ in range(CLASS)]
    fn = pupils[0].after(pupils[0].fn("click", "run"))
    with ThreadPoolExecutor(CLASS) as threads:
        runs = [*threads.map(lambda pupil: pupil.call(fn, pupil.values(fn, max_new_tokens=8)), pupils)]
    assert all(ends(messages)["success"] and '"finish":"done"' in text(messages) for messages in runs)
    waits = [[int(place) for place in re.findall(r"Waiting: place (\d+) of", text(messages))] for messages in runs]
    assert all(places == sorted(places, reverse=True) for places in waits)
    assert max(max(places, default=0) for places in waits) >= CLASS // 2
    for places in waits:
        if places and places[0] > CLASS // 2:
            assert places[-1] < places[0] / 2


def test_a_run_that_is_stopped_before_it_reaches_the_queue_does_not_begin(visit):
    caller = visit("9.9.9.11")
    pressed, stop = caller.fn("click", "run"), caller.fn("click", "stop")
    run = caller.after(pressed)
    values = caller.values(run, max_new_tokens=32)
    for event in (pressed, stop):
        assert caller.now(event, []).status_code == 200
    messages = caller.call(run, values)
    assert ends(messages)["success"] and "process_generating" not in {message["msg"] for message in messages}
    assert caller.now(pressed, []).status_code == 200
    assert '"finish":"done"' in text(caller.call(run, values))


def test_places_are_limited_by_visitor(visit):
    caller = visit("9.9.9.10")
    fn = caller.fn("race")
    for _ in range(VISITOR_PLACES + 10):
        assert caller.join(fn, ["embedded-draft", {"max_new_tokens": 1}]).status_code == 200
    answers = [message for message in caller.messages() if message["msg"] == "process_completed"]
    refused = [answer["output"]["error"] for answer in answers if not answer["success"]]
    assert refused and all("are already queued" in error for error in refused)
    assert len(answers) - len(refused) >= VISITOR_PLACES
