"""Loading, exactness and verdicts with the instruction sets of other processors, each in a process of its own.

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
FILES = "models/test_real_models models/test_kernels models/test_load engine/test_verdict engine/test_lossless".split()
MORE = "models/test_causal models/test_cpu_plan models/test_target".split()
# llama.cpp has one instruction set; a replay has no other operations, and transformers computes the tiny models' layers
LEFT_OUT = "not gguf and not smaller and not recorded and not every_other_method and not sampled_text"
# other sets than the newest emulate float16
EVERY_METHOD = "test_every_method_writes_the_text_of_plain_decoding_in_every_dtype"
EMULATED = f"tests/models/test_real_models.py::{EVERY_METHOD}[float16]"


@pytest.mark.parametrize("name", ["AVX2", pytest.param("DEFAULT", marks=pytest.mark.release)])
def test_models_load_and_write_their_text_with_another_instruction_set(name, pytestconfig):
    if torch.backends.cpu.get_cpu_capability() in (name, "DEFAULT"):
        pytest.skip("this machine has no other instruction set" if name == "DEFAULT" else "all tests run with it here")
    aten, onednn = SETS[name]
    variables = {"ATEN_CPU_CAPABILITY": aten, "ONEDNN_MAX_CPU_ISA": onednn}
    whole = pytestconfig.getoption("--all")
    paths = [str(TESTS / f"{file}.py") for file in [*FILES, *(MORE if whole else ())]]
    command = [sys.executable, "-m", "pytest", *paths, "-q", "--numprocesses=0", "-p", "no:cacheprovider"]
    command += ["-k", LEFT_OUT, *(() if whole else ("--deselect", EMULATED))]
    run = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, cwd=TESTS.parent)
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout
