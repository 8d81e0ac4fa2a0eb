from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from recipes.byte_model import train_jointly
from recipes.job import World
from recipes.llama import Shape, build
from recipes.train import RECIPES, train
from specdemo.core.protocol import Budget, GenerationConfig
from specdemo.engine.loop import generate
from specdemo.methods import load_drafter
from specdemo.models.load import load_target
from specdemo.training.fit import Schedule
from tests.training.test_fit import ticking
from tests.training.test_heads import Next


def test_model_and_heads_learn_together(tmp_path: Path) -> None:
    model = build(Shape(1, 16, 24, 2), vocab_size=16)
    head = Next(16, 16)
    start = torch.randint(0, 16, (64, 1), generator=torch.Generator().manual_seed(0))
    rows = (start + torch.arange(13)) % 16  # counts up

    def batches(progress: float, step: int) -> tuple[Tensor]:
        return (rows[step % 4 * 16 : step % 4 * 16 + 16],)

    schedule = Schedule(2.0, warmup_steps=1)
    ticks = list(train_jointly(model, head, batches, rows, tmp_path, schedule, 64, clock=ticking()))
    end = ticks[-1].evaluation
    assert end is not None and end["held_out_loss"] < 1.0 and end["heads_loss"] < 2.0  # ln 16 is 2.77


def test_a_byte_model_and_its_heads_can_be_loaded_and_raced(tmp_path, monkeypatch):
    shape, world = Shape(layers=2, hidden=32, intermediate=48, heads=2, context=256), World("stories", windows=(32, 64))
    monkeypatch.setitem(RECIPES, "stories-bytes", replace(RECIPES["stories-bytes"], shape=shape, world=world))
    stories = "\n<|endoftext|>\n".join(f"Tom saw {n} cats. The cats saw Tom." for n in range(400))
    (tmp_path / "stories.txt").write_text(stories, encoding="utf-8")
    folder = train("stories-bytes", tmp_path, tmp_path / "bytes", minutes=0.02, device="cpu")
    target = load_target(str(folder))
    drafter = load_drafter("mtp", target, str(tmp_path / "bytes-heads"))
    prompt = torch.tensor([target.tokenizer("Tom saw").input_ids])
    config = GenerationConfig(24, budget=Budget(7, 7), stop_token_ids=())
    plain = [t for e in generate(target, load_drafter("none", target), prompt, config) for t in e.emitted[0]]
    events = list(generate(target, drafter, prompt, config))
    assert [t for e in events for t in e.emitted[0]] == plain
    assert max(len(e.drafted[0]) for e in events) == 7


def test_a_byte_model_begins_from_scratch(tmp_path):
    with pytest.raises(ValueError, match="recipe 'stories-bytes' starts from scratch; omit --start"):
        train("stories-bytes", tmp_path, tmp_path / "out", start="stories")
    assert not (tmp_path / "out").exists()
