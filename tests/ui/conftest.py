import pytest

from specdemo.bench import suites
from specdemo.ui import lab
from tests.ui.stand_ins import Bench


@pytest.fixture
def bench(monkeypatch):
    """Replace the suites by a stand-in."""
    stand_in = Bench()
    monkeypatch.setattr(suites, "suite", stand_in)
    monkeypatch.setattr(lab, "suite", stand_in)
    monkeypatch.delenv("SPACE_ID", raising=False)
    return stand_in
