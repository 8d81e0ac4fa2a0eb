import json
from copy import deepcopy
from functools import partial
from itertools import product

import pytest
import torch
import transformers.modeling_layers
from torch.nn import functional as F
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from specdemo.core.protocol import Budget, GenerationConfig, Progress
from specdemo.core.sampling import Sampling
from specdemo.methods import load_drafter
from specdemo.methods.heads.formats.mtp import MTPConvention
from specdemo.methods.heads.mtp import MTP, ParallelHeads
from specdemo.methods.heads.network import sample_target_text
from specdemo.methods.heads.runtime import training_columns
from specdemo.models.target import HFTarget
from tests.generation import output, train
from tests.methods.heads import Published, Reference, folder_with, rms_norm, target_of, without
from tests.models.tiny import SIZES, VOCABULARY, build, texts

HIDDEN, LAYERS = SIZES["hidden_size"], SIZES["num_hidden_layers"]
KINDS = {"one": {}, "two": {"modules": 2}, "parallel": {"modules": 3, "kind": "parallel"}}
UNSETTLED = [MTPConvention(True, False), MTPConvention(False, True)]


@pytest.fixture(scope="module")
def target():
    return target_of()


def fresh(target, kind):
    torch.manual_seed(1)
    return MTP.fresh(target, **KINDS[kind])


def random(tensors, scale=0.2):
    """Return random tensors with norms far from one, so that a missing norm shows."""
    rng = torch.Generator().manual_seed(3)
    return {name: torch.randn(t.shape, generator=rng) * scale + (t.ndim == 1) for name, t in tensors.items()}


class MtpModule:
    """One sequential module: the input projection, and a model with one layer of the target's kind and the module's
    norm.
    """

    def __init__(self, target, hidden_first=False, scale=0.2):
        config = deepcopy(target.model.config)
        config.num_hidden_layers = 1
        if getattr(config, "layer_types", None):
            config.layer_types = ["full_attention"]
        self.embed, self.hidden_first = target.embed, hidden_first
        self.model = type(target.model.model)(config).eval().requires_grad_(False)
        self.model.load_state_dict(random(self.model.state_dict(), scale))
        norm = type(self.model.norm)
        self.enorm, self.hnorm = norm(HIDDEN, eps=config.rms_norm_eps), norm(HIDDEN, eps=config.rms_norm_eps)
        made = random({"enorm": torch.ones(HIDDEN), "hnorm": torch.ones(HIDDEN), "fc": torch.ones(HIDDEN, 2 * HIDDEN)})
        self.enorm.weight.data, self.hnorm.weight.data, self.eh_proj = made["enorm"], made["hnorm"], made["fc"]

    def joined(self, tokens, hidden):
        parts = [self.enorm(self.embed(torch.as_tensor(tokens))), self.hnorm(hidden)]
        return torch.cat(parts[::-1] if self.hidden_first else parts, -1) @ self.eh_proj.T

    @torch.no_grad()
    def states(self, joined):
        """Return the states before and after the norm for joined inputs [A, H]."""
        states = []
        hook = self.model.norm.register_forward_pre_hook(lambda module, inputs: states.append(inputs[0]))
        normed = self.model(inputs_embeds=joined[None], use_cache=False).last_hidden_state
        hook.remove()
        return states[0][0], normed[0]

    def stored(self, dialect):
        """Return the module's tensors under the names of a model family."""
        layer = {n.removeprefix("layers.0."): t for n, t in self.model.state_dict().items() if n.startswith("layers.")}
        own = {"enorm": self.enorm.weight.data, "hnorm": self.hnorm.weight.data, "eh_proj": self.eh_proj}
        own["norm"] = self.model.norm.weight.data
        names, folder, outer = DIALECTS[dialect]
        return {f"{outer}{names[n]}.weight": t for n, t in own.items()} | {f"{folder}{n}": t for n, t in layer.items()}


class MtpReference(Reference):
    """Sequential modules. A single module is applied again and again to its own states."""

    def __init__(self, target, head, *modules):
        super().__init__(target, {})
        self.modules, self.convention, self.tap, self.runs = modules, head.convention, head.tap, {}

    def logits(self, text, drafted):
        if len(self.modules) == 1:
            return self.target.lm_head(self.run(tuple(text), tuple(drafted))[1][1][-1])
        hidden, tokens = self.hidden(text, self.tap), [*text[1:], *drafted]
        width = len(hidden)
        for i, module in enumerate(self.modules[: len(drafted) + 1]):
            states = module.states(module.joined(tokens[i : i + width], hidden))
            hidden = states[self.convention.normed_output]
        return self.target.lm_head(states[1][-1])

    def run(self, text, drafted):
        """Return the inputs [A, H] of the single module, and its states."""
        if (text, drafted) not in self.runs:
            (module,) = self.modules
            if drafted:
                inputs, states = self.run(text, drafted[:-1])
                following = module.joined(drafted[-1:], states[self.convention.normed_output][-1:])
                inputs = torch.cat([inputs, following])
            else:
                inputs = module.joined(text[1:], self.hidden(text, self.tap))
            self.runs[text, drafted] = inputs, module.states(inputs)
        return self.runs[text, drafted]


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
FAMILIES = ("llama", "qwen3")
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


def sequential(dialect, family="llama", **config):
    """Return one module, in a file that also contains the target."""
    target = target_of(family)
    module = MtpModule(target, hidden_first=dialect == "mimo")
    tensors = module.stored(dialect)
    if dialect == "deepseek":
        copies = ("embed_tokens.weight", "shared_head.head.weight")
        tensors |= {f"model.layers.{LAYERS}.{copy}": torch.zeros(VOCABULARY, HIDDEN) for copy in copies}
    config = {"model_type": family, "num_nextn_predict_layers": 1} | CONFIGS.get(dialect, {}) | config
    reference, unsaved = lambda head: MtpReference(target, head, module), "cannot store" if dialect == "mimo" else ""
    return Published("mtp", config, full_checkpoint(target, tensors), reference, family=family, unsaved=unsaved)


def two_modules():
    """Return two modules in Qwen's format, which share the input projection and the norms."""
    first, second = MtpModule(target_of()), MtpModule(target_of(), scale=0.3)
    second.model.norm = first.model.norm
    parts = {n.replace("layers.0", "layers.1"): t for n, t in second.stored("qwen").items() if ".layers." in n}
    reference = partial(MtpReference, target_of())
    return Published("mtp", {}, first.stored("qwen") | parts, lambda head: reference(head, first, second), longest=2)


CASES = {
    f"mtp-{dialect}-{family}": partial(sequential, dialect, family) for dialect, family in product(DIALECTS, FAMILIES)
}
for flags in product((True, False), repeat=2):
    settled = dict(zip(("mtp_reads_normed", "mtp_hands_on_normed"), flags, strict=True))
    CASES[f"mtp-{flags}"] = partial(sequential, "deepseek", **settled)
CASES |= {"mtp-two": two_modules, "mtp-parallel": lambda: parallel()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_convention_of_published_files(tmp_path, family, dialect):
    case = sequential(dialect, family)
    head = MTP.load(folder_with(tmp_path, case.tensors, case.config), case.target)
    assert len(head) == 1 and head.convention.hidden_first == (dialect == "mimo")
    if dialect == "speculators":
        assert head.convention == MTPConvention() and not head.note
    else:
        assert head.note.startswith(
            f"Convention: {head.convention}. The file does not specify it; agreement on a short text was "
        )


def test_input_order_is_detected_without_a_family(tmp_path, target):
    head = MTP.load(folder_with(tmp_path, full_checkpoint(target, MtpModule(target).stored("mimo")), {}), target)
    assert [reading.hidden_first for reading in head.conventions] == [True, False] * 4


def test_experts_stored_one_by_one_and_norms_around_zero(tmp_path):
    target = HFTarget(build("qwen3_next"), name="some/qwen")
    module = MtpModule(target)
    tensors = module.stored("qwen")
    both = tensors.pop("mtp.layers.0.mlp.experts.gate_up_proj").chunk(2, 1)
    parts = {"gate": both[0], "up": both[1], "down": tensors.pop("mtp.layers.0.mlp.experts.down_proj")}
    for kind, experts in parts.items():
        for i, expert in enumerate(experts):
            tensors[f"mtp.layers.0.mlp.experts.{i}.{kind}_proj.weight"] = expert.clone()
    head = MTP.load(folder_with(tmp_path, tensors, {"model_type": "qwen3_next"}), target)
    tokens, hidden = columns(rows=1)
    expected = target.lm_head(module.states(module.joined(tokens[0], hidden[0]))[1])
    torch.testing.assert_close(logits_of(head, tokens, hidden)[0], expected, atol=1e-4, rtol=1e-4)
    plain, drafted = (
        output(target, one, texts(1, 4), GenerationConfig(6))
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


class MetaReference(Reference):
    """A Llama layer in Meta's format, with RoPE on adjacent pairs, then the target's norm and lm_head."""

    def logits(self, text, drafted):
        prefix = f"extra_heads.{len(drafted)}."
        w = {n.removeprefix(prefix): t for n, t in self.w.items() if n.startswith(prefix)}
        trunk = self.hidden(text, LAYERS - 1)
        angles = torch.arange(len(trunk))[:, None] * 10000.0 ** (-torch.arange(0, 8, 2) / 8)

        def turned(x):
            pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], 4, 2))
            return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(-2)

        x = rms_norm(trunk, w["attention_norm.weight"])
        q, k, v = ((x @ w[f"attention.w{n}.weight"].T).unflatten(-1, (-1, 8)) for n in "qkv")
        q, k, v = (t.transpose(0, 1) for t in (turned(q), *(t.repeat_interleave(2, 1) for t in (turned(k), v))))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)
        x = trunk + mixed @ w["attention.wo.weight"].T
        y = rms_norm(x, w["ffn_norm.weight"])
        inner = F.silu(y @ w["feed_forward.w1.weight"].T) * (y @ w["feed_forward.w3.weight"].T)
        return self.target.lm_head(self.target.model.model.norm(x + inner @ w["feed_forward.w2.weight"].T)[-1])


def parallel():
    tensors = meta_layers(target_of())
    reference, trunk = MetaReference(target_of(), tensors), {"layers.0.attention.wq.weight": torch.ones(1)}
    return Published("mtp", PARAMS, tensors | trunk, lambda head: reference, longest=3, file="consolidated.pth")


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
    tensors = full_checkpoint(target, change(MtpModule(target).stored("deepseek")))
    with pytest.raises(ValueError, match=reason):
        MTP.load(folder_with(tmp_path, tensors, {"base_model_name_or_path": "some/llama"}), target)


def test_heads_of_another_trunk_are_refused(tmp_path, target):
    with pytest.raises(ValueError, match="is for layers 4, the target has 3"):
        MTP.load(folder_with(tmp_path, meta_layers(target), {**PARAMS, "n_layers": 7}, "consolidated.pth"), target)


def test_targets_of_another_build_are_refused():
    for family in ("gpt2", "gemma3", "gemma4"):
        with pytest.raises(ValueError, match=rf"the layers of a {family}\w* model cannot run separately"):
            MTP.fresh(HFTarget(build(family)))
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


# training


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
def test_saved_config_describes_the_target_and_the_heads(tmp_path, target, kind):
    head = fresh(target, kind)
    drafter = load_drafter("mtp", target, head)
    drafter.save(tmp_path, "some/llama")
    if kind == "parallel":
        params = json.loads((tmp_path / "params.json").read_text())
        assert params.items() >= PARAMS.items()
    else:
        config = json.loads((tmp_path / "config.json").read_text())
        assert config["_name_or_path"] == "some/llama"
        assert (config["num_hidden_layers"], config["num_nextn_predict_layers"]) == (LAYERS, len(head))


def test_fused_parallel_heads_are_saved_and_copied_as_they_came(target):
    heads = fresh(target, "parallel")
    before = deepcopy(heads.state_dict())
    heads.fuse()
    assert all(torch.equal(tensor, before[name]) for name, tensor in heads.state_dict().items())
    taught = deepcopy(heads)
    for parameter in taught.parameters():
        parameter.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in heads.state_dict().items())


def test_a_draft_at_the_end_of_the_context(target):
    """Columns after the last position must not be used."""
    drafter = load_drafter("mtp", target, fresh(target, "one"))
    config = GenerationConfig(8, budget=Budget(5, 5), stop_token_ids=())
    plain, drafted = (output(target, one, texts(1, 88), config) for one in (load_drafter("none", target), drafter))
    assert drafted == plain and len(plain[0]) == 8
