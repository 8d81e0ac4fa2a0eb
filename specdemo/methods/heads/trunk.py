"""Blocks of tokens in the target's own layers, for drafters that share its weights and its KV cache.

B rows, S slots of a block, W columns of the cache, H hidden size, E size of an attention head, V vocabulary. Nothing is
written to the cache, so there is nothing to roll back.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdemo.core.protocol import Budget, DraftPlan, Progress, SharedKV, Target, Tensors
from specdemo.core.tree import Draft
from specdemo.kv.masks import additive, aligned
from specdemo.methods.heads.head import Head, Net
from specdemo.methods.heads.runtime import last_columns
from specdemo.methods.heads.sampler import ChainBuilder, flatten_draft, unflatten_draft
from specdemo.models.fused import FIXED_ROPE, KNOWN_LAYERS, layer_class
from specdemo.models.layers import llama_config_like


class BlockCache(Cache):
    """Committed keys and values, followed by those of a block, which are not kept."""

    def __init__(self, kv: SharedKV) -> None:
        self._committed = kv.layers

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Return all keys and values [B, K, W + S, E] of a layer."""
        keys, values = self._committed[str(layer_idx)]
        return torch.cat([keys, key_states], 2), torch.cat([values, value_states], 2)


class BlockInputs(NamedTuple):
    """Inputs of the layers. states [B, S, H]; cos, sin [B, S, E]; mask: additive [B or 1, 1, S, W + S], None: all."""

    states: Tensor
    rope: tuple[Tensor, Tensor]
    mask: Tensor | None
    cache: BlockCache


class Trunk:
    """Layers, final norm and output head of a target. A target that is no transformers model has no layers."""

    def __init__(self, target: Target, title: str) -> None:
        """title: of the method. Raises ValueError, one line, for a target whose layers cannot run on their own."""
        self._target = target
        decoder: Any = target.model.get_decoder() if target.model is not None else None
        self.layers: Sequence[nn.Module] = () if decoder is None else decoder.layers
        self._norm = nn.Identity() if decoder is None else decoder.norm
        self._rotary = LlamaRotaryEmbedding(llama_config_like(target)) if decoder is None else decoder.rotary_emb
        known = all(layer_class(layer) in KNOWN_LAYERS for layer in self.layers)
        if not known or target.layer_config.get("sliding_window") or self._rotary.rope_type not in FIXED_ROPE:
            raise ValueError(
                f"{title} drafts in the layers of its target, which works for Llama, Qwen2 and Qwen3 with full "
                f"attention; choose one of them instead of {target.name or 'this target'}"
            )

    def block(self, tokens: Tensor, kv: SharedKV, causal: bool) -> BlockInputs:
        """Return the inputs for tokens [B, S] after the committed ones. causal: a slot sees no later ones."""
        states: Tensor = self._target.embed(tokens)
        slots, width = tokens.shape[1], next(iter(kv.layers.values()))[0].shape[2]
        order = torch.arange(slots, device=tokens.device)
        rope = self._rotary(states, kv.positions + order)
        committed, mask = kv.mask(0), None
        if causal or committed is not None:
            before = states.new_zeros(1, 1, 1, width) if committed is None else committed
            within = additive((order <= order[:, None]) | (not causal), before.dtype)[None, None]
            rows = len(before)
            mask = aligned(torch.cat([before.expand(-1, -1, slots, -1), within.expand(rows, -1, -1, -1)], -1))
        return BlockInputs(states, rope, mask, BlockCache(kv))

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits [B, S, V] of the last layer's states [B, S, H]."""
        out: Tensor = self._target.lm_head(self._norm(states))
        return out


class KVHead(Head[Net]):
    """A head without a KV cache whose draft attends to the target's, in one CUDA graph if possible."""

    def __init__(self, target: Target, model: Net | str, options: Any = None) -> None:
        super().__init__(target, model, options)
        self._target, self._last = target, ()

    _target: Target
    _last: Tensors  # of every row: the root [B, 1], and what else `draft_tokens` reads

    @abstractmethod
    def draft_tokens(self, kv: SharedKV, depth: int, builder: ChainBuilder, roots: Tensor, *inputs: Tensor) -> None:
        """Append `depth` tokens after the roots [B, 1]."""

    def longest(self, budget: Budget) -> int:
        """Return the draft length for a budget."""
        return budget.chain

    def observe(self, progress: Progress) -> None:
        self._last = (last_columns(progress, progress.outputs)[:, None],)

    def propose(self, budget: Budget) -> Draft:
        depth, rows = self.longest(budget), self.runtime.rows
        if depth < 1:
            return Draft.empty(rows, self.device)
        noise = self.sampler.predraw_noise(rows, depth, self._target.vocab_size, self.device)
        plan = DraftPlan((self.head, self.sampler.kind), depth, room=0)  # another head may use this target
        inputs = len(self._last)

        def write(kv: SharedKV, depth: int, *extra: Tensor) -> Tensors:
            builder = ChainBuilder(self.sampler.with_noise(extra[inputs:]))
            self.draft_tokens(kv, depth, builder, *extra[:inputs])
            return flatten_draft(builder.build())

        return unflatten_draft(self._target.draft_from_kv(write, (*self._last, *noise), plan), depth)

    @property
    def graph_note(self) -> str:
        return ""  # the draft runs in the target's graphs, whose note is the target's


class LayerHead(KVHead[Net]):
    """A head that drafts a block with the layers of its target, in one pass on their KV cache."""

    requires: ClassVar = frozenset({"layers", "shared_kv"})

    def __init__(self, target: Target, model: Net | str, options: Any = None) -> None:
        super().__init__(target, model, options)
        self._trunk = Trunk(target, self.title)

    @abstractmethod
    def states(self, kv: SharedKV, depth: int, roots: Tensor) -> Tensor:
        """Return the last layer's states [B, depth, H] of a block after the roots [B, 1]."""

    def read_bytes(self, k: int) -> int:
        return self.weight_bytes + (self._target.pass_bytes or self._target.weight_bytes)  # one pass drafts all tokens

    def draft_tokens(self, kv: SharedKV, depth: int, builder: ChainBuilder, roots: Tensor, *inputs: Tensor) -> None:
        builder.append(self._trunk.logits(self.states(kv, depth, roots)))
