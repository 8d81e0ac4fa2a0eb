"""Whole comparisons on the simulated GPU: the graphs that races capture and free;
models that ZeroGPU places on the GPU that `spaces` emulates before a call attaches a real one."""

import gc
import os
import subprocess
import sys
from unittest.mock import patch

import pytest
import torch

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
    ("name", "repeats"), [("embedded-draft", 3), pytest.param("embedded-eagle-3", 1, marks=pytest.mark.release)]
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


def test_graph_memory_is_counted_before_loading(world):
    session = Session()
    preset = load_presets()["embedded-draft"].with_changes(device="cuda:0")
    little = (300 << 20, 300 << 20)  # enough for the models alone
    with (
        patch.object(torch.cuda, "mem_get_info", lambda device=None: little),
        pytest.raises(ValueError, match="choose quantization 4bit or a smaller model"),
    ):
        session.place_models(preset)


PLACED = """
import os
import torch

torch.version.cuda, torch._C._cuda_init = "13.0", lambda: None  # a torch without CUDA knows no emulated device
torch.cuda._is_in_bad_fork = bool
import spaces
from spaces.zero.torch import patching
from specdemo.engine.session import Session
from specdemo.presets.files import load_presets
from tests.gpu.device import map_leaves

def tree_map_only(kind, function, tree):
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, kind) else leaf, tree)

patching.tree_map_only = tree_map_only  # that of torch takes a third of the time
session = Session()
for name, preset in load_presets().items():
    if preset.embedded:
        session.place_models(preset)
        print(name, session.target().device, session.target().facts.kernels)
"""


@pytest.mark.release
def test_every_embedded_preset_is_placed_ahead_of_time():
    pytest.importorskip("spaces")
    zero_gpu = {"SPACES_ZERO_GPU": "true", "SPACES_ZERO_DEVICE_API_URL": "http://127.0.0.1:9", "SPACE_ID": "some/space"}
    command = [sys.executable, "-W", "ignore", "-c", PLACED]
    done = subprocess.run(command, env={**os.environ, **zero_gpu}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    placed = done.stdout.splitlines()
    assert len(placed) > 15
    assert all(" cuda:0 fused" in line for line in placed)
