"""A method from another package: the one of docs/add-a-method.md, built and installed from the page's own code."""

import json
import os
import subprocess
import sys

import pytest

from tests.plug_in import ROOT, install_bigram, run

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


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    return install_bigram(tmp_path_factory.mktemp("bigram"))


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
