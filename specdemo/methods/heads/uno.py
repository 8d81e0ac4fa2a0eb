"""UNO: the target drafts a block itself, in one pass with a LoRA adapter on its weights (github.com/ifm-ai/uno;
SGLang's `--uno-lora-path`).

B rows, S rows of the block, V vocabulary. The block is the root and S - 1 tokens of noise. The adapter changes the
noise rows only, so the root's row gives the target's own next token, and row i the token i places further. A row sees
the committed tokens and the earlier rows; verification uses the weights without the adapter.

Noise is uniform from 1 to the tokenizer's length, which is the mask token of the published adapters, and depends on the
position only, so that drafts repeat. Files are PEFT's: adapter_config.json and adapter_model.safetensors.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Generator, Tensor, nn

from specdemo.core.atomic_io import json_text, write_text
from specdemo.core.protocol import SharedKV, Target
from specdemo.kv.cache import cache_argument
from specdemo.methods import require_method
from specdemo.methods.base import DraftOptions
from specdemo.methods.heads.formats import check_target, count_numbered, rename_tensors
from specdemo.methods.heads.network import Network, move_to_target
from specdemo.methods.heads.trunk import LayerHead
from specdemo.models.checkpoints import Checkpoint
from specdemo.models.layers import llama_config_like

NOISE = 4096  # tokens of noise, which then repeat
PREFIX = "base_model.model.model."
PROJECTIONS = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}
FUSED = {"qkv": ("q_proj", "k_proj", "v_proj"), "gate_up": ("gate_proj", "up_proj")}
ELSEWHERE = (
    "use_dora",
    "use_rslora",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "layer_replication",
)
HINT = "choose an adapter of all attention and MLP projections of this target"


class Update(nn.Module):
    """Low-rank update of a matrix, scale B A."""

    def __init__(self, inputs: int, outputs: int, rank: int, scale: float) -> None:
        super().__init__()
        self.lora_A, self.lora_B = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, inputs] -> [B, S, outputs]"""
        out: Tensor = self.lora_B(self.lora_A(x)) * self.scale
        return out


class Adapter(Network):
    """Updates of all projections of a target's layers."""

    def __init__(self, target: Target, rank: int, alpha: float) -> None:
        super().__init__()
        self.rank, self.alpha = rank, alpha
        sizes: Any = llama_config_like(target)
        hidden, inner = sizes.hidden_size, sizes.intermediate_size
        queries, keys = (count * sizes.head_dim for count in (sizes.num_attention_heads, sizes.num_key_value_heads))
        shapes = {"q_proj": (hidden, queries), "k_proj": (hidden, keys), "v_proj": (hidden, keys)}
        shapes |= {"o_proj": (queries, hidden), "gate_proj": (hidden, inner), "up_proj": (hidden, inner)}
        shapes |= {"down_proj": (inner, hidden)}
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    part: nn.ModuleDict({name: Update(*shapes[name], rank, alpha / rank) for name in names})
                    for part, names in PROJECTIONS.items()
                }
            )
            for _ in range(target.num_layers)
        )


class Uno(LayerHead[Adapter], method="uno"):
    summary = "The target drafts a block itself, with a LoRA adapter on all of its weights, in one pass."

    @classmethod
    def recognises(cls, checkpoint: Checkpoint) -> bool:
        return checkpoint.config.get("peft_type") == "LORA"

    @classmethod
    def read(cls, checkpoint: Checkpoint, target: Target) -> Adapter:
        require_method(checkpoint, "uno")
        config = checkpoint.config
        unknown = next((key for key in ELSEWHERE if config.get(key)), None)
        if unknown or config.get("bias", "none") != "none":
            raise ValueError(f"{checkpoint.name} has {unknown or 'bias'}, which is not supported; {HINT}")
        for key in ("r", "lora_alpha"):
            if not isinstance(number := config.get(key), int | float) or number <= 0:
                raise ValueError(f"{checkpoint.name} has {key} {number!r} in its config, not a number above 0; {HINT}")
        tensors = rename_tensors(checkpoint.tensors, {rf"^{PREFIX}": ""})
        check_target(checkpoint, layers=(count_numbered(tensors, r"layers\.(\d+)\."), target.num_layers))
        with torch.device("meta"):
            head = Adapter(target, int(config["r"]), float(config["lora_alpha"]))
        return head.load_tensors(tensors, checkpoint, target, HINT)

    def __init__(self, target: Target, model: Adapter | str, options: DraftOptions | None = None) -> None:
        super().__init__(target, model, options)
        bound = min(len(target.tokenizer) if target.tokenizer is not None else target.vocab_size, target.vocab_size)
        self._noise = torch.randint(1, bound, (NOISE,), generator=Generator().manual_seed(0)).to(target.device)

    @classmethod
    def fresh(cls, target: Target, rank: int = 4) -> Adapter:
        """Return an untrained adapter, with which the target drafts as without one."""
        head = Adapter(target, rank, float(rank))
        for name, parameter in head.named_parameters():
            nn.init.normal_(parameter, std=target.hidden_size**-0.5 if "lora_A" in name else 0.0)
        return move_to_target(head, target)

    def states(self, kv: SharedKV, depth: int, roots: Tensor) -> Tensor:
        others = self._noise[(kv.positions + torch.arange(1, depth, device=roots.device)) % NOISE]
        block = self._trunk.block(torch.cat([roots, others], 1), kv, causal=True)
        x = block.states
        with ExitStack() as hooks:
            for layer, updates in zip(self._trunk.layers, self.head.layers, strict=False):
                for module, named in _updated(layer, updates):
                    hooks.enter_context(module.register_forward_hook(_hook(named)))
            for layer in self._trunk.layers:
                cache = {cache_argument(layer.forward): block.cache}
                out = layer(x, attention_mask=block.mask, position_embeddings=block.rope, **cache)
                x = out if isinstance(out, Tensor) else out[0]
        return x

    def save(self, folder: Path, target_name: str) -> None:
        head = self.head
        config: dict[str, object] = {"peft_type": "LORA", "base_model_name_or_path": target_name, "bias": "none"}
        names = [name for names in PROJECTIONS.values() for name in names]
        config |= {"task_type": "CAUSAL_LM", "r": head.rank, "lora_alpha": head.alpha, "target_modules": names}
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"{PREFIX}{name}": tensor.contiguous() for name, tensor in head.state_dict().items()}
        save_file(tensors, folder / "adapter_model.safetensors")
        write_text(folder / "adapter_config.json", json_text(config, indent=2) + "\n")


def _updated(layer: Any, updates: Any) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """Yield every matrix of a layer with its updates: several if the matrix is fused."""
    for part, names in PROJECTIONS.items():
        owner = getattr(layer, part)
        matrices = {name: (name,) for name in names} | FUSED
        for matrix, parts in matrices.items():
            if getattr(owner, matrix, None) is not None:
                yield getattr(owner, matrix), [updates[part][name] for name in parts]


def _hook(updates: Sequence[nn.Module]) -> Any:
    def add(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Add the updates to all rows but the root's."""
        changed = torch.cat([update(inputs[0][:, 1:]) for update in updates], -1)
        return torch.cat([output[:, :1], output[:, 1:] + changed], 1)

    return add
