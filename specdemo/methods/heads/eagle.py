"""EAGLE: a decoder layer continues the target's features (Li et al.: EAGLE-1 2401.15077, section 4.1; dynamic trees of
EAGLE-2 2406.16858, section 4; EAGLE-3 2503.01840, section 3).

B rows, A columns, S queries, C keys, K frontier nodes, N nodes, V vocabulary of the target, W of the draft, H hidden
size of the target, D of the head.

Column a combines the target's feature with the embedding of outputs[a]; the head's state there predicts the token after
outputs[a]. The feature is tap -1 in EAGLE-1 and fc of three taps in EAGLE-3. In draft columns the head's own state
replaces the feature. P-EAGLE (2602.01469) is an EAGLE-3 that drafts a chain in parallel: all draft columns have a
learnt feature and the embedding of a mask token. EAGLE-1 uses the target's lm_head. EAGLE-3 has its own norm and
lm_head, often with a smaller vocabulary, where draft id i is target id i + d2t[i].

The KV cache holds the observed columns; draft columns follow them until the next `propose` drops them.
"""

from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, LlamaConfig

from specdemo.core.protocol import Budget, Progress, Target
from specdemo.core.tree import Draft
from specdemo.kv.view import View
from specdemo.methods import require_method, setting
from specdemo.methods.base import DraftOptions
from specdemo.methods.heads.formats import d2t_to_ids
from specdemo.methods.heads.formats import eagle as files
from specdemo.methods.heads.formats.eagle import EagleConvention, default_taps
from specdemo.methods.heads.formats.gguf import open_head
from specdemo.methods.heads.head import Head, Recipe
from specdemo.methods.heads.network import Network, move_to_target
from specdemo.methods.heads.runtime import DraftPass, HeadRuntime, training_columns, unrolled_mask
from specdemo.methods.heads.sampler import ChainBuilder, DraftVocab, grow_tree
from specdemo.models.checkpoints import Checkpoint, write_checkpoint
from specdemo.models.layers import DecoderLayer, Rotary, linear, llama_config_like, strip_prefix
from specdemo.models.packed import RMSNorm
from specdemo.models.ref import ModelRef
from specdemo.models.sources import LoadProgress
from specdemo.training.losses import StepLosses, argmax_targets

UNROLLED_STEPS = 4  # steps of EAGLE-3's training-time test
DECAY = 0.8  # weight of a step in the loss, relative to the previous step
TOKENS_WEIGHT = 0.1  # EAGLE-1: weight of the cross-entropy relative to the feature loss


class EagleLayer(DecoderLayer):
    """A decoder layer of an EAGLE head. Its norms depend on `names`: the first layer of EAGLE-1 has no input norm, that
    of EAGLE-3 has one for each of its two inputs.
    """

    def __init__(self, config: LlamaConfig, index: int, names: Collection[str], window: int = 0) -> None:
        doubled = "hidden_norm.weight" in names
        super().__init__(config, index, names, 2 * config.hidden_size if doubled else 0, (window, True))
        if "input_layernorm.weight" not in names:
            self.input_layernorm = nn.Identity()
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps) if doubled else None

    def forward_pair(self, state: Tensor, embedded: Tensor, norm_before_residual: bool, columns: View) -> Tensor:
        """state [B, S, D] -> [B, S, D]. The first layer of EAGLE-3 also reads embedded [B, S, D]."""
        if self.hidden_norm is None:
            return self.forward(state, columns)
        normed = self.hidden_norm(state)
        x = torch.cat([self.input_layernorm(embedded), normed], -1)
        state = (normed if norm_before_residual else state) + self.attention(x, columns)
        out: Tensor = state + self.mlp(self.post_attention_layernorm(state))
        return out


class EagleHead(Network):
    """Network of an EAGLE head. Tensor names are the authors', except `layers.0.` for EAGLE-3's `midlayer.`.

    names: tensors of the checkpoint. A head without embedding or lm_head uses the target's, which are not registered as
    its parameters.
    """

    d2t: Tensor | None

    def __init__(
        self,
        target: Target,
        config: LlamaConfig,
        convention: EagleConvention,
        names: Collection[str],
        d2t: Tensor | None = None,
    ) -> None:
        super().__init__()
        size, eps, taps = config.hidden_size, config.rms_norm_eps, len(convention.taps)
        self.config = config
        fc_inputs = 2 * size if convention.eagle1 else taps * target.hidden_size
        draft_vocab_size = config.vocab_size if d2t is None else len(d2t)
        self.fc = linear(fc_inputs, size, "fc", names)
        # the layer types were copied from the config of a complete model
        copied = len(convention.windows) != config.num_hidden_layers
        self.windows = (0,) * config.num_hidden_layers if copied else convention.windows
        self.layers = nn.ModuleList(
            EagleLayer(config, i, strip_prefix(names, f"layers.{i}."), window) for i, window in enumerate(self.windows)
        )
        self.norm = RMSNorm(size, eps) if "norm.weight" in names else None
        self.lm_head = nn.Linear(size, draft_vocab_size, bias=False) if "lm_head.weight" in names else None
        self.embed_tokens = nn.Embedding(config.vocab_size, size) if "embed_tokens.weight" in names else None
        self.input_norm = RMSNorm(fc_inputs, eps) if "input_norm.weight" in names else None
        normed = range(taps if "fc_norm.0.weight" in names else 0)
        self.fc_norm = nn.ModuleList(RMSNorm(target.hidden_size, eps) for _ in normed)
        self.mask_hidden = nn.Parameter(torch.zeros(fc_inputs)) if files.MASK_HIDDEN in names else None
        self.register_buffer("d2t", d2t)
        self._target_modules = target.embed, target.lm_head  # a tuple, so that they are not registered
        self._lm_head_dtype = target.dtype
        self.convention: EagleConvention = convention

    def fuse(self) -> "EagleHead":
        for layer in self._layers:
            layer.fuse()
        return super().fuse()

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed target token ids [B, S] -> [B, S, D]."""
        embedded: Tensor = (self.embed_tokens or self._target_modules[0])(tokens)
        return embedded.to(self.dtype)

    def features(self, hidden: Tensor) -> Tensor:
        """Project target hidden states [B, A, taps H] to features [B, A, D]."""
        if self.convention.eagle1:
            return hidden
        if self.fc_norm:
            parts = hidden.chunk(len(self.fc_norm), -1)
            hidden = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        features: Tensor = self.fc(hidden if self.input_norm is None else self.input_norm(hidden))
        return features

    def forward(self, embedded: Tensor, features: Tensor, columns: View) -> Tensor:
        """embedded and features [B, S, D] -> states [B, S, D]"""
        state = features
        if self.convention.eagle1:
            pair = [features, embedded] if self.convention.feature_first else [embedded, features]
            state = self.fc(torch.cat(pair, -1))
        for layer in self._layers:
            state = layer.forward_pair(state, embedded, self.convention.norm_before_residual, columns)
        return state

    def logits(self, states: Tensor) -> Tensor:
        """states [..., D] -> [..., W]"""
        normed = states if self.norm is None else self.norm(states)
        logits: Tensor = (
            self.lm_head(normed) if self.lm_head else self._target_modules[1](normed.to(self._lm_head_dtype))
        )
        return logits

    def feedback_features(self, states: Tensor) -> Tensor:
        """Return the states that replace the features in draft columns."""
        return self.norm(states) if self.convention.norm_output and self.norm is not None else states

    @property
    def _layers(self) -> list[EagleLayer]:
        return cast(list[EagleLayer], self.layers)

    @cached_property
    def draft_vocab(self) -> DraftVocab:
        return DraftVocab(None if self.d2t is None else d2t_to_ids(self.d2t), self.config.vocab_size)


class EagleOptions(DraftOptions):
    draft: str = setting(
        "tree",
        "tree: the most likely continuations by path probability; chain: one continuation, sampled if the target "
        "samples",
        choices=("tree", "chain"),
    )
    nodes: int = setting(
        24,
        "nodes of the draft tree; on a CPU, if it is left out, as many as the target's passes allow",
        low=1,
        high=128,
        step=1,
    )
    top_k: int = setting(8, "nodes expanded per level, and children of each", low=1, high=32, step=1)


class Eagle(Head[EagleHead], method="eagle", tree=lambda o: o.nodes if o.draft == "tree" else None):
    summary = "A single decoder layer drafts a tree from the target's hidden states, wider where it is unsure."
    config_keys = files.KEYS
    recipes: ClassVar = {
        "eagle-1": Recipe("EAGLE-1", {"kind": "eagle1"}),
        "eagle-3": Recipe("EAGLE-3", {"kind": "eagle3"}),
    }

    Options = EagleOptions
    fits_tree = True

    options: EagleOptions

    @classmethod
    def recognises(cls, checkpoint: Checkpoint) -> bool:
        family = checkpoint.config.get("speculators_model_type")
        if family:
            return family in ("eagle", "eagle3", "peagle")
        return checkpoint.has("midlayer.") or "fc.weight" in checkpoint.tensors

    @classmethod
    def open(cls, source: ModelRef, target: Target, progress: LoadProgress) -> Checkpoint:
        return open_head(source, "eagle3", progress) if source.gguf else super().open(source, target, progress)

    @classmethod
    def read(cls, checkpoint: Checkpoint, target: Target) -> EagleHead:
        require_method(checkpoint, "eagle")
        tensors, config, conventions = files.read_conventions(checkpoint, target)
        with torch.device("meta"):
            head = EagleHead(target, config, conventions[0], tensors, tensors.get("d2t"))
        head.conventions, head.note = conventions, files.remarks(checkpoint, tensors, config, conventions[0])
        return head.load_tensors(tensors, checkpoint, target, "choose a head of Llama layers")

    def __init__(self, target: Target, model: EagleHead | str, options: EagleOptions | None = None) -> None:
        super().__init__(target, model, options)
        self.taps = tuple(sorted(set(self.head.convention.taps)))

    def new_runtime(self, target: Target) -> HeadRuntime:
        self._angles = Rotary.of_config(self.head.config, target.device)
        return HeadRuntime(target, self.head.dtype, len(self.head.layers), self._angles)

    @classmethod
    def fresh(cls, target: Target, kind: str = "eagle3", intermediate: int = 0, draft_vocab: int = 0) -> EagleHead:
        """Return an untrained head.

        kind: eagle3 or eagle1. intermediate: size of the MLP, 0 for the target's. draft_vocab: ids below it are
        drafted, 0 for all.
        """
        if kind not in ("eagle1", "eagle3"):
            raise ValueError(f"unknown kind {kind!r} of EAGLE head; choose eagle3 or eagle1")
        if kind == "eagle1" and draft_vocab:
            raise ValueError("an EAGLE-1 head uses the target's lm_head; leave draft_vocab out")
        config = llama_config_like(target)
        config.intermediate_size = intermediate or config.intermediate_size
        if kind == "eagle1":
            head = EagleHead(target, config, EagleConvention((-1,)), ())
        else:
            names = {"norm.weight", "lm_head.weight", "layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight"}
            # byte-pair vocabularies are ordered by frequency, so the low ids are the common tokens
            d2t = torch.zeros(draft_vocab, dtype=torch.int64) if 0 < draft_vocab < target.vocab_size else None
            head = EagleHead(target, config, EagleConvention(default_taps(target.num_layers)), names, d2t)
        return move_to_target(head, target)

    def observe(self, progress: Progress) -> None:
        hidden = self.target_features(progress, self.head.convention.taps)
        self.runtime.observe(progress.lengths, progress.outputs, hidden)

    def propose(self, budget: Budget) -> Draft:
        depth = budget.chain
        if depth < 1:
            return Draft.empty(self.runtime.rows, self.device)
        if self.head.mask_hidden is not None:
            return self.runtime.draft(self._draft_parallel, depth, self.sampler, max_columns=depth)
        if self.options.draft == "chain":
            return self.runtime.draft(self._chain, depth, self.sampler, max_columns=depth, enough=budget.enough)
        columns = depth * self.options.top_k
        return self.runtime.draft(self._tree, depth, self.sampler, nodes=budget.nodes, max_columns=columns)

    def _root_logits(self, draft: DraftPass) -> tuple[Tensor, Tensor]:
        """Return the feedback features [B, 1, D] of the root, and its logits [B, W]."""
        if draft.inputs:
            root = draft.columns.last(draft.columns.run(self._observed_states, *draft.inputs))
            output = self.head.feedback_features(root), self.head.logits(root[:, 0])
            if draft.columns.captured:
                return output
            self._root = output
        return self._root

    def _observed_states(self, tokens: Tensor, hidden: Tensor, columns: View) -> Tensor:
        """Read output tokens [B, S] with the target's hidden states [B, S, taps H] -> states [B, S, D]."""
        states: Tensor = self.head(self.head.embed(tokens), self.head.features(hidden), columns)
        return states

    def _decode_step(self, tokens: Tensor, features: Tensor, columns: View) -> tuple[Tensor, Tensor]:
        """Read draft tokens [B, S] with features [B, S, D] -> feedback features [B, S, D], logits [B, S, W]."""
        states = self.head(self.head.embed(self.head.draft_vocab.to_target_ids(tokens)), features, columns)
        return self.head.feedback_features(states), self.head.logits(states)

    def _tree(self, draft: DraftPass) -> Draft:
        states, logits = self._root_logits(draft)
        levels, view = count(1), draft.columns

        def expand(tokens: Tensor, parents: Tensor) -> Tensor:
            """Read a frontier [B, K] -> log q [B, K, W]."""
            nonlocal states, view
            features = states[torch.arange(len(parents), device=self.device)[:, None], parents]
            view = view.level(parents)
            states, logits = view.run(self._decode_step, tokens, features)
            return draft.sampler.log_probs(logits, next(levels), self.head.draft_vocab)

        root_log_probs = draft.sampler.log_probs(logits[:, None], 0, self.head.draft_vocab)[:, 0]
        drafted = grow_tree(root_log_probs, expand, Budget(draft.depth, draft.nodes), self.options.top_k)
        return replace(drafted, tokens=self.head.draft_vocab.to_target_ids(drafted.tokens))

    def _chain(self, draft: DraftPass) -> Draft:
        states, logits = self._root_logits(draft)
        builder, view = ChainBuilder(draft.sampler, self.head.draft_vocab, draft.enough), draft.columns

        def decode_step(tokens: Tensor) -> Tensor:
            nonlocal states, view
            # the window of a tree level ends at the root, that of a chain moves
            view = view.level(torch.zeros_like(tokens)) if any(self.head.windows) else view.chain()
            states, logits = view.run(self._decode_step, tokens, states)
            return logits[:, 0]

        builder.append(logits[:, None])
        builder.extend(decode_step, draft.depth)
        return builder.build()

    def _draft_parallel(self, draft: DraftPass) -> Draft:
        logits, depth = self._root_logits(draft)[1][:, None], draft.depth
        if depth > 1:
            masks = torch.full((len(logits), depth - 1), self.head.convention.mask or 0, device=self.device)
            logits = torch.cat([logits, draft.columns.chain(depth - 1).run(self._mask_logits, masks)], 1)
        builder = ChainBuilder(draft.sampler, self.head.draft_vocab)
        builder.append(logits)
        return builder.build()

    def _mask_logits(self, masks: Tensor, columns: View) -> Tensor:
        """Run P-EAGLE on mask tokens [B, S] -> logits [B, S, W]."""
        head = self.head
        assert head.mask_hidden is not None
        features = head.features(head.mask_hidden.expand(*masks.shape, -1))
        return head.logits(head(head.embed(masks), features, columns))

    def loss(self, batch: Progress) -> tuple[Tensor, dict[str, float]]:
        """EAGLE-1: smooth L1 loss to the next feature plus TOKENS_WEIGHT times the loss to the target's distribution.
        EAGLE-3: the loss over several steps, each reading the states of the step before.

        Without the target's distribution the text is used.
        """
        return self.objective.steps_loss(self._training_steps(batch), (DECAY**i for i in count()))

    def _training_steps(self, batch: Progress) -> Iterator[StepLosses]:
        head, columns_per_row = self.head, batch.outputs.shape[1] - 1
        eagle1 = head.convention.eagle1
        labels = batch.labels()
        embedded = head.embed(batch.outputs[:, :columns_per_row])
        features = head.features(self.target_features(batch, head.convention.taps))[:, :columns_per_row]
        columns = torch.arange(columns_per_row, device=labels.device)
        cache = DynamicCache()
        single_step = eagle1 or head.mask_hidden is not None  # trained without feedback of its own states
        for step in range(min(1 if single_step else UNROLLED_STEPS, columns_per_row)):
            new_columns = training_columns(columns[None, step:], self._angles, columns_per_row, None, cache)
            if step or any(head.windows):
                new_columns.make_mask = partial(unrolled_mask, columns, step)
            states = head(embedded[:, step:], features, new_columns)
            compared = self._compare(states, labels[:, step + 1 :])
            if eagle1:
                expected = batch.hidden[-1][:, 1:].float()
                distances = F.smooth_l1_loss(states.float(), expected, reduction="none").mean(-1)
                compared = compared._replace(losses=TOKENS_WEIGHT * compared.losses + distances)
            yield compared
            features = head.feedback_features(states)[:, :-1]

    def _compare(self, states: Tensor, labels: Tensor) -> StepLosses:
        """Compare states [B, S, D] with labels: probabilities [B, S, V] or tokens [B, S].

        With a draft vocabulary, distributions are restricted to it, and places whose argmax is outside do not count.
        """
        head, ids, best = self.head, self.head.draft_vocab.ids, argmax_targets(labels)
        logits = head.logits(states).float()
        if ids is None:
            return self.objective.compare(logits, labels)
        draft_ids = torch.full((head.config.vocab_size,), -1, device=best.device)
        draft_ids[ids] = torch.arange(len(ids), device=best.device)
        draft_best = draft_ids[best]
        draft_labels = labels[..., ids] if labels.is_floating_point() else draft_best.clamp_min(0)
        compared = self.objective.compare(logits, draft_labels, draft_best >= 0)
        return compared._replace(agreement=(logits.argmax(-1) == draft_best).float().mean())

    def save(self, folder: Path, target_name: str) -> None:
        head = self.head
        write_checkpoint(folder, *files.to_checkpoint(head.state_dict(), head.config, head.convention, target_name))
