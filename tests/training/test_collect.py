"""Teacher data and corpora."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from recipes.llama import build, next_probs
from specdemo.training.collect import (
    END,
    Plan,
    build_cache,
    continue_texts,
    is_complete,
    load_cache,
    read_corpus,
    record_target,
    sampled_rows,
    shards,
)
from tests.recipes.test_llama import shape

PLAN = Plan(text_rows=10, sampled_rows=4, rows_per_shard=4, context=32, sample_length=16)
STORIES = [[0, *range(i, i + 30)] for i in range(1, 40)]


def collect(*given: object, **how: object) -> None:
    for _ in build_cache(*given, **how):  # type: ignore[arg-type]
        pass


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return build(shape(1, 32, 48, 2), vocab_size=64).eval()


@pytest.fixture(scope="module")
def text() -> Tensor:
    return torch.randint(0, 64, (12, 32), generator=torch.Generator().manual_seed(0))


def test_the_best_entries_are_recorded_largest_first(model: LlamaForCausalLM, text: Tensor) -> None:
    recorded = record_target(model, text, taps=(0, -1), top_k=64)
    indices, probs = recorded["indices"], recorded["probs"]
    exact = next_probs(model, text)
    assert torch.equal(indices.long().sort(-1).values, torch.arange(64).expand(12, 32, 64))
    assert bool((probs[..., :-1] >= probs[..., 1:]).all())
    torch.testing.assert_close(exact.gather(-1, indices.long()), probs.float(), atol=2e-3, rtol=2e-2)
    torch.testing.assert_close(recorded["tap.0"].float(), model.model.embed_tokens(text), atol=2e-3, rtol=2e-2)
    logits = model.lm_head(recorded["tap.-1"].float())
    torch.testing.assert_close(logits.softmax(-1), exact, atol=2e-3, rtol=2e-2)


def test_greedy_samples_are_the_models_own_greedy_text(model: LlamaForCausalLM) -> None:
    prompts = torch.tensor([[0, 5, 9], [0, 7, 7]])
    texts = continue_texts(model, prompts, 12, torch.tensor([0.0, 0.0]), torch.Generator().manual_seed(0))
    assert torch.equal(texts[:, :3], prompts)
    for t in range(3, 12):
        with torch.no_grad():
            logits = model(input_ids=texts[:, :t], use_cache=False).logits[:, -1]
        lead = logits.max(-1).values - logits.gather(1, texts[:, t : t + 1])[:, 0]
        assert float(lead.max()) < 1e-2


def test_samples_follow_seed_and_temperature(model: LlamaForCausalLM) -> None:
    def drawn(seed: int, temperature: float) -> Tensor:
        prompts, heat = torch.zeros(64, 1, dtype=torch.int64), torch.full((64,), temperature)
        return continue_texts(model, prompts, 6, heat, torch.Generator().manual_seed(seed))

    assert torch.equal(drawn(1, 1.0), drawn(1, 1.0))
    assert not torch.equal(drawn(1, 1.0), drawn(2, 1.0))
    assert len(drawn(1, 0.0).unique(dim=0)) == 1 < len(drawn(1, 1.0).unique(dim=0))


def test_sampled_rows_begin_like_stories(model: LlamaForCausalLM) -> None:
    rows = sampled_rows(model, STORIES, PLAN, 0)
    assert rows.shape == (2, 32)
    openings = {tuple(s[:8]) for s in STORIES}
    assert all(tuple(r) in openings for r in rows.view(-1, 16)[:, :8].tolist())


def test_a_cache_is_completed_and_never_made_twice(model: LlamaForCausalLM, text: Tensor, tmp_path: Path) -> None:
    one = tmp_path / "one"
    collect(model, text, STORIES, one, PLAN)
    assert [p.stem for p in sorted(one.glob("*.safetensors"))] == sorted(shards(PLAN, len(text)))
    assert torch.equal(load_cache(one).tokens[:10].long(), text[:10])

    lost = one / "text-001.safetensors"
    assert is_complete(one)
    lost.unlink()
    assert not is_complete(one)
    stamps = {p: p.stat().st_mtime_ns for p in one.glob("*.safetensors")}
    collect(model, text, STORIES, one, PLAN)
    assert lost.exists()
    assert {p: p.stat().st_mtime_ns for p in stamps} == stamps


def test_a_cache_of_another_target_is_refused(model: LlamaForCausalLM, text: Tensor, tmp_path: Path) -> None:
    collect(model, text, STORIES, tmp_path, PLAN)
    other = build(shape(1, 32, 48, 4), vocab_size=64).eval()
    with torch.no_grad():
        other.lm_head.weight[3] += 1.0
    with pytest.raises(ValueError, match="another target or corpus"):
        collect(other, text, STORIES, tmp_path, PLAN)


def test_cut_rows_hold_the_same_positions(model: LlamaForCausalLM, text: Tensor, tmp_path: Path) -> None:
    collect(model, text, STORIES, tmp_path, PLAN)
    recorded = load_cache(tmp_path, ["text"])
    halves = recorded.split_rows(2)
    taken = halves.select(torch.tensor([0, 1]))
    tokens, indices, probs = taken.tokens, taken.indices, taken.probs
    assert torch.equal(torch.cat([tokens[0], tokens[1]]), recorded.tokens[0].long())
    assert torch.equal(indices[1], recorded.indices[0, 16:]) and torch.equal(probs[1], recorded.probs[0, 16:])


def test_a_target_writes_its_own_text_once(model: LlamaForCausalLM, tmp_path: Path) -> None:
    """If the run stops after any shard, the finished shards stay, and a new run completes the same dataset."""
    one, two = tmp_path / "one", tmp_path / "two"
    collect(model, 0, [], one, PLAN)
    started = build_cache(model, 0, [], two, PLAN)
    next(started)
    stamps = {p: p.stat().st_mtime_ns for p in two.iterdir()}
    assert sorted(p.name for p in stamps) == ["cache.json", "text-000.safetensors"]
    collect(model, 0, [], two, PLAN)
    assert {p: p.stat().st_mtime_ns for p in stamps} == stamps
    full, parts = load_cache(one), load_cache(two)
    assert torch.equal(full.tokens, parts.tokens) and len(full) == 14
    assert len(full.tokens[:10].unique(dim=0)) == 10 and not full.tokens[:10, 0].any()
    openings = {tuple(row[:8].tolist()) for row in full.tokens[:10]}
    assert all(tuple(row.tolist()) in openings for row in full.tokens[10:].view(-1, 16)[:4, :8])


def test_a_shard_that_is_cut_short_is_gathered_again(
    model: LlamaForCausalLM, text: Tensor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    collect(model, text, STORIES, tmp_path, PLAN)
    before = load_cache(tmp_path)
    shard = tmp_path / "text-001.safetensors"
    for length in (shard.stat().st_size - 1, 100, 4, 0):
        shard.write_bytes(shard.read_bytes()[:length])
        caplog.clear()
        assert not is_complete(tmp_path)
        assert caplog.messages == [f"{shard} is damaged and will be written again"]
        collect(model, text, STORIES, tmp_path, PLAN)
        assert torch.equal(load_cache(tmp_path).indices, before.indices)


def test_a_damaged_label_is_one_line(model: LlamaForCausalLM, text: Tensor, tmp_path: Path) -> None:
    for content in ("", "{", "[1]", "7"):
        (tmp_path / "cache.json").write_text(content, encoding="utf-8")
        with pytest.raises(ValueError, match="cache.json is damaged: remove its folder or name another with --cache"):
            collect(model, text, STORIES, tmp_path, PLAN)


def test_a_corpus_is_split_by_its_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(f"one{END}\ntwo\n{END}{END}", encoding="utf-8")
    (tmp_path / "a_valid.txt").write_text("three", encoding="utf-8")
    corpus = read_corpus(tmp_path)
    assert corpus.train == ["one", "two"]
    assert corpus.valid == ["three"]
    (tmp_path / "a.txt").write_text("two", encoding="utf-8")
    assert read_corpus(tmp_path).sha256 != corpus.sha256


def test_default_validation_split_is_every_hundredth_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(END.join(str(i) for i in range(150)), encoding="utf-8")
    corpus = read_corpus(tmp_path)
    assert corpus.valid == ["0", "100"]
    assert len(corpus.train) == 148 and not set(corpus.train) & set(corpus.valid)


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no training text"):
        read_corpus(tmp_path)
