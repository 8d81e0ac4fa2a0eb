"""Processes for tests: like `python COMMAND...`, forked or not."""

import os
import signal
import subprocess
import sys

import pytest

from tests.processes import run, start

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are used on Linux")
SHOW = """
import os, sys
print(sys.argv, sys.path[0], os.getcwd(), os.environ["A"], __name__, "specdemo" in sys.modules)
print("error", file=sys.stderr)
sys.exit(int(sys.stdin.read()))
"""


@pytest.fixture
def arguments(tmp_path):
    """Return the arguments of the three ways to start Python."""
    (tmp_path / "shows.py").write_text(SHOW, encoding="utf-8")
    return [["-c", SHOW, "x"], ["-m", "shows", "x"], [tmp_path / "shows.py", "x"]]


def test_a_process_is_like_a_new_interpreter(arguments, tmp_path):
    settings = {"cwd": tmp_path, "env": os.environ | {"A": "b", "PYTHONPATH": str(tmp_path / "site")}, "text": True}
    for command in arguments:
        with (tmp_path / "code").open("w+") as code:
            code.write("7")
            code.seek(0)
            done = run(*command, stdin=code, **settings)
            code.seek(0)
            new = subprocess.run([sys.executable, *map(str, command)], stdin=code, capture_output=True, **settings)
        assert done.stdout.split()[-1] == "False" and new.returncode == 7
        assert (done.returncode, done.stdout, done.stderr) == (new.returncode, new.stdout, new.stderr)


@pytest.mark.parametrize(
    ("code", "expected", "last"),
    [
        ("import atexit; atexit.register(print, 'end')", 0, ""),
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("import os; os._exit(5)", 5, ""),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
        ("raise SystemExit('one line')", 1, "one line"),
    ],
)
def test_the_exit_code_is_pythons(code, expected, last):
    done = run("-c", code)
    assert done.returncode == expected and (done.stderr.splitlines() or [""])[-1] == last
    assert ("end" in done.stdout) == ("atexit" in code)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_process_receives_signals(number):
    waits = "import time; print('ready', flush=True); time.sleep(600)"
    with start("-c", waits, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout.readline() == "ready\n" and process.poll() is None
        process.send_signal(number)
        assert process.wait(60) == -number
    assert process.poll() == -number


def test_an_error_in_the_block_ends_the_process():
    with pytest.raises(AssertionError, match="wrong"), start("-c", "import threading; threading.Event().wait()") as one:
        raise AssertionError("wrong")
    assert one.returncode == -signal.SIGKILL
