"""Multi-token prediction: decoder layers that were trained with the target go on where it stops (DeepSeek-V3
2412.19437, section 2.2; Gloeckle et al. 2404.19737).

B rows, A columns, S columns of a pass, D modules or heads, V vocabulary, H hidden. Column a is the target's state there
and outputs[a], the token that follows. Step i says the token i + 1 places behind outputs[a]: module i, which reads the
state of module i - 1 and the token before; or head i, which reads the trunk alone. A single module is applied again and
again, and trained so (FastMTP 2509.18362).

Keys and values are those of observed columns. Of these the last D are read anew by every `propose`, since there modules
have seen tokens that were only drafted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache
from transformers.cache_utils import Cache

from specdemo.core.protocol import Budget, Forward, Progress, Target
from specdemo.core.sampling import Sampling, draw, to_probs
from specdemo.core.tree import Draft, chain_parents
from specdemo.methods.eagle import unrolled_mask
from specdemo.methods.heads import HeadDrafter, as_target, greedy_text, likeliest
from specdemo.methods.mtp_formats import heads_in, read_heads, write_heads
from specdemo.methods.mtp_heads import Convention, Heads, ParallelHeads, SequentialModules
from specdemo.models.cache import SPARE, SlabCache
from specdemo.models.checkpoints import Checkpoint
from specdemo.models.history import AttentionMask, GatherHistory
from specdemo.models.hub import LoadProgress, silent
from specdemo.models.masks import Masks

Chosen = tuple[Tensor, ...]  # of n steps: tokens [B, n], confidence [B, n] and, when they were drawn, probs [B, n, V]


class MTP(HeadDrafter):
    title = "Multi-token prediction"
    summary = "Layers that were trained together with the target carry on from its last state, a word at a time."
    needs_model = True

    @dataclass(frozen=True, slots=True)
    class Options:
        pass

    @staticmethod
    def load(source: str, target: Target, progress: LoadProgress | None = None) -> Heads:
        """Raises ValueError, one line, for other files and for heads of another target.

        Where the file leaves open how states are read, the target writes a short text and the convention whose guesses
        at it are right most often is kept.
        """
        heads, conventions = read_heads(source, target, progress or silent)
        if isinstance(heads, SequentialModules) and len(conventions) > 1:
            (progress or silent)(0.9, f"finding out how to read {source}")
            _settle(heads, conventions, target)
        heads.hasten()
        return heads

    @staticmethod
    def read(checkpoint: Checkpoint, target: Target) -> Heads:
        """What `load` makes of a checkpoint that is open, without asking the target's text."""
        return heads_in(checkpoint, target)[0]

    def __init__(self, target: Target, model: Any, options: Options | None = None) -> None:
        self.head: Heads = self.load(model, target) if isinstance(model, str) else model
        self.taps = (self.head.tap,)
        self.note = self.head.note
        self._device, self._limit = target.device, target.max_length
        self._repeats = isinstance(self.head, SequentialModules) and len(self.head) == 1
        self._provisional = len(self.head) if isinstance(self.head, SequentialModules) else 1
        self._sampling = Sampling()
        self._rng: Generator | None = None
        self._cache: SlabCache | None = None
        self._columns: list[tuple[Tensor, Tensor]] = []  # per row those to read: hidden [S, H], what follows each [S]

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

    def start(self, batch: int, sampling: Sampling, rng: Generator) -> None:
        self._sampling, self._rng = sampling, None if sampling.greedy else rng
        self._masks = Masks((0,), self.head.dtype, self._device)
        self._cache = None
        hidden = torch.empty(0, self.head.config.hidden_size, dtype=self.head.dtype, device=self._device)
        self._columns = [(hidden, torch.empty(0, dtype=torch.int64, device=self._device))] * batch

    def release(self) -> None:
        self._cache = None
        self._columns = []

    def observe(self, progress: Progress) -> None:
        hidden = progress.hidden[self.taps[0]].to(self.head.dtype)
        new = [(hidden[row, :n], progress.outputs[row, :n]) for row, n in enumerate(progress.lengths)]
        waiting = zip(self._columns, new, strict=True)
        self._columns = [(torch.cat([h, more]), torch.cat([t, after])) for (h, t), (more, after) in waiting]

    def propose(self, budget: Budget) -> Draft:
        depth = min(budget.depth, budget.nodes)
        if not self._repeats:
            depth = min(depth, len(self.head))
        if depth < 1:
            return Draft.empty(len(self._columns), self._device)
        chosen = self._write(depth)
        tokens, confidence, *q = (torch.cat(column, 1) for column in zip(*chosen, strict=True))
        return Draft.chain(tokens, q[0] if q else None, confidence)

    def _write(self, depth: int) -> list[Chosen]:
        """Read the columns that wait and then what was drafted; of all this only settled columns stay in the cache."""
        lengths = [len(tokens) for _, tokens in self._columns]
        hidden, tokens = (pad_sequence(list(column), batch_first=True) for column in zip(*self._columns, strict=True))
        batch, width = tokens.shape
        ends = torch.tensor(lengths, device=self._device) - 1
        chosen: list[Chosen] = []
        if self._cache is None:
            self._cache = SlabCache(self.head.slabs, batch, width + SPARE, self._device)
            history, before = self._history(chosen, depth, hidden, ends), [0] * batch
            state = history.start(tokens, ()).logits
            history.crop(lengths)
        else:
            history = self._history(chosen, depth, hidden, ends)
            before = history.lengths
            state = history.forward(tokens, chain_parents(batch, width - 1, self._device), ()).logits
            history.commit([list(range(n)) for n in lengths])
        while self._repeats and len(chosen) < depth:
            history = self._history(chosen, depth, state, torch.zeros_like(ends))
            state = history.forward(chosen[-1][0], chain_parents(batch, 0, self._device), ()).logits
            history.commit([[0]] * batch)
        settled = [max(n - self._provisional, 0) for n in lengths]
        history.crop([old + n for old, n in zip(before, settled, strict=True)])
        self._columns = [(h[n:], t[n:]) for (h, t), n in zip(self._columns, settled, strict=True)]
        return chosen

    def _history(self, chosen: list[Chosen], depth: int, hidden: Tensor, ends: Tensor) -> GatherHistory:
        """The cache behind a pass over hidden [B, S, H]."""
        assert self._cache is not None
        run = partial(self._pass, chosen, depth, hidden, ends)
        return GatherHistory(run, self._cache, {"all": 0}, self._masks, self._limit)

    def _pass(
        self,
        chosen: list[Chosen],
        depth: int,
        hidden: Tensor,
        ends: Tensor,
        tokens: Tensor,
        cache: Cache,
        positions: Tensor | None = None,
        mask: AttentionMask = None,
        taps: tuple[int, ...] = (),
        last: bool = False,
    ) -> Forward:
        """A `history.Pass` of all steps that chooses a token after each, behind the column `ends` [B] of every row.

        The hidden state [B, 1, H] that a next step would read there comes as `logits`; parallel heads have none.
        """
        assert positions is not None and not isinstance(mask, dict)
        rows, width = torch.arange(len(tokens), device=tokens.device), tokens.shape[1]
        if isinstance(self.head, ParallelHeads):
            states = self.head.ahead(hidden, ends, depth, positions, mask, cache)
            chosen += [self._choose(self.head.logits(states))]
            return Forward(states)
        ahead = F.pad(tokens, (0, len(self.head)))
        for i in range(len(self.head)):
            state, hidden = self.head.step(i, hidden, ahead[:, i : i + width], positions, mask, cache)
            if len(chosen) < depth:
                chosen.append(self._choose(self.head.logits(state[rows, ends][:, None])))
                ahead[rows, ends + 1 + i] = chosen[-1][0][:, 0]
        return Forward(hidden[rows, ends][:, None])

    def _choose(self, logits: Tensor) -> Chosen:
        """logits [B, n, V] of steps that follow each other"""
        probs = logits.float().softmax(-1) if self._rng is None else to_probs(logits, self._sampling)
        tokens = draw(probs, self._rng)
        confidence = probs.gather(-1, tokens[..., None])[..., 0]
        return (tokens, confidence) if self._rng is None else (tokens, confidence, probs)

    def loss(self, batch: Progress) -> tuple[Tensor, dict[str, float]]:
        """Cross-entropy to the target's distribution (to the text where it is unknown), steps by `head.weights`.

        With several steps the logits of each are worked out again for its gradient, so that never two are kept.
        """
        total = batch.hidden[self.taps[0]].new_zeros(())
        metrics: dict[str, float] = {}
        for i, (weight, (state, wanted)) in enumerate(
            zip(self.head.weights, self._taught(batch), strict=False), start=1
        ):
            loss, agreed = checkpoint(self._compare, state, wanted, use_reentrant=False)
            total = total + weight * loss
            metrics[f"agree_{i}"] = float(agreed)
        return total, metrics

    def _taught(self, batch: Progress) -> Iterator[tuple[Tensor, Tensor]]:
        """Per step i its states [B, A - 1 - i, H] and what the target says there, probabilities or else tokens.

        A single module's steps follow each other as in a draft: each sees the observed columns of the first step and
        its own ancestors.
        """
        probs = batch.target_probs()
        said = batch.outputs if probs is None else probs
        hidden = batch.hidden[self.taps[0]][:, :-1].to(self.head.dtype)
        columns = torch.arange(hidden.shape[1], device=hidden.device)
        cache = DynamicCache() if self._repeats else None
        for i in range(min(len(self.head.weights), len(columns))):
            mask = unrolled_mask(columns, i) if self._repeats and i else None
            state, hidden = self.head.step(i, hidden, batch.outputs[:, i:-1], columns[None, i:], mask, cache)
            yield state, said[:, i + 1 :]
            hidden = hidden[:, :-1]

    def _compare(self, state: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head.logits(state).float()
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1))
        return loss, (logits.argmax(-1) == likeliest(wanted)).float().mean()

    def save(self, folder: Path, target_name: str) -> None:
        write_heads(folder, self.head, target_name)


@torch.no_grad()
def _settle(heads: SequentialModules, conventions: tuple[Convention, ...], target: Target) -> None:
    """Keep the convention by which the modules guess a text of the target best, and note it."""
    text = greedy_text(target)
    hidden = target.start(text[:, :-1], (-1, target.num_layers)).hidden
    target.release()
    progress = Progress(text[:, :-1], text[:, 1:], [text.shape[1] - 1], hidden)
    found = {}
    for convention in conventions:
        heads.convention = convention
        metrics = MTP(target, heads).loss(progress)[1]
        found[convention] = sum(metrics.values()) / len(metrics)
    heads.convention = max(found, key=found.__getitem__)
    shares = "; ".join(f"{share:.0%} right with {convention}" for convention, share in found.items())
    heads.note = f"It takes {heads.convention}, since of its guesses at a short text were {shares}."
