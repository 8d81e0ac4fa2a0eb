"""The processes of a server, which end with the block that started it; test_process.py ends the starter."""

import signal
import socket
import sys
from contextlib import closing

import pytest

from specdemo.servers import process
from specdemo.servers.process import run_server

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no fork and no signals")

# Every process connects to the test, so that its end closes a socket. "crash" on its socket ends only the engine.
ENGINE = """
import os, signal, socket, subprocess, sys

role, port, *children = sys.argv[1:]
for child in children:
    subprocess.Popen([sys.executable, __file__, child, port])
if role == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
link = socket.create_connection(("127.0.0.1", int(port)))
link.sendall(role.encode().ljust(10))
if link.recv(5) == b"crash":
    os._exit(3)
"""


@pytest.fixture
def engine(tmp_path):
    """Yield the engine's command and the server socket that its processes connect to."""
    (tmp_path / "engine.py").write_text(ENGINE, encoding="utf-8")
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        listener.settimeout(60)
        yield [sys.executable, str(tmp_path / "engine.py"), "engine", str(listener.getsockname()[1])], listener


def connections(listener, count):
    """Accept `count` processes and return their sockets by role."""
    links = {}
    for number in range(count):
        link, _ = listener.accept()
        link.settimeout(60)
        role = link.recv(10).decode().strip()
        links[role if role not in links else f"{role} {number}"] = link
    return links


def assert_ended(links):
    """Check that each process closes its socket within a minute."""
    for link in links.values():
        with closing(link):
            assert link.recv(1) == b""


def test_the_end_of_the_block_ends_all_processes(engine):
    command, listener = engine
    with run_server([*command, "child", "child"], "http://127.0.0.1:1", {}):
        links = connections(listener, 3)
    assert_ended(links)


def test_the_crash_of_an_engine_is_named_and_its_other_processes_end(engine):
    command, listener = engine
    with run_server([*command, "child"], "http://127.0.0.1:1", {}) as server:
        links = connections(listener, 2)
        links["engine"].sendall(b"crash")
        assert server.process.wait(60) == 3
        with pytest.raises(ValueError, match=r"at 127\.0\.0\.1:1 exited; the end of its log: empty"):
            server.check_runs()
    assert_ended(links)


def test_a_process_that_ignores_sigterm_is_killed(engine, monkeypatch):
    monkeypatch.setattr(process, "GRACE_S", 0.1)
    command, listener = engine
    with run_server([*command[:2], "stubborn", command[3]], "http://127.0.0.1:1", {}) as server:
        links = connections(listener, 1)
    assert_ended(links)
    assert server.process.returncode == -signal.SIGKILL
