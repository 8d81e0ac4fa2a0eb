"""Faster weights and norms for CPUs: matrices in a layout in which five rows cost little more than one, as verification
needs; experts without work for those that no token chose; and RMS norms that take half the time. The values are the
model's own. Where a processor has no packed products in bfloat16, such matrices are in float32, or in float16, which
holds nearly all numbers of bfloat16 models exactly: products read half the bytes and compute in float32."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy, deepcopy
from dataclasses import dataclass, field
from functools import lru_cache, partial
from math import frexp
from timeit import timeit
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from specdemo.core.suggest import counted
from specdemo.models.cpu_threads import threads, usable_cores
from specdemo.models.devices import device_kind, runs_triton

Module = TypeVar("Module", bound=nn.Module)

KNOWN_NORMS = (LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm)
WIDE_ROWS = 5  # rows of the wide product that a layout is measured with
PADDED_ROWS = 4  # rows from which on packed products add in one order at every width
PLAIN_ROWS = 3  # most rows of a plain product where it has two layouts
CACHED_NUMBERS = 1 << 16  # that are compared at once, so that copies of them stay in a cache
SAMPLE_BYTES = 96 << 20  # of the weights that are measured; more than most caches
LEAST_BYTES = 1 << 20  # of all weights together; smaller models are not measured
PADDING_LIMIT = 1.05  # most time of a padded one-row product, in that of the fastest layout for one row
ROUNDS = 6  # the first warms up
NORM_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.02}  # of the largest output; bfloat16 rounds by 0.004
SPARE_SHARE = 4  # a second copy of the weights may take this part of the free memory
COPY_GAIN = 0.9  # most time of a wide product with the second copy, in that of the first


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of the weights of a model on a CPU.

    wide: form of the weights for products with more than `plain_rows` rows: "packed", oneDNN's blocks, or
    "float16", FBGEMM's blocks for products in float32. "": all products use the plain weights. rows: fewest rows of a
    product; a pass over fewer tokens is padded. reason: what decided, in words.
    """

    wide: str = ""
    plain_rows: int = 0
    rows: int = 1
    reason: str = field(default="", compare=False)
    of_weights: ClassVar[dict[object, "Layout"]] = {}  # shapes and dtype -> layout, so that all copies of a model agree

    def __str__(self) -> str:
        name = {"": "plain", "float16": "float16, with products in float32"}.get(self.wide, self.wide)
        if self.wide and self.plain_rows:
            name = f"plain up to {counted(self.plain_rows, 'row')}, {self.wide} above"
        return f"{name} ({self.reason})" if self.reason else name


PLAIN = Layout()
FORMS = "packed", "float16"  # of weights
FLOAT16_ROUNDING = 2.0**-22  # most change of a row in float16, in its norm: four roundings of float32
PACKING_THREADS = 8  # each packs up to 0.1 billion weights per second, and holds a matrix in float32
FLOAT16_EXPONENT = 15  # of the largest weight that is scaled for float16


class PackedLinear(nn.Module):
    """Linear layer y = x W^T + b with W in another layout. A deep copy is a plain, trainable `nn.Linear`."""

    def __init__(self, linear: nn.Linear, layout: Layout) -> None:
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        weight = linear.weight.detach().contiguous()
        self.dtype, self._form = weight.dtype, layout.wide
        wide_dtype = torch.float32 if self._form == "float16" else packed_dtype(self.dtype) or self.dtype
        self._plain, self._most_plain = (weight if layout.plain_rows else None), layout.plain_rows * self.in_features
        self._bias = None if linear.bias is None else linear.bias.detach()
        self._wide_bias = None if self._bias is None else self._bias.to(wide_dtype)
        self._converts, self._wide_itemsize = wide_dtype != self.dtype, wide_dtype.itemsize
        # not a buffer: a blocked tensor can be neither moved nor saved
        self._wide: Any
        self._multiply: Callable[..., Tensor]
        if self._form == "float16":
            scale = self._scale = float16_scale(weight) or 1.0
            bias = None if self._wide_bias is None else self._wide_bias * scale
            self._wide = torch.ops.quantized.linear_prepack_fp16(weight.to(wide_dtype) * scale, bias)
            self._multiply = _multiply_float16 if scale == 1.0 else partial(_multiply_scaled, 1.0 / scale)
            self._wide_itemsize = torch.float16.itemsize
        else:
            self._wide = torch.ops.mkldnn._reorder_linear_weight(weight.to(wide_dtype), WIDE_ROWS)
            self._multiply = torch.ops.mkldnn._linear_pointwise.default

    @property
    def row_bytes(self) -> int:
        """Return the size of the weights that a product of one row reads."""
        itemsize = self._wide_itemsize if self._plain is None else self.dtype.itemsize
        return self.out_features * self.in_features * itemsize

    @property
    def bytes(self) -> int:
        """Return the size of the weights in all their layouts."""
        wide = self.out_features * self.in_features * self._wide_itemsize
        return wide + sum(tensor.nbytes for tensor in (self._plain, self._bias) if tensor is not None)

    def forward(self, x: Tensor) -> Tensor:
        if self._plain is not None and x.numel() <= self._most_plain:
            rows = x.reshape(-1, self.in_features)  # a product of three dimensions may copy the weight
            return F.linear(rows, self._plain, self._bias).view(*x.shape[:-1], self.out_features)
        if self._converts:
            return self._multiply(x.float(), self._wide, self._wide_bias, "none", [], "").to(x.dtype)
        return self._multiply(x, self._wide, self._bias, "none", [], "")

    def __deepcopy__(self, memo: dict[int, object]) -> nn.Linear:
        if self._form == "float16":
            weight = (torch.ops.quantized.linear_unpack_fp16(self._wide)[0] / self._scale).to(self.dtype)
        else:
            weight = self._wide.to_dense(self.dtype)
        return make_linear(weight, None if self._bias is None else self._bias.clone())


def _multiply_float16(x: Tensor, weight: Any, bias: Tensor | None, *operation: object) -> Tensor:
    """Return x W^T + b for a packed weight in float16, which holds the bias too. operation: for oneDNN only."""
    if x.ndim < 2:
        return _multiply_float16(x[None], weight, bias)[0]
    product: Tensor = torch.ops.quantized.linear_dynamic_fp16.default(x, weight)
    return product


def _multiply_scaled(factor: float, x: Tensor, weight: Any, bias: Tensor | None, *operation: object) -> Tensor:
    """Return the product with a weight and a bias that were scaled by 1 / factor, a power of two."""
    return _multiply_float16(x, weight, bias).mul_(factor)


@lru_cache
def packed_dtype(dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype of packed weights for layers in `dtype`: the same or, on a processor without packed products in
    it, float32. None where this torch has none."""
    for stored in (dtype, torch.float32):
        try:
            torch.ops.mkldnn._reorder_linear_weight(torch.zeros(8, 8, dtype=stored), WIDE_ROWS)
        except (AttributeError, RuntimeError, NotImplementedError):  # private operations may be missing or differ
            continue
        return stored
    return None


class PackedHead(PackedLinear):
    """Output head in another layout that also keeps its plain `weight`, which embedding and heads may share."""

    def __init__(self, linear: nn.Linear, layout: Layout) -> None:
        super().__init__(linear, layout)
        self.weight, self.bias = linear.weight, linear.bias

    @property
    def bytes(self) -> int:
        """Return the size of the copy in another layout, without `weight`."""
        return super().bytes - (self.weight.nbytes if self._plain is not None else 0)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad):
            return F.linear(x, self.weight, self.bias)  # training needs gradients
        return super().forward(x)

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
    """RMS norm of n features on a CPU, for which torch has no fused kernel. Computed in float32 as x * sqrt(n) w /
    sqrt(|x|^2 + n eps), it takes half the time. A deep copy is the original, trainable norm."""

    def __init__(self, norm: nn.Module, factor: Tensor, eps: float) -> None:
        """norm: of any family. factor: w [n] in float32, see `norm_factor`."""
        super().__init__()
        assert isinstance(norm.weight, Tensor)
        self.weight = norm.weight
        self._norm = (norm,)  # in a tuple, so that it is not registered as a submodule
        self._scaled = factor * len(factor) ** 0.5
        self._eps_term = torch.tensor((len(factor) * eps) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or x.dtype != self.weight.dtype:
            normed: Tensor = self._norm[0](x)
        else:
            wide = x.float()
            length: Tensor = torch.linalg.vector_norm(wide, 2, -1, True)
            normed = (wide * self._scaled).div_(length.hypot_(self._eps_term)).to(x.dtype)
        return normed

    def __deepcopy__(self, memo: dict[int, object]) -> nn.Module:
        original: nn.Module = deepcopy(self._norm[0], memo)
        return original


Experts = Any  # transformers' experts of a layer, with the weights of all in one tensor, see `has_experts`


class FastExperts(nn.Module):
    """Experts of a layer in any layout, of which a pass reads the chosen ones only. The interface is that of
    transformers' experts; a deep copy is the original, trainable module."""

    def __init__(self, experts: Experts, layout: Layout) -> None:
        super().__init__()
        self.num_experts = experts.num_experts
        self._names = _expert_matrices(experts)
        self.up, self.down = (
            nn.ModuleList(pack_linears(list(_expert_linears(experts, name)), layout)) for name in self._names
        )
        shell = copy(experts)
        packed = [f"{name}{suffix}" for name in self._names for suffix in ("", "_bias")]
        shell._parameters = {name: value for name, value in experts._parameters.items() if name not in packed}
        self._shell = (shell,)  # in a tuple, so that it is not registered as a submodule

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sums [N, D] of the outputs of the K experts of each of N tokens."""
        count = top_k_index.shape[1]
        if len(hidden_states) == 1:
            out = torch.cat([self._expert(number, hidden_states) for number in top_k_index[0].tolist()])
        else:
            chosen = top_k_index.flatten()
            out = hidden_states.new_empty(len(chosen), hidden_states.shape[1])
            sizes = chosen.bincount(minlength=self.num_experts).tolist()
            for number, places in enumerate(chosen.argsort().split(sizes)):
                if sizes[number]:
                    out[places] = self._expert(number, hidden_states[places // count])
        weighted = (out * top_k_weights.reshape(-1, 1)).unflatten(0, (-1, count))
        total: Tensor = weighted.sum(1).to(hidden_states.dtype)
        return total

    def _expert(self, number: int, x: Tensor) -> Tensor:
        (shell,) = self._shell
        inner = self.up[number](x)
        out: Tensor = self.down[number](shell._apply_gate(inner) if shell.has_gate else shell.act_fn(inner))
        if shell.has_post_expert_norm:
            out = shell.post_expert_norm(out)
        return out

    def __deepcopy__(self, memo: dict[int, object]) -> nn.Module:
        plain = deepcopy(self._shell[0], memo)
        for name, packed in zip(self._names, (self.up, self.down), strict=True):
            linears = [cast(nn.Linear, deepcopy(linear)) for linear in packed]
            weights = torch.stack([linear.weight.detach() for linear in linears])
            plain._parameters[name] = _frozen(weights.transpose(1, 2) if plain.is_transposed else weights)
            if linears[0].bias is not None:
                plain._parameters[f"{name}_bias"] = _frozen(torch.stack([linear.bias for linear in linears]))
        return cast(nn.Module, plain)


FASTER = (PackedLinear, FastExperts, FastRMSNorm)


def has_experts(module: Experts) -> bool:
    """Return whether a module has the interface of `Experts`."""
    named = all(hasattr(module, name) for name in ("num_experts", "has_gate", "is_transposed", "_apply_gate"))
    return named and getattr(getattr(module, "down_proj", None), "ndim", 0) == 3


def linears_of(module: nn.Module) -> list[nn.Linear]:
    """Return the linear layers in a module, with those of experts."""
    found: list[nn.Linear] = []
    for part in module.modules():
        if type(part) is nn.Linear:
            found.append(part)
        elif has_experts(part):
            found += (linear for name in _expert_matrices(part) for linear in _expert_linears(part, name))
    return found


def _expert_matrices(experts: Experts) -> tuple[str, str]:
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def _expert_linears(experts: Experts, name: str) -> Iterator[nn.Linear]:
    """Yield the linear layer `name` of every expert, on the same weights."""
    weights, biases = experts._parameters[name], experts._parameters.get(f"{name}_bias")
    assert weights is not None
    for number, weight in enumerate(weights.detach()):
        yield make_linear(weight.T if experts.is_transposed else weight, None if biases is None else biases[number])


@torch.no_grad()
def pack(module: Module) -> Module:
    """Pack the linear layers of a module for inference, in the layout that is fastest for its own weights, and replace
    its norms by faster ones. It can no longer be saved; only a deep copy can be trained."""
    return replace(module, faster_parts(module, choose_layout(linears_of(module))))


def faster_parts(module: nn.Module, layout: Layout, head: nn.Linear | None = None) -> Callable[[nn.Module], nn.Module]:
    """Return the function that gives the faster replacement of a part of a module, or the part itself: linear layers
    and the experts of a layer in a layout, and norms. head: the output head, which is packed with the others."""
    linears = ([] if head is None else [head]) + [part for part in module.modules() if type(part) is nn.Linear]
    packed: dict[nn.Module, nn.Module] = dict(zip(linears, pack_linears(linears, layout, head), strict=True))
    return lambda part: packed.get(part) or (FastExperts(part, layout) if has_experts(part) else fast_norm(part))


def pack_linears(linears: Sequence[nn.Linear], layout: Layout, head: nn.Linear | None = None) -> Sequence[nn.Module]:
    """Return linear layers in a layout. head: the one among them whose weight others may share."""
    if not layout.wide:
        return linears

    def packed(linear: nn.Linear) -> PackedLinear:
        return (PackedHead if linear is head else PackedLinear)(linear, layout)

    if layout.wide != "float16":
        return [*map(packed, linears)]
    with ThreadPoolExecutor(min(usable_cores(), PACKING_THREADS)) as pool:
        return list(pool.map(packed, linears))


def replace(module: Module, replacement: Callable[[nn.Module], nn.Module]) -> Module:
    """Put replacements into the places of a module's parts; a part in several places is replaced once."""
    replacements: dict[nn.Module, nn.Module] = {}
    inside = "."  # of the last part that was replaced
    for name, part in list(module.named_modules(remove_duplicate=False)):
        if name.startswith(inside):
            continue
        if part not in replacements:
            replacements[part] = replacement(part)
        if replacements[part] is not part:
            module.set_submodule(name, replacements[part])
            inside = f"{name}."
    return module


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
    return sum(m.bytes for m in model.modules() if isinstance(m, PackedLinear))


def linear_bytes(model: nn.Module) -> int:
    """Return the size of the weights of all linear layers and the head that a pass over one token reads."""
    layers = (m for m in model.modules() if isinstance(m, nn.Linear | PackedLinear))
    return sum(m.row_bytes if isinstance(m, PackedLinear) else m.weight.nbytes for m in layers)


def concat_linears(*linears: nn.Linear) -> nn.Linear:
    """Return one layer that concatenates the outputs of several."""
    weight, bias = torch.cat([linear.weight.detach() for linear in linears]), None
    if any(linear.bias is not None for linear in linears):
        none = [weight.new_zeros(linear.out_features) for linear in linears]
        bias = torch.cat([n if m.bias is None else m.bias.detach() for m, n in zip(linears, none, strict=True)])
    return make_linear(weight, bias)


def fast_norm(norm: Any) -> Any:
    """Return a faster RMS norm with the same weight: on a CPU for norms of any family, on a GPU for Llama-like ones.
    Other modules are returned unchanged."""
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 1 or type(norm) is FastRMSNorm:
        return norm
    if device_kind(weight.device).host and not weight.is_meta and weight.dtype in (torch.float32, torch.bfloat16):
        eps = _eps(norm)
        factor = norm_factor(norm, eps)
        return norm if factor is None else FastRMSNorm(norm, factor, eps)
    # the original runs as eight kernels on a GPU and rounds to 16 bits between them; one kernel rounds once
    known = type(norm) in (RMSNorm, *KNOWN_NORMS) and (runs_triton(weight) or weight.dtype == torch.float32)
    return RMSNorm.like(norm) if known else norm


def _eps(norm: nn.Module) -> float:
    """Return the small number that a norm adds to the mean square."""
    names = ("variance_epsilon", "eps")
    return float(
        next((value for name in names if (value := getattr(norm, name, None))), torch.finfo(torch.float32).eps)
    )


@torch.no_grad()
def norm_factor(norm: nn.Module, eps: float) -> Tensor | None:
    """Return the factors [n] by which an RMS norm multiplies its n features, in float32: its weight or, in Gemma, 1 +
    weight. None for another module."""
    assert isinstance(norm.weight, Tensor)
    weight, tolerance = norm.weight.detach().float(), NORM_TOLERANCE[norm.weight.dtype]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, len(weight), generator=generator) + 0.5  # a layer norm subtracts the mean
    try:
        expected = norm(x.to(norm.weight.dtype)).float()
    except (RuntimeError, TypeError, AttributeError):
        return None
    for factor in (weight, 1.0 + weight):
        normed = F.rms_norm(x, weight.shape, factor, eps)
        if expected.shape == x.shape and (normed - expected).abs().max() <= tolerance * normed.abs().max():
            return factor
    return None


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


@torch.no_grad()
def choose_layout(linears: Sequence[nn.Linear], free_bytes: int = 0) -> Layout:
    """Return the fastest layout for these layers, measured on their own weights with one row and with several.

    A plain pass gets the layout that is best for one row, within `PADDING_LIMIT`. free_bytes: free memory, of which a
    part may hold a second copy of the weights.
    """
    weights = [linear.weight for linear in linears]
    size = sum(weight.nbytes for weight in weights)
    if any(weight.is_meta for weight in weights):  # an outline; the result for these shapes is for real weights
        return PLAIN
    if size < LEAST_BYTES or not device_kind(weights[0].device).host or not torch.backends.mkldnn.is_available():
        return PLAIN
    if len({weight.dtype for weight in weights}) > 1 or weights[0].dtype not in (torch.float32, torch.bfloat16):
        return PLAIN
    sample = _sample(linears)
    layout = _known_layout(linears, sample, possible_forms(sample), free_bytes)
    if layout.wide == "float16" and not fit_float16(linears):
        layout = _known_layout(linears, sample, FORMS[:1], free_bytes)
    return layout


def _known_layout(
    linears: Sequence[nn.Linear], sample: Sequence[nn.Linear], forms: Sequence[str], free_bytes: int
) -> Layout:
    """Return the layout that was measured for weights of these shapes, now or earlier."""
    dtype, size = linears[0].weight.dtype, sum(linear.weight.nbytes for linear in linears)
    key = tuple(linear.weight.shape for linear in linears), dtype, tuple(forms)
    if key not in Layout.of_weights:
        with threads(1):  # whose CPU time does not include other programs
            copy_bytes = size * (packed_dtype(dtype) or torch.float32).itemsize // dtype.itemsize
            Layout.of_weights[key] = _measured_layout(sample, forms, copy_bytes <= free_bytes // SPARE_SHARE)
    return Layout.of_weights[key]


def has_float16_products() -> bool:
    """Return whether this torch multiplies float32 inputs by weights in float16, as FBGEMM on x86 does."""
    return _engine_has_float16(torch.backends.quantized.engine)


@lru_cache
def _engine_has_float16(engine: str) -> bool:
    try:
        torch.ops.quantized.linear_prepack_fp16(torch.zeros(8, 8), None)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return True


@lru_cache
def float16_rows_agree() -> bool:
    """Return whether products in float16 give a row the same bits beside any number of rows. FBGEMM's kernels for
    AVX-512 do, those for AVX2 add in other orders."""
    inputs, outputs = 600, 64
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(count, inputs, generator=generator) for count in (outputs, outputs))
    with torch.no_grad():
        layer = PackedLinear(make_linear(weight, None), Layout("float16"))
        return all(torch.equal(layer(rows[:count]), layer(rows)[:count]) for count in range(1, outputs))


def possible_forms(linears: Sequence[nn.Linear]) -> Sequence[str]:
    """Return those of `FORMS` that may hold these weights on this machine."""
    return FORMS if has_float16_products() and fit_float16(linears) else FORMS[:1]


def fit_float16(linears: Sequence[nn.Linear]) -> bool:
    """Return whether float16 holds these weights, as it does for nearly all models stored in 16 bits, and not for those
    stored in float32."""
    return all(float16_scale(linear.weight.detach()) > 0.0 for linear in linears)


def float16_scale(weight: Tensor) -> float:
    """Return the power of two with which float16 holds a matrix, 1.0 where it does as it is: no row changes by more
    than `FLOAT16_ROUNDING`. 0.0 if there is none."""
    if _holds(weight, 1.0):
        return 1.0
    exponent = frexp(float(weight.abs().max()))[1]
    scale = 2.0 ** (FLOAT16_EXPONENT - exponent)
    return scale if _holds(weight, scale) else 0.0


def _holds(weight: Tensor, scale: float) -> bool:
    for part in weight.split(max(1, CACHED_NUMBERS // weight.shape[1])):
        wide = part.float() if scale == 1.0 else part.float() * scale
        change = (wide - wide.half().float()).norm(dim=1)
        if not bool((change <= FLOAT16_ROUNDING * wide.norm(dim=1)).all()):
            return False
    return True


def _measured_layout(sample: Sequence[nn.Linear], forms: Sequence[str], copies: bool) -> Layout:
    seconds = layout_seconds(sample, (1, PADDED_ROWS, WIDE_ROWS), forms)
    if ("packed", 1) not in seconds:
        return PLAIN
    layout = _layout_for_one_row(seconds)
    if not layout.wide:
        layout = _layout_for_several_rows(sample, seconds, copies)
    stored = packed_dtype(sample[0].weight.dtype)
    other = "" if stored == sample[0].weight.dtype else f" in {str(stored).removeprefix('torch.')}"
    share = {(form, n): seconds[form, n] / seconds["plain", n] for form in forms for n in (1, WIDE_ROWS)}
    reasons = (
        f"{form}{other if form != 'float16' else ''}: {share[form, 1]:.2f} of plain for 1 row, "
        f"{share[form, WIDE_ROWS]:.2f} for {WIDE_ROWS}"
        for form in forms
    )
    return dataclasses.replace(layout, reason="; ".join(reasons))


def _layout_for_one_row(seconds: Mapping[tuple[str, int], float]) -> Layout:
    """Return the layout with the fastest products of one row; of those within `PADDING_LIMIT` of it a padded one, else
    the one that is the fastest for several rows."""
    forms = dict.fromkeys(form for form, _ in seconds)
    one = {Layout(form.replace("plain", "")): seconds[form, 1] for form in forms}
    padded = Layout("packed", rows=PADDED_ROWS)
    limit = PADDING_LIMIT * min(seconds["packed", PADDED_ROWS], *one.values())
    if seconds["packed", PADDED_ROWS] <= limit:
        return padded
    fast = [layout for layout in one if one[layout] <= limit]
    return min(fast, key=lambda layout: seconds[layout.wide or "plain", WIDE_ROWS])


def _layout_for_several_rows(
    sample: Sequence[nn.Linear], seconds: Mapping[tuple[str, int], float], copies: bool
) -> Layout:
    """Return the layout for several rows where the plain one is the fastest for one row.

    copies: a second copy of the weights fits into memory. It must save a tenth.
    """
    dtype = sample[0].weight.dtype
    forms = [form for form in FORMS if (form, WIDE_ROWS) in seconds]
    form = min(forms, key=lambda form: seconds[form, WIDE_ROWS])
    if seconds[form, WIDE_ROWS] > COPY_GAIN * seconds["plain", WIDE_ROWS]:
        return PLAIN
    if copies:
        return Layout(form, plain_rows=_plain_rows(sample, form))
    grows = packed_dtype(dtype) != dtype  # the others are in float32, and larger
    layouts = PLAIN, *(Layout(form) for form in forms if form == "float16" or not grows)
    return min(layouts, key=lambda layout: sum(seconds[layout.wide or "plain", rows] for rows in (1, WIDE_ROWS)))


def _plain_rows(linears: Sequence[nn.Linear], form: str) -> int:
    """Return the most rows of a plain product, up to PLAIN_ROWS, with which products of one to PLAIN_ROWS rows take the
    least time. 0: none is plain, so that a second copy of the weights is not needed."""
    counts = range(1, PLAIN_ROWS + 1)
    seconds = layout_seconds(linears, counts, (form,))
    return min(
        range(PLAIN_ROWS, -1, -1), key=lambda most: sum(seconds["plain" if n <= most else form, n] for n in counts)
    )


@lru_cache(maxsize=1)
@torch.no_grad()
def bfloat16_pays() -> bool:
    """Measure whether products with one row and with several are faster in bfloat16 than in float32, in the best layout
    of each. Processors without bf16 instructions emulate it, up to fifteen times as slowly."""
    seconds = {}
    if packed_dtype(torch.bfloat16) != torch.bfloat16:
        return False
    for dtype in (torch.float32, torch.bfloat16):
        linears = [make_linear(torch.zeros(2048, 1024, dtype=dtype), None) for _ in range(12)]
        with threads(1):
            times = layout_seconds(linears, (1, PADDED_ROWS, WIDE_ROWS))
        one = min(times["plain", 1], times["packed", 1], times["packed", PADDED_ROWS])
        seconds[dtype] = one + min(times["plain", WIDE_ROWS], times["packed", WIDE_ROWS])
    return seconds[torch.bfloat16] < seconds[torch.float32]


def _sample(linears: Sequence[nn.Linear]) -> list[nn.Linear]:
    """Return the first layers that together exceed a cache, all if they do not."""
    chosen: list[nn.Linear] = []
    size = 0
    for linear in linears:
        chosen.append(linear)
        size += linear.weight.nbytes
        if size > SAMPLE_BYTES:
            break
    return chosen


def layout_seconds(
    linears: Sequence[nn.Linear], counts: Sequence[int], forms: Sequence[str] = ("packed",)
) -> dict[tuple[str, int], float]:
    """Return form and number of rows -> seconds of one product with every layer, the best of ROUNDS: of plain weights
    and, where torch can pack weights, of others.

    counts: numbers of rows; PADDED_ROWS applies to packed weights. forms: of `FORMS`.
    """
    kinds: dict[str, Sequence[nn.Module]] = {"plain": linears}
    dtype = linears[0].weight.dtype
    if packed_dtype(dtype):
        kinds |= {form: pack_linears(linears, Layout(form)) for form in forms}
    sizes = {linear.in_features for linear in linears}
    inputs = {(rows, size): torch.ones(1, rows, size, dtype=dtype) for rows in counts for size in sizes}

    def products(kind: str, rows: int) -> None:
        for layer, linear in zip(kinds[kind], linears, strict=True):
            layer(inputs[rows, linear.in_features])

    runs = ((kind, rows) for kind in kinds for rows in counts if kind == "packed" or rows != PADDED_ROWS)
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(ROUNDS):
        for run in best:
            best[run] = min(best[run], timeit(partial(products, *run), timer=time.thread_time, number=1))
    return best
