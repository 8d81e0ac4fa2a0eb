"""`python -m specdemo.servers.keeper COMMAND...`: runs a command for as long as somebody holds the other end of stdin.

Whoever starts it may be killed in any way: the pipe closes, and the command ends with everything that it has started.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

import psutil

POLL_S = 0.1
GRACE_S = 10.0  # between asking to end and ending


def main(command: Sequence[str]) -> int:
    """Returns the command's exit code, negative for the signal that ended it."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=None if sys.platform == "win32" else 0)
    let_go = threading.Event()

    def hold() -> None:
        while os.read(0, 1):  # not by sys.stdin, whose lock the end of this process would wait for
            pass
        let_go.set()

    threading.Thread(target=hold, daemon=True).start()
    while child.poll() is None and not let_go.wait(POLL_S):
        pass
    _end(child)
    return child.wait()


def _end(child: "subprocess.Popen[bytes]") -> None:
    """Ask the command and all below it to end, and end what does not."""
    family: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        leader = psutil.Process(child.pid)
        family = [leader, *leader.children(recursive=True)]
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    for process in psutil.wait_procs(family, timeout=GRACE_S)[1]:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    if sys.platform != "win32":  # those whose parent ended before
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
