import json
import math

import pytest
import torch
from torch.nn import functional as F

from specdemo.methods import load_drafter
from specdemo.methods.heads import network
from specdemo.methods.heads.eagle import Eagle
from specdemo.methods.heads.formats.eagle import default_taps
from specdemo.models.checkpoints import open_checkpoint
from specdemo.models.toy import ToyTarget
from tests.generation import train
from tests.methods.heads import (
    Published,
    Reference,
    attention,
    folder_with,
    gated_mlp,
    hidden_states,
    linear,
    randoms,
    rms_norm,
    target_of,
    without,
)
from tests.models.tiny import VOCABULARY

H, LAYERS, WORDS = 32, 3, 20  # sizes of the tiny Llama, and of the draft vocabulary
IDS = torch.arange(WORDS) * 3 + torch.arange(WORDS) % 2  # target ids of the draft vocabulary
LAYER = {"num_attention_heads": 4, "rms_norm_eps": 1e-5, "vocab_size": VOCABULARY, "hidden_act": "silu"}
ID_LIST = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def target():
    return target_of()


class EagleReference(Reference):
    """A head computed column by column. Draft columns see what the last observed column sees."""

    def __init__(self, head, tensors, before=False, feed_norm=False, theta=1e4, window=0, mask=None):
        super().__init__(target_of(), {name.replace("midlayer.", "layers.0."): t for name, t in tensors.items()})
        self.taps, self.size, self.feature_first = head.convention.taps, head.config.head_dim, False
        self.before, self.feed_norm, self.theta, self.window, self.mask = before, feed_norm, theta, window, mask
        self.eagle1 = "layers.0.hidden_norm.weight" not in self.w
        self.feature_first = head.convention.feature_first  # random weights: the detection may choose either

    def features(self, text):
        return self.join([self.hidden(text, tap) for tap in self.taps])

    def join(self, taken):
        if self.eagle1:
            return taken[0]
        if "fc_norm.0.weight" in self.w:
            taken = [rms_norm(h, self.w[f"fc_norm.{i}.weight"], 1e-5) for i, h in enumerate(taken)]
        joined = torch.cat(taken, -1)
        if "input_norm.weight" in self.w:
            joined = rms_norm(joined, self.w["input_norm.weight"], 1e-5)
        return linear(self.w, "fc", joined)

    def layer(self, i, x, residual, blind):
        name = f"layers.{i}"
        state = residual + attention(self.w, f"{name}.self_attn", x, blind, self.theta, self.size, eps=1e-5)
        normed = rms_norm(state, self.w[f"{name}.post_attention_layernorm.weight"], 1e-5)
        return state + gated_mlp(self.w, f"{name}.mlp", normed)

    def states(self, tokens, features, observed):
        """Return states [n, D] for the next tokens [n] and features [n, D]."""
        w, every = self.w, torch.arange(len(tokens))
        blind = every > every[:, None]
        if self.window:
            blind |= every <= every.clamp_max(observed - 1)[:, None] - self.window
        own = None if self.eagle1 else w.get("embed_tokens.weight")
        embedded = (self.target.embed.weight if own is None else own)[torch.tensor(tokens)]
        if self.eagle1:
            pair = [features, embedded] if self.feature_first else [embedded, features]
            x = linear(w, "fc", torch.cat(pair, -1))
            return self.layer(0, x, x, blind)
        normed = rms_norm(features, w["layers.0.hidden_norm.weight"], 1e-5)
        x = torch.cat([rms_norm(embedded, w["layers.0.input_layernorm.weight"], 1e-5), normed], -1)
        state = self.layer(0, x, normed if self.before else features, blind)
        if "layers.1.input_layernorm.weight" in w:
            state = self.layer(1, rms_norm(state, w["layers.1.input_layernorm.weight"], 1e-5), state, blind)
        return state

    def last_state(self, text, drafted):
        """Return the state [D] after a text and the draft tokens that follow its root."""
        features, tokens = self.features(text), list(text[1:])
        observed = len(tokens)
        states = self.states(tokens, features, observed)
        for token in drafted:
            back = rms_norm(states[-1:], self.w["norm.weight"], 1e-5) if self.feed_norm else states[-1:]
            if self.mask is not None:
                back, token = self.join([*self.w["mask_hidden"].reshape(3, 1, H)]), self.mask
            features, tokens = torch.cat([features, back]), [*tokens, token]
            states = self.states(tokens, features, observed)
        return states[-1]

    def logits(self, text, drafted):
        state = self.last_state(text, drafted)
        if self.eagle1:
            return state @ self.target.lm_head.weight.T
        small = rms_norm(state, self.w["norm.weight"], 1e-5) @ self.w["lm_head.weight"].T
        if "d2t" not in self.w:
            return small
        ids = torch.arange(len(self.w["d2t"])) + self.w["d2t"]
        return torch.full((VOCABULARY,), -math.inf).index_copy_(0, ids, small)

    def loss(self, text, drafted, following):
        loss = super().loss(text, drafted, following)
        if not self.eagle1:
            return loss
        next_feature = hidden_states(self.target, tuple(text))[-1][-1]
        return 0.1 * loss + F.smooth_l1_loss(self.last_state(text, drafted), next_feature)


# --- files in public formats ---


def layer_tensors(name, inputs, size=8, qk_norm=False, special=()):
    shapes = {
        "self_attn.q_proj": (4 * size, inputs),
        "self_attn.k_proj": (2 * size, inputs),
        "self_attn.v_proj": (2 * size, inputs),
        "self_attn.o_proj": (H, 4 * size),
        "mlp.gate_proj": (40, H),
        "mlp.up_proj": (40, H),
        "mlp.down_proj": (H, 40),
        "post_attention_layernorm": (H,),
        **dict.fromkeys(special, (H,)),
        **({"self_attn.q_norm": (size,), "self_attn.k_norm": (size,)} if qk_norm else {}),
    }
    return randoms({f"{name}.{n}.weight": shape for n, shape in shapes.items()}, seed=len(name) + inputs)


def matrix(*shape, seed=0):
    return 0.3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def eagle1():
    return {"fc.weight": matrix(H, 2 * H), **layer_tensors("layers.0", H)}


def eagle3(first="midlayer", words=WORDS, **kinds):
    tensors = {
        "fc.weight": matrix(H, 3 * H),
        **layer_tensors(first, 2 * H, special=("hidden_norm", "input_layernorm"), **kinds),
        "norm.weight": 1.0 + matrix(H, seed=1),
        "lm_head.weight": matrix(words, H, seed=2),
    }
    if words < VOCABULARY:
        tensors["d2t"] = IDS - torch.arange(words)
        tensors["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool)
        tensors["t2d"][IDS] = True
    return tensors


def speculators(**changes):
    nested = {**LAYER, "model_type": "llama", "rope_theta": 5e5}
    verifier = {"name_or_path": "some/verifier"}
    return {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": WORDS,
        "norm_before_residual": False,
        "transformer_layer_config": nested,
        "speculators_config": {"algorithm": "eagle3", "verifier": verifier},
        **changes,
    }


def windowed_config(window):
    config = speculators()
    kinds = {"layer_types": ["sliding_attention"], "sliding_window": window}
    config["transformer_layer_config"] |= kinds
    return config


def peagle(**changes):
    second = layer_tensors("layers.1", H, special=("input_layernorm",))
    config = speculators(**{"speculators_model_type": "peagle", "mask_token_id": 7, **changes})
    return config, {**eagle3("layers.0"), **second, "mask_hidden": matrix(1, 1, 3 * H, seed=9)}


def dialects():
    """Return configs, tensors and arguments of `EagleReference`."""
    plain = {**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": WORDS}
    copied = {"embed_tokens.weight": matrix(VOCABULARY, H), "lm_head.weight": matrix(VOCABULARY, H)}
    own = {"embed_tokens.weight": matrix(VOCABULARY, H, seed=5)}
    buffers = {"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    second = layer_tensors("layers.1", H, special=("input_layernorm",))
    norms = {f"fc_norm.{i}.weight": 1.0 + matrix(H, seed=i) for i in range(3)}
    qwen = speculators(norm_before_residual=True)
    qwen["transformer_layer_config"] |= {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16}
    spread = {ID_LIST: [0, 1, 2]}
    return {
        "eagle1": (LAYER, {**eagle1(), "fc.bias": matrix(H)}, {}),
        "eagle1-copies": ({**LAYER, "bias": False, "rope_theta": 5e5}, {**eagle1(), **copied}, {"theta": 5e5}),
        "official": (plain, {**eagle3(), **buffers}, {}),
        "official-all-words": ({**plain, "draft_vocab_size": VOCABULARY}, eagle3(words=VOCABULARY), {}),
        "specforge": ({**plain, "eagle_config": {**spread, "use_aux_hidden_state": True}}, eagle3(size=16), {}),
        "speculators": (speculators(**spread), eagle3("layers.0"), {"theta": 5e5}),
        "deepspec": ({**plain, "target_layer_ids": [0, 1, 2]}, eagle3("layers.0"), {}),
        "speculators-window": (windowed_config(5), eagle3("layers.0"), {"theta": 5e5, "window": 5}),
        "speculators-qwen3": (
            qwen,
            {**eagle3("layers.0", size=16, qk_norm=True), **own},
            {"theta": 5e5, "before": True},
        ),
        "speculators-two-layers": (
            speculators(norm_before_fc=True),
            {**eagle3("layers.0"), **second, "input_norm.weight": 1.0 + matrix(3 * H)},
            {"theta": 5e5},
        ),
        "p-eagle-speculators": (*peagle(), {"theta": 5e5, "mask": 7}),
        "p-eagle": (
            {**plain, "ptd_token_id": 9},
            {**eagle3(), **second, **own, **norms, "mask_hidden": matrix(1, 3 * H, seed=9)},
            {"mask": 9},
        ),
        "eagle-3.1": (
            speculators(fc_norm=True, norm_output=True),
            {**eagle3("layers.0"), **norms},
            {"theta": 5e5, "feed_norm": True},
        ),
    }


def published(name):
    config, tensors, settings = dialects()[name]
    file = "pytorch_model.bin" if name in ("eagle1", "official") else "model.safetensors"
    return Published("eagle", config, tensors, lambda head: EagleReference(head, tensors, **settings), file=file)


CASES = {name if "eagle" in name else f"eagle-{name}": lambda name=name: published(name) for name in dialects()}


@pytest.mark.parametrize("dialect", dialects())
def test_taps_of_every_dialect(dialect, target, tmp_path):
    config, tensors, _ = dialects()[dialect]
    head = Eagle.load(folder_with(tmp_path, tensors, config), target)
    taps = head.convention.taps
    if dialect.startswith("eagle1"):
        assert taps == (-1,)
    elif dialect in ("specforge", "speculators"):
        assert taps in ((0, 1, 2), (1, 2, 3)) and "% with layers 1, 2, 3" in head.note
    else:
        assert taps == ((1, 2, 3) if dialect == "deepspec" else (1, 1, 1)) and not head.note


# --- training ---


@pytest.mark.parametrize("sizes", [{"kind": "eagle1"}, {"intermediate": 24}, {"draft_vocab": WORDS}], ids=str)
def test_saved_config_has_the_sizes_of_the_head(sizes, target, tmp_path):
    head = Eagle.fresh(target, **sizes)
    assert all(p is not target.lm_head.weight and p is not target.embed.weight for p in head.parameters())
    load_drafter("eagle", target, head).save(tmp_path, "some/target")
    config = json.loads((tmp_path / "config.json").read_text())
    if "kind" not in sizes:
        assert config[ID_LIST] == [1, 1, 1] and config["eagle_config"][ID_LIST] == [0, 0, 0]
        assert config["draft_vocab_size"] == sizes.get("draft_vocab", VOCABULARY)
    assert config["intermediate_size"] == sizes.get("intermediate", 48)


def test_saved_files_have_the_authors_names(target, tmp_path):
    load_drafter("eagle", target, Eagle.fresh(target, draft_vocab=WORDS)).save(tmp_path / "3", "some/target")
    saved = open_checkpoint(str(tmp_path / "3")).tensors
    assert {n: t.shape for n, t in saved.items() if "mlp" not in n} == {
        n: t.shape for n, t in eagle3().items() if "mlp" not in n
    }
    places = torch.arange(WORDS) + saved["d2t"]
    assert bool(saved["t2d"][places].all()) and int(saved["t2d"].sum()) == WORDS
    load_drafter("eagle", target, Eagle.fresh(target, "eagle1")).save(tmp_path / "1", "some/target")
    assert set(open_checkpoint(str(tmp_path / "1")).tensors) == set(eagle1())


# --- files that leave the convention open ---


@pytest.mark.parametrize("before", [False, True])
def test_best_convention_is_selected(before, target, tmp_path):
    torch.manual_seed(1)
    head = Eagle.fresh(target)
    head.convention = type(head.convention)((1, 2, 3), before)
    train(load_drafter("eagle", target, head), network.sample_target_text(target, (1, 2, 3)), 40)
    for lists in ("top", "inner"):
        check_selection(head, lists, before, target, tmp_path)


def check_selection(head, lists, before, target, folder):
    """Check that the head's convention is found in files of two numberings. lists: where the file has its layers."""
    config = speculators() if lists == "top" else dict(LAYER)
    if lists == "top":
        config["transformer_layer_config"].pop("rope_theta")
        config.pop("norm_before_residual")
    else:
        config["norm_before_residual"] = before
    for ids in ([1, 2, 3], [0, 1, 2]):
        inner = {"eagle_config": {ID_LIST: ids}} if lists == "inner" else {ID_LIST: ids}
        tensors = {n.replace("layers.0.", "midlayer."): t for n, t in head.state_dict().items()}
        loaded = Eagle.load(folder_with(folder, tensors, config | inner), target)
        assert loaded.convention == head.convention
        if lists == "top" or ids == [0, 1, 2]:  # otherwise it would read a layer 4
            residual = "normed" if before else "plain"
            assert loaded.note.startswith(f"Convention: layers 1, 2, 3 and the {residual} residual. The file")
        assert load_drafter("eagle", target, loaded).note == loaded.note


def test_either_order_of_fc_is_found(target, tmp_path):
    torch.manual_seed(1)
    head = Eagle.fresh(target, "eagle1")
    train(load_drafter("eagle", target, head), network.sample_target_text(target, (-1,)), 40)
    tensors = dict(head.state_dict())
    assert not Eagle.load(folder_with(tmp_path, tensors, LAYER), target).convention.feature_first
    tensors["fc.weight"] = tensors["fc.weight"].roll(H, 1)
    swapped = Eagle.load(folder_with(tmp_path, tensors, LAYER), target)
    assert swapped.convention.feature_first and "fc over feature and embedding" in swapped.note
    trainable = Eagle.load_trainable(folder_with(tmp_path, tensors, LAYER), target)
    load_drafter("eagle", target, trainable).save(tmp_path / "saved", "tiny")
    assert not Eagle.load(str(tmp_path / "saved"), target).convention.feature_first


def test_default_taps():
    assert [default_taps(n) for n in (12, 32, 36, 4, 3, 1)] == [
        (2, 6, 9),
        (2, 16, 29),
        (2, 18, 33),
        (2, 2, 2),
        (1, 1, 1),
        (1, 1, 1),
    ]


def test_files_that_do_not_fit_are_refused_with_the_fix(target, tmp_path):
    tensors, config = eagle3("layers.0"), speculators()

    def refused(match, config=config, tensors=tensors, target=target):
        with pytest.raises(ValueError, match=match) as caught:
            Eagle.load(folder_with(tmp_path, tensors, config), target)
        assert "\n" not in str(caught.value)

    refused("hidden size 32, the target has 8; choose the target some/verifier", target=ToyTarget(61))
    refused("vocabulary 60, the target has 61", tensors={**tensors, "t2d": torch.ones(60, dtype=torch.bool)})
    refused("reads layer 7, the target has 3", {**config, ID_LIST: [2, 5, 7]})
    refused("gadget.weight: expected shape none, found", tensors={**tensors, "gadget.weight": torch.ones(3)})
    refused("norm.weight: expected shape .* found none", tensors={n: t for n, t in tensors.items() if "post_" not in n})
    refused("has activation gelu", speculators(transformer_layer_config={**LAYER, "hidden_act": "gelu"}))
    refused("add it to its config.json", speculators(transformer_layer_config={"vocab_size": VOCABULARY}))
    refused("lacks fc.weight", tensors={n: t for n, t in tensors.items() if n != "fc.weight"})
    refused("is P-EAGLE, but lacks mask_hidden", speculators(speculators_model_type="peagle", mask_token_id=7))
    refused("is P-EAGLE, but lacks mask_token_id in its config", *peagle(mask_token_id=None))
    refused("mask token 61 of .* is not in a vocabulary of 61", *peagle(mask_token_id=61))
    with pytest.raises(ValueError, match="choose eagle3 or eagle1"):
        Eagle.fresh(target, "eagle2")
    with pytest.raises(ValueError, match="leave draft_vocab out"):
        Eagle.fresh(target, "eagle1", draft_vocab=5)


def test_specforge_feedback_convention_is_detected(target, tmp_path):
    config = {**LAYER, "draft_vocab_size": WORDS, "norm_output": True}
    head = Eagle.load(folder_with(tmp_path, eagle3(), config), target)
    assert [reading.norm_output for reading in head.conventions] == [True, False] and "fed back normed" in head.note


def test_target_layer_windows_do_not_apply_to_heads(target, tmp_path):
    config = {**LAYER, "draft_vocab_size": WORDS, "layer_types": ["sliding_attention"] * 3, "sliding_window": 4}
    assert Eagle.load(folder_with(tmp_path, eagle3(), config), target).windows == (0,)


def test_a_head_without_lm_head_uses_the_targets_unless_it_has_a_draft_vocabulary(target, tmp_path):
    tensors = without(without(eagle3(), "lm_head"), "d2t")
    head = Eagle.load(folder_with(tmp_path / "whole", tensors, LAYER), target)
    assert head.lm_head is None and head.note.startswith("It has no lm_head.weight, so it uses the target's.")
    with pytest.raises(ValueError, match="has a draft vocabulary but no tensor d2t; fetch it again"):
        Eagle.load(folder_with(tmp_path / "cut", tensors, LAYER | {"draft_vocab_size": WORDS}), target)


def test_eagle_1_of_speculators_is_named(target, tmp_path):
    with pytest.raises(ValueError, match="is EAGLE-1 in speculators' format, not supported"):
        source = folder_with(tmp_path, {"fusion_fc.weight": matrix(H, 2 * H)}, {"speculators_model_type": "eagle"})
        Eagle.load(source, target)
