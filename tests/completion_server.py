"""A scripted completion server: tests choose its responses byte by byte."""

import json
import socket
import struct
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain

from specdemo.servers import client
from specdemo.servers.lane import WARM_UP


def piece(text, ids=None, total=None, finish=None, **more):
    """Return one streamed chunk. total: tokens so far, as servers report them with continuous_usage_stats."""
    choice = {"index": 0, "text": text, "finish_reason": finish, "logprobs": None}
    if ids is not None:
        choice["token_ids"] = ids
    usage = None if total is None else {"prompt_tokens": 3, "completion_tokens": total, "total_tokens": total + 3}
    return {
        "id": "x",
        "object": "text_completion",
        "created": 0,
        "model": "m",
        "choices": [choice],
        "usage": usage,
    } | more


class Broken:
    """A failure in the middle of a response: `reset` drops the connection, `quiet` sends nothing until the client has
    disconnected, `close` closes it normally.
    """

    def __init__(self, how):
        self.how = how


def head(kind="text/event-stream", status=200, **headers):
    """Return a status line and headers. The body ends with the connection unless a header gives its length."""
    lines = [f"HTTP/1.1 {status} X", f"Content-Type: {kind}", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def events(*chunks):
    return b"".join(b"data: %s\n\n" % (x if isinstance(x, bytes) else json.dumps(x).encode()) for x in chunks)


def record_pauses(monkeypatch):
    """Let no client pause between two requests; return the list of the pauses that it would make, in s."""
    pauses = []

    async def record(seconds):
        pauses.append(seconds)

    monkeypatch.setattr(client, "pause", record)
    return pauses


class CompletionHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        server = self.server
        if self.misbehaves({"/metrics": "metrics", "/v1/models": "models"}.get(self.path)):
            return None
        if self.path == "/metrics" and server.metrics:
            server.readings += 1
            return self.answer(200, server.metrics[min(server.readings, len(server.metrics)) - 1].encode())
        if self.path == "/v1/models":
            return self.answer(200, json.dumps({"object": "list", "data": [{"id": m} for m in server.models]}).encode())
        return self.answer(404, b"")

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.requests.append((self.path, body, self.headers))
        status, message, *headers = server.refusal(self.path, body)
        if status != 200:
            return self.answer(status, json.dumps(message).encode(), {"Location": server.elsewhere}, *headers)
        warm_up = WARM_UP in (body.get("prompt"), body.get("messages", [{}])[0].get("content"))
        if self.misbehaves("warm-up" if warm_up else "answer"):
            return None
        if warm_up:
            return self.stream([piece("ok", total=1, finish="stop")])
        return self.stream(server.pieces(body) if callable(server.pieces) else server.pieces)

    def misbehaves(self, stage):
        """Send the bytes that were scripted for this stage. Return whether there were any."""
        if stage not in self.server.faults:
            return False
        self.close_connection = True
        for chunk in self.server.faults[stage]():
            if isinstance(chunk, Broken):
                self.end(chunk.how)
                break
            self.wfile.write(chunk)
        return True

    def answer(self, status, content, *headers):
        self.send_response(status)
        for name, value in chain({"Content-Length": str(len(content))}.items(), *(more.items() for more in headers)):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def stream(self, pieces):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        for chunk in pieces:
            if isinstance(chunk, Broken):
                return self.end(chunk.how)
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")
        return None

    def end(self, how):
        if how == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        if how == "quiet":
            self.connection.recv(1)  # returns when the client closes the connection
            self.server.left.set()

    def log_message(self, *args):
        pass


@contextmanager
def completion_server(pieces, metrics=(), models=("m",), refusal=lambda path, body: (200, None), faults=()):
    """Serve `pieces` to every request except warm-ups, and the next of `metrics` to every reading.

    pieces: may be a function of the request's body. refusal: returns status, message and, optionally, headers.
    faults: raw replacements of whole responses. Maps models, warm-up, answer or metrics to a function that yields the
    parts, possibly without end.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), CompletionHandler)
    server.daemon_threads = True
    server.pieces, server.metrics, server.models, server.refusal = pieces, metrics, models, refusal
    server.faults = dict(faults)
    server.requests, server.readings, server.elsewhere, server.left = [], 0, "", threading.Event()
    server.address = f"http://127.0.0.1:{server.server_port}"
    server.handle_error = lambda *args: None
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()
