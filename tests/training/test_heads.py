"""Training of heads, on a small linear head that predicts the token after next from the last hidden state."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from specdemo.models.target import HFTarget
from specdemo.training.collect import Plan
from specdemo.training.heads import build_dataset, columns, save_head, to_progress, train_head
from tests.models.tiny import VOCABULARY, build
from tests.training.test_fit import ticking

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
