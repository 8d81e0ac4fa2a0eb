"""Faster weights and norms for CPUs: matrices in oneDNN's blocked layout, with which five rows cost little more than
one, as verification needs; and RMS norms that take half the time. The values are the model's own."""

from copy import deepcopy
from functools import lru_cache
from timeit import repeat
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

Module = TypeVar("Module", bound=nn.Module)

KNOWN_NORMS = (LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm)
PACKED_ROWS = 5  # tokens per pass that the layout is chosen for; one token is not slower
PACKED_SIZE = 100_000  # elements; smaller matrices fit into the CPU cache, where a plain product is faster; bf16: half


class PackedLinear(nn.Module):
    """Linear layer y = x W^T + b whose only copy of W is in oneDNN's blocked layout. A deep copy is a plain, trainable
    `nn.Linear`."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        # not a buffer: a blocked tensor can be neither moved nor saved
        weight = linear.weight.detach().contiguous()
        self._blocks: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
        self._bias = None if linear.bias is None else linear.bias.detach()
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    @property
    def dtype(self) -> torch.dtype:
        """Return the stored dtype."""
        return self._blocks.dtype

    @property
    def bytes(self) -> int:
        """Return the size of the weights."""
        bias = 0 if self._bias is None else self._bias.nbytes
        return int(self.out_features * self.in_features * self._blocks.element_size()) + bias

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = self._multiply(x, self._blocks, self._bias, "none", [], "")
        return product

    def __deepcopy__(self, memo: dict[int, object]) -> nn.Linear:
        return make_linear(self._blocks.to_dense(), None if self._bias is None else self._bias.clone())


class PackedHead(nn.Module):
    """Output head with packed weights that also keeps its plain `weight`, which embedding and heads may share."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self._packed = (PackedLinear(linear),)  # in a tuple, so that it is not registered as a submodule

    @property
    def bytes(self) -> int:
        """Return the size of the packed copy, without `weight`."""
        return self._packed[0].bytes

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad):
            return F.linear(x, self.weight, self.bias)  # training needs gradients
        product: Tensor = self._packed[0](x)
        return product

    def __deepcopy__(self, memo: dict[int, object]) -> nn.Linear:
        return make_linear(deepcopy(self.weight, memo), deepcopy(self.bias, memo))


class RMSNorm(nn.RMSNorm):
    """RMS norm of torch, computed in the dtype of its weight."""

    @classmethod
    def like(cls, norm: Any) -> "RMSNorm":
        """Return a norm with the weight of another, which is a norm of transformers or of this class."""
        if isinstance(norm, RMSNorm):
            return norm
        made = cls(len(norm.weight), norm.variance_epsilon, device="meta")
        made.weight = norm.weight
        return made

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps)


class FastRMSNorm(nn.Module):
    """RMS norm of n features in float32 on a CPU, for which torch has no fused kernel. Computed as x * sqrt(n) w /
    sqrt(|x|^2 + n eps), it takes half the time. A deep copy is the original, trainable norm."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight
        self._norm = (norm,)  # in a tuple, so that it is not registered as a submodule
        size = norm.weight.numel()
        eps = RMSNorm.like(norm).eps
        self._scaled = norm.weight.detach() * size**0.5
        self._eps_term = torch.tensor((size * eps) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or x.dtype != torch.float32:
            normed: Tensor = self._norm[0](x)
        else:
            length: Tensor = torch.linalg.vector_norm(x, 2, -1, True)
            normed = (x * self._scaled).div_(length.hypot_(self._eps_term))
        return normed

    def __deepcopy__(self, memo: dict[int, object]) -> nn.Module:
        copy: nn.Module = deepcopy(self._norm[0], memo)
        return copy


@torch.no_grad()
def pack(head: Module) -> Module:
    """Pack the linear layers of a head for inference and replace its norms by faster ones. It can no longer be saved;
    only a deep copy can be trained."""
    replacements: dict[nn.Module, nn.Module] = {}
    for name, layer in list(head.named_modules(remove_duplicate=False)):
        if layer not in replacements:
            replacements[layer] = pack_linear(layer) if type(layer) is nn.Linear else fast_norm(layer)
        if replacements[layer] is not layer:
            head.set_submodule(name, replacements[layer])
    return head


def should_pack(*weights: Tensor) -> bool:
    """Return True if `pack` would pack this weight (or the concatenation of several)."""
    size = sum(weight.numel() for weight in weights)
    min_size = PACKED_SIZE // (2 if weights[0].dtype == torch.bfloat16 else 1)
    return weights[0].device.type == "cpu" and size >= min_size and packing_pays(weights[0].dtype)


def should_fuse(*weights: Tensor) -> bool:
    """Return True if products with these weights should be one: on a GPU, or where the result is packed."""
    return weights[0].device.type == "cuda" or should_pack(*weights)


def dtype_of(module: nn.Module) -> torch.dtype:
    """Return the dtype of a module's weights, packed or not. Raises ValueError for a module without weights."""
    for part in module.modules():
        if isinstance(part, PackedLinear):
            return part.dtype
        for parameter in part.parameters(recurse=False):
            return parameter.dtype
    raise ValueError(f"{type(module).__name__} has no weights")


def packed_bytes(model: nn.Module) -> int:
    """Return the size of packed weights, which are not among the model's parameters."""
    return sum(m.bytes for m in model.modules() if isinstance(m, PackedLinear | PackedHead))


def concat_linears(*linears: nn.Linear) -> nn.Linear:
    """Return one layer that concatenates the outputs of several."""
    weight, bias = torch.cat([linear.weight.detach() for linear in linears]), None
    if any(linear.bias is not None for linear in linears):
        none = [weight.new_zeros(linear.out_features) for linear in linears]
        bias = torch.cat([n if m.bias is None else m.bias.detach() for m, n in zip(linears, none, strict=True)])
    return make_linear(weight, bias)


def pack_linear(linear: nn.Linear) -> nn.Module:
    """Return the layer with packed weights where that is faster, else the layer itself."""
    return PackedLinear(linear) if should_pack(linear.weight) else linear


def fast_norm(norm: Any) -> Any:
    """Return a faster norm with the same weight for the Llama-like norms of transformers and for `RMSNorm`. Other
    modules are returned unchanged."""
    if type(norm) not in (RMSNorm, *KNOWN_NORMS):
        return norm
    device, dtype = norm.weight.device.type, norm.weight.dtype
    if device == "cpu" and dtype == torch.float32:
        return FastRMSNorm(norm)
    # the original runs as eight kernels on a GPU and rounds to 16 bits between them; one kernel rounds once
    return RMSNorm.like(norm) if device == "cuda" or dtype == torch.float32 else norm


def make_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Create a linear layer. Tensors that are parameters already are used as they are."""
    outputs, inputs = weight.shape
    linear = nn.Linear(inputs, outputs, bias=False, device="meta")
    linear.weight = _frozen(weight)
    if bias is not None:
        linear.bias = _frozen(bias)
    return linear


def _frozen(tensor: Tensor) -> nn.Parameter:
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor.detach(), requires_grad=False)


@lru_cache(maxsize=4)
def packing_pays(dtype: torch.dtype) -> bool:
    """Measure whether one token and five tokens are faster together with blocked weights on this CPU."""
    if dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():
        return False
    linear = make_linear(torch.randn(768, 512, generator=torch.Generator().manual_seed(0)).to(dtype), None)
    try:
        packed = PackedLinear(linear)
        seconds = {kind: sum(_seconds(kind, rows, dtype) for rows in (1, PACKED_ROWS)) for kind in (linear, packed)}
    except (AttributeError, RuntimeError, NotImplementedError):  # private operations of torch may be missing or differ
        return False
    return seconds[packed] < seconds[linear]


@torch.no_grad()
def _seconds(kind: nn.Module, rows: int, dtype: torch.dtype) -> float:
    x = torch.ones(1, rows, 512, dtype=dtype)
    return min(repeat(lambda: kind(x), number=1, repeat=30))
