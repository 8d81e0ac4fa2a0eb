import ctypes
import gc
import os
import shutil
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: two threads are very slow next to other programs
os.environ["OMP_WAIT_POLICY"] = "passive"  # where a test needs two, those that wait leave the core to others
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")

import pytest
from hypothesis import settings

# Starts of the ids of tests that need a browser, other processes or long computations; all others are marked `fast`
SLOW = tuple(
    """
    models/test_real_models models/test_instruction_sets benchmarks e2e hardening examples test_changes test_wheel
    test_deploy methods/test_plug_ins
    models/test_llamacpp recipes/test_train engine/test_lossless engine/test_chat_memory methods/test_heads
    methods/test_recipes methods/test_exact_sampling methods/test_vocabularies methods/test_layer_skip gpu
    bench/test_suite.py::test_steps_accept bench/test_suite.py::test_passes_by bench/test_suite.py::test_the_basics
    bench/test_result.py::test_a_result_is_rendered recipes/test_corpus servers/test_engines servers/test_lane
    servers/test_process servers/test_groups ui/test_page ui/test_space test_cli.py::test_the_process_itself
    test_cli.py::test_lists_and_help test_cli.py::test_a_shell
    """.split()
)

settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run what a release needs too; 100 times the examples")


def pytest_configure(config):
    examples = 5_000 if config.getoption("--all") else 50
    settings.register_profile("hardening", settings.get_profile("fixed"), max_examples=examples)
    if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2":
        use_avx2_in_fbgemm()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a background job of a shell, whose processes inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.platform == "linux" and not hasattr(config, "workerinput"):
        from tests.fork_server import FOLDER

        folder = tempfile.mkdtemp(prefix="specdemo-tests-", suffix=f"-{os.getpid()}")
        os.environ[FOLDER] = folder  # workers inherit it
        config.add_cleanup(lambda: shutil.rmtree(folder))


def use_avx2_in_fbgemm():
    """Choose the kernels for AVX2 of the library behind products in float16, which reads no variable."""
    import torch

    library = ctypes.CDLL(str(next(Path(torch.__file__).parent.glob("lib/*torch_cpu.*"))))
    with suppress(AttributeError):  # not a part of the interface
        library["_ZN6fbgemm14fbgemmForceIsaENS_10inst_set_tE"](1)


def pytest_ignore_collect(collection_path, config):
    """Do not import what `-m fast` would not select, such as the browser's driver."""
    path = os.path.relpath(collection_path, Path(__file__).parent)
    return True if config.option.markexpr == "fast" and path.startswith(SLOW) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect no garbage while the libraries are imported, which takes a third longer with it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before the selection by -m
def pytest_collection_modifyitems(config, items):
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        if not name.startswith(SLOW):
            item.add_marker("fast")
    if not config.getoption("--all"):
        release = [item for item in items if item.get_closest_marker("release")]
        config.hook.pytest_deselected(items=release)
        items[:] = [item for item in items if not item.get_closest_marker("release")]
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish(session):
    if "torch" in sys.modules and not session.config.getoption("--all"):
        from tests.processes import measure_briefly

        measure_briefly()
    freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    yield
    if nextitem and nextitem.path != item.path:
        freeze()


def freeze():
    """Exclude the current objects from collections of garbage.

    Every collection would visit half a million objects of the imported libraries, and those that finished tests left in
    caches.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_llama():
    """Return a function that makes a random one-layer Llama of a vocabulary size, always with the same weights."""
    from specdemo.testing import tiny_llama

    return tiny_llama


def real_model(name):
    """Return the path of a real model, which `python -m tests.real_models` makes; skip the test without it."""
    from tests.real_models import cache, command

    path = cache() / name
    if name.endswith(".gguf"):
        pytest.importorskip("llama_cpp", reason="llama.cpp is not installed; tests/run installs it")
    if not path.exists():
        pytest.skip(f"no real model {path}; {command(name)} makes it, with a network")
    return str(path)


@pytest.fixture(scope="session")
def smollm2_gguf():
    """Return the path of SmolLM2 135M Instruct as GGUF in Q4_1."""
    return real_model("smollm2-135m-instruct-q4_1.gguf")


@pytest.fixture(scope="session")
def smollm2_folder():
    """Return the path of the same weights as a transformers folder in float32."""
    return real_model("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def gemma_gguf():
    """Return the path of Gemma 3 270M as GGUF in Q4_K_M."""
    return real_model("gemma-3-270m-q4_k_m.gguf")


@pytest.fixture(scope="session")
def small_qwen_gguf():
    """Return the path of Qwen2.5-Coder 0.5B Instruct as GGUF in Q4_K_M."""
    return real_model("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf")


@pytest.fixture(scope="session")
def qwen_gguf():
    """Return the path of Qwen2.5-Coder 1.5B Instruct as GGUF in Q4_K_M, which is made on request."""
    return real_model("qwen2.5-coder-1.5b-instruct-q4_k_m.gguf")


@pytest.fixture(autouse=True)
def page_of_this_machine(monkeypatch):
    """Let a page that a test starts for others say so in that test alone (`deployment.offers_files`)."""
    monkeypatch.setenv("SPECDEMO_FILES", "1")
