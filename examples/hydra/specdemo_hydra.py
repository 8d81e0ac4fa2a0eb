"""Hydra: sequential Medusa heads; each head also reads the draft tokens before it (Ankner et al. 2402.05109).

B rows, A columns, P paths, N nodes, V vocabulary, H hidden. Head i (from 0) reads x = [h, embeddings of the root and of
i draft tokens]. Its state is R x + SiLU(A x + b), followed by further residual blocks and an LM head with a bias.
Tokens depend on their path, so a tree is filled level by level, one head per level.

Hydra++ first runs h through a decoder layer like the target's, with a KV cache of the observed columns only.

The authors' file is `hydra_lm_head.pt`, with `hydra_mlp.{i}.*` and `hydra_lm_head.{i}.*`. `save` writes the same
tensors as safetensors. In Hydra++ dropout modules shift the numbers in the names. Blocks 1.. of a head share weights.
"""

import re
from collections.abc import Container, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig

from specdemo.core.protocol import Budget, Progress, Target
from specdemo.core.sampling import Sampling
from specdemo.core.tree import Draft
from specdemo.costs.drafting import HEAD_OPERATIONS, Drafting, Sizes
from specdemo.costs.shapes import Config, Shape, number
from specdemo.kv.view import View
from specdemo.methods import require_method
from specdemo.methods.heads.formats import check_target, count_numbered
from specdemo.methods.heads.head import Recipe
from specdemo.methods.heads.medusa import SAME_SHAPE_HINT, DraftedNodes, LevelNodes, Medusa, MedusaOptions, TokenHeads
from specdemo.methods.heads.network import move_to_target
from specdemo.methods.heads.runtime import HeadRuntime, last_columns, training_columns
from specdemo.methods.heads.sampler import TokenSampler, TreeShape
from specdemo.models.checkpoints import Checkpoint, write_checkpoint
from specdemo.models.layers import DecoderLayer, Rotary
from specdemo.models.packed import RMSNorm

USED = ("hydra_mlp.", "hydra_lm_head.", "prefix_embeding_layer.layers.", "prefix_embeding_layer.norm.")


class ResBlock(nn.Module):
    """x [..., width H] -> [..., H]"""

    def __init__(self, hidden_size: int, width: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(width * hidden_size, hidden_size)
        self.res_connection = nn.Identity() if width == 1 else nn.Linear(width * hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        state: Tensor = self.res_connection(x) + F.silu(self.linear(x))
        return state


class Prefix(nn.Module):
    """Hydra++: a decoder layer like the target's."""

    def __init__(self, config: LlamaConfig, names: Container[str]) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList([DecoderLayer(config, 0, names)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: Tensor, columns: View) -> Tensor:
        """hidden [B, S, H] -> [B, S, H]"""
        states: Tensor = self.norm(self.layers[0](hidden, columns))
        return states


class HydraHeads(TokenHeads):
    """Network of a Hydra head. Tensor names are the authors', so with a prefix identities replace their dropouts."""

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        heads: int,
        layers: int = 1,
        prefix: Prefix | None = None,
        hidden_state_offset: int = 0,
    ) -> None:
        super().__init__(hidden_size, vocab_size, heads, layers)
        self.hidden_state_offset = hidden_state_offset  # h is taken this many layers below the last
        self.prefix_embeding_layer = prefix
        dropout = [] if prefix is None else [nn.Identity()]
        self.hydra_mlp = nn.ModuleList()
        self.hydra_lm_head = nn.ModuleList()
        for i in range(heads):
            more = [*dropout, ResBlock(hidden_size)] * (layers - 1)
            self.hydra_mlp.append(nn.Sequential(*dropout, ResBlock(hidden_size, i + 2), *more))
            lm_head = nn.Linear(hidden_size, vocab_size)
            self.hydra_lm_head.append(nn.Sequential(*dropout, lm_head) if dropout else lm_head)

    def forward(self, x: Tensor, head: int) -> Tensor:
        """Run one head: x [..., (head + 2) H] -> logits [..., V]."""
        logits: Tensor = self.hydra_lm_head[head](self.hydra_mlp[head](x))
        return logits


class Level(NamedTuple):
    """Index tensors of one tree level. M of its N nodes have children."""

    nodes: LevelNodes  # positions: of the parent path
    continuing: Tensor  # [M] nodes with children


@lru_cache(maxsize=64)
def _levels(shape: TreeShape, device: torch.device) -> tuple[Level, ...]:
    levels, path_slots = [], [0]
    for depth in range(1, shape.depth + 1):
        nodes = [node for node, level in enumerate(shape.levels) if level == depth]
        continuing = [i for i, node in enumerate(nodes) if node + 1 in shape.parents]
        ranks = [shape.ranks[node] for node in nodes]
        is_last = [shape.last_children[node] for node in nodes]
        indices = [path_slots.index(shape.parents[node]) for node in nodes], ranks, continuing, is_last
        position_tensor, rank_tensor, continuing_tensor, is_last_tensor = (
            torch.tensor(i, dtype=torch.int64, device=device) for i in indices
        )
        nodes_of_level = LevelNodes(position_tensor, rank_tensor, is_last_tensor.bool(), 1 + max(ranks))
        levels.append(Level(nodes_of_level, continuing_tensor))
        path_slots = [nodes[i] + 1 for i in continuing]
    return tuple(levels)


class Hydra(Medusa):
    title = "Hydra"
    summary = "Medusa heads in sequence: each head also reads the tokens drafted by the heads before it."
    head: HydraHeads
    recipes: ClassVar = {"hydra": Recipe("Hydra, 4 heads", {"heads": 4})}
    decay: ClassVar[float] = 1.0
    config_marks: ClassVar = ("hydra",)

    @classmethod
    def drafting_cost(cls, target: Shape, config: Config, options: Sizes) -> Drafting | None:
        """Return the cost of heads that read h and, on average, (heads + 1) / 2 embeddings."""
        heads = number(config, "hydra_num_heads", default=4, low=1)
        layers = number(config, "hydra_num_layers", default=1, low=1)
        dense = int((heads + 3 + layers - 1) * target.hidden**2)
        one = Shape("head", 1, target.hidden, target.vocabulary, dense, target.head, operations=HEAD_OPERATIONS)
        return Drafting(one, one, own=replace(one, dense=heads * dense, head=heads * target.head), longest=heads)

    @classmethod
    def recognises(cls, checkpoint: Checkpoint) -> bool:
        return "hydra_lm_head.pt" in checkpoint.files or "hydra_num_heads" in checkpoint.config

    @classmethod
    def read(cls, checkpoint: Checkpoint, target: Target) -> TokenHeads:
        """Read grounded heads of kind mlp or prefix-mlp. Raises ValueError for other kinds."""
        require_method(checkpoint, "hydra")
        tensors = {n: t for n, t in checkpoint.tensors.items() if n.startswith(USED) and not n.endswith("inv_freq")}
        prefixed = any(name.startswith("prefix") for name in tensors)
        lm_head, first_block = (
            ("hydra_lm_head.0.1", "hydra_mlp.0.1") if prefixed else ("hydra_lm_head.0", "hydra_mlp.0.0")
        )
        if f"{lm_head}.weight" not in tensors or f"{first_block}.res_connection.weight" not in tensors:
            arch = checkpoint.config.get("hydra_head_arch", "unknown")
            raise ValueError(
                f"{checkpoint.name} has {arch} heads; choose grounded heads of kind mlp or prefix-mlp (Hydra++)"
            )
        vocab_size, size = tensors[f"{lm_head}.weight"].shape
        check_target(checkpoint, hidden_size=(size, target.hidden_size), vocabulary=(vocab_size, target.vocab_size))
        layers = sum(bool(re.fullmatch(r"hydra_mlp\.0\.\d+\.linear\.weight", name)) for name in tensors)
        heads, offset = (
            count_numbered(tensors, r"hydra_mlp\.(\d+)\."),
            int(checkpoint.config.get("hidden_state_offset", 0)),
        )
        with torch.device("meta"):
            prefix = _prefix(target, checkpoint) if prefixed else None
            network = HydraHeads(size, vocab_size, heads, layers, prefix, offset)
        network.rates = network.rates_from_config(checkpoint, "hydra_rank_rates")
        return network.load_tensors(tensors, checkpoint, target, SAME_SHAPE_HINT)

    def __init__(self, target: Target, model: TokenHeads | str, options: MedusaOptions | None = None) -> None:
        super().__init__(target, model, options)
        offset, prefix = self.head.hidden_state_offset, self.head.prefix_embeding_layer
        self.taps = (target.num_layers - offset if offset else -1,)
        self._target = target
        self._prefix_runtime = None  # reads observed columns only
        if prefix is not None:
            self._angles = Rotary.of_config(prefix.config, target.device)
            self._prefix_runtime = HeadRuntime(target, self.head.dtype, 1, self._angles, limit=target.max_length)

    @classmethod
    def fresh(cls, target: Target, heads: int = 4, layers: int = 1) -> TokenHeads:
        """Return untrained heads that all output lm_head(h): A and b are zero, R selects h."""
        network = HydraHeads(target.hidden_size, target.vocab_size, heads, layers)
        move_to_target(network, target)
        for parameter in network.parameters():
            parameter.zero_()
        for mlp, lm_head in zip(network.hydra_mlp, network.hydra_lm_head, strict=True):
            mlp.get_parameter("0.res_connection.weight")[:, : target.hidden_size].fill_diagonal_(1.0)
            lm_head.get_parameter("weight").copy_(target.lm_head.get_parameter("weight"))
        return network

    def observe(self, progress: Progress) -> None:
        super().observe(progress)
        self._inputs += (last_columns(progress, progress.outputs),)
        if self._prefix_runtime is not None:
            self._prefix_runtime.observe(progress.lengths, self.target_features(progress))

    def propose(self, budget: Budget) -> Draft:
        prefix = self.head.prefix_embeding_layer
        if self._prefix_runtime is not None and prefix is not None:
            pending = self._prefix_runtime.read_pending(0, self.sampler)
            if pending.columns is not None:
                hidden = pending.columns.last(pending.columns.run(prefix, *pending.inputs))[:, 0]
                self._inputs = hidden, self._inputs[1]
        return super().propose(budget)

    def start(self, batch: int, sampling: Sampling, rng: Generator) -> None:
        super().start(batch, sampling, rng)
        if self._prefix_runtime is not None:
            self._prefix_runtime.start(batch)

    def release(self) -> None:
        super().release()
        if self._prefix_runtime is not None:
            self._prefix_runtime.start(0)

    def release_graphs(self) -> None:
        super().release_graphs()
        if self._prefix_runtime is not None:
            self._prefix_runtime.release_graphs()

    @property
    def history_bytes(self) -> int:
        return 0 if self._prefix_runtime is None else self._prefix_runtime.bytes

    def _fill_shape(self, sampler: TokenSampler, shape: TreeShape, hidden: Tensor, *more: Tensor) -> DraftedNodes:
        (root,) = more
        paths = torch.cat([hidden, self._embed(root)], -1)[:, None]
        drafted_levels: list[DraftedNodes] = []
        for head, level in enumerate(_levels(shape, paths.device)):
            distribution = sampler.draft_distribution(self.head(paths, head), head, levels=1)
            drafted_levels.append(self._select_tokens(sampler, distribution, level.nodes))
            tokens = drafted_levels[-1][0][:, level.continuing]
            paths = torch.cat([paths[:, level.nodes.positions[level.continuing]], self._embed(tokens)], -1)
        drafted, confidence, probs = zip(*drafted_levels, strict=True)
        return torch.cat(drafted, 1), torch.cat(confidence, 1), torch.cat(probs, 1) if sampler.independent else None

    def _embed(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self._target.embed(tokens)
        return embedded.to(self.head.dtype)

    def _training_logits(self, batch: Progress) -> Iterator[Tensor]:
        states, prefix = self.target_features(batch), self.head.prefix_embeding_layer
        width = states.shape[1]
        if prefix is not None:
            positions = torch.arange(width, device=states.device)[None]
            states = prefix(states, training_columns(positions, self._angles, width))
        for head in range(min(len(self.head), width - 1)):
            columns = width - 1 - head
            read = [self._embed(batch.outputs[:, i : i + columns]) for i in range(head + 1)]
            yield self.head(torch.cat([states[:, :columns], *read], -1), head)

    def save(self, folder: Path, target_name: str) -> None:
        heads = self.head
        config = {
            "hydra_num_heads": len(heads),
            "hydra_num_layers": heads.layers,
            "hydra_head_arch": "mlp" if heads.prefix_embeding_layer is None else "prefix-mlp",
            "grounded_heads": True,
            "hidden_state_offset": heads.hidden_state_offset,
            "base_model_name_or_path": target_name,
            "hydra_rank_rates": heads.rates,
        }
        write_checkpoint(folder, config, heads.state_dict())  # shared blocks once per name, as the authors do


def _prefix(target: Target, checkpoint: Checkpoint) -> Prefix:
    """Return a decoder layer like the target's."""
    config = target.model.get_decoder().config if target.model is not None else None
    if not isinstance(config, LlamaConfig):
        raise ValueError(f"{checkpoint.name} is Hydra++, which has a Llama layer; choose a Llama model as the target")
    return Prefix(config, checkpoint.take("prefix_embeding_layer.layers.0."))
