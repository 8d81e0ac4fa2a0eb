"""The notebook examples/colab.ipynb on a CPU, with an embedded pair in place of the one from the hub."""

import re
from pathlib import Path

import pytest

from specdemo.__main__ import main
from specdemo.presets.files import preset
from tests import processes

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "colab.ipynb"
SMALL = """
SOURCE, PRESET, PROMPT, MAX_NEW_TOKENS = "", "embedded-draft", "Once upon a time", 24
"""
IN_A_LOOP = """
import asyncio, sys

async def cells():
    exec(sys.argv[1], {})

asyncio.run(cells())
"""


@pytest.fixture
def notebook():
    nbformat = pytest.importorskip("nbformat")
    read = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(read)
    return read


def tagged(notebook, tag):
    return [cell for cell in notebook.cells if tag in cell.metadata.get("tags", ())]


def test_the_cells_of_the_notebook_run(notebook):
    """In an event loop, as in a kernel."""
    (parameters,) = tagged(notebook, "parameters")
    parameters.source = SMALL
    left_out = [*tagged(notebook, "install"), *tagged(notebook, "share")]
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code" and cell not in left_out]
    done = processes.run("-c", IN_A_LOOP, "\n".join(cells))
    assert done.returncode == 0, done.stderr
    assert "cpu" in done.stdout and "torch.float32" in done.stdout
    assert re.fullmatch(r"\S.* +\d+\.\d\dx( \(.*\))?", done.stdout.splitlines()[-1])


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
