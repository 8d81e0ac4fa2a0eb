"""Prediction layers of GGUF files on a real llama.cpp, against a numpy forward of their tensors and plain decoding."""

from dataclasses import replace

import numpy
import pytest
import torch

pytest.importorskip("llama_cpp", reason="llama.cpp is not installed: pip install llama-cpp-python gguf")
pytest.importorskip("gguf")

from specdemo.core.protocol import Budget, GenerationConfig
from specdemo.core.sampling import Sampling
from specdemo.engine.loop import generate
from specdemo.methods import load_drafter
from specdemo.methods.pairs import check_pair
from specdemo.models.llamacpp_context import Inputs
from specdemo.models.llamacpp_prediction import PredictionContext, PredictionLayer
from specdemo.models.load import load_target
from specdemo.models.memory import gguf_footprint
from specdemo.models.ref import ModelRef
from specdemo.presets.drafters import drafters_of
from specdemo.presets.files import preset
from specdemo.presets.pair import pair
from specdemo.presets.serve import served
from tests.generation import rows_of
from tests.gguf_random import (
    EPSILON,
    HEAD,
    HEADS,
    KV_HEADS,
    ROPE_BASE,
    VOCABULARY,
    WIDTH,
    shape_of,
    write_random,
    write_tensors,
)
from tests.models.fake_hub import serve

LAYER = "blk.4."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("nextn")


@pytest.fixture(scope="module")
def tensors(folder):
    return write_random(folder / "qwen35.gguf", "qwen35", shape_of("qwen35", prediction=True))


@pytest.fixture(scope="module")
def target(folder, tensors):
    return load_target(str(folder / "qwen35.gguf"))


def norm(x, weight):
    return x / numpy.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * weight


def rotate(x, positions, size=8):
    """Turn the first `size` numbers of heads [T, N, E], in halves."""
    angle = positions[:, None, None] / ROPE_BASE ** (numpy.arange(size // 2) / (size // 2))
    first, second = x[..., : size // 2], x[..., size // 2 : size]
    cos, sin = numpy.cos(angle), numpy.sin(angle)
    return numpy.concatenate([first * cos - second * sin, second * cos + first * sin, x[..., size:]], -1)


class PredictionReference:
    """Qwen3.5's prediction layer in float64, with the keys and values of all pairs."""

    def __init__(self, tensors):
        self.t = {name.removeprefix(LAYER): values.astype(numpy.float64) for name, values in tensors.items()}
        self.keys = self.values = numpy.zeros((0, KV_HEADS, HEAD))

    def project(self, x, name, heads):
        return (x @ self.t[f"{name}.weight"].T).reshape(len(x), heads, -1)

    def read(self, tokens, states, position):
        """Read pairs in place of those from a position on; return logits [T, V] and states [T, H]."""
        t, kept = self.t, position - 1  # the first pair is at position 1
        embedded = norm(t["token_embd.weight"][tokens], t["nextn.enorm.weight"])
        x = numpy.concatenate([embedded, norm(states, t["nextn.hnorm.weight"])], -1) @ t["nextn.eh_proj.weight"].T
        y, places = norm(x, t["attn_norm.weight"]), numpy.arange(position, position + len(tokens))
        query, gate = numpy.split(self.project(y, "attn_q", HEADS), 2, -1)
        query = rotate(norm(query, t["attn_q_norm.weight"]), places)
        key = rotate(norm(self.project(y, "attn_k", KV_HEADS), t["attn_k_norm.weight"]), places)
        self.keys = numpy.concatenate([self.keys[:kept], key])
        self.values = numpy.concatenate([self.values[:kept], self.project(y, "attn_v", KV_HEADS)])
        keys, values = (numpy.repeat(each, HEADS // KV_HEADS, 1) for each in (self.keys, self.values))
        scores = numpy.einsum("qhd,khd->hqk", query, keys) / HEAD**0.5
        scores[:, numpy.arange(1, len(keys) + 1)[None] > places[:, None]] = -numpy.inf
        weights = numpy.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        attended = numpy.einsum("hqk,khd->qhd", weights, values) / (1 + numpy.exp(-gate))
        x = x + attended.reshape(len(x), -1) @ t["attn_output.weight"].T
        y = norm(x, t["post_attention_norm.weight"])
        hidden = y @ t["ffn_gate.weight"].T
        x = x + (hidden / (1 + numpy.exp(-hidden)) * (y @ t["ffn_up.weight"].T)) @ t["ffn_down.weight"].T
        state = norm(x, t.get("nextn.shared_head_norm.weight", t["output_norm.weight"]))
        return state @ t["output.weight"].T, state


def cosine(one, other):
    return ((one * other).sum(-1) / numpy.linalg.norm(one, axis=-1) / numpy.linalg.norm(other, axis=-1)).min()


def output(target, drafter, prompt, config):
    events = list(generate(target, drafter, prompt, config))
    return rows_of(events), len(events)


def prompts(rows, length):
    return torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))


def test_logits_and_states_are_those_of_numpy(target, tensors):
    context, reference = (
        PredictionContext(PredictionLayer(ModelRef(target.name), target.weights), 256, 1),
        PredictionReference(tensors),
    )
    tokens, states = prompts(1, 60)[0].tolist(), numpy.random.default_rng(2).standard_normal((60, WIDTH))
    for begin, end in ((0, 40), (40, 60), (30, 35)):  # the last after a rejection
        context.remove(0, begin + 1)
        inputs = Inputs.of_text(tokens[begin:end], begin + 1, 0)
        found = context.read(inputs, states[begin:end].astype(numpy.float32))
        expected = reference.read(tokens[begin:end], states[begin:end], begin + 1)
        assert min(map(cosine, found, expected)) > 0.999999
        assert (found[0].argmax(-1) == expected[0].argmax(-1)).all()


def test_every_draft_of_a_generation_is_that_of_numpy_over_the_whole_text(target, tensors):
    prompt, whole = prompts(1, 20), load_target(target.name)
    text, accepted = prompt[0].tolist(), 0
    config = GenerationConfig(40, budget=Budget(4, 4), stop_token_ids=())
    for event in generate(target, load_drafter("mtp", target), prompt, config):
        if event.index:
            states = whole.start(torch.tensor([text[:-1]]), (-1,)).hidden[-1][0].double().numpy()
            reference, expected = PredictionReference(tensors), []
            logits, state = reference.read(text[1:], states, 1)
            for place in range(len(event.drafted[0])):
                expected.append(int(logits[-1].argmax()))
                logits, state = reference.read(expected[-1:], state[-1:], len(text) + place)
            assert event.drafted[0] == expected
            accepted += len(event.emitted[0]) - 1
        text += event.emitted[0]
    assert 5 < accepted < 35


def test_states_of_a_prompt_come_without_its_logits(target, monkeypatch):
    states = target.start(prompts(1, 700), (-1,)).hidden[-1]
    assert target.weights.states_alone
    target._context = None
    monkeypatch.setattr(target.weights, "states_alone", False)
    torch.testing.assert_close(target.start(prompts(1, 700), (-1,)).hidden[-1], states)
    target._context = None


@pytest.mark.parametrize(
    ("architecture", "rows", "sampling", "k", "length"),
    [
        ("qwen35", 1, Sampling(temperature=0.0), 12, 700),  # longer than a batch, and than what is taken back at once
        ("glm4moe", 3, Sampling(temperature=1.0, top_k=8), 4, 30),
        ("qwen3next", 1, Sampling(temperature=0.0), 4, 30),
        *(
            pytest.param(name, rows, sampling, k, 30, marks=pytest.mark.release)
            for name in ("qwen35", "qwen35moe", "qwen3next", "glm4moe")
            for rows in (1, 3)
            for sampling in (Sampling(temperature=0.0), Sampling(temperature=1.0, top_k=8))
            for k in (1, 8)
        ),
    ],
)
def test_texts_with_drafts_are_plain_texts(architecture, rows, sampling, k, length, folder, tensors):
    path = folder / f"{architecture}.gguf"
    if not path.is_file():
        write_random(path, architecture, shape_of(architecture, prediction=True))
    target, prompt = load_target(str(path)), prompts(rows, length)
    config = GenerationConfig(200, sampling, Budget(k, k), 3, stop_token_ids=())
    plain, _ = output(target, load_drafter("none", target), prompt, config)
    drafted, passes = output(target, load_drafter("mtp", target), prompt, config)
    assert drafted == plain and passes < 200  # some were right


def test_a_file_of_its_own_drafts_the_same_and_one_of_another_model_is_rejected(target, tensors, folder):
    alone = {name: values for name, values in tensors.items() if not name.startswith("blk.") or name.startswith(LAYER)}
    path, shape = folder / "mtp-qwen35.gguf", shape_of("qwen35", prediction=True)
    write_tensors(path, "qwen35", shape, alone)
    config = GenerationConfig(40, budget=Budget(4, 4), stop_token_ids=())
    body = {name: values for name, values in tensors.items() if not name.startswith(LAYER)}
    write_tensors(folder / "body.gguf", "qwen35", shape_of("qwen35"), body)
    without = load_target(str(folder / "body.gguf"))
    own, separate, added = (
        [event.drafted for event in generate(model, load_drafter("mtp", model, layer), prompts(2, 30), config)]
        for model, layer in ((target, None), (target, str(path)), (without, str(path)))
    )
    assert own == separate == added
    footprint = gguf_footprint(ModelRef(path), target.settings)
    assert (footprint.per_token, footprint.per_text) == (KV_HEADS * 2 * HEAD * 4, 256 * VOCABULARY * 4)  # one layer
    write_random(folder / "other.gguf", "qwen35", {**shape, "block_count": 9})
    with pytest.raises(ValueError, match=r"the prediction layer of another model: layers before it 8, not 4; choose"):
        load_drafter("mtp", target, str(folder / "other.gguf"))


@pytest.mark.parametrize(
    ("shape", "lacks", "message"),
    [
        (
            {"nextn_predict_layers": 0, "block_count": 4},
            "blk.4.",
            r"has no prediction layer \(blk.N.nextn.\*\); download",
        ),
        ({}, "nextn.enorm", r"states a prediction layer and lacks blk.4.nextn.enorm.weight; download a file"),
        (
            {"nextn_predict_layers": 2, "block_count": 6},
            "x",
            r"has 2 prediction layers, which specdemo cannot run; llama",
        ),
    ],
)
def test_files_at_which_llamacpp_would_end_the_process_are_one_line(shape, lacks, message, tensors, target, tmp_path):
    path = tmp_path / "bad.gguf"
    kept = {name: values for name, values in tensors.items() if lacks not in name}
    write_tensors(path, "qwen35", shape_of("qwen35", prediction=True) | shape, kept)
    with pytest.raises(ValueError, match=message):
        load_drafter("mtp", target, str(path))


def test_it_is_offered_and_served(target):
    path = target.name
    (lane,) = (lane for lane in pair(ModelRef(path)).lanes if lane.method == "mtp")
    fit = check_pair(target, ModelRef(path), "mtp")
    assert (fit.method, fit.fits, fit.reason) == ("mtp", True, "prediction layer of this model")
    for opened in (None, target):
        assert lane.model == path and replace(fit, place="in the target") in drafters_of(ModelRef(path), opened)
    command = [*served(pair(ModelRef(path)), "llama-server")][-1].command
    assert command[command.index("--spec-type") + 1] == "draft-mtp" and "--spec-draft-model" not in command


def test_a_preset_drafts_with_the_layer_in_the_file_of_its_target(folder, tensors, monkeypatch, tmp_path):
    file, larger = "Qwen3.6-27B-Q4_K_M.gguf", "unsloth/Qwen3.6-27B-MTP-GGUF:UD-Q4_K_XL"
    content = (folder / "qwen35.gguf").read_bytes()
    repository = {"Qwen3.6-27B-UD-Q4_K_XL.gguf": b"", "mmproj-BF16.gguf": b"", file: content}
    chosen = preset("gguf-qwen3.6-27b-mtp-q4-k-m")
    config = GenerationConfig(40, budget=Budget(4, 4), stop_token_ids=())
    with serve({"unsloth/Qwen3.6-27B-MTP-GGUF": repository}, monkeypatch, tmp_path) as hub:
        target = load_target(chosen.target)
        lane = chosen.lanes[0]
        plain, _ = output(target, load_drafter("none", target), prompts(1, 30), config)
        drafted, passes = output(target, load_drafter(lane.method, target, lane.model), prompts(1, 30), config)
    assert drafted == plain and passes < 36
    assert {name for name, _ in hub.requests} == {file}
    fits = drafters_of(ModelRef(larger))
    assert [fit.drafter for fit in fits if fit.method == "mtp"] == [larger]  # and no other quantisation
