"""Triton kernels of a decoder layer. `models.operations` decides where they run; only it imports this file.

All kernels compute in float32 and round to the dtype of the tensors where the plain operations do, so that the results
differ by the order of additions only. B rows, S slots, H query heads, K key/value heads, E size of a head, D features.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS_PER_WARP = 512
SILU_BLOCK = 1024
TREE_ROWS, TREE_COLUMNS = 64, 32  # largest tile of queries, and tile of keys in `tree_attention`
SPLIT_COLUMNS, MAX_SPLITS = 64, 64  # fewest columns of a program, and most programs per tile of queries
COMBINED = 16  # splits that are combined at once


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x + delta and its RMS norm, for contiguous x and delta [.., D] and weight [D]."""
    total, normed = torch.empty_like(x), torch.empty_like(x)
    size = x.shape[-1]
    block = triton.next_power_of_2(size)
    warps = min(max(block // ELEMENTS_PER_WARP, 1), 16)
    with torch.cuda.device_of(x):
        _add_rms_norm[(x.numel() // size,)](x, delta, weight, total, normed, size, eps, BLOCK=block, num_warps=warps)
    return total, normed


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return SiLU(gate) * up, for contiguous gate_up [.., 2 D] -> [.., D]."""
    out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    with torch.cuda.device_of(out):
        _silu_mul[(triton.cdiv(out.numel(), SILU_BLOCK),)](gate_up, out, out.shape[-1], out.numel(), BLOCK=SILU_BLOCK)
    return out


def norm_rope_write(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    columns: Tensor,
) -> Tensor:
    """Normalise and rotate queries and keys; write keys and values to the cache; return the queries [B, S, H, E].

    qkv [B, S, H + 2 K, E] contiguous. cos and sin [B or 1, S, 1, E], with equal strides. keys and values [B, K, C, E],
    with equal strides. columns [B, 1, S, 1] contiguous: where to write.
    """
    rows, slots, heads, size = qkv.shape
    kv_heads = keys.shape[1]
    query = qkv.new_empty(rows, slots, heads - 2 * kv_heads, size)
    row_stride = cos.stride(0) if len(cos) > 1 else 0
    with torch.cuda.device_of(qkv):
        _norm_rope_write[(rows * slots, heads)](
            *(qkv, qkv if q_weight is None else q_weight, qkv if k_weight is None else k_weight),
            *(cos, sin, columns, query, keys, values, eps, slots, row_stride, cos.stride(1)),
            *keys.stride()[:3],
            HEADS=heads - 2 * kv_heads,
            KV_HEADS=kv_heads,
            SIZE=size,
            BLOCK=triton.next_power_of_2(size),
            NORMED=q_weight is not None,
            num_warps=1,
        )
    return query


def tree_attention(
    query: Tensor, keys: Tensor, values: Tensor, ends: Tensor, ancestors: Tensor, scale: float
) -> Tensor:
    """Compute attention of the slots of a tree over the visible columns of a cache; return [B, S, H, E].

    query [B, H, S, E]. keys and values [B, K, C, E], with equal strides. ends [B]: number of committed columns, which
    every slot sees. ancestors [B or 1, S, P] bool: which of the P columns after them a slot sees. Both are contiguous.
    The columns are split over programs, whose results are combined by their log-sum-exp (FlashDecoding). Where they
    are split depends on the capacity alone, so that a query adds in the same order at every length and width.
    """
    rows, heads, slots, size = query.shape
    kv_heads, capacity = keys.shape[1:3]
    queries = heads // kv_heads * slots  # per key/value head
    tile = min(max(triton.next_power_of_2(queries), 16), TREE_ROWS)
    part = SPLIT_COLUMNS * triton.next_power_of_2(triton.cdiv(capacity, SPLIT_COLUMNS * MAX_SPLITS))
    splits = triton.cdiv(capacity, part)
    partial = query.new_empty(rows * kv_heads * queries, splits, size, dtype=torch.float32)
    largest, total = partial.new_empty(2, *partial.shape[:2]).unbind()
    out = query.new_empty(rows, slots, heads, size)
    block = max(triton.next_power_of_2(size), 16)
    with torch.cuda.device_of(query):
        _tree_attention[(rows * kv_heads, triton.cdiv(queries, tile), splits)](
            *(query, keys, values, ends, ancestors, partial, largest, total, scale),
            *(slots, ancestors.shape[2], ancestors.stride(0) if len(ancestors) > 1 else 0, queries, part),
            *(*query.stride()[:3], *keys.stride()[:3]),
            KV_HEADS=kv_heads,
            SIZE=size,
            BLOCK=block,
            ROWS=tile,
            COLUMNS=TREE_COLUMNS,
            SPLITS=splits,
        )
        _combine[(rows * kv_heads * queries,)](
            *(partial, largest, total, out, slots, heads, size),
            SPLITS=splits,
            CHUNK=COMBINED,
            BLOCK=block,
            num_warps=1,
        )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _add_rms_norm(x, delta, weight, total, normed, size, eps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    offsets = tl.program_id(0).to(tl.int64) * size + columns
    added = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    added += tl.load(delta + offsets, mask=inside, other=0.0).to(tl.float32)
    rounded = added.to(total.dtype.element_ty)
    tl.store(total + offsets, rounded, mask=inside)
    added = rounded.to(tl.float32)
    scaled = added * tl.rsqrt(tl.sum(added * added, 0) / size + eps)
    scaled *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + offsets, scaled.to(normed.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _silu_mul(gate_up, out, size, length, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < length
    source = gate_up + offsets // size * 2 * size + offsets % size
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + size, mask=inside, other=0.0).to(tl.float32)
    activated = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + offsets, (activated * up).to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_rope_write(  # type: ignore[no-untyped-def]
    qkv,
    q_weight,
    k_weight,
    cos,
    sin,
    write_to,
    query,
    keys,
    values,
    eps,
    slots,
    angle_row,
    angle_slot,
    slab_row,
    slab_head,
    slab_column,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
):
    token, head = tl.program_id(0), tl.program_id(1)
    row, slot = token // slots, token % slots
    dims = tl.arange(0, BLOCK)
    inside = dims < SIZE
    source = qkv + (token * (HEADS + 2 * KV_HEADS) + head) * SIZE
    state = tl.load(source + dims, mask=inside, other=0.0)
    column = tl.load(write_to + token).to(tl.int64)
    slab = row.to(tl.int64) * slab_row + column * slab_column + dims
    if head < HEADS + KV_HEADS:
        dtype = query.dtype.element_ty
        rolled = (dims + SIZE // 2) % SIZE
        x = state.to(tl.float32)
        other = tl.load(source + rolled, mask=inside, other=0.0).to(tl.float32)
        if NORMED:
            scale = tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
            is_query = inside & (head + 0 * dims < HEADS)
            is_key = inside & (head + 0 * dims >= HEADS)
            weight = tl.load(q_weight + dims, mask=is_query, other=0.0).to(tl.float32)
            weight += tl.load(k_weight + dims, mask=is_key, other=0.0).to(tl.float32)
            other_weight = tl.load(q_weight + rolled, mask=is_query, other=0.0).to(tl.float32)
            other_weight += tl.load(k_weight + rolled, mask=is_key, other=0.0).to(tl.float32)
            x = (x * scale * weight).to(dtype).to(tl.float32)
            other = (other * scale * other_weight).to(dtype).to(tl.float32)
        angle = row * angle_row + slot * angle_slot + dims
        cosine = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
        sine = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
        rotated = ((x * cosine).to(dtype).to(tl.float32) + other * sine).to(dtype)
        if head < HEADS:
            tl.store(query + (token * HEADS + head) * SIZE + dims, rotated, mask=inside)
        else:
            tl.store(keys + slab + (head - HEADS) * slab_head, rotated, mask=inside)
    else:
        tl.store(values + slab + (head - HEADS - KV_HEADS) * slab_head, state, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _tree_attention(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    ends,
    ancestors,
    partial,
    largest,
    total,
    scale,
    slots,
    provisional,
    ancestor_row,
    queries,
    part,
    query_row,
    query_head,
    query_slot,
    slab_row,
    slab_head,
    slab_column,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Process a tile of queries of one key/value head over one part of the columns."""
    row, kv_head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    index = tl.program_id(1) * ROWS + tl.arange(0, ROWS)  # query of the group: head, then slot
    real = index < queries
    slot = index % slots
    head = kv_head * (queries // slots) + index // slots
    dims = tl.arange(0, BLOCK)
    inside = dims < SIZE
    source = query + row * query_row + head[:, None] * query_head + slot[:, None] * query_slot + dims[None, :]
    q = tl.load(source, mask=real[:, None] & inside[None, :], other=0.0)
    end = tl.load(ends + row).to(tl.int32)
    visible_columns = end + provisional
    start = tl.program_id(2) * part
    highest = tl.full((ROWS,), -1e30, tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    result = tl.zeros((ROWS, BLOCK), tl.float32)
    slab = row.to(tl.int64) * slab_row + kv_head * slab_head
    for first in range(start, tl.minimum(start + part, visible_columns), COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        stored = column < visible_columns
        place = slab + column[:, None].to(tl.int64) * slab_column + dims[None, :]
        k = tl.load(keys + place, mask=stored[:, None] & inside[None, :], other=0.0)
        v = tl.load(values + place, mask=stored[:, None] & inside[None, :], other=0.0)
        new = column - end
        above = tl.load(
            ancestors + row * ancestor_row + slot[:, None] * provisional + new[None, :],
            mask=real[:, None] & (new >= 0)[None, :] & stored[None, :],
            other=0,
        )
        visible = (new < 0)[None, :] | (above != 0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(visible, scores, -1e30)
        higher = tl.maximum(highest, tl.max(scores, 1))
        shares = tl.where(visible, tl.exp(scores - higher[:, None]), 0.0)
        shrink = tl.exp(highest - higher)
        weight = weight * shrink + tl.sum(shares, 1)
        result = result * shrink[:, None] + tl.dot(shares.to(v.dtype), v, input_precision="ieee")
        highest = higher
    place = (tl.program_id(0) * queries + index) * SPLITS + tl.program_id(2)
    tl.store(largest + place, highest, mask=real)
    tl.store(total + place, weight, mask=real)
    tl.store(partial + place[:, None] * SIZE + dims[None, :], result, mask=real[:, None] & inside[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _combine(  # type: ignore[no-untyped-def]
    partial,
    largest,
    total,
    out,
    slots,
    heads,
    size,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Combine the parts of one query. `partial` has the order row, head, slot; `out` the order row, slot, head."""
    index = tl.program_id(0)
    dims = tl.arange(0, BLOCK)
    inside = dims < size
    highest = tl.full((CHUNK,), -1e30, tl.float32)
    for first in range(0, SPLITS, CHUNK):
        split = first + tl.arange(0, CHUNK)
        highest = tl.maximum(highest, tl.load(largest + index * SPLITS + split, mask=split < SPLITS, other=-1e30))
    top = tl.max(highest, 0)
    weight = tl.zeros((CHUNK,), tl.float32)
    result = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, SPLITS, CHUNK):
        split = first + tl.arange(0, CHUNK)
        used = split < SPLITS
        factor = tl.exp(tl.load(largest + index * SPLITS + split, mask=used, other=-1e30) - top)
        weight += factor * tl.load(total + index * SPLITS + split, mask=used, other=0.0)
        place = partial + (index * SPLITS + split)[:, None] * size + dims[None, :]
        parts = tl.load(place, mask=used[:, None] & inside[None, :], other=0.0)
        result += tl.sum(parts * factor[:, None], 0)
    result = result / tl.sum(weight, 0)
    row, head, slot = index // (heads * slots), index // slots % heads, index % slots
    tl.store(out + ((row * slots + slot) * heads + head) * size + dims, result.to(out.dtype.element_ty), mask=inside)
