"""Attention of the decoder layer, for every shape of mask that its columns create."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig

from specdemo.kv.cache import SlabCache
from specdemo.kv.graphs import TOLERANCE
from specdemo.models.layers import DecoderLayer, attend, shared_rope, signed_sin
from specdemo.models.operations import JointRope

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


NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
SIZES = {"hidden_size": 32, "intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def layers_and_cache(names, dtype, same_shape):
    """Return three layers with random norms, and a cache with random content for two rows of 12 columns."""
    torch.manual_seed(0)
    layers = [DecoderLayer(LlamaConfig(**SIZES), index, names).requires_grad_(False).to(dtype) for index in range(3)]
    for norm in (norm for layer in layers for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm) if norm):
        norm.weight.normal_()
    cache = SlabCache(3, 2, 12, torch.device("cpu"), same_shape)
    for index in range(3):
        cache.update(*torch.randn(2, 2, 2, 12, 8).to(dtype), index)
    return layers, cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("names", [(), NORMS])
def test_joint_writes_equal_writes_of_queries_keys_and_values(names, dtype):
    x, angles = torch.randn(2, 3, 32).to(dtype), torch.randn(2, 3, 1, 8)
    rope = angles.cos().to(dtype), signed_sin(angles.sin()).to(dtype)
    columns, mask = torch.tensor([[1, 2, 3], [7, 8, 9]])[:, None, :, None], torch.zeros(1, 1, 3, 12, dtype=dtype)
    outputs = []
    for same_shape in (False, True):
        layers, cache = layers_and_cache(names, dtype, same_shape)
        assert shared_rope(rope, layers, cache, x) is rope  # outside a captured pass
        with cache.scatter_writes(columns):
            shared = shared_rope(rope, layers, cache, x)
            assert isinstance(shared, JointRope) == same_shape
            states = [layer.run_residual(x, None, shared, mask, cache)[0] for layer in layers]
        outputs.append([*states, *(slab for layer in cache.slabs for slab in (layer.keys, layer.values))])
    for output, expected in zip(*outputs, strict=True):
        torch.testing.assert_close(output, expected, rtol=0, atol=TOLERANCE[dtype] * float(expected.abs().max()))


def test_layers_with_different_norms_are_not_written_jointly():
    layers, cache = layers_and_cache(NORMS, torch.float32, True)
    rope = torch.ones(1, 3, 1, 8), torch.zeros(1, 3, 1, 8)
    with cache.scatter_writes(torch.arange(3)[None, None, :, None]):
        layers[2].self_attn.k_norm.eps = 0.5
        assert shared_rope(rope, layers, cache, torch.zeros(1, 3, 32)) is rope
        assert isinstance(shared_rope(rope, layers[:2], cache, torch.zeros(1, 3, 32)), JointRope)
