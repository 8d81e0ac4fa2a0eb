"""The plug-in package examples/hydra."""

import json
import os
from copy import deepcopy

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaModel

from specdemo.core.protocol import Budget, GenerationConfig, Progress
from specdemo.core.sampling import Sampling
from specdemo.engine.loop import generate
from specdemo.methods import load_drafter
from specdemo.methods.heads.medusa import published_shape
from specdemo.methods.targets import load_target
from specdemo.models.target import HFTarget
from specdemo.models.toy import ToyTarget
from specdemo.prediction.acceptance import from_mean
from specdemo.prediction.drafts import method_in
from specdemo.prediction.predict import predict
from specdemo_hydra import Hydra
from tests.generation import rows_of, train
from tests.methods.test_medusa import HIDDEN, check_greedy, example, folder_with
from tests.models.tiny import SIZES, VOCABULARY, build, texts
from tests.plug_in import HYDRA, ROOT, install, registered_hydra, run

CONFIG = {"base_model_name_or_path": "some/llama", "grounded_heads": True, "hidden_state_offset": 0}
MLP = {**CONFIG, "hydra_num_heads": 3, "hydra_num_layers": 2, "hydra_head_arch": "mlp"}
PREFIX = {**MLP, "hydra_head_arch": "prefix-mlp"}


@pytest.fixture(scope="module", autouse=True)
def plug_in():
    with registered_hydra():
        yield


@pytest.fixture(scope="module")
def target():
    return HFTarget(build("llama"), name="some/llama")


def hydra(heads=3, layers=2, dropout=0, hidden=HIDDEN):
    """Return the tensors of hydra_lm_head.pt. dropout: 1 if the names count dropout modules."""
    rng = torch.Generator().manual_seed(3)

    def random(*shape):
        return torch.randn(shape, generator=rng) * 0.2

    tensors = {"input_embed_fn.weight": random(VOCABULARY, hidden)}
    for i in range(heads):
        first, width = f"hydra_mlp.{i}.{dropout}.", (i + 2) * hidden
        tensors |= {first + "linear.weight": random(hidden, width), first + "linear.bias": random(hidden)}
        tensors |= {first + "res_connection.weight": random(hidden, width)}
        tensors |= {first + "res_connection.bias": random(hidden)}
        shared = random(hidden, hidden), random(hidden)
        for layer in range(1, layers):
            name = f"hydra_mlp.{i}.{layer * (1 + dropout) + dropout}.linear."
            tensors |= {name + "weight": shared[0].clone(), name + "bias": shared[1].clone()}
        lm_head = f"hydra_lm_head.{i}.1." if dropout else f"hydra_lm_head.{i}."
        tensors |= {lm_head + "weight": random(VOCABULARY, hidden), lm_head + "bias": random(VOCABULARY)}
    return tensors


def reference(tensors, x, head, layers=2, dropout=0):
    name = f"hydra_mlp.{head}.{dropout}."
    state = F.linear(x, tensors[name + "res_connection.weight"], tensors[name + "res_connection.bias"])
    state = state + F.silu(F.linear(x, tensors[name + "linear.weight"], tensors[name + "linear.bias"]))
    for layer in range(1, layers):
        name = f"hydra_mlp.{head}.{layer * (1 + dropout) + dropout}.linear."
        state = state + F.silu(F.linear(state, tensors[name + "weight"], tensors[name + "bias"]))
    lm_head = f"hydra_lm_head.{head}.1." if dropout else f"hydra_lm_head.{head}."
    return F.linear(state, tensors[lm_head + "weight"], tensors[lm_head + "bias"])


def prefix_of(target):
    """Return a decoder layer as in the authors' code, and its tensors under their names."""
    config = deepcopy(target.model.config)
    config.num_hidden_layers = 1
    torch.manual_seed(5)
    layer = LlamaModel(config).eval().requires_grad_(False)
    stored = {f"prefix_embeding_layer.{name}": tensor for name, tensor in layer.state_dict().items()}
    stored["prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    return layer, stored


def plus(target):
    layer, stored = prefix_of(target)
    return layer, stored | hydra(dropout=1)


# the package


INSTALLED = """
import sys
from specdemo.__main__ import main
from specdemo.methods import METHODS
from specdemo.methods.recipes import recipes
from specdemo.testing import check_method

assert list(METHODS)[-1] == "hydra" and recipes()["hydra"] == "Hydra, 4 heads"
check_method("hydra")
assert main(["run", "embedded-medusa", "--method", "hydra", "--model", sys.argv[1], "--max-new-tokens", "8"]) == 0
"""


def test_installed_package_runs_like_a_builtin_method(tmp_path):
    stories = load_target("stories")
    Hydra(stories, Hydra.fresh(stories)).save(tmp_path / "head", "stories")
    site = install(HYDRA, tmp_path)
    printed = run("-c", INSTALLED, str(tmp_path / "head"), PYTHONPATH=os.pathsep.join([str(site), str(ROOT)]))
    assert "Hydra" in printed


@pytest.mark.parametrize(("device", "tokens", "documented"), [("rtx-3090", 3.26, 2.24), ("a100-80gb", 3.24, 2.52)])
def test_it_can_be_predicted(device, tokens, documented):
    """The predictions of docs/what-if.md."""
    assert method_in({"hydra_num_heads": 4}) == "hydra"
    settings = {"dtype": "float16", "engine": "eager", "context": 512, "ks": (4,), "nodes": 63}
    acceptance = from_mean(tokens, 4)
    found = predict("lmsys/vicuna-7b-v1.3", device=device, method="hydra", acceptance=acceptance, **settings)
    assert found.rows[0].speedup.value == pytest.approx(documented, abs=0.01)


# formats


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_hydra(tmp_path, target, layers):
    tensors = hydra(layers=layers)
    heads = Hydra.load(folder_with(tmp_path, tensors, MLP, "hydra_lm_head.pt"), target)
    assert (len(heads), heads.layers) == (3, layers)
    for i in range(3):
        x = torch.randn(2, 5, (i + 2) * HIDDEN)
        torch.testing.assert_close(heads(x, i), reference(tensors, x, i, layers))


def test_hydra_plus_plus(tmp_path, target):
    layer, tensors = plus(target)
    drafter = load_drafter("hydra", target, folder_with(tmp_path, tensors, PREFIX, "hydra_lm_head.pt"))
    batch = example(target)
    states = layer(inputs_embeds=batch.hidden[-1]).last_hidden_state
    x = torch.cat([states[:, :-2], target.embed(batch.outputs[:, :-2]), target.embed(batch.outputs[:, 1:-1])], -1)
    expected = reference(tensors, x, 1, dropout=1)
    got = list(drafter._training_steps(batch))[1][0]
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_prefix_layer_continues_after_ragged_rows(tmp_path, target):
    """After every step its state equals that of one pass over the whole text."""
    layer, tensors = plus(target)
    drafter = load_drafter("hydra", target, folder_with(tmp_path, tensors, PREFIX, "hydra_lm_head.pt"))
    drafter.start(2, Sampling(), torch.Generator())
    read = [torch.empty(0, HIDDEN), torch.empty(0, HIDDEN)]
    for lengths in ([5, 5], [1, 3], [2, 0], [3, 1]):
        columns = max(lengths)
        tokens, hidden = texts(2, columns + 1), torch.randn(2, columns, HIDDEN)
        drafter.observe(Progress(tokens[:, :-1], tokens[:, 1:], lengths, {-1: hidden}))
        draft = drafter.propose(Budget(1, 1))
        for row, length in enumerate(lengths):
            read[row] = torch.cat([read[row], hidden[row, :length]])
            if length:
                state = layer(inputs_embeds=read[row][None]).last_hidden_state[0, -1]
                x = torch.cat([state, target.embed(tokens[row, length])])
                chances = reference(tensors, x, 0, dropout=1).softmax(-1)
                assert draft.tokens[row, 0] == chances.argmax()
                assert float(draft.confidence[row, 0]) == pytest.approx(float(chances.max()), rel=1e-3)
    assert drafter.history_bytes > 0
    drafter.release()
    assert drafter.history_bytes == 0


def test_a_layer_below_the_last_one(tmp_path, target):
    config = {**MLP, "hidden_state_offset": 1}
    drafter = load_drafter("hydra", target, folder_with(tmp_path, hydra(), config, "hydra_lm_head.pt"))
    assert drafter.taps == (SIZES["num_hidden_layers"] - 1,)
    check_greedy(target, drafter)


@pytest.mark.parametrize(
    ("tensors", "config", "reason"),
    [
        (hydra(hidden=16), MLP, "hidden size 16 and vocabulary 61, .* choose the target some/llama"),
        ({"attn.weight": torch.ones(2)}, {**MLP, "hydra_head_arch": "eagle-attn"}, "has eagle-attn heads"),
        ({n: t for n, t in hydra().items() if "res_" not in n}, MLP, "choose grounded heads"),
        (
            {n: t for n, t in hydra().items() if n != "hydra_mlp.2.1.linear.bias"},
            MLP,
            "2.1.linear.bias: expected shape",
        ),
    ],
)
def test_other_files_are_refused(tmp_path, target, tensors, config, reason):
    source = folder_with(tmp_path, tensors, config, "hydra_lm_head.pt")
    with pytest.raises(ValueError, match=reason):
        Hydra.load(source, target)


def test_hydra_plus_plus_needs_a_llama(tmp_path, target):
    source = folder_with(tmp_path, plus(target)[1], PREFIX, "hydra_lm_head.pt")
    with pytest.raises(ValueError, match="choose a Llama model as the target"):
        Hydra.load(source, HFTarget(build("qwen3")))
    with pytest.raises(ValueError, match="choose a Llama model as the target"):
        Hydra.load(source, ToyTarget(VOCABULARY, hidden_size=HIDDEN))


# drafts


def test_every_node_follows_from_its_path(tmp_path, target):
    tensors = hydra()
    source = folder_with(tmp_path, tensors, MLP, "hydra_lm_head.pt")
    drafter = load_drafter("hydra", target, source, nodes=63, tree="mc_sim_7b_63")
    drafter.start(2, Sampling(), torch.Generator())
    tokens, hidden = texts(2, 3), torch.randn(2, 2, HIDDEN)
    drafter.observe(Progress(tokens[:, :2], tokens[:, 1:], [2, 1], {-1: hidden}))
    draft = drafter.propose(Budget(8, 63))
    shape = published_shape("mc_sim_7b_63")
    assert draft.nodes == 61 and draft.probs is None
    assert draft.parents.tolist() == [list(shape.parents[:61])] * 2
    for row, (state, root) in enumerate([(hidden[0, 1], tokens[0, 2]), (hidden[1, 0], tokens[1, 1])]):
        paths = {0: torch.cat([state, target.embed(root)])}
        for node in range(draft.nodes):
            x = paths[shape.parents[node]]
            chances, ranked = reference(tensors, x, shape.levels[node] - 1).softmax(-1).sort(descending=True)
            assert draft.tokens[row, node] == ranked[shape.ranks[node]]
            assert float(draft.confidence[row, node]) == pytest.approx(float(chances[shape.ranks[node]]), rel=1e-3)
            paths[node + 1] = torch.cat([x, target.embed(draft.tokens[row, node])])


def test_greedy_text_with_a_prefix_layer(tmp_path, target):
    source = folder_with(tmp_path, plus(target)[1], PREFIX, "hydra_lm_head.pt")
    drafter = load_drafter("hydra", target, source, nodes=8)
    train(drafter, example(target))
    assert len(check_greedy(target, drafter)) > 2


# training


def test_new_heads_equal_lm_head(target):
    heads, x = Hydra.fresh(target, heads=2), torch.randn(3, 3 * HIDDEN)
    assert len(heads) == 2 and not any(p.requires_grad for p in heads.parameters())
    torch.testing.assert_close(heads(x, 1), target.lm_head(x[:, :HIDDEN]))


def test_heads_are_trained_on_the_text(target):
    """Head 1 reads the state, the next token and the one after it. Its label is the distribution after those."""
    drafter, batch = load_drafter("hydra", target, Hydra.fresh(target, heads=2)), example(target)
    with torch.no_grad():
        for parameter in drafter.head.parameters():
            parameter.normal_(0.0, 0.1)
    logits, expected = list(drafter._training_steps(batch))[1]
    column = 4
    read = [batch.hidden[-1][0, column], *target.embed(batch.outputs[0, column : column + 2])]
    torch.testing.assert_close(logits[0, column], drafter.head(torch.cat(read), 1))
    assert torch.equal(expected[0, column], batch.probs[0, column + 2])


@pytest.mark.parametrize("kind", ["mlp", "prefix-mlp"])
def test_saved_file_loads_in_the_official_code(tmp_path, target, kind):
    tensors, config = (hydra(), MLP) if kind == "mlp" else (plus(target)[1], PREFIX)
    source = folder_with(tmp_path / "read", tensors, config, "hydra_lm_head.pt")
    drafter = load_drafter("hydra", target, source)
    drafter.measure(example(target))
    drafter.save(tmp_path / "written", "some/llama")
    written = json.loads((tmp_path / "written" / "config.json").read_text())
    assert {name: written[name] for name in config} == config
    again = load_drafter("hydra", target, str(tmp_path / "written"))
    assert again.head.rates == drafter.head.rates
    prompts, drafted = texts(2, 6), []
    for one in (drafter, again):
        events = list(generate(target, one, prompts, GenerationConfig(8, budget=Budget(3, 3), stop_token_ids=())))
        drafted.append([e.drafted for e in events])
    assert drafted[0] == drafted[1] and rows_of(events)
    loaded = {name for name in tensors if "embed" not in name.replace("prefix_embeding", "") and "inv_freq" not in name}
    assert again.head.state_dict().keys() == loaded
    for name in loaded:
        torch.testing.assert_close(again.head.state_dict()[name], tensors[name])
