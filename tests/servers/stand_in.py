"""A stand-in for vLLM: a program that starts and answers like vLLM, next to a `python` that reports the installed
versions.

Environment variables: GATE is a file that the program waits for; BROKEN makes it fail at the start; SLOW delays its end
by one second; TIMES repeats the answer of four words.
"""

import json
import shlex
import sys

import psutil

ENGINE = """
import json, os, signal, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        loaded = os.path.exists(os.environ.get("GATE", "/"))
        body = {"/v1/models": json.dumps({"data": [{"id": "stories"}]})}.get(self.path, "")
        self.send_response(503 if not loaded else 404 if self.path == "/metrics" else 200)
        self.end_headers()
        self.wfile.write(body.encode())

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open(os.environ["STARTED"] + ".asked", "a") as log:
            log.write(json.dumps(request["prompt"]) + "\\n")
        self.send_response(200 if self.path == "/v1/completions" else 404)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        words = (["Once", " upon", " a", " time"] * int(os.environ.get("TIMES", "1")))[:request["max_tokens"]]
        for total, word in enumerate(words, 1):
            choice = {"index": 0, "text": word, "finish_reason": "length" if total == len(words) else None}
            usage = {"prompt_tokens": 1, "completion_tokens": total, "total_tokens": total + 1}
            self.wfile.write(f"data: {json.dumps({'choices': [choice], 'usage': usage})}\\n\\n".encode())
        self.wfile.write(b"data: [DONE]\\n\\n")

    def log_message(self, *args):
        pass

if os.environ.get("BROKEN"):
    sys.exit("no such architecture")
if os.environ.get("SLOW"):
    signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1.0), sys.exit()))
server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler)
with open(os.environ["STARTED"], "a") as log:
    log.write(json.dumps({"pid": os.getpid(), "args": sys.argv[1:]}) + "\\n")
print("listening", flush=True)
server.serve_forever()
"""
PROBED = '{"version": "9.9", "methods": ["draft_model", "dflash"], "gpus": 0}'


def make(folder):
    """Create the program and return its path. `folder / "started"` records every process."""
    (folder / "engine.py").write_text(ENGINE, encoding="utf-8")
    started = f"STARTED={shlex.quote(str(folder / 'started'))}"
    for name, body in (
        ("vllm", f'{started} exec {shlex.quote(sys.executable)} {shlex.quote(str(folder / "engine.py"))} "$@"'),
        ("python", f"echo {shlex.quote(PROBED)}"),
    ):
        (folder / name).write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    return folder / "vllm"


def started(engine):
    """Return the process id and arguments of every started process."""
    return [json.loads(line) for line in (engine.parent / "started").read_text(encoding="utf-8").splitlines()]


def gone(engine):
    """Wait for the started processes to end, and return whether all have ended."""
    processes = [psutil.Process(entry["pid"]) for entry in started(engine) if psutil.pid_exists(entry["pid"])]
    return not psutil.wait_procs(processes, timeout=30)[1]
