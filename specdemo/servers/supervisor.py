"""Supervisor of a serving engine: `python -m specdemo.servers.supervisor COMMAND...` runs and ends it.

The process that starts the supervisor holds the other end of its stdin. The pipe closes when that process ends, even by
SIGKILL. SIGTERM, SIGINT and SIGHUP end the engine as well. No single way finds all processes of an engine, so there are
three: descent (on Linux with PR_SET_CHILD_SUBREAPER, which keeps daemons among the descendants), the session, and an
environment variable that processes inherit. If the supervisor itself is killed by SIGKILL, the kernel ends the engine
(PR_SET_PDEATHSIG, Linux), and the process that started the supervisor ends the other processes (`end_marked`).
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import psutil

POLL_S = 0.1
GRACE_S = 10.0  # seconds between SIGTERM and SIGKILL
ROUNDS = 5  # searches for processes that started while others were ended
MARK = "SPECDEMO_ENGINE_MARK"  # environment variable of every process of an engine
LINUX = sys.platform == "linux"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h

Processes = dict[int, psutil.Process]  # by process id


def main(command: Sequence[str]) -> int:
    """Run the command. Return its exit code, negative for the signal that ended it."""
    signals: list[int] = []  # a signal handler must not take the lock of an Event
    for name in ("SIGTERM", "SIGINT", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda number, _: signals.append(number))
    child = _start(command)
    closed = threading.Event()
    threading.Thread(target=_wait_for_eof, args=(closed,), daemon=True).start()
    while child.poll() is None and not signals and not closed.wait(POLL_S):
        _reap_orphans(child.pid)
    _end_all(_family)
    return child.wait()


def end_marked(mark: str, session: int) -> None:
    """End every process that carries the mark or belongs to the session. Does nothing if there is none."""
    _end_all(lambda: _marked(mark, session))


def _start(command: Sequence[str]) -> "subprocess.Popen[bytes]":
    """Start the command in a process group of its own. On Linux the kernel ends it when the supervisor dies."""
    if not LINUX:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=None if sys.platform == "win32" else 0)
    prctl, supervisor = ctypes.CDLL(None).prctl, os.getpid()
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def die_with_supervisor() -> None:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != supervisor:  # the parent ended before the call
            os._exit(1)

    # no thread runs yet, so preexec_fn is safe
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=die_with_supervisor)


def _wait_for_eof(closed: threading.Event) -> None:
    while os.read(0, 1):  # sys.stdin has a lock that the end of the interpreter would wait for
        pass
    closed.set()


def _reap_orphans(engine: int) -> None:
    """Collect the exit status of ended processes that a subreaper inherits, but not the engine's own."""
    if not LINUX:
        return
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != engine:
            os.waitpid(ended.si_pid, 0)


def _family() -> Processes:
    """Return all processes of the engine that this supervisor runs."""
    below = {process.pid: process for process in psutil.Process().children(recursive=True)}
    own_session = os.getpid() if _session(0) == os.getpid() else 0  # 0: this process shares the session of its starter
    return below | _marked(os.environ.get(MARK, ""), own_session)


def _marked(mark: str, session: int) -> Processes:
    """Return the other processes of this machine that belong to the session or carry the mark; 0 and "" match none."""
    others = (process for process in psutil.process_iter() if process.pid != os.getpid())
    return {p.pid: p for p in others if (session and _session(p.pid) == session) or (mark and _mark(p) == mark)}


def _session(pid: int) -> int | None:
    if sys.platform != "win32":
        with suppress(OSError):
            return os.getsid(pid)
    return None


def _mark(process: psutil.Process) -> str | None:
    with suppress(psutil.Error, OSError):
        environment: dict[str, str] = process.environ()
        return environment.get(MARK)
    return None


def _end_all(find: Callable[[], Processes]) -> None:
    """Ask the processes to end, then kill the remaining ones, until none is found."""
    for _ in range(ROUNDS):
        family = [process for process in find().values() if _runs(process)]
        if not family:
            return
        for process in family:
            with suppress(psutil.Error):
                process.terminate()
        for process in psutil.wait_procs(family, timeout=GRACE_S)[1]:
            with suppress(psutil.Error):
                process.kill()


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
