import json
from copy import deepcopy

import pytest
import torch
import transformers.modeling_layers
from torch.nn import functional as F
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from specdemo.core.protocol import Budget, GenerationConfig, Progress
from specdemo.core.sampling import Sampling
from specdemo.engine.loop import generate
from specdemo.methods import load_drafter
from specdemo.methods.heads.conventions import sample_target_text
from specdemo.methods.heads.formats.mtp import MTPConvention
from specdemo.methods.heads.mtp import MTP, ParallelHeads
from specdemo.methods.heads.runtime import training_columns
from specdemo.models.target import HFTarget
from tests.generation import train
from tests.methods.test_medusa import example, folder_with
from tests.models.tiny import SIZES, VOCABULARY, build, pinned, texts

HIDDEN, LAYERS = SIZES["hidden_size"], SIZES["num_hidden_layers"]
KINDS = {"one": {}, "two": {"modules": 2}, "parallel": {"modules": 3, "kind": "parallel"}}
UNSETTLED = [MTPConvention(True, False), MTPConvention(False, True)]


@pytest.fixture(scope="module")
def target():
    return HFTarget(build("llama"), name="some/llama")


def fresh(target, kind):
    torch.manual_seed(1)
    return MTP.fresh(target, **KINDS[kind])


def random(tensors, scale=0.2):
    """Return random tensors with norms far from one, so that a missing norm shows."""
    rng = torch.Generator().manual_seed(3)
    return {name: torch.randn(t.shape, generator=rng) * scale + (t.ndim == 1) for name, t in tensors.items()}


class MtpReference:
    """One sequential module: the input projection, and a model with one layer of the target's kind and the module's
    norm.
    """

    def __init__(self, target, hidden_first=False):
        config = deepcopy(target.model.config)
        config.num_hidden_layers = 1
        if getattr(config, "layer_types", None):
            config.layer_types = ["full_attention"]
        self.embed, self.lm_head, self.hidden_first = target.embed, target.lm_head, hidden_first
        self.model = type(target.model.model)(config).eval().requires_grad_(False)
        self.model.load_state_dict(random(self.model.state_dict()))
        norm = type(self.model.norm)
        self.enorm, self.hnorm = norm(HIDDEN, eps=config.rms_norm_eps), norm(HIDDEN, eps=config.rms_norm_eps)
        made = random({"enorm": torch.ones(HIDDEN), "hnorm": torch.ones(HIDDEN), "fc": torch.ones(HIDDEN, 2 * HIDDEN)})
        self.enorm.weight.data, self.hnorm.weight.data, self.eh_proj = made["enorm"], made["hnorm"], made["fc"]

    def joined(self, tokens, hidden):
        parts = [self.enorm(self.embed(tokens)), self.hnorm(hidden)]
        return torch.cat(parts[::-1] if self.hidden_first else parts, -1) @ self.eh_proj.T

    def states(self, joined):
        """Return the states before and after the norm for joined inputs [B, A, H]."""
        states = []
        hook = self.model.norm.register_forward_pre_hook(lambda module, inputs: states.append(inputs[0]))
        normed = self.model(inputs_embeds=joined, use_cache=False).last_hidden_state
        hook.remove()
        return states[0], normed

    def logits(self, tokens, hidden):
        return self.lm_head(self.states(self.joined(tokens, hidden))[1])

    def draft(self, tokens, hidden, depth, normed, tokens_fed=None):
        """Return logits [depth, V] after the last column of one row, continued with drafted or given tokens."""
        inputs, found = self.joined(tokens[None], hidden[None]), []
        for step in range(depth):
            both = self.states(inputs)
            found.append(self.lm_head(both[1][0, -1]))
            token = found[-1].argmax() if tokens_fed is None else tokens_fed[step]
            inputs = torch.cat([inputs, self.joined(token[None, None], both[normed][:, -1:])], 1)
        return torch.stack(found)

    def stored(self, dialect):
        """Return the module's tensors under the names of a model family."""
        layer = {n.removeprefix("layers.0."): t for n, t in self.model.state_dict().items() if n.startswith("layers.")}
        own = {"enorm": self.enorm.weight.data, "hnorm": self.hnorm.weight.data, "eh_proj": self.eh_proj}
        own["norm"] = self.model.norm.weight.data
        names, folder, outer = DIALECTS[dialect]
        return {f"{outer}{names[n]}.weight": t for n, t in own.items()} | {f"{folder}{n}": t for n, t in layer.items()}


# Module names by family, prefix of the decoder layer, prefix of the rest
DIALECTS = {
    "deepseek": (
        {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "shared_head.norm"},
        f"model.layers.{LAYERS}.",
        f"model.layers.{LAYERS}.",
    ),
    "qwen": (
        {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "norm": "norm"},
        "mtp.layers.0.",
        "mtp.",
    ),
    "mimo": (
        {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj", "norm": "final_layernorm"},
        "model.mtp_layers.0.",
        "model.mtp_layers.0.",
    ),
}
DIALECTS["speculators"] = (DIALECTS["mimo"][0], "mtp_layers.0.", "mtp_layers.0.")
CONFIGS = {"mimo": {"model_type": "mimo"}, "speculators": {"speculators_model_type": "mtp"}}


def full_checkpoint(target, tensors):
    """Return the tensors of a file that also contains the target."""
    return {n: t.clone() for n, t in target.model.state_dict().items() if n != "lm_head.weight"} | tensors


def columns(seed=2, rows=2, width=7):
    generator = torch.Generator().manual_seed(seed)
    return texts(rows, width, seed), torch.randn(rows, width, HIDDEN, generator=generator)


def logits_of(head, tokens, hidden, index=0):
    width = tokens.shape[1]
    return head.logits(
        head.step(index, hidden, tokens, training_columns(torch.arange(width)[None], head.angles, width))[0]
    )


# formats


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_sequential_modules(tmp_path, name, dialect):
    target = HFTarget(build(name), name="some/model")
    reference = MtpReference(target, hidden_first=dialect == "mimo")
    tensors = reference.stored(dialect)
    if dialect == "deepseek":
        copies = ("embed_tokens.weight", "shared_head.head.weight")
        tensors |= {f"model.layers.{LAYERS}.{copy}": torch.zeros(VOCABULARY, HIDDEN) for copy in copies}
    config = {"model_type": name, "num_nextn_predict_layers": 1} | CONFIGS.get(dialect, {})
    head = MTP.load(folder_with(tmp_path, full_checkpoint(target, tensors), config), target)
    assert len(head) == 1 and head.convention.hidden_first == (dialect == "mimo")
    torch.testing.assert_close(logits_of(head, *columns()), reference.logits(*columns()), atol=1e-4, rtol=1e-4)
    if dialect == "speculators":
        assert head.convention == MTPConvention() and not head.note
    else:
        assert head.note.startswith(
            f"Convention: {head.convention}. The file does not specify it; agreement on a short text was "
        )


def test_input_order_is_detected_without_a_family(tmp_path, target):
    head = MTP.load(folder_with(tmp_path, full_checkpoint(target, MtpReference(target).stored("mimo")), {}), target)
    assert [reading.hidden_first for reading in head.conventions] == [True, False] * 4


def test_experts_stored_one_by_one_and_norms_around_zero(tmp_path):
    target = HFTarget(build("qwen3_next"), name="some/qwen")
    reference = MtpReference(target)
    tensors = reference.stored("qwen")
    both = tensors.pop("mtp.layers.0.mlp.experts.gate_up_proj").chunk(2, 1)
    parts = {"gate": both[0], "up": both[1], "down": tensors.pop("mtp.layers.0.mlp.experts.down_proj")}
    for kind, experts in parts.items():
        for i, expert in enumerate(experts):
            tensors[f"mtp.layers.0.mlp.experts.{i}.{kind}_proj.weight"] = expert.clone()
    head = MTP.load(folder_with(tmp_path, tensors, {"model_type": "qwen3_next"}), target)
    torch.testing.assert_close(logits_of(head, *columns()), reference.logits(*columns()), atol=1e-4, rtol=1e-4)
    plain, drafted = (
        [t for event in generate(target, one, texts(1, 4), GenerationConfig(6)) for t in event.emitted[0]]
        for one in (load_drafter("none", target), load_drafter("mtp", target, head))
    )
    assert drafted == plain


def meta_layers(target, heads=3):
    config = target.model.config
    size, inner = config.num_key_value_heads * config.head_dim, config.intermediate_size
    shapes = {"attention.wq": (HIDDEN, HIDDEN), "attention.wk": (size, HIDDEN), "attention.wv": (size, HIDDEN)}
    shapes |= {"attention.wo": (HIDDEN, HIDDEN), "feed_forward.w1": (inner, HIDDEN), "feed_forward.w3": (inner, HIDDEN)}
    shapes |= {"feed_forward.w2": (HIDDEN, inner), "attention_norm": (HIDDEN,), "ffn_norm": (HIDDEN,)}
    return random({f"extra_heads.{i}.{n}.weight": torch.empty(s) for i in range(heads) for n, s in shapes.items()})


PARAMS = {"dim": HIDDEN, "n_layers": LAYERS + 3, "n_heads": 4, "n_kv_heads": 2, "n_future_tokens": 4}


def meta_reference(target, tensors, head, trunk):
    """Return the output of a Llama layer in Meta's format, with RoPE on adjacent pairs, then the target's norm and
    lm_head.
    """
    w = {n.removeprefix(f"extra_heads.{head}."): t for n, t in tensors.items() if n.startswith(f"extra_heads.{head}.")}
    rows, width, _ = trunk.shape
    angles = torch.arange(width)[:, None] * 10000.0 ** (-torch.arange(0, 8, 2) / 8)

    def rms(x, weight):
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight

    def turned(x):
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], 4, 2))
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(-2)

    x = rms(trunk, w["attention_norm.weight"])
    q, k, v = ((x @ w[f"attention.w{n}.weight"].T).view(rows, width, -1, 8) for n in "qkv")
    q, k, v = (t.transpose(1, 2) for t in (turned(q), *(t.repeat_interleave(2, 2) for t in (turned(k), v))))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    x = trunk + mixed @ w["attention.wo.weight"].T
    y = rms(x, w["ffn_norm.weight"])
    inner = F.silu(y @ w["feed_forward.w1.weight"].T) * (y @ w["feed_forward.w3.weight"].T)
    return target.lm_head(target.model.model.norm(x + inner @ w["feed_forward.w2.weight"].T))


def meta_folder(path, tensors, params):
    path.mkdir(exist_ok=True)
    torch.save(tensors | {"layers.0.attention.wq.weight": torch.ones(1)}, path / "consolidated.pth")
    (path / "params.json").write_text(json.dumps(params))
    return str(path)


def test_parallel_heads(tmp_path, target):
    tensors = meta_layers(target)
    head = MTP.load(meta_folder(tmp_path, tensors, PARAMS), target)
    drafter = load_drafter("mtp", target, head)
    assert len(head) == 3 and drafter.taps == (LAYERS - 1,) and not drafter.note
    tokens, trunk = columns()
    for i in range(len(head)):
        logits = logits_of(head, tokens, trunk, i)
        torch.testing.assert_close(logits, meta_reference(target, tensors, i, trunk), atol=1e-4, rtol=1e-4)


def test_qwen_modules_share_the_input_projection(tmp_path, target):
    tensors = MtpReference(target).stored("qwen")
    tensors |= {n.replace("layers.0", "layers.1"): -t for n, t in tensors.items() if ".layers." in n}
    head = MTP.load(folder_with(tmp_path, tensors, {}), target)
    assert len(head) == 2 and torch.equal(head.layers[0].eh_proj.weight, head.layers[1].eh_proj.weight)
    assert torch.equal(head.layers[0].block.mlp.down_proj.weight, -head.layers[1].block.mlp.down_proj.weight)


def without(tensors, part):
    return {name: tensor for name, tensor in tensors.items() if part not in name}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: {}, "has no multi-token prediction for 3 layers; .* choose the original upload"),
        (lambda t: without(t, "hnorm"), "layers.0.hnorm.weight: expected shape .* found none"),
        (lambda t: t | {"model.layers.3.mlp.up_proj.weight_scale": torch.ones(1)}, "weight_scale: expected shape none"),
        (lambda t: t | {"model.layers.3.eh_proj.weight": torch.ones(16, 32)}, "hidden size 16, .* target some/llama"),
    ],
)
def test_other_files_are_refused(tmp_path, target, change, reason):
    tensors = full_checkpoint(target, change(MtpReference(target).stored("deepseek")))
    with pytest.raises(ValueError, match=reason):
        MTP.load(folder_with(tmp_path, tensors, {"base_model_name_or_path": "some/llama"}), target)


def test_heads_of_another_trunk_are_refused(tmp_path, target):
    with pytest.raises(ValueError, match="is for layers 4, the target has 3"):
        MTP.load(meta_folder(tmp_path, meta_layers(target), {**PARAMS, "n_layers": 7}), target)


def test_targets_of_another_build_are_refused():
    with pytest.raises(ValueError, match="the layers of a gpt2 model cannot run separately"):
        MTP.fresh(HFTarget(build("gpt2")))
    with pytest.raises(ValueError, match="parallel heads are Llama layers; choose a Llama target, not qwen3"):
        MTP.fresh(HFTarget(build("qwen3")), kind="parallel")
    with pytest.raises(ValueError, match="unknown kind 'medusa'"):
        MTP.fresh(HFTarget(build("llama")), kind="medusa")


@pytest.mark.parametrize("convention", UNSETTLED)
def test_convention_is_detected(tmp_path, convention):
    """A module is read with the convention of its training, even if its family uses another one."""
    model = build("llama")
    head = fresh(HFTarget(model), "one")
    model.model.norm.weight.copy_(torch.randn(HIDDEN))
    head.layers[0].norm.weight.copy_(torch.randn(HIDDEN))
    target = HFTarget(model)
    head.convention = convention
    drafter = load_drafter("mtp", target, head)
    train(drafter, sample_target_text(target, drafter.taps), 25)
    drafter.save(tmp_path, "some/llama")
    settled = MTP.load(str(tmp_path), target)
    assert (settled.convention, settled.note) == (convention, "")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["mtp_reads_normed"], config["mtp_hands_on_normed"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = load_drafter("mtp", target, str(tmp_path))
    assert found.head.convention == convention and found.taps == drafter.taps
    assert found.note == found.head.note != ""


# drafts


def observe(drafter, tokens, hidden, lengths):
    drafter.observe(Progress(tokens[:, :-1], tokens[:, 1:], lengths, {drafter.taps[0]: hidden}))


@pytest.mark.parametrize("normed", [True, False])
def test_one_module_is_applied_again_and_again(tmp_path, target, normed):
    reference = MtpReference(target)
    head = MTP.load(folder_with(tmp_path, reference.stored("deepseek"), {}), target)
    head.convention = MTPConvention(True, normed)
    drafter = load_drafter("mtp", target, head)
    tokens, hidden = columns()
    drafter.start(2, Sampling(), torch.Generator())
    observe(drafter, tokens, hidden[:, 1:], [6, 6])
    draft = drafter.propose(Budget(4, 4))
    for row in range(2):
        expected = reference.draft(tokens[row, 1:], hidden[row, 1:], 4, normed)
        assert draft.tokens[row].tolist() == expected.argmax(-1).tolist()
        torch.testing.assert_close(draft.confidence[row], expected.softmax(-1).amax(-1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [*KINDS, "stacked"])
def test_drafts_continue_after_ragged_rows(target, kind):
    """After every step the draft equals that of the whole text read in one pass without other rows."""
    head = fresh(target, "parallel" if kind == "stacked" else kind)
    head.load_state_dict(random(head.state_dict()))
    own = deepcopy(head)
    if kind == "stacked":
        own.fuse()
        assert own.cache_layers == 1
    drafter, alone = load_drafter("mtp", target, own), load_drafter("mtp", target, head)
    drafter.start(2, Sampling(), torch.Generator())
    read = [(torch.empty(0, dtype=torch.int64), torch.empty(0, HIDDEN))] * 2
    for step, lengths in enumerate([[2, 2], [1, 3], [2, 0], [3, 1], [1, 1]]):
        tokens, hidden = columns(step, width=max(lengths) + 1)
        observe(drafter, tokens, hidden[:, 1:], lengths)
        draft = drafter.propose(Budget(step, 3))
        for row, length in enumerate(lengths):
            old = read[row]
            new = tokens[row, 1 : length + 1], hidden[row, 1 : length + 1]
            read[row] = torch.cat([old[0], new[0]]), torch.cat([old[1], new[1]])
            row_text, states = read[row]
            alone.start(1, Sampling(), torch.Generator())
            observe(alone, F.pad(row_text, (1, 0))[None], states[None], [len(row_text)])
            expected = alone.propose(Budget(step, 3))
            assert draft.nodes == min(step, 3 if kind != "two" else 2)
            assert torch.equal(draft.tokens[row], expected.tokens[0])
            if step:
                torch.testing.assert_close(draft.confidence[row], expected.confidence[0], atol=1e-4, rtol=1e-4)
    assert drafter.history_bytes > 0
    drafter.release()
    assert drafter.history_bytes == 0


@pinned
@pytest.mark.skipif(not hasattr(transformers.modeling_layers, "MtpModel"), reason="this transformers has no MTP")
def test_the_drafts_are_those_of_transformers(tmp_path):
    """Two modules of DeepSeek-V3 with latent attention and experts; compares the first draft after a prompt."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8}
    sizes |= {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "n_group": 1, "topk_group": 1}
    sizes |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_mtp_layers": 2}
    config = DeepseekV3Config(**{**SIZES, **sizes, "head_dim": 4})
    torch.manual_seed(7)
    target = HFTarget(DeepseekV3ForCausalLM(config).eval().requires_grad_(False), name="some/deepseek")
    reference = transformers.modeling_layers.MtpModel(target.model, 2).eval()
    state = random({n: t for n, t in reference.state_dict().items() if n.startswith("layers.")}, 0.3)
    reference.load_state_dict(state, strict=False)
    tensors = {}
    for name, tensor in state.items():
        _, index, part = name.split(".", 2)
        part = part.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        tensors[f"model.layers.{LAYERS + int(index)}.{part}"] = tensor
    written = {"model_type": "deepseek_v3", "mtp_reads_normed": True, "mtp_hands_on_normed": True}
    drafter = load_drafter("mtp", target, folder_with(tmp_path, tensors, written))
    tokens = texts(1, 9)
    hidden = target.start(tokens[:, :-1], (-1,)).hidden
    drafter.start(1, Sampling(), torch.Generator())
    drafter.observe(Progress(tokens[:, :-1], tokens[:, 1:], [8], hidden))
    draft = drafter.propose(Budget(2, 2))
    cache = transformers.cache_utils.MtpCache(config=config.get_mtp_config())
    expected, logits, _ = reference(tokens[:, 1:], hidden[-1], None, torch.arange(1, 9)[None], cache)
    assert torch.equal(draft.tokens, expected)
    torch.testing.assert_close(draft.confidence, logits.softmax(-1).amax(-1), atol=1e-4, rtol=1e-4)


def test_a_sampled_chain_carries_what_it_was_drawn_from(target):
    drafter = load_drafter("mtp", target, fresh(target, "one"))
    drafter.start(2, Sampling(temperature=0.8), torch.Generator().manual_seed(0))
    tokens, hidden = columns()
    observe(drafter, tokens, hidden[:, 1:], [6, 4])
    draft = drafter.propose(Budget(3, 3))
    assert draft.probs.shape == (2, 3, VOCABULARY)
    torch.testing.assert_close(draft.confidence, draft.probs.gather(-1, draft.tokens[..., None])[..., 0])


# training


def test_one_module_is_trained_as_it_drafts(tmp_path, target):
    """Step i at a column reads the state of the previous step, and the keys of observed columns and of its own
    draft.
    """
    reference = MtpReference(target)
    head = MTP.load(folder_with(tmp_path, reference.stored("deepseek"), {}), target)
    drafter, batch, column = load_drafter("mtp", target, head), example(target, head.tap), 9
    taught = [(head.logits(state), expected) for state, expected in drafter._training_steps(batch)]
    prefix = batch.outputs[0, : column + 1], batch.hidden[head.tap][0, : column + 1]
    expected = reference.draft(*prefix, 3, head.convention.normed_output, batch.outputs[0, column + 1 :])
    for i, (logits, answers) in enumerate(taught):
        torch.testing.assert_close(logits[0, column], expected[i], atol=1e-4, rtol=1e-4)
        assert torch.equal(answers[0, column], batch.probs[0, column + 1 + i])


def test_parallel_heads_are_trained_with_their_trunk():
    """Gradients reach the layers below, the embedding and the parameters shared with the next-token head."""
    model = build("llama").requires_grad_(True)
    heads = ParallelHeads(HFTarget(model), 3)
    assert {name.split(".")[0] for name, _ in heads.named_parameters()} == {"layers"}
    tokens = texts(2, 12)
    trunk = model(tokens, output_hidden_states=True).hidden_states[heads.tap]
    for i in range(len(heads)):
        logits = logits_of(heads, tokens, trunk, i)
        F.cross_entropy(logits[:, : -2 - i].flatten(0, 1), tokens[:, 2 + i :].flatten()).backward(retain_graph=True)
    last = model.model.layers[-1]
    assert all(p.grad is None for p in last.parameters())  # head 0 is trained by its own loss
    rest = [p for name, p in model.named_parameters() if not name.startswith(f"model.layers.{LAYERS - 1}.")]
    assert all(p.grad.abs().sum() > 0 for p in [*rest, *heads.parameters()])


@pytest.mark.parametrize("kind", KINDS)
def test_saved_weights_equal_trained_weights(tmp_path, target, kind):
    head = fresh(target, kind)
    drafter = load_drafter("mtp", target, head)
    drafter.save(tmp_path, "some/llama")
    again = MTP.load(str(tmp_path), target)
    assert type(again) is type(head) and not any(p.requires_grad for p in again.parameters())
    tokens, hidden = columns()
    for i in range(len(head)):
        torch.testing.assert_close(logits_of(again, tokens, hidden, i), logits_of(head, tokens, hidden, i))
    if kind == "parallel":
        params = json.loads((tmp_path / "params.json").read_text())
        assert params.items() >= PARAMS.items()
    else:
        config = json.loads((tmp_path / "config.json").read_text())
        assert config["_name_or_path"] == "some/llama"
        assert (config["num_hidden_layers"], config["num_nextn_predict_layers"]) == (LAYERS, len(head))


def test_stacked_heads_are_saved_and_copied_as_they_came(target):
    heads = fresh(target, "parallel")
    before = deepcopy(heads.state_dict())
    heads.fuse()
    assert all(torch.equal(tensor, before[name]) for name, tensor in heads.state_dict().items())
    taught = deepcopy(heads)
    assert taught.cache_layers == len(heads) > heads.cache_layers == 1
    for parameter in taught.parameters():
        parameter.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in heads.state_dict().items())


def test_a_draft_at_the_end_of_the_context(target):
    """Columns after the last position must not be used."""
    drafter = load_drafter("mtp", target, fresh(target, "one"))
    config = GenerationConfig(8, budget=Budget(5, 5), stop_token_ids=())
    plain, drafted = (
        [t for event in generate(target, one, texts(1, 88), config) for t in event.emitted[0]]
        for one in (load_drafter("none", target), drafter)
    )
    assert drafted == plain and len(plain) == 8
