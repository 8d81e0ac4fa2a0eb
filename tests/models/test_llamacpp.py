"""GGUF models on a real llama.cpp, against the same weights in transformers."""

import ctypes
import re
import signal
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from scipy.stats import chi2
from transformers import LlamaConfig, LlamaForCausalLM

pytest.importorskip("llama_cpp", reason="llama.cpp is not installed: pip install llama-cpp-python gguf")
pytest.importorskip("gguf")

import specdemo
from specdemo.core.protocol import Budget, GenerationConfig
from specdemo.core.sampling import Sampling, to_probs
from specdemo.core.tree import ABSENT, chain_parents
from specdemo.engine.comparison import Comparison
from specdemo.engine.loop import generate
from specdemo.engine.session import Session, session
from specdemo.engine.verdict import compare_outputs
from specdemo.methods import load_drafter, method, model_method
from specdemo.models import llamacpp, llamacpp_context, llamacpp_layers
from specdemo.models.errors import Cancelled
from specdemo.models.gguf_files import read_header
from specdemo.models.llamacpp import LlamaCppSettings, library
from specdemo.models.load import load_model, load_target
from specdemo.models.prefix_reuse import with_prefix_cache
from specdemo.models.ref import ModelRef
from specdemo.models.text import encode
from specdemo.presets.files import load_presets, preset
from specdemo.presets.link import OWN
from specdemo.presets.pair import add_pair
from specdemo.ui.controls import component_props
from specdemo.ui.setup import from_values, to_values
from tests.generation import output
from tests.gguf_export import GGUFVocab, write_gguf
from tests.methods.test_pard import as_pard
from tests.processes import ROOT

CPU = torch.device("cpu")
TEXTS = [
    "Once upon a time, there was a little girl named Lily.",
    "Tom and his dog went to the beach.",
    "The sun was hot, and",
    "One day, a big bear",
]
ENDLESS = {"eos_token_id": 1 << 20, "pad_token_id": 0}  # transformers generates all tokens, also after a stop token
METHODS = ["ngram", "suffix", "lookahead", "draft_model", "adaptive", "cascade", "gated", "router"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    for name in ("stories", "stories-draft-wide"):
        loaded = load_model(name, "float32", "cpu", kernels="transformers")
        vocab = GGUFVocab.of(loaded.tokenizer, int(loaded.model.config.vocab_size))
        write_gguf(loaded.model, vocab, folder / f"{name}.gguf")
    return folder


@pytest.fixture(scope="module")
def reference():
    return load_target("stories", kernels="transformers")


@pytest.fixture(scope="module")
def target(files):
    return load_target(str(files / "stories.gguf"))


def reject_layer_inputs(trial, *_):
    if trial.layer_inputs:
        raise ValueError("llama.cpp ended with SIGABRT")


def ids_of(reference, text):
    return torch.tensor([reference.tokenizer.encode(text)])


def drafter_of(name, target, files):
    model = str(files / "stories-draft-wide.gguf") if method(model_method(name)).needs_model else None
    return load_drafter(name, target, model)


@pytest.mark.parametrize("nodes", [1, 31])
def test_tree_logits_are_those_of_its_branches(target, reference, nodes):
    prompt = ids_of(reference, TEXTS[0]).repeat(2, 1)
    generator = torch.Generator().manual_seed(nodes)
    parents = torch.tensor([[int(torch.randint(0, i + 1, (1,), generator=generator)) for i in range(nodes)]] * 2)
    tokens = torch.randint(1, target.vocab_size, (2, nodes + 1), generator=generator)
    tokens[1, 1:] = ABSENT
    for each in (target, reference):
        each.start(prompt)
    logits, expected = (each.forward(tokens, parents).logits for each in (target, reference))
    torch.testing.assert_close(logits[0], expected[0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(logits[1, 0], expected[1, 0], rtol=1e-3, atol=1e-3)


def test_logits_stay_if_they_are_read_before_the_next_pass(target, reference):
    """They are in llama.cpp's memory until then."""
    target.start(ids_of(reference, TEXTS[0]).repeat(2, 1))
    passes = torch.tensor([[433, 5, 452], [12, 259, ABSENT]]), torch.tensor([[402, 12, 7], [5, 5, 12]])
    outputs = [target.forward(passes[0], chain_parents(2, 2, CPU))]
    kept = outputs[0].logits
    outputs.append(target.forward(passes[1], chain_parents(2, 2, CPU)))
    best = outputs[1].argmax()
    outputs.append(target.forward(passes[0], chain_parents(2, 2, CPU)))
    assert torch.equal(outputs[0].logits, kept) and torch.equal(outputs[2].logits, kept)
    assert torch.equal(outputs[2].argmax(), kept.argmax(-1))
    assert best.shape == (2, 3) and not torch.equal(best, kept.argmax(-1))
    for read in (lambda: outputs[1].logits, outputs[1].argmax):
        with pytest.raises(RuntimeError, match="another pass has replaced these logits"):
            read()


def test_committed_branch_is_continued(target, reference):
    prompt = ids_of(reference, TEXTS[0])
    parents = torch.tensor([[0, 0, 2, 3, 2]])
    tokens = torch.tensor([[433, 5, 452, 259, 402, 12]])
    outputs = []
    for each in (target, reference):
        each.start(prompt)
        each.forward(tokens, parents)
        each.forward(tokens, parents)  # a repeated pass replaces the provisional one
        each.commit([[0, 2, 3]])
        assert each.length == [prompt.shape[1] + 3]
        first = each.forward(torch.tensor([[402, 7]]), chain_parents(1, 1, CPU)).logits
        each.commit([[0]])
        each.crop([prompt.shape[1] + 1])
        outputs.append((first, each.forward(torch.tensor([[12]]), torch.empty(1, 0, dtype=torch.int64)).logits))
    for one, other in zip(*outputs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("parents", "tokens", "path", "like"),
    [
        ([[0, 0, 2]], [[433, 5, 452, 259]], [[0, 2, 3]], [[433, 452, 259, 5]]),  # a sibling that is not the first
        ([[0, 1, 2]] * 2, [[433, 5, 6, 7], [433, 452, 259, 402]], [[0], [0, 1, 2, 3]], [[433, 452, 259, 402]] * 2),
    ],
)
def test_logits_after_a_commit_are_bit_for_bit_those_after_a_chain(parents, tokens, path, like, files):
    """Attention sums in the order of the cells, which must be that of the text."""
    target = load_model(str(files / "stories.gguf"), llamacpp=LlamaCppSettings(cache_type="f16")).target()
    prompt = torch.tensor([target.tokenizer.encode(TEXTS[0])]).repeat(len(tokens), 1)
    chain = [[*range(len(path[-1]))]] * len(tokens)
    outputs = []
    for ids, tree, slots in ((tokens, parents, path), (like, [[0, 1, 2]] * len(tokens), chain)):
        target.start(prompt)
        target.forward(torch.tensor(ids), torch.tensor(tree))
        target.commit(slots)
        following = torch.tensor([[402, 12]] * len(ids))
        outputs.append(target.forward(following, chain_parents(len(ids), 1, CPU)).logits[-1])
    assert torch.equal(*outputs)


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("medusa", "stories-medusa"),
        ("eagle", "stories-eagle-1"),
        ("mlp_speculator", "stories-mlp-speculator"),
        ("mtp", "stories-mtp"),
        ("eagle", "stories-eagle-3"),
        ("dflash", "stories-dflash"),
    ],
)
def test_heads_draft_as_for_a_pytorch_target(name, head, target, reference):
    prompt, config = ids_of(reference, TEXTS[0]), GenerationConfig(24, budget=Budget(4, 12))
    expected = list(generate(reference, load_drafter(name, reference, head), prompt, config))
    events = list(generate(target, load_drafter(name, target, head), prompt, config))
    assert [event.drafted for event in events] == [event.drafted for event in expected]
    assert [event.emitted for event in events] == [event.emitted for event in expected]
    assert len(events) < 20


@pytest.mark.parametrize("nodes", [1, 5])
def test_layer_states_are_those_of_transformers(nodes, target, reference):
    taps = tuple(range(-1, target.num_layers))
    prompt, parents = ids_of(reference, TEXTS[0]).repeat(2, 1), torch.zeros(2, nodes, dtype=torch.int64)
    tokens = torch.arange(400, 400 + 2 * (nodes + 1)).view(2, -1)
    tokens[1, 1:] = ABSENT
    for each in (target, reference):
        each.release()
    passes = [(each.start(prompt, taps), each.forward(tokens, parents, taps)) for each in (target, reference)]
    for one, other in zip(*passes, strict=True):
        for tap in taps:
            present = slice(None) if one is passes[0][0] else tokens != ABSENT
            torch.testing.assert_close(one.hidden[tap][present], other.hidden[tap][present], rtol=1e-3, atol=1e-3)


def test_layer_states_of_texts_longer_than_a_batch(target, reference, monkeypatch):
    monkeypatch.setattr(llamacpp_context, "BATCH_TOKENS", 32)
    prompt = torch.randint(1, 400, (1, 70), generator=torch.Generator().manual_seed(0))
    taps = (target.num_layers - 1,)
    states = [each.start(prompt, taps).hidden[taps[0]] for each in (target, reference)]
    torch.testing.assert_close(states[0], states[1], rtol=1e-3, atol=1e-3)


def test_greedy_draft_in_one_call_is_that_of_single_passes(target, reference, files, monkeypatch):
    prompt, config = ids_of(reference, TEXTS[0]), GenerationConfig(32, budget=Budget(4, 4))
    drafter = drafter_of("draft_model", target, files)
    events = list(generate(target, drafter, prompt, config))
    monkeypatch.setattr(type(drafter.model), "draft_greedy", lambda *_: None)
    expected = list(generate(target, drafter, prompt, config))
    assert [event.drafted for event in events] == [event.drafted for event in expected]
    assert [event.path for event in events] == [event.path for event in expected]
    for event, other in zip(events[1:], expected[1:], strict=True):
        assert event.draft_probs[0] == pytest.approx(other.draft_probs[0], abs=2e-4)


def test_a_pard_model_of_transformers_drafts_for_a_gguf_target(target, reference, files, tmp_path):
    prompt, config = ids_of(reference, TEXTS[0]), GenerationConfig(32, budget=Budget(4, 4))
    drafter = load_drafter("pard", target, as_pard("stories-draft-wide", tmp_path / "draft"))
    plain = output(target, load_drafter("none", target), prompt, config)
    assert output(target, drafter, prompt, config) == plain
    with pytest.raises(ValueError, match="has no pard_token in a config.json; choose method 'draft_model' for it"):
        drafter_of("pard", target, files)


@pytest.mark.parametrize("lack", ["functions", "agreement"])
def test_heads_of_layers_are_rejected_where_states_cannot_be_read(lack, files, monkeypatch, tmp_path):
    path = tmp_path / "stories.gguf"
    path.write_bytes((files / "stories.gguf").read_bytes())
    if lack == "functions":
        monkeypatch.setattr(llamacpp_layers, "READ", ())
    else:
        monkeypatch.setattr(llamacpp, "check_llamacpp", reject_layer_inputs)
    target = load_target(str(path))
    assert target.capabilities.hidden_states == {-1}
    with pytest.raises(ValueError, match="reads the hidden states of layers .*, which .*stories.gguf does not return"):
        load_drafter("eagle", target, "stories-eagle-3")


@pytest.mark.parametrize(("name", "model"), [("draft_model", "stories-draft-wide"), ("medusa", "stories-medusa")])
def test_drafters_in_pytorch_learn_from_its_output(name, model, target, reference):
    prompt, config = ids_of(reference, TEXTS[0]), GenerationConfig(48, budget=Budget(4, 4))
    expected = output(reference, load_drafter("none", reference), prompt, config)
    drafter = load_drafter("online", target, model, drafter=name)
    assert output(target, drafter, prompt, config) == expected
    assert drafter._trainer.updates > 0


def test_gguf_drafts_that_learn_are_rejected(target, files):
    with pytest.raises(ValueError, match="is a GGUF model, which cannot learn; choose a draft model with safetensors"):
        load_drafter("online", target, str(files / "stories-draft-wide.gguf"))


def test_text_and_ids_are_those_of_the_tokenizer(target, reference):
    for text in (*TEXTS, "  two spaces\n\n\ta tab, naïve 日本語 🐉"):
        ids = reference.tokenizer.encode(text, add_special_tokens=False)
        assert target.tokenizer.decode(ids) == reference.tokenizer.decode(ids)
        assert target.tokenizer.decode(target.tokenizer.encode(text, False)) == text
        if text.isascii():
            assert target.tokenizer.encode(text) == reference.tokenizer.encode(text)
    assert target.stop_token_ids == reference.stop_token_ids
    assert target.tokenizer.get_vocab() == reference.tokenizer.get_vocab()


def test_a_text_begins_with_a_bos_token_only_if_the_file_says_so(tmp_path):
    loaded = load_model("stories-draft-wide", "float32", "cpu", kernels="transformers")
    vocab = GGUFVocab.of(loaded.tokenizer, int(loaded.model.config.vocab_size))
    for adds_bos in (True, False):
        write_gguf(loaded.model, replace(vocab, adds_bos=adds_bos), tmp_path / "model.gguf")
        tokenizer = load_target(str(tmp_path / "model.gguf")).tokenizer
        assert encode(tokenizer, TEXTS[0], 99) == loaded.tokenizer.encode(TEXTS[0], add_special_tokens=adds_bos)
        assert tokenizer.bos_token_id == loaded.tokenizer.bos_token_id  # a chat template may write it
    write_gguf(loaded.model, replace(vocab, bos_token_id=None, adds_bos=False), tmp_path / "model.gguf")
    assert load_target(str(tmp_path / "model.gguf")).tokenizer.bos_token_id is None


def test_loading_reports_progress_and_can_be_stopped(files):
    seen = []
    load_model(str(files / "stories.gguf"), progress=lambda share, what: seen.append((share, what)))
    assert seen == sorted(seen, key=lambda entry: entry[0]) and len(seen) > 4
    assert "reading stories.gguf, 100%" in [what for _, what in seen]

    def stop(share, what):
        if what.startswith("reading"):
            raise Cancelled("stopped")

    with pytest.raises(Cancelled, match="stopped"):
        load_model(str(files / "stories.gguf"), progress=stop)


def test_settings_apply_to_target_and_draft_model(files):
    target, draft = str(files / "stories.gguf"), str(files / "stories-draft-wide.gguf")
    settings = {"threads": 2, "context": 300, "cache_type": "q8_0"}
    trace = specdemo.run("embedded-draft", target=target, model=draft, max_new_tokens=4, **settings)
    environment = trace.environment
    assert (environment["threads"], environment["clock"]) == (2, "wall time")
    assert "q8_0 KV cache, flash attention" in environment["kernels"]
    drafter = load_drafter("draft_model", load_model(target, llamacpp=LlamaCppSettings(**settings)).target(), draft)
    assert drafter.model.weights.settings.context == 300


def test_context_limits_the_prompt(files):
    target = str(files / "stories.gguf")
    with pytest.raises(ValueError, match="the prompt has"):
        specdemo.run("embedded-ngram", target=target, context=32, max_new_tokens=16)


def test_cache_type_q8_0_needs_flash_attention(files):
    settings = {"cache_type": "q8_0", "flash_attention": False}
    with pytest.raises(ValueError, match="cache type q8_0 needs flash attention; turn it on, or choose cache type f16"):
        specdemo.run("embedded-ngram", target=str(files / "stories.gguf"), **settings)


@pytest.mark.parametrize("line", ["Flash Attention not supported, set to disabled", "flash_attn is forcing off"])
def test_models_without_flash_attention_run_with_a_note(line, files, monkeypatch):
    llama, path = library(), str(files / "stories.gguf")
    start = llama.llama_init_from_model
    cases = (({"cache_type": "f16"}, True), ({"flash_attention": False, "cache_type": "f16"}, False), ({}, False))
    for settings, flash in cases:  # the last one is that of an F32 file
        loaded = load_model(path, llamacpp=LlamaCppSettings(**settings))
        assert ("flash attention" in loaded.target().facts.kernels) is flash and not loaded.notes
    monkeypatch.setattr(llama, "llama_init_from_model", lambda *args: llama.flash_log.append(line) or start(*args))
    trace = specdemo.run("embedded-ngram", target=path, max_new_tokens=8, cache_type="f16")
    assert "flash attention" not in trace.environment["kernels"] and llamacpp.NO_FLASH in trace.notes


def test_memory_is_shown_before_loading_and_too_little_is_one_line(files, monkeypatch):
    spec = preset("embedded-draft").with_changes(
        target=str(files / "stories.gguf"), model=str(files / "stories-draft-wide.gguf"), max_new_tokens=16
    )
    seen = []
    Session().load(spec, lambda share, what: seen.append(what))
    shown = next(what for what in seen if "KV cache" in what)
    mb = r"[\d.]+ MB"
    assert re.match(rf"loading target {mb}, drafter {mb}, KV cache of \d+ tokens {mb}.*; the drafter takes", shown)
    assert shown in seen[: seen.index(next(what for what in seen if what.startswith("reading")))]
    monkeypatch.setattr("specdemo.engine.session.free_memory", lambda: 1_000_000)
    with pytest.raises(ValueError, match="this machine has 1.0 MB free; choose a smaller quantisation such as Q4_K_M"):
        Session().load(spec)


@pytest.mark.parametrize("flash_attention", [True, pytest.param(False, marks=pytest.mark.release)])
def test_a_planted_wrong_token_is_a_bug(files, flash_attention):
    settings = {"id": "x", "prompt": TEXTS[0], "max_new_tokens": 24, "flash_attention": flash_attention}
    lanes = [{"method": "ngram", "k": 4}]
    runner = Session()
    trace = runner.run(Comparison.build({**settings, "target": str(files / "stories.gguf"), "lanes": lanes}))
    assert trace.comparison[0]["verdict"] in ("identical", "rounding")
    baseline, lane = trace.lanes
    target = runner.target()
    text = torch.tensor([baseline.prompt_ids + baseline.token_ids])
    for index in (0, 9, 23):
        with torch.no_grad():
            logits = target.start(text[:, : len(baseline.prompt_ids) + index]).logits[0, -1].float()
        target.release()
        worse = logits.sort(descending=True)
        for token in worse.indices[worse.values < worse.values[0] - 1.0][[0, 99]].tolist():
            wrong = replace(lane, token_ids=[*baseline.token_ids[:index], token])
            planted = replace(trace, lanes=[baseline, wrong], comparison=[])
            compare_outputs(planted, target)
            assert planted.comparison[0]["verdict"] == "differs"


def test_page_of_two_gguf_files(files, monkeypatch):
    monkeypatch.setitem(load_presets(), OWN, None)
    chosen = add_pair(ModelRef(files / "stories.gguf"), ModelRef(files / "stories-draft-wide.gguf"))
    assert (chosen.title, chosen.chat) == ("stories.gguf with stories-draft-wide.gguf", False)
    values = to_values(chosen)
    assert from_values({**values, "threads": 2, "cache_type": "f16"}).threads == 2
    assert component_props(chosen)["gguf"] == {"visible": True}
    assert from_values(values).models == chosen.models
    trace = session().run(from_values({**values, "max_new_tokens": 8}))
    assert [lane.finish for lane in trace.lanes] == ["length", "length"]


@pytest.fixture(scope="module")
def openings(reference, request):
    """Return 8 prompts of 12 tokens, before a release 200, from random places of a sampled text."""
    count = 200 if request.config.getoption("--all") else 8
    generator = torch.Generator().manual_seed(11)
    prompt = reference.tokenizer("Once upon a time", return_tensors="pt").input_ids
    torch.manual_seed(3)
    tokens = reference.model.generate(
        prompt.repeat(4, 1), max_new_tokens=2 * count, do_sample=True, **ENDLESS
    ).flatten()
    starts = torch.randint(0, len(tokens) - 12, (count,), generator=generator).tolist()
    return torch.stack([tokens[start : start + 12] for start in starts])


@pytest.fixture(scope="module")
def continuations(reference, openings):
    """Return the 16 tokens that transformers writes after each opening."""
    mask = torch.ones_like(openings)
    outputs = reference.model.generate(openings, attention_mask=mask, max_new_tokens=16, do_sample=False, **ENDLESS)
    return outputs[:, 12:].tolist()


def agrees(found, expected, reference, prompt):
    """Return whether greedy outputs are equal, except after a near-tie of the target's two best logits."""
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        if one != other:
            text = torch.cat([prompt, torch.tensor(expected[:place], dtype=torch.int64)])
            best = reference.model(text[None]).logits[0, -1].topk(2).values
            return bool(best[0] - best[1] < 1e-3)
    return True


def outputs_in_batches(target, name, files, openings, rows, budget):
    found = []
    config = GenerationConfig(16, budget=budget, stop_token_ids=())
    for batch in openings.split(rows):
        found += output(target, drafter_of(name, target, files), batch, config)
    return found


@pytest.mark.parametrize("name", METHODS)
def test_greedy_output_of_many_prompts(name, target, reference, files, openings, continuations):
    rows = 4 if target.capabilities.batch >= 4 else 1
    found = outputs_in_batches(target, name, files, openings, rows, Budget(4, 12))
    wrong = [
        number
        for number, (one, other) in enumerate(zip(found, continuations, strict=True))
        if not agrees(one, other, reference, openings[number])
    ]
    assert wrong == []


@pytest.mark.parametrize("name", [pytest.param("ngram", marks=pytest.mark.release), "draft_model"])
def test_sampled_tokens_have_the_distribution_of_the_target(name, target, reference, files):
    """Chi-square over pairs of new tokens: their most likely values, the others pooled."""
    draws, rows = 600, 60
    prompt = ids_of(reference, TEXTS[1])[:, :2].repeat(rows, 1)
    sampling = Sampling(temperature=1.0, top_k=3)
    counts = Counter()
    for seed in range(draws // rows):
        config = GenerationConfig(2, sampling, Budget(3, 3), seed, stop_token_ids=())
        counts.update(map(tuple, output(target, drafter_of(name, target, files), prompt, config)))
    chances = {}
    first = to_probs(target.start(prompt[:1]).logits[:, -1], sampling)[0]
    for token in first.nonzero().flatten().tolist():
        forward = target.forward(torch.tensor([[token]]), torch.empty(1, 0, dtype=torch.int64))
        second = to_probs(forward.logits[:, 0], sampling)[0]
        chances |= {
            (token, other): float(first[token] * second[other]) for other in second.nonzero().flatten().tolist()
        }
    assert counts.keys() <= chances.keys()
    common = {pair: draws * chance for pair, chance in chances.items() if draws * chance >= 5}
    rare = draws - sum(common.values())
    statistic = sum((counts[pair] - mean) ** 2 / mean for pair, mean in common.items())
    if rare >= 5:
        statistic += (draws - sum(counts[pair] for pair in common) - rare) ** 2 / rare
    assert statistic < chi2.ppf(1 - 1e-4, len(common) + (rare >= 5) - 1)


@pytest.fixture(scope="module")
def long_context(tmp_path_factory):
    """Return a random model with a context of 4,096 tokens in transformers, its GGUF file, and a prompt for it that
    takes four calls of llama.cpp."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    reference = load_target(LlamaForCausalLM(config).eval())
    path = tmp_path_factory.mktemp("long") / "long.gguf"
    write_gguf(reference.model, GGUFVocab([f"t{number}" for number in range(64)], ["t 0"]), path)
    return reference, str(path), torch.randint(0, 64, (1, 2000), generator=torch.Generator().manual_seed(5))


def test_long_text(long_context):
    reference, path, prompt = long_context
    target = load_target(path)
    logits, expected = (each.start(prompt).logits for each in (target, reference))
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)
    config = GenerationConfig(24, budget=Budget(4, 4), stop_token_ids=())
    plain = output(target, load_drafter("none", target), prompt, config)
    assert output(target, load_drafter("ngram", target), prompt, config) == plain


def recorded_calls(monkeypatch, name):
    """Count the calls of a function of llama.cpp."""
    function, calls = getattr(library(), name), []
    monkeypatch.setattr(library(), name, lambda *arguments: calls.append(1) or function(*arguments))
    return calls


@pytest.mark.parametrize("name", ["none", "draft_model"])
@pytest.mark.parametrize(("polls", "decodes", "ctrl_c"), [(1, 1, False), (30, 2, False), (30, 2, True)])
def test_generation_stops_while_the_prompt_is_read(name, polls, decodes, ctrl_c, long_context, monkeypatch):
    monkeypatch.setattr(llamacpp_context, "BATCH_TOKENS", 64)
    path, prompt = long_context[1], long_context[2][:, :250]
    target = load_target(path)
    drafter = load_drafter(name, target, path if name == "draft_model" else None)
    config = GenerationConfig(4, budget=Budget(2, 2), stop_token_ids=())
    expected = output(target, drafter, prompt, config)
    answers = iter([False] * polls)
    with monkeypatch.context() as patch:
        calls = recorded_calls(patch, "llama_decode")

        def cancelled():
            ends = next(answers, True)
            return ends and (not ctrl_c or bool(signal.raise_signal(signal.SIGINT)))

        with pytest.raises(KeyboardInterrupt) if ctrl_c else nullcontext():
            assert list(generate(target, drafter, prompt, config, cancelled=cancelled)) == []
    assert len(calls) <= decodes and target.length == []
    assert output(target, drafter, prompt, config) == expected


def test_generation_stops_while_the_draft_model_reads_the_prompt(long_context, monkeypatch):
    _, path, prompt = long_context
    target = load_target(path)
    drafter = load_drafter("draft_model", target, path)
    config = GenerationConfig(4, budget=Budget(2, 2), stop_token_ids=())
    with monkeypatch.context() as patch:
        calls = recorded_calls(patch, "llama_decode")
        run = generate(target, drafter, prompt, config, cancelled=lambda: len(calls) > 4)
        assert list(run) == [] and len(calls) == 5


def test_next_turn_reads_new_tokens_only(target):
    cached = with_prefix_cache(target)
    text = torch.tensor([target.tokenizer.encode(TEXTS[0] + " " + TEXTS[1])])
    half, root = text.shape[1] // 2, torch.empty(1, 0, dtype=torch.int64)
    cached.start(text[:, :half], reserve=100)
    cached.forward(text[:, half : half + 1], root)
    cached.commit([[0]])
    cached.forward(torch.tensor([[5]]), root)  # provisional
    cached.release()
    logits = cached.start(text, reserve=100).logits
    assert cached.cached_tokens == half + 1 and cached.length == [text.shape[1]]
    torch.testing.assert_close(logits, target.start(text).logits, rtol=1e-3, atol=1e-3)
    cached.release()
    cached.discard_turn()
    assert cached.length == [half + 1]
    other = text.clone()  # equal tokens after the first different one are not part of the prefix
    other[0, half - 3] += 1
    logits = cached.start(other, reserve=100).logits
    assert cached.cached_tokens == half - 3
    torch.testing.assert_close(logits, target.start(other).logits, rtol=1e-3, atol=1e-3)
    assert cached.start(text[:, 2:], reserve=100) and cached.cached_tokens == 0
    cached.forget()
    assert cached.history_bytes >= 0 and not cached.length


def test_a_batch_after_a_cached_text_is_read_from_its_start(target):
    cached = with_prefix_cache(target)
    text = torch.tensor([target.tokenizer.encode(TEXTS[0])])
    cached.start(text, reserve=100)
    cached.release()
    logits = cached.start(text.repeat(2, 1), reserve=100).logits
    assert cached.cached_tokens == 0 and cached.length == [text.shape[1]] * 2
    torch.testing.assert_close(logits, target.start(text.repeat(2, 1)).logits, rtol=1e-3, atol=1e-3)


def test_drafted_tokens_are_part_of_the_cached_text(target):
    cached = with_prefix_cache(target)
    ids = target.tokenizer.encode(TEXTS[0])
    cached.start(torch.tensor([ids]), reserve=100)
    drafted, _ = cached.draft_greedy([5], 4, target.vocab_size)
    cached.release()
    text = torch.tensor([[*ids, 5, *drafted[:-1], 7]])
    logits = cached.start(text, reserve=100).logits
    assert cached.cached_tokens == len(ids) + 4
    torch.testing.assert_close(logits, target.start(text).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("grammar", "pattern"), [("[A-Z][a-z]{3,9} (was|is) [a-z]+\\.", ""), ('{"enum": ["a b", "c"]}', '"(a b|c)"')]
)
def test_grammar(grammar, pattern, files):
    pytest.importorskip("llguidance")
    draft = str(files / "stories-draft-wide.gguf")
    changes = {"target": str(files / "stories.gguf"), "model": draft, "max_new_tokens": 24, "grammar": grammar}
    trace = specdemo.run("embedded-draft", **changes)
    assert trace.comparison[0]["identical"] is True and trace.lanes[1].finish == "stop"
    assert re.fullmatch(pattern or grammar, trace.lanes[1].text)


@pytest.mark.parametrize(
    ("quantisation", "file_type"), [("Q8_0", 7), pytest.param("Q4_K_M", 15, marks=pytest.mark.release)]
)
def test_quantised_weights(quantisation, file_type, files, tmp_path):
    """Lossless with quantised weights: all lanes of a run agree."""
    paths = [tmp_path / name for name in ("stories.gguf", "stories-draft-wide.gguf")]
    for path in paths:
        parameters = library().llama_model_quantize_default_params()
        parameters.ftype = file_type
        source = str(files / path.name).encode()
        assert library().llama_model_quantize(source, str(path).encode(), ctypes.byref(parameters)) == 0
    assert read_header(paths[0]).quantisation == quantisation
    assert paths[0].stat().st_size < 0.4 * (files / "stories.gguf").stat().st_size
    trace = specdemo.run("embedded-draft", target=str(paths[0]), model=str(paths[1]), max_new_tokens=32)
    assert trace.environment["dtype"] == quantisation
    assert "f16 KV cache" in trace.environment["kernels"] and trace.lanes[1].summary["accepted"] > 0
    assert trace.comparison[0]["identical"] is True


def test_a_script_that_leaves_a_generator_open_ends_without_a_crash(files):
    script = (
        "import specdemo, sys, torch\n"
        "target = specdemo.load_target(sys.argv[1])\n"
        "drafter, prompt = specdemo.load_drafter('none', target), torch.tensor([[1, 2]])\n"
        "steps = specdemo.generate(target, drafter, prompt, specdemo.GenerationConfig(8))\n"
        "print(next(steps).index, next(steps).index)\n"
    )
    command = [sys.executable, "-c", script, str(files / "stories.gguf")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "0 1\n"), done.stderr
