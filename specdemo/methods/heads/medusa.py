"""Medusa: extra heads on the target's last hidden state guess the tokens after the next one (Cai et al. 2401.10774).

B rows, A columns, N nodes, L heads, P places, R ranks, V vocabulary, H hidden. Head i (from 0) is
W_i (h + SiLU(A_i h + b_i)), section 2.1.1: where h is tap -1 of column a, lm_head says token a + 1 and head i token
a + 2 + i. All heads speak at once, so a node's token depends on its level and rank and not on its parent.

Files that are read: Medusa-1, `{i}.{l}.linear.*` and `{i}.{L}.weight`; Medusa-2, the same under `medusa_head.` in a
whole model; vLLM's, `blocks.{i}.layers.{l}.*` and `lm_heads.{i}.weight`. The last is written, the only one in
safetensors that an engine of today reads as it is. Heads and layers are counted from the tensors: published configs say
two heads where the file holds five.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count
from pathlib import Path
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from specdemo.core.protocol import Budget, Progress, Target
from specdemo.core.sampling import Sampling
from specdemo.core.tree import Draft
from specdemo.methods import expect, knob
from specdemo.methods.base import Head, Recipe
from specdemo.methods.flags import vllm
from specdemo.methods.grow import Shape, chain, fitted, within
from specdemo.methods.heads.choose import Choice, Vocabulary
from specdemo.methods.heads.formats import check_target, numbered, renamed
from specdemo.methods.heads.network import Network, as_target
from specdemo.methods.heads.runtime import at_last
from specdemo.models.checkpoints import Checkpoint, write_checkpoint
from specdemo.training.losses import compare, likeliest, steps_loss

RANKS = 10
MAX_HEADS = 16
ALIKE = "its heads must all be built alike"

VLLM_NAMES = {
    r"^medusa_heads\.": "",
    r"^(\d+)\.(\d+)\.linear\.": r"blocks.\1.layers.\2.",
    r"^(\d+)\.\d+\.weight$": r"lm_heads.\1.weight",
}

Chosen = tuple[Tensor, Tensor, Tensor | None]  # tokens [B, N], confidence [B, N], probs [B, N, V]
Rates = tuple[tuple[float, ...], ...]  # per head, per rank: how often it is what the target says

# Where nobody has measured: with 63 nodes a tree much like `mc_sim_7b_63`.
USUAL_RATES: Rates = tuple(tuple(0.5 * 0.8**i / (rank + 1) ** 2 for rank in range(RANKS)) for i in range(MAX_HEADS))

# The authors' trees, 63 nodes each. Per level, the number of children of every node of the level above, in order;
# zeros at the end are left out.
PUBLISHED = {
    "mc_sim_7b_63": "10 / 10 7 3 2 1 1 1 1 1 1 / 10 3 2 1 1 1 1 1 0 0 2 0 0 0 0 0 0 1 / 2",
    "vicuna_7b_stage1": "10 / 10 7 4 3 2 2 1 1 1 1 / 9 3 2 1 1 1 0 0 0 0 2 0 0 0 0 0 0 1 / 1",
    "vicuna_7b_stage2": "10 / 10 5 2 2 1 1 1 1 / 9 4 2 1 1 1 0 0 0 0 3 1 0 0 0 1 / 4 1 1 0 0 0 0 0 0 1",
    "vicuna_13b_stage1": "10 / 10 7 4 2 2 1 1 1 1 / 10 4 2 1 1 1 0 0 0 0 2 1 0 0 0 0 0 1 / 1",
    "vicuna_13b_stage2": "10 / 10 4 2 1 1 1 / 10 4 2 1 1 1 0 0 0 0 3 1 0 0 1 0 1 / 4 2 1 0 0 0 0 0 0 0 1"
    " 0 0 0 0 0 0 0 0 1",
    "vicuna_33b_stage1": "10 / 10 8 5 3 2 2 1 1 1 1 / 9 3 2 1 1 0 0 0 0 0 2 0 0 0 0 0 0 0 1",
    "vicuna_33b_stage2": "10 / 10 5 3 2 1 1 1 1 / 10 4 2 1 1 1 0 0 0 0 3 1 0 0 0 1 / 3 1 0 0 0 0 0 0 0 0 1",
    "zephyr_stage2": "10 / 10 6 4 2 2 1 1 1 / 10 4 2 1 1 1 0 0 0 0 2 1 0 0 0 0 1 / 2 1",
}


@lru_cache(maxsize=len(PUBLISHED))
def published(name: str) -> Shape:
    """A tree of PUBLISHED."""
    level: list[tuple[int, ...]] = [()]
    paths: list[tuple[int, ...]] = []
    for counts in PUBLISHED[name].split("/"):
        level = [(*path, r) for path, count in zip(level, map(int, counts.split()), strict=False) for r in range(count)]
        paths += level
    return Shape.of(paths)


_fitted = lru_cache(maxsize=64)(fitted)


@lru_cache(maxsize=64)
def _indices(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """parents, places among the levels, ranks, and which are the last children, each [N]."""
    parents, levels, ranks, lasts = torch.tensor((shape.parents, shape.levels, shape.ranks, shape.lasts), device=device)
    return parents, levels - 1, ranks, lasts.bool()


class Heads(Network):
    """What the heads of one target have in common."""

    def __init__(self, hidden_size: int, vocab_size: int, heads: int, layers: int) -> None:
        super().__init__()
        self.hidden_size, self.vocab_size, self.heads, self.layers = hidden_size, vocab_size, heads, layers
        self.rates: Rates | None = None

    def __len__(self) -> int:
        return self.heads

    @staticmethod
    def rates_in(checkpoint: Checkpoint, key: str) -> Rates | None:
        """The rates measured in training, by head and rank; None where the config has none under `key`."""
        rates = checkpoint.config.get(key)
        return rates and tuple(map(tuple, rates))


class ResBlocks(nn.Module):
    def __init__(self, hidden_size: int, layers: int, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden_size, hidden_size, bias=bias) for _ in range(layers))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + F.silu(layer(hidden))
        return hidden


class MedusaHeads(Heads):
    """Tensors are named as in vLLM. With a token map [T] the heads know T tokens of the vocabulary only."""

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        heads: int,
        layers: int = 1,
        bias: bool = True,
        token_map: Tensor | None = None,
    ) -> None:
        super().__init__(hidden_size, vocab_size, heads, layers)
        self.bias = bias
        self.rows = vocab_size if token_map is None else len(token_map)
        self.blocks = nn.ModuleList(ResBlocks(hidden_size, layers, bias) for _ in range(heads))
        self.lm_heads = nn.ModuleList(nn.Linear(hidden_size, self.rows, bias=False) for _ in range(heads))
        self.register_buffer("token_map", token_map)

    def forward(self, hidden: Tensor, head: int) -> Tensor:
        """hidden [..., H] -> logits [..., V] of one head"""
        logits: Tensor = self.lm_heads[head](self.blocks[head](hidden))
        if not isinstance(self.token_map, Tensor):
            return logits
        return Vocabulary(self.token_map, self.vocab_size).spread(logits)


class Medusa(Head[Heads]):
    title = "Medusa"
    summary = "Extra heads on the target itself guess several words ahead at once; there is no second model to run."
    taps: tuple[int, ...] = (-1,)
    recipes: ClassVar = {"medusa": Recipe("Medusa, 4 heads", {"heads": 4})}
    serves: ClassVar = {"vllm": vllm("medusa")}
    decay: ClassVar[float] = 0.8  # a head's weight in the loss, relative to the one before it

    @dataclass(frozen=True, slots=True)
    class Options:
        nodes: int = knob(0, "nodes of the draft tree; 0 drafts a chain", low=0, high=128, step=1)
        tree: str = knob(
            "fitted",
            "its shape: fitted to how often each rank of each head is right, or one that the authors published",
            choices=("fitted", *PUBLISHED),
        )
        draft: str = knob(
            "ranked",
            "at a temperature: take the heads' likeliest tokens or draw from them, in a tree the last child of a node "
            "alone; the output is exact either way",
            choices=("ranked", "sampled"),
        )

    @classmethod
    def recognises(cls, checkpoint: Checkpoint) -> bool:
        files = any(file.startswith("medusa_lm_head.") for file in checkpoint.files)
        named = checkpoint.says("model_type", "medusa") or "medusa_num_heads" in checkpoint.config
        return files or named or checkpoint.has("medusa_head.", "blocks.0.layers.")

    @classmethod
    def read(cls, checkpoint: Checkpoint, target: Target) -> Heads:
        expect(checkpoint, "medusa")
        tensors = _in_vllm_names(checkpoint, target)
        rows, size = tensors["lm_heads.0.weight"].shape
        token_map = tensors.get("token_map")
        vocab_size = rows if token_map is None else int(checkpoint.config.get("vocab_size", target.vocab_size))
        check_target(checkpoint, hidden_size=(size, target.hidden_size), vocabulary=(vocab_size, target.vocab_size))
        heads, layers = (numbered(tensors, group) for group in (r"lm_heads\.(\d+)\.", r"blocks\.\d+\.layers\.(\d+)\."))
        bias = "blocks.0.layers.0.bias" in tensors
        with torch.device("meta"):
            made = MedusaHeads(size, vocab_size, heads, layers, bias, token_map)
        made.rates = made.rates_in(checkpoint, "medusa_rank_rates")
        return made.fill(tensors, checkpoint, target, ALIKE)

    options: Options
    _hidden: Tensor  # [B, H] at every row's last column

    @classmethod
    def fresh(cls, target: Target, heads: int = 4, layers: int = 1) -> Heads:
        """Every head says at first what lm_head says: A and b are zero, W is lm_head's."""
        made = MedusaHeads(target.hidden_size, target.vocab_size, heads, layers)
        as_target(made, target)
        for parameter in made.blocks.parameters():
            parameter.zero_()
        for parameter in made.lm_heads.parameters():
            parameter.copy_(target.lm_head.get_parameter("weight"))
        return made

    def start(self, batch: int, sampling: Sampling, rng: Generator) -> None:
        super().start(batch, sampling, rng)
        if self.options.draft == "ranked":
            self.choice = Choice(sampling)

    def observe(self, progress: Progress) -> None:
        self._hidden = at_last(progress, self.tapped(progress))

    def propose(self, budget: Budget) -> Draft:
        shape = self._shape(budget)
        if not shape.parents:
            return Draft.empty(len(self._hidden), self._hidden.device)
        nodes, write = self.options.nodes and budget.nodes, partial(self._write, shape)
        return self.replayed(nodes, shape.depth, write, *self._read(), draws=len(shape.parents), cut=not nodes)

    def _read(self) -> tuple[Tensor, ...]:
        """What the heads read, at every row's last column."""
        return (self._hidden,)

    def _write(self, shape: Shape, depth: int, *read: Tensor) -> Draft:
        """A chain is as deep as is said, a tree of its shape."""
        shape = shape if self.options.nodes else chain(depth)
        tokens, confidence, probs = self._fill(shape, *read)
        if not self.options.nodes:
            return Draft.chain(tokens, probs, confidence)
        return Draft(tokens, _indices(shape, tokens.device)[0].expand_as(tokens), probs, confidence)

    def _shape(self, budget: Budget) -> Shape:
        depth = min(budget.depth, len(self.head))
        if not self.options.nodes:
            return chain(min(depth, budget.nodes))
        if self.options.tree != "fitted":
            return within(published(self.options.tree), Budget(depth, budget.nodes))
        rates = self.head.rates or USUAL_RATES
        return _fitted(tuple(ranks[: self.head.vocab_size] for ranks in rates[:depth]), budget.nodes)

    def _fill(self, shape: Shape, hidden: Tensor, *more: Tensor) -> Chosen:
        _, places, ranks, lasts = _indices(shape, hidden.device)
        logits = torch.stack([self.head(hidden, i) for i in range(shape.depth)], 1)
        return self._choose(logits, places, ranks, lasts, shape.width)

    def _choose(self, logits: Tensor, places: Tensor, ranks: Tensor, lasts: Tensor, width: int) -> Chosen:
        """logits [B, P, V] at the places that the nodes are below, places, ranks and lasts [N], all ranks below width.

        Where it draws, the elder children of a slot are the likeliest tokens and the last one is drawn from what these
        leave of q (the greedy drafts of Hu et al. 2502.18779).
        """
        if not self.choice.noise:
            chances, ranked = logits.float().softmax(-1).topk(width)
            return ranked[:, places, ranks], chances[:, places, ranks], None
        probs = self.choice.said(logits)
        ranked, probs = probs.topk(width).indices[:, places], probs[:, places]
        elder = torch.arange(width, device=ranks.device) < ranks[:, None]
        left = probs.scatter(-1, ranked, probs.gather(-1, ranked) * ~elder)
        some = left.sum(-1, keepdim=True)
        own = ranked.gather(-1, ranks[None, :, None].expand(len(ranked), -1, 1))
        chosen = torch.zeros_like(probs).scatter(-1, own, 1.0)
        q = torch.where(lasts[:, None] & (some > 0.0), left / some.clamp_min(torch.finfo(some.dtype).tiny), chosen)
        tokens = self.choice.token(q)
        return tokens, probs.gather(-1, tokens[..., None])[..., 0], q

    def loss(self, batch: Progress) -> tuple[Tensor, dict[str, float]]:
        """Cross-entropy to the target's distribution, or to the text where that is unknown; head i weighs decay^i."""
        steps = (compare(logits, wanted) for logits, wanted in self._taught(batch))
        return steps_loss(steps, (self.decay**i for i in count(1)))

    @torch.no_grad()
    def measure(self, batch: Progress) -> None:
        """Count how often each rank of each head is right: what the fitted tree is fitted to, and `save` writes."""
        width = min(RANKS, self.head.vocab_size)
        right = [
            (q.topk(width).indices == likeliest(p)[..., None]).float().mean((0, 1)) for q, p in self._taught(batch)
        ]
        self.head.rates = tuple(tuple(ranks.tolist()) for ranks in right)

    def _taught(self, batch: Progress) -> Iterator[tuple[Tensor, Tensor]]:
        """Per head i its logits [B, A - 1 - i, V] and what the target says there, probabilities or else tokens."""
        probs = batch.target_probs()
        said = batch.outputs if probs is None else probs
        states = self._states(self.tapped(batch))
        for i in range(min(len(self.head), states.shape[1] - 1)):
            yield self._ahead(states, batch.outputs, i).float(), said[:, i + 1 :]

    def _states(self, hidden: Tensor) -> Tensor:
        """What the heads read of the target, [B, A, H] of whole rows."""
        return hidden

    def _ahead(self, states: Tensor, outputs: Tensor, head: int) -> Tensor:
        """-> logits [B, A - 1 - head, V] at the columns whose answer lies within the batch"""
        logits: Tensor = self.head(states[:, : -1 - head], head)
        return logits

    def save(self, folder: Path, target_name: str) -> None:
        heads = self.head
        assert isinstance(heads, MedusaHeads)
        config = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "base_model_name_or_path": target_name,
            "hidden_size": heads.hidden_size,
            "vocab_size": heads.vocab_size,
            "truncated_vocab_size": heads.rows,
            "num_heads": len(heads),
            "num_hidden_layers": heads.layers,
            "medusa_fc_bias": heads.bias,
            "medusa_rank_rates": heads.rates,
        }
        write_checkpoint(folder, config, heads.state_dict())


def _in_vllm_names(checkpoint: Checkpoint, target: Target) -> dict[str, Tensor]:
    """The heads' tensors, whichever format they are in. Raises ValueError where there are none for this target."""
    inside = checkpoint.take("medusa_head.")
    if 0 < len(inside) < len(checkpoint.tensors) and Path(target.name).name != Path(checkpoint.name).name:
        raise ValueError(f"{checkpoint.name} is a whole model trained together with its heads; make it the target too")
    tensors = renamed(inside or checkpoint.tensors, VLLM_NAMES)
    if checkpoint.config.get("original_lm_head"):  # one for all heads
        shared = tensors.pop("lm_head.weight", tensors.get("lm_heads.0.weight"))
        if shared is not None:
            heads = numbered(tensors, r"blocks\.(\d+)\.")
            tensors |= {f"lm_heads.{i}.weight": shared.clone() for i in range(heads)}
    token_map = tensors.get("token_map")
    if token_map is not None:  # the file may hold the LM heads of the whole vocabulary
        for name, tensor in tensors.items():
            if name.startswith("lm_heads.") and len(tensor) > len(token_map):
                tensors[name] = tensor[token_map]
    if "lm_heads.0.weight" not in tensors:
        raise ValueError(
            f"{checkpoint.name} holds no Medusa head known here; convert it to the authors' or vLLM's format"
        )
    return tensors
