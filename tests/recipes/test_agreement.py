import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from recipes.agreement import agreement, next_probs
from recipes.llama import Shape, build


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return build(Shape(1, 32, 48, 2), vocab_size=64).eval()


@pytest.fixture(scope="module")
def text() -> Tensor:
    return torch.randint(0, 64, (12, 32), generator=torch.Generator().manual_seed(0))


def test_a_model_agrees_with_itself_and_less_with_another(model: LlamaForCausalLM, text: Tensor) -> None:
    p = next_probs(model, text)
    assert agreement(model, p, text) == {"greedy_agreement": 1.0, "overlap": pytest.approx(1.0, abs=1e-4)}
    other = build(Shape(2, 16, 24, 1), vocab_size=64).eval()
    assert agreement(other, p, text)["greedy_agreement"] < 1.0


def test_overlap_is_one_minus_total_variation(model: LlamaForCausalLM, text: Tensor) -> None:
    other = build(Shape(2, 16, 24, 1), vocab_size=64).eval()
    p, q = next_probs(model, text), next_probs(other, text)
    assert agreement(other, p, text)["overlap"] == pytest.approx(
        1.0 - float((p - q).abs().sum(-1).mean()) / 2, abs=1e-3
    )
