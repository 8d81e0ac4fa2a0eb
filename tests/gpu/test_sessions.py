"""Whole comparisons on the simulated GPU: the graphs that races capture and free."""

import gc

import pytest

from specdemo.engine.messages import Finished, StepRow
from specdemo.engine.session import Session
from specdemo.presets.files import load_presets
from tests.gpu.device import pretended

TOKENS = 12


@pytest.fixture
def world():
    with pretended() as made:
        yield made


@pytest.mark.parametrize(
    ("name", "repeats"), [("embedded-draft", 2), pytest.param("embedded-eagle-3", 1, marks=pytest.mark.release)]
)
def test_a_race_records_nothing_and_leaves_nothing(world, name, repeats):
    """A capture takes longer than a run, also than a repeat, and models must not wait for the garbage collector."""
    gc.collect()
    gc.disable()
    before, changes = None, {"device": "cuda", "max_new_tokens": TOKENS, "repeats": repeats}
    try:
        session = Session()
        for message in session.stream(load_presets()[name].with_changes(**changes)):
            if before is None and (isinstance(message, StepRow) or getattr(message, "text", "").startswith("run 1 of")):
                before = len(world.recorded), world.made.copy()
        assert isinstance(message, Finished)
        del session
        trace = message.trace
        assert before == (len(world.recorded), world.made) and world.recorded
        assert world.alive == 0
        assert world.allocated < 10_000  # the session took its models along
    finally:
        gc.enable()
    assert [len(lane.token_ids) for lane in trace.lanes] == [TOKENS, TOKENS]
    assert [row["verdict"] for row in trace.comparison] == ["identical"]
    assert trace.environment["kernels"] == "fused, graphs"
