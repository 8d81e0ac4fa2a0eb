"""The processes of an engine, which end with the supervisor, the engine or the starter, whichever ends first."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import closing, contextmanager

import pytest

from specdemo.servers import supervisor
from specdemo.servers.process import started

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no fork and no signals")
linux = pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")

# Every process connects to the test, so that its end closes a socket. "crash" on its socket ends only the engine.
ENGINE = """
import os, signal, socket, subprocess, sys

role, port, *children = sys.argv[1:]
for child in children:
    env = {} if child == "hidden" else None
    subprocess.Popen([sys.executable, __file__, child, port], env=env, start_new_session=child != "child")
if role == "daemon" and (os.fork() or os.setsid() or os.fork()):
    os._exit(0)
if role == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
link = socket.create_connection(("127.0.0.1", int(port)))
link.sendall(role.encode().ljust(10))
if link.recv(5) == b"crash":
    os._exit(3)
"""
CHILDREN = ("child", "session", "daemon")


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
    for _ in range(count):
        link, _ = listener.accept()
        link.settimeout(60)
        links[link.recv(10).decode().strip()] = link
    return links


def assert_ended(links):
    """Check that each process closes its socket within a minute."""
    for link in links.values():
        with closing(link):
            assert link.recv(1) == b""


@contextmanager
def keeping(command, **more):
    line = [sys.executable, "-P", supervisor.__file__, *command]
    env = {**os.environ, supervisor.MARK: "a mark"}
    with subprocess.Popen(line, stdin=subprocess.PIPE, env=env, **more) as process:
        yield process


def test_the_end_of_the_starter_ends_all_processes(engine):
    command, listener = engine
    with keeping([*command, *CHILDREN]) as process:
        links = connections(listener, 4)
        process.stdin.close()
        assert_ended(links)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_supervisor_ends_all_processes(engine, number):
    command, listener = engine
    with keeping([*command, *CHILDREN]) as process:
        links = connections(listener, 4)
        process.send_signal(number)
        assert_ended(links)


def test_the_crash_of_an_engine_ends_the_other_processes(engine):
    command, listener = engine
    with keeping([*command, *CHILDREN]) as process:
        links = connections(listener, 4)
        links["engine"].sendall(b"crash")
        assert_ended(links)
        assert process.wait(60) == 3


@linux
def test_linux_finds_a_process_that_left_its_session_and_its_environment(engine):
    command, listener = engine
    with keeping([*command, "hidden"]) as process:
        links = connections(listener, 2)
        links["engine"].sendall(b"crash")
        assert_ended(links)
        assert process.wait(60) == 3


@linux
def test_the_kernel_ends_the_engine_of_a_killed_supervisor(engine):
    command, listener = engine
    with keeping(command) as process:
        links = connections(listener, 1)
        process.kill()
        assert_ended(links)


def test_the_parent_ends_what_a_killed_supervisor_leaves(engine):
    command, listener = engine
    with started([*command, *CHILDREN], "http://127.0.0.1:1", {}) as server:
        links = connections(listener, 4)
        server.process.kill()
        assert_ended(links)
        with pytest.raises(ValueError, match=r"at 127\.0\.0\.1:1 exited; the end of its log: empty"):
            server.check_runs()


def test_a_process_that_ignores_sigterm_is_killed(engine, monkeypatch):
    monkeypatch.setattr(supervisor, "GRACE_S", 0.0)
    command, listener = engine
    env = {**os.environ, supervisor.MARK: "stubborn mark"}
    with subprocess.Popen([*command[:2], "stubborn", command[3]], env=env) as process:
        links = connections(listener, 1)
        supervisor.end_marked("another mark", 0)
        assert process.poll() is None
        supervisor.end_marked("stubborn mark", 0)
        assert_ended(links)
        assert process.wait(60) == -signal.SIGKILL
