"""A server that has imported torch, transformers and gradio, and forks a process per request; for Linux.

A fork has its own arguments, working folder, environment, standard streams and process group, receives signals, and
imports specdemo itself: it differs from a new interpreter only in the libraries that are in `sys.modules` already. All
workers of a test run share one server. The first one starts it. It ends when its folder is removed, or when the process
whose id ends the folder's name has ended.

The client sends a request as one line of JSON with the descriptors of stdin, stdout and stderr. The answers are the
process id and, at the end, the wait status.
"""

import fcntl
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import warnings
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType

import psutil

FOLDER = "SPECDEMO_TEST_SERVER"  # environment variable: contains the lock, the log and the socket of the server
LIBRARIES = """
torch torch._dynamo torch.distributed.tensor transformers transformers.generation transformers.models.auto
transformers.models.llama.modeling_llama transformers.models.qwen3.modeling_qwen3 accelerate tokenizers
safetensors.torch huggingface_hub httpx pydantic yaml tqdm typer gradio
""".split()
POLL_S = 1.0
MOST = 1 << 20  # bytes of a request


class Fork(subprocess.Popen):
    """A process forked by the server."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):
        assert preexec_fn is None and not pass_fds
        ends = rest[3:9]
        streams = [end if end >= 0 else number for number, end in enumerate((ends[0], ends[3], ends[5]))]
        self._link = _connect(Path(os.environ[FOLDER]))
        request = {"arguments": args[1:], "cwd": str(cwd), "env": dict(env)}
        socket.send_fds(self._link, [json.dumps(request).encode() + b"\n"], streams)
        self._answers = self._link.makefile("rb")
        self.pid = int(self._answers.readline())
        self._child_created = True
        self._close_pipe_fds(*ends)

    def _internal_poll(self, _deadstate=None):
        if self.returncode is None:
            process, status = self._reap(self.pid, os.WNOHANG)
            if process:
                self._handle_exitstatus(status)
        return self.returncode

    def _try_wait(self, wait_flags):
        return self._reap(self.pid, wait_flags)

    def _reap(self, pid, flags):
        """Do what os.waitpid does for a child."""
        if flags & os.WNOHANG and not select.select([self._link], [], [], 0)[0]:
            return 0, 0
        status = int(self._answers.readline())
        self._answers.close()
        self._link.close()
        return pid, status


def _connect(folder):
    """Connect to the server, and start it before if this is the first request."""
    with (folder / "lock").open("w") as lock, (folder / "log").open("a") as log:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "socket").exists():
            command = [sys.executable, "-P", __file__, str(folder)]
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            subprocess.run(command, **streams, env=os.environ | {"PYTHONPATH": ""}, start_new_session=True, check=True)
    link = socket.socket(socket.AF_UNIX)
    link.connect(str(folder / "socket"))
    return link


def serve(folder):
    """Fork processes until the folder is removed. Returns only in forks, with the request."""
    for name in LIBRARIES:
        import_module(name)
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen(64)
    listener.settimeout(POLL_S)
    if os.fork():
        os._exit(0)  # the server is ready
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while folder.exists() and psutil.pid_exists(int(folder.name.rpartition("-")[2])):
        with suppress(TimeoutError):
            link, _ = listener.accept()
            if not os.fork():
                listener.close()
                return _watched(link)
            link.close()
    os._exit(0)


def _watched(link):
    """Fork the process, answer with its id and its wait status, and end. Returns in the fork, with the request."""
    data, streams, _, _ = socket.recv_fds(link, MOST, 3)
    while not data.endswith(b"\n"):
        part = link.recv(MOST)
        if not part:  # the client ended before its request was complete
            os._exit(1)
        data += part
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    process = os.fork()
    if not process:
        os.setpgid(0, 0)
        link.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        return json.loads(data)
    for stream in streams:
        os.close(stream)
    with suppress(BrokenPipeError):
        link.sendall(b"%d\n" % process)
        link.sendall(b"%d\n" % os.waitpid(process, 0)[1])
    os._exit(0)


def execute(request, path):
    """Run the arguments of a Python interpreter. path: the entries of sys.path after the first."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout.reconfigure(line_buffering=os.isatty(1))
    sys.stderr = sys.__stderr__ = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr.reconfigure(line_buffering=True)
    first, *arguments = request["arguments"]
    while first == "-W":
        warnings._setoption(arguments[0])
        first, *arguments = arguments[1:]
    more = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if first == "-m":
        sys.path[:] = [str(Path.cwd()), *more, *path]
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.path[:] = ["", *more, *path]
        sys.argv = ["-c", *arguments[1:]]
        sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(arguments[0], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.path[:] = [str(Path(first).resolve().parent), *more, *path]
        sys.argv = [first, *arguments]
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    libraries = list(sys.path)  # -P: without the folder of this file
    execute(serve(Path(sys.argv[1])), libraries)
