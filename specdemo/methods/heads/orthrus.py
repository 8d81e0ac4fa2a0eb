"""Orthrus: a second view of the target, with attention projections of its own, drafts a block in one pass (github.com/
chiennv2000/orthrus, src/model.py).

B rows, S slots of the block, V vocabulary. The block is the root and mask tokens. Its slots see the target's committed
keys and values and each other, in both directions. Norms, MLPs, embeddings and output head are the target's. Slot i
predicts the token after it. The block always has its trained size, because a shorter one gives other drafts.

A published checkpoint is a complete target whose layers also have tensors with `_diff`; only these are read.
"""

import re
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from specdemo.core.protocol import Budget, SharedKV, Target
from specdemo.costs.shapes import Config
from specdemo.methods import require_method
from specdemo.methods.heads.formats import LAYER_KEYS, check_target, count_numbered, rename_tensors
from specdemo.methods.heads.network import Network, untrained
from specdemo.methods.heads.trunk import LayerHead
from specdemo.models.checkpoints import Checkpoint, open_checkpoint, write_checkpoint
from specdemo.models.layers import Attention, llama_config_like, signed_sin
from specdemo.models.sources import LoadProgress

DIFFUSION = "_diff."  # in the names of the tensors of the second view
BOTH_WAYS = 0, False  # kind of attention: no window, not causal
BLOCK, EPSILON = 32, 1e-6
NAMES = {r"^model\.layers\.(\d+)\.self_attn\.(\w+)_diff\.": r"layers.\1.\2."}


class DiffusionView(Network):
    """Attention of the second view, one per layer."""

    def __init__(self, target: Target, config: Config, names: Container[str]) -> None:
        """config: of the checkpoint. names: of the tensors of a layer."""
        super().__init__()
        self.block_size = int(config.get("block_size", BLOCK))
        self.mask_token_id = int(config["mask_token_id"])
        sizes = llama_config_like(target)
        self.epsilon = sizes.rms_norm_eps = float(config.get("rms_norm_eps", EPSILON))
        self.layers = nn.ModuleList(Attention(sizes, i, names, kind=BOTH_WAYS) for i in range(target.num_layers))

    def fuse(self) -> Self:
        layer: Any
        for layer in self.layers:
            layer.fuse()
        return super().fuse()


class Orthrus(LayerHead[DiffusionView], method="orthrus"):
    summary = "Attention of its own in every layer of the target drafts a block with the target's KV cache."
    config_keys = LAYER_KEYS | {"block_size", "mask_token_id"}

    @classmethod
    def recognises(cls, checkpoint: Checkpoint) -> bool:
        return checkpoint.config_has("architectures", "OrthrusLM") or checkpoint.has(DIFFUSION)

    @classmethod
    def open(cls, source: str, target: Target, progress: LoadProgress) -> Checkpoint:
        return open_checkpoint(source, progress, lambda name: DIFFUSION in name)

    @classmethod
    def read(cls, checkpoint: Checkpoint, target: Target) -> DiffusionView:
        require_method(checkpoint, "orthrus")
        config, mask = checkpoint.config, checkpoint.config.get("mask_token_id")
        tensors = rename_tensors({n: t for n, t in checkpoint.tensors.items() if DIFFUSION in n}, NAMES)
        check_target(checkpoint, hidden_size=(config.get("hidden_size", target.hidden_size), target.hidden_size))
        check_target(checkpoint, layers=(count_numbered(tensors, r"layers\.(\d+)\."), target.num_layers))
        if not isinstance(mask, int) or not 0 <= mask < target.vocab_size:
            raise ValueError(f"{checkpoint.name} has no mask_token_id of its target in config.json; fetch it again")
        if not isinstance(size := config.get("block_size", BLOCK), int) or size < 2:
            raise ValueError(f"{checkpoint.name} has block_size {size!r} in its config, not a number above 1")
        names = {re.sub(r"^layers\.0\.", "self_attn.", name) for name in tensors}
        with torch.device("meta"):
            head = DiffusionView(target, config, names)
        return head.load_tensors(tensors, checkpoint, target, "choose the checkpoint of this target")

    @classmethod
    def fresh(cls, target: Target, block_size: int = 8) -> DiffusionView:
        """Return an untrained view, whose mask token is the last of the vocabulary."""
        normed = ("self_attn.q_norm.weight",) if target.layer_config.get("model_type") == "qwen3" else ()
        head = DiffusionView(target, {"block_size": block_size, "mask_token_id": target.vocab_size - 1}, normed)
        return untrained(head, target, target.hidden_size**-0.5)

    def longest(self, budget: Budget) -> int:
        return min(super().longest(budget), self.head.block_size - 1)

    def states(self, kv: SharedKV, depth: int, roots: Tensor) -> Tensor:
        head = self.head
        masks = roots.new_full((len(roots), head.block_size - 1), head.mask_token_id)
        block = self._trunk.block(torch.cat([roots, masks], 1), kv, causal=False)
        x, (cos, sin) = block.states, block.rope
        rope = cos[:, :, None], signed_sin(sin)[:, :, None]
        layers: Sequence[Any] = self._trunk.layers or [None] * len(head.layers)
        for attention, layer in zip(head.layers, layers, strict=True):
            if layer is None:
                x = x + attention(x, rope, block.mask, block.cache)
                continue
            x = x + attention(layer.input_layernorm(x), rope, block.mask, block.cache)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return x[:, :depth]

    def save(self, folder: Path, target_name: str) -> None:
        head = self.head
        names = {r"^layers\.(\d+)\.(\w+)\.": r"model.layers.\1.self_attn.\2_diff."}
        config = {"architectures": ["OrthrusLM"], "block_size": head.block_size, "mask_token_id": head.mask_token_id}
        config |= {"rms_norm_eps": head.epsilon, "base_model_name_or_path": target_name}
        write_checkpoint(folder, config, rename_tensors(head.state_dict(), names))
