"""The commands of docs/deploy.md, run against a stand-in of the hub."""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from specdemo.presets.limits import SPACE

ROOT = SPACE.parents[1]
SHA = "0123456789abcdef0123456789abcdef01234567"
SPACE_ID = "someone/specdemo"
# hub-docs 242f4a1e, docs/hub/spaces-config-reference.md
HARDWARE = "cpu-basic cpu-upgrade t4-small t4-medium l4x1 l4x4 l40sx1 l40sx4 l40sx8 a10g-small a10g-large a10g-largex2"


class Hub(BaseHTTPRequestHandler):
    """What a hub answers to the creation of a Space and to an upload: binary files go to its storage first."""

    protocol_version = "HTTP/1.1"
    log_message = lambda self, *args: None  # noqa: E731

    def do_POST(self):
        path = self.path.partition("?")[0]
        answer = {
            "/api/repos/create": self.create,
            "/api/validate-yaml": self.validate,
            f"/api/spaces/{SPACE_ID}/preupload/main": self.plan,
            f"/spaces/{SPACE_ID}.git/info/lfs/objects/batch": self.store,
            f"/api/spaces/{SPACE_ID}/commit/main": self.commit,
        }[path]
        assert self.headers["Authorization"] == "Bearer hf_of_the_test"
        self.send(*answer(self.rfile.read(int(self.headers["Content-Length"]))))

    def do_PUT(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.path == f"/storage/{sha256(content).hexdigest()}"
        self.server.stored[self.path.rpartition("/")[2]] = content
        self.send(200, {})

    def send(self, status, content):
        content = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server.server_port}"

    def create(self, body):
        exists, self.server.space = bool(self.server.space), self.server.space or json.loads(body)
        return 409 if exists else 200, {"url": f"{self.address}/spaces/{SPACE_ID}"}

    def validate(self, body):
        front = yaml.safe_load(json.loads(body)["content"].split("---\n")[1])
        wrong = (
            front.get("suggested_hardware", "cpu-basic") not in HARDWARE.split() or len(front["short_description"]) > 60
        )
        return (400 if wrong else 200), {"errors": [{"message": "invalid metadata"}] * wrong, "warnings": []}

    def plan(self, body):
        def mode(file):
            return "lfs" if b"\0" in base64.b64decode(file["sample"]) else "regular"

        files = json.loads(body)["files"]
        return 200, {"files": [{"path": f["path"], "uploadMode": mode(f), "shouldIgnore": False} for f in files]}

    def store(self, body):
        def upload(entry):
            return {**entry, "actions": {"upload": {"href": f"{self.address}/storage/{entry['oid']}"}}}

        return 200, {"transfer": "basic", "objects": [upload(entry) for entry in json.loads(body)["objects"]]}

    def commit(self, body):
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                self.server.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.server.files[value["path"]] = self.server.stored[value["oid"]]
            else:
                assert line["key"] == "header"
        return 200, {"commitUrl": f"{self.address}/spaces/{SPACE_ID}/commit/{SHA}", "commitOid": SHA}


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads, server.space, server.files, server.stored = True, None, {}, {}
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.skipif(sys.platform == "win32", reason="the commands are for bash")
def test_the_commands_make_a_space_of_what_is_committed(hub, tmp_path):
    committed = [
        "README.md",
        "requirements.txt",
        "app.py",
        "docs/space.yaml",
        "docs/race.webp",
        "tests/requirements.txt",
    ]
    for name in committed:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", tmp_path]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "All"]):
        subprocess.run([*git, *command], check=True)
    for name in ("secret.env", "runs/space/old.txt", ".venv/lib.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("not for a Space")
    login, *commands = re.search(r"```bash\n(.*?)```", (ROOT / "docs/deploy.md").read_text(), re.S)[1].splitlines()
    environment = os.environ | {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_TOKEN": "hf_of_the_test",
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",  # its storage has its own protocol, in compiled code
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    assert login == "hf auth login"
    done = subprocess.run(
        ["bash", "-ec", "\n".join(commands)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert (hub.space["name"], hub.space["type"], hub.space["sdk"]) == ("specdemo", "space", "gradio")
    assert hub.space["hardware"] == "zero-a10g"
    assert sorted(hub.files) == sorted(committed)
    uploaded = {name: content for name, content in hub.files.items() if name not in ("README.md", "requirements.txt")}
    assert uploaded == {name: (ROOT / name).read_bytes() for name in uploaded}
    _, front, readme = hub.files["README.md"].decode().split("---\n", 2)
    assert front == SPACE.read_text(encoding="utf-8") and readme == (ROOT / "README.md").read_text(encoding="utf-8")
    pins, ours = hub.files["requirements.txt"].decode().split(), (ROOT / "requirements.txt").read_text().split()
    changed = [(our.partition("==")[0], pin) for pin, our in zip(pins, ours, strict=True) if pin != our]
    assert changed == [("torch", "torch==2.11.0")]
