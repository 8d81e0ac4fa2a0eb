"""EAGLE: one decoder layer of its own goes on in the target's features (Li et al.: EAGLE-1 2401.15077, section 4.1; the
dynamic tree of EAGLE-2 2406.16858, section 4; EAGLE-3 2503.01840, section 3).

B rows, A columns, S queries, C keys, K frontier nodes, N nodes, V vocabulary, W the part of it the head drafts from,
H hidden size of the target, D of the head.

Column a pairs the target's feature there with the embedding of outputs[a]; the head's state in that column foresees
the token after outputs[a]. The feature is tap -1 in EAGLE-1 and fc of three taps in EAGLE-3. Below a drafted token the
head's own state takes the feature's place. P-EAGLE (2602.01469) is an EAGLE-3 whose draft is a chain, where a learnt
feature and a mask token's embedding stand in all drafted columns, so that these are read at once. EAGLE-1 states go
through the target's lm_head; EAGLE-3 has a norm and an lm_head of its own, often of fewer tokens, where token i stands
for i + d2t[i].

The head's keys and values are those of observed columns; drafted columns follow them until the next `propose`, which
drops them.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, LlamaConfig

from specdemo.core.protocol import Budget, Progress, Target
from specdemo.core.tree import Draft
from specdemo.methods import expect, knob
from specdemo.methods.base import Head, Recipe
from specdemo.methods.flags import Flags, says, sglang, sglang_chain, vllm_config
from specdemo.methods.grow import grow
from specdemo.methods.heads.choose import Vocabulary, Writing
from specdemo.methods.heads.formats import absolute
from specdemo.methods.heads.formats import eagle as files
from specdemo.methods.heads.formats.eagle import Convention, default_taps
from specdemo.methods.heads.layers import Layer, below, like, linear
from specdemo.methods.heads.network import Network, as_target
from specdemo.methods.heads.runtime import Columns, HeadHistory, Rotary, unrolled_mask, whole_rows
from specdemo.models.checkpoints import Checkpoint, write_checkpoint
from specdemo.models.packed import RMSNorm
from specdemo.training.losses import likeliest, steps_loss

UNROLLED = 4  # steps of EAGLE-3's training-time test
DECAY = 0.8  # weight of a step in the loss, relative to the one before it
TOKENS_WEIGHT = 0.1  # EAGLE-1: weight of the cross-entropy beside the distance of the features


class EagleLayer(Layer):
    """`names` tells which norms it has: the first layer of EAGLE-1 none, that of EAGLE-3 one for each of its inputs."""

    def __init__(self, config: LlamaConfig, index: int, names: Collection[str], window: int = 0) -> None:
        doubled = "hidden_norm.weight" in names
        super().__init__(config, index, names, 2 * config.hidden_size if doubled else 0, (window, True))
        if "input_layernorm.weight" not in names:
            self.input_layernorm = nn.Identity()
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps) if doubled else None

    def read(self, state: Tensor, embedded: Tensor, norm_before_residual: bool, at: Columns) -> Tensor:
        """state [B, S, D], read together with embedded [B, S, D] by EAGLE-3's first layer -> [B, S, D]"""
        if self.hidden_norm is None:
            return self.forward(state, at)
        normed = self.hidden_norm(state)
        x = torch.cat([self.input_layernorm(embedded), normed], -1)
        state = (normed if norm_before_residual else state) + self.self_attn(x, at)
        out: Tensor = state + self.mlp(self.post_attention_layernorm(state))
        return out


class EagleHead(Network):
    """Tensors are named as the authors name them, except that EAGLE-3's `midlayer.` is `layers.0.`.

    `names` tells which of the optional tensors there are. The target's embedding and lm_head stand in for those that
    the head has not got itself; they are no parameters of it.
    """

    d2t: Tensor | None

    def __init__(
        self,
        target: Target,
        config: LlamaConfig,
        convention: Convention,
        names: Collection[str],
        d2t: Tensor | None = None,
    ) -> None:
        super().__init__()
        size, eps, taps = config.hidden_size, config.rms_norm_eps, len(convention.taps)
        self.config = config
        read = 2 * size if convention.eagle1 else taps * target.hidden_size
        drafted = config.vocab_size if d2t is None else len(d2t)
        self.fc = linear(read, size, "fc", names)
        copied = len(convention.windows) != config.num_hidden_layers  # from the config of a whole model
        self.windows = (0,) * config.num_hidden_layers if copied else convention.windows
        self.layers = nn.ModuleList(
            EagleLayer(config, i, below(names, f"layers.{i}."), window) for i, window in enumerate(self.windows)
        )
        self.norm = RMSNorm(size, eps) if "norm.weight" in names else None
        self.lm_head = nn.Linear(size, drafted, bias=False) if "lm_head.weight" in names else None
        self.embed_tokens = nn.Embedding(config.vocab_size, size) if "embed_tokens.weight" in names else None
        self.input_norm = RMSNorm(read, eps) if "input_norm.weight" in names else None
        normed = range(taps if "fc_norm.0.weight" in names else 0)
        self.fc_norm = nn.ModuleList(RMSNorm(target.hidden_size, eps) for _ in normed)
        self.mask_hidden = nn.Parameter(torch.zeros(read)) if files.MASKED in names else None
        self.register_buffer("d2t", d2t)
        self._targets = target.embed, target.lm_head  # a tuple, so that they are not registered
        self._spoken = target.dtype  # that its lm_head reads
        self.convention = convention

    def read_as(self, reading: Convention) -> None:
        self.convention = reading

    def hasten(self) -> "EagleHead":
        for layer in self._layers:
            layer.self_attn.join()
            layer.mlp.join()
        return super().hasten()

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens [B, S] of the target's vocabulary -> [B, S, D]"""
        embedded: Tensor = (self.embed_tokens or self._targets[0])(tokens)
        return embedded.to(self.dtype)

    def features(self, hidden: Tensor) -> Tensor:
        """hidden [B, A, taps H] -> [B, A, D] what stands beside the embedding in observed columns"""
        if self.convention.eagle1:
            return hidden
        if self.fc_norm:
            parts = hidden.chunk(len(self.fc_norm), -1)
            hidden = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        features: Tensor = self.fc(hidden if self.input_norm is None else self.input_norm(hidden))
        return features

    def forward(self, embedded: Tensor, features: Tensor, at: Columns) -> Tensor:
        """embedded and features [B, S, D] -> states [B, S, D]"""
        state = features
        if self.convention.eagle1:
            pair = [features, embedded] if self.convention.feature_first else [embedded, features]
            state = self.fc(torch.cat(pair, -1))
        for layer in self._layers:
            state = layer.read(state, embedded, self.convention.norm_before_residual, at)
        return state

    def logits(self, states: Tensor) -> Tensor:
        """states [..., D] -> [..., W]"""
        normed = states if self.norm is None else self.norm(states)
        logits: Tensor = self.lm_head(normed) if self.lm_head else self._targets[1](normed.to(self._spoken))
        return logits

    def fed_back(self, states: Tensor) -> Tensor:
        """What takes the feature's place below a drafted token."""
        return self.norm(states) if self.convention.norm_output and self.norm is not None else states

    @property
    def _layers(self) -> list[EagleLayer]:
        return cast(list[EagleLayer], self.layers)

    @cached_property
    def words(self) -> Vocabulary:
        return Vocabulary(None if self.d2t is None else absolute(self.d2t), self.config.vocab_size)


def _third(model: str | None) -> str:
    """EAGLE-3, which a server has to be told by name."""
    return "3" if says(model, "eagle3") or says(model, "eagle-3") else ""


def _vllm(model: str | None, k: int, options: Mapping[str, Any]) -> Flags:
    if says(model, "p-eagle"):
        return vllm_config(method="eagle3", model=model, num_speculative_tokens=k, parallel_drafting=True)
    return vllm_config(method=f"eagle{_third(model)}", model=model, num_speculative_tokens=k)


def _sglang(model: str | None, k: int, options: Mapping[str, Any]) -> Flags:
    algorithm = f"EAGLE{_third(model)}"
    if options["draft"] == "chain":
        return sglang_chain(algorithm)(model, k, options)
    return sglang(algorithm, model, num_steps=k, eagle_topk=options["top_k"], num_draft_tokens=options["nodes"] + 1)


class Eagle(Head[EagleHead]):
    title = "EAGLE"
    summary = (
        "A single layer writes ahead from the target's own hidden states, and widens its draft where it is unsure."
    )
    recipes: ClassVar = {
        "eagle-1": Recipe("EAGLE-1", {"kind": "eagle1"}),
        "eagle-3": Recipe("EAGLE-3", {"kind": "eagle3"}),
    }
    serves: ClassVar = {"vllm": _vllm, "sglang": _sglang}
    history: HeadHistory

    @dataclass(frozen=True, slots=True)
    class Options:
        draft: str = knob(
            "tree",
            "tree: the likeliest continuations, grown where the head is sure; chain: one, drawn from the head at a"
            " temperature",
            choices=("tree", "chain"),
        )
        nodes: int = knob(24, "tokens of the draft tree", low=1, high=128, step=1)
        top_k: int = knob(8, "branches of the tree that are followed on every level", low=1, high=32, step=1)

    options: Options

    @classmethod
    def recognises(cls, checkpoint: Checkpoint) -> bool:
        family = checkpoint.config.get("speculators_model_type")
        if family:
            return family in ("eagle", "eagle3", "peagle")
        return checkpoint.has("midlayer.") or "fc.weight" in checkpoint.tensors

    @classmethod
    def read(cls, checkpoint: Checkpoint, target: Target) -> EagleHead:
        expect(checkpoint, "eagle")
        tensors, config, conventions = files.found(checkpoint, target)
        with torch.device("meta"):
            head = EagleHead(target, config, conventions[0], tensors, tensors.get("d2t"))
        head.readings = conventions
        return head.fill(tensors, checkpoint, target, "choose a head of Llama layers")

    def __init__(self, target: Target, model: EagleHead | str, options: Options | None = None) -> None:
        super().__init__(target, model, options)
        head = self.head
        self.taps = tuple(sorted(set(head.convention.taps)))
        self._angles = Rotary(head.config, target.device)
        self.history = HeadHistory(target, len(head.layers), head.dtype, self._angles)

    @classmethod
    def fresh(cls, target: Target, kind: str = "eagle3", intermediate: int = 0, draft_vocab: int = 0) -> EagleHead:
        """kind: eagle3 or eagle1; intermediate 0: the target's; draft_vocab 0: all tokens, else the ids below it."""
        if kind not in ("eagle1", "eagle3"):
            raise ValueError(f"unknown kind {kind!r} of EAGLE head; choose eagle3 or eagle1")
        if kind == "eagle1" and draft_vocab:
            raise ValueError("an EAGLE-1 head speaks through the target's lm_head; leave draft_vocab out")
        config = like(target)
        config.intermediate_size = intermediate or config.intermediate_size
        if kind == "eagle1":
            head = EagleHead(target, config, Convention((-1,)), ())
        else:
            names = {"norm.weight", "lm_head.weight", "layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight"}
            # byte-pair vocabularies are numbered by how often a pair occurred, so the low ids are the common words
            d2t = torch.zeros(draft_vocab, dtype=torch.int64) if 0 < draft_vocab < target.vocab_size else None
            head = EagleHead(target, config, Convention(default_taps(target.num_layers)), names, d2t)
        return as_target(head, target)

    def observe(self, progress: Progress) -> None:
        hidden = self.tapped(progress, self.head.convention.taps)
        self.history.observe(progress.lengths, progress.outputs, hidden)

    def propose(self, budget: Budget) -> Draft:
        depth = min(budget.depth, budget.nodes)
        if depth < 1:
            return Draft.empty(self.history.rows, self.device)
        if self.head.mask_hidden is not None:
            return self.replayed_behind("masks", depth, self._at_once, ahead=depth)
        if self.options.draft == "chain":
            return self.replayed_behind("chain", depth, self._chain, ahead=depth)
        ahead, write = depth * self.options.top_k, partial(self._tree, budget.nodes)
        return self.replayed_behind(("tree", budget.nodes), depth, write, ahead=ahead, tree=True)

    def _root_of(self, at: Columns | None) -> tuple[Tensor, Tensor]:
        """What is fed back [B, 1, D] below the root, and logits [B, W] behind it."""
        if at is not None:
            root = at.last(at.run(self._read, *at.inputs))
            found = self.head.fed_back(root), self.head.logits(root[:, 0])
            if at.written is not None:
                return found  # of a recorded pass, whose memory is its own
            self._root = found
        return self._root

    def _read(self, tokens: Tensor, hidden: Tensor, at: Columns) -> Tensor:
        """What the target said [B, S], and in which states [B, S, taps H] -> states [B, S, D]"""
        states: Tensor = self.head(self.head.embed(tokens), self.head.features(hidden), at)
        return states

    def _onward(self, tokens: Tensor, features: Tensor, at: Columns) -> tuple[Tensor, Tensor]:
        """The head's own tokens [B, S] and states [B, S, D] -> what is fed back [B, S, D], and logits [B, S, W]"""
        states = self.head(self.head.embed(self.head.words.in_target(tokens)), features, at)
        return self.head.fed_back(states), self.head.logits(states)

    def _tree(self, nodes: int, depth: int, at: Columns | None) -> Draft:
        states, logits = self._root_of(at)

        def level(tokens: Tensor, parents: Tensor) -> Tensor:
            """Tokens [B, K], each below a node of the last frontier -> log q [B, K, W] behind them."""
            nonlocal states
            features = states[torch.arange(len(parents), device=self.device)[:, None], parents]
            states, logits = self.history.ahead(parents=parents).run(self._onward, tokens, features)
            return logits.float().log_softmax(-1)

        drafted = grow(logits.float().log_softmax(-1), level, Budget(depth, nodes), self.options.top_k)
        return replace(drafted, tokens=self.head.words.in_target(drafted.tokens))

    def _chain(self, depth: int, at: Columns | None) -> Draft:
        states, logits = self._root_of(at)
        written = Writing(self.choice)

        def read(tokens: Tensor) -> Tensor:
            nonlocal states
            alone = torch.zeros_like(tokens) if any(self.head.windows) else None  # a level's window ends at the root
            states, logits = self.history.ahead(parents=alone).run(self._onward, tokens, states)
            return logits[:, 0]

        written.take(logits[:, None])
        written.follow(read, depth)
        return written.draft(self.head.words)

    def _at_once(self, depth: int, at: Columns | None) -> Draft:
        said = self._root_of(at)[1][:, None]
        if depth > 1:
            masks = torch.full((len(said), depth - 1), self.head.convention.mask or 0, device=self.device)
            said = torch.cat([said, self.history.ahead(depth - 1).run(self._guess, masks)], 1)
        written = Writing(self.choice)
        written.take(said)
        return written.draft(self.head.words)

    def _guess(self, masks: Tensor, at: Columns) -> Tensor:
        """Mask tokens [B, S] -> logits [B, S, W]"""
        head = self.head
        assert head.mask_hidden is not None
        unknown = head.features(head.mask_hidden.expand(*masks.shape, -1))
        return head.logits(head(head.embed(masks), unknown, at))

    def loss(self, batch: Progress) -> tuple[Tensor, dict[str, float]]:
        """EAGLE-1: smooth L1 to the next feature and a tenth of the cross-entropy to the target's distribution.
        EAGLE-3: that cross-entropy alone, over steps that read the states of the step before, as drafts are.

        Where the target's distribution is unknown, the text stands in for it.
        """
        return steps_loss(self._steps(batch), (DECAY**i for i in count()))

    def _steps(self, batch: Progress) -> Iterator[tuple[Tensor, Tensor]]:
        head, last = self.head, batch.outputs.shape[1] - 1
        eagle1 = head.convention.eagle1
        probs = batch.target_probs()
        said = batch.outputs if probs is None else probs
        embedded = head.embed(batch.outputs[:, :last])
        features = head.features(self.tapped(batch, head.convention.taps))[:, :last]
        columns = torch.arange(last, device=said.device)
        cache = DynamicCache()
        alone = eagle1 or head.mask_hidden is not None  # whose drafts read no states of their own
        for step in range(min(1 if alone else UNROLLED, last)):
            at = whole_rows(columns[None, step:], self._angles, last, None, cache)
            if step or any(head.windows):
                at.see = partial(unrolled_mask, columns, step)
            states = head(embedded[:, step:], features, at)
            loss, agreed = _compare(head, states, said[:, step + 1 :])
            if eagle1:
                loss = TOKENS_WEIGHT * loss + F.smooth_l1_loss(states.float(), batch.hidden[-1][:, 1:].float())
            yield loss, agreed
            features = head.fed_back(states)[:, :-1]

    def save(self, folder: Path, target_name: str) -> None:
        head = self.head
        write_checkpoint(folder, *files.written(head.state_dict(), head.config, head.convention, target_name))


def _compare(head: EagleHead, states: Tensor, said: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy and agreement of states [B, S, D] with said, [B, S, V] probabilities or [B, S] tokens.

    As far as the head has the tokens: the distribution is cut to them, and where the likeliest is missing, left out.
    """
    logits = head.logits(states).float().flatten(0, 1)
    said, ids = said.flatten(0, 1), head.words.ids
    best = likeliest(said)
    agreed = (head.words.in_target(logits.argmax(-1)) == best).float().mean()
    if ids is None:
        return F.cross_entropy(logits, said), agreed
    place = torch.full((head.config.vocab_size,), -1, device=best.device)
    place[ids] = torch.arange(len(ids), device=best.device)
    known = place[best] >= 0
    if said.is_floating_point():
        kept = said[:, ids]
        wanted = kept / kept.sum(-1, keepdim=True).clamp_min(1e-9)
    else:
        wanted = place[best].clamp_min(0)
    losses = F.cross_entropy(logits, wanted, reduction="none")
    return (losses * known).sum() / known.sum().clamp_min(1), agreed
