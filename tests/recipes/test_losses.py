import pytest
import torch
from torch import Tensor

from recipes.losses import CHUNK, TINY, cross_entropy, head_forward_kl, toward_argmax


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


def test_all_entries_give_dense_forward_kl() -> None:
    hidden, weight, p, indices, probs = case(20, entries=40)
    logits = hidden @ weight.T
    dense = -(p * torch.log_softmax(logits, -1)).sum(-1).mean()
    torch.testing.assert_close(sparse_forward_kl(logits, indices, probs), dense)


def test_remaining_probability_is_matched_as_one_entry() -> None:
    hidden, weight, p, indices, probs = case(20, entries=5)
    logits = hidden @ weight.T
    q = torch.softmax(logits, -1)
    lump_q = 1.0 - q.gather(1, indices.long()).sum(1)
    lump_p = 1.0 - probs.sum(1)
    by_hand = -(probs * q.gather(1, indices.long()).log()).sum(1) - lump_p * lump_q.log()
    torch.testing.assert_close(sparse_forward_kl(logits, indices, probs), by_hand.mean())
    assert sparse_forward_kl(logits, indices, probs) < -(p * q.log()).sum(-1).mean()


@pytest.mark.parametrize("n", [1, 7, CHUNK, CHUNK + 3])
@pytest.mark.parametrize("entries", [1, 6, 40])
def test_the_fused_loss_and_its_gradient_are_those_of_the_reference(n: int, entries: int) -> None:
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


def test_a_perfect_draft_has_no_gradient() -> None:
    logits = torch.randn(9, 12, requires_grad=True)
    p = torch.softmax(logits.detach(), -1).topk(4, -1)
    sparse_forward_kl(logits, p.indices, p.values).backward()
    assert logits.grad is not None and float(logits.grad.abs().max()) < 1e-6


def test_leaning_to_the_argmax_keeps_the_mass_and_the_order() -> None:
    *_, probs = case(10, entries=6)
    leaning = toward_argmax(probs, 0.25)
    torch.testing.assert_close(leaning[:, 0], 0.75 * probs[:, 0] + 0.25)
    torch.testing.assert_close(leaning[:, 1:], 0.75 * probs[:, 1:])
    assert torch.equal(toward_argmax(probs, 0.0), probs)
