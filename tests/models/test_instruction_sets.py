"""Loading, exactness and verdicts with the instruction sets of other processors, each in processes of their own.

A new kind of processor rounds in its own way, and has other fast products.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]
SETS = {"AVX2": ("avx2", "AVX2"), "DEFAULT": ("default", "SSE41")}  # name in torch -> ATEN_CPU_CAPABILITY, oneDNN
RELEASE = pytest.mark.release
FILES = [
    "models/test_kernels.py models/test_load.py engine/test_verdict.py",
    "models/test_real_models.py",
    "engine/test_lossless.py",
    pytest.param("models/test_causal.py models/test_cpu_plan.py models/test_target.py", marks=RELEASE),
]


@pytest.mark.parametrize("files", FILES)
@pytest.mark.parametrize("name", ["AVX2", pytest.param("DEFAULT", marks=RELEASE)])
def test_models_load_and_write_their_text_with_another_instruction_set(name, files):
    if torch.backends.cpu.get_cpu_capability() in (name, "DEFAULT"):
        pytest.skip("this machine has no other instruction set" if name == "DEFAULT" else "all tests run with it here")
    aten, onednn = SETS[name]
    variables = {"ATEN_CPU_CAPABILITY": aten, "ONEDNN_MAX_CPU_ISA": onednn}
    paths = [str(TESTS / file) for file in files.split()]
    command = [sys.executable, "-m", "pytest", *paths, "-q", "--numprocesses=0", "-p", "no:cacheprovider"]
    # llama.cpp is built for one instruction set, and a replay runs the same operations
    command += ["-k", "not gguf and not smaller and not recorded"]
    run = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, cwd=TESTS.parent)
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout
