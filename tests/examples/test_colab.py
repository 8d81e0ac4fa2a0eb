"""The notebook examples/colab.ipynb on a CPU, with an embedded pair in place of the one from the hub."""

import os
import re
from pathlib import Path

import pytest

from specdemo.__main__ import main
from specdemo.presets.files import preset

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "colab.ipynb"
SMALL = """
SOURCE, PRESET, PROMPT, MAX_NEW_TOKENS = "", "embedded-draft", "Once upon a time", 24
"""


@pytest.fixture
def notebook():
    nbformat = pytest.importorskip("nbformat")
    read = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(read)
    return read


def tagged(notebook, tag):
    return [cell for cell in notebook.cells if tag in cell.metadata.get("tags", ())]


def test_the_notebook_runs(notebook, monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    (parameters,) = tagged(notebook, "parameters")
    parameters.source = SMALL
    for tag in ("install", "share"):
        for cell in tagged(notebook, tag):
            notebook.cells.remove(cell)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    nbclient.NotebookClient(notebook, kernel_name="python3", timeout=300).execute()
    printed = "".join(out.get("text", "") for cell in notebook.cells for out in cell.get("outputs", ()))
    assert "cpu" in printed and "torch.float32" in printed
    assert re.fullmatch(r"\S.* +\d+\.\d\dx( \(.*\))?", printed.splitlines()[-1])


def test_the_parameters_and_the_command_exist(notebook, monkeypatch):
    names = {}
    exec(tagged(notebook, "parameters")[0].source, names)
    chosen = preset(names["PRESET"])
    (share,) = tagged(notebook, "share")
    command = share.source.strip().removeprefix("!specdemo ").split()
    assert [chosen.target, chosen.lanes[0].model] == [command[2], command[4]]
    started = []
    monkeypatch.setattr("specdemo.ui.app._start", lambda *given: given[1:3])
    monkeypatch.setattr(
        "specdemo.ui.page.serve", lambda start, *given, **reach: started.append((start, reach["share"]))
    )
    assert main(command) == 0
    assert started == [((chosen.target, chosen.lanes[0].model), True)]
