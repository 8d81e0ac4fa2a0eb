"""Medusa heads: files, trees against definitions on sizes small enough to enumerate, and training."""

import itertools
import json
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from specdemo.core.protocol import Budget, Progress
from specdemo.core.sampling import Sampling
from specdemo.core.tree import depths
from specdemo.methods import load_drafter
from specdemo.methods.heads.medusa import PUBLISHED, Medusa, published_shape
from specdemo.methods.heads.sampler import TreeShape, chain, clip_shape, grow_tree, optimal_shape
from specdemo.models.target import HFTarget
from tests.generation import train
from tests.methods.heads import (
    Published,
    Reference,
    example,
    folder_with,
    linear,
    randoms,
    target_of,
    without,
)
from tests.models.tiny import VOCABULARY

HIDDEN = 32


@pytest.fixture(scope="module")
def target():
    return target_of()


def medusa_1(heads=3, layers=1, vocabulary=VOCABULARY, hidden=HIDDEN):
    shapes = {}
    for i in range(heads):
        for layer in range(layers):
            shapes |= {f"{i}.{layer}.linear.weight": (hidden, hidden), f"{i}.{layer}.linear.bias": (hidden,)}
        shapes[f"{i}.{layers}.weight"] = (vocabulary, hidden)
    return randoms(shapes)


class Medusa1Reference(Reference):
    def logits(self, text, drafted):
        return self.head(self.hidden(text)[-1], len(drafted))

    def head(self, state, i):
        """Return logits [..., V] of hidden states [..., H]."""
        layers = sum(name.startswith(f"{i}.") and name.endswith("bias") for name in self.w)
        for layer in range(layers):
            state = state + F.silu(linear(self.w, f"{i}.{layer}.linear", state))
        return linear(self.w, f"{i}.{layers}", state)


def logits_of(heads, hidden):
    return torch.stack([heads(hidden, i) for i in range(len(heads))])


# formats


def published(layers, file):
    """Return Medusa-1 heads. The published configs specify two heads where the file contains more."""
    tensors = medusa_1(5, layers)
    config = {"medusa_num_heads": 2, "medusa_num_layers": layers, "base_model_name_or_path": "some/llama"}
    reference = Medusa1Reference(target_of(), tensors)
    return Published("medusa", config, tensors, lambda head: reference, longest=5, file=file, caches=False)


def test_medusa_2_is_a_full_model(tmp_path, target):
    tensors = medusa_1()
    full = {f"medusa_head.{name}": tensor for name, tensor in tensors.items()}
    full |= {"lm_head.weight": torch.randn(VOCABULARY, HIDDEN), "model.norm.weight": torch.ones(HIDDEN)}
    config = {"model_type": "llama", "medusa_num_heads": 3, "hidden_size": HIDDEN}
    source = folder_with(tmp_path / "medusa-1.0-llama", full, config)
    with pytest.raises(ValueError, match="trained with its heads; choose it as the target too"):
        Medusa.load(source, target)
    heads = Medusa.load(source, HFTarget(target.model, name="FasterDecoding/medusa-1.0-llama"))
    hidden, reference = torch.randn(7, HIDDEN), Medusa1Reference(target, tensors)
    torch.testing.assert_close(logits_of(heads, hidden), torch.stack([reference.head(hidden, i) for i in range(3)]))


def vllm_config(**more):
    sizes = {"num_heads": 3, "num_hidden_layers": 1, "hidden_size": HIDDEN, "vocab_size": VOCABULARY}
    return {"model_type": "medusa", "architectures": ["MedusaModel"], **sizes, **more}


def vllm(heads=3, rows=VOCABULARY):
    shapes = {f"blocks.{i}.layers.0.weight": (HIDDEN, HIDDEN) for i in range(heads)}
    return randoms(shapes | {f"lm_heads.{i}.weight": (rows, HIDDEN) for i in range(heads)})


class VllmReference(Reference):
    def logits(self, text, drafted):
        i, state = len(drafted), self.hidden(text)[-1]
        state = state + F.silu(linear(self.w, f"blocks.{i}.layers.0", state))
        name = next(name for name in (f"lm_heads.{i}", "lm_heads.0", "lm_head") if f"{name}.weight" in self.w)
        logits = linear(self.w, name, state)
        if "token_map" not in self.w:
            return logits
        ids = self.w["token_map"]
        logits = logits[ids] if len(logits) > len(ids) else logits
        return torch.full((VOCABULARY,), -1e4).index_copy(0, ids, logits)


def vllm_file(tensors, prefix="", **config):
    reference, tensors = VllmReference(target_of(), tensors), {prefix + name: t for name, t in tensors.items()}
    return Published("medusa", vllm_config(**config), tensors, lambda head: reference, longest=3, caches=False)


def one_lm_head(name):
    return without(vllm(), "lm_heads") | {name: torch.randn(VOCABULARY, HIDDEN)}


def truncated(rows):
    tensors = vllm(rows=rows) | {"token_map": torch.arange(5, 53, 4)}
    return vllm_file(tensors, truncated_vocab_size=12, medusa_fc_bias=False)


CASES = {
    "medusa-0-layers": lambda: published(0, "medusa_lm_head.pt"),
    "medusa-1-layer": lambda: published(1, "medusa_lm_head.pt"),
    "medusa-1-layer-safetensors": lambda: published(1, "medusa_lm_head.safetensors"),
    "medusa-2-layers": lambda: published(2, "medusa_lm_head.safetensors"),
    "medusa-vllm": lambda: vllm_file(vllm(), truncated_vocab_size=VOCABULARY),
    "medusa-vllm-prefix": lambda: vllm_file(vllm(), "medusa_heads."),
    "medusa-vllm-lm_head": lambda: vllm_file(one_lm_head("lm_head.weight"), original_lm_head=True),
    "medusa-vllm-lm_heads": lambda: vllm_file(one_lm_head("lm_heads.0.weight"), original_lm_head=True),
    "medusa-vllm-draft-vocabulary": lambda: truncated(12),
    "medusa-vllm-draft-vocabulary-full-lm_heads": lambda: truncated(VOCABULARY),
}


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


# drafts


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
    assert Medusa.load(str(tmp_path), target).rates == drafter.head.rates


def test_a_shape_is_its_paths():
    paths = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
    shape = TreeShape.from_paths(list(reversed(paths)))
    assert shape.paths() == sorted(paths, key=lambda p: (len(p), p))
    assert shape.parents == (0, 0, 1, 1, 2, 3)
    assert (shape.width, shape.depth) == (2, 3)
    assert chain(3) == TreeShape.from_paths([(0,), (0, 0), (0, 0, 0)])


def test_a_budget_cuts_depth_and_nodes():
    shape = TreeShape.from_paths([p for n in (1, 2, 3) for p in itertools.product(range(3), repeat=n)])
    for depth, nodes in itertools.product(range(4), (0, 1, 2, 5, 40)):
        cut = clip_shape(shape, Budget(depth, nodes))
        assert len(cut.parents) <= nodes
        assert cut.depth <= depth
        assert set(cut.paths()) <= set(shape.paths())


def test_the_fitted_tree_is_the_best_of_all_trees():
    rates = [[0.6, 0.2, 0.1], [0.5, 0.1], [0.3]]
    every = [p for n in (1, 2, 3) for p in itertools.product(*(range(len(r)) for r in rates[:n]))]

    def gain(paths):
        return sum(torch.tensor([rates[i][r] for i, r in enumerate(p)]).prod() for p in paths)

    def closed(paths):
        return all(len(p) == 1 or p[:-1] in paths for p in paths)

    for nodes in (1, 2, 4, 5):
        best = max(gain(c) for c in itertools.combinations(every, nodes) if closed(c))
        assert float(gain(optimal_shape(rates, nodes).paths())) == pytest.approx(float(best))


def table_drafter(order, vocabulary=6, batch=2, seed=0):
    """Return a Markov drafter whose q depends on the last `order` tokens, and a list of its expanded frontiers."""
    rng = torch.Generator().manual_seed(seed)
    table = torch.randn(batch, vocabulary, vocabulary, generator=rng).log_softmax(-1)
    expanded = []

    def expand(tokens, parents):
        expanded.append((tokens, parents))
        return table[torch.arange(batch)[:, None], tokens]

    return table[:, 0], expand, table, expanded


@pytest.mark.parametrize("nodes", [1, 3, 7, 20])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_growth_keeps_the_likeliest_paths(depth, nodes):
    first, expand, table, expanded = table_drafter(1)
    draft = grow_tree(first, expand, Budget(depth, nodes), top_k=6)  # K = V: the first two levels are complete
    assert len(expanded) == depth - 1
    assert int(depths(draft.parents).max()) <= depth
    for row in range(2):
        paths, scores = [()], [0.0]
        for token, parent in zip(draft.tokens[row].tolist(), draft.parents[row].tolist(), strict=True):
            before = paths[parent][-1] if paths[parent] else 0
            paths.append((*paths[parent], token))
            scores.append(scores[parent] + float(table[row, before, token]))
        assert len(set(paths)) == len(paths) == draft.nodes + 1
        if depth <= 2:
            every = [p for n in range(1, depth + 1) for p in itertools.product(range(6), repeat=n)]
            chance = {p: sum(float(table[row, a, b]) for a, b in itertools.pairwise((0, *p))) for p in every}
            assert sorted(scores[1:]) == pytest.approx(sorted(sorted(chance.values())[-draft.nodes :]), abs=1e-5)
