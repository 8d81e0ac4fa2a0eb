"""The plug-in package examples/hydra."""

import json
import os
from copy import deepcopy

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaModel

from specdemo.analysis.configs import method_in
from specdemo.analysis.predict import predict
from specdemo.costs.acceptance import from_mean
from specdemo.methods import load_drafter
from specdemo.methods.pairs import load_target
from specdemo.models.target import HFTarget
from specdemo.models.toy import ToyTarget
from specdemo_hydra import Hydra
from tests.generation import train
from tests.methods.heads import (
    Published,
    Reference,
    check_greedy,
    example,
    folder_with,
    linear,
    target_of,
)
from tests.models.tiny import VOCABULARY, build
from tests.plug_in import HYDRA, ROOT, install, registered_hydra, run

HIDDEN = 32
CONFIG = {"base_model_name_or_path": "some/llama", "grounded_heads": True, "hidden_state_offset": 0}
MLP = {**CONFIG, "hydra_num_heads": 3, "hydra_num_layers": 2, "hydra_head_arch": "mlp"}
PREFIX = {**MLP, "hydra_head_arch": "prefix-mlp"}


@pytest.fixture(scope="module", autouse=True)
def plug_in():
    with registered_hydra():
        yield


@pytest.fixture(scope="module")
def target():
    return target_of()


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


class HydraReference(Reference):
    """Heads over the hidden state and the embeddings. layer: of Hydra++, transforms the hidden states first."""

    def __init__(self, tensors, layers=2, layer=None, tap=-1):
        super().__init__(target_of(), tensors)
        self.layers, self.layer, self.tap, self.dropout = layers, layer, tap, int(layer is not None)

    def logits(self, text, drafted):
        hidden = self.hidden(text, self.tap)
        if self.layer is not None:
            hidden = self.layer(inputs_embeds=hidden[None]).last_hidden_state[0]
        embedded = self.target.embed(torch.tensor([text[-1], *drafted]))
        return self.head(torch.cat([hidden[-1], embedded.flatten()]), len(drafted))

    def head(self, x, i):
        blocks = [f"hydra_mlp.{i}.{layer * (1 + self.dropout) + self.dropout}" for layer in range(self.layers)]
        state = linear(self.w, f"{blocks[0]}.res_connection", x)
        state = state + F.silu(linear(self.w, f"{blocks[0]}.linear", x))
        for block in blocks[1:]:
            state = state + F.silu(linear(self.w, f"{block}.linear", state))
        return linear(self.w, f"hydra_lm_head.{i}.1" if self.dropout else f"hydra_lm_head.{i}", state)


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


@pytest.mark.release
def test_installed_package_runs_like_a_builtin_method(tmp_path):
    stories = load_target("stories")
    Hydra(stories, Hydra.fresh(stories)).save(tmp_path / "head", "stories")
    site = install(HYDRA, tmp_path)
    printed = run("-c", INSTALLED, str(tmp_path / "head"), PYTHONPATH=os.pathsep.join([str(site), str(ROOT)]))
    assert "Hydra" in printed


@pytest.mark.parametrize(("device", "tokens", "published"), [("rtx-3090", 3.26, 1.80), ("a100-80gb", 3.24, 2.09)])
def test_it_can_be_predicted(device, tokens, published):
    """Results of Spec-Bench's leaderboard."""
    assert method_in({"hydra_num_heads": 4}) == "hydra"
    settings = {"dtype": "float16", "engine": "eager", "context": 512, "ks": (4,), "nodes": 63}
    acceptance = from_mean(tokens, 4)
    found = predict("lmsys/vicuna-7b-v1.3", device=device, method="hydra", acceptance=acceptance, **settings)
    assert found.rows[0].speedup.low < published < found.rows[0].speedup.value


# formats


def published(tensors, config, caches=False, **settings):
    reference, file = HydraReference(tensors, **settings), "hydra_lm_head.pt"
    return Published("hydra", MLP | config, tensors, lambda head: reference, longest=3, file=file, caches=caches)


def hydra_plus_plus():
    layer, tensors = plus(target_of())
    return published(tensors, PREFIX, caches=True, layer=layer)


def hydra_of(layers):
    return published(hydra(layers=layers), {"hydra_num_layers": layers}, layers=layers)


CASES = {
    "hydra-1-layer": lambda: hydra_of(1),
    "hydra-2-layers": lambda: hydra_of(2),
    "hydra-4-layers": lambda: hydra_of(4),
    "hydra-below-the-last-layer": lambda: published(hydra(), {"hidden_state_offset": 1}, tap=2),
    "hydra++": hydra_plus_plus,
}


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
    loaded = {name for name in tensors if "embed" not in name.replace("prefix_embeding", "") and "inv_freq" not in name}
    assert again.head.state_dict().keys() == loaded
    for name in loaded:
        torch.testing.assert_close(again.head.state_dict()[name], tensors[name])
