"""Multi-token prediction: decoder layers trained with the target continue from its hidden state (DeepSeek-V3
2412.19437, section 2.2; Gloeckle et al. 2404.19737).

B rows, A columns, S columns of a pass, D modules or heads, V vocabulary, H hidden. Column a combines the target's state
with the next token, outputs[a]. Step i predicts the token i + 1 positions after outputs[a]. Sequential: module i reads
the state of module i - 1 and the previous token. Parallel: head i reads the trunk only. A single module is applied
repeatedly and trained that way (FastMTP 2509.18362).

The KV cache holds the observed columns. Every `propose` reads the last D of them again, because the modules read draft
tokens there.

Embedding, lm_head, rotary embeddings and final norm belong to the target. They are neither frozen, moved nor saved with
the heads; if the target is trained too, gradients reach them.
"""

from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, LlamaConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from specdemo.core.atomic_io import finite, json_text, write_text
from specdemo.core.protocol import Budget, Progress, Target
from specdemo.core.tree import Draft
from specdemo.kv.masks import Rope
from specdemo.kv.store import cache_argument
from specdemo.kv.view import View
from specdemo.methods import check_capabilities
from specdemo.methods.base import DraftOptions
from specdemo.methods.heads.formats import contradiction
from specdemo.methods.heads.formats import mtp as files
from specdemo.methods.heads.formats.mtp import MTPConvention
from specdemo.methods.heads.head import Head, Recipe
from specdemo.methods.heads.network import Network, untrained
from specdemo.methods.heads.nextn import NextN
from specdemo.methods.heads.runtime import DraftPass, HeadRuntime, training_columns, unrolled_mask
from specdemo.methods.heads.sampler import ChainBuilder
from specdemo.models.checkpoints import Checkpoint, open_checkpoint, write_checkpoint
from specdemo.models.fused import fuse_layer, layer_class
from specdemo.models.layers import DecoderLayer, Rotary, llama_config_like
from specdemo.models.llamacpp_prediction import PredictionLayer
from specdemo.models.llamacpp_target import LlamaCppTarget
from specdemo.models.ref import ModelRef
from specdemo.models.sources import LoadProgress, no_progress
from specdemo.training.losses import StepLosses

NORM_AND_ROPE = ("rms_norm_eps", "rope_parameters")
STEP_WEIGHTS = (0.51, 0.31, 0.18)  # FastMTP: loss weights of the steps of a single module


class TargetModules(NamedTuple):
    """Modules of the target that heads use; in a tuple, so that they are not registered as submodules."""

    embed: nn.Module
    lm_head: nn.Module
    norm: nn.Module


class MTPHeads(Network):
    """Base class: one decoder layer, or module with one, per token ahead."""

    def __init__(self, target: Target, config: Any, layers: list[nn.Module]) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(layers)
        self.target_layers = target.num_layers  # layers of the target
        decoder = _decoder(target)
        norm = nn.Identity() if decoder is None else decoder.norm
        self.shared = TargetModules(target.embed, target.lm_head, norm)
        self._lm_head_dtype = target.dtype

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def step_weights(self) -> tuple[float, ...]:
        """Loss weights, one per trained step."""
        return (1 / len(self),) * len(self)  # in sum the weight of the target's own loss

    @property
    def tap(self) -> int:
        """The tap of the target that the heads read."""
        return self.target_layers - 1

    def step(self, index: int, hidden: Tensor, tokens: Tensor, columns: View) -> tuple[Tensor, Tensor]:
        """Run step `index`: hidden [B, A, H], tokens [B, A] -> state [B, A, H], and the input of the next step."""
        raise NotImplementedError

    def logits(self, state: Tensor) -> Tensor:
        """Return logits [..., V] of a state [..., H]."""
        logits: Tensor = self.shared.lm_head(state.to(self._lm_head_dtype))
        return logits

    def angles(self, positions: Tensor, end: int, trailing: bool = False) -> Rope:
        """Return the rotary embeddings at `positions`, see `Angles`."""
        raise NotImplementedError


class MTPModule(nn.Module):
    """One sequential module: projection of two inputs, decoder layer, and the norm before lm_head."""

    def __init__(self, config: PreTrainedConfig, norm: type[nn.Module], block: nn.Module) -> None:
        super().__init__()
        size = config.hidden_size
        self.enorm = norm(size, eps=config.rms_norm_eps)
        self.hnorm = norm(size, eps=config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.block = block
        self.norm = norm(size, eps=config.rms_norm_eps)


class SequentialModules(MTPHeads):
    """Sequential modules with decoder layers of the target's family. A single module can be applied repeatedly."""

    def __init__(self, target: Target, modules: int) -> None:
        """Raises ValueError for a target whose layers cannot run separately."""
        config, layer, norm, rotary = _target_family(target, modules)
        super().__init__(target, config, [MTPModule(config, norm, layer(config, i)) for i in range(modules)])
        self._rotary = (rotary,)  # in a tuple, so that it is not registered as a submodule
        self._cache_argument = cache_argument(layer.forward)
        self.convention: MTPConvention = MTPConvention()

    @property
    def step_weights(self) -> tuple[float, ...]:
        return STEP_WEIGHTS if len(self) == 1 else super().step_weights

    @property
    def tap(self) -> int:
        return -1 if self.convention.normed_input else self.target_layers

    def step(self, index: int, hidden: Tensor, tokens: Tensor, columns: View) -> tuple[Tensor, Tensor]:
        module: Any = self.layers[index % len(self)]
        parts = [module.enorm(self.shared.embed(tokens).to(hidden.dtype)), module.hnorm(hidden)]
        joined = torch.cat(parts[::-1] if self.convention.hidden_first else parts, -1)
        unnormed = module.block(
            module.eh_proj(joined),
            position_embeddings=columns.rope,
            attention_mask=columns.mask(),
            position_ids=columns.positions,
            use_cache=columns.cache is not None,
            **{self._cache_argument: columns.cache},
        )
        state = module.norm(unnormed)
        return state, state if self.convention.normed_output else unnormed

    def fuse(self) -> "SequentialModules":
        module: Any
        for module in self.layers:
            module.block = fuse_layer(module.block, self._rotary[0])
        return super().fuse()

    def angles(self, positions: Tensor, end: int, trailing: bool = False) -> Rope:
        """Return cos and sin at `positions`, each [B, S, D], as transformers' layers read them."""
        cos, sin = self._rotary[0](positions.new_empty(0, dtype=self.dtype), positions)
        return cos, sin


class ParallelHeads(MTPHeads):
    """One Llama layer per head on the trunk's output, tap `num_layers - 1`, with the target's norm and lm_head."""

    def __init__(self, target: Target, heads: int) -> None:
        config = _llama(target, heads)
        super().__init__(target, config, [DecoderLayer(config, i) for i in range(heads)])
        self._rotary = Rotary.of_config(config, target.device)

    def angles(self, positions: Tensor, end: int, trailing: bool = False) -> Rope:
        return self._rotary(positions, end, trailing)

    def last_states(self, heads: int, hidden: Tensor, columns: View) -> Tensor:
        """Return states [B, heads, H] of the first heads at the last column of every row.

        The keys and values of all heads are written to the cache.
        """
        states = torch.cat([columns.last(layer(hidden, columns)) for layer in self.layers][:heads], 1)
        normed: Tensor = self.shared.norm(states)
        return normed

    def step(self, index: int, hidden: Tensor, tokens: Tensor, columns: View) -> tuple[Tensor, Tensor]:
        return self.shared.norm(self.layers[index](hidden, columns)), hidden


class MTP(Head[MTPHeads], method="mtp"):
    summary = "Layers trained together with the target draft from its last hidden state, one token after the other."
    recipes: ClassVar = {"mtp": Recipe("Multi-token prediction, 1 module", {})}

    def __new__(cls, target: Target, model: object, options: DraftOptions | None = None) -> Any:
        """Return the drafter of a prediction layer in a GGUF file, or else one of heads in PyTorch."""
        if isinstance(model, str) and ModelRef(model).gguf:
            model = cls.load(model, target)
        return NextN(target, model, options) if isinstance(model, PredictionLayer) else super().__new__(cls)

    @classmethod
    def load(cls, source: str, target: Target, progress: LoadProgress | None = None) -> Any:
        """Load heads, or for a GGUF target a GGUF file with a prediction layer: its own, or `mtp-*.gguf`."""
        file = ModelRef(source)
        if not file.gguf:
            return super().load(source, target, progress)
        if not isinstance(target, LlamaCppTarget):
            raise ValueError(f"{source} drafts for GGUF targets only; choose the model in safetensors")
        check_capabilities(cls, target)
        return PredictionLayer(file, target.weights, progress or no_progress)

    @classmethod
    def recognises(cls, checkpoint: Checkpoint) -> bool:
        family = checkpoint.config.get("speculators_model_type")
        if family:
            return bool(family == "mtp")
        return checkpoint.has("mtp.", "mtp_layers.", "eh_proj") or "n_future_tokens" in checkpoint.config

    @classmethod
    def open(cls, source: ModelRef, target: Target, progress: LoadProgress) -> Checkpoint:
        return open_checkpoint(source, progress, partial(files.is_head_tensor, target=target))

    @classmethod
    def read(cls, checkpoint: Checkpoint, target: Target) -> MTPHeads:
        checkpoint = files.select_heads(checkpoint, target)
        hint = "its layers must have the target's shapes and must not be quantized"
        if checkpoint.has("extra_heads."):
            count = files.count_parallel_heads(checkpoint, target)
            with torch.device("meta"):
                parallel = ParallelHeads(target, count)
            parallel.note = contradiction(checkpoint.config, n_future_tokens=count + 1)
            return parallel.load_tensors(files.read_parallel(checkpoint, parallel.config), checkpoint, target, hint)
        tensors, count, conventions = files.read_sequential(checkpoint, target)
        with torch.device("meta"):
            network = SequentialModules(target, count)
        network.conventions, network.convention = conventions, conventions[0]
        stated = {**checkpoint.config, **(checkpoint.config.get("text_config") or {})}
        network.note = contradiction(stated, **dict.fromkeys(files.COUNT_KEYS, count))
        return network.load_tensors(tensors, checkpoint, target, hint)

    def __init__(self, target: Target, model: MTPHeads | str, options: DraftOptions | None = None) -> None:
        super().__init__(target, model, options)
        head = self.head
        self.taps = (head.tap,)
        self._single_module = isinstance(head, SequentialModules) and len(head) == 1

    def new_runtime(self, target: Target) -> HeadRuntime:
        head = self.head
        reread = len(head) if isinstance(head, SequentialModules) else 1
        return HeadRuntime(target, head.dtype, len(head), head.angles, limit=target.max_length, reread=reread)

    @classmethod
    def fresh(cls, target: Target, modules: int = 1, kind: str = "deepseek") -> MTPHeads:
        """Return untrained heads. kind: deepseek (sequential modules of the target's family) or parallel.

        Raises ValueError for a target whose layers cannot run separately.
        """
        if kind not in ("deepseek", "parallel"):
            raise ValueError(f"unknown kind {kind!r} of multi-token prediction; choose deepseek or parallel")
        network: MTPHeads = SequentialModules(target, modules) if kind == "deepseek" else ParallelHeads(target, modules)
        return untrained(network, target, target.hidden_size**-0.5)

    def observe(self, progress: Progress) -> None:
        self.runtime.observe(progress.lengths, self.target_features(progress), progress.outputs)

    def propose(self, budget: Budget) -> Draft:
        head, depth = self.head, budget.chain
        if not self._single_module:
            depth = min(depth, len(head))
        if depth < 1:
            return Draft.empty(self.runtime.rows, self.device)
        return self.runtime.draft(self._draft, depth, self.sampler, max_columns=depth, enough=budget.enough)

    def _draft(self, draft: DraftPass) -> Draft:
        head, builder = self.head, ChainBuilder(draft.sampler, enough=draft.enough)
        if isinstance(head, SequentialModules):
            self._draft_sequential(head, draft, builder)
        elif isinstance(head, ParallelHeads):
            builder.append(head.logits(draft.columns.run(partial(head.last_states, draft.depth), draft.inputs[0])))
        return builder.build()

    def _draft_sequential(self, head: SequentialModules, draft: DraftPass, builder: ChainBuilder) -> None:
        """Read the pending columns with every module, then decode further steps. Something is always pending."""
        (hidden, tokens), depth, columns = draft.inputs, draft.depth, draft.columns
        width, rows = tokens.shape[1], torch.arange(len(tokens), device=self.device)
        ends = width - 1 if columns.last_real is None else columns.last_real
        next_tokens = F.pad(tokens, (0, len(head)))
        for i in range(len(head)):
            state, hidden = columns.run(partial(head.step, i), hidden, next_tokens[:, i : i + width])
            if len(builder) < depth and not builder.ended:
                sampled = builder.append(head.logits(columns.last(state)))
                next_tokens[rows, ends + 1 + i] = sampled[:, 0]
        hidden = columns.last(hidden)
        while self._single_module and len(builder) < depth and not builder.ended:
            columns = columns.chain()
            state, hidden = columns.run(partial(head.step, 0), hidden, sampled)
            sampled = builder.append(head.logits(state))

    def loss(self, batch: Progress) -> tuple[Tensor, dict[str, float]]:
        """Loss to the target's distribution (or the text), weighted by `head.step_weights`.

        Logits are recomputed in the backward pass, so that only one step's are in memory.
        """
        steps = (checkpoint(self._compare, *step, use_reentrant=False) for step in self._training_steps(batch))
        return self.objective.steps_loss(steps, self.head.step_weights)

    def _training_steps(self, batch: Progress) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield per step i its states [B, A - 1 - i, H] and the target's probabilities, or else tokens.

        The steps of a single module are unrolled as in a draft: each sees the observed columns of the first step and
        its own ancestors.
        """
        labels = batch.labels()
        hidden = self.target_features(batch)[:, :-1]
        columns = torch.arange(hidden.shape[1], device=hidden.device)
        cache = DynamicCache() if self._single_module else None
        for i in range(min(len(self.head.step_weights), len(columns))):
            mask = unrolled_mask(columns, i) if self._single_module and i else None
            new_columns = training_columns(columns[None, i:], self.head.angles, len(columns), mask, cache)
            state, hidden = self.head.step(i, hidden, batch.outputs[:, i:-1], new_columns)
            yield state, labels[:, i + 1 :]
            hidden = hidden[:, :-1]

    def _compare(self, state: Tensor, labels: Tensor) -> StepLosses:
        return self.objective.compare(self.head.logits(state), labels)

    def save(self, folder: Path, target_name: str) -> None:
        head, tensors = self.head, self.head.state_dict()
        if isinstance(head, SequentialModules):
            config_and_tensors = files.sequential_to_checkpoint(
                tensors, head.convention, head.config, head.target_layers, target_name
            )
            write_checkpoint(folder, *config_and_tensors)
        else:
            params, named = files.parallel_to_checkpoint(
                tensors, len(head), head.config, head.target_layers, target_name
            )
            write_checkpoint(folder, params, named)
            write_text(folder / "params.json", json_text(finite(params), indent=2) + "\n")


def _decoder(target: Target) -> Any:
    """Return the decoder of the target; None if it is not a transformers model."""
    return target.model.get_decoder() if target.model is not None else None


def _target_family(target: Target, layers: int) -> tuple[PreTrainedConfig, type[nn.Module], type[nn.Module], nn.Module]:
    """Return config, decoder layer, norm and rotary embedding of the target's family, for full attention and MoE."""
    decoder = _decoder(target)
    if decoder is None:
        config = _llama(target, layers)
        return config, LlamaDecoderLayer, LlamaRMSNorm, _angles(config, target)
    config = deepcopy(decoder.config)
    parts = dict(decoder.named_children())
    separate = parts.keys() >= {"layers", "norm", "rotary_emb"}
    # several kinds of layers have rotary embeddings of their own
    if not separate or "layer_type" in signature(parts["rotary_emb"].forward).parameters:
        raise ValueError(f"the layers of a {config.model_type} model cannot run separately; choose a target like Llama")
    config.num_hidden_layers = layers
    overrides: dict[str, object] = {"layer_types": ["full_attention"] * layers, "mlp_layer_types": ["sparse"] * layers}
    overrides |= {"first_k_dense_replace": 0, "mlp_only_layers": []}
    config.update({name: value for name, value in overrides.items() if config.to_dict().get(name)})
    config._attn_implementation = "sdpa"  # accepts any mask, and is causal without one
    norm = type(deepcopy(decoder.norm))  # of the family; a copy has no faster norm
    return config, layer_class(decoder.layers[-1]), norm, decoder.rotary_emb


def _llama(target: Target, layers: int) -> LlamaConfig:
    decoder = _decoder(target)
    if decoder is None:
        config = llama_config_like(target)
        config.update({name: target.layer_config[name] for name in NORM_AND_ROPE if name in target.layer_config})
    else:
        config = deepcopy(decoder.config)
    if not isinstance(config, LlamaConfig):
        raise ValueError(f"parallel heads are Llama layers; choose a Llama target, not {config.model_type}")
    config.num_hidden_layers = layers
    config._attn_implementation = "sdpa"
    return config


def _angles(config: LlamaConfig, target: Target) -> nn.Module:
    with target.device:  # even if the layers are created on the meta device
        return LlamaRotaryEmbedding(config)
