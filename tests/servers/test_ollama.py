"""Ollama's own API, which lanes on one server use, with answers in the form of docs/api.md (Ollama, August 2026)."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from specdemo.core.trace import token_kinds
from specdemo.engine.comparison import Comparison, Lane
from specdemo.engine.session import Session
from specdemo.servers import address as addresses

WORDS = ["Once", " upon", " a", " time"]
STATS = {
    "total_duration": 10706818083,
    "load_duration": 6338219291,
    "prompt_eval_count": 26,
    "prompt_eval_duration": 130079000,
    "eval_count": 4,
    "eval_duration": 4232710000,
}


def line(**fields):
    return {"model": "llama3.2", "created_at": "2023-08-04T19:22:45.499127Z", **fields}


def generated(reason="length"):
    last = line(response="", done=True, done_reason=reason, context=[1, 2, 3], **STATS)
    return [*(line(response=word, done=False) for word in WORDS), last]


def chat(reason="stop"):
    thought = line(message={"role": "assistant", "content": "", "thinking": "Hm."}, done=False)
    said = [line(message={"role": "assistant", "content": word, "images": None}, done=False) for word in WORDS]
    return [
        thought,
        *said,
        line(message={"role": "assistant", "content": ""}, done=True, done_reason=reason, **STATS | {"eval_count": 5}),
    ]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        models = {"object": "list", "data": [{"id": "llama3.2", "object": "model", "owned_by": "library"}]}
        body = {"/": "Ollama is running", "/v1/models": json.dumps(models)}.get(self.path)
        self.respond(404 if body is None else 200, "text/plain", (body or "").encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body))
        lines = self.server.answers.get(self.path)
        text = "".join(json.dumps(one) + "\n" for one in lines or [])
        self.respond(200 if lines else 404, "application/x-ndjson", text.encode())

    def respond(self, status, kind, content):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


@contextmanager
def ollama(**answers):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.answers, server.requests = {f"/api/{name}": lines for name, lines in answers.items()}, []
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def run(fake, monkeypatch, **settings):
    address = f"http://127.0.0.1:{fake.server_port}"
    monkeypatch.setattr(addresses, "_added", {})
    addresses.allow([address])
    lane = Lane(method="draft_model", model="draft", k=3, server=address)
    chosen = {"id": "test", "target": "llama3.2", "prompt": "Tell me", "max_new_tokens": 8, "server": address}
    return Session().run(Comparison(**{**chosen, "lanes": [lane], **settings})).lanes


def test_lanes_on_one_ollama_differ_in_the_draft_length(monkeypatch):
    with ollama(generate=generated()) as server:
        plain, lane = run(server, monkeypatch, chat=False)
    assert plain.text == lane.text == "Once upon a time" and plain.finish == lane.finish == "length"
    assert {path for path, _ in server.requests} == {"/api/generate"}
    options = [body["options"] for _, body in server.requests if body["prompt"] == "Tell me"]
    assert [one["draft_num_predict"] for one in options] == [0, 3]
    assert options[0] == {
        "num_predict": 8,
        "temperature": 0.0,
        "top_p": 1.0,
        "seed": 0,
        "top_k": 0,
        "min_p": 0.0,
        "repeat_penalty": 1.0,
        "draft_num_predict": 0,
    }
    assert all(body["raw"] and body["stream"] and "messages" not in body for _, body in server.requests)
    assert plain.note is None and lane.note == (
        "drafts by its request (options.draft_num_predict); a server that ignores this decodes plainly"
    )
    assert lane.remote.endpoint == "/api/generate" and lane.remote.tokens == 4 and lane.remote.counters == {}
    assert lane.remote.times == {"ttft_ms": 130.079, "decode_ms": 4232.71}
    assert {kind for event in lane.events for kind in token_kinds(event)} == {"unknown"}


def test_a_chat_with_thinking(monkeypatch):
    with ollama(chat=chat()) as server:
        _, lane = run(server, monkeypatch, chat=True, thinking="on")
    assert lane.text == "Hm.Once upon a time" and lane.finish == "stop"
    path, body = server.requests[-1]
    assert path == "/api/chat" and body["messages"] == [{"role": "user", "content": "Tell me"}]
    assert body["think"] is True and "raw" not in body


def test_lanes_on_other_servers_use_openais_api(monkeypatch):
    with ollama(generate=generated()) as server, ollama(generate=generated()) as other:
        given = f"http://127.0.0.1:{other.server_port}"
        monkeypatch.setenv(addresses.LISTED, given)
        run(server, monkeypatch, chat=False, server=given)
    assert {path for path, _ in [*server.requests, *other.requests]} == {"/v1/completions"}


@pytest.mark.parametrize(
    ("lines", "note"),
    [
        ([{"error": "model requires more system memory"}], "model requires more system memory"),
        ([line(response=7, done=False)], "sent an invalid response"),
        ([line(message=[], done=False), 3], "sent an invalid response"),
        ([line(response="x", done=True, done_reason="load")], "ended the text early: load"),
        (generated()[:2], "closed the connection"),
    ],
)
def test_a_bad_answer_ends_its_lane(lines, note, monkeypatch):
    with ollama(generate=lines) as server:
        lanes = run(server, monkeypatch, chat=False)
    assert [lane.finish for lane in lanes] == ["error", "error"] and note in lanes[0].note
