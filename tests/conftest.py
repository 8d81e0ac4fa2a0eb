import os
import shutil
import sys
import tempfile

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: two threads are very slow next to other programs
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")

import pytest
from hypothesis import settings

settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")


def pytest_addoption(parser):
    parser.addoption("--soak", action="store_true", help="run the long tests too, and try 100 times as many examples")


def pytest_configure(config):
    if sys.platform == "linux" and not hasattr(config, "workerinput"):
        from tests.fork_server import FOLDER

        folder = tempfile.mkdtemp(prefix="specdemo-tests-", suffix=f"-{os.getpid()}")
        os.environ[FOLDER] = folder  # workers inherit it
        config.add_cleanup(lambda: shutil.rmtree(folder))


def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.get_closest_marker("soak") and not config.getoption("--soak"):
            item.add_marker(pytest.mark.skip(reason="takes minutes; run by --soak"))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def tiny_llama():
    """Return a function that makes a random one-layer Llama of a vocabulary size, always with the same weights."""
    from specdemo.testing import tiny_llama

    return tiny_llama
