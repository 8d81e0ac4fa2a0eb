"""A method from another package: the one of docs/add-a-method.md, built and installed from the page's own code."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "add-a-method.md"
USED = """
import json, sys
from specdemo.__main__ import main
from specdemo.methods import METHODS, load_drafter, knobs
from specdemo.testing import check_method
from specdemo.ui.controls import DRAFTING

check_method("bigram")
print(json.dumps({
    "last": list(METHODS)[-1],
    "offered": "bigram" in DRAFTING,
    "knobs": [knob.name for knob in knobs("bigram")],
    "codes": [
        main(["run", "embedded-ngram", "--method", "bigram", "--max-new-tokens", "24", "--out", sys.argv[1]]),
        main(["run", "embedded-ngram", "--method", "bigrams"]),
    ],
}))
"""


def run(*command, **environment):
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the page's package in it, as pip leaves it."""
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    page = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"`(\w+\.(?:py|toml))`[^\n]*:\n\n```\w+\n(.*?)```", page, re.DOTALL)
    assert [name for name, _ in blocks] == ["bigram.py", "pyproject.toml"]
    for name, text in blocks:
        (source / name).write_text(text, encoding="utf-8")
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    run(sys.executable, "-m", "pip", "install", *offline, "--target", str(site), str(source))
    return site


def test_the_page_s_method_runs_as_one_of_ours(installed, tmp_path):
    paths = os.pathsep.join([str(installed), str(ROOT)])
    said = run(sys.executable, "-c", USED, str(tmp_path / "trace.json"), PYTHONPATH=paths).splitlines()[-1]
    assert json.loads(said) == {"last": "bigram", "offered": True, "knobs": ["longest"], "codes": [0, 2]}
    lane = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["lanes"][1]
    assert lane["method"] == "bigram" and lane["summary"]["drafted"] > 0


def test_one_that_cannot_be_imported_is_named(installed):
    (installed / "bigram.py").write_text("import nothing_like_it", encoding="utf-8")
    paths = os.pathsep.join([str(installed), str(ROOT)])
    command = [sys.executable, "-m", "specdemo", "methods"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths})
    assert done.returncode == 2
    assert "method 'bigram' of another package cannot be imported" in done.stderr
