"""Heads of all kinds on one set of checks. What is special to a kind is tested in its own file."""

import json
import re
from functools import cache
from itertools import islice
from math import exp

import pytest
import torch

from specdemo.core.protocol import Budget, GenerationConfig, Progress
from specdemo.core.sampling import Sampling, to_probs
from specdemo.engine.loop import generate
from specdemo.methods import BUILT_IN, detect_method, load_drafter, method
from specdemo.methods.heads import network
from specdemo.methods.heads.medusa import Medusa, published_shape
from specdemo.methods.pairs import check_pair
from specdemo.models import packed
from specdemo.models.checkpoints import open_checkpoint
from specdemo.models.ref import ModelRef
from specdemo.models.sources import no_progress
from specdemo.models.target import HFTarget
from specdemo.models.toy import ToyTarget
from specdemo.training.losses import Objective
from tests.examples import test_hydra
from tests.generation import train
from tests.methods import test_dflash, test_eagle, test_medusa, test_mlp_speculator, test_mtp
from tests.methods.heads import (
    batch_of,
    check_greedy,
    check_sampling,
    example,
    folder_with,
    paths_of,
    ragged_steps,
    target_of,
)
from tests.models.tiny import Replayed, force_layout, texts
from tests.plug_in import registered_hydra

FILES = {
    "eagle": test_eagle.CASES,
    "medusa": test_medusa.CASES,
    "hydra": test_hydra.CASES,
    "mlp_speculator": test_mlp_speculator.CASES,
    "mtp": test_mtp.CASES,
    "dflash": test_dflash.CASES,
}
EQUAL = {  # file with the same head in other words -> one that is compared with a reference
    "medusa-1-layer-safetensors": "medusa-1-layer",
    "medusa-vllm-prefix": "medusa-vllm",
    "mlp-tied-copies": "mlp-tied",
    "mlp-tied-copies-bin": "mlp-tied",
    "mlp-tied-bin": "mlp-tied",
    "dflash-z-lab-inside": "dflash-z-lab",
    "dflash-names": "dflash-z-lab",
    "dflash-not-causal": "dflash-z-lab",
    "dflash-window-causal": "dflash-window-is_causal",
    "dflash-window-full-types": "dflash-window-without-types",
}
ALL = {name: case for cases in FILES.values() for name, case in cases.items()}
CASES = {name: case for name, case in ALL.items() if name not in EQUAL}
ONE_EACH = [next(iter(cases)) for cases in FILES.values()]
CHAINS = {"eagle": {"draft": "chain"}, "medusa": {"draft": "sampled"}, "hydra": {"draft": "sampled"}}
TREES = {
    "eagle": {"top_k": 3},
    "medusa": {"nodes": 7},
    "hydra": {"nodes": 7},
    "mlp_speculator": {"draft": "tree", "nodes": 7},
    "dflash": {"nodes": 7},
}


@pytest.fixture(scope="module", autouse=True)
def plug_in():
    with registered_hydra():
        yield


@pytest.fixture(scope="module", autouse=True)
def sampled_once():
    """Sample the text that decides between conventions once per target, not for every file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "sample_target_text", cache(network.sample_target_text))
        yield


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return CASES[request.param]()


@pytest.fixture(scope="module")
def head(case, tmp_path_factory):
    source = folder_with(tmp_path_factory.mktemp("published"), case.tensors, case.config, case.file)
    loaded = method(case.method).load(source, case.target)
    # a file of a known family leaves nothing open
    assert case.method != "dflash" or (len(loaded.conventions) == 1 and not loaded.note)
    return loaded


WITH_TREES = [name for kind in TREES for name in FILES.get(kind, ()) if name in CASES]
GREEDY, SAMPLED = Sampling(), Sampling(temperature=0.8, top_k=7)


@pytest.fixture
def run(request, case, head, tmp_path, monkeypatch):
    """Return a target and the head, run in one of the ways in which drafts are computed."""
    if request.param == "packed":
        if not torch.backends.mkldnn.is_available():
            pytest.skip("this torch has no oneDNN")
        force_layout(monkeypatch, packed.Layout("packed"))
        head = method(case.method).load(folder_with(tmp_path, case.tensors, case.config, case.file), case.target)
        assert packed.packed_bytes(head)
    target = case.target
    if request.param == "graphs":
        target = HFTarget(target.model, name=target.name, capture=Replayed())
    yield target, head
    assert target.note == ""
    if request.param == "graphs":
        assert target.new_graph_capture().replayed > 6


def in_every_commit(case, *values, when):
    marks = () if when else pytest.mark.release
    return pytest.param(case, *values, marks=marks, id="-".join([case, *(v for v in values if isinstance(v, str))]))


@pytest.mark.parametrize(
    ("case", "run", "mode"),
    [
        in_every_commit(case, run, mode, when=often or case in ONE_EACH)
        for case in CASES
        for run, mode, often in [
            ("eager", "sampled", case in WITH_TREES),  # which record trees in every commit
            ("graphs", "sampled", case not in WITH_TREES),
            ("packed", "greedy", False),
            ("eager", "greedy", False),
            ("graphs", "greedy", False),
        ]
    ],
    indirect=["case", "run"],
)
def test_chains_are_those_of_the_reference(case, run, mode):
    """Compare every token's distribution, on texts of different lengths."""
    (target, head), sampling = run, {"greedy": GREEDY, "sampled": SAMPLED}[mode]
    reference, drafter = case.reference(head), load_drafter(case.method, target, head, **CHAINS.get(case.method, {}))
    for written, draft in ragged_steps(target, drafter, Budget(6, 6), sampling):
        assert draft.nodes == case.longest and (draft.probs is None) == sampling.greedy
        assert not sampling.greedy or torch.equal(drafter.propose(Budget(6, 6)).tokens, draft.tokens)
        for row, text in enumerate(written):
            for i, path in enumerate(paths_of(draft, row)[1:] if text else ()):
                logits = reference.logits(text, path[:-1])
                q = logits.softmax(-1) if sampling.greedy else to_probs(logits, sampling)
                torch.testing.assert_close(draft.confidence[row, i], q[path[-1]], atol=1e-5, rtol=1e-3)
                if sampling.greedy:
                    assert path[-1] == int(logits.argmax())
                else:
                    torch.testing.assert_close(draft.probs[row, i], q, atol=1e-5, rtol=1e-3)
    assert drafter.graph_note == "" and (drafter.history_bytes > 0) == case.caches
    drafter.release()
    drafter.release_graphs()
    assert drafter.history_bytes == 0


@pytest.mark.parametrize(
    ("case", "run"),
    [
        in_every_commit(case, run, when=run == "graphs" or case in ONE_EACH)
        for case in WITH_TREES
        for run in ("graphs", "eager")
    ],
    indirect=True,
)
def test_trees_are_those_of_the_reference(case, run):
    target, head = run
    reference, drafter = case.reference(head), load_drafter(case.method, target, head, **TREES[case.method])
    for written, draft in ragged_steps(target, drafter, Budget(3, 7)):
        assert draft.probs is None and draft.nodes == (3 if getattr(head, "mask_hidden", None) is not None else 7)
        for row, text in enumerate(written):
            if not text:
                continue
            paths = paths_of(draft, row)
            assert len(set(paths)) == len(paths) and max(map(len, paths)) <= 3
            for slot, path in enumerate(paths):
                q = reference.logits(text, path).softmax(-1) if len(path) < 3 else None
                children = (draft.parents[row] == slot).nonzero()[:, 0]
                if len(children):
                    tokens = draft.tokens[row, children]
                    assert tokens.tolist() == q.topk(len(children)).indices.tolist()
                    torch.testing.assert_close(draft.confidence[row, children], q[tokens], atol=1e-5, rtol=1e-3)


def check_equal_drafts(target, *drafters):
    steps = [list(islice(ragged_steps(target, each, Budget(6, 6), Sampling(1.0)), 2)) for each in drafters]
    for (_, draft), (_, same) in zip(*steps, strict=True):
        assert torch.equal(draft.tokens, same.tokens)
        torch.testing.assert_close(draft.probs, same.probs, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize(("name", "other"), EQUAL.items())
def test_the_same_head_in_other_words_drafts_the_same(name, other, tmp_path):
    drafters = []
    for each in (name, other):
        case = ALL[each]()
        source = folder_with(tmp_path / each, case.tensors, case.config, case.file)
        drafters.append(load_drafter(case.method, case.target, source, **CHAINS.get(case.method, {})))
        assert case.method != "dflash" or not drafters[-1].note  # nothing was left open
    check_equal_drafts(case.target, *drafters)


def test_saved_file_drafts_the_same(case, tmp_path):
    """A head that can be trained is saved, and loaded for inference."""
    source, options = folder_with(tmp_path / "read", case.tensors, case.config, case.file), CHAINS.get(case.method, {})
    head = method(case.method).load_trainable(source, case.target)
    drafter = load_drafter(case.method, case.target, head, **options)
    if case.unsaved:
        with pytest.raises(ValueError, match=case.unsaved):
            drafter.save(tmp_path / "saved", "some/target")
        return
    drafter.save(tmp_path / "saved", "some/target")
    assert detect_method(open_checkpoint(str(tmp_path / "saved"))) == case.method
    again = load_drafter(case.method, case.target, str(tmp_path / "saved"), **options)
    assert not any(p.requires_grad for p in again.head.parameters())
    check_equal_drafts(case.target, drafter, again)


@pytest.mark.parametrize("case", ONE_EACH, indirect=True)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_file_with_a_number_that_is_not_finite_is_refused(case, tmp_path, wrong):
    source = folder_with(tmp_path, case.tensors, case.config, case.file)
    read = method(case.method).open(ModelRef(source), case.target, no_progress).tensors
    name = [name for name, tensor in read.items() if tensor.is_floating_point()][-1]
    damaged = case.tensors[name].clone(memory_format=torch.contiguous_format)
    damaged.view(-1)[-1] = wrong
    source = folder_with(tmp_path, case.tensors | {name: damaged}, case.config, case.file)
    with pytest.raises(ValueError, match=f" has NaN or infinity in {re.escape(name)}; fetch it again"):
        load_drafter(case.method, case.target, source)


@pytest.mark.parametrize("case", ONE_EACH, indirect=True)
@pytest.mark.parametrize(
    "changes",
    [
        {"scale": float("nan")},
        {"text_config": {"scales": [1.0, float("inf")]}},
        {"scale": 1e308},
        {"scale": -(10**400)},
    ],
)
def test_a_config_with_a_number_that_32_bits_cannot_hold_is_refused(case, tmp_path, changes):
    source = folder_with(tmp_path, case.tensors, case.config | changes, case.file)
    with pytest.raises(ValueError, match=f"^{re.escape(source)} has scales? .+ in its config, not a finite"):
        load_drafter(case.method, case.target, source)
    assert not check_pair(case.target, ModelRef(source)).fits


def test_infinity_stays_where_a_target_with_its_own_head_states_it(tmp_path):
    case = test_mtp.CASES["mtp-deepseek-llama"]()
    source = folder_with(tmp_path, case.tensors, case.config | {"time_step_limit": [0.0, float("inf")]})
    assert check_pair(case.target, ModelRef(source)).fits


@pytest.mark.parametrize("options", [{}, {"p_min": 0.3}], ids=str)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["medusa-vllm", "dspark-rnn", "eagle"])
def test_weights_whose_logits_overflow_end_in_one_line_with_the_file(tmp_path, name, sampling, options):
    case = next(make for case, make in CASES.items() if case.startswith(name))()
    large = {n: t * 1e30 if t.is_floating_point() and t.ndim > 1 else t for n, t in case.tensors.items()}
    source = folder_with(tmp_path, large, case.config, case.file)
    drafter = load_drafter(case.method, case.target, source, **options)
    config = GenerationConfig(8, sampling, Budget(4, 8), stop_token_ids=())
    with pytest.raises(ValueError, match=f"^the logits of {re.escape(source)} are not finite: .+float16$"):
        list(generate(case.target, drafter, texts(1, 4), config))


OF_CONFIG = {  # name of a case -> what its config states, and the sentence about it
    "medusa-vllm": ({"num_heads": 5, "num_hidden_layers": 3}, "num_heads 5 (the file has 3), num_hidden_layers 3"),
    "eagle-official": ({"num_hidden_layers": 2, "head_dim": 512}, "num_hidden_layers 2 (the file has 1), head_dim 512"),
    "mtp-deepseek-llama": ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers 2 (the file has 1)"),
    "mtp-parallel": ({"n_future_tokens": 9}, "n_future_tokens 9 (the file has"),
    "dflash-z-lab": (
        {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 2},
        "num_hidden_layers 3 (the file has 2)",
    ),
}


@pytest.mark.parametrize("case", OF_CONFIG, indirect=True)
def test_the_file_decides_where_its_config_states_other_sizes(case, head, request, tmp_path):
    changes, words = OF_CONFIG[request.node.callspec.params["case"]]
    assert "Its config states" not in head.note
    source = folder_with(tmp_path, case.tensors, case.config | changes, case.file)
    other = method(case.method).load(source, case.target)
    assert other.note.startswith(f"Its config states {words}") and "; the file decides." in other.note
    assert {n: t.shape for n, t in other.state_dict().items()} == {n: t.shape for n, t in head.state_dict().items()}
    assert words in check_pair(case.target, ModelRef(source)).reason


def weights(name, head, steps):
    """Return the weights of the draft positions in the loss."""
    if name == "mtp":
        return [0.51, 0.31, 0.18] if len(head) == 1 else [1 / steps] * steps
    if name == "dflash":
        decayed = [exp(-i / 4) for i in range(steps)]
        return [weight / sum(decayed) for weight in decayed]
    decay, first = {"medusa": (0.8, 1), "eagle": (0.8, 0)}.get(name, (1.0, 0))
    return [decay ** (i + first) for i in range(steps)]


@pytest.mark.parametrize(
    ("case", "labels"),
    [
        in_every_commit(case, labels, when=labels == "probabilities" or case in ONE_EACH)
        for case in CASES
        for labels in ("probabilities", "tokens")
    ],
    indirect=["case"],
)
def test_the_loss_is_that_of_the_reference(case, head, labels):
    """Every step of training reads what the same draft token reads."""
    if not case.trains:
        pytest.skip("is not trained")
    target, drafter = case.target, load_drafter(case.method, case.target, head)
    tokens, taps = texts(2, 14 if case.method == "dflash" else 8, seed=8), tuple({*drafter.taps, -1})
    batch = batch_of(target, taps, tokens, probs=labels == "probabilities")
    loss, metrics = drafter.loss(batch)
    reference, total = case.reference(head), 0.0
    one_hot = torch.nn.functional.one_hot(batch.outputs, target.vocab_size).float()
    for i, weight in enumerate(weights(case.method, head, len(metrics))):
        losses, right = [], []
        for row, p in enumerate(one_hot if batch.probs is None else batch.probs):
            text = [*batch.inputs[row, :1].tolist(), *batch.outputs[row].tolist()]
            every = range(1, len(text) - 1 - i)
            for root in drafter._anchors(batch.inputs)[row].tolist() if case.method == "dflash" else every:
                drafted, following = text[root + 1 : root + 1 + i], p[root + i]
                losses.append(reference.loss(text[: root + 1], drafted, following))
                right.append(reference.logits(text[: root + 1], drafted).argmax() == following.argmax())
        losses = [loss for loss in losses if loss is not None]
        total += weight * torch.stack(losses).mean()
        assert metrics[f"agree_{i + 1}"] == pytest.approx(float(torch.stack(right).float().mean()))
    torch.testing.assert_close(loss, total, rtol=1e-4, atol=1e-4)


# heads with weights of their own making, trained on the target's text

TREE = {"nodes": 12, "tree": "vicuna_7b_stage2"}
# name: sizes of a new head, options of drafting
OUTPUT = {
    "medusa": [({}, {}), ({}, {"nodes": 12}), ({}, TREE)],
    "hydra": [({}, {}), ({}, {"nodes": 12}), ({}, TREE)],
    "mlp_speculator": [({}, {}), ({}, {"draft": "tree", "nodes": 12}), ({}, {"draft": "tree"})],
    "mtp": [({}, {}), ({"modules": 2}, {}), ({"modules": 3, "kind": "parallel"}, {})],
    "eagle": [({"kind": "eagle1"}, {}), ({}, {"top_k": 3}), ({"draft_vocab": 20}, {"draft": "chain"})],
    "dflash": [({"block_size": 4}, {}), ({"block_size": 4}, {"nodes": 12})],
}
BEST, DRAWN = ({"nodes": 6, "draft": "ranked"}, [{"nodes": nodes, "draft": "sampled"} for nodes in (0, 6)])
SAMPLING = {
    "medusa": [({}, options) for options in (BEST, *DRAWN)],
    "hydra": [({}, options) for options in (BEST, *DRAWN)],
    "mlp_speculator": [({}, {"draft": draft, "nodes": 6}) for draft in ("chain", "tree")],
    "mtp": [({"modules": 2}, {}), ({"modules": 3, "kind": "parallel"}, {})],
    "gemma4_assistant": [({}, {}), ({"centroids": 5}, {})],
}
TRAINED = {  # sizes of a new head, number of its metrics
    "medusa": [({"heads": 3}, 3)],
    "hydra": [({"heads": 3}, 3)],
    "mlp_speculator": [({"n_predict": 3}, 3)],
    "mtp": [({}, 3), ({"modules": 2}, 2), ({"modules": 3, "kind": "parallel"}, 3)],
    "eagle": [({"kind": "eagle1"}, 1), ({"intermediate": 24}, 4), ({"draft_vocab": 20}, 4)],
    "dflash": [({"block_size": 4}, 3)],
}


@pytest.fixture(scope="module")
def target():
    return target_of()


def every(table):
    return [pytest.param(name, *row, id=f"{name}-{row}") for name, rows in table.items() for row in rows]


def fresh(name, target, sizes):
    torch.manual_seed(1)
    return method(name).fresh(target, **sizes)


@pytest.mark.parametrize(("name", "sizes", "options"), every(OUTPUT))
def test_greedy_output_equals_plain_decoding(target, name, sizes, options):
    drafter = load_drafter(name, target, fresh(name, target, sizes), **options)
    train(drafter, example(target, *drafter.taps))
    assert {0, 1, 2} <= check_greedy(target, drafter)


@pytest.mark.parametrize(("name", "sizes", "options"), every(SAMPLING))
def test_sampled_text_is_drawn_from_the_target(name, sizes, options):
    target = ToyTarget(5, seed=6)
    check_sampling(load_drafter(name, target, fresh(name, target, sizes), **options), target)


@pytest.mark.parametrize(
    ("name", "sizes", "metrics", "learned"),
    [
        pytest.param(name, *row, learned, marks=pytest.mark.release if index and learned != "probabilities" else ())
        for name, rows in TRAINED.items()
        for index, row in enumerate(rows)
        for learned in ("probabilities", "tokens", "lk")
    ],
)
def test_training_lowers_the_loss(target, name, sizes, metrics, learned):
    drafter = load_drafter(name, target, fresh(name, target, sizes))
    batch = example(target, *drafter.taps)
    if learned == "lk":
        drafter.objective = Objective("lk-lambda", "dpace")
    if learned == "tokens":
        batch = Progress(batch.inputs, batch.outputs, batch.lengths, batch.hidden)
    before = drafter.loss(batch)[1]
    losses, after = train(drafter, batch, 30)
    assert losses[-1] < 0.8 * losses[0]
    assert list(before) == list(after) == [f"agree_{i}" for i in range(1, metrics + 1)]
    assert all(after[name] > before[name] + 0.1 for name in after)
    assert not any(p.requires_grad for p in target.model.parameters())


@pytest.mark.parametrize("name", ["medusa", "hydra"])
def test_published_trees_are_cut_to_the_heads(target, name):
    drafter = load_drafter(name, target, fresh(name, target, {"heads": 3}), nodes=63, tree="mc_sim_7b_63")
    (_, draft), *_ = ragged_steps(target, drafter, Budget(8, 63))
    assert draft.nodes == 61  # two of 63 nodes are on level 4, which needs a fourth head
    assert draft.parents.tolist() == [list(published_shape("mc_sim_7b_63").parents[:61])] * 2


@pytest.mark.parametrize("name", TRAINED)
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
def test_keys_of_a_config_that_are_not_read_are_named(tmp_path, name):
    """Keys that are switched off and keys of every config are not."""
    target = ToyTarget(16, hidden_size=32)
    method(name)(target, fresh(name, target, {})).save(tmp_path, "toy")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    usual = {"attn_gate": False, "use_last_layernorm": True, "parallel_draft_step": None, "num_anchors": 8}
    file.write_text(json.dumps(config | usual))
    assert "not read" not in method(name).load(str(tmp_path), target).note
    parts = [part for part in ("dflash_config", "eagle_config", "text_config") if part in config]
    for part in [{}, *({nested: config[nested]} for nested in parts)]:
        more = {"attn_logit_softcapping": 30.0, "layer_order": "reversed"}
        added = {key: old | more for key, old in part.items()} or more
        file.write_text(json.dumps(config | added))
        note = method(name).load(str(tmp_path), target).note
        assert "keys that are not read: attn_logit_softcapping, layer_order. If one changes the layers" in note
        for key, value in {"use_last_layernorm": False, "parallel_draft_step": 4}.items():
            added = {part_name: old | {key: value} for part_name, old in part.items()} or {key: value}
            file.write_text(json.dumps(config | added))
            with pytest.raises(ValueError, match=f"has {key} .*, which is not supported"):
                method(name).load(str(tmp_path), target)


PUBLISHED_KEYS = {  # keys that published files have besides those that the readers use
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


@pytest.mark.parametrize(("name", "keys"), [(name, keys) for name, found in PUBLISHED_KEYS.items() for keys in found])
def test_published_keys_without_effect_are_accepted(tmp_path, name, keys):
    target = ToyTarget(16, hidden_size=32)
    method(name)(target, fresh(name, target, {})).save(tmp_path, "toy")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    nested = {part: config[part] | value for part, value in keys.items() if part in config}
    file.write_text(json.dumps(config | keys | nested))
    assert "not read" not in method(name).load(str(tmp_path), target).note
