"""The comparison of losses: intervals, and a run that is too short to change anything."""

from typing import get_args

import pytest

from benchmarks import LossesOf, losses
from benchmarks.losses import ratio_interval
from specdemo.engine.loop import never_cancelled
from specdemo.methods import method
from specdemo.methods.base import Learner
from specdemo.training.losses import Objective


def test_the_interval_contains_the_ratio_of_all_prompts_and_excludes_one_for_a_clear_gain():
    other = [(90, 30 + i % 5) for i in range(40)]
    same = ratio_interval(other, other)
    assert (same.value, same.low, same.high) == (1.0, 1.0, 1.0)
    better = ratio_interval([(90, 25 + i % 7) for i in range(40)], other)
    assert better.value == pytest.approx(sum(p for _, p in other) / sum(25 + i % 7 for i in range(40)), abs=1e-4)
    assert 1.0 < better.low < better.value < better.high


def short_losses(patch, folder, report=lambda share, what: None, name="stories-dflash"):
    """Return the result of one training step of one drafter with one loss."""
    patch.setattr(losses, "OBJECTIVES", [Objective("lk-alpha")])
    corpus = folder / "corpus"
    corpus.mkdir()
    story = "Once upon a time, there was a little dragon who lived in a castle. He wanted to fly over the big hill. "
    (corpus / "a.txt").write_text(story * 40, encoding="utf-8")
    (corpus / "valid.txt").write_text(f"{story * 12}<|endoftext|>{story}", encoding="utf-8")
    return losses.losses(
        corpus,
        folder / "cache",
        folder / "heads",
        [name],
        steps=1,
        batch_tokens=256,
        prompts=2,
        new_tokens=6,
        temperature=1.0,
        report=report,
        cancelled=never_cancelled,
    )


def test_the_option_offers_every_head():
    assert get_args(LossesOf) == ("all", *losses.HEADS)
    assert all(issubclass(method(lane.method), Learner) for lane in losses.HEADS.values())


@pytest.mark.parametrize("name", losses.HEADS)
def test_every_head_is_fine_tuned_with_every_objective(tmp_path, monkeypatch, name):
    shown = []
    result = short_losses(monkeypatch, tmp_path, lambda share, what: shown.append(share), name)
    assert [row["loss, weights"] for row in result.rows] == ["shipped", "lk-alpha, fixed"]
    assert all(row["tokens/pass"] >= 1.0 and row["ratio"].value > 0.0 for row in result.rows)
    assert (tmp_path / "heads" / f"{name}-lk-alpha-fixed" / "model.safetensors").exists()
    assert shown == sorted(shown)
