"""Greedy output against `generate` of transformers, token for token: every method, many models, alone and in batches.

Before a release 50 prompts, in every commit a part of the batches.
"""

import copy
import random
from collections import Counter
from functools import cache

import pytest
import torch
from transformers import (
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from specdemo.bench.sweeps import shipped_lanes
from specdemo.core.protocol import Budget, GenerationConfig
from specdemo.core.sampling import Sampling
from specdemo.engine.comparison import Lane
from specdemo.engine.loop import generate
from specdemo.methods import METHODS, load_drafter, method, model_method
from specdemo.models.fused import fuse_layers
from specdemo.models.load import load_target
from specdemo.models.ref import ModelRef
from specdemo.models.target import HFTarget
from specdemo.models.text import encode
from tests.generation import rows_of
from tests.models.tiny import CALLED, CHAINS, HYBRIDS, Replayed, build, texts

VOCABULARY = 48
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, **HEADS)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, **HEADS)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SMALL, **HEADS, sliding_window=9, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
        )
    ),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=256, eos_token_id=5, bos_token_id=5
        )
    ),
}
STORIES = [
    "Once upon a time, there was a little girl named Lily.",
    "Tom had a red ball. Tom had a red ball. Tom had a red ball.",
    "O",
    "!",
    "\n\n-",
    "One day",
    'The dragon said, "Hello! Who are you?"',
    "naïve café — “quotes”, ½ and €",
    "日本語のテキスト",
    "🐉🏰 a dragon and a castle",
    "a a a a a a a a a a a a a a a a",
    "Ben and Mia went to the park.\n\nTell it again with Tom, not Ben.\n\n",
    "<b>bold</b> &amp; {{x}} ${1+1}",
    "1 2 3 4 5 6 7 8 9 10",
    "The end.",
]


def settle(model):
    """Scale up random weights so that greedy text does not collapse, and choose a stop token that occurs now and
    then. Return the greedy output of every batch of prompts with the stop token.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0 if "emb" in name or "wte" in name or "wpe" in name else 2.0)
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id, config.bos_token_id = None, 0, None
    answers = [oracle(model.eval(), prompts, 24) for prompts in id_prompts()]
    met = Counter(token for rows in answers for row in rows for token in set(row[3:]))
    stop = min(met, key=lambda token: abs(met[token] - 15))
    model.config.eos_token_id = model.generation_config.eos_token_id = stop
    return [[until(stop, row) for row in rows] for rows in answers]


@cache
def random_model(architecture):
    """Return a random model, and every batch of prompts with the model's greedy output of up to 24 tokens."""
    torch.manual_seed(1)
    model = MODELS[architecture]()
    return model, list(zip(id_prompts(), settle(model), strict=True))


def near_copy(model):
    """Return a draft model that agrees with the target often but not always, with a mask token for PARD."""
    draft = copy.deepcopy(model)
    draft.config.pard_token = 3
    rng = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=rng) * 0.08 * parameter.std())
    return draft


def id_prompts():
    """Return 50 prompts in batches: 8 of 5 rows of one length, and 10 of one row."""
    rng = random.Random(0)
    lengths = [*rng.sample(range(2, 40), 7), 1]
    batches = [[[rng.randrange(VOCABULARY) for _ in range(length)] for _ in range(5)] for length in lengths]
    batches += [[[1, 2, 3, 4] * n] for n in range(1, 6)] + [[[7] * n] for n in (2, 9, 30, 60, 90)]
    assert sum(map(len, batches)) == 50
    return batches


def oracle(model, prompts, n):
    """Return the greedy output of every row, up to the stop token."""
    ids, stop = torch.tensor(prompts), model.generation_config.eos_token_id
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False)
    return [until(stop, row) for row in output[:, ids.shape[1] :].tolist()]


def until(stop, row):
    return row[: row.index(stop) + 1] if stop in row else row


def decode(target, drafter, prompts, n, k, nodes=0, sampling=None):
    config = GenerationConfig(n, sampling or Sampling(), Budget(k, nodes or k))
    return rows_of(list(generate(target, drafter, torch.tensor(prompts), config)))


@pytest.fixture(scope="module")
def thin(pytestconfig):
    """Return a function that keeps the batches which this run decodes, one in `step` of them."""
    return lambda batches, step=4: batches[:: 1 if pytestconfig.getoption("--all") else step]


@pytest.mark.parametrize("architecture", MODELS)
def test_random_models(architecture, thin):
    model, answers = random_model(architecture)
    stopped = sum(len(row) < 24 for _, rows in answers for row in rows)
    assert stopped >= 3, "too few prompts meet the stop token, maybe in a draft"
    for name in ("none", "draft_model", "ngram"):
        target = HFTarget(model)
        drafter = load_drafter(name, target, near_copy(model) if name == "draft_model" else None)
        for index, (prompts, expected) in enumerate(thin(answers)):
            got = decode(target, drafter, prompts, 24, k=1 + index % 6)
            assert got == expected, f"{name}, prompts {prompts}"


@pytest.fixture(scope="module")
def random_llama():
    """Return a random Llama, and every batch of prompts with the model's greedy output of up to 16 tokens."""
    model, answers = random_model("llama")
    return model, [(prompts, [row[:16] for row in rows]) for prompts, rows in answers]


@pytest.fixture(scope="module")
def fused_llama(random_llama):
    model = copy.deepcopy(random_llama[0])
    fuse_layers(model)
    return model


def weights_for(name, target, model):
    """Return a new head or a draft model for a method; None if it needs neither."""
    cls = method(model_method(name))
    if not cls.needs_model:
        return None
    return cls.fresh(target) if hasattr(cls, "fresh") else near_copy(model)


@pytest.mark.parametrize("passes", ["plain", "recorded"])
@pytest.mark.parametrize("name", [n for n in METHODS if n not in ("none", "draft_model", "ngram") and method(n).exact])
def test_every_other_method(random_llama, fused_llama, name, passes, thin):
    model, answers = random_llama
    target, answers = HFTarget(model), thin(answers)
    if passes == "recorded":
        target, answers = HFTarget(fused_llama, capture=Replayed()), answers[1::2]
    drafter = load_drafter(name, target, weights_for(name, target, model))
    for index, (prompts, expected) in enumerate(answers):
        assert decode(target, drafter, prompts, 16, 1 + index % 6, 12) == expected, f"prompts {prompts}"


DRAWN = Sampling(0.8, top_k=20, min_p=0.02)


@pytest.fixture(scope="module")
def plain_texts():
    """Return a table of sampled texts of plain decoding."""
    return {}


@pytest.mark.parametrize("passes", ["plain", "recorded"])
@pytest.mark.parametrize("name", [n for n in METHODS if n != "none" and method(n).exact])
def test_sampled_text_is_that_of_plain_decoding(random_llama, fused_llama, name, passes, plain_texts):
    """Covers chains and trees, batches, and noise that is drawn before a CUDA graph."""
    model, answers = random_llama
    target = HFTarget(model) if passes == "plain" else HFTarget(fused_llama, capture=Replayed())
    for options in ({}, {"draft": "chain"}) if name == "eagle" else ({},):
        drafter = load_drafter(name, target, weights_for(name, target, model), **options)
        for index, (prompts, _) in enumerate(answers[::6]):
            if (passes, index) not in plain_texts:
                plain_texts[passes, index] = decode(target, load_drafter("none", target), prompts, 16, 0, 0, DRAWN)
            text = decode(target, drafter, prompts, 16, 1 + index % 6, 12, DRAWN)
            assert text == plain_texts[passes, index], f"{options}, prompts {prompts}"


@pytest.mark.parametrize("architecture", [*CHAINS, *HYBRIDS, *CALLED, "mistral", "gpt_oss"])
def test_recurrent_hybrid_and_windowed_targets(architecture):
    """Covers text longer than the window, and drafts that are accepted, cut short and rejected. Layers are fused where
    possible, and called by transformers."""
    model = build(architecture)
    fused = copy.deepcopy(model)
    fuse_layers(fused)
    target, draft = HFTarget(fused), HFTarget(copy.deepcopy(fused))
    assert target.facts.kernels.startswith("fused" if architecture in (*CALLED, "mistral") else "transformers")
    prompt = texts(1, 13)
    settings = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}
    expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)[0, 13:].tolist()
    config = GenerationConfig(16, budget=Budget(4, 4), stop_token_ids=())
    for name, given in (("none", None), ("ngram", None), ("draft_model", draft)):
        events = list(generate(target, load_drafter(name, target, given), prompt, config))
        assert [token for event in events for token in event.emitted[0]] == expected
    assert len(events) < 7  # drafts from the same weights are accepted


@pytest.fixture(scope="module")
def stories():
    return load_target("stories")


@pytest.mark.parametrize("lane", [Lane(method="none"), *shipped_lanes()], ids=lambda lane: lane.name or lane.method)
def test_everything_that_ships(stories, lane, thin):
    drafter = load_drafter(lane.method, stories, lane.model, **lane.options)
    nodes = lane.options.get("nodes", 0)
    for index, prompts in enumerate(thin(story_prompts(), 8)):
        k = 1 + 2 * index % 7
        assert decode(stories, drafter, prompts, 16, k, max(k, nodes)) == story_answer(prompts), f"prompts {prompts}"


@cache
def story_prompts():
    """Return 50 prompts in batches: 15 of one row, and 7 of 5 rows, cut off on the left to one length."""
    tokenizer = plain_stories().tokenizer
    batches = [(tuple(encode(tokenizer, text, 256)),) for text in STORIES]
    for start in STORIES[:7]:
        rows = [encode(tokenizer, f"{start} {end}", 256) for end in ("Suddenly,", "The cat", "It was", "“Oh”", "And")]
        batches.append(tuple(tuple(row[-min(map(len, rows)) :]) for row in rows))
    assert sum(map(len, batches)) == 50
    return batches


@cache
def plain_stories():
    """Return the target with the kernels of transformers. The lanes use the package's own."""
    return load_target("stories", kernels="transformers")


@cache
def story_answer(prompts):
    return oracle(plain_stories().model, prompts, 16)


def test_the_embedded_folders_are_plain_hugging_face_folders(stories):
    tokenizer = AutoTokenizer.from_pretrained(ModelRef("stories").path)
    text = "Once upon a time, naïve 🐉 dragons.\n\nThe end."
    assert tokenizer.decode(encode(stories.tokenizer, text, 99), skip_special_tokens=True) == text
    model = LlamaForCausalLM.from_pretrained(ModelRef("stories-draft-wide").path)
    assert model.config.num_hidden_layers == 1
