"""Medusa: heads on the target's last hidden state predict the tokens after the next one (Cai et al. 2401.10774).

B rows, A columns, N nodes, L heads, P positions, R ranks, V vocabulary, H hidden. Head i (from 0) is
W_i (h + SiLU(A_i h + b_i)), section 2.1.1. With h = tap -1 of column a, lm_head predicts token a + 1 and head i token
a + 2 + i. The heads are independent, so the token of a node depends on its level and rank but not on its parent.

Formats read: Medusa-1, `{i}.{l}.linear.*` and `{i}.{L}.weight`; Medusa-2, the same with prefix `medusa_head.` in a
complete model; vLLM's, `blocks.{i}.layers.{l}.*` and `lm_heads.{i}.weight`. `save` writes vLLM's, the only one in
safetensors that current engines read. Heads and layers are counted from the tensors, because published configs say two
heads where the file has five.
"""

from collections.abc import Iterator
from functools import lru_cache, partial
from itertools import count
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from specdemo.core.protocol import Budget, Progress, Target
from specdemo.core.sampling import Sampling
from specdemo.core.tree import Draft
from specdemo.kv.graphs import Tensors
from specdemo.methods import require_method, setting
from specdemo.methods.base import DraftOptions
from specdemo.methods.heads.formats import LAYER_KEYS, check_target, contradiction, count_numbered, rename_tensors
from specdemo.methods.heads.head import Head, Recipe
from specdemo.methods.heads.network import Network, move_to_target
from specdemo.methods.heads.runtime import DraftPass, last_columns
from specdemo.methods.heads.sampler import DraftVocab, TokenSampler, TreeShape, chain, clip_shape, optimal_shape
from specdemo.models.checkpoints import Checkpoint, write_checkpoint
from specdemo.training.losses import argmax_targets

RANKS = 10
MAX_HEADS = 16
SAME_SHAPE_HINT = "all heads must have the same shapes"

VLLM_NAMES = {
    r"^medusa_heads\.": "",
    r"^(\d+)\.(\d+)\.linear\.": r"blocks.\1.layers.\2.",
    r"^(\d+)\.\d+\.weight$": r"lm_heads.\1.weight",
}

DraftedNodes = tuple[Tensor, Tensor, Tensor | None]  # tokens [B, N], confidence [B, N], probs [B, N, V]
Rates = tuple[tuple[float, ...], ...]  # per head and rank: agreement with the target

# for heads without measured rates; with 63 nodes the tree resembles `mc_sim_7b_63`
DEFAULT_RATES: Rates = tuple(tuple(0.5 * 0.8**i / (rank + 1) ** 2 for rank in range(RANKS)) for i in range(MAX_HEADS))

# The authors' trees, 63 nodes each. Per level: the number of children of every node of the level above, in order,
# without trailing zeros.
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
def published_shape(name: str) -> TreeShape:
    """Return a tree of PUBLISHED."""
    level: list[tuple[int, ...]] = [()]
    paths: list[tuple[int, ...]] = []
    for counts in PUBLISHED[name].split("/"):
        level = [(*path, r) for path, count in zip(level, map(int, counts.split()), strict=False) for r in range(count)]
        paths += level
    return TreeShape.from_paths(paths)


_optimal_shape = lru_cache(maxsize=64)(optimal_shape)


class LevelNodes(NamedTuple):
    """N nodes of a tree whose tokens are selected together."""

    positions: Tensor  # [N] of their draft distributions
    ranks: Tensor  # [N]
    is_last: Tensor  # [N] True for the last child of its parent
    width: int  # above all ranks


@lru_cache(maxsize=64)
def _shape_tensors(shape: TreeShape, device: torch.device) -> tuple[Tensor, LevelNodes]:
    """Return the parents [N] of a shape, and its nodes, whose positions are levels from 0."""
    parents, levels, ranks, is_last = torch.tensor(
        (shape.parents, shape.levels, shape.ranks, shape.last_children), device=device
    )
    return parents, LevelNodes(levels - 1, ranks, is_last.bool(), shape.width)


class TokenHeads(Network):
    """Base class of Medusa heads and of heads that derive from them."""

    def __init__(self, hidden_size: int, vocab_size: int, heads: int, layers: int) -> None:
        super().__init__()
        self.hidden_size, self.vocab_size, self.heads, self.layers = hidden_size, vocab_size, heads, layers
        self.rates: Rates | None = None

    def __len__(self) -> int:
        return self.heads

    @staticmethod
    def rates_from_config(checkpoint: Checkpoint, key: str) -> Rates | None:
        """Return the rates measured in training, or None if the config has none."""
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


class MedusaHeads(TokenHeads):
    """Network of Medusa heads. Tensor names are vLLM's. token_map [T]: ids of a draft vocabulary of T tokens."""

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
        """Run one head: hidden [..., H] -> logits [..., V]."""
        logits: Tensor = self.lm_heads[head](self.blocks[head](hidden))
        if not isinstance(self.token_map, Tensor):
            return logits
        return DraftVocab(self.token_map, self.vocab_size).to_target_vocab(logits)


class MedusaOptions(DraftOptions):
    nodes: int = setting(0, "nodes of the draft tree; 0 drafts a chain", low=0, high=128, step=1)
    tree: str = setting(
        "fitted",
        "shape of the tree: fitted to the measured accuracy of heads and ranks, or one published by the authors",
        choices=("fitted", *PUBLISHED),
    )
    draft: str = setting(
        "ranked",
        "when the target samples: draft the most likely tokens, or sample from the heads (in a tree only the last "
        "child of a node); the output is exact either way",
        choices=("ranked", "sampled"),
    )


class Medusa(Head[TokenHeads], method="medusa", tree=lambda options: options.nodes or None):
    summary = "Extra heads on the target predict several tokens ahead in parallel; there is no second model to run."
    taps: tuple[int, ...] = (-1,)
    config_keys = LAYER_KEYS | {
        *("medusa_choices", "medusa_fc_bias", "medusa_hidden_size", "medusa_num_heads", "medusa_num_layers"),
        *("medusa_rank_rates", "num_heads", "original_lm_head", "truncated_vocab_size"),
    }
    recipes: ClassVar = {"medusa": Recipe("Medusa, 4 heads", {"heads": 4})}
    decay: ClassVar[float] = 0.8  # weight of a head in the loss, relative to the head before it

    Options = MedusaOptions

    @classmethod
    def recognises(cls, checkpoint: Checkpoint) -> bool:
        by_files = any(file.startswith("medusa_lm_head.") for file in checkpoint.files)
        by_config = checkpoint.config_has("model_type", "medusa") or "medusa_num_heads" in checkpoint.config
        return by_files or by_config or checkpoint.has("medusa_head.", "blocks.0.layers.")

    @classmethod
    def read(cls, checkpoint: Checkpoint, target: Target) -> TokenHeads:
        require_method(checkpoint, "medusa")
        tensors = _to_vllm_names(checkpoint, target)
        rows, size = tensors["lm_heads.0.weight"].shape
        token_map = tensors.get("token_map")
        vocab_size = rows if token_map is None else int(checkpoint.config.get("vocab_size", target.vocab_size))
        check_target(checkpoint, hidden_size=(size, target.hidden_size), vocabulary=(vocab_size, target.vocab_size))
        heads, layers = (
            count_numbered(tensors, group) for group in (r"lm_heads\.(\d+)\.", r"blocks\.\d+\.layers\.(\d+)\.")
        )
        bias = "blocks.0.layers.0.bias" in tensors
        with torch.device("meta"):
            network = MedusaHeads(size, vocab_size, heads, layers, bias, token_map)
        network.rates = network.rates_from_config(checkpoint, "medusa_rank_rates")
        sizes = {"num_heads": heads, "medusa_num_heads": heads, "medusa_num_layers": layers}
        if checkpoint.config_has("model_type", "medusa"):  # else those of a complete model
            sizes["num_hidden_layers"] = layers
        network.note = contradiction(checkpoint.config, **sizes)
        return network.load_tensors(tensors, checkpoint, target, SAME_SHAPE_HINT)

    options: MedusaOptions
    _inputs: Tensors  # of the heads: h [B, H] of the last column of every row

    @classmethod
    def fresh(cls, target: Target, heads: int = 4, layers: int = 1) -> TokenHeads:
        """Return untrained heads that all output lm_head(h): A and b are zero, W is lm_head's."""
        network = MedusaHeads(target.hidden_size, target.vocab_size, heads, layers)
        move_to_target(network, target)
        for parameter in network.blocks.parameters():
            parameter.zero_()
        for parameter in network.lm_heads.parameters():
            parameter.copy_(target.lm_head.get_parameter("weight"))
        return network

    def read_bytes(self, k: int) -> int:
        return self.weight_bytes * min(k, len(self.head)) // len(self.head)

    def start(self, batch: int, sampling: Sampling, rng: Generator) -> None:
        super().start(batch, sampling, rng)
        if self.options.draft == "ranked":
            self.sampler = TokenSampler(sampling)

    def observe(self, progress: Progress) -> None:
        self._inputs = (last_columns(progress, self.target_features(progress)),)

    def propose(self, budget: Budget) -> Draft:
        shape = self._tree_shape(budget)
        if not shape.parents:
            return Draft.empty(self.runtime.rows, self.device)
        nodes, draft_fn = self.options.nodes and budget.nodes, partial(self._draft_shape, shape)
        draws = len(shape.parents) if self.sampler.independent else shape.depth
        return self.runtime.draft(draft_fn, shape.depth, self.sampler, *self._inputs, nodes=nodes, draws=draws)

    def _draft_shape(self, shape: TreeShape, draft: DraftPass, *inputs: Tensor) -> Draft:
        shape = shape if self.options.nodes else chain(draft.depth)
        tokens, confidence, probs = self._fill_shape(draft.sampler, shape, *inputs)
        if not self.options.nodes:
            return Draft.chain(tokens, probs, confidence)
        return Draft(tokens, _shape_tensors(shape, tokens.device)[0].expand_as(tokens), probs, confidence)

    def _tree_shape(self, budget: Budget) -> TreeShape:
        depth = min(budget.depth, len(self.head))
        if not self.options.nodes:
            return chain(min(depth, budget.nodes))
        if self.options.tree != "fitted":
            return clip_shape(published_shape(self.options.tree), Budget(depth, budget.nodes))
        rates = self.head.rates or DEFAULT_RATES
        return _optimal_shape(tuple(ranks[: self.head.vocab_size] for ranks in rates[:depth]), budget.nodes)

    def _fill_shape(self, sampler: TokenSampler, shape: TreeShape, hidden: Tensor, *more: Tensor) -> DraftedNodes:
        logits = torch.stack([self.head(hidden, i) for i in range(shape.depth)], 1)
        nodes = _shape_tensors(shape, hidden.device)[1]
        return self._select_tokens(sampler, sampler.draft_distribution(logits), nodes)

    def _select_tokens(self, sampler: TokenSampler, distribution: Tensor, nodes: LevelNodes) -> DraftedNodes:
        """Select the tokens of N nodes from draft distributions [B, P, V].

        When sampling, the children of a slot are its most likely tokens, except the last child, which is sampled from
        the rest of q (the greedy drafts of Hu et al. 2502.18779).
        """
        positions, ranks, is_last, width = nodes
        if not sampler.independent:
            top_probs, ranked = sampler.probs(distribution).topk(width)
            return ranked[:, positions, ranks], top_probs[:, positions, ranks], None
        ranked, probs = distribution.topk(width).indices[:, positions], distribution[:, positions]
        earlier = torch.arange(width, device=ranks.device) < ranks[:, None]
        residual = probs.scatter(-1, ranked, probs.gather(-1, ranked) * ~earlier)
        residual_mass = residual.sum(-1, keepdim=True)
        node_tokens = ranked.gather(-1, ranks[None, :, None].expand(len(ranked), -1, 1))
        one_hot = torch.zeros_like(probs).scatter(-1, node_tokens, 1.0)
        q = torch.where(
            is_last[:, None] & (residual_mass > 0.0),
            residual / residual_mass.clamp_min(torch.finfo(residual_mass.dtype).tiny),
            one_hot,
        )
        tokens = sampler.sample(q)
        return tokens, probs.gather(-1, tokens[..., None])[..., 0], q

    def loss(self, batch: Progress) -> tuple[Tensor, dict[str, float]]:
        """Loss to the target's distribution (or the text); head i has weight decay^i."""
        steps = (self.objective.compare(logits, labels) for logits, labels in self._training_steps(batch))
        return self.objective.steps_loss(steps, (self.decay**i for i in count(1)))

    @torch.no_grad()
    def measure(self, batch: Progress) -> None:
        """Measure the accuracy of every head and rank, which shapes the fitted tree and is stored by `save`."""
        width = min(RANKS, self.head.vocab_size)
        agreement = [
            (q.topk(width).indices == argmax_targets(p)[..., None]).float().mean((0, 1))
            for q, p in self._training_steps(batch)
        ]
        self.head.rates = tuple(tuple(ranks.tolist()) for ranks in agreement)

    def _training_steps(self, batch: Progress) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield per head i its logits [B, A - 1 - i, V] and the target's probabilities, or else tokens."""
        labels = batch.labels()
        for i, logits in enumerate(self._training_logits(batch)):
            yield logits.float(), labels[:, i + 1 :]

    def _training_logits(self, batch: Progress) -> Iterator[Tensor]:
        """Yield per head i the logits [B, A - 1 - i, V] of the columns whose label is in the batch."""
        hidden = self.target_features(batch)
        for i in range(min(len(self.head), hidden.shape[1] - 1)):
            yield self.head(hidden[:, : -1 - i], i)

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


def _to_vllm_names(checkpoint: Checkpoint, target: Target) -> dict[str, Tensor]:
    """Return the tensors under vLLM's names. Raises ValueError if there are none for this target."""
    head_tensors = checkpoint.take("medusa_head.")
    if 0 < len(head_tensors) < len(checkpoint.tensors) and Path(target.name).name != Path(checkpoint.name).name:
        raise ValueError(f"{checkpoint.name} is a complete model trained with its heads; choose it as the target too")
    tensors = rename_tensors(head_tensors or checkpoint.tensors, VLLM_NAMES)
    if checkpoint.config.get("original_lm_head"):  # one for all heads
        shared = tensors.pop("lm_head.weight", tensors.get("lm_heads.0.weight"))
        if shared is not None:
            heads = count_numbered(tensors, r"blocks\.(\d+)\.")
            tensors |= {f"lm_heads.{i}.weight": shared.clone() for i in range(heads)}
    token_map = tensors.get("token_map")
    if token_map is not None:  # the LM heads of some files cover the full vocabulary
        for name, tensor in tensors.items():
            if name.startswith("lm_heads.") and len(tensor) > len(token_map):
                tensors[name] = tensor[token_map]
    if "lm_heads.0.weight" not in tensors:
        raise ValueError(
            f"{checkpoint.name} has no Medusa heads in a known format; convert it to the authors' or vLLM's format"
        )
    return tensors
