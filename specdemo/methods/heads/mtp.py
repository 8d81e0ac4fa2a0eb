"""Multi-token prediction: decoder layers that were trained with the target go on where it stops (DeepSeek-V3
2412.19437, section 2.2; Gloeckle et al. 2404.19737).

B rows, A columns, S columns of a pass, D modules or heads, V vocabulary, H hidden. Column a is the target's state there
and outputs[a], the token that follows. Step i says the token i + 1 places behind outputs[a]: module i, which reads the
state of module i - 1 and the token before; or head i, which reads the trunk alone. A single module is applied again and
again, and trained so (FastMTP 2509.18362).

Keys and values are those of observed columns. Of these the last D are read anew by every `propose`, since there modules
have seen tokens that were only drafted.

Embedding, lm_head, rotary angles and the final norm are the target's: used, never owned, so they are neither frozen,
moved nor saved with the heads; where the target is trained too, gradients reach them.
"""

from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from specdemo.core.files import finite, json_text, write_text
from specdemo.core.protocol import Budget, Progress, Target
from specdemo.core.tree import Draft
from specdemo.methods.base import Head, NoOptions, Recipe
from specdemo.methods.flags import sglang_chain, vllm
from specdemo.methods.heads.choose import Writing
from specdemo.methods.heads.formats import mtp as files
from specdemo.methods.heads.formats.mtp import Convention
from specdemo.methods.heads.layers import like
from specdemo.methods.heads.network import Network, as_target
from specdemo.methods.heads.runtime import Columns, HeadHistory, Rope, unrolled_mask, whole_rows
from specdemo.models.checkpoints import Checkpoint, write_checkpoint
from specdemo.models.fused import fused, layer_class
from specdemo.models.hub import LoadProgress
from specdemo.models.stack import Stack, stacked
from specdemo.models.target import HFTarget
from specdemo.training.losses import compare, steps_loss

UNROLLED = (0.51, 0.31, 0.18)  # FastMTP: weights of the steps of a module that is applied again and again


class Shared(NamedTuple):
    """What heads use of their target. In a tuple, so that it is no part of their state."""

    embed: nn.Module
    lm_head: nn.Module
    norm: nn.Module
    rotary: nn.Module


class Heads(Network):
    """One layer, or module around a layer, per token ahead; made from `config`."""

    def __init__(self, target: Target, config: Any, rotary: nn.Module, layers: list[nn.Module]) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(layers)
        self.below = target.num_layers  # layers of the target
        decoder = _decoder(target)
        norm = nn.Identity() if decoder is None else decoder.norm
        self.shared = Shared(target.embed, target.lm_head, norm, rotary)
        self._spoken = target.dtype  # that lm_head reads

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def weights(self) -> tuple[float, ...]:
        """Of the steps in the loss; as many as are trained."""
        return (1 / len(self),) * len(self)  # together as much as the text: a small trunk has to serve that first

    @property
    def tap(self) -> int:
        """The tap of the target whose states are read."""
        return self.below - 1

    def step(self, index: int, hidden: Tensor, tokens: Tensor, at: Columns) -> tuple[Tensor, Tensor]:
        """hidden [B, A, H], tokens [B, A] -> state [B, A, H], and the hidden state the next step reads."""
        raise NotImplementedError

    @property
    def slabs(self) -> int:
        """Layers of their cache."""
        return len(self)

    def logits(self, state: Tensor) -> Tensor:
        """state [..., H] of `step` -> [..., V]"""
        logits: Tensor = self.shared.lm_head(state.to(self._spoken))
        return logits

    def angles(self, positions: Tensor, beyond: int, last: bool = False) -> Rope:
        """Cosines and sines at `positions`, each [B, S, D]; `beyond` and `last` are for heads of several tables."""
        cos, sin = self.shared.rotary(positions.new_empty(0, dtype=self.dtype), positions)
        return cos, sin

    def _run(self, layer: nn.Module, hidden: Tensor, at: Columns) -> Tensor:
        state: Tensor = layer(
            hidden,
            position_embeddings=at.rope,
            attention_mask=at.mask(),
            position_ids=at.positions,
            past_key_values=at.cache,
            use_cache=at.cache is not None,
        )
        return state


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

    def __init__(self, target: Target, modules: int) -> None:
        """Raises ValueError for a target of another build."""
        config, layer, norm, rotary = _family(target, modules)
        super().__init__(target, config, rotary, [Module(config, norm, layer(config, i)) for i in range(modules)])
        self.convention = Convention()

    @property
    def weights(self) -> tuple[float, ...]:
        return UNROLLED if len(self) == 1 else super().weights

    @property
    def tap(self) -> int:
        return -1 if self.convention.reads_normed else self.below

    def step(self, index: int, hidden: Tensor, tokens: Tensor, at: Columns) -> tuple[Tensor, Tensor]:
        module: Any = self.layers[index % len(self)]
        parts = [module.enorm(self.shared.embed(tokens).to(hidden.dtype)), module.hnorm(hidden)]
        joined = torch.cat(parts[::-1] if self.convention.hidden_first else parts, -1)
        plain = self._run(module.block, module.eh_proj(joined), at)
        state = module.norm(plain)
        return state, state if self.convention.hands_on_normed else plain

    def read_as(self, reading: Convention) -> None:
        self.convention = reading

    def hasten(self) -> "SequentialModules":
        module: Any
        for module in self.layers:
            module.block = fused(module.block, self.shared.rotary)
        return super().hasten()


class ParallelHeads(Heads):
    """One Llama layer per head on the trunk's output, tap `num_layers - 1`; final norm and lm_head are the target's."""

    def __init__(self, target: Target, heads: int) -> None:
        config = _llama(target, heads)
        super().__init__(target, config, _angles(config, target), [LlamaDecoderLayer(config, i) for i in range(heads)])
        self._stack: Stack | None = None  # runs the layers at once

    @property
    def slabs(self) -> int:
        return 1 if self._stack else len(self)

    def hasten(self) -> "ParallelHeads":
        self._stack = stacked(self.layers, self.shared.rotary)
        return self

    def ahead(self, heads: int, hidden: Tensor, at: Columns) -> Tensor:
        """hidden [B, A, H] -> states [B, heads, H] of the first heads in every row's last column.

        Keys and values are kept for all of them.
        """
        if self._stack:
            ends = at.positions.new_full((len(hidden),), hidden.shape[1] - 1) if at.ends is None else at.ends
            assert at.cache is not None
            states = self._stack(hidden, ends, heads, at.rope, at.mask(), at.cache)
        else:
            every = [at.last(self._run(layer, hidden, at)) for layer in self.layers]
            states = torch.cat(every[:heads], 1)
        normed: Tensor = self.shared.norm(states)
        return normed

    def step(self, index: int, hidden: Tensor, tokens: Tensor, at: Columns) -> tuple[Tensor, Tensor]:
        return self.shared.norm(self._run(self.layers[index], hidden, at)), hidden


class MTP(Head[Heads]):
    title = "Multi-token prediction"
    summary = "Layers that were trained together with the target carry on from its last state, a word at a time."
    recipes: ClassVar = {"mtp": Recipe("Multi-token prediction, 1 module", {})}
    serves: ClassVar = {"vllm": vllm("mtp"), "sglang": sglang_chain("NEXTN")}
    history: HeadHistory

    @classmethod
    def recognises(cls, checkpoint: Checkpoint) -> bool:
        family = checkpoint.config.get("speculators_model_type")
        if family:
            return bool(family == "mtp")
        return checkpoint.has("mtp.", "mtp_layers.", "eh_proj") or "n_future_tokens" in checkpoint.config

    @classmethod
    def open(cls, source: str, target: Target, progress: LoadProgress) -> Checkpoint:
        return files.opened(source, target, progress)

    @classmethod
    def read(cls, checkpoint: Checkpoint, target: Target) -> Heads:
        checkpoint = files.wanted(checkpoint, target)
        cure = "its layers must be built like the target's and not be quantised"
        if checkpoint.has("extra_heads."):
            count = files.parallel_heads(checkpoint, target)
            with torch.device("meta"):
                parallel = ParallelHeads(target, count)
            return parallel.fill(files.parallel(checkpoint, parallel.config), checkpoint, target, cure)
        tensors, count, conventions = files.sequential(checkpoint, target)
        with torch.device("meta"):
            made = SequentialModules(target, count)
        made.readings, made.convention = conventions, conventions[0]
        return made.fill(tensors, checkpoint, target, cure)

    def __init__(self, target: Target, model: Heads | str, options: NoOptions | None = None) -> None:
        super().__init__(target, model, options)
        head = self.head
        self.taps = (head.tap,)
        self.history = HeadHistory(target, head.slabs, head.dtype, head.angles, limit=target.max_length)
        self._repeats = isinstance(head, SequentialModules) and len(head) == 1

    @classmethod
    def fresh(cls, target: Target, modules: int = 1, kind: str = "deepseek") -> Heads:
        """kind: deepseek, sequential modules of the target's family; or parallel, that many heads besides the target's.

        Raises ValueError for a target whose layers cannot stand alone."""
        if kind not in ("deepseek", "parallel"):
            raise ValueError(f"unknown kind {kind!r} of multi-token prediction; choose deepseek or parallel")
        made: Heads = SequentialModules(target, modules) if kind == "deepseek" else ParallelHeads(target, modules)
        for parameter in made.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=target.hidden_size**-0.5)
        return as_target(made, target)

    def observe(self, progress: Progress) -> None:
        self.history.observe(progress.lengths, self.tapped(progress), progress.outputs)

    def propose(self, budget: Budget) -> Draft:
        head, depth = self.head, min(budget.depth, budget.nodes)
        if not self._repeats:
            depth = min(depth, len(head))
        if depth < 1:
            return Draft.empty(self.history.rows, self.device)
        again = len(head) if isinstance(head, SequentialModules) else 1
        return self.replayed_behind("chain", depth, self._draft, ahead=depth, again=again)

    def _draft(self, depth: int, at: Columns | None) -> Draft:
        head, written = self.head, Writing(self.choice)
        assert at is not None  # the last columns always wait
        if isinstance(head, SequentialModules):
            self._write(head, at, written, depth)
        elif isinstance(head, ParallelHeads):
            written.take(head.logits(at.run(partial(head.ahead, depth), at.inputs[0])))
        return written.draft()

    def _write(self, head: SequentialModules, at: Columns, written: Writing, depth: int) -> None:
        """Read the columns that wait, module after module, and go on behind them with what they say."""
        hidden, tokens = at.inputs
        width, rows = tokens.shape[1], torch.arange(len(tokens), device=self.device)
        ends = width - 1 if at.ends is None else at.ends
        ahead = F.pad(tokens, (0, len(head)))
        for i in range(len(head)):
            state, hidden = at.run(partial(head.step, i), hidden, ahead[:, i : i + width])
            if len(written) < depth:
                chosen = written.take(head.logits(at.last(state)))
                ahead[rows, ends + 1 + i] = chosen[:, 0]
        hidden = at.last(hidden)
        while self._repeats and len(written) < depth:
            state, hidden = self.history.ahead().run(partial(head.step, 0), hidden, chosen)
            chosen = written.take(head.logits(state))

    def loss(self, batch: Progress) -> tuple[Tensor, dict[str, float]]:
        """Cross-entropy to the target's distribution (to the text where it is unknown), steps by `head.weights`.

        With several steps the logits of each are worked out again for its gradient, so that never two are kept.
        """
        taught = (checkpoint(self._compare, *step, use_reentrant=False) for step in self._taught(batch))
        return steps_loss(taught, self.head.weights)

    def _taught(self, batch: Progress) -> Iterator[tuple[Tensor, Tensor]]:
        """Per step i its states [B, A - 1 - i, H] and what the target says there, probabilities or else tokens.

        A single module's steps follow each other as in a draft: each sees the observed columns of the first step and
        its own ancestors.
        """
        probs = batch.target_probs()
        said = batch.outputs if probs is None else probs
        hidden = self.tapped(batch)[:, :-1]
        columns = torch.arange(hidden.shape[1], device=hidden.device)
        cache = DynamicCache() if self._repeats else None
        for i in range(min(len(self.head.weights), len(columns))):
            mask = unrolled_mask(columns, i) if self._repeats and i else None
            at = whole_rows(columns[None, i:], self.head.angles, len(columns), mask, cache)
            state, hidden = self.head.step(i, hidden, batch.outputs[:, i:-1], at)
            yield state, said[:, i + 1 :]
            hidden = hidden[:, :-1]

    def _compare(self, state: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        return compare(self.head.logits(state), wanted)

    def save(self, folder: Path, target_name: str) -> None:
        head, tensors = self.head, self.head.state_dict()
        if isinstance(head, SequentialModules):
            written = files.written_sequential(tensors, head.convention, head.config, head.below, target_name)
            write_checkpoint(folder, *written)
        else:
            params, named = files.written_parallel(tensors, len(head), head.config, head.below, target_name)
            write_checkpoint(folder, params, named)
            write_text(folder / "params.json", json_text(finite(params), indent=2) + "\n")


def _decoder(target: Target) -> Any:
    """What runs between embedding and lm_head; None when the target is no transformers model."""
    return target.model.get_decoder() if isinstance(target, HFTarget) else None


def _family(target: Target, layers: int) -> tuple[object, type[nn.Module], type[nn.Module], nn.Module]:
    """config, decoder layer, norm and rotary angles of the target's family; attention is full and experts are used."""
    decoder = _decoder(target)
    if decoder is None:
        config = _llama(target, layers)
        return config, LlamaDecoderLayer, LlamaRMSNorm, _angles(config, target)
    config = deepcopy(decoder.config)
    if not dict(decoder.named_children()).keys() >= {"layers", "norm", "rotary_emb"}:
        raise ValueError(f"a {config.model_type} model has no layers that can stand alone; choose a target like Llama")
    config.num_hidden_layers = layers
    told: dict[str, object] = {"layer_types": ["full_attention"] * layers, "mlp_layer_types": ["sparse"] * layers}
    told |= {"first_k_dense_replace": 0, "mlp_only_layers": []}
    config.update({name: value for name, value in told.items() if config.to_dict().get(name)})
    config._attn_implementation = "sdpa"  # takes any mask, and is causal without one
    return config, layer_class(decoder.layers[-1]), type(decoder.norm), decoder.rotary_emb


def _llama(target: Target, layers: int) -> LlamaConfig:
    """Llama layers of the target's sizes."""
    decoder = _decoder(target)
    config = like(target) if decoder is None else deepcopy(decoder.config)
    if not isinstance(config, LlamaConfig):
        raise ValueError(f"parallel heads are layers of Llama; choose such a target, not {config.model_type}")
    config.num_hidden_layers = layers
    config._attn_implementation = "sdpa"
    return config


def _angles(config: LlamaConfig, target: Target) -> nn.Module:
    with target.device:  # also where layers are made on the meta device
        return LlamaRotaryEmbedding(config)
