"""Exactness on real models: llama.cpp's own greedy loop, transformers' `generate`, and every method against plain
decoding."""

import os
from functools import cache
from itertools import islice, pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdemo.__main__ import main
from specdemo.core.protocol import Budget, GenerationConfig
from specdemo.core.sampling import Sampling
from specdemo.engine.loop import generate
from specdemo.engine.session import Session
from specdemo.methods import load_drafter, method, model_method
from specdemo.models import llamacpp_target
from specdemo.models.cpu_plan import CpuSettings
from specdemo.models.fused import fuse_layers
from specdemo.models.load import load_model, load_target
from specdemo.models.packed import Layout, has_float16_products
from specdemo.models.prefix_reuse import with_prefix_cache
from specdemo.models.ref import ModelRef
from specdemo.models.target import HFTarget
from specdemo.models.text import encode
from specdemo.presets.drafters import drafters_of
from specdemo.presets.files import load_presets, preset
from specdemo.presets.link import OWN
from specdemo.presets.pair import pair
from specdemo.ui.model_menus import fitting_models

CHATS = [
    "Explain to a ten-year-old why the sky is blue, in six sentences.",
    "Write a Python function that reverses a list. Then write it again with type hints.",
    "Correct the spelling: I has a red bal and a grean boks and my frend has a blu bal.",
]
TEXT = "The capital of France is Paris. The capital of Germany is"


@pytest.fixture(scope="module")
def folder_target(smollm2_folder):
    return load_model(smollm2_folder, "float32", cpu=CpuSettings(1, "on")).target()


def raced(path, chat, methods, draft, tokens=16, prompt=CHATS[2]):
    """Return the target of a GGUF file, and the trace of methods on it. draft: GGUF file of the draft model."""
    models = {name: draft if method(model_method(name)).needs_model else None for name in methods}
    lanes = [{"method": name, "model": model, "k": 4} for name, model in models.items()]
    changes = {"target": path, "lanes": lanes, "prompt": prompt, "chat": chat, "max_new_tokens": tokens, "threads": 1}
    session, spec = Session(), preset("embedded-ngram").with_changes(**changes)
    session.place_models(spec)
    session.target().pass_ms[1] = 100.0  # is not measured: that takes longer than the race
    return session.target(), session.run(spec)


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf):
    return raced(smollm2_gguf, True, ("ngram", "draft_model"), smollm2_gguf)


@pytest.fixture(scope="module")
def gemma(gemma_gguf, smollm2_gguf):
    return raced(gemma_gguf, False, ("draft_model",), smollm2_gguf)  # with another vocabulary


@pytest.fixture(scope="module")
def small_qwen(small_qwen_gguf):
    return raced(small_qwen_gguf, True, ("suffix", "draft_model"), small_qwen_gguf, 10)


@pytest.fixture(scope="module")
def qwen(qwen_gguf, small_qwen_gguf):
    return raced(qwen_gguf, False, ("draft_model",), small_qwen_gguf, 10, TEXT)  # a token takes a tenth of a second


@pytest.fixture(scope="module")
def gguf_target(smollm2):
    return smollm2[0]


def check_verdicts(trace):
    """Check that the texts are those of plain decoding, except for one near-tie, and that drafts were accepted."""
    assert {row["verdict"] for row in trace.comparison} <= {"identical", "rounding"}
    assert sum(row["identical"] for row in trace.comparison) >= len(trace.comparison) - 1
    assert sum(lane.summary["accepted"] for lane in trace.lanes[1:]) > 0


@pytest.mark.parametrize("fixture", ["smollm2", "gemma", "small_qwen", "qwen"])
def test_the_text_of_a_gguf_file_is_that_of_llamacpps_own_loop_with_and_without_drafts(fixture, request):
    from llama_cpp import Llama

    target, trace = request.getfixturevalue(fixture)
    check_verdicts(trace)
    if fixture == "gemma":
        assert "18 % of the target's tokens are shared" in trace.lanes[1].note
    plain, path = trace.lanes[0], target.weights.path
    own = Llama(path, n_ctx=512, n_threads=1, n_threads_batch=1, n_gpu_layers=0, flash_attn=True, verbose=False)
    assert own.tokenize(CHATS[2].encode()) == target.tokenizer.encode(CHATS[2])
    assert list(islice(own.generate(plain.prompt_ids, temp=0.0), len(plain.token_ids))) == plain.token_ids
    own.close()


def test_the_smaller_model_beside_a_file_is_offered_as_its_draft_model(qwen_gguf, small_qwen_gguf, monkeypatch, capsys):
    (fit,) = drafters_of(ModelRef(qwen_gguf))
    ratio = float(fit.reason.partition("x smaller")[0])
    assert (fit.drafter, fit.method, fit.place) == (small_qwen_gguf, "draft_model", "its folder") and 2.0 < ratio < 3.0
    assert main(["drafters", qwen_gguf]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"On this machine: {fit.drafter} ({fit.reason})"
    monkeypatch.setitem(load_presets(), OWN, pair(ModelRef(qwen_gguf)))  # the page of `--target`
    assert fitting_models(ModelRef(qwen_gguf), "draft_model")[0] == small_qwen_gguf


@pytest.mark.release
@pytest.mark.parametrize(
    ("fixture", "methods"),
    [
        ("smollm2_gguf", ("suffix", "lookahead", "cascade", "router", "adaptive")),
        ("gemma_gguf", ("ngram", "suffix", "lookahead", "adaptive")),
    ],
)
def test_every_other_method_of_a_gguf_target_is_plain_decoding_except_for_near_ties(fixture, methods, request):
    path, draft = request.getfixturevalue(fixture), request.getfixturevalue("smollm2_gguf")
    check_verdicts(raced(path, path == draft, methods, draft)[1])


def test_layer_states_of_a_gguf_model_are_those_of_transformers(gguf_target, folder_target):
    target, reference = gguf_target, folder_target
    ids, taps = torch.tensor([reference.tokenizer.encode(TEXT)]), (0, 2, 15, 27)
    states, expected = (each.start(ids, taps).hidden for each in (target, reference))
    for tap in taps:  # the file's 8-bit activations round
        assert torch.cosine_similarity(states[tap], expected[tap].float(), dim=-1).min() > 0.999, tap
    torch.testing.assert_close(target.embed(ids), reference.embed(ids))
    assert target.embed.weight.data_ptr() == target.lm_head.weight.data_ptr()  # the file has one matrix for both


def test_embeddings_of_a_gguf_model_are_scaled_as_its_first_layer_reads_them(gemma, monkeypatch):
    target, ids = gemma[0], torch.tensor([[1, 2, 3]])
    monkeypatch.setattr(llamacpp_target, "read_tensor", lambda path, name: torch.rand(4, 640))  # the whole takes long
    torch.testing.assert_close(target.embed(ids), target.lm_head.weight[ids] * 640**0.5)  # of transformers' Gemma 3
    with pytest.raises(ValueError, match=r"does not return the inputs of layers \[0\] of this model"):
        target.start(ids, (0,))  # llama.cpp 0.3.36 has them for some architectures only


def generated(target, prompt, name, tokens, budget, **drafter):
    """Return the answer of a method, and the number of passes."""
    config = GenerationConfig(tokens, budget=budget)
    events = list(generate(target, load_drafter(name, target, **drafter), prompt, config))
    return [token for event in events for token in event.emitted[0]], len(events)


def test_output_of_a_folder_is_that_of_transformers(smollm2_folder, folder_target):
    reference = load_target(smollm2_folder, dtype="float32", kernels="transformers")
    prompt = torch.tensor([encode(reference.tokenizer, [{"role": "user", "content": CHATS[2]}], 200)])
    expected = reference.model.generate(prompt, max_new_tokens=16, do_sample=False)[0, prompt.shape[1] :].tolist()
    for name in ("none", "ngram", "layer_skip"):
        assert generated(folder_target, prompt, name, 16, Budget(4, 12))[0] == expected, name


@pytest.mark.skipif(not has_float16_products(), reason="this torch has no products in float16")
def test_output_with_weights_in_float16_is_that_of_transformers(smollm2_folder, folder_target):
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.bfloat16).float().eval()
    prompt = torch.tensor([encode(folder_target.tokenizer, [{"role": "user", "content": CHATS[2]}], 200)])
    expected = model.generate(prompt, max_new_tokens=16, do_sample=False)[0, prompt.shape[1] :].tolist()
    assert fuse_layers(model, Layout("float16")) == ""
    for name in ("none", "ngram"):
        assert generated(HFTarget(model), prompt, name, 16, Budget(4, 4))[0] == expected, name


ALONE = "ngram suffix lookahead layer_skip".split()  # methods without a model
WITH_EAGLE = "router adaptive gated".split()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_method_writes_the_text_of_plain_decoding_in_every_dtype(smollm2_folder, dtype):
    lanes = [{"method": name, "k": 3} for name in ALONE]
    lanes += [{"method": name, "model": model, "k": 2, "options": options} for name, model, options in HEADS]
    lanes += [{"method": name, "model": HEADS[0][1], "options": {"drafter": "eagle"}} for name in WITH_EAGLE]
    lanes += [{"method": name, "model": smollm2_folder, "k": 1} for name in ("draft_model", "cascade")]
    emulated = dtype == "float16" or (dtype == "bfloat16" and "ATEN_CPU_CAPABILITY" in os.environ)
    lanes = [lanes[2], *lanes[4:6]] if emulated else lanes  # a tree and both heads; a CPU computes it slowly
    session, changes = Session(), {"target": smollm2_folder, "dtype": dtype, "chat": True, "threads": 1}
    for first in range(0, len(lanes), 3):
        changes |= {"lanes": lanes[first : first + 3], "prompt": CHATS[2], "max_new_tokens": 8}
        trace = session.run(preset("embedded-ngram").with_changes(**changes))
        check_verdicts(trace)
        assert not [note for note in trace.notes if note.startswith(("passes after", "packed products"))]


@cache
def plain_answers(target, prompts):
    return [generated(target, torch.tensor([prompt]), "none", 20, Budget(3, 3))[0] for prompt in prompts]


def accepted_length(target, prompts, method, head, options):
    """Return the number of answers of a chain of three that are those of plain decoding, and its tokens per pass."""
    texts = [
        generated(target, torch.tensor([prompt]), method, 20, Budget(3, 3), model=head, **options) for prompt in prompts
    ]
    equal = sum(text == plain for (text, _), plain in zip(texts, plain_answers(target, prompts), strict=True))
    return equal, sum(len(text) for text, _ in texts) / sum(passes for _, passes in texts)


HEADS = ("eagle", "smollm2-eagle-3", {"draft": "chain"}), ("mlp_speculator", "smollm2-mlp-speculator", {})


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head[1])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.release)])
def test_the_shipped_heads_draft_for_pytorch_and_for_the_gguf_file(
    smollm2_folder, folder_target, gguf_target, dtype, head
):
    target = folder_target if dtype == "float32" else load_target(smollm2_folder, dtype=dtype)
    chats = [[{"role": "user", "content": chat}] for chat in CHATS[1:]]
    prompts = tuple(tuple(encode(folder_target.tokenizer, chat, 200)) for chat in chats)
    equal, length = accepted_length(target, prompts, *head)
    assert length > 1.2 and (equal == len(prompts) or not target.facts.same_bits)
    equal, other = accepted_length(gguf_target, prompts, *head)
    assert equal >= len(prompts) - 1  # the others: near-ties
    assert other / length == pytest.approx(1.0, abs=0.05)


def test_trees_on_a_gguf_file_write_the_text_of_plain_decoding(gguf_target):
    prompts = [
        torch.tensor([encode(gguf_target.tokenizer, [{"role": "user", "content": chat}], 200)]) for chat in CHATS
    ]
    trees = [generated(gguf_target, prompt, "eagle", 20, Budget(4, 12), model="smollm2-eagle-3") for prompt in prompts]
    plain = plain_answers(gguf_target, tuple(tuple(prompt[0].tolist()) for prompt in prompts))
    assert [text for text, _ in trees] == plain  # 3 of 15 while later tokens filled freed cells
    assert sum(passes for _, passes in trees) < 20 * len(prompts)


TASKS = {  # kind of text -> prompts, each with the next message of the chat
    "chat": "Explain to a child why {0} matters.|Now tell it as a short story about {1}.",
    "edit": "Correct the spelling: the {0} are big and it have a {1} on the rigt side.|Repeat it with {1} in front.",
    "code": "Write a Python class for a {0} with a method {1}().|Add type hints to the class and repeat it.",
    "emoji": "Write about a {0} with ten emoji 😀🎉 and in 中文, français.|Repeat it with {1} and more emoji.",
}
WORDS = "sky sea tree river bread clock train garden letter".split()
CHAINS = ("ngram", 3), ("ngram", 8), ("suffix", 5), ("suffix", 16)


def chats(count):
    """Return the messages of `count` chats of every kind."""
    words = list(pairwise(WORDS))[:count]
    return [[turn.format(*pair) for turn in task.split("|")] for pair in words for task in TASKS.values()]


def turn_texts(target, name, k, messages, sampling, tokens):
    """Yield the answer of one lane to every message, in a chat whose cache it keeps from turn to turn."""
    target = with_prefix_cache(target)
    drafter, history = load_drafter(name, target), []
    for message in messages:
        history.append({"role": "user", "content": message})
        prompt = torch.tensor([encode(target.tokenizer, history, 2000)])
        config = GenerationConfig(tokens, sampling, Budget(k, k), seed=3, stop_token_ids=())
        text = [token for event in generate(target, drafter, prompt, config) for token in event.emitted[0]]
        history.append({"role": "assistant", "content": target.tokenizer.decode(text)})
        yield text


def differing_chains(target, messages, temperature, tokens, chains=CHAINS):
    """Return the answers of chains that are not the text of plain decoding, with one kernel for every width."""
    sampling = Sampling(temperature=temperature)
    plain = list(turn_texts(target, "none", 1, messages, sampling, tokens))
    return [
        (messages[turn], name, k, temperature)
        for name, k in chains
        for turn, text in enumerate(turn_texts(target, name, k, messages, sampling, tokens))
        if text != plain[turn]
    ]


def exact_target(folder, dtype):
    target = load_model(folder, dtype, cpu=CpuSettings(1, "on")).target()
    if not target.facts.same_bits:
        pytest.skip(f"this CPU has no packed products in {dtype}")
    return target


def test_chains_write_the_text_of_plain_decoding_bit_for_bit_in_all_turns(smollm2_folder):
    target = exact_target(smollm2_folder, "bfloat16")
    for chat, temperature, chain in ((chats(1)[1], 0.0, CHAINS[3]), (chats(1)[3][:1], 0.8, CHAINS[0])):
        assert differing_chains(target, chat, temperature, 16, [chain]) == []


@pytest.mark.release
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_five_hundred_chains_write_the_text_of_plain_decoding(smollm2_folder, dtype, temperature):
    target = exact_target(smollm2_folder, dtype)
    for chat in chats(8):  # 32 chats of two turns with four chains, at two temperatures
        assert differing_chains(target, chat, temperature, 400) == []
