"""GGUF models with recurrent layers on a real llama.cpp: random files of every architecture against plain decoding."""

import random
from pathlib import Path

import pytest
import torch

pytest.importorskip("llama_cpp", reason="llama.cpp is not installed: pip install llama-cpp-python gguf")
pytest.importorskip("gguf")

from specdemo.core.protocol import Budget, Drafter, GenerationConfig
from specdemo.core.sampling import Sampling
from specdemo.core.tree import Draft, chain_parents
from specdemo.engine.loop import generate
from specdemo.methods import load_drafter
from specdemo.models.errors import Cancelled
from specdemo.models.gguf_header import COPIES, TAKEN_BACK, read_header
from specdemo.models.llamacpp import CACHE_BYTES
from specdemo.models.llamacpp_context import RECURRENT_ONLY, LlamaCppContext
from specdemo.models.llamacpp_recurrent import RecurrentHistory
from specdemo.models.load import load_target
from specdemo.models.memory import gguf_footprint
from specdemo.models.pass_cost import pass_times
from specdemo.models.prefix_reuse import with_prefix_cache
from specdemo.models.ref import ModelRef
from tests.generation import output
from tests.gguf_random import SHAPES, VOCABULARY, shape_of, write_random

ARCHITECTURES = [name for name in SHAPES if name != "glm4moe"]  # which has attention only
MODES = [Sampling(temperature=0.0), Sampling(temperature=1.0, top_k=8)]
CPU = torch.device("cpu")
ROOT = torch.empty(1, 0, dtype=torch.int64)


@pytest.fixture(scope="module")
def target_of(tmp_path_factory):
    """Return a function: architecture -> target on a random file, loaded once."""
    folder, targets = tmp_path_factory.mktemp("recurrent"), {}

    def target(architecture):
        if architecture not in targets:
            write_random(folder / f"{architecture}.gguf", architecture, shape_of(architecture))
            targets[architecture] = load_target(str(folder / f"{architecture}.gguf"))
        return targets[architecture]

    return target


def prompts(rows, length, seed=1):
    return torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


class Planted(Drafter):
    """Drafts a known text of every row, and wrong tokens from a random place on, in chains of random length."""

    def __init__(self, texts, seed=0):
        self._texts, self._random = texts, random.Random(seed)

    def start(self, batch, sampling, rng):
        self._length = [0] * batch

    def observe(self, progress):
        self._length = [n + len(new) for n, new in zip(self._length, progress.output_ids(), strict=True)]

    def propose(self, budget):
        width = self._random.randint(0, budget.depth)
        rows = []
        for text, length in zip(self._texts, self._length, strict=True):
            right = text[length : length + self._random.randint(0, width)]
            rows.append(right + [self._random.randrange(VOCABULARY) for _ in range(width - len(right))])
        return Draft.chain(torch.tensor(rows, dtype=torch.int64).view(len(rows), width))


def config_of(sampling, k, tokens=200, stop=()):
    return GenerationConfig(tokens, sampling, Budget(k, k), 3, stop_token_ids=stop)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("rows", "sampling"), [(1, MODES[0]), (3, MODES[1])])
def test_texts_with_drafts_are_plain_texts(architecture, rows, sampling, target_of, monkeypatch):
    """Also never remove a whole pass, or more than llama.cpp keeps: it would continue wrongly, without an error."""
    target, prompt = target_of(architecture), prompts(rows, 30)
    assert not target.capabilities.trees and target.weights.rollback == (8 if architecture in TAKEN_BACK else 0)
    plain = output(target, load_drafter("none", target), prompt, config_of(sampling, 0))
    assert len({token for row in plain for token in row}) > 10
    counts, ends, restored = {}, {}, set()
    remove, decode, restore = LlamaCppContext.remove, LlamaCppContext.decode, LlamaCppContext.restore

    def decoded(context, inputs, taps):
        numbers = [sequences[0] for sequences in inputs.sequences]
        counts.update({number: numbers.count(number) for number in numbers})
        ends.update(zip(numbers, inputs.positions, strict=True))
        return decode(context, inputs, taps)

    def removed(context, sequence, begin):
        rejected = ends.get(sequence, -1) + 1 - begin
        assert begin == 0 or sequence in restored or rejected < counts[sequence]
        restored.discard(sequence)
        return remove(context, sequence, begin)

    def returned(context, sequence, state, flags=0):
        restored.add(sequence)
        return restore(context, sequence, state, flags)

    monkeypatch.setattr(LlamaCppContext, "restore", returned)
    monkeypatch.setattr(LlamaCppContext, "decode", decoded)
    monkeypatch.setattr(LlamaCppContext, "remove", removed)
    assert output(target, Planted(plain), prompt, config_of(sampling, 12)) == plain
    assert target._context.sequences == rows


@pytest.mark.release
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("sampling", MODES, ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["ngram", "suffix", "lookahead", "draft_model"])
def test_every_method_writes_plain_text(architecture, sampling, name, target_of):
    target = target_of(architecture)
    for rows in (1, 3):
        plain = output(target, load_drafter("none", target), prompts(rows, 30), config_of(sampling, 0))
        drafter = load_drafter(name, target, target.weights.path if name == "draft_model" else None)
        assert output(target, drafter, prompts(rows, 30), config_of(sampling, 12)) == plain


@pytest.mark.parametrize("architecture", ["qwen35", "mamba2"])
def test_draft_models_with_recurrent_layers_continue_after_rejections(architecture, target_of):
    """Equal weights draft what the target writes: every draft is accepted if the draft model's states are right."""
    target = target_of(architecture)
    config, drafter = config_of(MODES[0], 4, 60), load_drafter("draft_model", target, target.weights.path)
    assert len(list(generate(target, drafter, prompts(2, 30), config))) == 1 + -(-59 // 5)


def test_planted_wrong_rollbacks_are_caught(target_of, monkeypatch):
    """Removing a whole pass: llama.cpp answers that it can (its issue 26695), and continues from a wrong state."""

    def whole_pass(history, number, accepted):
        context, row = history._context, history._rows[number]
        removed = context.remove(number, len(row.text))
        context.append(row.provisional[:accepted], len(row.text), number)
        return removed

    target, prompt = target_of("qwen35"), prompts(1, 30)
    plain = output(target, load_drafter("none", target), prompt, config_of(MODES[0], 0))
    with monkeypatch.context() as patch:
        patch.setattr(RecurrentHistory, "_take_back", whole_pass)
        assert output(target, Planted(plain), prompt, config_of(MODES[0], 7)) != plain
    monkeypatch.setattr(LlamaCppContext, "restore", lambda *_: None)
    with pytest.raises(ValueError, match="llama.cpp cannot return to token"):
        output(target_of("qwen3next"), Planted(plain), prompt, config_of(MODES[0], 8))


@pytest.mark.parametrize("architecture", ["qwen35", "lfm2", "qwen3next", "mamba"])
def test_rows_that_end_at_different_times_and_prompts_of_several_batches(architecture, target_of):
    target, prompt = target_of(architecture), prompts(3, 600, 5)
    config = config_of(MODES[0], 8, 80)
    plain = output(target, load_drafter("none", target), prompt, config)
    stop = tuple(row[20 * number + 5] for number, row in enumerate(plain))
    expected = [row[: next(i for i, token in enumerate(row) if token in stop) + 1] for row in plain]
    assert len({*map(len, expected)}) > 1
    assert output(target, Planted(plain), prompt, config_of(MODES[0], 8, 80, stop)) == expected


@pytest.mark.parametrize("architecture", ["qwen35", "granitehybrid"])
def test_repeated_passes_and_crops_continue_the_same_text(architecture, target_of):
    target, text = target_of(architecture), prompts(1, 60)

    def expected(length, *tokens):
        target.start(torch.cat([text[:, :length], torch.tensor([tokens[:-1]], dtype=torch.int64)], 1))
        return target.forward(torch.tensor([tokens[-1:]]), ROOT).logits[0, -1]

    references = [expected(40, 7), expected(40, 7, 8), expected(42, 9), expected(30, 5), expected(45, 5)]
    target.start(text[:, :40])
    first = target.forward(torch.tensor([[7, 3, 4]]), chain_parents(1, 2, CPU)).logits[0, 0]
    again = target.forward(torch.tensor([[7, 8]]), chain_parents(1, 1, CPU)).logits[0, 1]
    target.commit([[]])  # as of a finished row
    same = target.forward(torch.tensor([[7, 8]]), chain_parents(1, 1, CPU)).logits[0, 1]
    target.forward(torch.cat([text[:, 40:45], torch.tensor([[1, 2]])], 1), chain_parents(1, 6, CPU))
    target.commit([[0, 1, 2, 3, 4]])
    longer = target.forward(torch.tensor([[5]]), ROOT).logits[0, 0]
    target.crop([42])
    middle = target.forward(torch.tensor([[9]]), ROOT).logits[0, 0]
    target.crop([30])
    before = target.forward(torch.tensor([[5]]), ROOT).logits[0, 0]
    outputs = (first, references[0]), (again, references[1]), (same, references[1]), (longer, references[4])
    for one, other in (*outputs, (middle, references[2]), (before, references[3])):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_passes_are_measured_although_they_are_repeated(target_of, monkeypatch):
    """Every measured pass reads its tokens, and returns to the text before its time begins."""
    target, read, timed = target_of("qwen35"), [], []
    decode, restore = LlamaCppContext.decode, LlamaCppContext.restore
    monkeypatch.setattr(LlamaCppContext, "decode", lambda *given: read.append(len(given[1].tokens)) or decode(*given))
    monkeypatch.setattr(LlamaCppContext, "restore", lambda *given: timed.append(len(times)) or restore(*given))
    times = []

    def now():
        times.append(0)
        return len(times)

    pass_times(target, (1, 4), 3, now=now)
    assert read == [1, 4] * 4 and {count % 2 for count in timed} == {0}


@pytest.mark.parametrize("architecture", ["qwen35", "mamba2"])
def test_the_next_turn_of_a_chat_returns_to_the_state_after_the_last_prompt(architecture, target_of):
    target = with_prefix_cache(target_of(architecture))
    prompt, config = prompts(1, 40), config_of(MODES[0], 4, 20)
    answer = [*output(target, load_drafter("ngram", target), prompt, config)[0][:-3], 1]  # the template changes its end
    following = torch.cat([prompt, torch.tensor([answer]), prompts(1, 10, 9)], 1)
    plain = output(target_of(architecture), load_drafter("none", target), following, config)
    assert output(target, load_drafter("ngram", target), following, config) == plain and target.cached_tokens >= 40
    target.discard_turn()
    assert target.length == [target.cached_tokens]
    answers = iter([False] * 2)
    run = generate(target, load_drafter("ngram", target), following, config, cancelled=lambda: next(answers, True))
    assert len(list(run)) < 4  # stopped
    assert output(target, load_drafter("ngram", target), following, config) == plain


@pytest.mark.parametrize("architecture", SHAPES)
def test_memory_of_states_and_of_keys_and_values_is_that_of_llamacpp(architecture, target_of):
    target = target_of(architecture)
    target.start(prompts(1, 100))
    states, everything = (len(target._context.save(0, flags)) for flags in (RECURRENT_ONLY, 0))
    header = read_header(Path(target.weights.path))
    if architecture != "glm4moe":
        assert header.state_bytes == pytest.approx(states, rel=0.05, abs=200)
    cache = header.cache_bytes(CACHE_BYTES[target.weights.settings.cache_type])
    assert 100 * cache == pytest.approx(everything - header.state_bytes, rel=0.1, abs=2000)
    footprint = gguf_footprint(ModelRef(target.weights.path), target.settings)
    assert footprint.per_text == 256 * VOCABULARY * 4
    assert footprint.state == header.state_bytes * (1 + target.weights.rollback + COPIES)


def test_a_stop_while_accepted_tokens_are_read_again_leaves_no_wrong_state(target_of, monkeypatch):
    target, prompt, config = with_prefix_cache(target_of("qwen3next")), prompts(1, 40), config_of(MODES[0], 4, 40)
    plain = output(target_of("qwen3next"), load_drafter("none", target), prompt, config)
    read, calls = LlamaCppContext.read_text, []

    def stopped(context, tokens, position, *rest):
        calls.append(position)
        if len(calls) == 5:  # the first one reads the prompt
            context.append(tokens[:1], position, 0)
            raise Cancelled("stopped")
        return read(context, tokens, position, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(LlamaCppContext, "read_text", stopped)
        (begun,) = output(target, Planted(plain), prompt, config)
    assert 0 < len(begun) < 40 and begun == plain[0][: len(begun)]
    following = torch.cat([prompt, torch.tensor([[*begun, 7]])], 1)
    expected = output(target_of("qwen3next"), load_drafter("none", target), following, config)
    assert output(target, load_drafter("ngram", target), following, config) == expected and target.cached_tokens


def test_lfm2_offers_no_tap_at_which_llamacpp_returns_no_logits(target_of):
    assert -1 not in target_of("lfm2").capabilities.hidden_states
    assert -1 in target_of("qwen35").capabilities.hidden_states
