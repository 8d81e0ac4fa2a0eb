"""Triton kernels of a decoder layer. `models.operations` decides where they run; only it imports this file.

All kernels compute in float32 and round to the dtype of the tensors where the plain operations do, so that the results
differ by the order of additions only. B rows, S slots, H query heads, K key/value heads, E size of a head, D features.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS_PER_WARP = 512
SILU_BLOCK = 1024


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x + delta and its RMS norm, for contiguous x and delta [.., D] and weight [D]."""
    total, normed = torch.empty_like(x), torch.empty_like(x)
    size = x.shape[-1]
    block = triton.next_power_of_2(size)
    warps = min(max(block // ELEMENTS_PER_WARP, 1), 16)
    with _on(x.device):
        _add_rms_norm[(x.numel() // size,)](x, delta, weight, total, normed, size, eps, BLOCK=block, num_warps=warps)
    return total, normed


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return SiLU(gate) * up, for contiguous gate_up [.., 2 D] -> [.., D]."""
    out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    with _on(out.device):
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
    with _on(qkv.device):
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


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which Triton launches on `device`. The interpreter also runs on a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


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
    """Process one head of one token."""
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
