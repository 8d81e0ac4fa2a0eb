"""How the passes of a transformers model run on a CPU: layout of its weights, threads, and one kernel for every width.
All of it is measured on the model itself.

A token's logits are the same bits in a pass over one token and in a pass over k + 1, if three conditions hold:
products use packed weights and at least four rows, or weights in float16 on AVX-512; attention reads keys in numbers
that do not change the order of its sums, on some processors with at least four query rows; everything else works row by
row. `PassShape` describes such passes.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar
from weakref import WeakKeyDictionary

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from specdemo.core.rounding import difference, spacing
from specdemo.costs.passes import KEY_SPLIT, PassShape
from specdemo.kv.masks import additive
from specdemo.models.cpu_threads import thread_counts
from specdemo.models.packed import (
    FASTER,
    PADDED_ROWS,
    PLAIN,
    Layout,
    choose_layout,
    faster_parts,
    linears_of,
    packed_dtype,
    replace,
)
from specdemo.models.text import sample_tokens

PROBE_TOKENS = 8
KEY_BLOCK = 128
KEY_LENGTHS = (4, 100, 126, 130, 200, 250, 256, 300, 380, 384, 390, 500, 512)
BIT_EXACT = ("auto", "on", "off")


@dataclass(frozen=True, slots=True)
class CpuSettings:
    """Choices of the user. threads: 0: the fastest number. bit_exact: one kernel for every width; auto: where a plain
    pass hardly gets slower."""

    threads: int = 0
    bit_exact: str = "auto"

    def __post_init__(self) -> None:
        if self.bit_exact not in BIT_EXACT:
            raise ValueError(f"unknown bit_exact {self.bit_exact!r}; choose one of {', '.join(BIT_EXACT)}")

    @property
    def counts(self) -> tuple[int, ...]:
        """Return the numbers of threads to choose from."""
        return (self.threads,) if self.threads else thread_counts()

    @property
    def layout(self) -> Layout | None:
        """Return the layout that the choices require; None: the fastest."""
        return Layout("packed", rows=PADDED_ROWS) if self.bit_exact == "on" else None


MEASURED = CpuSettings()


@dataclass(slots=True)
class CpuPlan:
    """Decisions for one model. threads: 0: none measured. same_bits, pass_ms: see `Target`. chains: trees are cut to
    their first branch, because a node's ancestors are in other columns than in a chain, so sums have another order.
    """

    layout: Layout = PLAIN
    shape: PassShape = PassShape()
    same_bits: bool = False
    chains: bool = False
    threads: int = 0
    pass_ms: dict[int, float] = field(default_factory=dict, compare=False)
    shapes: ClassVar[dict[object, PassShape]] = {}  # kind of model -> shape, so that all copies of a model agree
    of_models: ClassVar[WeakKeyDictionary[nn.Module, "CpuPlan"]] = WeakKeyDictionary()


def cpu_plan(model: nn.Module) -> CpuPlan:
    """Return the plan of a model, which all its targets share. A copy of the model has a plan of its own."""
    return CpuPlan.of_models.setdefault(model, CpuPlan())


@torch.no_grad()
def pack_model(model: PreTrainedModel, layout: Layout | None = None, text: Sequence[int] = ()) -> str:
    """Put the linear layers, experts and output head of a model of any family into a layout, and replace its norms.
    Changes nothing where the logits then differ by more than the model's rounding, or where torch cannot pack, and
    returns a sentence about it.

    layout: None: the fastest for its weights. text: token ids with which the logits are compared; (): spread ids.
    """
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    plain_head = head if type(head) is nn.Linear else None
    linears = linears_of(decoder) + ([plain_head] if plain_head is not None else [])
    if not linears:
        return ""
    layout = layout or choose_layout(linears, psutil.virtual_memory().available)
    if layout.wide and not packed_dtype(linears[0].weight.dtype):
        dtype = str(model.dtype).removeprefix("torch.")
        fix = "" if model.dtype == torch.float32 else "; choose dtype float32"
        return f"this processor has no packed products in {dtype}, so its passes use plain ones{fix}"
    # plain products of several rows may be slow, and only norms and experts change then
    count = PROBE_TOKENS if layout.wide else 2
    try:
        expected, own = _probe(model, text, count), _probe(model, text, count - 1)
    except Exception:  # a family with other inputs, or a context of one token: nothing to compare with
        return ""
    faster = faster_parts(decoder, layout, plain_head)
    replace(decoder, faster)
    if plain_head is not None:
        model.set_output_embeddings(faster(plain_head))
    note = ""
    try:
        packed, layers = _probe(model, text, count), model.config.get_text_config(decoder=True).num_hidden_layers
        result = difference(expected, packed, [(expected[:-1], own)], spacing(model.dtype), layers)
        same = result.is_rounding
        if not same:
            parts = f"{layout.wide} products" if layout.wide else "faster norms and experts"
            note = f"{parts} move {100 * result.moved:.2g}% of the probability of a token, so they are not used"
    except Exception:  # a layer of this family reads its weights itself
        same = False
    if not same:
        replace(decoder, lambda part: deepcopy(part) if isinstance(part, FASTER) else part)
        if plain_head is not None:
            model.set_output_embeddings(plain_head)
        return note
    cpu_plan(model).layout = layout
    return ""


def _probe(model: PreTrainedModel, text: Sequence[int], count: int) -> Tensor:
    """Return the logits [count, V] of the first tokens of a text in float32."""
    embed = model.get_input_embeddings()
    assert isinstance(embed, nn.Embedding)
    tokens = list(text) or sample_tokens(None, PROBE_TOKENS, embed.num_embeddings)
    ids = torch.tensor([tokens[:count]], device=embed.weight.device)
    logits: Tensor = model(ids, use_cache=False).logits[0]
    return logits.float()


def pass_shape(dtype: torch.dtype, head_sizes: tuple[int, ...]) -> PassShape:
    """Return the shape of passes with one kernel for every width. head_sizes: of the attention heads of all layers."""
    tails = [set(key_tails(dtype, size)) for size in head_sizes]
    return PassShape(PADDED_ROWS, tuple(sorted(set.intersection(*tails))))


@lru_cache
@torch.no_grad()
def key_tails(dtype: torch.dtype, size: int) -> tuple[int, ...]:
    """Return the numbers of keys up to KEY_SPLIT with which attention gives the same bits as with KEY_SPLIT keys.

    size: of a head. The kernel reads KEY_SPLIT keys at a time; the product for fewer may add in another order.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(1, 2, *shape, size, generator=generator)

    def same(columns: int) -> bool:
        lengths = [length for length in (*KEY_LENGTHS, columns) if length <= columns]
        return all(_same_bits(random(PADDED_ROWS), random(n // 2), random(n // 2), columns, dtype) for n in lengths)

    return tuple(columns for columns in range(KEY_BLOCK, KEY_SPLIT + 1, KEY_BLOCK) if same(columns))


def _same_bits(query: Tensor, keys: Tensor, values: Tensor, columns: int, dtype: torch.dtype) -> bool:
    """Return whether attention over `columns` and over KEY_SPLIT columns gives the same bits.

    Every key occurs twice, with a value and its negative. The exact sum is 0, so that the result is rounding alone and
    shows every change in the order of additions, also in bfloat16.
    """
    visible = 2 * keys.shape[2]
    room = (0, 0, 0, KEY_SPLIT - visible)
    keys = F.pad(torch.cat([keys, keys.flip(2)], 2), room).to(dtype)
    values = F.pad(torch.cat([values, -values.flip(2)], 2), room).to(dtype)
    mask = additive(torch.arange(KEY_SPLIT) < visible, dtype).expand(1, 1, query.shape[2], -1)
    outputs = [
        F.scaled_dot_product_attention(query.to(dtype), keys[:, :, :n], values[:, :, :n], mask[..., :n])
        for n in (columns, KEY_SPLIT)
    ]
    return torch.equal(*outputs)
