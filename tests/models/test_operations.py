"""Operations of a decoder layer: Triton's kernels against plain operations.

Without a GPU, Triton's interpreter runs the kernels, and its compiler translates them for GPUs that are not there.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_map

from specdemo.kv.graphs import TOLERANCE
from specdemo.models import operations
from specdemo.models.operations import KERNELS, PLAIN, works
from tests.gpu.device import pretended

ROOT = Path(__file__).parents[2]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GPUS = [("cuda", 75, 32), ("cuda", 90, 32), ("hip", "gfx942", 64)]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
KERNEL_FUNCTIONS = ("_add_rms_norm", "_silu_mul", "_norm_rope_write", "_tree_attention", "_combine")
needs_triton = pytest.mark.skipif(not find_spec("triton"), reason="Triton is not installed")


def run_here(function, interpret):
    """Run a function of this file in another process: Triton reads TRITON_INTERPRET when it is first imported."""
    environment = {**os.environ, "TRITON_INTERPRET": str(int(interpret)), "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, "-c", f"from tests.models.test_operations import *; print(json.dumps({function}()))"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def arguments_of(
    name, dtype, *, rows=2, slots=3, heads=4, kv_heads=2, size=16, normed=True, shared_angles=False, capacity=40
):
    generator = torch.Generator().manual_seed(rows * size)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    if name == "add_rms_norm":
        return [random(rows, slots, 3 * size), random(rows, slots, 3 * size), random(3 * size), 1e-6]
    if name == "silu_mul":
        return [3 * random(rows, slots, 1000)]
    angles = random(1 if shared_angles else rows, slots, 2, 1, size).unbind(2)
    slabs = [random(rows, 40, kv_heads, size).transpose(1, 2) for _ in range(2)]
    if name == "tree_attention":
        ends = torch.tensor([5, 17, 30])[:rows].to(DEVICE)
        ancestors = torch.ones(1 if shared_angles else rows, slots, slots, dtype=torch.bool).tril_()
        ancestors &= torch.rand(ancestors.shape, generator=generator) > 0.5
        query = random(rows, slots, heads, size).transpose(1, 2)
        slabs = [random(rows, capacity, kv_heads, size).transpose(1, 2) for _ in range(2)]
        return [query, *slabs, ends, ancestors.to(DEVICE), size**-0.5]
    columns = torch.arange(slots)[None] + torch.tensor([5, 17, 30])[:rows, None]
    weights = [random(size), random(size)] if normed else [None, None]
    qkv = random(rows, slots, heads + 2 * kv_heads, size)
    return [qkv, *weights, 1e-6, *angles, *slabs, columns[:, None, :, None].to(DEVICE)]


CASES = [(name, {}) for name in KERNELS]
CASES += [("add_rms_norm", {"rows": 1, "slots": 1, "size": 700}), ("silu_mul", {"rows": 1, "slots": 7})]
CASES += [("norm_rope_write", change) for change in ({"normed": False}, {"shared_angles": True}, {"size": 24})]
CASES += [
    ("tree_attention", change) for change in ({"shared_angles": True}, {"size": 24, "slots": 23, "capacity": 600})
]
CASES += [("tree_attention", {"rows": 3, "heads": 8, "kv_heads": 1, "slots": 9, "capacity": 1100})]
CASES += [("norm_rope_write", {"rows": 3, "heads": 2, "kv_heads": 1, "slots": 1})]


def differences():
    """Return the largest relative difference between kernel and plain operations, by case and dtype."""
    from specdemo.models import triton_kernels

    found = {}
    for number, (name, sizes) in enumerate(CASES):
        for dtype in DTYPES:
            arguments = arguments_of(name, DTYPES[dtype], **sizes)
            copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in arguments]
            results = getattr(triton_kernels, name)(*arguments), PLAIN[name](*copies)
            pairs = zip(*map(operations._tensors, results, (arguments, copies)), strict=True)
            found[f"{number} {dtype}"] = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    return found


@pytest.fixture(scope="module")
def measured():
    return run_here("differences", interpret=DEVICE.type == "cpu")


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_kernel_returns_and_writes_what_plain_operations_do(number, dtype, measured):
    if dtype == "bf16" and CASES[number][0] == "tree_attention" and DEVICE.type == "cpu":
        pytest.skip("Triton's interpreter multiplies no matrices in bfloat16")
    # the interpreter truncates numbers to bfloat16
    limit = {"fp32": 1e-6, "fp16": 1e-3, "bf16": TOLERANCE[torch.bfloat16]}[dtype]
    assert measured[f"{number} {dtype}"] <= limit, CASES[number]


def widths_that_differ():
    """Return lengths and slots at which attention has other bits than for the slot alone, or in a larger cache."""
    from specdemo.models.triton_kernels import tree_attention

    def attend(slots, length, capacity):
        ends, chain = torch.tensor([length], device=DEVICE), torch.ones(1, slots.shape[1], slots.shape[1]).bool().tril()
        columns = [slab[:, :capacity].transpose(1, 2) for slab in slabs]
        return tree_attention(slots.transpose(1, 2), *columns, ends, chain.to(DEVICE), 0.25)

    generator = torch.Generator().manual_seed(2)
    query, *slabs = (torch.randn(1, n, 4, 16, generator=generator).to(DEVICE, torch.float16) for n in (9, 900, 900))
    found = []
    for length in (60, 64, 127, 200):
        together = attend(query, length, 640)
        for slot, alone in enumerate(query.split(1, 1)):
            single, larger = (attend(alone, length + slot, capacity) for capacity in (640, 900))
            if not torch.equal(single[:, 0], together[:, slot]) or not torch.equal(single, larger):
                found.append((length, slot))
    return found


@needs_triton
def test_a_slot_has_the_same_bits_at_every_width_and_capacity():
    assert run_here("widths_that_differ", interpret=DEVICE.type == "cpu") == []


def compiled_kernels():
    """Return the sizes of the machine code of all kernels."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from specdemo.models import triton_kernels

    sizes = {"BLOCK": 128, "HEADS": 32, "KV_HEADS": 8, "SIZE": 96, "NORMED": True}
    sizes |= {"ROWS": 64, "COLUMNS": 32, "SPLITS": 35, "CHUNK": 16}
    numbers = "size slots heads length provisional queries part ancestor_row angle_row angle_slot".split()
    numbers += "query_row query_head query_slot slab_row slab_head slab_column".split()
    others = {**dict.fromkeys(numbers, "i32"), "eps": "fp32", "scale": "fp32", "write_to": "*i64", "ends": "*i64"}
    others |= {**dict.fromkeys(["partial", "largest"], "*fp32"), "ancestors": "*i1"}
    found = {}
    for name in KERNEL_FUNCTIONS:
        kernel = getattr(triton_kernels, name)
        constants = {n: sizes[n] for n in kernel.arg_names if n in sizes}
        for dtype in DTYPES:
            types = dict.fromkeys(kernel.arg_names, f"*{dtype}") | dict.fromkeys(constants, "constexpr")
            types |= {n: kind for n, kind in others.items() if n in types}
            for gpu in GPUS:
                code = compile(ASTSource(kernel, types, constants), target=GPUTarget(*gpu)).asm
                found[f"{name} {dtype} {gpu}"] = len(code["cubin" if gpu[0] == "cuda" else "hsaco"])
    return found


@needs_triton
def test_kernels_compile_for_gpus(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    sizes = run_here("compiled_kernels", interpret=False)
    assert len(sizes) == len(KERNEL_FUNCTIONS) * len(DTYPES) * len(GPUS) and min(sizes.values()) > 0


@pytest.mark.parametrize("setting", [None, "silu_mul,add_rms_norm", "0"])
def test_a_kernel_is_compared_before_it_is_used(setting, monkeypatch):
    monkeypatch.setattr(operations, "find_spec", lambda name: name)
    if setting is not None:
        monkeypatch.setenv(operations.TRITON_VARIABLE, setting)
    with pretended():
        for name, plain in PLAIN.items():
            works.cache_clear()
            assert works(name, torch.device("cuda:0"), torch.float16) == (setting is None or name in setting)
            works.cache_clear()
            with monkeypatch.context() as other:  # another result than plain operations
                other.setitem(PLAIN, name, lambda *a, plain=plain: tree_map(lambda x: x + 1, plain(*a)))
                assert not works(name, torch.device("cuda:0"), torch.float16)
    works.cache_clear()


def test_kernels_are_used_on_a_gpu_only(monkeypatch):
    assert not works("silu_mul", torch.device("cpu"), torch.float32)
    works.cache_clear()
    monkeypatch.setattr(operations, "find_spec", lambda name: None)
    assert not works("silu_mul", torch.device("cuda", 0), torch.float32)
    works.cache_clear()
