import json
from dataclasses import replace
from functools import partial
from itertools import product
from math import inf
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specdemo.core.protocol import Budget, Progress
from specdemo.core.sampling import Sampling
from specdemo.methods import detect_method, load_drafter
from specdemo.methods.heads.dflash import DFlash, DFlashDraftModel
from specdemo.methods.heads.formats.dflash import spread_taps
from specdemo.methods.heads.network import sample_target_text
from specdemo.models.checkpoints import Checkpoint, open_meta_checkpoint
from specdemo.models.target import HFTarget
from specdemo.models.toy import ToyTarget
from tests.generation import train
from tests.methods.heads import (
    Published,
    Reference,
    attention,
    batch_of,
    check_sampling,
    folder_with,
    gated_mlp,
    paths_of,
    randoms,
    rms_norm,
    target_of,
)
from tests.models.tiny import VOCABULARY, texts

H, HEADS, GROUPS, SIZE, MLP, LAYERS, BLOCK, MASK = 32, 4, 2, 8, 48, 2, 6, 3
EPS, THETA = 1e-6, 50.0
TAPS = (1, 2)
BODY = {
    "hidden_size": H,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": SIZE,
    "hidden_act": "silu",
    "rms_norm_eps": EPS,
    "max_position_embeddings": 96,
}
ZLAB = BODY | {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "rope_theta": THETA,
    "vocab_size": VOCABULARY,
    "num_target_layers": 3,
    "block_size": BLOCK,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 1]},
}


@pytest.fixture(scope="module")
def target():
    return target_of()


def drafter_tensors():
    """Return random tensors with z-lab's names and shapes."""
    shapes = {"fc.weight": (H, len(TAPS) * H), "hidden_norm.weight": (H,), "norm.weight": (H,)}
    for i in range(LAYERS):
        shapes |= {
            f"layers.{i}.input_layernorm.weight": (H,),
            f"layers.{i}.post_attention_layernorm.weight": (H,),
            f"layers.{i}.self_attn.q_proj.weight": (HEADS * SIZE, H),
            f"layers.{i}.self_attn.k_proj.weight": (GROUPS * SIZE, H),
            f"layers.{i}.self_attn.v_proj.weight": (GROUPS * SIZE, H),
            f"layers.{i}.self_attn.o_proj.weight": (H, HEADS * SIZE),
            f"layers.{i}.self_attn.q_norm.weight": (SIZE,),
            f"layers.{i}.self_attn.k_norm.weight": (SIZE,),
            f"layers.{i}.mlp.gate_proj.weight": (MLP, H),
            f"layers.{i}.mlp.up_proj.weight": (MLP, H),
            f"layers.{i}.mlp.down_proj.weight": (H, MLP),
        }
    return randoms(shapes, 0.2, seed=0)


def dflash2_tensors(span=2, group=8, rank=4):
    """Return the additional tensors of DFlash2."""
    shapes = {
        "candidate_selector.predecessor_codebook": (VOCABULARY, rank),
        "candidate_selector.successor_codebook": (VOCABULARY, rank),
        "candidate_selector.hidden_projection.weight": (rank, H),
    }
    for i, name in product(range(LAYERS), ("attention_conv", "mlp_conv")):
        shapes[f"layers.{i}.{name}.base_kernel"] = (2, span, H)
        shapes[f"layers.{i}.{name}.kernel_projection.weight"] = (2 * span * H // group, H)
    return randoms(shapes, 0.4, seed=1)


def changed(config, **inner):
    return config | {"dflash_config": config["dflash_config"] | inner}


def convolved(w, prefix, x, sublayer):
    """Apply DFlash2's filter around a sublayer, channel by channel; without its tensors only the sublayer."""
    if f"{prefix}.base_kernel" not in w:
        return sublayer(x)
    base, projection = w[f"{prefix}.base_kernel"], w[f"{prefix}.kernel_projection.weight"]
    span = base.shape[1]
    delta = (x @ projection.T).reshape(len(x), 2, span, -1)
    group = H // delta.shape[-1]

    def filtered(side, y):
        out = torch.zeros_like(y)
        for i, t, c in product(range(len(y)), range(span), range(H)):
            if i >= t:
                out[i, c] += (base[side, t, c] + delta[i, side, t, c // group]) * y[i - t, c]
        return out

    return filtered(1, sublayer(filtered(0, x)))


class DFlashReference(Reference):
    """A block without a cache, from the paper's formulas.

    first: the first slot that predicts. kinds: window and causality of every layer, if different. sink: logit of a key
    without a value. mask: embedding of the mask token. finish: a final stage, which returns the logits [V] of the next
    slot, see `logits`.
    """

    def __init__(
        self,
        tensors,
        first=1,
        window=0,
        causal=False,
        kinds=(),
        sink=-inf,
        mask=None,
        scale=1.0,
        head=None,
        finish=None,
    ):
        super().__init__(target_of(), tensors)
        self.first, self.sink, self.scale = first, sink, scale
        self.kinds = kinds or [(window, causal)] * LAYERS
        self.mask = self.target.embed(torch.tensor(MASK)) if mask is None else mask
        self.head, self.finish, self.blocks = head or self.target.lm_head, finish, {}

    def block(self, text):
        """Return the states [S, H] of the block after a text."""
        if tuple(text) not in self.blocks:
            anchor = self.target.embed(torch.tensor(text[-1:]))
            x = self.scale * torch.cat([anchor, self.mask.expand(BLOCK - 1, -1)])
            self.blocks[tuple(text)] = self.states(torch.cat([self.hidden(text, tap) for tap in TAPS], -1), x)
        return self.blocks[tuple(text)]

    def states(self, features, x):
        """Return states [S, H] for features [T, taps * H] and block embeddings x [S, H]."""
        context = rms_norm(features @ self.w["fc.weight"].T, self.w["hidden_norm.weight"])
        positions = torch.arange(len(context) + len(x))
        distance = positions[len(context) :, None] - positions
        for i in range(LAYERS):
            window, causal = self.kinds[i]
            blind = ((distance < 0) & causal) | (distance.abs() >= (window or len(positions)))
            w = {n.removeprefix(f"layers.{i}."): t for n, t in self.w.items() if n.startswith(f"layers.{i}.")}
            attend = partial(
                attention, w, "self_attn", blind=blind, theta=THETA, size=SIZE, context=context, sink=self.sink
            )
            x = x + convolved(w, "attention_conv", rms_norm(x, w["input_layernorm.weight"]), attend)
            normed = rms_norm(x, w["post_attention_layernorm.weight"])
            x = x + convolved(w, "mlp_conv", normed, partial(gated_mlp, w, "mlp"))
        return rms_norm(x, self.w["norm.weight"])

    def logits(self, text, drafted):
        states, slot = self.block(text), self.first + len(drafted)
        logits = self.head(states)[slot]
        return logits if self.finish is None else self.finish(self.w, states, slot, logits, text, drafted)


def observed_drafter(target, model, text, steps=(), sampling=None, **options):
    """Return a drafter that has observed text [B, T], split into several observations at `steps`."""
    drafter = load_drafter("dflash", target, model, **options)
    hidden = target.start(text, drafter.taps).hidden
    drafter.start(len(text), sampling or Sampling(1.0), torch.Generator().manual_seed(0))
    ends = [*steps, text.shape[1] - 1]
    for begin, end in zip([0, *ends], ends, strict=False):
        part = {tap: h[:, begin:end] for tap, h in hidden.items()}
        drafter.observe(Progress(text[:, begin:end], text[:, begin + 1 : end + 1], [end - begin] * len(text), part))
    return drafter


def logits_of(target, model, text, steps=(9, 12)):
    """Return log q [D, V] of every slot after a text [1, T]."""
    return observed_drafter(target, model, text, steps).propose(Budget(16, 16)).probs[0].log()


TEXT = texts(1, 16, seed=3)


def write(folder, config, tensors):
    return folder_with(folder, tensors, config)


# Public formats


def published(config, extra=None, stored=None, first=1, **settings):
    """Return a drafter with the common tensors and more, or with `stored` tensors."""
    tensors = drafter_tensors() | (extra or {})
    reference, stored = DFlashReference(tensors, first, **settings), tensors if stored is None else stored
    return Published("dflash", config, stored, lambda head: reference, longest=BLOCK - first)


def scaled():
    config = changed(ZLAB, input_embedding_scale=2.0, output_multiplier=0.5, final_logit_softcapping=1.5)
    lm_head = target_of().lm_head
    return published(config, scale=2.0, head=lambda states: 1.5 * torch.tanh(0.5 * lm_head(states) / 1.5))


def test_z_lab_without_a_list_of_layers(target, tmp_path):
    model = DFlash.load(write(tmp_path, changed(ZLAB, target_layer_ids=None), drafter_tensors()), target)
    assert model.convention.taps == spread_taps(3, 2) == (1, 2)
    assert spread_taps(36, 5) == (2, 10, 18, 26, 34)  # Qwen3-8B
    assert spread_taps(16, 5) == (2, 5, 8, 11, 14)  # LFM2.5-1.2B
    assert spread_taps(3, 1) == (2,)


XPRESS_NAMES = {
    "w1.weight": "token_embed.weight",
    "mix.L": "mix_l",
    "mlp.gate_proj.weight": "mlp_gate.weight",
    "mlp.up_proj.weight": "mlp_up.weight",
    "mlp.down_proj.weight": "mlp_down.weight",
    "w2.weight": "readout.weight",
}


def xpress_tensors(rank=4, inner=6, block_size=BLOCK, vocabulary=VOCABULARY, hidden=H):
    """Return the additional tensors of XPress, by vLLM's names without the prefix."""
    shapes = {"w1.weight": (vocabulary, rank), "w2.weight": (vocabulary, rank), "in_proj.weight": (rank, 3 * rank)}
    shapes |= {
        "down_h.weight": (rank, hidden),
        "down_g.weight": (rank, hidden),
        "mix.L": (rank, block_size, block_size),
    }
    shapes |= {"mlp.gate_proj.weight": (inner, rank), "mlp.up_proj.weight": (inner, rank)}
    return randoms(shapes | {"mlp.down_proj.weight": (rank, inner)}, 0.7, seed=8)


def xpress_bias(w, states, before):
    """Return the bias [S, V] of the first slots from the formulas. before [S]: the token before each slot."""
    mean = w["down_g.weight"] @ states.mean(0)
    parts = zip(states @ w["down_h.weight"].T, w["w1.weight"][before], strict=False)
    latents = [w["in_proj.weight"] @ torch.cat([state, mean, token]) for state, token in parts]
    biases = []
    for k, latent in enumerate(latents):
        mixed = latent + sum(w["mix.L"][:, k, j] * latents[j] for j in range(k + 1))
        biases.append(w["w2.weight"] @ (mixed + gated_mlp(w, "mlp", mixed)))
    return torch.stack(biases)


def xpress_finish(w, states, slot, logits, text, drafted):
    """Return the logits after all passes, when a token depends on the draft tokens before it."""
    before = [*text[-1:], *drafted] if slot == len(drafted) else [*text[-2:], *drafted]
    return logits + xpress_bias(xpress_tensors(), states, torch.tensor(before))[-1]


def xpress(style, from_anchor=False, **more):
    w = xpress_tensors()
    if style == "vllm":
        config = ZLAB | {"architectures": ["Qwen3XPressModel"], "xpress_rank": 4, "xpress_block_size": BLOCK}
        named = {f"xpress_head.{name}": tensor for name, tensor in w.items()}
    else:
        named = {f"refiner_head.{XPRESS_NAMES.get(name, name)}": tensor for name, tensor in w.items()}
        layer = {k: v for k, v in ZLAB.items() if k in BODY} | {"rope_theta": THETA}
        config = {"speculators_model_type": "xpress", "architectures": ["XPressSpeculator"], "block_size": BLOCK}
        config |= {"transformer_layer_config": layer, "mask_token_id": MASK, "aux_hidden_state_layer_ids": list(TAPS)}
        config |= {"num_jacobi_passes": more.pop("xpress_num_passes", 6), "draft_vocab_size": VOCABULARY}
    config |= {"sample_from_anchor": from_anchor} | more
    return published(config, named, first=0 if from_anchor else 1, finish=xpress_finish)


def xpress_checkpoint(folder, style, from_anchor=False, **more):
    case = xpress(style, from_anchor, **more)
    return folder_with(folder, case.tensors, case.config)


@pytest.mark.parametrize(
    ("style", "passes", "from_anchor"),
    [("vllm", 0, False), ("vllm", 1, True), ("speculators", 2, False), ("speculators", 1, True)],
)
def test_xpress(target, tmp_path, style, passes, from_anchor):
    """A pass reads the tokens of the last pass; the first reads the most likely tokens of the block."""
    model = DFlash.load(xpress_checkpoint(tmp_path, style, from_anchor, xpress_num_passes=passes), target)
    draft = observed_drafter(target, model, TEXT, (9, 12), sampling=Sampling()).propose(Budget(16, 16))
    states = DFlashReference(drafter_tensors()).block(TEXT[0].tolist())
    base = logits = target.lm_head(states)
    first, root = (0 if from_anchor else 1), TEXT[0, -1:]
    for _ in range(passes):
        tokens = logits.argmax(-1)
        before = torch.cat([root, tokens[:-1]]) if from_anchor else torch.cat([TEXT[0, -2:], tokens[1:-1]])
        logits = base + xpress_bias(xpress_tensors(), states, before)
    probs, tokens = logits[first:].softmax(-1), logits[first:].argmax(-1)
    assert draft.tokens[0].tolist() == tokens.tolist()
    torch.testing.assert_close(draft.confidence[0], probs.gather(-1, tokens[:, None])[:, 0], atol=1e-5, rtol=1e-4)


def test_xpress_corrects_the_tokens_of_its_shortlist_only(target, tmp_path):
    model = DFlash.load(xpress_checkpoint(tmp_path, "vllm", xpress_topc=3), target)
    draft = observed_drafter(target, model, TEXT).propose(Budget(5, 5))
    states = DFlashReference(drafter_tensors()).block(TEXT[0].tolist())
    tokens = target.lm_head(states)[1:].topk(3).indices
    torch.testing.assert_close(draft.probs[0].gather(-1, tokens).sum(-1), torch.ones(5))


def test_saved_xpress_keeps_its_passes_and_its_shortlist(target, tmp_path):
    source = xpress_checkpoint(tmp_path / "read", "speculators", xpress_num_passes=0, xpress_topc=9)
    model = DFlash.load(source, target)
    load_drafter("dflash", target, model).save(tmp_path / "saved", "tiny")
    again = DFlash.load(str(tmp_path / "saved"), target)
    assert (again.convention.passes, again.convention.shortlist) == (0, 9)
    assert replace(again.convention, body=model.convention.body) == model.convention


@pytest.mark.parametrize("passes", [0, 1, 6])
def test_xpress_samples_are_drawn_from_the_target(passes):
    """Also before the passes have converged, where a token's q belongs to other tokens than the drafted ones."""
    target = ToyTarget(5, seed=6)
    fresh = DFlash.fresh(target, block_size=4)
    tensors = {f"xpress_head.{name}": t for name, t in xpress_tensors(block_size=4, vocabulary=5, hidden=8).items()}
    head = DFlashDraftModel(replace(fresh.convention, passes=passes), tensors)
    head.load_state_dict(fresh.state_dict() | tensors)
    check_sampling(load_drafter("dflash", target, head.requires_grad_(False)), target)


def windowed(causal, window=5, **extra):
    """Return a file whose layers with a window are causal unless the config specifies otherwise."""
    config = {"layer_types": ["sliding_attention"] * LAYERS, "sliding_window": 5} | extra
    config["dflash_config"] = ZLAB["dflash_config"] | extra.get("dflash_config", {})
    return published(ZLAB | config, window=window, causal=causal)


def mixed_layers(from_anchor):
    """Return a file in which the second layer only has a causal window."""
    config = changed(ZLAB, sample_from_anchor=from_anchor)
    config |= {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6}
    return published(config, first=0 if from_anchor else 1, kinds=[(0, False), (6, True)])


def window_without_types(**extra):
    """Return a file with a window of 4 in all layers."""
    causal = "sliding_attention" in extra.get("layer_types", ())
    config = changed(ZLAB, use_swa=True, swa_window_size=4) | extra  # takes precedence over `sliding_window`
    return published(config, window=4, causal=causal)


def sinks(causal):
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0])
    more = {f"layers.{i}.self_attn.attention_sink_bias": sink.clone() for i in range(LAYERS)}
    return published(changed(ZLAB, attention_sink_bias=True, causal=causal), more, sink=sink, causal=causal)


def own_lm_head():
    rows = torch.randn(VOCABULARY, H, generator=torch.Generator().manual_seed(8))
    return published(ZLAB | {"has_own_lm_head": True}, {"lm_head.weight": rows}, head=lambda states: states @ rows.T)


@pytest.mark.parametrize("mask", [MASK, VOCABULARY + 5])
@pytest.mark.parametrize("where", ["among the weights", "alone", "with its token"])
def test_a_mask_token_with_an_embedding_of_its_own(target, tmp_path, mask, where):
    w, own = drafter_tensors(), torch.randn(H, generator=torch.Generator().manual_seed(6))
    inside = {"mask_embedding": own} if where == "among the weights" else {}
    model = write(tmp_path, changed(ZLAB, mask_token_id=mask), w | inside)
    if not inside:
        torch.save(own[None] if where == "alone" else {"embedding": own, "mask_token_id": mask}, attached(model))
    expected = target.lm_head(DFlashReference(w, mask=own).block(TEXT[0].tolist())[1:]).softmax(-1)
    torch.testing.assert_close(logits_of(target, model, TEXT).exp(), expected, atol=1e-5, rtol=1e-3)
    assert open_meta_checkpoint(model).tensors["mask_embedding"].shape == (H,)


def attached(model):
    return Path(model) / "mask_embedding.pt"


@pytest.mark.parametrize("config, message", [
    ({"embedding": torch.zeros(H), "mask_token_id": MASK + 1}, f"is for token {MASK + 1}, its config has {MASK}"),
    ({"mask_token_id": MASK}, "has no embedding of a mask token"),
    ({"embedding": torch.zeros(H), "mask_token_id": "3"}, "has no embedding of a mask token"),
    ({"embedding": torch.zeros(H), "mask_token_id": 1 << 70}, "has no embedding of a mask token"),
    (torch.zeros(H + 1), "mask_embedding"),
])  # fmt: skip
def test_a_mask_embedding_that_is_not_of_these_weights_is_refused(target, tmp_path, config, message):
    model = write(tmp_path, ZLAB, drafter_tensors())
    torch.save(config, attached(model))
    with pytest.raises(ValueError, match=message):
        load_drafter("dflash", target, model)


def speculators(from_anchor):
    """Return a file with a draft vocabulary."""
    ids = torch.arange(1, VOCABULARY, 3)
    rows = torch.randn(len(ids), H, generator=torch.Generator().manual_seed(4))
    t2d = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, ids, True)
    extra = {"lm_head.weight": rows, "d2t": ids - torch.arange(len(ids)), "t2d": t2d}
    extra["embed_tokens.weight"] = target_of().embed.weight.clone()
    config = {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashDraftModel"],
        "transformer_layer_config": BODY | {"rope_theta": THETA, "vocab_size": VOCABULARY, "model_type": "qwen3"},
        "draft_vocab_size": len(ids),
        "block_size": BLOCK,
        "aux_hidden_state_layer_ids": list(TAPS),
        "mask_token_id": MASK,
        "sample_from_anchor": from_anchor,
        "speculators_config": {"verifier": {"name_or_path": "tiny"}},
    }

    def logits(states):
        return torch.full((len(states), VOCABULARY), -1e4).index_copy(1, ids, states @ rows.T)

    return published(config, extra, first=0 if from_anchor else 1, head=logits)


def markov_bias(extra, kind, states, before):
    """Return the biases [D, V] slot by slot from states [D, H] and the tokens before [D]. `rnn` carries s to the next
    slot.
    """
    w, biases, s = {n.removeprefix("markov_head."): t for n, t in extra.items()}, [], torch.zeros(4)
    for state, embedded in zip(states, w["markov_w1.weight"][before], strict=True):
        if kind == "gated":
            embedded = (w["gate_proj.weight"] @ torch.cat([state, embedded]) + w["gate_proj.bias"]).sigmoid() * embedded
        elif kind == "rnn":
            g, c, o = (w["joint_proj.weight"] @ torch.cat([s, embedded, state]) + w["joint_proj.bias"]).split(4)
            s, embedded = g.sigmoid() * s + (1 - g.sigmoid()) * c.tanh(), o.tanh()
        biases.append(w["markov_w2.weight"] @ embedded)
    return torch.stack(biases)


def deepspec(kind, early=False):
    """Return a file whose block starts at the anchor; a Markov head reads the previous token."""
    rng, rank = torch.Generator().manual_seed(5), 0 if kind == "none" else 4
    extra = {"embed_tokens.weight": target_of().embed.weight, "lm_head.weight": target_of().lm_head.weight}
    extra = {name: tensor.detach().clone() for name, tensor in extra.items()}
    if rank:
        extra["markov_head.markov_w1.weight"] = torch.randn(VOCABULARY, rank, generator=rng)
        extra["markov_head.markov_w2.weight"] = torch.randn(VOCABULARY, rank, generator=rng)
        extra["confidence_head.proj.weight"] = torch.randn(1, H + rank, generator=rng)
        extra["confidence_head.proj.bias"] = torch.zeros(1)
    if kind == "gated":
        extra["markov_head.gate_proj.weight"] = torch.randn(rank, H + rank, generator=rng)
        extra["markov_head.gate_proj.bias"] = torch.randn(rank, generator=rng)
    if kind == "rnn":
        extra["markov_head.joint_proj.weight"] = torch.randn(3 * rank, 2 * rank + H, generator=rng)
        extra["markov_head.joint_proj.bias"] = torch.randn(3 * rank, generator=rng)
    stored = drafter_tensors() | extra
    stored = {("logit_head." if early and n.startswith("markov") else "") + n: t for n, t in stored.items()}
    config = {k: v for k, v in ZLAB.items() if k != "dflash_config"} | ZLAB["dflash_config"]
    config |= {"architectures": ["Qwen3DSparkModel"], "markov_rank": rank, "markov_head_type": kind}

    def finish(w, states, slot, logits, text, drafted):
        return logits + markov_bias(extra, kind, states[: slot + 1], torch.tensor([*text[-1:], *drafted]))[-1]

    return published(config, extra, stored, first=0, finish=finish if rank else None)


def domino(shifted, alone, inner=6, rank=5):
    """Return a file with a GRU over the previous tokens, starting with the anchor.

    torch orders its gates as reset, update, new. The first `alone` tokens are not corrected.
    """
    shapes = {"prefix_gru.weight_ih_l0": (3 * inner, H), "prefix_gru.weight_hh_l0": (3 * inner, inner)}
    shapes |= {"embed_proj.0.weight": (rank, H + inner), "embed_proj.2.weight": (VOCABULARY, rank)}
    settings = {"projector_type": "domino", "emb_dim": rank, "gru_hidden_dim": inner}
    config = changed(ZLAB, pure_draft_prefix_len=alone, shift_label=shifted, **settings)

    def finish(w, states, slot, logits, text, drafted):
        s = torch.zeros(inner)
        for token in [text[-1], *drafted]:
            x = w["prefix_gru.weight_ih_l0"] @ target_of().embed.weight[token]
            (reset, update, new), (r, u, n) = x.split(inner), (w["prefix_gru.weight_hh_l0"] @ s).split(inner)
            gate = (update + u).sigmoid()
            s = gate * s + (1 - gate) * (new + (reset + r).sigmoid() * n).tanh()
        if len(drafted) < alone:
            return logits
        inside = torch.nn.functional.silu(w["embed_proj.0.weight"] @ torch.cat([states[slot], s]))
        return logits + w["embed_proj.2.weight"] @ inside

    extra, first = randoms(shapes, 1.0, seed=5), 0 if shifted else 1
    return published(config | {"architectures": ["DominoDraftModel"]}, extra, first=first, finish=finish)


def dflash2(candidates=7):
    config = changed(ZLAB, conv_kernel_size=2, conv_group_size=8, selector_rank=4, selector_top_k=candidates)

    def finish(w, states, slot, logits, text, drafted):
        a, b = w["candidate_selector.predecessor_codebook"], w["candidate_selector.successor_codebook"]
        ids, token = logits.topk(candidates).indices, [text[-1], *drafted][-1]
        follow = b[ids] @ (a[token] * (w["candidate_selector.hidden_projection.weight"] @ states[slot]))
        return torch.full_like(logits, -1e4).index_copy(0, ids, logits[ids] + follow)

    return published(config | {"architectures": ["DFlash2DraftModel"]}, dflash2_tensors(), finish=finish)


def other_names():
    return changed(ZLAB, mask_token_id=None, target_layer_ids=None, pard_token=MASK, layer_ids=list(TAPS))


def block_size_inside():
    config = dict(ZLAB)
    return changed(config, block_size=config.pop("block_size"))


WINDOW = {"layer_types": ["sliding_attention"] * LAYERS, "sliding_window": 7}
CASES = {
    "dflash-z-lab": lambda: published(ZLAB),
    "dflash-z-lab-inside": lambda: published(block_size_inside()),
    "dflash-scaled": scaled,
    "dflash-jetspec": lambda: published(changed(ZLAB, causal_head=True), causal=True),
    "dflash-not-causal": lambda: published(changed(ZLAB, causal_head=False)),
    "dflash-window": lambda: windowed(True),
    "dflash-window-is_causal": lambda: windowed(False, is_causal=False),
    "dflash-window-causal": lambda: windowed(False, dflash_config={"causal": False}),
    "dflash-mixed-layers": lambda: mixed_layers(False),
    "dflash-mixed-layers-from-anchor": lambda: mixed_layers(True),
    "dflash-window-without-types": window_without_types,
    "dflash-window-full-types": lambda: window_without_types(**WINDOW | {"layer_types": ["full_attention"] * LAYERS}),
    "dflash-window-sliding-types": lambda: window_without_types(**WINDOW),
    "dflash-sinks": lambda: sinks(False),
    "dflash-sinks-causal": lambda: sinks(True),
    "dflash-names": lambda: published(other_names()),
    "dflash-own-lm_head": own_lm_head,
    "dflash-speculators": lambda: speculators(False),
    "dflash-speculators-from-anchor": lambda: speculators(True),
    "dflash2": dflash2,
}
CASES |= {f"dspark-{kind}": partial(deepspec, kind) for kind in ("none", "vanilla", "gated", "rnn")}
CASES |= {f"dspark-{kind}-early": partial(deepspec, kind, True) for kind in ("gated", "rnn")}
CASES |= {f"domino-{flags}": partial(domino, *flags) for flags in ((False, 1), (True, 2), (True, 0))}
for style, anchor in product(("vllm", "speculators"), (False, True)):
    CASES[f"xpress-{style}-{anchor}"] = partial(xpress, style, anchor)


MUSE_NAMES = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}


def muse_config(**more):
    rope = {"rope_type": "default", "rope_theta": THETA}
    config = BODY | {"rope_parameters": rope, "block_size": BLOCK, "mask_token_id": MASK, "target_layer_ids": [0, 1]}
    return config | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": 5} | more


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_transformers_drafts_the_same(target, tmp_path, kind):
    """Compares with the model and candidate generator of transformers: the first block, and one with a cached
    context.
    """
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "MuseGlimmerAssistantModel"):
        pytest.skip("this transformers has no DFlash")
    from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

    config = transformers.MuseGlimmerAssistantConfig(**muse_config(layer_types=[kind] * LAYERS))
    oracle = transformers.MuseGlimmerAssistantModel(config).eval()
    weights = {MUSE_NAMES.get(name, name): tensor for name, tensor in drafter_tensors().items()}
    oracle.load_state_dict(weights)
    oracle.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == weights.keys()
    settings = transformers.GenerationConfig(max_length=80, do_sample=False)
    reference = DFlashTokenCandidateGenerator(oracle, target.embed, target.lm_head, settings)
    reference.get_candidates(TEXT, {}, None, is_first_iteration=True, n_last_matches=0)
    output = target.model(TEXT[:, :-1], output_hidden_states=True)
    drafter = observed_drafter(target, str(tmp_path), TEXT[:, :10])
    for begin, end in ((0, 9), (9, 12), (12, 13)):  # the prompt, then three and one accepted columns
        ids = TEXT[:, : end + 1]
        output.hidden_states = target.model(ids[:, :-1], output_hidden_states=True).hidden_states
        output.hidden_states = tuple(h[:, begin:] for h in output.hidden_states)
        arguments = {"position_ids": torch.arange(end + 1)[None], "attention_mask": torch.ones_like(ids)}
        with torch.no_grad():
            tokens, logits = reference.get_candidates(ids, arguments, output, False, n_last_matches=end - begin - 1)
        if begin:
            hidden = {tap: output.hidden_states[tap] for tap in TAPS}
            drafter.observe(Progress(ids[:, begin:end], ids[:, begin + 1 :], [end - begin], hidden))
        draft = drafter.propose(Budget(16, 16))
        torch.testing.assert_close(draft.probs.log(), logits.log_softmax(-1), atol=1e-4, rtol=1e-4)
        assert tokens.shape[1] == end + BLOCK


# Rejected files


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (ZLAB | {"hidden_size": 64}, "hidden size 64, the target has 32; choose the target it was trained for"),
        (changed(ZLAB, mask_token_id=61), "mask token 61"),
        (changed(ZLAB, target_layer_ids=[0, 1, 1]), "names 3 layers of its target, but its fc.weight reads 2"),
        (ZLAB | {"num_hidden_layers": 3}, "layers.2.*: expected shape .* found none"),
        (
            ZLAB | {"num_hidden_layers": 3, "layer_types": ["full_attention"]},
            "states 1 layer_types and num_hidden_layers 3, its file has 2 layers; fetch",
        ),
        (ZLAB | {"draft_vocab_size": 20}, "no tensor d2t"),
        (ZLAB | {"speculators_model_type": "peagle"}, "method 'eagle'"),
        (changed(ZLAB, attention_value_scale=0.5), "has attention_value_scale 0.5"),
        (changed(ZLAB, target_hidden_size=48), r"has a hidden_dim_adapter \(target_hidden_size 48\), but it"),
    ],
)
def test_mismatched_checkpoints_are_rejected(target, tmp_path, config, reason):
    with pytest.raises(ValueError, match=reason):
        DFlash.load(write(tmp_path, config, drafter_tensors()), target)


def test_other_formats_and_unknown_tensors_are_refused(target, tmp_path):
    lilicorr = "is a LiLiCorr drafter, which is not supported; choose a DFlash drafter"
    for name, reason in (("lilicorr.output_norm.weight", lilicorr), ("mask_hidden", "a tensor mask_hidden")):
        with pytest.raises(ValueError, match=reason):
            DFlash.load(write(tmp_path, ZLAB, drafter_tensors() | {name: torch.zeros(H)}), target)
    by_class = Checkpoint("tiny", {"architectures": ["LiLiCorrDraftModel"]}, {})
    assert detect_method(by_class) == "dflash"  # whose reader names the reason
    with pytest.raises(ValueError, match=lilicorr):
        DFlash.load(folder_with(tmp_path, drafter_tensors(), ZLAB | by_class.config), target)
    with pytest.raises(ValueError, match="uses Gemma 4 layers, which are not supported"):
        DFlash.load(write(tmp_path, ZLAB, drafter_tensors() | {"layers.0.layer_scalar": torch.ones(1)}), target)
    with pytest.raises(ValueError, match=r"domino.prefix_gru.weight_ih_l0: expected shape \(48, 32\)"):
        more = {"prefix_gru.weight_ih_l0": torch.zeros(48, H + 1), "embed_proj.0.weight": torch.zeros(4, H + 16)}
        more |= {"prefix_gru.weight_hh_l0": torch.zeros(48, 16), "embed_proj.2.weight": torch.zeros(VOCABULARY, 4)}
        DFlash.load(write(tmp_path, ZLAB, drafter_tensors() | more), target)
    with pytest.raises(ValueError, match=r"g_proj.weight: expected shape none"):
        more = {"layers.0.self_attn.g_proj.weight": torch.zeros(4, 4)}
        DFlash.load(write(tmp_path, ZLAB, drafter_tensors() | more), target)


# The block


def test_the_tree_has_the_likeliest_paths(target, tmp_path):
    model = DFlash.load(write(tmp_path, ZLAB, drafter_tensors()), target)
    logq = logits_of(target, model, TEXT)[:3].topk(12)
    drafter = observed_drafter(target, model, TEXT, (9, 12), nodes=12)
    draft = drafter.propose(Budget(3, 12))
    assert draft.probs is None
    paths = {}
    for depth in (1, 2, 3):
        for ranks in product(range(12), repeat=depth):
            tokens = tuple(int(logq.indices[i, r]) for i, r in enumerate(ranks))
            paths[tokens] = sum(float(logq.values[i, r]) for i, r in enumerate(ranks))
    assert set(paths_of(draft)[1:]) == set(sorted(paths, key=paths.__getitem__, reverse=True)[:12])


# Conventions that a file leaves open


@pytest.mark.parametrize(("from_anchor", "taps"), [(False, (1, 2)), (True, (0, 1))])
def test_missing_config_is_detected_by_trial(target, tmp_path, from_anchor, taps):
    """The drafter was trained with one convention and saved without it."""
    torch.manual_seed(0)
    head = DFlash.fresh(target, layers=1, block_size=4, taps=taps)
    head.convention = replace(head.convention, from_anchor=from_anchor)
    drafter = load_drafter("dflash", target, head)
    train(drafter, sample_target_text(target, taps), 60)
    folder = tmp_path / "drafter"
    drafter.save(folder, "tiny")
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = []
    config["dflash_config"].pop("sample_from_anchor", None)
    (folder / "config.json").write_text(json.dumps(config))
    found = DFlash.load(str(folder), target)
    assert (found.convention.from_anchor, found.convention.taps) == (from_anchor, taps)
    assert "The file does not specify it" in load_drafter("dflash", target, found).note


# Training


def example(target, taps, columns=24):
    return batch_of(target, taps, texts(4, columns + 1, seed=11))


def test_saved_config_is_that_of_z_lab(target, tmp_path):
    drafter = load_drafter("dflash", target, DFlash.fresh(target, block_size=4))
    drafter.save(tmp_path, "tiny")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["dflash_config"] == {"mask_token_id": 2, "target_layer_ids": [tap - 1 for tap in drafter.taps]}
    assert config["rope_theta"] == 10000.0


def test_anchors_are_random_only_while_training(target):
    drafter = load_drafter("dflash", target, DFlash.fresh(target, block_size=4))
    batch = example(target, drafter.taps)
    assert drafter.loss(batch)[0] == drafter.loss(batch)[0]
    drafter.head.train()
    torch.manual_seed(3)
    losses = [float(drafter.loss(batch)[0]) for _ in range(2)]
    assert losses[0] != losses[1]
    torch.manual_seed(3)
    assert float(drafter.loss(batch)[0]) == losses[0]


def test_rows_shorter_than_a_block_are_trained_on(target):
    drafter = load_drafter("dflash", target, DFlash.fresh(target, block_size=8))
    loss, metrics = drafter.loss(example(target, drafter.taps, columns=3))
    assert torch.isfinite(loss)
    assert list(metrics) == [f"agree_{i}" for i in range(1, 8)]


def test_fresh_mask_token_never_occurs_in_text(target):
    class Tokenizer:
        chat_template = None

        def __len__(self):
            return 50

    padded = HFTarget(target.model, Tokenizer(), "padded")
    assert DFlash.fresh(padded).convention.mask_token_id == 50
    assert DFlash.fresh(target).convention.mask_token_id == target.stop_token_ids[0] == 2
    assert DFlash.fresh(ToyTarget()).convention.mask_token_id == 0
