"""Fused and packed layers against the layers they replace."""

import copy
from functools import partial, wraps

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaModel, Qwen2Config, Qwen2ForCausalLM

from specdemo.core.tree import chain_parents
from specdemo.models import packed as module
from specdemo.models.fused import FusedLayer, fuse_layer, fuse_layers, fused_decoder, kernels
from specdemo.models.layers import attend
from specdemo.models.load import load_model
from specdemo.models.packed import FastRMSNorm, PackedLinear, RMSNorm, dtype_of, pack, packed_bytes
from specdemo.models.target import HFTarget
from tests.models.tiny import CALLED, SIZES, build, force_layout, texts

PACKED = module.Layout("packed"), module.Layout("packed", plain_rows=3)
HALVES = (module.Layout("float16"), module.Layout("float16", plain_rows=2)) if module.has_float16_products() else ()
TREE = torch.tensor([[0, 0, 1, 1, 2, 5]])


def qwen2():
    torch.manual_seed(3)
    sizes = {name: size for name, size in SIZES.items() if name != "head_dim"}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes)).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.3)
    return model


MODELS = {name: lambda name=name: build(name) for name in ("llama", "qwen3", "mistral", *CALLED)} | {"qwen2": qwen2}


@pytest.fixture(params=["packed", "plain"])
def packing(request, monkeypatch):
    if request.param == "packed" and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    force_layout(monkeypatch, module.Layout("packed" if request.param == "packed" else ""))
    return request.param


@pytest.mark.parametrize(("name", "rows"), [("llama", 1), *((name, 3) for name in MODELS)])
def test_fused_layers_equal_originals_for_prompts_trees_and_ragged_rows(name, rows, packing):
    model = MODELS[name]()
    expected = HFTarget(copy.deepcopy(model))
    fuse_layers(model)
    fused = HFTarget(model)
    assert fused.facts.kernels == {"packed": "fused, packed", "plain": "fused"}[packing]
    taps = (0, 2, 3, -1)
    for step, tokens in enumerate((texts(rows, 9), texts(rows, 7, 1), texts(rows, 1, 2))):
        forwards = []
        for target in (expected, fused):
            parents = TREE.expand(rows, -1) if step == 1 else chain_parents(rows, 0, tokens.device)
            forwards.append(target.forward(tokens, parents, taps) if step else target.start(tokens, taps))
            if step:
                target.commit([[0, 2, 5][: 1 + (row if step == 1 else 0)] for row in range(rows)])
        torch.testing.assert_close(forwards[1].logits, forwards[0].logits, rtol=1e-4, atol=2e-4)
        for tap in taps:
            torch.testing.assert_close(forwards[1].hidden[tap], forwards[0].hidden[tap], rtol=1e-4, atol=2e-4)


def test_first_layers_alone_are_equal(packing):
    model = build("llama")
    untouched = HFTarget(copy.deepcopy(model))
    fuse_layers(model)
    outputs = []
    for target in (untouched, HFTarget(model)):
        target.start(texts(1, 6))
        outputs.append(target.early_exit_logits(texts(1, 1, 5), 2))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=2e-4)


def test_a_deep_copy_can_be_trained_and_leaves_the_original_alone(packing):
    model = build("llama")
    fuse_layers(model)
    tokens = texts(1, 8)
    before = model(tokens).logits
    twin = copy.deepcopy(model).requires_grad_(True)
    assert not any(isinstance(m, PackedLinear) for m in twin.modules())
    torch.testing.assert_close(twin(tokens).logits, before, rtol=1e-4, atol=2e-4)
    twin(tokens).logits.square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in twin.model.layers.parameters())
    torch.optim.SGD(twin.parameters(), 0.1).step()
    assert torch.equal(model(tokens).logits, before)


def test_a_copy_that_is_trained_drafts_with_what_it_learned(packing):
    model = build("llama")
    fuse_layers(model)
    twin = copy.deepcopy(model)
    target = HFTarget(twin)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
        expected = twin(texts(1, 8)).logits[:, -1:]
    torch.testing.assert_close(target.start(texts(1, 8)).logits, expected, rtol=1e-4, atol=2e-4)


def test_a_head_learns_through_a_packed_lm_head(packing):
    model = build("llama")
    fuse_layers(model)
    state = torch.randn(1, 2, 32, generator=torch.Generator().manual_seed(0)).requires_grad_(True)
    model.lm_head(state).sum().backward()
    expected = model.lm_head.weight.sum(0).expand(1, 2, -1)
    torch.testing.assert_close(state.grad, expected)


def test_layer_with_different_output_is_not_fused(monkeypatch):
    model = build("llama")
    model.model.layers[1].self_attn.scaling *= 2.0
    model.model.layers[1].forward = lambda *args, **named: args[0]  # a user-defined layer
    fuse_layers(model)
    fused = [type(layer).__name__ for layer in model.model.layers]
    assert fused == ["FusedLayer", "LlamaDecoderLayer", "FusedLayer"]
    assert fused_decoder(model) is None


def test_a_layer_rejects_arguments_it_does_not_know(monkeypatch):
    model = build("llama")
    with pytest.raises(TypeError, match="history"):
        FusedLayer(copy.deepcopy(model.model.layers[0]))(torch.zeros(1, 1, 32), history=None)
    forward = LlamaModel.forward  # of a transformers that passes another argument to layers
    newer = wraps(forward)(lambda *given, **named: forward(*given, **named, history=None))
    monkeypatch.setattr(LlamaModel, "forward", newer)
    fuse_layers(model)
    assert kernels(model) == "transformers"


def test_angles_that_follow_the_length_of_the_text_are_left_to_transformers():
    model = build("llama")
    fuse_layers(model)
    assert fused_decoder(model) is not None
    model.model.rotary_emb.rope_type = "dynamic"
    assert fused_decoder(model) is None


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_layers_are_fused_as_they_are(bits):
    nn = pytest.importorskip("bitsandbytes").nn
    linear = {4: partial(nn.Linear4bit, quant_type="nf4"), 8: partial(nn.Linear8bitLt, has_fp16_weights=False)}[bits]
    packed = {4: partial(nn.Params4bit, quant_type="nf4"), 8: partial(nn.Int8Params, has_fp16_weights=False)}[bits]
    model = build("llama")
    layer = model.model.layers[0]
    for part in (layer.self_attn, layer.mlp):
        for name, plain in list(part.named_children()):
            if type(plain) is torch.nn.Linear:
                made = linear(plain.in_features, plain.out_features, bias=False)
                made.weight = packed(plain.weight.data, requires_grad=False)
                setattr(part, name, made.to("cpu"))  # packing happens on the CPU
    made = fuse_layer(layer.requires_grad_(False), model.model.rotary_emb)
    assert type(made).__name__ == "FusedLayer"
    assert len(made.self_attn.qkv.layers) == 3


def test_models_of_another_build_stay_as_they_are():
    for name in ("gpt2", "gemma3"):
        model = build(name)
        fuse_layers(model)
        assert kernels(model) == "transformers"


@pytest.mark.parametrize("layout", [module.PLAIN, *PACKED, *HALVES], ids=str)
@pytest.mark.parametrize("name", ["gemma3", "qwen3", "gpt_oss", "qwen3_next"])
def test_linear_layers_experts_and_norms_of_every_family_are_replaced(monkeypatch, name, layout):
    force_layout(monkeypatch, layout)
    model = build(name)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()  # as published, so that float16 holds it
    expected, tokens = copy.deepcopy(model), texts(1, 9)
    fuse_layers(model)
    decoder = model.get_decoder()
    assert kernels(model).endswith("packed") == bool(layout.wide)
    assert any(type(m) is torch.nn.Linear for m in decoder.modules()) != bool(layout.wide)
    assert not any(map(module.has_experts, decoder.modules()))
    assert type(decoder.norm) is type(decoder.layers[1].input_layernorm) is FastRMSNorm
    again = copy.deepcopy(model)
    assert {n: p.shape for n, p in again.named_parameters()}.items() >= {
        n: p.shape for n, p in expected.named_parameters() if "experts" in n
    }.items()
    torch.testing.assert_close(again(tokens).logits, expected(tokens).logits, rtol=1e-4, atol=2e-4)
    for width in (1, 2, 4, 9):
        torch.testing.assert_close(
            model(tokens[:, :width]).logits, expected(tokens[:, :width]).logits, rtol=1e-4, atol=2e-4
        )


def test_a_family_that_reads_its_weights_itself_is_left_alone(monkeypatch):
    force_layout(monkeypatch, module.Layout("packed"))
    model = build("gemma3")
    part = model.model.layers[1].mlp
    part.forward = lambda x: torch.nn.functional.linear(x, part.up_proj.weight)[..., : x.shape[-1]]
    expected = model(texts(1, 5)).logits
    fuse_layers(model)
    assert kernels(model) == "transformers"
    assert torch.equal(model(texts(1, 5)).logits, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_nothing_is_packed_without_the_private_operations(monkeypatch, dtype):
    monkeypatch.setattr(module, "LEAST_BYTES", 0)
    monkeypatch.setattr(module.Layout, "of_weights", {})
    monkeypatch.setattr(module, "packed_dtype", lambda dtype: None)
    assert module.choose_layout([torch.nn.Linear(8, 8).to(dtype)]) == module.PLAIN


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("plain_rows", [0, 2])
def test_weights_in_bfloat16_are_wide_in_float32_where_the_processor_needs_it(monkeypatch, plain_rows, bias):
    monkeypatch.setattr(module, "packed_dtype", lambda dtype: torch.float32)
    generator = torch.Generator().manual_seed(0)
    linear = torch.nn.Linear(48, 32, bias).bfloat16().requires_grad_(False)
    layer = PackedLinear(linear, module.Layout("packed", plain_rows))
    assert (layer.dtype, layer.row_bytes) == (torch.bfloat16, 48 * 32 * (2 if plain_rows else 4))
    assert layer.bytes == 48 * 32 * (6 if plain_rows else 4) + 64 * bias
    for rows in (1, 2, 3, 5):
        x = torch.randn(1, rows, 48, generator=generator).bfloat16()
        exact = torch.nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double() if bias else None)
        assert layer(x).dtype == torch.bfloat16
        torch.testing.assert_close(layer(x).double(), exact, rtol=0.01, atol=0.01)
    again = copy.deepcopy(layer)
    assert torch.equal(again.weight, linear.weight)
    assert torch.equal(again.bias, linear.bias) if bias else again.bias is None


def test_an_outline_neither_takes_nor_leaves_the_layout_of_its_shapes(monkeypatch):
    monkeypatch.setattr(module, "LEAST_BYTES", 0)
    monkeypatch.setattr(module.Layout, "of_weights", {})
    monkeypatch.setattr(module, "_measured_layout", lambda *given: module.Layout("packed"))
    outline = torch.nn.Sequential(torch.nn.Linear(32, 8, device="meta"))
    assert type(pack(outline)[0]) is torch.nn.Linear
    assert not module.Layout.of_weights
    assert type(pack(torch.nn.Sequential(torch.nn.Linear(32, 8)))[0]) is PackedLinear
    assert type(pack(outline)[0]) is torch.nn.Linear


SECONDS = {("plain", 1): 1.0, ("plain", 2): 1.1, ("plain", 3): 1.2, ("plain", 4): 3.5, ("plain", 5): 4.0}
SECONDS |= {("packed", 1): 1.2, ("packed", 2): 1.25, ("packed", 3): 1.3, ("packed", 4): 1.3, ("packed", 5): 1.4}
FAST = {("float16", 1): 0.8, ("float16", 5): 1.0}
SLOW = {("float16", 1): 1.1, ("float16", 2): 1.15, ("float16", 3): 1.2, ("float16", 5): 1.3}


@pytest.mark.parametrize(
    ("changes", "copies", "layout"),
    [
        ({}, True, module.Layout("packed", plain_rows=3)),  # the plain lane stays fast
        ({("plain", 3): 1.4}, True, module.Layout("packed", plain_rows=2)),
        ({("plain", 2): 2.2, ("plain", 3): 1.2}, True, module.Layout("packed", plain_rows=1)),
        ({}, False, module.Layout("packed")),  # 1.2 + 1.4 against 1 + 4
        ({("plain", 5): 1.3}, True, module.PLAIN),
        ({("plain", 5): 1.5}, False, module.PLAIN),
        ({("plain", 5): 1.5}, True, module.PLAIN),  # a tenth is worth a second copy, less is not
        ({("packed", 4): 1.05}, True, module.Layout("packed", rows=4)),
        ({("packed", 1): 0.9, ("packed", 4): 0.95}, True, module.Layout("packed")),
        ({("packed", 1): 0.9, ("packed", 4): 0.94}, True, module.Layout("packed", rows=4)),
        (FAST, True, module.Layout("float16")),
        (FAST | {("packed", 4): 0.83}, True, module.Layout("packed", rows=4)),
        (FAST | {("packed", 1): 0.83, ("packed", 5): 0.9}, True, module.Layout("packed")),  # as fast for one row
        (FAST | {("plain", 1): 0.83}, True, module.Layout("float16")),  # without a second copy
        (SLOW, True, module.Layout("float16", plain_rows=3)),
        (SLOW, False, module.Layout("float16")),
    ],
)
def test_the_layout_is_the_best_for_one_row_then_for_several(monkeypatch, changes, copies, layout):
    seconds = SECONDS | changes
    monkeypatch.setattr(module, "layout_seconds", lambda *arguments: seconds)
    forms = [form for form in module.FORMS if (form, 1) in seconds]
    assert module._measured_layout([torch.nn.Linear(8, 8)], forms, copies) == layout


def test_weights_do_not_grow_to_float32_where_memory_is_short(monkeypatch):
    monkeypatch.setattr(module, "layout_seconds", lambda *arguments: SECONDS)
    monkeypatch.setattr(module, "packed_dtype", lambda dtype: torch.float32)
    linears = [torch.nn.Linear(8, 8, dtype=torch.bfloat16)]
    assert module._measured_layout(linears, module.FORMS[:1], copies=False) == module.PLAIN
    assert module._measured_layout(linears, module.FORMS[:1], copies=True) == module.Layout("packed", plain_rows=3)
    monkeypatch.setattr(module, "layout_seconds", lambda *arguments: SECONDS | SLOW)
    assert module._measured_layout(linears, module.FORMS, copies=False) == module.Layout("float16")  # as large


FLOAT16 = pytest.mark.skipif(not module.has_float16_products(), reason="this torch has no products in float16")


@FLOAT16
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("plain_rows", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_of_weights_in_float16_round_as_float32_does(dtype, plain_rows, bias):
    generator = torch.Generator().manual_seed(0)
    linear = torch.nn.Linear(48, 33, bias).bfloat16().to(dtype).requires_grad_(False)
    (layer,) = module.pack_linears([linear], module.Layout("float16", plain_rows))
    assert (layer.dtype, layer.row_bytes) == (dtype, 48 * 33 * (dtype.itemsize if plain_rows else 2))
    assert layer.bytes == 48 * 33 * (2 + dtype.itemsize * bool(plain_rows)) + 33 * dtype.itemsize * bias
    for rows in (1, 2, 3, 5, 8):
        x = torch.randn(1, rows, 48, generator=generator).to(dtype)
        exact = torch.nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double() if bias else None)
        assert layer(x).dtype == dtype
        tolerance = 1e-6 if dtype == torch.float32 else 0.01
        torch.testing.assert_close(layer(x).double(), exact, rtol=tolerance, atol=tolerance)
    again = copy.deepcopy(layer)
    torch.testing.assert_close(again.weight, linear.weight, rtol=0.0, atol=2.0**-25)
    assert torch.equal(again.bias, linear.bias) if bias else again.bias is None


NORMAL = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
SPREAD = (NORMAL * torch.logspace(0, -5, 64)[:, None]).bfloat16().float()  # rows of very different size


@pytest.mark.parametrize(
    ("weight", "held"),
    [
        (NORMAL.bfloat16().float(), "as it is"),
        (NORMAL.half().float(), "as it is"),
        (SPREAD, "scaled"),
        (NORMAL.bfloat16().float() * 2.0**-20, "scaled"),  # below the range of float16
        (NORMAL.bfloat16().float() * 2.0**16, "scaled"),  # above it
        (torch.zeros(64, 64), "as it is"),
        (NORMAL, "no"),  # trained in float32
        (NORMAL.bfloat16().float().index_fill(0, torch.tensor([9]), torch.inf), "no"),
        (NORMAL.bfloat16().float().index_fill(0, torch.tensor([9]), torch.nan), "no"),
    ],
)
def test_float16_is_for_weights_that_it_holds(monkeypatch, weight, held):
    linears = [module.make_linear(torch.eye(8), None), module.make_linear(weight, None)]
    scale = module.float16_scale(weight)
    assert (scale == 1.0, scale == 0.0) == (held == "as it is", held == "no")
    assert module.fit_float16(linears) is (held != "no")
    monkeypatch.setattr(module, "LEAST_BYTES", 0)
    monkeypatch.setattr(module, "SAMPLE_BYTES", 0)  # the first layer, which fits
    monkeypatch.setattr(module, "has_float16_products", lambda: True)
    monkeypatch.setattr(module.Layout, "of_weights", {})
    monkeypatch.setattr(module, "_measured_layout", lambda sample, forms, copies: module.Layout(forms[-1]))
    assert module.choose_layout(linears) == module.Layout("float16" if scale else "packed")


@FLOAT16
@pytest.mark.parametrize("bias", [True, False])
def test_rows_of_any_size_keep_their_precision_in_float16(bias):
    linear = torch.nn.Linear(64, 64, bias).requires_grad_(False)
    linear.weight.copy_(SPREAD)
    (layer,) = module.pack_linears([linear], module.Layout("float16"))
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    exact = torch.nn.functional.linear(x.double(), SPREAD.double(), linear.bias.double() if bias else None)
    size = x.double().norm(dim=1)[:, None] * SPREAD.double().norm(dim=1) + (linear.bias.abs() if bias else 0.0)
    assert ((layer(x) - exact).abs() / size).max() < 1e-6
    torch.testing.assert_close(layer(x[0]), layer(x)[0], rtol=1e-6, atol=1e-6)  # one dimension
    torch.testing.assert_close(copy.deepcopy(layer).weight, SPREAD, rtol=2.0**-8, atol=0.0)


def test_another_engine_of_quantised_products_has_none(monkeypatch):
    assert not module._engine_has_float16("none") or torch.backends.quantized.engine in ("x86", "fbgemm")


def test_a_model_is_loaded_with_either_kind_of_kernels():
    assert kernels(load_model("stories-draft-deep").model).startswith("fused")
    assert kernels(load_model("stories-draft-deep", kernels="transformers").model) == "transformers"
    with pytest.raises(ValueError, match=r"unknown kernels 'fast'; choose one of auto"):
        load_model("stories-draft-deep", kernels="fast")


def test_a_packed_head_keeps_what_its_layers_share(packing):
    shared = torch.nn.Linear(32, 16, bias=False)
    head = torch.nn.ModuleDict({"a": shared, "b": torch.nn.Sequential(shared, torch.nn.Linear(16, 8))})
    x = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = head["b"](x)
        assert pack(head) is head
        assert head["a"] is head["b"][0]
        assert isinstance(head["a"], PackedLinear) == (packing == "packed")
        torch.testing.assert_close(head["b"](x), before)
    assert dtype_of(head) == torch.float32
    if packing == "packed":
        assert packed_bytes(head) == 4 * (32 * 16 + 16 * 8 + 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_a_quick_norm_is_the_norm(scale, dtype):
    norm = RMSNorm(48, 1e-5).to(dtype).requires_grad_(False)
    norm.weight.normal_()
    head = pack(torch.nn.Sequential(copy.deepcopy(norm)))
    assert type(head[0]) is FastRMSNorm
    assert list(head.state_dict()) == ["0.weight"]
    x = (scale * torch.randn(2, 3, 5, 48, generator=torch.Generator().manual_seed(0))).to(dtype)
    before = x.clone()
    with torch.no_grad():
        torch.testing.assert_close(head(x), norm(x))
        assert torch.equal(x, before)
        assert torch.equal(head(0 * x), 0 * x)
    learning = x.clone().requires_grad_(True)
    head(learning).sum().backward()
    assert learning.grad is not None
    again = copy.deepcopy(head)
    assert type(again[0]) is RMSNorm
    again.requires_grad_(True)(x).sum().backward()
    assert again[0].weight.grad is not None


def test_other_norms_stay_as_they_are():
    for norm in (RMSNorm(48, 1e-5).half(), torch.nn.LayerNorm(48), torch.nn.LayerNorm(48, bias=False)):
        assert pack(torch.nn.Sequential(norm))[0] is norm


ROWS, HEADS, GROUPS, SLOTS, WIDTH, SIZE = 2, 6, 2, 3, 7, 4


@pytest.mark.parametrize("rows", [1, ROWS])
@pytest.mark.parametrize("heads", [1, HEADS])
@pytest.mark.parametrize("slots", [1, SLOTS])  # 1: the same mask for all slots, as in blocks of DFlash
def test_grouped_queries_accept_masks_of_every_shape(rows, heads, slots):
    random = torch.Generator().manual_seed(0)
    query = torch.randn(ROWS, HEADS, SLOTS, SIZE, generator=random)
    key, value = torch.randn(2, ROWS, GROUPS, WIDTH, SIZE, generator=random)
    visible = torch.rand(rows, heads, slots, WIDTH, generator=random) < 0.6
    visible[..., 0] = True
    full_key, full_value = (t.repeat_interleave(HEADS // GROUPS, 1) for t in (key, value))
    expected = scaled_dot_product_attention(
        query, full_key, full_value, visible.expand(ROWS, HEADS, SLOTS, WIDTH)
    ).transpose(1, 2)
    torch.testing.assert_close(attend(query, key, value, visible, False), expected)
