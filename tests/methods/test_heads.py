"""Heads of all kinds on one set of checks. What is special to a kind is tested in its own file."""

import json

import pytest
import torch

from specdemo.core.protocol import Progress
from specdemo.methods import BUILT_IN, load_drafter, method
from specdemo.methods.heads.medusa import Medusa
from specdemo.models.target import HFTarget
from specdemo.models.toy import ToyTarget
from tests.generation import train
from tests.methods.test_medusa import check_greedy, check_sampling, example
from tests.models.tiny import build
from tests.plug_in import registered_hydra

TREE = {"nodes": 12, "tree": "vicuna_7b_stage2"}
# name: sizes of a new head, options of drafting
GREEDY = {
    "medusa": [({}, {}), ({}, {"nodes": 12}), ({}, TREE)],
    "hydra": [({}, {}), ({}, {"nodes": 12}), ({}, TREE)],
    "mlp_speculator": [({}, {}), ({}, {"draft": "tree", "nodes": 12}), ({}, {"draft": "tree"})],
    "mtp": [({}, {}), ({"modules": 2}, {}), ({"modules": 3, "kind": "parallel"}, {})],
}
RANKED, SAMPLED = ({"nodes": 6, "draft": "ranked"}, [{"nodes": nodes, "draft": "sampled"} for nodes in (0, 6)])
SAMPLING = {
    "medusa": [({}, options) for options in (RANKED, *SAMPLED)],
    "hydra": [({}, options) for options in (RANKED, *SAMPLED)],
    "mlp_speculator": [({}, {"draft": draft, "nodes": 6}) for draft in ("chain", "tree")],
    "mtp": [({"modules": 2}, {}), ({"modules": 3, "kind": "parallel"}, {})],
    "gemma4_assistant": [({}, {}), ({"centroids": 5}, {})],
}
TRAINED = {  # sizes of a new head, number of its metrics
    "medusa": [({"heads": 3}, 3)],
    "hydra": [({"heads": 3}, 3)],
    "mlp_speculator": [({"n_predict": 3}, 3)],
    "mtp": [({}, 3), ({"modules": 2}, 2), ({"modules": 3, "kind": "parallel"}, 3)],
}


@pytest.fixture(scope="module", autouse=True)
def plug_in():
    with registered_hydra():
        yield


@pytest.fixture(scope="module")
def target():
    return HFTarget(build("llama"), name="some/llama")


def every(table):
    return [pytest.param(name, *row, id=f"{name}-{row}") for name, rows in table.items() for row in rows]


def fresh(name, target, sizes):
    torch.manual_seed(1)
    return method(name).fresh(target, **sizes)


@pytest.mark.parametrize(("name", "sizes", "options"), every(GREEDY))
def test_greedy_output_equals_plain_decoding(target, name, sizes, options):
    drafter = load_drafter(name, target, fresh(name, target, sizes), **options)
    train(drafter, example(target, drafter.taps[0]))
    assert {0, 1, 2} <= check_greedy(target, drafter)


@pytest.mark.parametrize(("name", "sizes", "options"), every(SAMPLING))
def test_sampled_text_is_drawn_from_the_target(name, sizes, options):
    target = ToyTarget(5, seed=6)
    check_sampling(load_drafter(name, target, fresh(name, target, sizes), **options), target)


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize(("name", "sizes", "metrics"), every(TRAINED))
def test_training_lowers_the_loss(target, name, sizes, metrics, hard):
    drafter = load_drafter(name, target, fresh(name, target, sizes))
    batch = example(target, drafter.taps[0])
    if hard:
        batch = Progress(batch.inputs, batch.outputs, batch.lengths, batch.hidden)
    before = drafter.loss(batch)[1]
    losses, after = train(drafter, batch, 30)
    assert losses[-1] < 0.8 * losses[0]
    assert list(before) == list(after) == [f"agree_{i}" for i in range(1, metrics + 1)]
    assert all(after[name] > before[name] + 0.1 for name in after)


@pytest.mark.parametrize("name", ["medusa", "hydra", "mlp_speculator", "mtp"])
def test_half_precision_heads_read_full_precision_states(target, name):
    check_greedy(target, load_drafter(name, target, fresh(name, target, {}).to(torch.bfloat16)))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("hydra", "head for method 'medusa'"),
        ("mlp_speculator", "head for method 'medusa'"),
        ("mtp", "has no multi-token prediction"),
    ],
)
def test_medusa_heads_are_refused_by_others(tmp_path, target, name, reason):
    Medusa(target, Medusa.fresh(target)).save(tmp_path, "some/llama")
    with pytest.raises(ValueError, match=reason):
        method(name).load(str(tmp_path), target)


@pytest.mark.parametrize("name", [name for name in BUILT_IN if getattr(method(name), "config_keys", None)])
def test_unknown_config_keys_that_could_change_the_forward_pass_are_rejected(tmp_path, name):
    """Keys of training, keys that are switched off and keys of other things are harmless."""
    target = ToyTarget(16, hidden_size=32)
    method(name)(target, fresh(name, target, {})).save(tmp_path, "toy")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    harmless = {"attn_gate": False, "residual_multiplier": 1.0, "head_loss_weight": 2.0, "trained_by": "somebody"}
    harmless |= {"use_last_layernorm": True, "parallel_draft_step": None, "num_anchors": 8}
    file.write_text(json.dumps(config | harmless))
    method(name).load(str(tmp_path), target)
    unknown = {"attn_logit_softcapping": 30.0, "gated_residual": True, "layer_order": "reversed"}
    for key, value in (unknown | {"use_last_layernorm": False, "parallel_draft_step": 4}).items():
        for part in [part for part in ("dflash_config", "eagle_config", "text_config") if part in config]:
            file.write_text(json.dumps(config | {part: config[part] | {key: value}}))
            with pytest.raises(ValueError, match=f"has {key} .*, which is not supported"):
                method(name).load(str(tmp_path), target)
        file.write_text(json.dumps(config | {key: value}))
        with pytest.raises(ValueError, match=f"has {key} .*, which is not supported"):
            method(name).load(str(tmp_path), target)


PUBLISHED = {  # keys that published files have besides those that the readers use
    "eagle": [
        {"bias": True, "qkv_bias": True, "pretraining_tp": 1},  # SafeAILab/EAGLE
        {"draft_num_hidden_layers": 1},  # deepseek-ai/DeepSpec
        {
            "attention_head_dim": 8,
            "cla_share_factor": 2,
            "norm_type": "rms",
            "use_rotary_pos_emb": True,
        },  # Tencent/AngelSlim
        {  # NVIDIA Model-Optimizer
            "eagle_config": {
                "use_aux_hidden_state": True,
                "use_input_layernorm_in_first_layer": True,
                "use_last_layernorm": True,
                "use_mtp_layernorm": False,
                "next_layer_regular": True,
                "parallel_draft_step": 1,
                "parallel_draft_heads_num_layers": None,
            }
        },
    ],
    "dflash": [{"attention_mode": "gqa"}, {"num_anchors": 512}],  # sgl-project/SpecForge, Tencent/AngelSlim
}


@pytest.mark.parametrize(("name", "keys"), [(name, keys) for name, found in PUBLISHED.items() for keys in found])
def test_published_keys_without_effect_are_accepted(tmp_path, name, keys):
    target = ToyTarget(16, hidden_size=32)
    method(name)(target, fresh(name, target, {})).save(tmp_path, "toy")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    nested = {part: config[part] | value for part, value in keys.items() if part in config}
    file.write_text(json.dumps(config | keys | nested))
    method(name).load(str(tmp_path), target)
