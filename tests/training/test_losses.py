"""Losses of heads and D-PACE weights, against their definitions."""

import math

import pytest
import torch

from specdemo.training.losses import ETA, LOSSES, Objective, acceptance, dpace_weights


def example(places=5, positions=3, vocabulary=7, seed=0):
    """Return logits and target probabilities [P, D, V], and a mask that excludes one place."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(places, positions, vocabulary, generator=generator)
    targets = torch.randn(places, positions, vocabulary, generator=generator).mul(2).softmax(-1)
    valid = torch.ones(places, positions, dtype=torch.bool)
    valid[-1, -1] = False
    return logits, targets, valid


def one_hot(targets):
    return torch.nn.functional.one_hot(targets, 7).float()


def test_total_variation_is_the_rejection_rate_of_sampled_drafts():
    logits, p, valid = example()
    q = logits.softmax(-1)
    torch.testing.assert_close(LOSSES["tv"](logits, p, valid), 0.5 * (p - q).abs().sum(-1))
    drawn = torch.multinomial(q[0, 0], 20_000, replacement=True, generator=torch.Generator().manual_seed(1))
    accepted = (p[0, 0] / q[0, 0]).clamp_max(1.0)[drawn]
    assert float(accepted.mean()) == pytest.approx(float(acceptance(logits, p)[0, 0]), abs=0.01)


def test_lk_alpha_has_the_gradient_of_total_variation_divided_by_the_acceptance_rate():
    logits, p, valid = example()
    logits.requires_grad_(True)
    alpha = torch.minimum(logits.softmax(-1), p).sum(-1)
    value = LOSSES["lk-alpha"](logits, p, valid)
    torch.testing.assert_close(value, -alpha.log())
    gradient = torch.autograd.grad(value.sum(), logits)[0]
    variation = torch.autograd.grad(LOSSES["tv"](logits, p, valid).sum(), logits)[0]
    torch.testing.assert_close(gradient, variation / alpha.detach()[..., None])


def test_lk_lambda_blends_kl_and_total_variation_by_the_mean_acceptance_rate_of_each_position():
    logits, p, valid = example()
    logits.requires_grad_(True)
    q = logits.softmax(-1)
    kl, tv = (p * (p / q).log()).sum(-1), 0.5 * (p - q).abs().sum(-1)
    means = [1.0 - float(tv[valid[:, i], i].detach().mean()) for i in range(3)]
    share = torch.tensor([math.exp(-ETA * mean) for mean in means])
    expected = share * kl + (1.0 - share) * tv
    value = LOSSES["lk-lambda"](logits, p, valid)
    torch.testing.assert_close(value, expected)
    gradients = [torch.autograd.grad(loss.sum(), logits, retain_graph=True)[0] for loss in (value, expected)]
    torch.testing.assert_close(*gradients)  # the share is a constant


def test_cross_entropy_has_the_gradient_of_the_forward_kl():
    logits, p, valid = example()
    logits.requires_grad_(True)
    kl = (p * (p.log() - logits.log_softmax(-1))).sum(-1)
    losses = LOSSES["cross-entropy"](logits, p, valid)
    gradients = [torch.autograd.grad(loss.sum(), logits, retain_graph=True)[0] for loss in (losses, kl)]
    torch.testing.assert_close(*gradients)
    nearest = torch.nn.functional.cross_entropy(logits.flatten(0, 1), p.argmax(-1).flatten(), reduction="none")
    torch.testing.assert_close(LOSSES["argmax"](logits, p, valid), nearest.view_as(valid))


@pytest.mark.parametrize("loss", LOSSES)
def test_tokens_as_targets_are_one_hot_distributions(loss):
    logits, p, valid = example()
    tokens = p.argmax(-1)
    torch.testing.assert_close(LOSSES[loss](logits, tokens, valid), LOSSES[loss](logits, one_hot(tokens), valid))


@pytest.mark.parametrize("loss", ["tv", "lk-alpha", "lk-lambda"])
def test_probability_outside_the_draft_vocabulary_is_never_accepted(loss):
    logits, p, valid = example()
    ids = torch.tensor([0, 2, 3, 6])
    inside, draft_logits = p[..., ids], logits[..., ids]
    q = draft_logits.softmax(-1)
    alpha = torch.minimum(q, inside).sum(-1)
    assert bool((alpha <= inside.sum(-1) + 1e-6).all())
    kept = inside / inside.sum(-1, keepdim=True)
    share = torch.exp(-ETA * torch.stack([alpha[valid[:, i], i].mean() for i in range(3)]))
    blend = share * (kept * (kept / q).log()).sum(-1) + (1.0 - share) * (1.0 - alpha)
    expected = {"tv": 1.0 - alpha, "lk-alpha": -alpha.log(), "lk-lambda": blend}[loss]
    torch.testing.assert_close(LOSSES[loss](draft_logits, inside, valid), expected)


def test_losses_are_zero_for_the_targets_own_distribution_and_finite_without_overlap():
    _, p, valid = example()
    for loss in ("tv", "lk-alpha", "lk-lambda"):
        torch.testing.assert_close(LOSSES[loss](p.log(), p, valid), torch.zeros(5, 3), atol=1e-5, rtol=0.0)
    far = torch.full((5, 3, 7), -200.0)
    far[..., 0] = 0.0
    p = one_hot(torch.ones(5, 3, dtype=torch.int64))
    for name, loss in LOSSES.items():
        assert bool(loss(far, p, valid).isfinite().all()), name


def test_dpace_weights_are_the_derivative_of_the_expected_accepted_length():
    confidence = torch.rand(4, 5, generator=torch.Generator().manual_seed(0))
    valid = torch.ones(4, 5, dtype=torch.bool)
    log_smoothed = (0.5 * confidence + 0.5).log().requires_grad_(True)
    expected_length = log_smoothed.cumsum(-1).exp().sum()
    derivative = torch.autograd.grad(expected_length, log_smoothed)[0]
    torch.testing.assert_close(dpace_weights(confidence, valid), derivative)
    assert dpace_weights(torch.ones(1, 3), valid[:1, :3]).tolist() == [[3.0, 2.0, 1.0]]

    weights = dpace_weights(confidence[:1, :4], torch.tensor([[True, True, False, True]]))  # an invalid position
    shorter = dpace_weights(confidence[:1, [0, 1, 3]], torch.ones(1, 3, dtype=torch.bool))
    assert weights[0, 2] == 0.0
    torch.testing.assert_close(weights[:, [0, 1, 3]], shorter)


def test_steps_with_fixed_weights_are_summed():
    logits, p, _ = example(places=4, positions=3)
    objective = Objective("tv")
    steps = [objective.compare(logits[None, :, i], p[None, :, i]) for i in range(3)]
    loss, metrics = objective.steps_loss(steps, (1.0, 0.5, 0.25))
    variation = (1.0 - acceptance(logits, p)).mean(0)
    torch.testing.assert_close(loss, variation[0] + 0.5 * variation[1] + 0.25 * variation[2])
    same = (logits.argmax(-1) == p.argmax(-1)).float().mean(0)
    assert metrics == pytest.approx({f"agree_{i}": float(share) for i, share in enumerate(same, start=1)})


def test_steps_with_dpace_weights_are_averaged_over_complete_drafts():
    logits, p, _ = example(places=4, positions=2)
    objective = Objective("cross-entropy", "dpace")
    steps = [
        objective.compare(logits[None, :, 0], p[None, :, 0]),
        objective.compare(logits[None, :3, 1], p[None, :3, 1]),  # the last place has no second position
    ]
    loss, _ = objective.steps_loss(steps, (1.0, 1.0))
    first, second = 0.5 * acceptance(logits[:3], p[:3]).T + 0.5
    weights = torch.stack([first + first * second, first * second], -1)
    losses = -(p[:3] * logits[:3].log_softmax(-1)).sum(-1)
    torch.testing.assert_close(loss, (weights * losses).sum() / weights.sum())


def test_unknown_names_are_rejected_with_a_suggestion():
    with pytest.raises(ValueError, match="unknown loss 'lk-alfa'; did you mean 'lk-alpha'"):
        Objective("lk-alfa")
    with pytest.raises(ValueError, match="unknown weights 'decay'; choose one of fixed, dpace"):
        Objective(weights="decay")
