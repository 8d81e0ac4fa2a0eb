"""Losses of heads and D-PACE weights, against their definitions; training of a small linear head."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from specdemo.models.target import HFTarget
from specdemo.training.collect import Plan
from specdemo.training.heads import build_dataset, columns, save_head, to_progress, train_head
from specdemo.training.losses import ETA, LOSSES, Objective, acceptance, dpace_weights
from tests.models.tiny import VOCABULARY, build
from tests.training.test_fit import ticking


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


PLAN = Plan(text_rows=8, sampled_rows=4, rows_per_shard=4, context=32, sample_length=16, taps=(1, -1))


class Next:
    """A trainable drafter: it has taps, head, loss, measure and save."""

    taps = (-1,)

    def __init__(self, hidden, vocabulary):
        torch.manual_seed(1)
        self.head: nn.Module = nn.Linear(hidden, vocabulary)

    def loss(self, batch):
        logits = self.head(batch.hidden[-1])[:, :-1].float()
        p = F.one_hot(batch.outputs[:, 1:], logits.shape[-1]).float() if batch.probs is None else batch.probs[:, 1:]
        agree = (logits.argmax(-1) == p.argmax(-1)).float().mean()
        return F.cross_entropy(logits.flatten(0, 1), p.flatten(0, 1)), {"agree_1": float(agree)}

    def measure(self, batch):
        self.measured = len(batch.lengths)

    def save(self, folder, target_name):
        (folder / "saved.txt").write_text(target_name, encoding="utf-8")


@pytest.fixture(scope="module")
def target():
    return HFTarget(build("llama"), name="tiny")


@pytest.fixture(scope="module")
def material(target, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patched:  # the same result on every processor
        patched.setattr("specdemo.training.collect.matmul_dtype", lambda device: torch.float32)
        return build_dataset(target, tmp_path_factory.mktemp("cache"), PLAN)


def test_without_a_corpus_the_target_writes_the_text(material):
    assert material.text.tokens.shape == (8, 32) and material.samples.tokens.shape == (4, 32)
    assert set(material.text.hidden) == {1, -1}
    assert material.source == "text written by tiny"
    assert not any(bool((row == material.text.tokens).all(-1).any()) for row in material.validation.tokens)


def test_rows_come_from_all_files_of_a_corpus(target, tmp_path, monkeypatch):
    class Letters:
        def __call__(self, text, verbose):
            return SimpleNamespace(input_ids=[ord(letter) % VOCABULARY for letter in text])

    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for name, letter in (("a", "a"), ("b", "b"), ("valid", "c")):
        (corpus / f"{name}.txt").write_text(letter * 32 * 20, encoding="utf-8")
    monkeypatch.setattr(target, "tokenizer", Letters())
    rows = [build_dataset(target, tmp_path / str(i), PLAN, corpus).text.tokens for i in range(2)]
    assert {int(row[0]) for row in rows[0]} == {ord(letter) % VOCABULARY for letter in "ab"}
    assert torch.equal(*rows)


def test_an_example_is_aligned_like_progress(target, material):
    batch = columns(material.text.select(torch.tensor([0, 3])), (1, -1))
    progress = to_progress(batch, (1, -1), target)
    assert progress.inputs.shape == progress.outputs.shape == (2, 31)
    assert torch.equal(progress.inputs[:, 1:], progress.outputs[:, :-1])
    with torch.no_grad():
        outputs = target.model(batch[0], output_hidden_states=True)
    torch.testing.assert_close(progress.hidden[1], outputs.hidden_states[1][:, :-1], atol=5e-3, rtol=5e-3)
    torch.testing.assert_close(target.lm_head(progress.hidden[-1]), outputs.logits[:, :-1], atol=0.2, rtol=0.02)
    assert progress.probs is not None
    torch.testing.assert_close(progress.probs.sum(-1), torch.ones(2, 31))
    assert torch.equal(progress.probs.argmax(-1), outputs.logits[:, :-1].argmax(-1))


def test_a_head_learns_and_is_saved_with_its_history(target, material, tmp_path):
    head = Next(32, VOCABULARY)
    ticks = list(train_head(head, target, material, tmp_path, minutes=1.0, batch_tokens=64, clock=ticking()))
    curve = ticks[-1].history.evaluations
    assert len(curve) >= 1 and curve[-1]["held_out_loss"] < ticks[1].loss
    assert 0.0 < curve[-1]["agree_1"] <= 1.0
    save_head(head, target, tmp_path, ticks[-1].history, material, recipe="next", minutes=0.05)
    assert (tmp_path / "saved.txt").read_text(encoding="utf-8") == "tiny"
    assert '"recipe": "next"' in (tmp_path / "provenance.json").read_text(encoding="utf-8")


def test_stopped_run_is_resumed(target, material, tmp_path):
    ticks = train_head(Next(32, VOCABULARY), target, material, tmp_path, minutes=1.0, batch_tokens=64)
    for tick in ticks:
        if tick.history.step == 5:
            break
    ticks.close()
    again = next(train_head(Next(32, VOCABULARY), target, material, tmp_path, minutes=1.0, batch_tokens=64))
    assert again.history.step == 5


def test_a_cache_without_the_taps_is_refused(target, tmp_path):
    build_dataset(target, tmp_path, Plan(4, 2, 4, 32, 16, (-1,)))
    with pytest.raises(ValueError, match="lacks taps"):
        build_dataset(target, tmp_path, PLAN)
