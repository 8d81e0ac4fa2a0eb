"""Drafters in the target's own layers: published files of Orthrus and UNO, and direct computations of their logits."""

import json

import pytest
import torch
from safetensors.torch import load_file

from specdemo.core.protocol import Budget
from specdemo.methods import load_drafter, method
from specdemo.methods.heads.uno import Uno
from specdemo.methods.pairs import check_pair
from specdemo.models.fused import fuse_layers
from specdemo.models.target import HFTarget
from tests.methods.heads import (
    Published,
    Reference,
    folder_with,
    linear,
    ragged_steps,
    randoms,
    rms_norm,
    rotate,
    target_of,
)
from tests.models.tiny import SIZES, VOCABULARY, build

BLOCK, MASK, RANK, ALPHA = 6, 7, 3, 9
HEADS, GROUPS, SIZE = (SIZES[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
HIDDEN, INNER, LAYERS = (SIZES[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers"))
SHAPES = {
    "self_attn.q_proj": (HEADS * SIZE, HIDDEN),
    "self_attn.k_proj": (GROUPS * SIZE, HIDDEN),
    "self_attn.v_proj": (GROUPS * SIZE, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * SIZE),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}


class OrthrusReference(Reference):
    """The second view, on keys and values from a pass of transformers."""

    @torch.no_grad()
    def logits(self, text, drafted):
        model, x = self.target.model, torch.tensor([text[-1], *[MASK] * (BLOCK - 1)])
        committed = model(torch.tensor([text[:-1]]), use_cache=True).past_key_values.layers
        x = model.model.embed_tokens(x)
        for i, layer in enumerate(model.model.layers):
            w = {name.split("self_attn.")[1]: t for name, t in self.w.items() if f"layers.{i}." in name}
            read = rms_norm(x, layer.input_layernorm.weight)
            q, k, v = (linear(w, f"{name}_proj_diff", read).view(BLOCK, -1, SIZE) for name in "qkv")
            if "q_norm_diff.weight" in w:
                q, k = rms_norm(q, w["q_norm_diff.weight"]), rms_norm(k, w["k_norm_diff.weight"])
            q, k = (rotate(part, 10_000.0, len(text) - 1) for part in (q, k))
            keys, values = (
                torch.cat([old[0].transpose(0, 1), new])
                for old, new in ((committed[i].keys, k), (committed[i].values, v))
            )
            keys, values = (part.repeat_interleave(HEADS // GROUPS, 1) for part in (keys, values))
            scores = torch.einsum("shd,whd->hsw", q, keys) * SIZE**-0.5
            x = x + linear(w, "o_proj_diff", torch.einsum("hsw,whd->shd", scores.softmax(-1), values).flatten(1))
            x = x + layer.mlp(rms_norm(x, layer.post_attention_layernorm.weight))
        return model.lm_head(model.model.norm(x))[len(drafted)]


class UnoReference(Reference):
    """A pass of transformers over text and noise, without a cache; updates change the rows of the noise."""

    @torch.no_grad()
    def logits(self, text, drafted):
        model, noise = (
            self.target.model,
            torch.randint(1, VOCABULARY, (4096,), generator=torch.Generator().manual_seed(0)),
        )
        rows = torch.tensor([[*text, *noise[len(text) :][:BLOCK].tolist()]])
        hooks = []
        for name, module in model.model.named_modules():
            a, b = (self.w.get(f"base_model.model.model.{name}.lora_{part}.weight") for part in "AB")
            if a is None:
                continue

            def update(module, inputs, output, a=a, b=b):
                changed = inputs[0] @ a.T @ b.T * (ALPHA / RANK)
                return torch.cat([output[:, : len(text)], (output + changed)[:, len(text) :]], 1)

            hooks.append(module.register_forward_hook(update))
        logits = model(rows, use_cache=False).logits[0]
        for hook in hooks:
            hook.remove()
        return logits[len(text) - 1 + len(drafted)]


def orthrus(family):
    shapes = {f"{name}_diff.weight": shape for name, shape in SHAPES.items() if name.startswith("self_attn")}
    if family == "qwen3":
        shapes |= {f"self_attn.{name}_norm_diff.weight": (SIZE,) for name in "qk"}
    tensors = randoms({f"model.layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in shapes.items()})
    whole = {name: t.clone() for name, t in build(family).state_dict().items() if name != "lm_head.weight"}
    config = {
        "architectures": ["OrthrusLM"],
        "model_type": "qwen3",
        "block_size": BLOCK,
        "mask_token_id": MASK,
        **SIZES,
    }
    reference = lambda head: OrthrusReference(target_of(family), tensors)  # noqa: E731
    return Published("orthrus", config, whole | tensors, reference, 5, family, caches=False, trains=False)


def uno(family):
    shapes = {}
    for i in range(LAYERS):
        for name, (outputs, inputs) in SHAPES.items():
            path = f"base_model.model.model.layers.{i}.{name}"
            shapes |= {f"{path}.lora_A.weight": (RANK, inputs), f"{path}.lora_B.weight": (outputs, RANK)}
    tensors = randoms(shapes)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "use_dora": False}
    reference = lambda head: UnoReference(target_of(family), tensors)  # noqa: E731
    return Published("uno", config, tensors, reference, 6, family, caches=False, trains=False)


CASES = {
    "Orthrus": lambda: orthrus("qwen3"),
    "Orthrus on Llama": lambda: orthrus("llama"),
    "UNO": lambda: uno("qwen3"),
    "UNO on Llama": lambda: uno("llama"),
}


@pytest.mark.parametrize(
    ("case", "changes", "reason"),
    [
        ("UNO", {"use_dora": True}, "has use_dora, which is not supported"),
        ("UNO", {"bias": "all"}, "has bias, which is not supported"),
        ("UNO", {"r": 0}, "has r 0 in its config, not a number above 0"),
        ("UNO", {"lora_alpha": "x"}, "has lora_alpha 'x' in its config"),
        ("Orthrus", {"mask_token_id": None}, "has no mask_token_id of its target"),
        ("Orthrus", {"block_size": 1}, "has block_size 1 in its config, not a number above 1"),
        ("Orthrus", {"hidden_size": 64}, "is for hidden size 64, the target has 32"),
    ],
)
def test_files_that_cannot_be_read_are_refused_by_name(tmp_path, case, changes, reason):
    one = CASES[case]()
    source = folder_with(tmp_path, one.tensors, one.config | changes)
    with pytest.raises(ValueError, match=reason):
        load_drafter(one.method, one.target, source)
    assert check_pair(one.target, source).method == one.method


@pytest.mark.parametrize("name", ["uno", "orthrus"])
@pytest.mark.parametrize("family", ["gemma3", "qwen3_windows"])
def test_targets_with_other_layers_are_refused(name, family):
    target = HFTarget(build(family), name="some/target")
    with pytest.raises(ValueError, match="works for Llama, Qwen2 and Qwen3 with full attention"):
        load_drafter(name, target, method(name).fresh(target))


def test_an_adapter_is_saved_in_the_format_of_peft(tmp_path):
    one = CASES["UNO"]()
    source = folder_with(tmp_path / "read", one.tensors, one.config)
    Uno(one.target, Uno.load_trainable(source, one.target)).save(tmp_path / "saved", "some/target")
    saved = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert (saved["r"], saved["lora_alpha"], len(saved["target_modules"])) == (RANK, ALPHA, 7)
    assert load_file(tmp_path / "saved" / "adapter_model.safetensors").keys() == one.tensors.keys()


@pytest.mark.parametrize("name", ["uno", "orthrus"])
def test_a_fused_target_drafts_as_transformers_does(name):
    """Fused layers have other matrices, and a view or an adapter of their layers."""
    plain, fused = (HFTarget(build("qwen3"), name="some/qwen3") for _ in range(2))
    fuse_layers(fused.model)
    torch.manual_seed(1)
    head = method(name).fresh(plain)
    for parameter in head.parameters():
        parameter.normal_(0.0, 0.3)
    drafts = [
        [draft.tokens for _, draft in ragged_steps(t, load_drafter(name, t, head), Budget(5, 5))]
        for t in (plain, HFTarget(fused.model))
    ]
    assert all(torch.equal(*pair) for pair in zip(*drafts, strict=True))
