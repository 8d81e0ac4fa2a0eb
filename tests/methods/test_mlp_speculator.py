import json
from math import inf, sqrt

import pytest
import torch
from torch.nn import functional as F

from specdemo.core.protocol import Budget, Progress
from specdemo.core.tree import depths
from specdemo.methods import load_drafter
from specdemo.methods.heads.mlp_speculator import MLPSpeculator, Speculator
from tests.methods.heads import Published, Reference, example, folder_with, paths_of, ragged_steps, randoms, target_of
from tests.models.tiny import VOCABULARY

HIDDEN, INNER = 32, 24
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
    return target_of()


def speculator(inner=INNER, steps=3, vocabulary=VOCABULARY, hidden=HIDDEN):
    """Return the tensors of an untied file."""
    shapes = {}
    for i in range(steps):
        shapes |= {f"emb.{i}.weight": (vocabulary, inner), f"proj.{i}.weight": (inner, inner if i else hidden)}
        shapes |= {f"head.{i}.weight": (vocabulary, inner), f"ln.{i}.weight": (inner,), f"ln.{i}.bias": (inner,)}
    return randoms({f"speculator.{name}": shape for name, shape in shapes.items()})


def tied(inner=INNER, steps=3):
    """Return tied tensors, one table for all steps, under every name, and under the names in a file without copies."""
    tensors = speculator(inner, steps)
    shared = {name for name in tensors if ".0." in name or "proj.1." in name}
    named = {
        n: n if n in shared else f"speculator.{n.split('.')[1]}.{int('proj' in n)}.{n.split('.')[3]}" for n in tensors
    }
    return {name: tensors[first].clone() for name, first in named.items()}, {n: tensors[n] for n in shared}


class MlpReference(Reference):
    """The formulas of the paper. tensors: untied, of 3 steps."""

    def __init__(self, tensors, scale_input=False, inner=INNER):
        super().__init__(target_of(), tensors)
        self.scale_input, self.inner = scale_input, inner

    def logits(self, text, drafted):
        def rms(x):
            return x / (x.pow(2).mean() + 1e-6).sqrt()

        weight = 0.5 ** (0.5 / 3)
        ratio, hidden = sqrt((1 - weight**2) * self.inner / 2) / weight, self.hidden(text)[-1]
        state = rms(hidden) / sqrt(2) if self.scale_input else hidden
        for i, token in enumerate((text[-1], *drafted)):
            table = {n: self.w[f"speculator.{n}.{i}.weight"] for n in ("emb", "proj", "head", "ln")}
            state = table["proj"] @ state + ratio * table["emb"][min(token, len(table["emb"]) - 1)]
            state = F.gelu(rms(state) * table["ln"] + self.w[f"speculator.ln.{i}.bias"])
        logits = (table["head"] @ state)[:VOCABULARY]  # padding must not be drafted
        return F.pad(logits, (0, VOCABULARY - len(logits)), value=-inf)


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


def published(tensors, config, stored=None, file="model.safetensors", trains=True, **settings):
    reference, flags = MlpReference(tensors, **settings), {"caches": False, "trains": trains}
    stored = tensors if stored is None else stored
    return Published("mlp_speculator", CONFIG | config, stored, lambda head: reference, longest=3, file=file, **flags)


def tied_file(copies, file):
    """Return tied tables, stored once or repeated."""
    every, one = tied()
    return published(every, TIED, every if copies else one, file, scale_input=True)


def padded(rows):
    """Return a file for a vocabulary with another padding than the target's."""
    tensors = speculator(vocabulary=rows)
    for i in range(3):
        tensors[f"speculator.head.{i}.weight"][VOCABULARY:] *= 1000.0
    return published(tensors, {"vocab_size": rows}, trains=False)


CASES = {
    "mlp": lambda: published(speculator(), {}),
    "mlp-tied-copies": lambda: tied_file(True, "model.safetensors"),
    "mlp-tied-copies-bin": lambda: tied_file(True, "pytorch_model.bin"),
    "mlp-tied": lambda: tied_file(False, "model.safetensors"),
    "mlp-tied-bin": lambda: tied_file(False, "pytorch_model.bin"),
    "mlp-inner-size-of-the-target": lambda: published(speculator(HIDDEN), {"inner_dim": 0}, inner=HIDDEN),
    "mlp-padded-file": lambda: padded(64),
    "mlp-padded-target": lambda: padded(56),
}


@pytest.mark.parametrize("copies", [True, False])
def test_tied_tables_are_shared(tmp_path, target, copies):
    every, one = tied()
    head = MLPSpeculator.load(folder_with(tmp_path, every if copies else one, TIED), target)
    assert head.emb[0] is head.emb[2] and head.proj[1] is head.proj[2] and head.proj[0] is not head.proj[1]
    assert sum(p.numel() for p in head.parameters()) == sum(t.numel() for t in one.values())


@pytest.mark.parametrize("rows", [64, 56])
def test_speculators_of_padded_vocabularies_can_be_trained(tmp_path, target, rows):
    case, batch = padded(rows), example(target)
    drafter = load_drafter("mlp_speculator", target, folder_with(tmp_path, case.tensors, case.config))
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
        (speculator(), {**CONFIG, "n_predict": None}, "config.json lacks n_predict"),
        (speculator(), {**CONFIG, "n_predict": 4}, "emb.3.weight: expected shape .* found none"),
        (speculator(), {**CONFIG, "n_predict": 2}, "emb.2.weight: expected shape none"),
    ],
)
def test_other_files_are_refused(tmp_path, target, tensors, config, reason):
    with pytest.raises(ValueError, match=reason):
        MLPSpeculator.load(folder_with(tmp_path, tensors, config), target)


# drafts


def test_the_scale_is_that_of_the_trained_steps(tmp_path, target):
    """Drafting fewer steps than trained uses the constants of all trained steps."""
    tensors = speculator()
    drafter = load_drafter("mlp_speculator", target, folder_with(tmp_path, tensors, CONFIG))
    for written, draft in ragged_steps(target, drafter, Budget(1, 1)):
        for row, text in enumerate(written):
            if text:
                chances = MlpReference(tensors).logits(text, ()).softmax(-1)
                assert draft.tokens[row].tolist() == [int(chances.argmax())]
                torch.testing.assert_close(draft.confidence[row, 0], chances.amax())


@pytest.mark.parametrize("nodes", [4, 12, 200])
def test_the_tree_has_the_likeliest_nodes(tmp_path, target, nodes):
    """There are 5 + 15 + 30 paths, each with the product of its steps' probabilities."""
    tensors = speculator()
    drafter = load_drafter("mlp_speculator", target, folder_with(tmp_path, tensors, CONFIG), draft="tree", nodes=16)
    (written, draft), *_ = ragged_steps(target, drafter, Budget(3, nodes))
    assert draft.nodes == min(nodes, 50) and depths(draft.parents).max() <= 3
    for row, text in enumerate(written):
        paths = {(): 1.0}
        for level, width in enumerate((5, 3, 2)):
            for path in [path for path in paths if len(path) == level]:
                chances, ranked = MlpReference(tensors).logits(text, path).softmax(-1).topk(width)
                paths |= {(*path, t): paths[path] * c for t, c in zip(ranked.tolist(), chances.tolist(), strict=True)}
        del paths[()]
        assert set(paths_of(draft, row)[1:]) == set(sorted(paths, key=paths.get, reverse=True)[:nodes])


# training


@pytest.mark.parametrize("config", [CONFIG, TIED])
def test_saved_config_is_that_of_the_file(tmp_path, target, config):
    tensors = tied()[1] if "tie_weights" in config else speculator()
    drafter = load_drafter("mlp_speculator", target, folder_with(tmp_path / "read", tensors, config))
    head = drafter.head
    assert (len(head), head.inner_dim, head.widths) == (3, INNER, (5, 3, 2))
    drafter.save(tmp_path / "written", "some/llama")
    written = json.loads((tmp_path / "written" / "config.json").read_text())
    assert {**written, "torch_dtype": "float16"}.items() >= config.items()
