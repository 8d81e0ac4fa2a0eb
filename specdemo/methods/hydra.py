"""Hydra: Medusa's heads made sequential; each one also reads the tokens drafted before it (Ankner et al. 2402.05109).

B rows, A columns, P paths, N nodes, V vocabulary, H hidden. Head i (from 0) reads x, which is h beside the embeddings
of the root and of i drafted tokens. Its state is R x + SiLU(A x + b), then come further residual blocks and an LM head
with a bias. Tokens depend on their path, so a tree is filled level by level, one head per level.

Hydra++ passes h through one decoder layer of the target's kind first, which has keys and values of its
own: of observed columns only, never of drafted ones.

Format: `hydra_lm_head.pt`, with `hydra_mlp.{i}.*` and `hydra_lm_head.{i}.*`; `save` writes the same tensors, but as
safetensors. In Hydra++ dropouts shift the numbers in the names. Blocks 1.. of a head are one and the same.
"""

import re
from copy import deepcopy
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaModel
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdemo.core.protocol import Forward, Progress, Target
from specdemo.core.sampling import Sampling
from specdemo.core.tree import chain_parents
from specdemo.methods.grow import Shape
from specdemo.methods.heads import as_target, at_last
from specdemo.methods.heads.medusa import ALIKE, Chosen, Heads, Medusa
from specdemo.methods.heads.formats.medusa import check_fit, count
from specdemo.models.cache import SPARE, SlabCache
from specdemo.models.checkpoints import Checkpoint, expect, open_checkpoint, write_checkpoint
from specdemo.models.history import AttentionMask, GatherHistory
from specdemo.models.load import LoadProgress, silent
from specdemo.models.masks import Masks

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


class HydraHeads(Heads):
    """Tensors are named as the authors name them, so where they drop out something must stand (`prefix` given)."""

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        heads: int,
        layers: int = 1,
        prefix: LlamaModel | None = None,
        hidden_state_offset: int = 0,
    ) -> None:
        super().__init__(hidden_size, vocab_size, heads, layers)
        self.hidden_state_offset = hidden_state_offset  # layers below the last one that h is taken from
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
        """x [..., (head + 2) H] -> logits [..., V] of one head"""
        logits: Tensor = self.hydra_lm_head[head](self.hydra_mlp[head](x))
        return logits


class Level(NamedTuple):
    """How the paths of one level of a tree go on; M of its N nodes have children."""

    places: Tensor  # [N] which of the paths a node is below
    ranks: Tensor  # [N]
    width: int
    kept: Tensor  # [M] which of the nodes go on


@lru_cache(maxsize=64)
def _levels(shape: Shape, device: torch.device) -> tuple[Level, ...]:
    levels, ends = [], [0]  # the slots that paths end in
    for depth in range(1, shape.depth + 1):
        nodes = [node for node, level in enumerate(shape.levels) if level == depth]
        kept = [i for i, node in enumerate(nodes) if node + 1 in shape.parents]
        ranks = [shape.ranks[node] for node in nodes]
        indices = [ends.index(shape.parents[node]) for node in nodes], ranks, kept
        places, ranked, going_on = (torch.tensor(i, dtype=torch.int64, device=device) for i in indices)
        levels.append(Level(places, ranked, 1 + max(ranks), going_on))
        ends = [nodes[i] + 1 for i in kept]
    return tuple(levels)


class Hydra(Medusa):
    title = "Hydra"
    summary = "Medusa's heads, one after the other: each reads the words that those before it have guessed."
    head: HydraHeads
    decay: ClassVar[float] = 1.0

    @staticmethod
    def load(source: str, target: Target, progress: LoadProgress | None = None) -> Heads:
        """Raises ValueError, one line, for other files, other kinds of Hydra heads and heads of another target."""
        return Hydra.read(open_checkpoint(source, progress or silent), target)

    @staticmethod
    def read(checkpoint: Checkpoint, target: Target) -> Heads:
        """What `load` makes of a checkpoint that is open."""
        source = checkpoint.name
        expect(checkpoint, "hydra")
        tensors = {n: t for n, t in checkpoint.tensors.items() if n.startswith(USED) and not n.endswith("inv_freq")}
        prefixed = any(name.startswith("prefix") for name in tensors)
        lm_head, first = ("hydra_lm_head.0.1", "hydra_mlp.0.1") if prefixed else ("hydra_lm_head.0", "hydra_mlp.0.0")
        if f"{lm_head}.weight" not in tensors or f"{first}.res_connection.weight" not in tensors:
            arch = checkpoint.config.get("hydra_head_arch", "unknown")
            raise ValueError(f"{source} holds {arch} heads; choose grounded heads of kind mlp or prefix-mlp (Hydra++)")
        vocab_size, hidden_size = tensors[f"{lm_head}.weight"].shape
        check_fit(checkpoint, target, hidden_size, vocab_size)
        layers = sum(bool(re.fullmatch(r"hydra_mlp\.0\.\d+\.linear\.weight", name)) for name in tensors)
        offset = int(checkpoint.config.get("hidden_state_offset", 0))
        with torch.device("meta"):
            prefix = _prefix(target, source) if prefixed else None
            heads = HydraHeads(hidden_size, vocab_size, count(tensors, r"hydra_mlp\.(\d+)\."), layers, prefix, offset)
        heads.rates = heads.rates_in(checkpoint, "hydra_rank_rates")
        heads.fill(tensors, checkpoint, target, ALIKE)
        if prefix is not None:  # behind `fill`, so that it stays in full precision
            prefix.rotary_emb = LlamaRotaryEmbedding(prefix.config).to(target.device)
        return heads

    def __init__(self, target: Target, model: Any, options: Medusa.Options | None = None) -> None:
        super().__init__(target, model, options)
        offset = self.head.hidden_state_offset
        self.taps = (target.num_layers - offset if offset else -1,)
        self._target = target
        self._cache: SlabCache | None = None
        self._masks = Masks((0,), self.head.dtype, target.device)
        self._root = torch.empty(0)  # [B]

    @classmethod
    def fresh(cls, target: Target, heads: int = 4, layers: int = 1) -> Heads:
        """Every head says at first what lm_head says: A and b are zero, R picks h, the LM head is lm_head."""
        made = HydraHeads(target.hidden_size, target.vocab_size, heads, layers)
        as_target(made, target)
        for parameter in made.parameters():
            parameter.zero_()
        for mlp, lm_head in zip(made.hydra_mlp, made.hydra_lm_head, strict=True):
            mlp.get_parameter("0.res_connection.weight")[:, : target.hidden_size].fill_diagonal_(1.0)
            lm_head.get_parameter("weight").copy_(target.lm_head.get_parameter("weight"))
        return made

    def start(self, batch: int, sampling: Sampling, rng: Generator) -> None:
        super().start(batch, sampling, rng)
        self._cache = None

    def release(self) -> None:
        self._cache = None

    def observe(self, progress: Progress) -> None:
        hidden = progress.hidden[self.taps[0]].to(self.head.dtype)
        prefix = self.head.prefix_embeding_layer
        if prefix is not None:
            hidden = self._read_on(prefix, hidden, progress)
        self._root, self._hidden = at_last(progress, progress.outputs), at_last(progress, hidden)

    def _read_on(self, prefix: LlamaModel, hidden: Tensor, progress: Progress) -> Tensor:
        """hidden [B, A, H] -> what the prefix layer makes of it behind the columns it has read"""
        rows, columns = progress.inputs.shape
        first = self._cache is None
        if self._cache is None:
            self._cache = SlabCache(1, rows, columns + SPARE, hidden.device)
        run = partial(_pass, prefix, hidden)
        history = GatherHistory(run, self._cache, {"all": 0}, self._masks, self._target.max_length)
        if first:
            return history.start(progress.inputs, ()).logits
        forward = history.forward(progress.inputs, chain_parents(rows, columns - 1, hidden.device), ())
        history.commit([list(range(length)) for length in progress.lengths])
        return forward.logits

    def _fill(self, shape: Shape) -> Chosen:
        paths = torch.cat([self._hidden, self._embed(self._root)], -1)[:, None]
        chosen: list[Chosen] = []
        for head, level in enumerate(_levels(shape, paths.device)):
            chosen.append(self._choose(self.head(paths, head), level.places, level.ranks, level.width))
            tokens = chosen[-1][0][:, level.kept]
            paths = torch.cat([paths[:, level.places[level.kept]], self._embed(tokens)], -1)
        drafted, confidence, probs = zip(*chosen, strict=True)
        return torch.cat(drafted, 1), torch.cat(confidence, 1), None if not self.choice.drawn else torch.cat(probs, 1)

    def _embed(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self._target.embed(tokens)
        return embedded.to(self.head.dtype)

    def _states(self, hidden: Tensor) -> Tensor:
        prefix = self.head.prefix_embeding_layer
        return hidden if prefix is None else prefix(inputs_embeds=hidden, use_cache=False).last_hidden_state

    def _ahead(self, states: Tensor, outputs: Tensor, head: int) -> Tensor:
        columns = outputs.shape[1] - 1 - head
        read = [self._embed(outputs[:, i : i + columns]) for i in range(head + 1)]
        logits: Tensor = self.head(torch.cat([states[:, :columns], *read], -1), head)
        return logits

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
        # clones: a block that stands in several places of a head is written once for each, as the authors do
        write_checkpoint(folder, config, {name: tensor.clone() for name, tensor in heads.state_dict().items()})


def _prefix(target: Target, source: str) -> LlamaModel:
    """One decoder layer like the target's, without what no checkpoint needs to hold."""
    config = deepcopy(getattr(getattr(target, "model", None), "config", None))
    if not isinstance(config, LlamaConfig):
        raise ValueError(f"{source} is Hydra++, whose first layer is a Llama's; choose a Llama as the target")
    config.num_hidden_layers, config.vocab_size, config.pad_token_id = 1, 1, None
    prefix = LlamaModel(config)
    del prefix.embed_tokens, prefix.rotary_emb
    return prefix


def _pass(
    prefix: LlamaModel,
    hidden: Tensor,
    tokens: Tensor,
    cache: Cache,
    positions: Tensor | None = None,
    mask: AttentionMask = None,
    taps: tuple[int, ...] = (),
    last: bool = False,
) -> Forward:
    """A `history.Pass` that reads hidden states [B, S, H] in place of the tokens; the states come as `logits`."""
    output = prefix(
        inputs_embeds=hidden, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True
    )
    return Forward(output.last_hidden_state)
