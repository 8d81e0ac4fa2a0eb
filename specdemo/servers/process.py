"""Server processes: started on a free port, watched while loading, and ended with this process, however it ends.

On Linux the kernel kills a server when the thread that started it ends (PR_SET_PDEATHSIG); on Windows a job object
does. Elsewhere a server outlives a specdemo that was killed. Processes that a server started itself end with its
process group.
"""

import ctypes
import os
import random
import re
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen, TimeoutExpired
from tempfile import TemporaryDirectory
from typing import NoReturn

import httpx

from specdemo.servers.address import host

LOADING_S = 1800.0  # timeout for the start of a server, including downloads
POLL_S = 0.25
TAIL = 8  # last log lines to include in an error
LOG_BYTES = 20_000
EPHEMERAL = 32_768  # of Linux; other systems start later
LINE_CHARS = 60  # longest log line to show
GRACE_S = 10.0  # seconds between SIGTERM and SIGKILL
PR_SET_PDEATHSIG = 1  # linux/prctl.h
# run in a process of its own, because a fork must not call Python code while this process has threads
LAUNCH = (
    f"import ctypes, os, sys; ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, 9); "  # SIGKILL
    "os.getppid() == int(sys.argv[1]) or os._exit(1); os.execvp(sys.argv[2], sys.argv[2:])"
)

ReportFunction = Callable[[str], None]


def free_port() -> int:
    """Return a free port of this machine that no outgoing connection takes before a server binds it.

    Systems take the ports of outgoing connections from EPHEMERAL on.
    """
    for port in (*random.SystemRandom().sample(range(10_000, EPHEMERAL), 100), 0):
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise ValueError("this machine has no free port; close some programs")


@contextmanager
def run_server(command: Sequence[str], address: str, environment: Mapping[str, str]) -> Iterator["Server"]:
    """Start a server process. It ends with the block, and with this process even if that is killed."""
    linux = [sys.executable, "-IS", "-c", LAUNCH, str(os.getpid())] if sys.platform == "linux" else []
    with (
        TemporaryDirectory() as folder,
        _log(Path(folder) / "log") as log,
        # in a separate session, so that Ctrl-C reaches only this process
        Popen(
            [*linux, *command], stdin=DEVNULL, stdout=log, stderr=STDOUT, env={**os.environ, **environment},
            start_new_session=True,
        ) as process,
    ):  # fmt: skip
        job = _job(process)
        try:
            yield Server(command[0], address, process, Path(folder) / "log")
        finally:
            if job is None:
                _end_group(process)
            else:
                job()


def _end_group(process: "Popen[bytes]") -> None:
    """Ask the process group to end, and kill what is left of it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):  # PermissionError: macOS, if only zombies are left
            os.killpg(process.pid, number)
        with suppress(TimeoutExpired):
            process.wait(GRACE_S)


def _job(process: "Popen[bytes]") -> Callable[[], object] | None:
    """Put the process into a job object, which ends with this process, and return what ends it; None where there are
    process groups."""
    if sys.platform != "win32":
        return None
    kernel = ctypes.windll.kernel32
    limits = (ctypes.c_byte * 144)()  # JOBOBJECT_EXTENDED_LIMIT_INFORMATION of 64-bit systems
    struct.pack_into("I", limits, 16, 0x2000)  # LimitFlags: JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE
    job = kernel.CreateJobObjectW(None, None)
    kernel.SetInformationJobObject(job, 9, limits, len(limits))
    kernel.AssignProcessToJobObject(job, int(process._handle))
    return partial(kernel.TerminateJobObject, job, 1)


@contextmanager
def _log(path: Path) -> Iterator[int]:
    """Open a file for processes to write to; return its descriptor."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Server:
    """A server that this process started."""

    program: str
    address: str
    process: "Popen[bytes]"
    log: Path

    def wait(self, report: ReportFunction) -> float:
        """Wait until the server answers; return the seconds. Raises ValueError, one line, with the end of its log."""
        start = time.monotonic()
        while (seconds := time.monotonic() - start) < LOADING_S:
            self.check_runs()
            if _answers(self.address):
                return seconds
            report(f"{seconds:.0f} s: {_shortened(next(reversed(self._tail()), 'starting'))}")
            time.sleep(min(POLL_S, 0.01 + seconds / 10))  # often at first, because some servers start in no time
        raise ValueError(f"{host(self.address)} did not answer within {LOADING_S:g} s")

    def check_runs(self) -> None:
        """Raise ValueError, with the end of the log, if the server has ended."""
        if self.process.poll() is not None:
            lines = " / ".join(self._tail()) or "empty"
            raise ValueError(f"{self.program} at {host(self.address)} exited; the end of its log: {lines}")

    def _tail(self) -> list[str]:
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - LOG_BYTES))
            text = log.read().decode(errors="replace")
        return [line.strip() for line in text.splitlines() if line.strip()][-TAIL:]


def watch(servers: Sequence[Server]) -> NoReturn:
    """Block while all servers run. Raises ValueError, one line, when one of them ends."""
    while True:
        for server in servers:
            server.check_runs()
        time.sleep(POLL_S)


def _shortened(line: str) -> str:
    """Return a log line without its prefix of logger, time and code location."""
    shortened = re.sub(r"^.*?\[[\w.]+:\d+\] ", "", line)
    return shortened if len(shortened) <= LINE_CHARS else f"{shortened[: LINE_CHARS - 1]}…"


def _answers(address: str) -> bool:
    """Return True if /health says that the model is loaded (vLLM, SGLang and llama.cpp)."""
    try:
        # plain HTTP on this machine; certificates, which are not needed, take most of the time
        return httpx.get(f"{address}/health", timeout=2.0, verify=False).status_code == 200
    except httpx.HTTPError:
        return False
