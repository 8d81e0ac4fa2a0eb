"""Python processes for tests. `start` and `run` take the arguments after `python`.

On Linux they are forks of a server that has imported the large libraries (tests/fork_server.py), elsewhere new
interpreters. Tests of import costs use `subprocess` and always get a new interpreter.
"""

import os
import resource
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from specdemo.servers.process import free_port

ROOT = Path(__file__).parents[1]
BLOCK = """
import sys

absent = {names}
loaded = [name for name in sys.modules if name.partition(".")[0] in absent]
sys.modules |= dict.fromkeys([*absent, *loaded])  # None: an import raises ModuleNotFoundError
"""

PAGE = """
import sys
from specdemo.__main__ import main
from tests.processes import measure_briefly

measure_briefly()
sys.exit(main(["ui", *sys.argv[1:]]))
"""


def measure_briefly():
    """Shorten what precedes a run: the curve of pass costs of a new model, and the warm-up of each lane."""
    from specdemo.engine import loop
    from specdemo.models import pass_cost

    pass_cost.CURVE_SECONDS, pass_cost.CURVE_WIDTHS = 0.0, (1, 4, 8)  # two rounds instead of seven, of fewer passes
    loop.WARM_UP_TOKENS = 4


def block(*packages):
    """Return code after which packages cannot be imported, even if the process has imported them before."""
    return BLOCK.format(names=packages)


class KilledOnError:
    """A process whose block kills it after an error. Popen would wait for its end, which may never come."""

    def __exit__(self, kind, value, traceback):
        if kind is not None:
            self.kill()
        super().__exit__(kind, value, traceback)


def start(*command, cwd=ROOT, env=None, **settings):
    """Start `python COMMAND...` and return it as `subprocess.Popen` does. settings: further arguments of Popen."""
    popen = subprocess.Popen
    if sys.platform == "linux":
        from tests.fork_server import Fork as popen
    process = type("Process", (KilledOnError, popen), {})
    return process([sys.executable, *map(str, command)], cwd=cwd, env=os.environ if env is None else env, **settings)


def run(*command, timeout=300, **settings):
    """Run `python COMMAND...` and return its exit code, stdout and stderr as `subprocess.run` does."""
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | settings
    with start(*command, **settings) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@contextmanager
def served(*options, log=None, **environment):
    """Start the page on a free port and yield its process and its address. log: a file for its stderr."""
    command = ("-c", PAGE, "--port", free_port(), *options)
    with start(*command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=log, text=True) as page:
        try:
            yield page, page.stdout.readline().split()[-1]
        finally:
            page.terminate()


@contextmanager
def full_disk(left):
    """Limit the size of files to `left` bytes, so that larger writes fail as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (left, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
