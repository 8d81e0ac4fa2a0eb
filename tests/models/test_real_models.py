"""Exactness on real models: llama.cpp's own greedy loop, transformers' `generate`, and every method against plain
decoding."""

import pytest
import torch

import specdemo
from specdemo.core.protocol import Budget, GenerationConfig
from specdemo.engine.loop import generate
from specdemo.methods import load_drafter
from specdemo.models.load import load_target
from specdemo.models.text import encode

CHATS = [
    "Explain to a ten-year-old why the sky is blue, in six sentences.",
    "Write a Python function that reverses a list. Then write it again with type hints.",
    "Correct the spelling: I has a red bal and a grean boks and my frend has a blu bal.",
]
TEXT = "The capital of France is Paris. The capital of Germany is"


def written(target, name, prompt, tokens, **drafter):
    config = GenerationConfig(tokens, budget=Budget(4, 12))
    events = generate(target, load_drafter(name, target, **drafter), prompt, config)
    return [token for event in events for token in event.emitted[0]]


@pytest.mark.parametrize("fixture", ["smollm2_gguf", "gemma_gguf"])
def test_plain_gguf_output_is_that_of_llamacpps_own_loop(fixture, request):
    path = request.getfixturevalue(fixture)
    from llama_cpp import Llama

    target = load_target(path)
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
        ("smollm2_gguf", ("draft_model", "adaptive")),
        ("smollm2_gguf", ("cascade", "router")),
        ("gemma_gguf", ("ngram", "suffix", "lookahead")),
        ("gemma_gguf", ("draft_model", "adaptive")),  # with another vocabulary
    ],
)
def test_every_method_of_a_gguf_target_is_plain_decoding_except_for_near_ties(fixture, methods, request):
    path, draft = request.getfixturevalue(fixture), request.getfixturevalue("smollm2_gguf")
    model = {} if "ngram" in methods else {"model": draft}
    lanes = [{"method": name, "k": 4, **model} for name in methods]
    changes = {"prompt": CHATS[2], "chat": path == draft, "max_new_tokens": 40, "threads": 1}
    trace = specdemo.run("embedded-ngram", target=path, lanes=lanes, **changes)
    assert {row["verdict"] for row in trace.comparison} <= {"identical", "rounding"}
    assert sum(row["identical"] for row in trace.comparison) >= len(lanes) - 1
    assert sum(lane.summary["accepted"] for lane in trace.lanes[1:]) > 0


def test_output_of_a_folder_is_that_of_transformers(smollm2_folder):
    target = load_target(smollm2_folder, kernels="transformers")
    prompts = [torch.tensor([encode(target.tokenizer, [{"role": "user", "content": chat}], 200)]) for chat in CHATS]
    expected = [
        target.model.generate(prompt, max_new_tokens=24, do_sample=False)[0, prompt.shape[1] :].tolist()
        for prompt in prompts
    ]
    target = load_target(smollm2_folder)
    for name in ("none", "ngram", "suffix", "layer_skip"):
        assert [written(target, name, prompt, 24) for prompt in prompts] == expected, name
