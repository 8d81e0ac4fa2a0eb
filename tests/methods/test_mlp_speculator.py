import json
from math import sqrt

import pytest
import torch
from torch.nn import functional as F

from specdemo.core.protocol import Budget, Progress
from specdemo.core.sampling import Sampling
from specdemo.core.tree import depths
from specdemo.methods import load_drafter
from specdemo.methods.heads.mlp_speculator import MLPSpeculator, Speculator
from specdemo.models.target import HFTarget
from tests.methods.test_medusa import example, folder_with
from tests.models.tiny import VOCABULARY, build, texts

HIDDEN, INNER, GREEDY = 32, 24, Sampling()
CONFIG = {
    "architectures": ["MLPSpeculatorPreTrainedModel"],
    "model_type": "mlp_speculator",
    "base_model_name_or_path": "some/llama",
    "emb_dim": HIDDEN,
    "inner_dim": INNER,
    "n_predict": 3,
    "n_candidates": 5,
    "top_k_tokens_per_head": [5, 3, 2],
    "vocab_size": VOCABULARY,
    "torch_dtype": "float16",
}
TIED = {**CONFIG, "tie_weights": True, "scale_input": True}


@pytest.fixture(scope="module")
def target():
    return HFTarget(build("llama"), name="some/llama")


def speculator(inner=INNER, steps=3, vocabulary=VOCABULARY, hidden=HIDDEN):
    """Return the tensors of an untied file."""
    rng = torch.Generator().manual_seed(3)
    shapes = {}
    for i in range(steps):
        shapes |= {f"emb.{i}.weight": (vocabulary, inner), f"proj.{i}.weight": (inner, inner if i else hidden)}
        shapes |= {f"head.{i}.weight": (vocabulary, inner), f"ln.{i}.weight": (inner,), f"ln.{i}.bias": (inner,)}
    return {f"speculator.{name}": torch.randn(shape, generator=rng) * 0.3 for name, shape in shapes.items()}


def tied(inner=INNER, steps=3):
    """Return tied tensors, one table for all steps, under every name, and under the names in a file without copies."""
    tensors = speculator(inner, steps)
    shared = {name for name in tensors if ".0." in name or "proj.1." in name}
    named = {
        n: n if n in shared else f"speculator.{n.split('.')[1]}.{int('proj' in n)}.{n.split('.')[3]}" for n in tensors
    }
    return {name: tensors[first].clone() for name, first in named.items()}, {n: tensors[n] for n in shared}


def reference(tensors, hidden, tokens, scale_input=False, steps=3, inner=INNER):
    """Return logits [steps, R, V] for hidden [R, H] and tokens [R, steps]."""

    def rms(x):
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()

    weight = 0.5 ** (0.5 / steps)
    ratio = sqrt((1 - weight**2) * inner / 2) / weight
    state, logits = rms(hidden) / sqrt(2) if scale_input else hidden, []
    for i in range(steps):
        table = {n: tensors[f"speculator.{n}.{i}.weight"] for n in ("emb", "proj", "head", "ln")}
        state = state @ table["proj"].T + ratio * table["emb"][tokens[:, i]]
        state = F.gelu(rms(state) * table["ln"] + tensors[f"speculator.ln.{i}.bias"])
        logits.append(state @ table["head"].T)
    return torch.stack(logits)


def logits_of(head, hidden, tokens):
    state, logits = head.initial_state(hidden), []
    for i in range(len(head)):
        state, step_logits = head(state, tokens[:, i], i)
        logits.append(step_logits)
    return torch.stack(logits)


def check_logits(head, tensors, **variant):
    hidden, tokens = torch.randn(7, HIDDEN) * 3, texts(7, len(head))
    torch.testing.assert_close(logits_of(head, hidden, tokens), reference(tensors, hidden, tokens, **variant))


# the state's scale


@pytest.mark.parametrize(
    ("steps", "inner", "state_weight", "emb_weight", "ratio"),
    [(3, 4096, 0.890899, 20.555, 23.072), (4, 3072, 0.917004, 15.633, 17.048), (5, 8192, 0.933033, None, None)],
)
def test_weights_of_published_sizes(steps, inner, state_weight, emb_weight, ratio):
    with torch.device("meta"):
        head = Speculator(8, inner, 4, steps)
    assert head.state_weight == pytest.approx(state_weight, abs=1e-6)
    if emb_weight:
        assert head.emb_weight == pytest.approx(emb_weight, abs=1e-3)
        assert head.ratio == pytest.approx(ratio, abs=1e-3)


# formats


def test_own_tables_per_step(tmp_path, target):
    tensors = speculator()
    head = MLPSpeculator.load(folder_with(tmp_path, tensors, CONFIG), target)
    assert (len(head), head.inner_dim, head.widths) == (3, INNER, (5, 3, 2))
    assert not any(p.requires_grad for p in head.parameters())
    check_logits(head, tensors)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("copies", [True, False])
def test_tied_tables(tmp_path, target, copies, file):
    every, one = tied()
    head = MLPSpeculator.load(folder_with(tmp_path, every if copies else one, TIED, file), target)
    check_logits(head, every, scale_input=True)
    assert head.emb[0] is head.emb[2] and head.proj[1] is head.proj[2] and head.proj[0] is not head.proj[1]
    assert sum(p.numel() for p in head.parameters()) == sum(t.numel() for t in one.values())


def test_inner_dimension_0_is_the_hidden_size(tmp_path, target):
    tensors = speculator(HIDDEN)
    head = MLPSpeculator.load(folder_with(tmp_path, tensors, {**CONFIG, "inner_dim": 0}), target)
    check_logits(head, tensors, inner=HIDDEN)


def test_the_scale_is_that_of_the_trained_steps(tmp_path, target):
    """Drafting fewer steps than trained uses the constants of all trained steps."""
    tensors = speculator()
    drafter = load_drafter("mlp_speculator", target, folder_with(tmp_path, tensors, CONFIG))
    draft, hidden, root = first_draft(drafter, Budget(1, 1))
    chances = reference(tensors, hidden, root[:, None].expand(-1, 3))[0].softmax(-1)
    assert torch.equal(draft.tokens[:, 0], chances.argmax(-1))
    torch.testing.assert_close(draft.confidence[:, 0], chances.amax(-1))


@pytest.mark.parametrize("rows", [64, 56])
def test_padded_vocabularies(tmp_path, target, rows):
    """File and target may be padded; padding rows must not be drafted."""
    tensors = speculator(vocabulary=rows)
    for i in range(3):
        tensors[f"speculator.head.{i}.weight"][VOCABULARY:] *= 1000.0
    source = folder_with(tmp_path, tensors, {**CONFIG, "vocab_size": rows})
    head, known = MLPSpeculator.load(source, target), min(rows, VOCABULARY)
    hidden, tokens = torch.randn(7, HIDDEN), texts(7, 3).clamp_max(known - 1)
    torch.testing.assert_close(logits_of(head, hidden, tokens), reference(tensors, hidden, tokens)[..., :known])
    drafter = load_drafter("mlp_speculator", target, head)
    drafter.start(4, Sampling(temperature=1.0), torch.Generator().manual_seed(0))
    observe(drafter)
    draft = drafter.propose(Budget(3, 3))
    assert draft.probs.shape == (4, 3, VOCABULARY) and draft.tokens.max() < known
    batch = example(target)
    for probs in (batch.probs, None):
        assert drafter.loss(Progress(batch.inputs, batch.outputs, batch.lengths, batch.hidden, probs))[0].isfinite()


@pytest.mark.parametrize(
    ("tensors", "config", "reason"),
    [
        (
            speculator(hidden=16),
            {**CONFIG, "emb_dim": 16},
            "hidden size 16 and vocabulary 61, .* the target some/llama",
        ),
        (speculator(), {**CONFIG, "vocab_size": 9000}, "and vocabulary 9000, .* the target some/llama"),
        (speculator(), {**CONFIG, "n_predict": None}, "config.json lacks n_predict"),
        (speculator(), {**CONFIG, "n_predict": 4}, "emb.3.weight: expected shape .* found none"),
        (speculator(), {**CONFIG, "tie_weights": True, "inner_dim": 9}, "emb.0.weight: expected shape"),
        (speculator(), {**CONFIG, "n_predict": 2}, "emb.2.weight: expected shape none"),
    ],
)
def test_other_files_are_refused(tmp_path, target, tensors, config, reason):
    with pytest.raises(ValueError, match=reason):
        MLPSpeculator.load(folder_with(tmp_path, tensors, config), target)


# drafts


def observe(drafter, rows=4):
    """Observe ragged rows. Return the hidden state [B, H] and the root [B] from which the draft starts."""
    lengths = [1 + row % 3 for row in range(rows)]
    tokens, hidden = texts(rows, 4), torch.randn(rows, 3, HIDDEN, generator=torch.Generator().manual_seed(1))
    drafter.observe(Progress(tokens[:, :-1], tokens[:, 1:], lengths, {-1: hidden}))
    last = torch.tensor(lengths)
    return hidden[torch.arange(rows), last - 1], tokens[torch.arange(rows), last]


def first_draft(drafter, budget, sampling=GREEDY):
    drafter.start(4, sampling, torch.Generator().manual_seed(0))
    hidden, root = observe(drafter)
    return drafter.propose(budget), hidden, root


def test_a_sampled_chain_carries_what_it_was_drawn_from(tmp_path, target):
    tensors = speculator()
    drafter = load_drafter("mlp_speculator", target, folder_with(tmp_path, tensors, CONFIG))
    draft, hidden, root = first_draft(drafter, Budget(5, 5), Sampling(temperature=0.7))
    assert draft.tokens.shape == (4, 3)
    read = torch.cat([root[:, None], draft.tokens[:, :-1]], 1)
    expected = (reference(tensors, hidden, read) / 0.7).softmax(-1).transpose(0, 1)
    torch.testing.assert_close(draft.probs, expected)
    torch.testing.assert_close(draft.confidence, expected.gather(-1, draft.tokens[..., None])[..., 0])


@pytest.mark.parametrize("nodes", [4, 12, 200])
def test_the_tree_holds_the_likeliest_nodes(tmp_path, target, nodes):
    """There are 5 + 15 + 30 paths, each with the product of its steps' probabilities."""
    tensors = speculator()
    drafter = load_drafter("mlp_speculator", target, folder_with(tmp_path, tensors, CONFIG), draft="tree", nodes=16)
    draft, hidden, root = first_draft(drafter, Budget(3, nodes))
    assert draft.nodes == min(nodes, 50) and draft.probs is None
    for row in range(4):
        paths = {(): 1.0}
        for level, width in enumerate((5, 3, 2)):
            for path in [path for path in paths if len(path) == level]:
                read = torch.tensor([[int(root[row]), *path, 0, 0, 0][:3]])
                chances, ranked = reference(tensors, hidden[row, None], read)[level, 0].softmax(-1).topk(width)
                paths |= {(*path, t): paths[path] * c for t, c in zip(ranked.tolist(), chances.tolist(), strict=True)}
        del paths[()]
        best = sorted(paths, key=paths.get, reverse=True)[:nodes]
        drafted = [()]
        for node in range(draft.nodes):
            drafted.append((*drafted[draft.parents[row, node]], int(draft.tokens[row, node])))
            chance = paths[drafted[-1]] / paths.get(drafted[-1][:-1], 1.0)
            assert float(draft.confidence[row, node]) == pytest.approx(chance, rel=1e-3)
        assert set(drafted[1:]) == set(best)
    assert depths(draft.parents).max() <= 3


# training


@pytest.mark.parametrize(
    ("sizes", "inner", "tables"), [({}, HIDDEN, 1), ({"inner_dim": 8, "tie_weights": False}, 8, 4)]
)
def test_fresh_speculators(target, sizes, inner, tables):
    torch.manual_seed(0)
    head = MLPSpeculator.fresh(target, **sizes)
    assert (len(head), head.inner_dim, len({id(table) for table in head.emb})) == (4, inner, tables)
    assert head.widths == (4, 3, 2, 2) and not any(p.requires_grad for p in head.parameters())


def test_speculator_is_trained_on_the_text(target):
    """Step 1 at column t reads tokens t + 1 and t + 2. Its label is the target's distribution after those."""
    torch.manual_seed(0)
    drafter, batch = load_drafter("mlp_speculator", target, MLPSpeculator.fresh(target)), example(target)
    column = 5
    taught = list(drafter._training_steps(batch))
    expected = logits_of(drafter.head, batch.hidden[-1][:, column], batch.outputs[:, column : column + 4])
    for i, (logits, observed) in enumerate(taught):
        torch.testing.assert_close(logits[:, column], expected[i])
        assert torch.equal(observed[:, column], batch.probs[:, column + 1 + i])


@pytest.mark.parametrize("config", [CONFIG, TIED])
def test_saving_round_trips(tmp_path, target, config):
    tensors = tied()[1] if "tie_weights" in config else speculator()
    drafter = load_drafter("mlp_speculator", target, folder_with(tmp_path / "read", tensors, config))
    drafter.save(tmp_path / "written", "some/llama")
    written = json.loads((tmp_path / "written" / "config.json").read_text())
    assert {**written, "torch_dtype": "float16"}.items() >= config.items()
    again = MLPSpeculator.load(str(tmp_path / "written"), target)
    hidden, tokens = torch.randn(7, HIDDEN), texts(7, 3)
    assert torch.equal(logits_of(again, hidden, tokens), logits_of(drafter.head, hidden, tokens))
