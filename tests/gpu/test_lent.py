"""ZeroGPU: models are placed on the GPU that `spaces` emulates before a call attaches a real one."""

import os
import subprocess
import sys

import pytest

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
