"""Whole comparisons on the simulated GPU: the graphs that races capture and free;
models that ZeroGPU places on the GPU that `spaces` emulates before a call attaches a real one."""

import gc
import os
import subprocess
import sys
from unittest.mock import patch

import pytest
import torch

from specdemo.engine.messages import Finished, Note, StepRow
from specdemo.engine.session import Session
from specdemo.kv.graphs import graph_bytes
from specdemo.presets.files import load_presets
from tests.gpu.device import pretended

TOKENS = 12


@pytest.fixture
def world():
    with pretended() as made:
        yield made


def run(session, world, name):
    """Return the trace and the number of graphs captured after the first lane had started."""
    before, trace = None, None
    for message in session.stream(load_presets()[name].with_changes(device="cuda", max_new_tokens=TOKENS)):
        if isinstance(message, StepRow) and before is None:
            before = len(world.recorded)
        if isinstance(message, Finished):
            trace = message.trace
    return trace, len(world.recorded) - before


@pytest.mark.parametrize("name", ["embedded-draft", "embedded-ngram", "embedded-eagle-3", "embedded-adaptive"])
def test_a_race_records_nothing_and_leaves_nothing(world, name):
    gc.collect()
    gc.disable()
    try:
        trace, recorded = run(Session(), world, name)
        assert world.recorded
        assert recorded == 0
        assert world.alive == 0
        assert world.memory.allocated < 10_000  # the session took its models along
        assert [len(lane.token_ids) for lane in trace.lanes] == [TOKENS, TOKENS]
        assert [row["verdict"] for row in trace.comparison] == ["identical"]
        assert trace.environment["kernels"] == "fused, graphs"
    finally:
        gc.enable()


def test_repeats_use_the_recordings_of_the_shown_lanes(world):
    """A capture takes longer than a run, and in a timed repeat it would count towards the speed."""
    before, preset = None, load_presets()["embedded-draft"]
    for message in Session().stream(preset.with_changes(device="cuda", max_new_tokens=TOKENS, repeats=3)):
        if isinstance(message, Note) and message.text.startswith("run 1 of 3"):
            before, streams = len(world.recorded), world.made.copy()
        if isinstance(message, Finished):
            trace = message.trace
    assert before and len(world.recorded) == before
    assert world.made == streams
    assert world.alive == 0
    for lane in trace.lanes:
        runs = [*lane.repeats, lane.events]
        assert len(runs) == 3
        slowest = [max(sum(event.ms.values()) for event in events[1:]) for events in runs]
        assert slowest == pytest.approx([slowest[0]] * 3)  # time is counted in launches, which are equal in every run


def test_graph_memory_is_counted_before_loading(world):
    cuda = torch.device("cuda:0")
    assert graph_bytes(cuda, 4) == 4 * graph_bytes(cuda, 1) > 0
    assert graph_bytes(torch.device("cpu"), 4) == 0
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
        print(name, session.target().device, session.target().kernels)
"""


def test_every_embedded_preset_is_placed_ahead_of_time(tmp_path):
    pytest.importorskip("spaces")
    zero_gpu_env = {
        "SPACES_ZERO_GPU": "true",
        "SPACES_ZERO_DEVICE_API_URL": "http://127.0.0.1:9",
        "SPACE_ID": "some/space",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PLACED],
        env={**os.environ, **zero_gpu_env},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    placed = done.stdout.splitlines()
    assert len(placed) > 15
    assert all(" cuda:0 fused" in line for line in placed)
