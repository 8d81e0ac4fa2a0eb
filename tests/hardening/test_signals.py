"""Processes ended by a signal: no traceback, a shell's exit code, no half-written file, and a free port."""

import os
import pty
import re
import select
import signal
import socket
import termios
import time

import pytest
import torch

from specdemo.models.load import load_target
from specdemo.servers.process import free_port
from specdemo.training.collect import Plan
from specdemo.training.heads import build_dataset
from tests.models.tiny import build
from tests.processes import start as start_process

KILL, TERM, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT
CODES = {KILL: -9, TERM: 143, INT: 130}
LIMIT_S = 120.0  # for any wait; the machine may be busy


class Process:
    """A command with stdout and stderr on one terminal, whose output is collected in `text`."""

    def __init__(self, *command):
        controller, terminal = pty.openpty()
        termios.tcsetwinsize(terminal, (24, 120))  # progress bars need a width
        self.text, self._from, self.ended = "", controller, False
        self.process = start_process(*command, stdout=terminal, stderr=terminal)
        os.close(terminal)

    def until(self, pattern):
        """Read until the pattern is found; None: until the end."""
        deadline = time.monotonic() + LIMIT_S
        while not self.ended and not (pattern and re.search(pattern, self.text, re.DOTALL)):
            assert time.monotonic() < deadline, self.text
            self.listen()
        assert not (pattern and self.ended), self.text
        return self

    def listen(self):
        """Read available output. A process blocks if nothing reads its terminal."""
        if select.select([self._from], [], [], 0.1)[0]:
            self._read()

    def _read(self):
        try:
            data = os.read(self._from, 1 << 16)
        except OSError:  # the process has closed its end
            data = b""
        self.text, self.ended = self.text + data.decode(errors="replace"), not data

    def end(self, number=None):
        """Send the signal, if any, wait for the end and return the exit code."""
        if number is not None:
            self.process.send_signal(number)
        self.until(None)
        os.close(self._from)
        code = self.process.wait(LIMIT_S)
        assert "Traceback" not in self.text, self.text
        return code


@pytest.fixture
def started():
    """Yield a function that starts processes; all are killed at the end."""
    processes = []

    def start(*command):
        processes.append(Process(*command))
        return processes[-1]

    yield start
    for process in processes:
        process.process.kill()
        process.process.wait()


def bound(port):
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(("127.0.0.1", port))
        return s.getsockname()[1]


@pytest.mark.parametrize("number", [TERM, INT])
def test_the_page_ends_and_frees_its_port(started, number):
    port = free_port()
    page = started("app.py", "--port", port).until("specdemo is on")
    assert page.end(number) == CODES[number]
    assert bound(port) == port


@pytest.mark.parametrize("number", [pytest.param(KILL, marks=pytest.mark.release), INT])
def test_a_run_ends_and_leaves_the_old_trace(started, number, tmp_path):
    out = tmp_path / "trace.json"
    out.write_text("old", encoding="utf-8")
    command = ["run", "embedded-bytes", "--max-new-tokens", "900", "--force", "--out", out]
    run = started("-m", "specdemo", *command).until("decoding")
    assert run.end(number) == CODES[number]
    assert out.read_text() == "old" and list(tmp_path.iterdir()) == [out]
    assert number != INT or run.text.endswith("specdemo: interrupted\r\n")


CTRL_C_AT_AN_IMPORT = """
import signal
import sys

class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == "specdemo.bench.tune":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
import specdemo.__main__
"""


def test_ctrl_c_during_the_imports_is_quiet(started):
    importing = started("-c", CTRL_C_AT_AN_IMPORT)
    assert (importing.end(), importing.text) == (CODES[INT], "")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Save a tiny target and a small dataset of its text, and return both folders."""
    folder, cache = tmp_path_factory.mktemp("tiny"), tmp_path_factory.mktemp("cache")
    build("llama").save_pretrained(folder)
    plan = Plan(text_rows=8, sampled_rows=4, rows_per_shard=4, context=32, sample_length=16, taps=(-1,))
    build_dataset(load_target(str(folder), kernels="transformers"), cache, plan)
    return folder, cache


EARLY_CHECKPOINT = """
import sys
from specdemo.__main__ import main
from specdemo.training import fit

fit.FIRST_CHECKPOINT_SECONDS = 0.5
sys.exit(main(sys.argv[1:]))
"""
TRAINS = r"step=(\d+)\b.*step=(?!\1\b)\d"


def steps(folder):
    return torch.load(folder / "checkpoint.pt", weights_only=True)["history"]["step"]


def inode(folder):
    """Return the inode of the checkpoint, or None while it is being replaced."""
    try:
        return (folder / "checkpoint.pt").stat().st_ino
    except FileNotFoundError:
        return None


def test_training_is_saved_on_a_signal_and_resumed(started, folders, tmp_path):
    target, cache = folders
    train = ["train", "medusa", "--target", target, "--cache", cache, "--out", tmp_path]
    command = ["-m", "specdemo", *train]
    run = started(*command, "--minutes", "10").until(TRAINS)
    assert run.end(TERM) == CODES[TERM]
    assert "run the same command to continue" in run.text
    done = steps(tmp_path)
    assert done > 0
    before = inode(tmp_path)
    run = started("-c", EARLY_CHECKPOINT, *train, "--minutes", "10").until(TRAINS)
    deadline = time.monotonic() + LIMIT_S
    while inode(tmp_path) in (None, before):
        run.listen()
        assert time.monotonic() < deadline
    assert run.end(KILL) == -9
    assert steps(tmp_path) > done
    assert started(*command, "--minutes", "0.001").end() == 0
    assert {"config.json", "model.safetensors", "provenance.json"} <= {path.name for path in tmp_path.iterdir()}
