"""The two commands at the start of README.md, and the environment that tests/run makes."""

import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from threading import Timer

import httpx
import pytest

from specdemo.presets.limits import SPACE
from specdemo.servers.process import free_port

ROOT = SPACE.parents[1]
PAGE = "python3 -m venv .venv && .venv/bin/pip install -r requirements.txt && .venv/bin/python app.py"
TESTS = "bash tests/run"
MAKE = "has_environment || make_environment"  # the first line of tests/run that does something
SECONDS = 1800  # for packages and a build of llama.cpp that pip's cache does not have

# As Python does: it completes an environment, but not one whose Python is a link to nowhere, and a broken pip counts.
PYTHON = """#!/usr/bin/env bash
case "$*" in
"-c from ensurepip import version") [ -e ensurepip ] ;;
"-m venv .venv")
    echo made >>made
    [ ! -L .venv/bin/python ] || [ -e .venv/bin/python ] || exit 1
    mkdir -p .venv/bin
    [ -e .venv/pip ] || echo 'exit 0' >.venv/pip
    ln -sf "$PWD/environment" .venv/bin/python
    ;;
esac
"""
OF_ENVIRONMENT = "#!/usr/bin/env bash\nbash .venv/pip\n"

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the commands are for bash")


def blocks(name, language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.S)


def commands(block):
    return [line.partition("  #")[0].strip() for line in block.splitlines()]


def test_readme_begins_with_two_commands_and_contributing_with_the_same():
    assert commands(blocks("README.md", "bash")[0]) == [PAGE, TESTS]
    assert commands(blocks("CONTRIBUTING.md", "bash")[0])[:2] == [PAGE, TESTS]


@pytest.fixture
def checkout(tmp_path):
    """A folder with the functions of tests/run, and commands that stand in for Python, apt-get, id and npm."""
    script = (ROOT / "tests/run").read_text(encoding="utf-8").partition(f"\n{MAKE}\n")[0]
    programs = {
        "functions": script.replace('cd "$(dirname "$0")/.."', ""),
        "environment": OF_ENVIRONMENT,
        "bin/python3": PYTHON,
        "bin/apt-get": "#!/usr/bin/env bash\necho $* >>apt\ntouch ensurepip\n",
        "bin/id": "#!/usr/bin/env bash\necho ${ID:-0}\n",
        "bin/npm": "#!/usr/bin/env bash\nexit 1\n",
    }
    for name, text in programs.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "ensurepip").touch()
    return tmp_path


def run(checkout, command=MAKE, **environment):
    path = os.pathsep.join([str(checkout / "bin"), os.environ["PATH"]])
    settings = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "CI")}
    script = f"source functions\n{command}\necho done"
    settings |= {"PATH": path} | environment
    return subprocess.run(["bash", "-c", script], cwd=checkout, env=settings, capture_output=True, text=True)


def half_made(checkout, pip="", python=True):
    """Make a .venv as an interrupted run leaves it: with an empty or broken pip, or with a link to no Python."""
    (checkout / ".venv/bin").mkdir(parents=True)
    (checkout / ".venv/kept").touch()
    (checkout / ".venv/bin/python").symlink_to(checkout / ("environment" if python else "nowhere"))
    if pip:
        (checkout / ".venv/pip").write_text(pip)


@pytest.mark.parametrize(
    "left, kept",
    [({}, True), ({"pip": "exit 1"}, False), ({"python": False}, False), ({"pip": "exit 0"}, True)],
    ids=["no pip", "broken pip", "no Python", "complete"],
)
def test_an_environment_that_an_interrupted_run_left_is_completed_or_made_again(checkout, left, kept):
    half_made(checkout, **left)
    done = run(checkout)
    assert done.returncode == 0, done.stderr
    assert subprocess.run([checkout / ".venv/bin/python"], cwd=checkout).returncode == 0
    assert (checkout / ".venv/kept").exists() is kept
    assert (checkout / "made").exists() is (left != {"pip": "exit 0"})


def test_root_gets_the_package_that_makes_environments_and_others_are_told(checkout):
    (checkout / "ensurepip").unlink()
    told = run(checkout, ID="1000")
    assert (told.returncode, told.stderr) == (
        2,
        "this Python cannot make virtual environments; install its venv package\n",
    )
    assert not (checkout / ".venv").exists()
    assert run(checkout).returncode == 0
    assert "install -y -qq python3-venv" in (checkout / "apt").read_text()


def test_packages_that_npm_cannot_install_stop_no_tests_but_those_of_ci(checkout):
    done = run(checkout, "install_script_checks")
    assert done.stdout == "done\n" and "npm cannot install what checks the page's scripts" in done.stderr
    assert run(checkout, "install_script_checks", CI="1").returncode == 1


@pytest.mark.release
def test_both_commands_work_in_a_fresh_clone(tmp_path):
    clone, home = tmp_path / "clone", tmp_path / "home"
    home.mkdir()
    subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
    cache = subprocess.run([sys.executable, "-m", "pip", "cache", "dir"], capture_output=True, text=True, check=True)
    ours = ("PYTHON", "PYTEST", "VIRTUAL_ENV", "HF_", "SPECDEMO_", "GRADIO_", "OMP_", "XDG_", "CI")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    port = free_port()
    environment = {
        **kept,
        "HOME": str(home),
        "PATH": os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if ".venv" not in p),
        "PIP_CACHE_DIR": cache.stdout.strip(),  # for time
        "GRADIO_SERVER_PORT": str(port),
    }
    settings = {"cwd": clone, "env": environment, "start_new_session": True, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(["bash", "-c", PAGE], **settings) as page:
        end = Timer(SECONDS, os.killpg, (page.pid, signal.SIGKILL))
        end.start()
        try:
            assert any(f"specdemo is on http://127.0.0.1:{port}" in line for line in page.stdout)
            assert "specdemo" in httpx.get(f"http://127.0.0.1:{port}").text
        finally:
            end.cancel()
            with suppress(ProcessLookupError):
                os.killpg(page.pid, signal.SIGTERM)
    for package in clone.glob(".venv/lib/python3*/site-packages/pip*"):
        shutil.rmtree(package)  # as after an interruption
    tested = subprocess.run(
        ["bash", "-c", f"{TESTS} tests/core/test_accept.py"], cwd=clone, env=environment, capture_output=True, text=True
    )
    assert tested.returncode == 0, (tested.stdout + tested.stderr)[-4000:]
    assert " passed" in tested.stdout
