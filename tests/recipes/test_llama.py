import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from recipes.llama import (
    TINY,
    agreement,
    average,
    build,
    cross_entropy,
    head_forward_kl,
    next_probs,
    to_depth,
    toward_argmax,
)


def shape(layers, hidden, intermediate, heads, context=512):
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings")
    return dict(zip(names, (layers, hidden, intermediate, heads, context), strict=True))


def sparse_forward_kl(logits, indices, probs):
    """Readable reference of `head_forward_kl`: logits [..., V] of q, indices [..., K], probs [..., K] of p."""
    log_q = torch.log_softmax(logits.float(), -1)
    top_log_q = log_q.gather(-1, indices.long())
    p = probs.float()
    p_rest = (1.0 - p.sum(-1)).clamp_min(0.0)
    q_rest = (1.0 - top_log_q.exp().sum(-1)).clamp_min(TINY)
    return -((p * top_log_q).sum(-1) + p_rest * q_rest.log()).mean()


def case(
    n: int, entries: int, v: int = 40, h: int = 16, sharpness: float = 1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(n)
    hidden, weight = torch.randn(n, h), torch.randn(v, h) * 0.3
    p = torch.softmax(sharpness * torch.randn(n, v), dim=-1)
    best = p.topk(entries, dim=-1)
    return hidden, weight, p, best.indices.to(torch.int16), best.values


def test_remaining_probability_is_matched_as_one_entry() -> None:
    hidden, weight, p, indices, probs = case(20, entries=5)
    logits = hidden @ weight.T
    q = torch.softmax(logits, -1)
    lump_q = 1.0 - q.gather(1, indices.long()).sum(1)
    lump_p = 1.0 - probs.sum(1)
    by_hand = -(probs * q.gather(1, indices.long()).log()).sum(1) - lump_p * lump_q.log()
    torch.testing.assert_close(sparse_forward_kl(logits, indices, probs), by_hand.mean())
    assert sparse_forward_kl(logits, indices, probs) < -(p * q.log()).sum(-1).mean()


@pytest.mark.parametrize("n", [1, 7, 259])
@pytest.mark.parametrize("entries", [1, 6, 40])
def test_the_loss_and_its_gradient_are_those_of_the_reference(n: int, entries: int) -> None:
    hidden, weight, _, indices, probs = case(n, entries)
    hidden, weight = hidden.bfloat16().float(), weight.bfloat16().float()
    found = []
    for fused in (False, True):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = head_forward_kl(h, w, indices, probs) if fused else sparse_forward_kl(h @ w.T, indices, probs)
        (2.0 * loss).backward()
        found.append((loss.detach(), h.grad, w.grad))
    for reference, fast in zip(*found, strict=True):
        assert reference is not None and fast is not None
        assert float((reference - fast).norm()) <= 0.02 * float(reference.norm())


def test_one_certain_entry_is_cross_entropy() -> None:
    hidden, weight, _, _, _ = case(30, entries=1)
    labels = torch.arange(30)
    fused = head_forward_kl(hidden, weight, labels[:, None], torch.ones(30, 1))
    torch.testing.assert_close(fused, cross_entropy(hidden @ weight.T, labels), atol=0.01, rtol=0.01)


def test_leaning_to_the_argmax_keeps_the_mass_and_the_order() -> None:
    *_, probs = case(10, entries=6)
    leaning = toward_argmax(probs, 0.25)
    torch.testing.assert_close(leaning[:, 0], 0.75 * probs[:, 0] + 0.25)
    torch.testing.assert_close(leaning[:, 1:], 0.75 * probs[:, 1:])
    assert torch.equal(toward_argmax(probs, 0.0), probs)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return build(shape(1, 32, 48, 2), vocab_size=64).eval()


@pytest.fixture(scope="module")
def text() -> Tensor:
    return torch.randint(0, 64, (12, 32), generator=torch.Generator().manual_seed(0))


def test_a_model_agrees_with_itself_and_less_with_another(model: LlamaForCausalLM, text: Tensor) -> None:
    p = next_probs(model, text)
    assert agreement(model, p, text) == {"greedy_agreement": 1.0, "overlap": pytest.approx(1.0, abs=1e-4)}
    other = build(shape(2, 16, 24, 1), vocab_size=64).eval()
    assert agreement(other, p, text)["greedy_agreement"] < 1.0


def test_overlap_is_one_minus_total_variation(model: LlamaForCausalLM, text: Tensor) -> None:
    other = build(shape(2, 16, 24, 1), vocab_size=64).eval()
    p, q = next_probs(model, text), next_probs(other, text)
    assert agreement(other, p, text)["overlap"] == pytest.approx(
        1.0 - float((p - q).abs().sum(-1).mean()) / 2, abs=1e-3
    )


@pytest.mark.parametrize("best, share", [(0.3, 0.3), (0.0, 0.0), (0.9, 0.5)])
def test_start_weights_are_averaged_if_that_helps(best: float, share: float) -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    start = {"weight": torch.zeros(1, 2, dtype=torch.bfloat16)}
    assert average(model, start, lambda: abs(1.0 - best - float(model.weight[0, 0]))) == share
    assert model.weight.tolist() == [[pytest.approx(1.0 - share)] * 2]


def test_deepened_model_equals_the_shallow_one() -> None:
    shallow = build(shape(2, 32, 48, 2), 64).eval()
    deep = build(shape(5, 32, 48, 2), 64).eval()
    deep.load_state_dict(to_depth(shallow.state_dict(), 5))
    tokens = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(deep(tokens).logits, shallow(tokens).logits, atol=1e-6)
    assert not torch.equal(deep.model.layers[1].mlp.up_proj.weight, torch.zeros(48, 32))


def test_shallow_model_starts_from_layers_of_the_deep_one() -> None:
    deep, shallow = build(shape(6, 32, 48, 2), 64), build(shape(2, 32, 48, 2), 64)
    shallow.load_state_dict(to_depth(deep.state_dict(), 2))
    for mine, its in ((0, 0), (1, 3)):
        of = deep.model.layers[its].state_dict()
        assert all(torch.equal(w, of[name]) for name, w in shallow.model.layers[mine].state_dict().items())
    assert torch.equal(shallow.model.embed_tokens.weight, deep.model.embed_tokens.weight)
