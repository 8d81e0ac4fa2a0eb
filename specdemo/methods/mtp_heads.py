"""The networks of multi-token prediction: decoder layers like the target's, on the target's hidden states.

B rows, A columns, D modules or heads, V vocabulary, H hidden. `step` runs one of them over columns; its state is what
lm_head reads. Sequential modules (DeepSeek-V3 2412.19437, section 2.2) join the hidden state of column a with the
embedding of token a + 1 + i. Parallel heads (Gloeckle et al. 2404.19737, section 2) read no token: the target's last
layer is head 0 on the trunk below it, each further head is one more such layer.

Embedding, lm_head, rotary angles and the final norm are the target's: used, never owned, so they are neither frozen,
moved nor saved with the heads; where the target is trained too, gradients reach them.
"""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from specdemo.core.protocol import Target
from specdemo.models.fused import fused, layer_class
from specdemo.models.packed import dtype_of, pack
from specdemo.models.stack import Stack, stacked

UNROLLED = (0.51, 0.31, 0.18)  # FastMTP: weights of the steps of a module that is applied again and again


@dataclass(frozen=True, slots=True)
class Convention:
    """Whether a module reads the target's state behind the target's final norm, and hands on its own behind its own."""

    reads_normed: bool = True
    hands_on_normed: bool = True

    def __str__(self) -> str:
        words = {True: "normed", False: "plain"}
        return f"{words[self.reads_normed]} states in, {words[self.hands_on_normed]} states on"


class Shared(NamedTuple):
    """What heads use of their target. In a tuple, so that it is no part of their state."""

    embed: nn.Module
    lm_head: nn.Module
    norm: nn.Module
    rotary: nn.Module


class Heads(nn.Module):
    """One layer, or module around a layer, per token ahead; made from `config`."""

    note = ""

    def __init__(self, target: Target, config: Any, rotary: nn.Module, layers: list[nn.Module]) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(layers)
        self.below = target.num_layers  # layers of the target
        decoder = _decoder(target)
        norm = nn.Identity() if decoder is None else decoder.norm
        self.shared = Shared(target.embed, target.lm_head, norm, rotary)
        self._angles: tuple[Tensor, tuple[Tensor, Tensor]] | None = None  # positions, and cos and sin there
        self._spoken: torch.dtype = getattr(target, "dtype", torch.float32)  # that lm_head reads

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def dtype(self) -> torch.dtype:
        return dtype_of(self)

    @property
    def weights(self) -> tuple[float, ...]:
        """Of the steps in the loss; as many as are trained."""
        raise NotImplementedError

    @property
    def tap(self) -> int:
        raise NotImplementedError

    def step(
        self,
        index: int,
        hidden: Tensor,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, Tensor]:
        """hidden [B, A, H], tokens and positions [B, A] -> state [B, A, H], and the hidden state the next step reads.

        mask: additive or boolean, [B, 1, A, columns]; None is causal.
        """
        raise NotImplementedError

    @property
    def slabs(self) -> int:
        """Layers of their cache."""
        return len(self)

    def hasten(self) -> None:
        """Run with fewer and larger operations from now on. The heads are only read, or else deep copies trained."""
        raise NotImplementedError

    def logits(self, state: Tensor) -> Tensor:
        """state [..., H] of `step` -> [..., V]"""
        logits: Tensor = self.shared.lm_head(state.to(self._spoken))
        return logits

    def _run(
        self, layer: nn.Module, hidden: Tensor, positions: Tensor, mask: Tensor | None, cache: Cache | None
    ) -> Tensor:
        state: Tensor = layer(
            hidden,
            position_embeddings=self._at(hidden, positions),
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=cache is not None,
        )
        return state

    def _at(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self._angles is None or self._angles[0] is not positions:  # the heads of one pass share them
            self._angles = positions, self.shared.rotary(hidden, positions)
        return self._angles[1]


class Module(nn.Module):
    """One sequential module: what joins two states, a decoder layer, and the norm before lm_head."""

    def __init__(self, config: Any, norm: type[nn.Module], block: nn.Module) -> None:
        super().__init__()
        size = config.hidden_size
        self.enorm = norm(size, eps=config.rms_norm_eps)
        self.hnorm = norm(size, eps=config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.block = block
        self.norm = norm(size, eps=config.rms_norm_eps)


class SequentialModules(Heads):
    """Modules of the target's family. A single one may be applied any number of times."""

    def __init__(self, target: Target, modules: int, hidden_first: bool = False) -> None:
        """hidden_first: eh_proj reads [hidden; embedding]. Raises ValueError for a target of another build."""
        config, layer, norm, rotary = _family(target, modules)
        super().__init__(target, config, rotary, [Module(config, norm, layer(config, i)) for i in range(modules)])
        self.hidden_first = hidden_first
        self.convention = Convention()

    @property
    def weights(self) -> tuple[float, ...]:
        return UNROLLED if len(self) == 1 else (1 / len(self),) * len(self)

    @property
    def tap(self) -> int:
        return -1 if self.convention.reads_normed else self.below

    def step(
        self,
        index: int,
        hidden: Tensor,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, Tensor]:
        module: Any = self.layers[index % len(self)]
        parts = [module.enorm(self.shared.embed(tokens).to(self.dtype)), module.hnorm(hidden)]
        joined = torch.cat(parts[::-1] if self.hidden_first else parts, -1)
        plain = self._run(module.block, module.eh_proj(joined), positions, mask, cache)
        state = module.norm(plain)
        return state, state if self.convention.hands_on_normed else plain

    def hasten(self) -> None:
        module: Any
        for module in self.layers:
            module.block = fused(module.block, self.shared.rotary)
        pack(self)


class ParallelHeads(Heads):
    """One Llama layer per head on the trunk's output, tap `num_layers - 1`; final norm and lm_head are the target's."""

    def __init__(self, target: Target, heads: int) -> None:
        config = _llama(target, heads)
        super().__init__(target, config, _angles(config, target), [LlamaDecoderLayer(config, i) for i in range(heads)])
        self._stack: Stack | None = None  # runs the layers at once

    @property
    def weights(self) -> tuple[float, ...]:
        return (1 / len(self),) * len(self)  # together as much as the text: a small trunk has to serve that first

    @property
    def tap(self) -> int:
        return self.below - 1

    @property
    def slabs(self) -> int:
        return 1 if self._stack else len(self)

    def hasten(self) -> None:
        self._stack = stacked(self.layers, self.shared.rotary)

    def ahead(
        self, hidden: Tensor, ends: Tensor, heads: int, positions: Tensor, mask: Tensor | None, cache: Cache
    ) -> Tensor:
        """hidden [B, A, H] -> states [B, heads, H] of the first heads in column ends[b]; mask as for `step`.

        Keys and values are kept for all of them.
        """
        if self._stack:
            states = self._stack(hidden, ends, heads, self._at(hidden, positions), mask, cache)
        else:
            rows = torch.arange(len(hidden), device=hidden.device)
            every = [self._run(layer, hidden, positions, mask, cache)[rows, ends] for layer in self.layers]
            states = torch.stack(every[:heads], 1)
        normed: Tensor = self.shared.norm(states)
        return normed

    def forward(self, trunk: Tensor) -> list[Tensor]:
        """The trunk's output [B, A, H] on whole rows -> per head i the logits [B, A, V] of tokens a + 2 + i."""
        positions = torch.arange(trunk.shape[1], device=trunk.device)[None]
        return [self.logits(self.step(i, trunk, positions, positions)[0]) for i in range(len(self))]

    def step(
        self,
        index: int,
        hidden: Tensor,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, Tensor]:
        return self.shared.norm(self._run(self.layers[index], hidden, positions, mask, cache)), hidden


def _decoder(target: Target) -> Any:
    """What runs between embedding and lm_head; None when the target is no transformers model."""
    model = getattr(target, "model", None)
    return None if model is None else model.get_decoder()


def _family(target: Target, layers: int) -> tuple[Any, type[nn.Module], type[nn.Module], nn.Module]:
    """config, decoder layer, norm and rotary angles of the target's family; attention is full and experts are used."""
    decoder = _decoder(target)
    if decoder is None:
        config = _llama(target, layers)
        return config, LlamaDecoderLayer, LlamaRMSNorm, _angles(config, target)
    config = deepcopy(decoder.config)
    if not all(hasattr(decoder, part) for part in ("layers", "norm", "rotary_emb")):
        raise ValueError(f"a {config.model_type} model has no layers that can stand alone; choose a target like Llama")
    config.num_hidden_layers = layers
    told = {"layer_types": ["full_attention"] * layers, "mlp_layer_types": ["sparse"] * layers}
    for name, value in {**told, "first_k_dense_replace": 0, "mlp_only_layers": []}.items():
        if getattr(config, name, None):
            setattr(config, name, value)
    config._attn_implementation = "sdpa"  # takes any mask, and is causal without one
    return config, layer_class(decoder.layers[-1]), type(decoder.norm), decoder.rotary_emb


def _llama(target: Target, layers: int) -> LlamaConfig:
    """Llama layers of the target's sizes."""
    decoder = _decoder(target)
    if decoder is None:
        heads = max(1, target.hidden_size // 64)
        config = LlamaConfig(
            vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
            intermediate_size=4 * target.hidden_size,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=target.max_length,
        )
    else:
        config = deepcopy(decoder.config)
    if not isinstance(config, LlamaConfig):
        raise ValueError(f"parallel heads are layers of Llama; choose such a target, not {config.model_type}")
    config.num_hidden_layers = layers
    config._attn_implementation = "sdpa"
    return config


def _angles(config: LlamaConfig, target: Target) -> nn.Module:
    with target.device:  # also where layers are made on the meta device
        return LlamaRotaryEmbedding(config)
