import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdemo.core.protocol import Budget, GenerationConfig, Progress
from specdemo.core.sampling import Sampling
from specdemo.engine.loop import generate
from specdemo.methods import detect_method, load_drafter
from specdemo.methods.heads.conventions import sample_target_text
from specdemo.methods.heads.dflash import DFlash, DFlashDraftModel, stage_logits
from specdemo.methods.heads.formats.dflash import spread_taps
from specdemo.models.checkpoints import Checkpoint, open_meta_checkpoint
from specdemo.models.target import HFTarget
from specdemo.models.toy import ToyTarget
from tests.generation import rows_of, train
from tests.methods.heads import check_sampling
from tests.models.tiny import VOCABULARY, build, pinned, texts

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
    return HFTarget(build("llama"), name="tiny")


def drafter_tensors(seed=0):
    """Return random tensors with z-lab's names and shapes."""
    rng = torch.Generator().manual_seed(seed)
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
    return {
        name: torch.randn(shape, generator=rng) * 0.2 + (1.0 if "norm" in name else 0.0)
        for name, shape in shapes.items()
    }


def dflash2_tensors(span=2, group=8, rank=4, seed=1):
    """Return the additional tensors of DFlash2."""
    rng = torch.Generator().manual_seed(seed)
    shapes = {
        "candidate_selector.predecessor_codebook": (VOCABULARY, rank),
        "candidate_selector.successor_codebook": (VOCABULARY, rank),
        "candidate_selector.hidden_projection.weight": (rank, H),
    }
    for i, name in product(range(LAYERS), ("attention_conv", "mlp_conv")):
        shapes[f"layers.{i}.{name}.base_kernel"] = (2, span, H)
        shapes[f"layers.{i}.{name}.kernel_projection.weight"] = (2 * span * H // group, H)
    return {name: torch.randn(shape, generator=rng) * 0.4 for name, shape in shapes.items()}


def write(folder, config, tensors):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return str(folder)


def changed(config, **inner):
    return config | {"dflash_config": config["dflash_config"] | inner}


def norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def apply_rope(x, positions):
    """Apply RoPE to x [S, heads, SIZE] as a product of complex numbers."""
    angles = positions[:, None] / THETA ** (torch.arange(0, SIZE, 2) / SIZE)
    z = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([z.real, z.imag], -1)


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


def reference(w, features, x, start=0, window=0, causal=False, sink=-torch.inf):
    """Return states [S, H] from the paper's formulas without a cache.

    features: [T, taps * H]. x: block embeddings [S, H].
    """
    context = norm(features @ w["fc.weight"].T, w["hidden_norm.weight"])
    length, slots = len(context), len(x)
    positions = start + torch.arange(length + slots)
    distance = positions[length:, None] - positions
    hidden = (distance.abs() >= window) if window else torch.zeros_like(distance, dtype=torch.bool)
    hidden |= (distance < 0) & causal
    for i in range(LAYERS):
        p = {n.removeprefix(f"layers.{i}."): t for n, t in w.items() if n.startswith(f"layers.{i}.")}

        def attention(a, p=p):
            q = apply_rope(
                norm((a @ p["self_attn.q_proj.weight"].T).view(-1, HEADS, SIZE), p["self_attn.q_norm.weight"]),
                positions[length:],
            )
            both = torch.cat([context, a])
            k = (both @ p["self_attn.k_proj.weight"].T).view(-1, GROUPS, SIZE)
            k = apply_rope(norm(k, p["self_attn.k_norm.weight"]), positions).repeat_interleave(HEADS // GROUPS, 1)
            v = (both @ p["self_attn.v_proj.weight"].T).view(-1, GROUPS, SIZE).repeat_interleave(HEADS // GROUPS, 1)
            scores = (torch.einsum("qhd,khd->hqk", q, k) / SIZE**0.5).masked_fill(hidden, -torch.inf)
            nothing = torch.as_tensor(sink).expand(HEADS)[:, None, None].expand(-1, slots, 1)
            found = torch.einsum("hqk,khd->qhd", torch.cat([scores, nothing], -1).softmax(-1)[..., :-1], v)
            return found.flatten(1) @ p["self_attn.o_proj.weight"].T

        def mlp(a, p=p):
            gate = torch.nn.functional.silu(a @ p["mlp.gate_proj.weight"].T)
            return (gate * (a @ p["mlp.up_proj.weight"].T)) @ p["mlp.down_proj.weight"].T

        x = x + convolved(p, "attention_conv", norm(x, p["input_layernorm.weight"]), attention)
        x = x + convolved(p, "mlp_conv", norm(x, p["post_attention_layernorm.weight"]), mlp)
    return norm(x, w["norm.weight"])


def block(target, anchor):
    return target.embed(torch.tensor([anchor] + [MASK] * (BLOCK - 1)))


def features_of(target, text):
    hidden = target.start(text, TAPS).hidden
    return torch.cat([hidden[tap] for tap in TAPS], -1)


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


def agrees(target, model, w, text, first=1, logits=None, **how):
    states = reference(w, features_of(target, text)[0, :-1], block(target, int(text[0, -1])), **how)[first:]
    expected = (logits or target.lm_head)(states).softmax(-1)
    torch.testing.assert_close(logits_of(target, model, text).exp(), expected, atol=1e-5, rtol=1e-3)


TEXT = texts(1, 16, seed=3)


# Public formats


@pytest.mark.parametrize("place", ["outside", "inside"])
def test_z_lab(target, tmp_path, place):
    config, w = dict(ZLAB), drafter_tensors()
    if place == "inside":
        config = changed(config, block_size=config.pop("block_size"))
    assert len(w) == 11 * LAYERS + 3
    agrees(target, write(tmp_path, config, w), w, TEXT)
    agrees(target, str(tmp_path), w, TEXT, start=100)  # only distances count


def test_z_lab_without_a_list_of_layers(target, tmp_path):
    model = DFlash.load(write(tmp_path, changed(ZLAB, target_layer_ids=None), drafter_tensors()), target)
    assert model.design.taps == spread_taps(3, 2) == (1, 2)
    assert spread_taps(36, 5) == (2, 10, 18, 26, 34)  # Qwen3-8B
    assert spread_taps(16, 5) == (2, 5, 8, 11, 14)  # LFM2.5-1.2B
    assert spread_taps(3, 1) == (2,)


def test_scales_of_the_newer_configs(target, tmp_path):
    w = drafter_tensors()
    config = changed(ZLAB, input_embedding_scale=2.0, output_multiplier=0.5, final_logit_softcapping=1.5)
    states = reference(w, features_of(target, TEXT)[0, :-1], 2.0 * block(target, int(TEXT[0, -1])))[1:]
    expected = (1.5 * torch.tanh(0.5 * target.lm_head(states) / 1.5)).log_softmax(-1)
    torch.testing.assert_close(logits_of(target, write(tmp_path, config, w), TEXT), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
def test_jetspec(target, tmp_path, causal):
    """Every slot sees the context and the slots up to itself."""
    w = drafter_tensors()
    agrees(target, write(tmp_path, changed(ZLAB, causal_head=causal), w), w, TEXT, causal=causal)


def test_an_adapter_between_hidden_sizes_is_rejected(target, tmp_path):
    with pytest.raises(ValueError, match=r"has a hidden_dim_adapter \(target_hidden_size 48\), but it"):
        DFlash.load(write(tmp_path, changed(ZLAB, target_hidden_size=48), drafter_tensors()), target)
    DFlash.load(write(tmp_path, changed(ZLAB, target_hidden_size=H), drafter_tensors()), target)


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
    rng = torch.Generator().manual_seed(8)
    shapes = {"w1.weight": (vocabulary, rank), "w2.weight": (vocabulary, rank), "in_proj.weight": (rank, 3 * rank)}
    shapes |= {
        "down_h.weight": (rank, hidden),
        "down_g.weight": (rank, hidden),
        "mix.L": (rank, block_size, block_size),
    }
    shapes |= {"mlp.gate_proj.weight": (inner, rank), "mlp.up_proj.weight": (inner, rank)}
    shapes |= {"mlp.down_proj.weight": (rank, inner)}
    return {name: torch.randn(shape, generator=rng) * 0.7 for name, shape in shapes.items()}


def xpress_bias(w, states, before):
    """Return the bias [S, V] of every slot from the formulas. before [S]: the token before each slot."""
    mean = w["down_g.weight"] @ states.mean(0)
    parts = zip(states @ w["down_h.weight"].T, w["w1.weight"][before], strict=True)
    inputs = [torch.cat([state, mean, token]) for state, token in parts]
    latents = [w["in_proj.weight"] @ x for x in inputs]
    biases = []
    for k, latent in enumerate(latents):
        mixed = latent + sum(w["mix.L"][:, k, j] * latents[j] for j in range(k + 1))
        gate = torch.nn.functional.silu(w["mlp.gate_proj.weight"] @ mixed)
        mixed = mixed + w["mlp.down_proj.weight"] @ (gate * (w["mlp.up_proj.weight"] @ mixed))
        biases.append(w["w2.weight"] @ mixed)
    return torch.stack(biases)


def xpress_checkpoint(folder, style, from_anchor=False, **more):
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
    return write(folder, config | {"sample_from_anchor": from_anchor} | more, drafter_tensors() | named)


@pytest.mark.parametrize("from_anchor", [False, True])
@pytest.mark.parametrize("passes", [0, 1, 2, 6])
@pytest.mark.parametrize("style", ["vllm", "speculators"])
def test_xpress(target, tmp_path, style, passes, from_anchor):
    """A pass reads the tokens of the last pass; the first reads the most likely tokens of the block."""
    model = DFlash.load(xpress_checkpoint(tmp_path, style, from_anchor, xpress_num_passes=passes), target)
    draft = observed_drafter(target, model, TEXT, (9, 12), sampling=Sampling()).propose(Budget(16, 16))
    states = reference(drafter_tensors(), features_of(target, TEXT)[0, :-1], block(target, int(TEXT[0, -1])))
    base = logits = target.lm_head(states)
    first, root = (0 if from_anchor else 1), TEXT[0, -1:]
    for _ in range(passes):
        tokens = logits.argmax(-1)
        before = torch.cat([root, tokens[:-1]]) if from_anchor else torch.cat([TEXT[0, -2:], tokens[1:-1]])
        logits = base + xpress_bias(xpress_tensors(), states, before)
    probs, tokens = logits[first:].softmax(-1), logits[first:].argmax(-1)
    assert draft.tokens[0].tolist() == tokens.tolist()
    torch.testing.assert_close(draft.confidence[0], probs.gather(-1, tokens[:, None])[:, 0], atol=1e-5, rtol=1e-4)
    if passes == 6:  # no token changes any more
        sampled = observed_drafter(target, model, TEXT, (9, 12)).propose(Budget(16, 16))
        check_stage(target, model, sampled)


def test_xpress_corrects_the_tokens_of_its_shortlist_only(target, tmp_path):
    model = DFlash.load(xpress_checkpoint(tmp_path, "vllm", xpress_topc=3), target)
    draft = observed_drafter(target, model, TEXT).propose(Budget(5, 5))
    states = reference(drafter_tensors(), features_of(target, TEXT)[0, :-1], block(target, int(TEXT[0, -1])))
    tokens = target.lm_head(states)[1:].topk(3).indices
    torch.testing.assert_close(draft.probs[0].gather(-1, tokens).sum(-1), torch.ones(5))


def test_xpress_survives_saving(target, tmp_path):
    model = DFlash.load(
        xpress_checkpoint(tmp_path / "original", "speculators", xpress_num_passes=0, xpress_topc=9), target
    )
    load_drafter("dflash", target, model).save(tmp_path / "saved", "tiny")
    again = DFlash.load(str(tmp_path / "saved"), target)
    assert replace(again.design, body=model.design.body) == model.design
    torch.testing.assert_close(logits_of(target, again, TEXT).exp(), logits_of(target, model, TEXT).exp())


@pytest.mark.parametrize("passes", [0, 1, 6])
def test_xpress_samples_are_drawn_from_the_target(passes):
    """Also before the passes have converged, where a token's q belongs to other tokens than the drafted ones."""
    target = ToyTarget(5, seed=6)
    fresh = DFlash.fresh(target, block_size=4)
    tensors = {f"xpress_head.{name}": t for name, t in xpress_tensors(block_size=4, vocabulary=5, hidden=8).items()}
    head = DFlashDraftModel(replace(fresh.design, passes=passes), tensors)
    head.load_state_dict(fresh.state_dict() | tensors)
    check_sampling(load_drafter("dflash", target, head.requires_grad_(False)), target)


@pytest.mark.parametrize(
    ("extra", "causal"),
    [({}, True), ({"is_causal": False}, False), ({"dflash_config": {"causal": False}}, False)],
)
def test_windowed_layers_are_causal_by_default(target, tmp_path, extra, causal):
    config, w = ZLAB | {"layer_types": ["sliding_attention"] * LAYERS, "sliding_window": 5}, drafter_tensors()
    config |= extra | {"dflash_config": ZLAB["dflash_config"] | extra.get("dflash_config", {})}
    agrees(target, write(tmp_path, config, w), w, TEXT, window=5, causal=causal)


def test_a_window_without_layer_types(target, tmp_path):
    w = drafter_tensors()
    agrees(target, write(tmp_path, changed(ZLAB, use_swa=True, swa_window_size=4), w), w, TEXT, window=4)
    for types, window in (("full_attention", 4), ("sliding_attention", 4)):  # takes precedence over `sliding_window`
        config = changed(ZLAB, use_swa=True, swa_window_size=window) | {"layer_types": [types] * LAYERS}
        model = write(tmp_path / types, config | {"sliding_window": 7}, w)
        agrees(target, model, w, TEXT, window=window, causal=types == "sliding_attention")


@pytest.mark.parametrize("causal", [False, True])
def test_a_sink_takes_its_share_of_what_a_head_reads(target, tmp_path, causal):
    w, sink = drafter_tensors(), torch.tensor([0.5, -1.0, 2.0, 0.0])
    more = {f"layers.{i}.self_attn.attention_sink_bias": sink.clone() for i in range(LAYERS)}
    config = changed(ZLAB, attention_sink_bias=True, causal=causal)
    agrees(target, write(tmp_path, config, w | more), w, TEXT, sink=sink, causal=causal)


@pytest.mark.parametrize("mask", [MASK, VOCABULARY + 5])
@pytest.mark.parametrize("where", ["among the weights", "alone", "with its token"])
def test_a_mask_token_with_an_embedding_of_its_own(target, tmp_path, mask, where):
    w, own = drafter_tensors(), torch.randn(H, generator=torch.Generator().manual_seed(6))
    inside = {"mask_embedding": own} if where == "among the weights" else {}
    model = write(tmp_path, changed(ZLAB, mask_token_id=mask), w | inside)
    if not inside:
        torch.save(own[None] if where == "alone" else {"embedding": own, "mask_token_id": mask}, attached(model))
    x = torch.cat([block(target, int(TEXT[0, -1]))[:1], own.expand(BLOCK - 1, -1)])
    expected = target.lm_head(reference(w, features_of(target, TEXT)[0, :-1], x)[1:]).softmax(-1)
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


def test_other_names_of_layers_and_mask_and_a_head_of_its_own(target, tmp_path):
    w, rows = drafter_tensors(), torch.randn(VOCABULARY, H, generator=torch.Generator().manual_seed(8))
    config = changed(ZLAB, mask_token_id=None, target_layer_ids=None, pard_token=MASK, layer_ids=list(TAPS))
    agrees(target, write(tmp_path / "names", config, w), w, TEXT)
    model = write(tmp_path / "own", ZLAB | {"has_own_lm_head": True}, w | {"lm_head.weight": rows})
    agrees(target, model, w, TEXT, logits=lambda states: states @ rows.T)


@pytest.mark.parametrize("from_anchor", [False, True])
def test_speculators(target, tmp_path, from_anchor):
    w = drafter_tensors()
    draft_vocab = torch.arange(1, VOCABULARY, 3)
    rows = torch.randn(len(draft_vocab), H, generator=torch.Generator().manual_seed(4))
    t2d = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, draft_vocab, True)
    extra = {"lm_head.weight": rows, "d2t": draft_vocab - torch.arange(len(draft_vocab)), "t2d": t2d}
    extra["embed_tokens.weight"] = target.embed.weight.clone()
    config = {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashDraftModel"],
        "transformer_layer_config": BODY | {"rope_theta": THETA, "vocab_size": VOCABULARY, "model_type": "qwen3"},
        "draft_vocab_size": len(draft_vocab),
        "block_size": BLOCK,
        "aux_hidden_state_layer_ids": list(TAPS),
        "mask_token_id": MASK,
        "sample_from_anchor": from_anchor,
        "speculators_config": {"verifier": {"name_or_path": "tiny"}},
    }

    def logits(states):
        every = torch.full((len(states), VOCABULARY), -1e4)
        every[:, draft_vocab] = states @ rows.T
        return every

    model = DFlash.load(write(tmp_path, config, w | extra), target)
    assert model.note == ""
    agrees(target, model, w, TEXT, 0 if from_anchor else 1, logits)
    draft = observed_drafter(target, model, TEXT).propose(Budget(16, 16))
    assert set(draft.tokens[0].tolist()) <= set(draft_vocab.tolist())


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


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("kind", ["none", "vanilla", "gated", "rnn"])
def test_deepspec(target, tmp_path, kind, early):
    """The block starts at the anchor; a Markov head reads the previous token."""
    w, rng = drafter_tensors(), torch.Generator().manual_seed(5)
    rank = 0 if kind == "none" else 4
    extra = {"embed_tokens.weight": target.embed.weight.clone(), "lm_head.weight": target.lm_head.weight.clone()}
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
    stored = {("logit_head." if early and n.startswith("markov") else "") + n: t for n, t in (w | extra).items()}
    config = {k: v for k, v in ZLAB.items() if k != "dflash_config"} | ZLAB["dflash_config"]
    config |= {"architectures": ["Qwen3DSparkModel"], "markov_rank": rank, "markov_head_type": kind}
    model = DFlash.load(write(tmp_path, config, stored), target)
    drafter = observed_drafter(target, model, TEXT, (9, 12))
    draft = drafter.propose(Budget(16, 16))
    assert draft.nodes == BLOCK
    states = reference(w, features_of(target, TEXT)[0, :-1], block(target, int(TEXT[0, -1])))
    expected = target.lm_head(states)
    if rank:
        expected = expected + markov_bias(extra, kind, states, torch.cat([TEXT[0, -1:], draft.tokens[0, :-1]]))
    torch.testing.assert_close(draft.probs[0].log(), expected.log_softmax(-1), atol=2e-4, rtol=1e-4)
    check_stage(target, model, draft)


def check_stage(target, model, draft):
    """Check that a stage gives the same results slot by slot, on whole blocks as in training, and in trees."""
    drafter = observed_drafter(target, model, TEXT, (9, 12))
    tokens = torch.full((1, BLOCK), model.design.mask_token_id)
    tokens[:, 0] = TEXT[:, -1]
    states, memory = block_states(drafter, tokens), None
    all_logits = logits = drafter._logits(states)[:, model.design.first_slot :]
    if model.stage is not None:
        before = torch.cat([TEXT[:, -1:], draft.tokens[:, :-1]], 1)
        states, memory = model.stage.prepare(states, TEXT[:, -2])
        states = states[:, model.design.first_slot :]
        logits = stage_logits(model.stage, before, states, logits, memory)
    torch.testing.assert_close(logits.softmax(-1), draft.probs, atol=1e-5, rtol=1e-4)
    drafter.options = DFlash.Options(nodes=12)
    tree = drafter.propose(Budget(BLOCK, 12))
    paths = [()]
    for token, parent in zip(tree.tokens[0].tolist(), tree.parents[0].tolist(), strict=True):
        paths.append((*paths[parent], token))
    for path, confidence in zip(paths[1:], tree.confidence[0].tolist(), strict=True):
        logits = all_logits[:, : len(path)]
        if model.stage is not None:
            before = torch.tensor([[int(TEXT[0, -1]), *path[:-1]]])
            logits = stage_logits(model.stage, before, states[:, : len(path)], logits, memory)
        assert confidence == pytest.approx(float(logits.softmax(-1)[0, -1, path[-1]]), rel=1e-3)


@pytest.mark.parametrize(("shifted", "alone"), [(False, 1), (True, 2), (True, 0)])
def test_domino(target, tmp_path, shifted, alone):
    """A GRU reads the previous tokens, starting with the anchor; torch orders its gates as reset, update, new."""
    w, rng, inner, words = drafter_tensors(), torch.Generator().manual_seed(5), 6, 5
    shapes = {"prefix_gru.weight_ih_l0": (3 * inner, H), "prefix_gru.weight_hh_l0": (3 * inner, inner)}
    shapes |= {"embed_proj.0.weight": (words, H + inner), "embed_proj.2.weight": (VOCABULARY, words)}
    extra = {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    settings = {"projector_type": "domino", "emb_dim": words, "gru_hidden_dim": inner}
    config = changed(ZLAB, pure_draft_prefix_len=alone, shift_label=shifted, **settings)
    model = DFlash.load(write(tmp_path, config | {"architectures": ["DominoDraftModel"]}, w | extra), target)
    draft = observed_drafter(target, model, TEXT, (9, 12)).propose(Budget(16, 16))
    first = 0 if shifted else 1
    states = reference(w, features_of(target, TEXT)[0, :-1], block(target, int(TEXT[0, -1])))[first:]
    expected, s = target.lm_head(states), torch.zeros(inner)
    for i, token in enumerate([int(TEXT[0, -1]), *draft.tokens[0, :-1].tolist()]):
        x = extra["prefix_gru.weight_ih_l0"] @ target.embed.weight[token]
        h = extra["prefix_gru.weight_hh_l0"] @ s
        (reset, update, new), (r, u, n) = x.split(inner), h.split(inner)
        gate = (update + u).sigmoid()
        s = gate * s + (1 - gate) * (new + (reset + r).sigmoid() * n).tanh()
        if i >= alone:
            inside = torch.nn.functional.silu(extra["embed_proj.0.weight"] @ torch.cat([states[i], s]))
            expected[i] = expected[i] + extra["embed_proj.2.weight"] @ inside
    assert draft.nodes == BLOCK - first
    torch.testing.assert_close(draft.probs[0].log(), expected.log_softmax(-1), atol=2e-4, rtol=1e-4)
    check_stage(target, model, draft)


def test_dflash2(target, tmp_path):
    w, more = drafter_tensors(), dflash2_tensors()
    assert len(more) == 4 * LAYERS + 3
    config = changed(ZLAB, conv_kernel_size=2, conv_group_size=8, selector_rank=4, selector_top_k=7)
    model = write(tmp_path, config | {"architectures": ["DFlash2DraftModel"]}, w | more)
    draft = observed_drafter(target, model, TEXT, (9, 12)).propose(Budget(16, 16))
    states = reference(w | more, features_of(target, TEXT)[0, :-1], block(target, int(TEXT[0, -1])))[1:]
    before = torch.cat([TEXT[0, -1:], draft.tokens[0, :-1]])
    a, b = more["candidate_selector.predecessor_codebook"], more["candidate_selector.successor_codebook"]
    project = more["candidate_selector.hidden_projection.weight"]
    for i, (state, token) in enumerate(zip(states, before, strict=True)):
        unary = target.lm_head(state)
        candidates = unary.topk(7).indices
        expected = (unary[candidates] + b[candidates] @ (a[token] * (project @ state))).softmax(-1)
        torch.testing.assert_close(draft.probs[0, i, candidates], expected, atol=1e-4, rtol=1e-4)
        assert float(draft.probs[0, i].sum()) == pytest.approx(float(draft.probs[0, i, candidates].sum()))


MUSE_NAMES = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}


def muse_config(**more):
    rope = {"rope_type": "default", "rope_theta": THETA}
    config = BODY | {"rope_parameters": rope, "block_size": BLOCK, "mask_token_id": MASK, "target_layer_ids": [0, 1]}
    return config | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": 5} | more


@pinned
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
        (ZLAB | {"vocab_size": 99}, "vocabulary 99"),
        (ZLAB | {"num_target_layers": 36}, "layers 36"),
        (changed(ZLAB, mask_token_id=None), "lacks 'mask_token_id'"),
        (changed(ZLAB, mask_token_id=61), "mask token 61"),
        (changed(ZLAB, target_layer_ids=[0, 1, 1]), "names 3 layers of its target, but its fc.weight reads 2"),
        (changed(ZLAB, target_layer_ids=[0, 2]), "must be between 0 and 2"),
        (ZLAB | {"num_hidden_layers": 3}, "layers.2.*: expected shape .* found none"),
        (ZLAB | {"draft_vocab_size": 20}, "no tensor d2t"),
        (ZLAB | {"speculators_model_type": "peagle"}, "method 'eagle'"),
        (ZLAB | {"is_neox_style": False}, "has is_neox_style False, which is not supported"),
        (changed(ZLAB, attention_value_scale=0.5), "has attention_value_scale 0.5"),
        (ZLAB | {"speculators_model_type": "mtp"}, "for method 'mtp'"),
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
        DFlash.load(write(tmp_path, ZLAB | by_class.config, drafter_tensors()), target)
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


def block_states(drafter, tokens):
    """Return the states [B, S, H] of a block [B, S] after all observed tokens."""
    draft = drafter.runtime.read_pending(1, drafter.sampler)
    if at := draft.columns:
        at.run(drafter.head.cache_context, *draft.inputs)
    return draft.chain(tokens.shape[1]).run(drafter._block, tokens)


def test_slots_attend_to_later_slots_unless_causal(target, tmp_path):
    for causal in (False, True):
        model = DFlash.load(write(tmp_path, changed(ZLAB, causal=causal), drafter_tensors()), target)
        drafter = observed_drafter(target, model, TEXT)
        tokens = torch.full((1, BLOCK), MASK)
        before = block_states(drafter, tokens)
        tokens[0, -1] = MASK + 1
        after = block_states(drafter, tokens)
        assert torch.equal(before[:, 1], after[:, 1]) == causal


def test_a_smaller_budget_cuts_the_block(target, tmp_path):
    drafter = observed_drafter(target, write(tmp_path, ZLAB, drafter_tensors()), TEXT, sampling=Sampling())
    full = drafter.propose(Budget(99, 99))
    assert full.nodes == BLOCK - 1
    assert full.probs is None
    assert drafter.propose(Budget(2, 2)).tokens.tolist() == full.tokens[:, :2].tolist()


def test_only_observed_columns_are_committed(target, tmp_path):
    drafter = observed_drafter(target, write(tmp_path, ZLAB, drafter_tensors()), TEXT, (4, 5))
    for _ in range(2):
        drafter.propose(Budget(3, 3))
        assert drafter.runtime.lengths == [TEXT.shape[1] - 1]
    once = observed_drafter(target, drafter.head, TEXT).propose(Budget(5, 5))
    torch.testing.assert_close(once.probs, drafter.propose(Budget(5, 5)).probs)


def test_rows_of_unequal_length_do_not_mix(target, tmp_path):
    model = DFlash.load(write(tmp_path, ZLAB, drafter_tensors()), target)
    text, lengths = texts(3, 14, seed=8), [5, 2, 0]
    together = observed_drafter(target, model, text[:, :9])
    hidden = {tap: h[:, 8:13] for tap, h in target.start(text, TAPS).hidden.items()}
    together.observe(Progress(text[:, 8:13], text[:, 9:14], lengths, hidden))
    draft = together.propose(Budget(5, 5))
    for row, length in enumerate(lengths[:2]):
        alone = observed_drafter(target, model, text[row : row + 1, : 9 + length]).propose(Budget(5, 5))
        torch.testing.assert_close(draft.probs[row], alone.probs[0])


@pytest.mark.parametrize("nodes", [0, 12])
def test_greedy_output_equals_plain_decoding(target, tmp_path, nodes):
    prompts = texts(3, 7)
    config = GenerationConfig(20, budget=Budget(5, max(5, nodes)), stop_token_ids=())

    def rows(drafter):
        events = list(generate(target, drafter, prompts, config))
        return rows_of(events), events

    plain, _ = rows(load_drafter("none", target))
    accepted = 0
    xpress = {f"xpress_head.{name}": tensor for name, tensor in xpress_tensors().items()}
    for extra in ({}, dflash2_tensors(), xpress):
        model = write(tmp_path, ZLAB, drafter_tensors() | extra)
        got, events = rows(load_drafter("dflash", target, model, nodes=nodes))
        assert got == plain
        accepted += sum(len(path) - 1 for e in events for path in e.path)
    assert accepted > 0


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
    best = sorted(paths, key=paths.__getitem__, reverse=True)[:12]
    found = [()]
    for token, parent, chance in zip(
        draft.tokens[0].tolist(), draft.parents[0].tolist(), draft.confidence[0].tolist(), strict=True
    ):
        found.append((*found[parent], token))
        level = len(found[-1]) - 1
        assert chance == pytest.approx(float(logq.values[level].exp()[logq.indices[level] == token]), rel=1e-3)
    assert set(found[1:]) == set(best)


def test_the_tree_of_a_last_stage_follows_it(target, tmp_path):
    config = changed(ZLAB, selector_top_k=2)
    model = DFlash.load(write(tmp_path, config, drafter_tensors() | dflash2_tensors()), target)
    chain = observed_drafter(target, model, TEXT, sampling=Sampling()).propose(Budget(3, 3))
    draft = observed_drafter(target, model, TEXT, nodes=14).propose(Budget(3, 14))
    slot = 0
    for token, chance in zip(chain.tokens[0].tolist(), chain.confidence[0].tolist(), strict=True):
        node = next(n for n in range(14) if int(draft.parents[0, n]) == slot and int(draft.tokens[0, n]) == token)
        assert float(draft.confidence[0, node]) == pytest.approx(chance, rel=1e-3)
        slot = node + 1


# Conventions that a file leaves open


@pytest.mark.parametrize(("from_anchor", "taps"), [(False, (1, 2)), (True, (0, 1))])
def test_missing_config_is_detected_by_trial(target, tmp_path, from_anchor, taps):
    """The drafter was trained with one convention and saved without it."""
    torch.manual_seed(0)
    head = DFlash.fresh(target, layers=1, block_size=4, taps=taps)
    head.design = replace(head.design, from_anchor=from_anchor)
    drafter = load_drafter("dflash", target, head)
    train(drafter, sample_target_text(target, taps), 60)
    folder = tmp_path / "drafter"
    drafter.save(folder, "tiny")
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = []
    config["dflash_config"].pop("sample_from_anchor", None)
    (folder / "config.json").write_text(json.dumps(config))
    found = DFlash.load(str(folder), target)
    assert (found.design.from_anchor, found.design.taps) == (from_anchor, taps)
    assert "The file does not specify it" in load_drafter("dflash", target, found).note


# Training


def example(target, taps, rows=4, columns=24, soft=True):
    text = texts(rows, columns + 1, seed=11)
    hidden = {tap: h.float() for tap, h in target.start(text[:, :-1], taps).hidden.items()}
    probs = target.model(text[:, :-1]).logits.softmax(-1) if soft else None
    return Progress(text[:, :-1], text[:, 1:], [columns] * rows, hidden, probs)


@pytest.mark.parametrize("from_anchor", [False, True])
def test_training_sees_what_drafting_sees(target, tmp_path, from_anchor):
    """The block at anchor a equals the block drafted after a columns, and its labels are the next tokens."""
    config = changed(ZLAB | {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6})
    model = write(tmp_path, changed(config, sample_from_anchor=from_anchor), drafter_tensors())
    drafter = load_drafter("dflash", target, model)
    batch = example(target, drafter.taps, soft=False)
    first, drafts = drafter.head.design.first_slot, drafter.head.design.num_drafts
    anchors = drafter._anchors(batch.inputs)
    states = drafter._block_states(batch, anchors)
    text = torch.cat([batch.inputs[:, :1], batch.outputs], 1)
    nats, weights, hits = 0.0, 0.0, torch.zeros(drafts)
    for row, places in enumerate(anchors.tolist()):
        for place, anchor in enumerate(places):
            part = text[row : row + 1, : anchor + 1]
            probs = observed_drafter(target, drafter.head, part).propose(Budget(16, 16)).probs[0]
            log_probs = target.lm_head(states[row, place, first:]).log_softmax(-1)
            torch.testing.assert_close(log_probs, probs.log(), atol=2e-4, rtol=1e-4)
            expected = text[row, anchor + 1 : anchor + 1 + drafts]
            weight = torch.exp(-torch.arange(drafts) / 4.0)
            nats += float((weight * -log_probs.gather(1, expected[:, None])[:, 0]).sum())
            weights += float(weight.sum())
            hits += log_probs.argmax(-1) == expected
    loss, metrics = drafter.loss(batch)
    assert float(loss) == pytest.approx(nats / weights, rel=1e-4)
    assert list(metrics.values()) == pytest.approx((hits / anchors.numel()).tolist())


def test_training_lowers_the_loss_and_what_is_saved_drafts_the_same(target, tmp_path):
    torch.manual_seed(0)
    drafter = load_drafter("dflash", target, DFlash.fresh(target, block_size=4))
    batch = example(target, drafter.taps)
    before, metrics = drafter.loss(batch)
    train(drafter, batch, 30)
    after, better = drafter.loss(batch)
    assert float(after) < 0.8 * float(before)
    assert better["agree_1"] > metrics["agree_1"]
    assert list(better) == ["agree_1", "agree_2", "agree_3"]
    assert not target.model.lm_head.weight.requires_grad
    drafter.save(tmp_path, "tiny")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["dflash_config"] == {"mask_token_id": 2, "target_layer_ids": [tap - 1 for tap in drafter.taps]}
    assert config["rope_theta"] == 10000.0
    torch.testing.assert_close(logits_of(target, str(tmp_path), TEXT), logits_of(target, drafter.head, TEXT))


def test_every_variant_survives_saving(target, tmp_path):
    config = changed(
        ZLAB | {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5},
        causal=False,
        sample_from_anchor=True,
        output_multiplier=0.5,
        selector_top_k=5,
    )
    tensors = drafter_tensors() | dflash2_tensors()
    model = DFlash.load(write(tmp_path / "original", config, tensors), target)
    load_drafter("dflash", target, model).save(tmp_path / "saved", "tiny")
    again = DFlash.load(str(tmp_path / "saved"), target)
    assert replace(again.design, body=model.design.body) == model.design
    assert torch.equal(logits_of(target, again, TEXT), logits_of(target, model, TEXT))


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
        def __len__(self):
            return 50

    padded = HFTarget(target.model, Tokenizer(), "padded")
    assert DFlash.fresh(padded).design.mask_token_id == 50
    assert DFlash.fresh(target).design.mask_token_id == target.stop_token_ids[0] == 2
    assert DFlash.fresh(ToyTarget()).design.mask_token_id == 0


def test_half_precision_drafts_and_a_full_one_learns():
    target = HFTarget(build("llama").bfloat16(), name="half")
    head = DFlash.fresh(target, block_size=4)
    assert observed_drafter(target, head, TEXT, (9,)).propose(Budget(3, 3)).nodes == 3
    drafter = load_drafter("dflash", target, head.float().requires_grad_(True))
    loss, _ = drafter.loss(example(target, drafter.taps))
    loss.backward()
    assert head.fc.weight.grad is not None
    assert head.layers[0].self_attn.o_proj.weight.grad.abs().sum() > 0
