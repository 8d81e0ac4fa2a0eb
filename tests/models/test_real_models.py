"""Exactness on real models: llama.cpp's own greedy loop, transformers' `generate`, and every method against plain
decoding."""

import re
from itertools import pairwise

import pytest
import torch

import specdemo
from specdemo.core.protocol import Budget, GenerationConfig
from specdemo.core.sampling import Sampling
from specdemo.engine.loop import generate
from specdemo.methods import load_drafter
from specdemo.methods.recipes import HEAD_RECIPES, share_minutes, untrained_drafter
from specdemo.models.cpu_plan import CpuSettings
from specdemo.models.load import load_model, load_target
from specdemo.models.prefix_reuse import with_prefix_cache
from specdemo.models.text import encode

CHATS = [
    "Explain to a ten-year-old why the sky is blue, in six sentences.",
    "Write a Python function that reverses a list. Then write it again with type hints.",
    "Correct the spelling: I has a red bal and a grean boks and my frend has a blu bal.",
]
TEXT = "The capital of France is Paris. The capital of Germany is"


@pytest.fixture(scope="module")
def folder_target(smollm2_folder):
    return load_target(smollm2_folder, dtype="float32")


@pytest.fixture(scope="module")
def gguf_target(smollm2_gguf):
    return load_target(smollm2_gguf)


@pytest.fixture(scope="module")
def gemma_target(gemma_gguf):
    return load_target(gemma_gguf)


def written(target, name, prompt, tokens, **drafter):
    config = GenerationConfig(tokens, budget=Budget(4, 12))
    events = generate(target, load_drafter(name, target, **drafter), prompt, config)
    return [token for event in events for token in event.emitted[0]]


@pytest.mark.parametrize("fixture", ["gguf_target", "gemma_target"])
def test_plain_gguf_output_is_that_of_llamacpps_own_loop(fixture, request):
    from llama_cpp import Llama

    target = request.getfixturevalue(fixture)
    path = target.weights.path
    ids = target.tokenizer.encode(TEXT)
    own = Llama(path, n_ctx=512, n_threads=1, n_threads_batch=1, n_gpu_layers=0, flash_attn=True, verbose=False)
    assert own.tokenize(TEXT.encode()) == ids
    expected = [token for token, _ in zip(own.generate(ids, temp=0.0), range(40), strict=False)]
    stop = next((place + 1 for place, token in enumerate(expected) if token in target.stop_token_ids), 40)
    assert written(target, "none", torch.tensor([ids]), 40) == expected[:stop]
    own.close()


@pytest.mark.parametrize(
    ("fixture", "methods"),
    [
        ("smollm2_gguf", ("ngram", "suffix", "lookahead")),
        ("smollm2_gguf", ("draft_model", "cascade", "router")),
        pytest.param("smollm2_gguf", ("adaptive",), marks=pytest.mark.release),
        ("gemma_gguf", ("draft_model",)),  # with another vocabulary
        pytest.param("gemma_gguf", ("ngram", "suffix", "lookahead"), marks=pytest.mark.release),
        pytest.param("gemma_gguf", ("adaptive",), marks=pytest.mark.release),
    ],
)
def test_every_method_of_a_gguf_target_is_plain_decoding_except_for_near_ties(fixture, methods, request):
    path, draft = request.getfixturevalue(fixture), request.getfixturevalue("smollm2_gguf")
    model = {} if "ngram" in methods else {"model": draft}
    lanes = [{"method": name, "k": 4, **model} for name in methods]
    changes = {"prompt": CHATS[2], "chat": path == draft, "max_new_tokens": 16, "threads": 1}
    trace = specdemo.run("embedded-ngram", target=path, lanes=lanes, **changes)
    assert {row["verdict"] for row in trace.comparison} <= {"identical", "rounding"}
    assert sum(row["identical"] for row in trace.comparison) >= len(lanes) - 1
    assert sum(lane.summary["accepted"] for lane in trace.lanes[1:]) > 0


def test_layer_states_of_a_gguf_model_are_those_of_transformers(gguf_target, folder_target):
    target, reference = gguf_target, folder_target
    ids, taps = torch.tensor([reference.tokenizer.encode(TEXT)]), (0, 2, 15, 27)
    states, expected = (each.start(ids, taps).hidden for each in (target, reference))
    for tap in taps:  # the file's 8-bit activations round
        assert torch.cosine_similarity(states[tap], expected[tap].float(), dim=-1).min() > 0.999, tap
    torch.testing.assert_close(target.embed(ids), reference.embed(ids))
    assert target.embed.weight.data_ptr() == target.lm_head.weight.data_ptr()  # the file has one matrix for both


def test_embeddings_of_a_gguf_model_are_scaled_as_its_first_layer_reads_them(gemma_target):
    target, ids = gemma_target, torch.tensor([[100, 2000, 30000]])
    torch.testing.assert_close(target.embed(ids), target.lm_head.weight[ids] * 640**0.5)  # of transformers' Gemma 3
    with pytest.raises(ValueError, match=r"does not return the inputs of layers \[0\] of this model"):
        target.start(ids, (0,))  # llama.cpp 0.3.36 has them for some architectures only


def test_output_of_a_folder_is_that_of_transformers(smollm2_folder, folder_target):
    target = load_target(smollm2_folder, dtype="float32", kernels="transformers")
    prompt = torch.tensor([encode(target.tokenizer, [{"role": "user", "content": CHATS[2]}], 200)])
    expected = target.model.generate(prompt, max_new_tokens=16, do_sample=False)[0, prompt.shape[1] :].tolist()
    for name in ("none", "ngram", "suffix", "layer_skip"):
        assert written(folder_target, name, prompt, 16) == expected, name


def accepted_length(target, prompts, method, head, options):
    """Return the answers of plain decoding and of a chain of three, and the tokens per pass of the chain."""
    config, answers, passes = GenerationConfig(20, budget=Budget(3, 3)), {"none": [], method: []}, 0
    for name, given in (("none", {}), (method, {"model": head} | options)):
        for prompt in prompts:
            events = list(generate(target, load_drafter(name, target, **given), prompt, config))
            answers[name].append([token for event in events for token in event.emitted[0]])
            passes += len(events) if name == method else 0
    return answers["none"], answers[method], sum(map(len, answers[method])) / passes


HEADS = ("eagle", "smollm2-eagle-3", {"draft": "chain"}), ("mlp_speculator", "smollm2-mlp-speculator", {})


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head[1])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.release)])
def test_the_shipped_heads_draft_for_pytorch_and_for_the_gguf_file(
    smollm2_folder, folder_target, gguf_target, dtype, head
):
    target = folder_target if dtype == "float32" else load_target(smollm2_folder, dtype=dtype)
    chats = [[{"role": "user", "content": chat}] for chat in CHATS[1:]]
    prompts = [torch.tensor([encode(folder_target.tokenizer, chat, 200)]) for chat in chats]
    plain, drafted, length = accepted_length(target, prompts, *head)
    assert length > 1.2 and (drafted == plain or not target.same_bits)
    plain, drafted, other = accepted_length(gguf_target, prompts, *head)
    assert sum(map(list.__eq__, plain, drafted)) >= len(prompts) - 1  # the others: near-ties
    assert other / length == pytest.approx(1.0, abs=0.05)


TASKS = {  # kind of text -> prompts, each with the next message of the chat
    "chat": "Explain to a child why {0} matters.|Now tell it as a short story about {1}.",
    "edit": "Correct the spelling: the {0} are big and it have a {1} on the rigt side.|Repeat it with {1} in front.",
    "code": "Write a Python class for a {0} with a method {1}().|Add type hints to the class and repeat it.",
    "emoji": "Write about a {0} with ten emoji 😀🎉 and in 中文, français.|Repeat it with {1} and more emoji.",
}
WORDS = "sky sea tree river bread clock train garden letter".split()
CHAINS = ("ngram", 3), ("ngram", 8), ("suffix", 5), ("suffix", 16)


def test_a_training_that_would_not_end_in_time_names_the_minutes_that_it_needs(smollm2_folder, tmp_path):
    target = load_target(smollm2_folder, dtype="float32", kernels="transformers")
    drafter = untrained_drafter(HEAD_RECIPES["medusa"], target)
    too_short = r"^--minutes 0\.1 is too short for medusa on \S+: only [\d,]+ tokens of text and \d+ training steps"
    with pytest.raises(ValueError, match=too_short) as error:
        share_minutes("medusa", drafter, target, 0.1, tmp_path / "cache", tmp_path)
    assert float(re.search(r"--minutes ([\d.]+) is enough$", str(error.value))[1]) > 0.1
    assert not (tmp_path / "cache").exists()  # nothing was collected before


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


def exact_target(folder, dtype):
    target = load_model(folder, dtype, cpu=CpuSettings(1, "on")).target()
    if not target.same_bits:
        pytest.skip(f"this CPU has no packed products in {dtype}")
    return target


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


def test_chains_write_the_text_of_plain_decoding_bit_for_bit_in_all_turns(smollm2_folder):
    target = exact_target(smollm2_folder, "bfloat16")
    for chat, temperature, chain in ((chats(1)[1], 0.0, CHAINS[3]), (chats(1)[3], 0.8, CHAINS[0])):
        assert differing_chains(target, chat, temperature, 16, [chain]) == []


@pytest.mark.release
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_five_hundred_chains_write_the_text_of_plain_decoding(smollm2_folder, dtype, temperature):
    target = exact_target(smollm2_folder, dtype)
    for chat in chats(8):  # 32 chats of two turns with four chains, at two temperatures
        assert differing_chains(target, chat, temperature, 400) == []
