"""A public page: rejected requests and uploads, response headers, and the order of visitors' turns."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import SimpleNamespace

import httpx
import pytest

from specdemo.core.safe_io import PUBLIC_FILE_BYTES
from specdemo.presets import limits
from specdemo.presets.files import preset
from specdemo.ui import race
from specdemo.ui.race import Races
from specdemo.ui.security import UPLOADS, policy
from specdemo.ui.setup import changed, from_values, to_values
from tests.hardening.public import visitors
from tests.processes import served

CLASS = 4, pytest.param(30, marks=pytest.mark.release)


PUBLIC = {"SPECDEMO_PUBLIC": "1", "HF_HUB_OFFLINE": "1", "SPECDEMO_BEHIND_PROXY": "127.0.0.1"}
PUBLIC["SPECDEMO_ALLOW_HOST"] = "demo.example.org other.example.org"


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """Return the path of the file with the page's stderr."""
    return tmp_path_factory.mktemp("page") / "log"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder for Gradio's uploads."""
    return tmp_path_factory.mktemp("uploads")


@pytest.fixture(scope="module")
def page(log, folder):
    with log.open("w") as file, served(log=file, GRADIO_TEMP_DIR=str(folder), **PUBLIC) as (_, address):
        yield address


@pytest.fixture(scope="module")
def public_page(page):
    with httpx.Client(base_url=page, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def visit(page):
    with visitors(page) as opened:
        yield opened


def ends(messages):
    return next(message for message in messages if message["msg"] == "process_completed")


def text_of(messages):
    """Return all that the messages add to the page."""
    return json.dumps([message.get("output") for message in messages]).replace("\\", "")


def ranks(messages):
    return [message["rank"] for message in messages if message["msg"] == "estimation"]


# Hidden parts


def test_hidden_functions_reject_calls(visit):
    caller = visit()
    train = caller.fn("click", "train")
    assert "Training is disabled" in caller.now(train, [None, 2]).text
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


# Values that no menu has: a menu may get other choices while Run is pressed

OF_LANES = ("method", "model", "acceptance")


def test_an_unknown_value_is_refused_at_once_and_ignored_in_a_hidden_lane(visit):
    caller = visit()
    pressed = caller.fn("click", "run")
    for menu in ("target", *(f"{name}-1" for name in OF_LANES)):
        refused = caller.now(pressed, caller.values(pressed, **{menu: "not-in-the-menu"}))
        assert refused.status_code == 200 and "not-in-the-menu" in refused.text and '"error' in refused.text, menu
    hidden = {f"{name}-2": "not-in-the-menu" for name in OF_LANES}
    assert '"finish":"done"' in text_of(caller.press("run", max_new_tokens=8, **hidden))


def test_a_link_that_is_too_long_has_a_reason(visit):
    caller = visit()
    share = caller.fn("click", "share")
    answer = caller.now(share, caller.values(share, prompt="<u>" * 1000)).text
    assert "No link" in answer and "the prompt of a link can have 2000 characters, this one has 3000" in answer


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
    visits = Races(preset("embedded-draft"), False)
    query = {"preset": "embedded-draft", "method": "suffix", "option.remember": "True"}
    chosen, refused = visits.read_query(query)
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
    monkeypatch.setattr(race, "session", lambda: engine)
    list(race.run(preset("embedded-draft"), lambda: False, print))
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


@pytest.mark.parametrize(
    "method, path", [("GET", "monitoring"), ("GET", "gradio_api/file=/etc/passwd"), ("POST", "login")]
)
def test_no_other_route_of_gradio_is_open(visit, method, path):
    answer = visit().client.request(method, path, json={} if method == "POST" else None, timeout=60.0)
    assert answer.status_code == 404 and answer.text == "this page has no such path"


# Turns


@pytest.mark.parametrize("count", CLASS)
def test_simultaneous_visitors_all_get_a_turn(visit, count):
    pupils = [visit() for _ in range(count)]
    with ThreadPoolExecutor(count) as threads:
        runs = [*threads.map(lambda pupil: pupil.press("run", max_new_tokens=8), pupils)]
    assert all(ends(run)["success"] and '"finish":"done"' in text_of(run) for run in runs)
    assert all(ranks(run) == sorted(ranks(run), reverse=True) for run in runs)
    assert max(max(ranks(run), default=0) for run in runs) >= count // 2


def test_stop_and_a_closed_tab_free_their_places(visit):
    first, stopped, closed, last = (visit() for _ in range(4))
    begun, gone, over = Event(), Event(), Event()
    with ThreadPoolExecutor() as threads:
        running = threads.submit(first.press, "run", lambda _: begun.set(), max_new_tokens=256)
        assert begun.wait(60)
        stopped.join_queue("run")
        threads.submit(closed.press, "run", lambda _: gone.set() or over.wait(60) or closed.client.close())
        assert gone.wait(60)
        done = threads.submit(last.press, "run", max_new_tokens=8)
        stopped.now(stopped.fn("click", "stop"), []).raise_for_status()
        over.set()
        assert '"finish":"done"' in text_of(running.result(300))
        messages = done.result(300)
    assert '"finish":"done"' in text_of(messages) and ranks(messages)[0] >= 1 and ranks(messages)[-1] == 0
    assert '"start"' not in text_of(stopped.messages())


def test_a_run_that_is_stopped_before_it_reaches_the_queue_does_not_begin(visit):
    caller = visit()
    pressed, stop = caller.fn("click", "run"), caller.fn("click", "stop")
    values = caller.values(pressed, max_new_tokens=32)
    assert caller.now(pressed, values).status_code == 200
    assert caller.now(stop, []).status_code == 200
    messages = caller.call(caller.after(pressed), [])
    assert ends(messages)["success"] and '"start"' not in text_of(messages)
    assert '"finish":"done"' in text_of(caller.press("run", max_new_tokens=32))


# Uploads by untrusted visitors


def upload(page, content=b"{}", name="files", **headers):
    return page.post("/gradio_api/upload", files={name: ("t.json", content, "application/json")}, headers=headers)


def on_disk(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_file_comes_in(public_page, folder):
    own = str(public_page.base_url).rstrip("/")
    for headers in ({}, {"Origin": own}, {"Origin": own, "Sec-Fetch-Site": "same-origin"}):
        assert upload(public_page, b" " * PUBLIC_FILE_BYTES, **headers).status_code == 200
    forwarded = {"Origin": "https://me-demo.hf.space", "X-Forwarded-Host": "me-demo.hf.space"}
    assert upload(public_page, b" " * PUBLIC_FILE_BYTES, **forwarded).status_code == 200
    assert [path.name for path in on_disk(folder)] == ["t.json"]


@pytest.mark.parametrize("headers", [
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://127.0.0.1:1"},
    {"Origin": "http://evil.example", "X-Forwarded-Host": "evil.example", "Sec-Fetch-Site": "cross-site"},
])  # fmt: skip
def test_another_sites_page_can_send_nothing(public_page, folder, headers):
    before = on_disk(folder)
    assert upload(public_page, b"foreign", **headers).status_code == 403
    assert public_page.post("/gradio_api/queue/join", json={}, headers=headers).status_code == 403
    assert on_disk(folder) == before


@pytest.mark.parametrize("method, path", [("GET", "/"), ("POST", "/gradio_api/queue/join")])
def test_a_foreign_host_gets_one_line(public_page, method, path):
    headers = {"Host": "evil.example", "Origin": "http://evil.example", "Sec-Fetch-Site": "same-origin"}
    answer = public_page.request(method, path, headers=headers)
    assert answer.status_code == 403 and answer.headers["x-content-type-options"] == "nosniff"
    assert "'evil.example'" in answer.text and "--allow-host" in answer.text and "\n" not in answer.text


HEAD = b'--b\r\nContent-Disposition: form-data; name="files"; filename="a"\r\n'
PART = HEAD + b"\r\nx\r\n"


@pytest.mark.parametrize("status, body", [
    (400, PART * 2 + b"--b--\r\n"),
    (400, PART),
    (400, PART.replace(b'"files"', b'"other"') + b"--b--\r\n"),
    (400, PART.replace(b'"a"', b'"a"; name="other"') + b"--b--\r\n"),
    (400, HEAD + b'Content-Disposition: form-data; name="other"; filename="b"\r\n\r\nx\r\n--b--\r\n'),
    (400, b""),
    (413, HEAD + b"\r\n" + b"x" * (PUBLIC_FILE_BYTES + 5000) + b"\r\n--b--\r\n"),
], ids=["two", "unfinished", "unnamed", "renamed", "redisposed", "empty", "large"])  # fmt: skip
def test_rejected_uploads_leave_nothing_on_disk(public_page, folder, status, body):
    before = on_disk(folder)
    sent = public_page.post(
        "/gradio_api/upload", content=body, headers={"Content-Type": "multipart/form-data; boundary=b"}
    )
    assert sent.status_code == status and "\n" not in sent.text
    assert on_disk(folder) == before


def test_request_limits_apply_before_parsing(public_page):
    body, headers = b'"' + b"x" * 2_000_000 + b'"', {"Content-Type": "application/json"}
    sent = public_page.post("/gradio_api/queue/join", content=body, headers=headers)
    assert sent.status_code == 413 and "requests are limited to 1 MB" in sent.text


def test_a_visitor_opens_so_many_files_and_no_more(public_page):
    visitor, other = {"X-Forwarded-For": "8.8.8.8"}, {"X-Forwarded-For": "8.8.8.9"}
    statuses = [upload(public_page, **visitor).status_code for _ in range(UPLOADS + 1)]
    assert statuses == [200] * UPLOADS + [429] and "wait 10 minutes" in upload(public_page, **visitor).text
    assert upload(public_page, **other).status_code == 200
    assert public_page.get("/").status_code == 200
