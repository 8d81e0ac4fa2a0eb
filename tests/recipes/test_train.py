import json
import random
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from recipes import cards, job
from recipes import train as program
from recipes.cards import curve, sparkline, write_card
from recipes.corpus import Lessons
from recipes.llama import build
from recipes.train import RECIPES, train
from specdemo.core.protocol import Budget, GenerationConfig
from specdemo.engine.loop import generate
from specdemo.methods import load_drafter
from specdemo.models.load import load_target
from specdemo.training.collect import Plan, TeacherData, load_cache, read_corpus
from specdemo.training.fit import train_steps
from tests.recipes.test_llama import shape
from tests.training.test_fit import ticking
from tests.training.test_losses import Next

PLAN = Plan(text_rows=8, sampled_rows=8, rows_per_shard=16, context=64, sample_length=32)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    words = "the a Lily Tom dog cat ball saw took ran to park big red little was happy and".split()
    stories = [" ".join(rng.choice(words) for _ in range(300)) + "." for _ in range(40)]
    (folder / "stories.txt").write_text("<|endoftext|>".join(stories), encoding="utf-8")
    (folder / "ORIGIN-stories.md").write_text("# stories.txt\nWritten by dice.", encoding="utf-8")
    return folder


def shrink(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cards, "SAMPLE_TOKENS", 8)
    for name, recipe in list(RECIPES.items()):
        small = replace(recipe, shape=shape(1, 32, 48, 2), minutes=0.005, plan=PLAN, threads=1)
        patch.setitem(RECIPES, name, small)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)


@pytest.fixture(scope="module")
def target(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        return train("stories-target", corpus, tmp_path_factory.mktemp("trained") / "stories")


def test_the_shapes_are_those_of_the_shipped_models() -> None:
    names = ("stories-target", "stories-draft-wide", "stories-draft-deep")
    parameters = [build(RECIPES[name].shape).num_parameters() for name in names]
    assert parameters[0] == pytest.approx(9.9e6, rel=0.01)
    assert parameters[1] == pytest.approx(parameters[2], rel=0.01) == pytest.approx(1.3e6, rel=0.02)


@pytest.mark.usefixtures("tiny")
def test_draft_with_another_vocabulary_reads_the_targets_text(
    corpus: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    train_on = program.train_on
    monkeypatch.setattr(program, "train_on", lambda job, corpus: (read.append(corpus), train_on(job, corpus)))
    draft = train("stories-draft-other", corpus, tmp_path / "draft", target=str(target), cache=tmp_path / "cache")
    target_tokenizer, draft_tokenizer = (PreTrainedTokenizerFast.from_pretrained(folder) for folder in (target, draft))
    assert target_tokenizer.get_vocab() != draft_tokenizer.get_vocab() and draft_tokenizer("Lily saw").input_ids[0] == 0
    own = read[0].train[len(read_corpus(corpus).train) :]
    sampled = load_cache(tmp_path / "cache", ["samples"]).tokens
    assert len(own) >= 2 * len(sampled) and own[: len(own) // 2] == own[len(own) // 2 :]
    assert (
        target_tokenizer.decode(sampled[0], clean_up_tokenization_spaces=False).split("<|endoftext|>")[1].strip()
        == own[0]
    )
    assert "sequence-level distillation" in (draft / "MODEL_CARD.md").read_text(encoding="utf-8")


@pytest.mark.usefixtures("tiny")
def test_target_then_draft_end_to_end(corpus: Path, target: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    draft = train("stories-draft-wide", corpus, tmp_path / "draft", target=str(target), cache=cache)
    again = train("stories-draft-deep", corpus, tmp_path / "other", target=str(target), cache=cache)
    for folder in (target, draft, again):
        model = AutoModelForCausalLM.from_pretrained(folder)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        assert model.dtype == torch.bfloat16
        assert model.generation_config.eos_token_id == 0
        assert tokenizer("Lily saw").input_ids[0] == 0
        assert all(p.stat().st_size < 10e6 for p in folder.glob("*.safetensors"))
        card = (folder / "MODEL_CARD.md").read_text(encoding="utf-8")
        assert "Apache-2.0" in card and "CDLA-Sharing-1.0" in card and "greedy: **" in card
        facts = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
        assert facts["seconds"] >= 0.3 and facts["parameters"] == model.num_parameters()
        assert str(tmp_path) not in card + json.dumps(facts) and str(target.parent) not in card
    assert "Written by dice." in (target / "ATTRIBUTION.md").read_text(encoding="utf-8")
    assert not (draft / "ATTRIBUTION.md").exists()
    assert "greedy agreement" in (draft / "MODEL_CARD.md").read_text(encoding="utf-8")


@pytest.mark.usefixtures("tiny")
def test_a_target_goes_on_from_its_weights(
    corpus: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model, **how: compiled.append(model) or model)
    again = train("stories-target", corpus, tmp_path / "again", start=str(target), threads=2, compile=True)
    assert len(compiled) == 1
    assert f"--start {target.name} --minutes" in (again / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert (again / "tokenizer.json").read_text() == (target / "tokenizer.json").read_text()
    losses = [
        json.loads((f / "provenance.json").read_text())["evaluations"][-1]["held_out_loss"] for f in (target, again)
    ]
    assert losses[1] < losses[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"recipe": "stories-draft-huge"}, "unknown recipe"),
        ({"minutes": float("nan")}, "minutes must be positive"),
        ({"target": "./missing"}, "no trained model at"),
    ],
)
def test_bad_input_is_one_line(
    corpus: Path, tmp_path: Path, arguments: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    call = {"recipe": "stories-draft-wide", "corpus": corpus, **arguments}
    with pytest.raises(ValueError, match=message) as error:
        train(**call)  # type: ignore[arg-type]
    assert "\n" not in str(error.value) and not Path("runs").exists()


@pytest.mark.usefixtures("tiny")
def test_a_corpus_smaller_than_a_batch_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("<|endoftext|>".join(["Lily ran.", "Tom ran."]), encoding="utf-8")
    with pytest.raises(ValueError, match="smaller than one batch"):
        train("stories-target", tmp_path, tmp_path / "out")


def recorded(rows: int, first: int) -> TeacherData:
    tokens = torch.arange(rows * 8).view(rows, 8) + first
    indices = (tokens[..., None] + torch.arange(3)).to(torch.int16)
    return TeacherData(tokens, indices, torch.tensor([0.5, 0.3, 0.1]).expand(rows, 8, 3).half())


def test_lessons_progress_from_text_to_labels_to_samples() -> None:
    lessons = Lessons(recorded(6, 0), recorded(4, 1000), 16, torch.device("cpu"))
    tokens, labels, certain = lessons(0.0, 0)
    assert tokens.shape == (4, 3) and labels.shape == (4, 3, 1)
    assert torch.equal(labels[..., 0], tokens + 1) and bool((certain == 1.0).all())
    tokens, indices, probs = lessons(0.3, 0)
    assert tokens.shape == (2, 8) and int(tokens.max()) < 1000
    assert torch.equal(indices[..., 0].long(), tokens) and float(probs[0, 0, 0]) == 0.5
    tokens, _, probs = lessons(0.9, 0)
    assert tokens.shape == (2, 8) and int(tokens[0].max()) < 1000 <= int(tokens[1].min())
    assert float(probs[0, 0, 0]) == pytest.approx(0.5 * (1 - lessons.lean) + lessons.lean, abs=1e-3)
    for progress in (0.0, 0.4, 0.8):  # they depend on the progress and the step alone
        assert all(torch.equal(a, b) for a, b in zip(lessons(progress, 5), lessons(progress, 5), strict=True))


def test_every_row_comes_once_in_an_epoch() -> None:
    rows = recorded(6, 0)
    seen = torch.cat([rows.batch(2, step).tokens[:, 0] for step in range(3)])
    assert sorted(seen.tolist()) == rows.tokens[:, 0].tolist()
    later = torch.cat([rows.batch(2, step).tokens[:, 0] for step in range(3, 6)])
    assert seen.tolist() != later.tolist() and sorted(seen.tolist()) == sorted(later.tolist())


def test_a_curve_is_bars_and_rows_with_the_end() -> None:
    assert sparkline([1.0, 2.0, 8.0]) == "▁▂█"
    assert sparkline([3.0, 3.0]) == "▁▁"
    points = [{"step": i, "tokens": 1e6 * i, "seconds": 60.0 * i, "held_out_loss": 4.0 - i / 10} for i in range(31)]
    found = curve(points)
    assert list(found["bars"]) == ["held_out_loss"] and len(found["rows"]) <= cards.CURVE_ROWS
    assert found["rows"][-1] == points[-1] and curve([]) == {"bars": {}, "rows": []}


def test_a_card_can_be_written_for_an_older_run(target: Path, tmp_path: Path, tiny: None) -> None:
    out = shutil.copytree(target, tmp_path / "older")
    facts = json.loads((out / "provenance.json").read_text(encoding="utf-8"))
    for name in ("recipe", "minutes", "hardware", "threads"):
        del facts[name]
    facts["remark"] = "Stopped once."
    (out / "provenance.json").write_text(json.dumps(facts), encoding="utf-8")
    text = write_card(out, RECIPES["stories-target"]).read_text(encoding="utf-8")
    assert text.startswith("# stories\n") and "train stories-target" in text and "- remark: Stopped once.\n" in text


def test_a_target_of_code_is_deepened_and_drafted_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "SAMPLE_TOKENS", 8)
    monkeypatch.setattr(program, "SEED_LAYERS", 1)
    world = {"windows": (16, 32), "windows_later": (16, 32), "parts": 1, "vocab_size": 300}
    for name in ("code-target", "code-draft"):
        sizes = shape(3 if name == "code-target" else 1, 32, 48, 2, 64)
        small = {"shape": sizes, "minutes": 0.005, "plan": PLAN, "threads": 1} | world
        monkeypatch.setitem(RECIPES, name, replace(RECIPES[name], **small))
    (tmp_path / "code").mkdir()
    body = "\n    ".join(f"total = total + value * {i}" for i in range(60))
    functions = [f"def add_{i}(total, value):\n    {body}\n    return total" for i in range(40)]
    (tmp_path / "code" / "train.txt").write_text("<|endoftext|>".join(functions), encoding="utf-8")
    target = train("code-target", tmp_path / "code", tmp_path / "target")
    assert AutoModelForCausalLM.from_pretrained(target).config.num_hidden_layers == 3
    facts = json.loads((target / "provenance.json").read_text(encoding="utf-8"))
    assert [(seed["name"], seed["layers"]) for seed in facts["seeds"]] == [("seed", 1), ("copying", 1)]
    assert all(seed["tokens"] > 0 for seed in facts["seeds"]) and facts["start"] == "copying"
    assert "earlier part: copying, 1 layer," in (target / "MODEL_CARD.md").read_text(encoding="utf-8")
    draft = train("code-draft", tmp_path / "code", tmp_path / "draft", target=str(target))
    assert "~~~python\ndef read_config" in (draft / "MODEL_CARD.md").read_text(encoding="utf-8")


def test_draft_models_learn_from_rows_as_long_as_their_context() -> None:
    chosen = [recipe for recipe in RECIPES.values() if recipe.make == "train_draft"]
    assert len(chosen) == 3
    assert all(recipe.plan.context == recipe.shape["max_position_embeddings"] for recipe in chosen)


def test_model_and_heads_learn_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, head = build(shape(1, 16, 24, 2), vocab_size=16), Next(16, 16)
    start = torch.randint(0, 16, (64, 1), generator=torch.Generator().manual_seed(0))
    rows = (start + torch.arange(13)) % 16  # counts up
    monkeypatch.setattr(job, "train_steps", partial(train_steps, clock=ticking()))
    made = job.Job(RECIPES["stories-bytes"], tmp_path, tmp_path, 2.0, rows.device, "", tmp_path, None, 1, False)
    end = program.train_jointly(made, model, head, lambda _, step: (rows[step % 4 * 16 :][:16],), rows).evaluations[-1]
    assert end["held_out_loss"] < 1.0 and end["heads_loss"] < 2.0  # ln 16 is 2.77


def test_a_byte_model_and_its_heads_can_be_loaded_and_raced(tmp_path, monkeypatch):
    monkeypatch.setattr(cards, "SAMPLE_TOKENS", 8)
    small = {"shape": shape(2, 32, 48, 2, 256), "windows": (32, 64), "threads": 1}
    monkeypatch.setitem(RECIPES, "stories-bytes", replace(RECIPES["stories-bytes"], **small))
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
    (tmp_path / "train.txt").write_text("Once.", encoding="utf-8")
    with pytest.raises(ValueError, match="recipe 'stories-bytes' starts from scratch; omit --start"):
        train("stories-bytes", tmp_path, tmp_path / "out", start="stories")
    assert not (tmp_path / "out").exists()
