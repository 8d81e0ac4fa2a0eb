"""A Hugging Face hub on the loopback interface: one thread, the endpoints that a download needs, and faults on
demand.
"""

import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

SHA = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """The state of the hub.

    repositories: id -> file -> bytes. gated: ids that need a login. cuts: file -> bytes after which the connection is
    cut, once each. requests: (file, Range header) of every requested file. cards: id -> further metadata.
    """

    def __init__(self, repositories):
        self.repositories = repositories
        self.gated, self.cuts, self.requests, self.numbers, self.cards = set(), {}, [], {}, {}
        self.hold = None  # an Event: the second half of weight files waits for it

    def answer(self, handler, body):
        path, _, _ = handler.path.partition("?")
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?(?:/tree/([^/]+))?", path):
            repository, revision, tree = match.groups()
            self._describe(handler, repository, revision or tree, bool(tree))
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(handler, *match.groups(), body)
        else:
            self._refuse(handler, 404, "EntryNotFound")

    def _describe(self, handler, repository, revision, tree):
        if self._refused(handler, repository, revision, False):
            return
        files = self.repositories[repository]
        if tree:
            listing = [{"type": "file", "path": f, "size": len(b), "oid": str(hash(b))} for f, b in files.items()]
        else:
            listing = {"id": repository, "modelId": repository, "sha": SHA, **self.cards.get(repository, {})}
            listing["siblings"] = [{"rfilename": f, "size": len(b)} for f, b in files.items()]
            if repository in self.numbers:
                listing["safetensors"] = {
                    "parameters": {"F32": self.numbers[repository]},
                    "total": self.numbers[repository],
                }
        self._send(handler, 200, json.dumps(listing).encode(), {"Content-Type": "application/json"}, True)

    def _file(self, handler, repository, revision, file, body):
        if self._refused(handler, repository, revision, True):
            return
        content = self.repositories[repository].get(file)
        if content is None:
            self._refuse(handler, 404, "EntryNotFound")
            return
        headers = {"ETag": f'"{abs(hash((repository, file)))}"', "X-Repo-Commit": SHA, "Accept-Ranges": "bytes"}
        byte_range = handler.headers.get("Range")
        start = int(byte_range.removeprefix("bytes=").partition("-")[0]) if byte_range else 0
        if byte_range:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if body:
            self.requests.append((file, byte_range))
        self._send(handler, 206 if byte_range else 200, content[start:], headers, body, file)

    def _refused(self, handler, repository, revision, download):
        if repository not in self.repositories:
            self._refuse(handler, 404, "RepoNotFound")
        elif revision not in (None, "main", "v1", SHA):
            self._refuse(handler, 404, "RevisionNotFound")
        elif repository in self.gated:
            self._refuse(handler, 401, "GatedRepo")
        else:
            return False
        return True

    def _refuse(self, handler, status, code):
        self._send(handler, status, b"", {"X-Error-Code": code, "X-Error-Message": code}, True)

    def _send(self, handler, status, content, headers, body, file=""):
        handler.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            handler.send_header(name, value)
        handler.end_headers()
        if not body:
            return
        cut = self.cuts.pop(file, None)
        if cut is not None:
            handler.wfile.write(content[:cut])
            handler.close_connection = True
        elif self.hold is not None and file.endswith(".safetensors"):
            handler.wfile.write(content[: len(content) // 2])
            handler.wfile.flush()
            self.hold.wait(20)
            handler.wfile.write(content[len(content) // 2 :])
        else:
            handler.wfile.write(content)


@contextmanager
def serve(repositories, monkeypatch, cache):
    """Serve the hub, and direct the hub's client to it, with `cache` as its cache and no pauses between retries."""
    hub = FakeHub(repositories)

    class HubHandler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            hub.answer(self, True)

        def do_HEAD(self):
            hub.answer(self, False)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    constants = "huggingface_hub.constants."
    monkeypatch.setattr(constants + "ENDPOINT", address)
    monkeypatch.setattr(constants + "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants + "DOWNLOAD_CHUNK_SIZE", 1024)
    monkeypatch.setattr(constants + "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants + "HF_HUB_CACHE", str(cache))
    import huggingface_hub.file_download as client

    monkeypatch.setattr(client, "time", SimpleNamespace(**{**vars(client.time), "sleep": lambda seconds: None}))
    try:
        yield hub
    finally:
        if hub.hold is not None:
            hub.hold.set()
        server.shutdown()
        server.server_close()
