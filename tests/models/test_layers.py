"""Attention of the decoder layer, for every shape of mask that its columns create."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from specdemo.models.layers import attend

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
