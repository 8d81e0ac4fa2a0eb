"""Operations of a decoder layer that are one Triton kernel each on a GPU, and several operations of torch elsewhere.

A captured pass of a small batch spends as much time between kernels as in some of them, so fewer kernels are faster. On
a CPU the operations exist as the reference for tests; layers call plain operations there.

B rows, S slots, H query heads, K key/value heads, E size of a head, C columns of the cache, D features.
"""

import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F

from specdemo.kv.graphs import TOLERANCE
from specdemo.kv.masks import Rope, tree_mask
from specdemo.models.devices import device_kind, runs_triton

# environment variable: 0 disables all kernels; otherwise the kernels to use, such as `add_rms_norm,silu_mul`
TRITON_VARIABLE = "SPECDEMO_TRITON"
KERNELS = ("add_rms_norm", "norm_rope_write", "silu_mul", "tree_attention")

_library = torch.library.Library("specdemo", "DEF")
_library.define("add_rms_norm(Tensor x, Tensor delta, Tensor weight, float eps) -> (Tensor, Tensor)")
_library.define("silu_mul(Tensor gate_up) -> Tensor")
_library.define(
    "norm_rope_write(Tensor qkv, Tensor? q_weight, Tensor? k_weight, float eps, Tensor cos, Tensor sin, "
    "Tensor(a!) keys, Tensor(b!) values, Tensor columns) -> Tensor"
)
_library.define(
    "tree_attention(Tensor query, Tensor keys, Tensor values, Tensor ends, Tensor ancestors, float scale) -> Tensor"
)


def apply_rope(x: Tensor, rope: Rope) -> Tensor:
    """Apply rotary embeddings to x [B, S, heads, E]."""
    cos, sin = rope
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin).type_as(x)


def use_kernel(name: str, x: Tensor) -> bool:
    """Return whether operation `name` should replace plain operations on tensors like x."""
    if not runs_triton(x) or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return works(name, x.device, x.dtype)


@lru_cache
def works(name: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a kernel is enabled and returns on this device what plain operations return. Compared once."""
    enabled = os.environ.get(TRITON_VARIABLE)
    if not device_kind(device).triton or not find_spec("triton"):
        return False
    if enabled is not None and name not in enabled.split(","):
        return False
    arguments = _probe(name, device, dtype)
    copies = [x.clone() if isinstance(x, Tensor) else x for x in arguments]
    try:
        output = _tensors(getattr(torch.ops.specdemo, name)(*arguments), arguments)
    except Exception:  # Triton has errors of its own, and needs a C compiler
        return False
    expected = _tensors(PLAIN[name](*copies), copies)
    limit = TOLERANCE[dtype]
    return all(bool((a - b).abs().max() <= limit * b.abs().max()) for a, b in zip(output, expected, strict=True))


def _tensors(outputs: Tensor | Sequence[Tensor], arguments: list[object]) -> list[Tensor]:
    """Return the outputs of an operation, and the arguments, which it may have changed."""
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    return [x.float() for x in (*outputs, *arguments) if isinstance(x, Tensor)]


def _probe(name: str, device: torch.device, dtype: torch.dtype) -> list[object]:
    """Return arguments of an operation with 2 rows of 3 slots, 4 query heads and 2 key/value heads of size 16."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    if name == "add_rms_norm":
        return [random(2, 3, 48), random(2, 3, 48), random(48), 1e-6]
    if name == "silu_mul":
        return [random(2, 3, 96)]
    slabs = [random(2, 8, 2, 16).transpose(1, 2) for _ in range(2)]
    columns = torch.tensor([[1, 2, 3], [4, 5, 6]]).to(device)[:, None, :, None]
    if name == "tree_attention":
        ancestors = torch.tensor([[True, False, False], [True, True, False], [True, False, True]]).to(device)[None]
        return [random(2, 3, 4, 16).transpose(1, 2), *slabs, columns[:, 0, 0, 0].contiguous(), ancestors, 0.25]
    angles = random(2, 3, 2, 1, 16).unbind(2)
    return [random(2, 3, 8, 16), random(16), random(16), 1e-6, *angles, *slabs, columns]


def _add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + delta
    return total, F.rms_norm(total, weight.shape, weight, eps)


def _silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def _norm_rope_write(
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
    kv_heads = keys.shape[1]
    heads = qkv.shape[2] - 2 * kv_heads
    q, k, v = qkv.split([heads, kv_heads, kv_heads], 2)
    if q_weight is not None and k_weight is not None:
        q, k = (F.rms_norm(x, w.shape, w, eps) for x, w in ((q, q_weight), (k, k_weight)))
    for slab, states in ((keys, apply_rope(k, (cos, sin))), (values, v)):
        states = states.transpose(1, 2)
        slab.scatter_(2, columns.expand_as(states), states)
    return apply_rope(q, (cos, sin))


def _tree_attention(
    query: Tensor, keys: Tensor, values: Tensor, ends: Tensor, ancestors: Tensor, scale: float
) -> Tensor:
    mask = tree_mask(ends, ancestors, torch.arange(keys.shape[2], device=ends.device), query.dtype)
    group = query.shape[1] // keys.shape[1]
    out = F.scaled_dot_product_attention(query, keys, values, mask, scale=scale, enable_gqa=group > 1)
    return out.transpose(1, 2).contiguous()


Operation = Callable[..., Tensor | tuple[Tensor, ...]]
PLAIN: dict[str, Operation] = {
    "add_rms_norm": _add_rms_norm,
    "silu_mul": _silu_mul,
    "norm_rope_write": _norm_rope_write,
    "tree_attention": _tree_attention,
}


def _triton(name: str) -> Operation:
    """Return a function that runs a kernel. Triton is imported by the first call."""

    def run(*arguments: object) -> Tensor | tuple[Tensor, ...]:
        from specdemo.models import triton_kernels  # only GPU builds of torch install Triton

        outputs: Tensor | tuple[Tensor, ...] = getattr(triton_kernels, name)(*arguments)
        return outputs

    return run


for _name, _plain in PLAIN.items():
    _library.impl(_name, _plain, "CPU")
    _library.impl(_name, _triton(_name), "CUDA")
