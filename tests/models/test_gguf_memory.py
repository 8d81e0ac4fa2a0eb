"""Memory and settings of GGUF models."""

import pytest

from specdemo.models import llamacpp
from specdemo.models.llamacpp import LlamaCppSettings, library
from specdemo.models.memory import Footprint, Needs, gguf_footprint
from tests.models.test_gguf_files import gguf

GB = 10**9
NEEDS = Needs("big with small", Footprint(4 * GB, 100_000), [Footprint(GB // 2, 20_000)], 4000, 2)


def test_context_that_the_drafter_displaces():
    assert NEEDS.describe() == (
        "4.5 GB of weights and 0.9 GB of KV cache for 4,000 tokens; "
        "the drafter takes the memory of 5,800 tokens of context"
    )


def test_advice_is_a_context_if_the_weights_fit():
    NEEDS.check_llamacpp(6 * GB)
    with pytest.raises(ValueError, match="choose at most 2,066 tokens of prompt and output, or a smaller quantisation"):
        NEEDS.check_llamacpp(int(5.45 * GB))
    with pytest.raises(ValueError, match="needs 5.0 GB for weights and 1.0 GB .* free; choose a smaller quantisation"):
        NEEDS.check_llamacpp(3 * GB)


def test_buffers_of_every_lane_are_part_of_the_memory(tmp_path):
    (tmp_path / "model.gguf").write_bytes(gguf(tokens=[f"t{number}" for number in range(1000)]))
    footprint = gguf_footprint(str(tmp_path / "model.gguf"), LlamaCppSettings())
    assert footprint.per_lane == 256 * 1000 * 4
    needs = Needs("big", Footprint(GB, 100_000, GB // 10), [Footprint(GB, 0, GB // 5)], 1000, 3)
    assert needs.buffers == GB // 2
    needs.check_llamacpp(int(3.1 * GB))
    with pytest.raises(ValueError, match="big needs 2.2 GB for weights and 0.8 GB for the KV cache and buffers"):
        needs.check_llamacpp(int(2.9 * GB))


def test_library_that_cannot_be_loaded_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "broken_llama.py").write_text("raise RuntimeError('Failed to load shared library: no\\nsuch file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(llamacpp, "PACKAGE", "broken_llama")
    message = r"llama.cpp cannot be loaded \(Failed to load shared library: no\); install it again with: pip install"
    with pytest.raises(ValueError, match=message):
        library.__wrapped__()
