"""Server processes: started on a free port, watched while loading, and ended with this process
(servers/supervisor.py).
"""

import json
import os
import re
import secrets
import shlex
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen, SubprocessError, run
from tempfile import TemporaryDirectory
from typing import NoReturn

import httpx

from specdemo.servers import supervisor
from specdemo.servers.address import TITLES, Engine, host

LOADING_S = 1800.0  # timeout for the start of a server, including downloads
POLL_S = 0.25
TAIL = 8  # last log lines to include in an error
LOG_BYTES = 20_000
SHOWN = 60  # longest log line to show
PROBE_S = 120.0  # timeout; importing an engine takes half a minute on a slow disk
# a small KV cache is enough, because a lane sends one request at a time; no usage statistics
DEFAULTS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
PROBE = """
import json, torch, typing
from importlib.metadata import version
from vllm.config import speculative
from vllm.platforms import current_platform

def words(kind):
    return [w for a in typing.get_args(kind) for w in (words(a) if typing.get_args(a) else [a])]
print(json.dumps({"version": version("vllm"), "methods": words(speculative.SpeculativeMethod),
                  "gpus": 0 if current_platform.is_cpu() else torch.cuda.device_count()}, allow_nan=False))
"""

LLAMACPP = ("xllamacpp", "gguf")  # packages
COMMANDS = {"vllm": "vllm", "sglang": "python", "llamacpp": sys.executable}  # default programs
GPU_ONLY = "on Linux with an NVIDIA GPU"
INSTALL = {  # in a separate environment, because they need other versions of torch
    "vllm": f"python3 -m venv vllm && vllm/bin/pip install vllm ({GPU_ONLY}; for a CPU see docs/servers.md), "
    "then pass --command vllm/bin/vllm, for the page --engines vllm=vllm/bin/vllm",
    "sglang": f"python3 -m venv sglang && sglang/bin/pip install sglang ({GPU_ONLY}), "
    "then pass --command sglang/bin/python, for the page --engines sglang=sglang/bin/python",
    "llamacpp": f"{shlex.quote(sys.executable)} -m pip install {' '.join(LLAMACPP)}",
}

ReportFunction = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Installed:
    """Facts about an installed vLLM."""

    version: str
    methods: Sequence[str]  # accepted by `--speculative-config`
    gpus: int


def program(command: str) -> str:
    """Return the path of a program, given its path or its name on PATH. Raises ValueError if it does not exist."""
    path = shutil.which(command)
    if path is None:
        raise ValueError(
            f"there is no program {command}; install it or pass its path: --command PATH, for the page "
            "--engines NAME=PATH"
        )
    return path


def engine_program(engine: Engine, command: str | None = None) -> str:
    """Return the path of an engine's program. command: a path or a name on PATH, None: the engine's own name.

    Raises ValueError, with the command that installs the engine, if it is not installed.
    """
    if command is None:
        check_installed(engine)
    return program(command or COMMANDS[engine])


def check_installed(engine: Engine) -> None:
    """Raise ValueError, with the command that installs it, if an engine is not installed."""
    if not _is_installed(engine):
        raise ValueError(f"{TITLES[engine]} is not installed; run: {INSTALL[engine]}")


def _is_installed(engine: Engine) -> bool:
    if engine == "llamacpp":
        return all(map(find_spec, LLAMACPP))
    found = shutil.which(COMMANDS[engine])
    if engine == "vllm" or found is None:
        return found is not None
    look = "import sys; from importlib.util import find_spec; sys.exit(find_spec('sglang') is None)"
    return run([found, "-c", look], capture_output=True).returncode == 0


@lru_cache
def installed(command: str) -> Installed | None:
    """Query the Python next to `command`, a path or a name on PATH; None if it does not answer.

    Raises ValueError if there is no such command.
    """
    python = Path(program(command)).parent / "python"
    if not python.exists():
        return None
    try:
        output = run([str(python), "-c", PROBE], capture_output=True, timeout=PROBE_S, check=True).stdout
        return Installed(**json.loads(output.splitlines()[-1]))
    except (OSError, SubprocessError, ValueError, TypeError, IndexError):
        return None


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def started(command: Sequence[str], address: str, environment: Mapping[str, str]) -> Iterator["Server"]:
    """Start a server process. It ends with the block, and with this process even if that is killed."""
    watched, mark = [sys.executable, "-P", supervisor.__file__, *command], secrets.token_hex(16)
    alone = {**DEFAULTS, **os.environ, **environment, supervisor.MARK: mark}
    with (
        TemporaryDirectory() as folder,
        _log(Path(folder) / "log") as log,
        # in a separate session: Ctrl-C reaches only this process, and closing the pipe stops the server cleanly
        Popen(watched, stdin=PIPE, stdout=log, stderr=STDOUT, env=alone, start_new_session=True) as process,
    ):
        watcher = threading.Thread(target=_end_after, args=(process, mark), daemon=True, name="engine watcher")
        watcher.start()
        try:
            yield Server(command[0], address, process, Path(folder) / "log")
        finally:
            process.communicate()  # close the pipe and wait; after Ctrl-C, Popen itself waits only for a moment
            watcher.join()


def _end_after(process: "Popen[bytes]", mark: str) -> None:
    """Wait for the end of a supervisor, then end the processes that it left, which happens only if it was killed."""
    process.wait()
    supervisor.end_marked(mark, process.pid)


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
            if self.process.poll() is not None:
                raise ValueError(
                    f"{self.program} exited while loading: {' / '.join(self._tail()) or 'its log is empty'}"
                )
            if _answers(self.address):
                return seconds
            report(f"{seconds:.0f} s: {_shortened(next(reversed(self._tail()), 'starting'))}")
            time.sleep(POLL_S)
        raise ValueError(f"{host(self.address)} did not answer within {LOADING_S:g} s")

    def check_runs(self) -> None:
        """Raise ValueError, with the end of the log, if the server has ended."""
        if self.process.poll() is not None:
            lines = " / ".join(self._tail()) or "empty"
            raise ValueError(f"{self.program} at {host(self.address)} exited; the end of its log: {lines}")

    def _tail(self) -> list[str]:
        """Return the last non-empty lines of the log."""
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
    return shortened if len(shortened) <= SHOWN else f"{shortened[: SHOWN - 1]}…"


def _answers(address: str) -> bool:
    """Return True if /health says that the model is loaded (vLLM, SGLang and llama.cpp)."""
    try:
        return httpx.get(f"{address}/health", timeout=2.0).status_code == 200
    except httpx.HTTPError:
        return False
