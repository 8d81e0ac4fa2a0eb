"""The measured costs of passes, and the note about them."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from specdemo.core.protocol import TargetFacts
from specdemo.models import pass_cost
from specdemo.models.pass_cost import checking_note, costly_in_half, measure_passes, pass_facts
from specdemo.models.target import HFTarget
from specdemo.models.toy import ToyTarget


class Quantised(ToyTarget):
    """A target with a scripted curve of pass costs."""

    facts, pass_ms = TargetFacts("Q4_1"), {}

    def __init__(self, precision, *ms):
        super().__init__()
        self.facts, self.pass_ms = TargetFacts(precision), dict(enumerate(ms, start=1))


@pytest.mark.parametrize(
    "precision, ms, words",
    [
        ("Q4_1", (10.0, 13.0, 16.0, 19.0), ("costs 1.9 passes in Q4_1;", "compare files with `doctor FILE`")),
        ("Q4_K_M", (10.0, 13.0, 16.0, 19.0), ("costs 1.9 passes in Q4_K_M",)),
        ("Q8_0", (10.0, 10.5, 11.0, 12.0), ("costs 1.2 passes in Q8_0",)),
        ("Q4_1", (), ()),
    ],
)
def test_note_about_the_cost_of_four_tokens(precision, ms, words):
    note = checking_note(Quantised(precision, *ms))
    assert all(word in note for word in words) and bool(note) is bool(words)
    assert ("doctor FILE" in note) is (len(words) > 1)


@pytest.mark.parametrize(
    "dtype, threads, four_ms, noted",
    [
        (torch.bfloat16, 2, 15.3, True),
        (torch.float16, 1, 15.3, True),
        (torch.bfloat16, 2, 11.0, False),
        (torch.float32, 2, 15.3, False),
        (torch.bfloat16, 0, 15.3, False),  # on another device
    ],
)
def test_costly_passes_in_half_precision_on_a_cpu_are_noted(monkeypatch, dtype, threads, four_ms, noted):
    target = Quantised("bfloat16", 10.0, 10.5, 10.8, four_ms)
    monkeypatch.setattr(Quantised, "threads", threads)
    target.model, target.dtype = object(), dtype
    assert costly_in_half(target) is noted
    note = checking_note(target)
    assert note.startswith(f"checking 4 tokens costs {four_ms / 10.0:.1f} passes in bfloat16")
    assert note.endswith("compare with dtype float32") is noted
    target.pass_ms = {}
    assert checking_note(target) == "" and not costly_in_half(target)


def test_passes_are_measured_once_and_recorded():
    target = Quantised("float32")
    curve = measure_passes(target)
    assert (
        min(curve) == 1
        and {4, 8} <= set(curve)
        and target.pass_ms == curve
        and measure_passes(target) is target.pass_ms
    )
    assert pass_facts(target)["pass_ms"] == {str(slots): ms for slots, ms in curve.items()}
    assert pass_facts(target)["exactness"] == "passes of different widths round differently"


@pytest.mark.parametrize("positions, widths", [(1, []), (2, [1]), (3, [1, 2])])
def test_passes_of_models_with_few_positions_are_measured_as_far_as_they_go(monkeypatch, positions, widths):
    monkeypatch.setattr(pass_cost, "CURVE_WIDTHS", (1, 2, 3))
    sizes = {"n_positions": positions, "n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 11}
    target = HFTarget(GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)).eval())
    assert list(measure_passes(target)) == widths
