"""EAGLE: one decoder layer of its own goes on in the target's features (Li et al.: EAGLE-1 2401.15077, section 4.1; the
dynamic tree of EAGLE-2 2406.16858, section 4; EAGLE-3 2503.01840, section 3).

B rows, A columns, S queries, C keys, K frontier nodes, N nodes, V vocabulary, W the part of it the head drafts from,
H hidden size of the target, D of the head.

Column a pairs the target's feature there with the embedding of outputs[a]; the head's state in that column foresees
the token after outputs[a]. The feature is tap -1 in EAGLE-1 and fc of three taps in EAGLE-3. Below a drafted token the
head's own state takes the feature's place. EAGLE-1 states go through the target's lm_head; EAGLE-3 has a norm and an
lm_head of its own, often of fewer tokens, where token i stands for i + d2t[i].

The head's keys and values are those of observed columns; drafted columns follow them until the next `propose`, which
drops them.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import functional as F
from transformers import DynamicCache, LlamaConfig

from specdemo.core.protocol import Budget, Progress, Target
from specdemo.core.sampling import Sampling, draw, to_probs
from specdemo.core.tree import Draft
from specdemo.methods import knob
from specdemo.methods.eagle_formats import default_taps, read_head, write_head
from specdemo.methods.eagle_head import Convention, EagleHead, Mask, Rotary
from specdemo.methods.grow import grow
from specdemo.methods.heads import HeadDrafter, as_target, greedy_text
from specdemo.models.cache import SPARE, SlabCache
from specdemo.models.checkpoints import Checkpoint, expect, open_checkpoint
from specdemo.models.hub import LoadProgress, silent

UNROLLED = 4  # steps of EAGLE-3's training-time test
DECAY = 0.8  # weight of a step in the loss, relative to the one before it
TOKENS_WEIGHT = 0.1  # EAGLE-1: weight of the cross-entropy beside the distance of the features


class Eagle(HeadDrafter):
    title = "EAGLE"
    summary = (
        "A single layer writes ahead from the target's own hidden states, and widens its draft where it is unsure."
    )
    needs_model = True

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

    @staticmethod
    def load(source: str, target: Target, progress: LoadProgress | None = None) -> EagleHead:
        """Raises ValueError, one line, for other files and for heads of another target.

        Where the file leaves open how it is to be read, the target writes a short text and the reading whose guesses
        at it are right most often is kept.
        """
        checkpoint = open_checkpoint(source, progress or silent)
        expect(checkpoint, "eagle")
        head, conventions = read_head(checkpoint, target)
        if len(conventions) > 1:
            (progress or silent)(0.9, f"finding out how to read {source}")
            _settle(head, conventions, target)
        return head

    @staticmethod
    def read(checkpoint: Checkpoint, target: Target) -> EagleHead:
        """What `load` makes of a checkpoint that is open, without asking the target's text."""
        expect(checkpoint, "eagle")
        return read_head(checkpoint, target)[0]

    def __init__(self, target: Target, model: Any, options: Options | None = None) -> None:
        self.head: EagleHead = self.load(model, target) if isinstance(model, str) else model
        self.options = options or self.Options()
        self.taps = tuple(sorted(set(self.head.convention.taps)))
        self.note = self.head.note
        self._device = target.device
        self._sampling = Sampling()
        self._rng: Generator | None = None
        self._cache: SlabCache | None = None
        self._angles: Tensor | None = None  # [P, 2, 1, E] cos and signed sin of every position
        self._observed: list[Progress] = []  # not read yet

    @classmethod
    def fresh(cls, target: Target, kind: str = "eagle3", intermediate: int = 0, draft_vocab: int = 0) -> EagleHead:
        """kind: eagle3 or eagle1; intermediate 0: the target's; draft_vocab 0: all tokens, else the ids below it."""
        if kind not in ("eagle1", "eagle3"):
            raise ValueError(f"unknown kind {kind!r} of EAGLE head; choose eagle3 or eagle1")
        if kind == "eagle1" and draft_vocab:
            raise ValueError("an EAGLE-1 head speaks through the target's lm_head; leave draft_vocab out")
        config = _like(target, intermediate)
        if kind == "eagle1":
            head = EagleHead(target, config, Convention((-1,)), frozenset())
        else:
            names = {"norm.weight", "lm_head.weight", "layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight"}
            # byte-pair vocabularies are numbered by how often a pair occurred, so the low ids are the common words
            d2t = torch.zeros(draft_vocab, dtype=torch.int64) if 0 < draft_vocab < target.vocab_size else None
            head = EagleHead(target, config, Convention(default_taps(target.num_layers)), frozenset(names), d2t)
        return as_target(head, target)

    def start(self, batch: int, sampling: Sampling, rng: Generator) -> None:
        self._sampling, self._rng = sampling, None if sampling.greedy else rng
        self._rows = torch.arange(batch, device=self._device)[:, None]
        self._cache = None
        self._observed = []
        self._real = torch.ones(batch, 0, dtype=torch.bool, device=self._device)  # [B, columns]; False: padding
        self._padded = False
        self._count = torch.zeros(batch, 1, dtype=torch.int64, device=self._device)  # real columns

    def release(self) -> None:
        self._cache = None
        self._observed = []

    def observe(self, progress: Progress) -> None:
        # without `forward`, which holds the logits of the whole pass
        self._observed.append(Progress(progress.inputs, progress.outputs, progress.lengths, progress.hidden))

    def propose(self, budget: Budget) -> Draft:
        depth = min(budget.depth, budget.nodes)
        if depth < 1:
            return Draft.empty(len(self._rows), self._device)
        if self._observed:
            self._root = self._catch_up()
        self._states, logits = self._root  # [B, K, D] of the frontier
        if self.options.draft == "chain":
            return self._chain(logits, depth)
        self._above = self._real.new_ones(len(self._rows), 1, 0)  # [B, K, drafted columns] which of them it sees
        drafted = grow(
            _log(logits), lambda tokens, parents: _log(self._ahead(tokens, parents)), budget, self.options.top_k
        )
        return replace(drafted, tokens=self.head.in_target(drafted.tokens))

    def _catch_up(self) -> tuple[Tensor, Tensor]:
        """Read what was observed -> the state [B, 1, D] in every row's last column and its logits [B, W]."""
        outputs = torch.cat([p.outputs for p in self._observed], 1)
        features = torch.cat([self.head.features(p) for p in self._observed], 1)
        whole = all(min(p.lengths) == p.outputs.shape[1] for p in self._observed)
        past, width = self._real.shape[1], outputs.shape[1]
        columns = torch.arange(width, device=self._device)
        if whole:
            real, positions = self._real.new_ones(len(outputs), width), self._count + columns
            self._count = self._count + width
        else:
            real, self._padded = torch.cat([_real(p) for p in self._observed], 1), True
            positions = self._count + real.cumsum(1) - 1
            self._count = self._count + real.sum(1, keepdim=True)
        self._observed = []
        self._real = torch.cat([self._real, real], 1)
        mask: Mask = None
        if self._padded or (past and width > 1):
            mask = real.new_ones(width, past + width).tril(past) & self._real[:, None, None]
        states = self._read(outputs, features, positions, past, mask)
        at_root = states[:, -1:] if whole else states[self._rows, (real * (columns + 1)).argmax(1, keepdim=True)]
        return self.head.fed_back(at_root), self.head.logits(at_root[:, 0])

    def _ahead(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Tokens [B, K] of the head, each below a node of the last frontier -> logits [B, K, W] behind them."""
        width, past = tokens.shape[1], self._real.shape[1] + self._above.shape[2]
        features = self._states[self._rows, parents]
        themselves = torch.eye(width, dtype=torch.bool, device=self._device).expand(len(tokens), -1, -1)
        self._above = torch.cat([self._above[self._rows, parents], themselves], 2)
        mask: Mask = None
        if self._padded or width > 1:
            mask = torch.cat([self._real[:, None].expand(-1, width, -1), self._above], 2)[:, None]
        positions = self._count + self._above.sum(2) - 1
        states = self._read(self.head.in_target(tokens), features, positions, past, mask)
        self._states = self.head.fed_back(states)
        return self.head.logits(states)

    def _read(self, tokens: Tensor, features: Tensor, positions: Tensor, past: int, mask: Mask) -> Tensor:
        """Columns behind the first `past` of the cache, over whatever was there -> states [B, S, D]."""
        batch, width = tokens.shape
        if self._cache is None:
            self._cache = SlabCache(len(self.head.layers), batch, width + SPARE, self._device)
        self._cache.set_lengths([past] * batch)
        self._cache.prepare(width)
        states: Tensor = self.head(
            self.head.embed(tokens), features, self._rotary(positions, past + width), self._cache, mask
        )
        return states

    def _rotary(self, positions: Tensor, columns: int) -> Rotary:
        """At positions [B or 1, S] below `columns`, looked up."""
        if self._angles is None or len(self._angles) < columns:
            every = torch.arange(2 * columns, device=self._device)[None]
            self._angles = torch.stack(self.head.rotary(every), 2)[0]
        cos, sin = self._angles[positions].unbind(2)
        return cos, sin

    def _chain(self, logits: Tensor, depth: int) -> Draft:
        tokens: list[Tensor] = []
        said: list[Tensor] = []  # logits, or what was drawn from
        for level in range(depth):
            if level:
                logits = self._onward(tokens[-1], level)
            said.append(logits if self._rng is None else to_probs(logits, self._sampling))
            tokens.append(draw(said[-1], self._rng)[:, None])
        drafted, q = torch.cat(tokens, 1), torch.stack(said, 1)
        chosen = q.gather(-1, drafted[..., None])[..., 0]
        if self._rng is None:
            return Draft.chain(self.head.in_target(drafted), confidence=(chosen - q.logsumexp(-1)).float().exp())
        return Draft.chain(self.head.in_target(drafted), self.head.spread(q), chosen)

    def _onward(self, tokens: Tensor, level: int) -> Tensor:
        """Tokens [B, 1] of the head, each below the one before it -> logits [B, W] behind them."""
        past = self._real.shape[1] + level - 1
        mask: Mask = None
        if self._padded:
            mask = torch.cat([self._real, self._real.new_ones(len(tokens), level)], 1)[:, None, None]
        positions = self._count + (level - 1)
        states = self._read(self.head.in_target(tokens), self._states, positions, past, mask)
        self._states = self.head.fed_back(states)
        return self.head.logits(states[:, 0])

    def loss(self, batch: Progress) -> tuple[Tensor, dict[str, float]]:
        """EAGLE-1: smooth L1 to the next feature and a tenth of the cross-entropy to the target's distribution.
        EAGLE-3: that cross-entropy alone, over steps that read the states of the step before, as drafts are.

        Where the target's distribution is unknown, the text stands in for it.
        """
        head, last = self.head, batch.outputs.shape[1] - 1
        probs = batch.target_probs()
        said = batch.outputs if probs is None else probs
        embedded = head.embed(batch.outputs[:, :last])
        features = head.features(batch)[:, :last]
        columns = torch.arange(last, device=said.device)
        cache = DynamicCache()
        total = embedded.new_zeros(())
        metrics: dict[str, float] = {}
        for step in range(min(1 if head.eagle1 else UNROLLED, last)):
            mask = unrolled_mask(columns, step) if step else None
            states = head(embedded[:, step:], features, head.rotary(columns[None, step:]), cache, mask)
            loss, agreed = _compare(head, states, said[:, step + 1 :])
            if head.eagle1:
                loss = TOKENS_WEIGHT * loss + F.smooth_l1_loss(states.float(), batch.hidden[-1][:, 1:].float())
            total = total + DECAY**step * loss
            metrics[f"agree_{step + 1}"] = agreed
            features = head.fed_back(states)[:, :-1]
        return total, metrics

    def save(self, folder: Path, target_name: str) -> None:
        write_head(folder, self.head, target_name)


def _log(logits: Tensor) -> Tensor:
    return logits.float().log_softmax(-1)


def _real(progress: Progress) -> Tensor:
    """[B, A] False where a column is padding"""
    device = progress.outputs.device
    lengths = torch.tensor(progress.lengths, device=device)[:, None]
    return torch.arange(progress.outputs.shape[1], device=device) < lengths


def unrolled_mask(columns: Tensor, step: int) -> Tensor:
    """The mask [1, 1, S, C] of unrolled step `step` (from 0): columns [A] from `step` on, keys of all steps in turn.

    A draft of `step` tokens ends in column a: what is before it are observed columns, of step 0; of each later step
    it sees the one column that is its own ancestor, and itself.
    """
    queries = columns[step:, None]
    seen = [columns <= queries - step]
    seen += [columns[i:] == queries - step + i for i in range(1, step + 1)]
    return torch.cat(seen, 1)[None, None]


def _compare(head: EagleHead, states: Tensor, said: Tensor) -> tuple[Tensor, float]:
    """Cross-entropy and agreement of states [B, S, D] with said, [B, S, V] probabilities or [B, S] tokens.

    As far as the head has the tokens: the distribution is cut to them, and where the likeliest is missing, left out.
    """
    logits = head.logits(states).float().flatten(0, 1)
    said = said.flatten(0, 1)
    best = said.argmax(-1) if said.is_floating_point() else said
    agreed = float((head.in_target(logits.argmax(-1)) == best).float().mean())
    if head.tokens is None:
        return F.cross_entropy(logits, said), agreed
    place = torch.full((head.config.vocab_size,), -1, device=best.device)
    place[head.tokens] = torch.arange(len(head.tokens), device=best.device)
    known = place[best] >= 0
    if said.is_floating_point():
        kept = said[:, head.tokens]
        wanted = kept / kept.sum(-1, keepdim=True).clamp_min(1e-9)
    else:
        wanted = place[best].clamp_min(0)
    losses = F.cross_entropy(logits, wanted, reduction="none")
    return (losses * known).sum() / known.sum().clamp_min(1), agreed


def _like(target: Target, intermediate: int) -> LlamaConfig:
    """A layer of the target's sizes, with RoPE as the authors' heads have it."""
    model = getattr(target, "model", None)
    theirs = None if model is None else model.config.get_text_config(decoder=True)
    heads = getattr(theirs, "num_attention_heads", None) or max(1, target.hidden_size // 64)
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=intermediate or getattr(theirs, "intermediate_size", None) or 4 * target.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=getattr(theirs, "num_key_value_heads", None) or heads,
        head_dim=getattr(theirs, "head_dim", None) or target.hidden_size // heads,
        max_position_embeddings=target.max_length,
    )


@torch.no_grad()
def _settle(head: EagleHead, conventions: tuple[Convention, ...], target: Target) -> None:
    """Keep the convention by which the head guesses a text of the target best, and note it."""
    text = greedy_text(target)
    taps = tuple(sorted({tap for convention in conventions for tap in convention.taps}))
    hidden = target.start(text[:, :-1], taps).hidden
    target.release()
    progress = Progress(text[:, :-1], text[:, 1:], [text.shape[1] - 1], hidden)
    found = []
    for convention in conventions:
        head.convention = convention
        metrics = Eagle(target, head).loss(progress)[1]
        found.append(sum(metrics.values()) / len(metrics))
    best = max(range(len(found)), key=found.__getitem__)
    head.convention = conventions[best]
    shares = "; ".join(f"{100 * share:.0f} % right by {way}" for share, way in zip(found, conventions, strict=True))
    head.note = f"Read by {head.convention}, since of the guesses at a short text were {shares}."
