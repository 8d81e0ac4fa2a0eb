"""All trainable heads: short training on a fake clock improves their drafts, saving and loading preserves them, and a
resumed run ends in the same state.
"""

import json
import re
from dataclasses import replace

import pytest
import torch

from specdemo.methods import load_drafter
from specdemo.methods.recipes import HEAD_RECIPES, train_head_recipe, train_live, trained_drafter, untrained_drafter
from specdemo.models.load import load_target
from specdemo.training.collect import Plan
from specdemo.training.heads import build_dataset, columns, save_head, to_progress, train_head
from specdemo.training.losses import Objective
from specdemo.training.shares import Shares
from tests.training.test_fit import ticking

FEW = Plan(text_rows=4, sampled_rows=2, rows_per_shard=4, context=32, sample_length=16, taps=(2, 6, 9, 10, -1))
PLAN = Plan(text_rows=24, sampled_rows=8, rows_per_shard=24, context=48, sample_length=24, taps=(2, 6, 9, 10, -1))
SHORT = {"minutes": 0.5, "rates": 6.0}  # ends within the warm-up of the learning rates


@pytest.fixture(scope="module")
def target():
    return load_target("stories", kernels="transformers")


@pytest.fixture(scope="module")
def cache(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    build_dataset(target, folder, PLAN)
    return folder


def validation_loss(drafter, target, material):
    drafter.head.float()
    batch = to_progress(columns(material.validation, drafter.taps), drafter.taps, target)
    with torch.no_grad():
        return drafter.loss(batch)


@pytest.mark.parametrize("name", HEAD_RECIPES)
def test_training_makes_a_head_guess_better(name, target, cache, tmp_path):
    recipe = HEAD_RECIPES[name]
    torch.manual_seed(0)
    drafter = untrained_drafter(recipe, target)
    material = build_dataset(target, cache, replace(PLAN, taps=drafter.taps))
    before, chance = validation_loss(drafter, target, material)
    ticks = list(train_head(drafter, target, material, tmp_path, batch_tokens=96, clock=ticking(), **SHORT))
    after, metrics = validation_loss(drafter, target, material)
    assert float(after) < float(before)
    assert metrics["agree_1"] > chance["agree_1"]
    save_head(drafter, target, tmp_path, ticks[-1].history, material, recipe=name, minutes=0.5)
    again = load_drafter(recipe.method, target, str(tmp_path))
    torch.testing.assert_close(
        validation_loss(again, target, material)[0], after, atol=0.05, rtol=0.02
    )  # saved in bf16


def test_training_continues_from_a_trained_head_with_another_loss(target, tmp_path, monkeypatch):
    monkeypatch.setattr("specdemo.methods.recipes.share_minutes", lambda *_: Shares(FEW, 1e-3, 96, 1))
    options = {"objective": Objective("lk-alpha", "dpace"), "start": "stories-dflash"}
    folder = train_head_recipe("dflash", tmp_path, 1e-5, target, **options)
    assert not list(tmp_path.glob("ca*")) and not list(tmp_path.glob("checkpoint*"))
    note = trained_drafter("dflash", target, str(folder)).note, load_drafter("dflash", target, str(folder)).note
    assert re.search(r"This head was trained for 1 step \(\d+ s\)\.$", note[1]) and "trained for" not in note[0]
    facts = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
    assert [facts[name] for name in ("start", "loss", "weights", "step")] == ["stories-dflash", "lk-alpha", "dpace", 1]
    heads = (trained_drafter("dflash", target, str(at)).head for at in (folder, "stories-dflash"))
    trained, shipped = (head.fc.weight for head in heads)
    assert 0.0 < float((trained - shipped).abs().max()) < 0.01
    with pytest.raises(ValueError, match="medusa"):
        train_head_recipe("medusa", tmp_path / "other", 1e-5, target, start="stories-dflash")
    assert not (tmp_path / "other").exists()


def test_a_draft_model_is_trained_saved_and_loaded_like_a_head(target, cache, tmp_path):
    drafter = trained_drafter("draft_model", target, "stories-draft-wide")
    before = {name: weight.clone() for name, weight in drafter.head.named_parameters()}
    drafter.objective = Objective("lk-lambda", "dpace")
    material = build_dataset(target, cache, replace(PLAN, taps=drafter.taps))
    ticks = list(train_head(drafter, target, material, tmp_path, 0.1, batch_tokens=96, clock=ticking(), rates=0.1))
    save_head(drafter, target, tmp_path, ticks[-1].history, material)
    loaded = trained_drafter("draft_model", target, str(tmp_path))
    loaded.objective = drafter.objective
    after = dict(loaded.head.named_parameters())
    assert after.keys() == before.keys() and any(not torch.equal(before[name], after[name]) for name in after)
    losses = [float(validation_loss(one, target, material)[0]) for one in (drafter, loaded)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert load_drafter("draft_model", target, str(tmp_path)).note == ""  # the tokenizer is the target's


def test_page_receives_every_step_and_the_folder(target, tmp_path, monkeypatch):
    monkeypatch.setattr("specdemo.methods.recipes.load_target", lambda name, kernels: target)
    monkeypatch.setattr("specdemo.methods.recipes.share_minutes", lambda *_: Shares(FEW, 1800.0, 96, 9))
    messages = []
    for message in train_live("medusa", 30.0, tmp_path, cancelled=lambda: len(messages) > 6):
        messages.append(message)
    steps = [message for message in messages if "step" in message]
    assert [message["step"] for message in steps] == list(range(len(steps)))
    assert messages[0] == {"type": "note", "text": "30 minutes: 192 tokens of text and 9 training steps"}
    assert 1700.0 < steps[-1]["of_seconds"] < 1800.0 and steps[-1]["loss"] > 0.0
    assert messages[-1] == {"type": "done", "folder": str(tmp_path)}
    assert not list(tmp_path.glob("ca*")) and not list(tmp_path.glob("checkpoint*"))
    assert load_drafter("medusa", target, str(tmp_path))


def test_a_target_on_fused_layers_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="load it with kernels='transformers'"):
        train_head_recipe("medusa", tmp_path, 1.0, target=load_target("stories"))
