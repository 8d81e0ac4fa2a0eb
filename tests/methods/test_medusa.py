import json
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import chi2
from torch.nn import functional as F

from specdemo.core.protocol import Budget, GenerationConfig, Progress
from specdemo.core.sampling import Sampling
from specdemo.engine.loop import generate
from specdemo.methods import load_drafter, method
from specdemo.methods.heads.medusa import PUBLISHED, Medusa, published_shape
from specdemo.models.target import HFTarget
from tests.generation import rows_of, train
from tests.methods.test_exact_sampling import DRAWS, expected, joint
from tests.models.tiny import VOCABULARY, build, texts

HIDDEN = 32


@pytest.fixture(scope="module")
def target():
    return HFTarget(build("llama"), name="some/llama")


def folder_with(path, tensors, config, file="model.safetensors"):
    path.mkdir(exist_ok=True)
    save = save_file if file.endswith(".safetensors") else torch.save
    save(tensors, path / file)
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def randoms(**shapes):
    """Return name -> random tensor. Double underscores in names become dots."""
    rng = torch.Generator().manual_seed(3)
    return {name.replace("__", "."): torch.randn(shape, generator=rng) * 0.3 for name, shape in shapes.items()}


def medusa_1(heads=3, layers=1, vocabulary=VOCABULARY, hidden=HIDDEN):
    shapes = {}
    for i in range(heads):
        for layer in range(layers):
            shapes |= {f"{i}__{layer}__linear__weight": (hidden, hidden), f"{i}__{layer}__linear__bias": (hidden,)}
        shapes[f"{i}__{layers}__weight"] = (vocabulary, hidden)
    return randoms(**shapes)


def reference(tensors, hidden, layers=1):
    """Return logits [heads, V] from Medusa-1 tensors."""
    logits = []
    for i in range(sum(name.endswith(f".{layers}.weight") for name in tensors)):
        state = hidden
        for layer in range(layers):
            state = state + F.silu(
                F.linear(state, tensors[f"{i}.{layer}.linear.weight"], tensors[f"{i}.{layer}.linear.bias"])
            )
        logits.append(state @ tensors[f"{i}.{layers}.weight"].T)
    return torch.stack(logits)


def logits_of(heads, hidden):
    return torch.stack([heads(hidden, i) for i in range(len(heads))])


def example(target, tap=-1, rows=4, columns=24):
    """Return a training batch of texts that the target continued greedily."""
    tokens = texts(rows, 4)
    for _ in range(columns - 3):
        tokens = torch.cat([tokens, target.model(tokens).logits[:, -1:].argmax(-1)], 1)
    hidden = target.start(tokens, (tap,)).hidden[tap]
    probs = target.model(tokens).logits.softmax(-1)
    lengths = [tokens.shape[1] - 1] * rows
    return Progress(tokens[:, :-1], tokens[:, 1:], lengths, {tap: hidden[:, :-1]}, probs[:, :-1])


def check_greedy(target, drafter):
    """Check that the output is the target's, and return the numbers of accepted draft tokens that occurred."""
    prompts = texts(4, 4)
    config = GenerationConfig(24, budget=Budget(4, 12), stop_token_ids=())
    expected = rows_of(list(generate(target, load_drafter("none", target), prompts, config)))
    events = list(generate(target, drafter, prompts, config))
    assert rows_of(events) == expected
    return {len(path) - 1 for e in events for path in e.path}


def check_sampling(drafter, target):
    """Check by chi-square that the first two tokens follow the target's distribution."""
    counts, expected_counts = joint(target, drafter, 2, DRAWS // 2), expected(target, 2) * (DRAWS // 2)
    assert float(((counts - expected_counts) ** 2 / expected_counts).sum()) < chi2.ppf(0.9999, len(expected_counts) - 1)


# formats


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
@pytest.mark.parametrize("layers", [0, 1, 2])
def test_medusa_1(tmp_path, target, file, layers):
    """The published configs specify two heads where the file contains more."""
    tensors = medusa_1(5, layers)
    config = {"medusa_num_heads": 2, "medusa_num_layers": layers, "base_model_name_or_path": "some/llama"}
    heads = Medusa.load(folder_with(tmp_path, tensors, config, file), target)
    assert (len(heads), heads.layers) == (5, layers)
    hidden = torch.randn(7, HIDDEN)
    torch.testing.assert_close(logits_of(heads, hidden), reference(tensors, hidden, layers))


def test_medusa_2_is_a_full_model(tmp_path, target):
    tensors = medusa_1()
    full = {f"medusa_head.{name}": tensor for name, tensor in tensors.items()}
    full |= {"lm_head.weight": torch.randn(VOCABULARY, HIDDEN), "model.norm.weight": torch.ones(HIDDEN)}
    config = {"model_type": "llama", "medusa_num_heads": 3, "hidden_size": HIDDEN}
    source = folder_with(tmp_path / "medusa-1.0-llama", full, config)
    with pytest.raises(ValueError, match="trained with its heads; choose it as the target too"):
        Medusa.load(source, target)
    heads = Medusa.load(source, HFTarget(target.model, name="FasterDecoding/medusa-1.0-llama"))
    hidden = torch.randn(7, HIDDEN)
    torch.testing.assert_close(logits_of(heads, hidden), reference(tensors, hidden))


def vllm_config(**more):
    sizes = {"num_heads": 3, "num_hidden_layers": 1, "hidden_size": HIDDEN, "vocab_size": VOCABULARY}
    return {"model_type": "medusa", "architectures": ["MedusaModel"], **sizes, **more}


def vllm(heads=3, rows=VOCABULARY):
    shapes = {f"blocks__{i}__layers__0__weight": (HIDDEN, HIDDEN) for i in range(heads)}
    return randoms(**shapes, **{f"lm_heads__{i}__weight": (rows, HIDDEN) for i in range(heads)})


def vllm_reference(tensors, hidden, i, lm_head):
    return (hidden + F.silu(hidden @ tensors[f"blocks.{i}.layers.0.weight"].T)) @ tensors[lm_head].T


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_vllm(tmp_path, target, prefix):
    tensors = vllm()
    stored = {prefix + name: tensor for name, tensor in tensors.items()}
    heads = Medusa.load(folder_with(tmp_path, stored, vllm_config(truncated_vocab_size=VOCABULARY)), target)
    hidden = torch.randn(7, HIDDEN)
    expected = [vllm_reference(tensors, hidden, i, f"lm_heads.{i}.weight") for i in range(3)]
    torch.testing.assert_close(logits_of(heads, hidden), torch.stack(expected))


@pytest.mark.parametrize("name", ["lm_head.weight", "lm_heads.0.weight"])
def test_vllm_with_one_lm_head(tmp_path, target, name):
    tensors = {n: t for n, t in vllm().items() if n.startswith("blocks")} | {name: torch.randn(VOCABULARY, HIDDEN)}
    heads = Medusa.load(folder_with(tmp_path, tensors, vllm_config(original_lm_head=True)), target)
    hidden = torch.randn(7, HIDDEN)
    expected = [vllm_reference(tensors, hidden, i, name) for i in range(3)]
    torch.testing.assert_close(logits_of(heads, hidden), torch.stack(expected))


@pytest.mark.parametrize("rows", [12, VOCABULARY])
def test_vllm_with_a_truncated_vocabulary(tmp_path, target, rows):
    token_map = torch.arange(5, 53, 4)
    tensors = vllm(rows=rows)
    stored = {**tensors, "token_map": token_map}
    source = folder_with(tmp_path, stored, vllm_config(truncated_vocab_size=12, medusa_fc_bias=False))
    heads = Medusa.load(source, target)
    hidden = torch.randn(7, HIDDEN)
    logits = heads(hidden, 1)
    expected = vllm_reference(tensors, hidden, 1, "lm_heads.1.weight")
    torch.testing.assert_close(logits[:, token_map], expected if rows == 12 else expected[:, token_map])
    left_out = torch.ones(VOCABULARY, dtype=torch.bool).index_fill(0, token_map, False)
    assert not logits.softmax(-1)[:, left_out].any()
    check_greedy(target, load_drafter("medusa", target, heads, nodes=12))


@pytest.mark.parametrize(
    ("tensors", "config", "reason"),
    [
        (medusa_1(hidden=16), {"base_model_name_or_path": "some/other"}, "hidden size 16 .* the target some/other"),
        (medusa_1(vocabulary=60), {"base_model_name_or_path": "N/A"}, "vocabulary 60, .* 61; choose the target it was"),
        ({f"sequential_head.{n}": t for n, t in medusa_1().items()}, {}, "no Medusa heads in a known format"),
        (medusa_1() | {"extra.weight": torch.ones(2)}, {}, "extra.weight: expected shape none"),
        (
            {n: t for n, t in medusa_1(3).items() if n != "1.0.linear.bias"},
            {},
            r"blocks.1.layers.0.bias: expected shape",
        ),
    ],
)
def test_other_files_are_refused(tmp_path, target, tensors, config, reason):
    source = folder_with(tmp_path, tensors, {"medusa_num_heads": 3, **config})
    with pytest.raises(ValueError, match=reason):
        Medusa.load(source, target)


def test_other_families_are_refused(tmp_path, target):
    source = folder_with(tmp_path, {"fc.weight": torch.ones(2, 4)}, {})
    with pytest.raises(ValueError, match="head for method 'eagle'"):
        Medusa.load(source, target)


# drafts


def test_every_node_is_the_rank_of_its_levels_head(target):
    heads = Medusa.fresh(target, heads=3)
    torch.manual_seed(0)
    for parameter in heads.parameters():
        parameter.normal_()
    drafter = load_drafter("medusa", target, heads, nodes=63, tree="mc_sim_7b_63")
    drafter.start(2, Sampling(), torch.Generator())
    hidden = torch.randn(2, 3, HIDDEN)
    inputs = torch.zeros(2, 3, dtype=torch.int64)
    drafter.observe(Progress(inputs, inputs, [3, 2], {-1: hidden}))
    shape = published_shape("mc_sim_7b_63")
    draft = drafter.propose(Budget(8, 63))
    assert draft.nodes == 61  # two of 63 nodes are on level 4, which needs a fourth head
    for row, last in enumerate(hidden[[0, 1], [2, 1]]):
        ranked = logits_of(heads, last).softmax(-1).sort(descending=True)
        for node in range(draft.nodes):
            level, rank = shape.levels[node] - 1, shape.ranks[node]
            assert draft.tokens[row, node] == ranked.indices[level, rank]
            assert float(draft.confidence[row, node]) == pytest.approx(float(ranked.values[level, rank]), rel=1e-4)
        assert draft.parents[row].tolist() == list(shape.parents[:61])
    assert draft.probs is None


def test_the_published_trees():
    per_level = {name: list(Counter(published_shape(name).levels).values()) for name in PUBLISHED}
    assert per_level["mc_sim_7b_63"] == [10, 28, 23, 2]
    assert per_level["vicuna_7b_stage1"] == [10, 32, 20, 1]
    assert per_level["vicuna_7b_stage2"] == [10, 23, 23, 7]
    assert per_level["vicuna_13b_stage1"] == [10, 29, 23, 1]
    assert per_level["vicuna_13b_stage2"] == [10, 19, 25, 9]
    assert per_level["vicuna_33b_stage1"] == [10, 34, 19]
    assert per_level["vicuna_33b_stage2"] == [10, 24, 24, 5]
    assert per_level["zephyr_stage2"] == [10, 27, 23, 3]
    paths = published_shape("mc_sim_7b_63").paths()
    assert {(0, 7, 0), (2, 0, 0), (9, 0), (0, 0, 0, 1)} <= set(paths)
    assert not {(3, 0, 0), (0, 1, 0, 0), (9, 1)} & set(paths)


def test_the_fitted_tree_follows_the_measured_rates(target):
    heads = Medusa.fresh(target, heads=2)
    heads.rates = ((0.5, 0.4, 0.01), (0.9, 0.05, 0.01))
    drafter = load_drafter("medusa", target, heads, nodes=4)
    drafter.start(1, Sampling(), torch.Generator())
    inputs = torch.zeros(1, 1, dtype=torch.int64)
    drafter.observe(Progress(inputs, inputs, [1], {-1: torch.randn(1, 1, HIDDEN)}))
    assert drafter.propose(Budget(4, 4)).parents.tolist() == [[0, 0, 1, 2]]
    assert drafter.propose(Budget(1, 4)).parents.tolist() == [[0, 0, 0]]


def test_measured_rates_are_shares(target):
    drafter, batch = load_drafter("medusa", target, Medusa.fresh(target, heads=2)), example(target)
    drafter.measure(batch)
    assert [len(ranks) for ranks in drafter.head.rates] == [10, 10]
    expected = batch.probs[:, 2:].argmax(-1)
    ranked = drafter.head(batch.hidden[-1][:, :-2], 1).topk(10).indices
    for rank in range(10):
        assert drafter.head.rates[1][rank] == pytest.approx(float((ranked[..., rank] == expected).float().mean()))
    assert drafter.head.rates[1][0] == pytest.approx(drafter.loss(batch)[1]["agree_2"])


def test_sampled_tree_draws_the_last_child(target):
    """The elder siblings are the most probable tokens; each has its q given those before it."""
    drafter = load_drafter("medusa", target, Medusa.fresh(target, heads=2), nodes=7, draft="sampled")
    drafter.start(3, Sampling(0.8), torch.Generator().manual_seed(0))
    tokens = torch.randint(0, 9, (3, 4), generator=torch.Generator().manual_seed(1))
    hidden = {-1: target.start(tokens[:, :-1], (-1,)).hidden[-1]}
    drafter.observe(Progress(tokens[:, :-1], tokens[:, 1:], [3] * 3, hidden))
    draft = drafter.propose(Budget(2, 7))
    heads = torch.stack([drafter.head(hidden[-1][:, -1], i) for i in range(2)], 1).div(0.8).softmax(-1)
    parents = draft.parents[0].tolist()
    assert max(parents.count(slot) for slot in parents) > 1
    for node, slot in enumerate(parents):
        siblings = [i for i, parent in enumerate(parents) if parent == slot]
        level = 0 if slot == 0 else 1
        for row in range(3):
            left = heads[row, level].clone()
            order = left.argsort(descending=True, stable=True).tolist()
            place = siblings.index(node)
            expected = torch.zeros_like(left)
            expected[order[place]] = 1.0
            if node == siblings[-1]:
                left[order[:place]] = 0.0
                expected = left / left.sum()
            torch.testing.assert_close(draft.probs[row, node], expected, atol=1e-5, rtol=1e-4)
            assert draft.probs[row, node, draft.tokens[row, node]] > 0.0


# training


def test_new_heads_equal_lm_head(target):
    heads, hidden = Medusa.fresh(target, heads=2, layers=2), torch.randn(3, HIDDEN)
    assert len(heads) == 2 and not any(p.requires_grad for p in heads.parameters())
    torch.testing.assert_close(heads(hidden, 1), target.lm_head(hidden))


def test_the_loss_is_a_weighted_cross_entropy(target):
    drafter, batch = load_drafter("medusa", target, Medusa.fresh(target, heads=2)), example(target)
    expected = 0.0
    for i in range(2):
        logits = drafter.head(batch.hidden[-1], i)
        every = [
            -(batch.probs[row, a + 1 + i] * logits[row, a].log_softmax(-1)).sum()
            for row in range(4)
            for a in range(batch.inputs.shape[1] - 1 - i)
        ]
        expected += 0.8 ** (i + 1) * float(torch.stack(every).mean())
    assert drafter.loss(batch)[0].item() == pytest.approx(expected, rel=1e-4)


def test_saved_file_loads_in_vllm(tmp_path, target):
    drafter = load_drafter("medusa", target, Medusa.fresh(target, heads=2, layers=2))
    train(drafter, example(target), 3)
    drafter.measure(example(target))
    drafter.save(tmp_path, "some/llama")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "medusa" and config["base_model_name_or_path"] == "some/llama"
    assert (config["num_heads"], config["num_hidden_layers"], config["medusa_fc_bias"]) == (2, 2, True)
    assert (config["hidden_size"], config["vocab_size"]) == (HIDDEN, VOCABULARY)
    layers = {f"blocks.{i}.layers.{n}.{k}" for i in range(2) for n in range(2) for k in ("weight", "bias")}
    assert load_file(tmp_path / "model.safetensors").keys() == layers | {f"lm_heads.{i}.weight" for i in range(2)}
    again, hidden = method("medusa").load(str(tmp_path), target), torch.randn(5, HIDDEN)
    torch.testing.assert_close(logits_of(again, hidden), logits_of(drafter.head, hidden))
    assert again.rates == drafter.head.rates


def test_half_precision_heads_read_full_precision_states(target):
    drafter = load_drafter("medusa", target, Medusa.fresh(target).to(torch.bfloat16), nodes=8)
    check_greedy(target, drafter)
    drafter.measure(example(target))
    assert drafter.weight_bytes == 2 * 4 * (HIDDEN * HIDDEN + HIDDEN + VOCABULARY * HIDDEN)
