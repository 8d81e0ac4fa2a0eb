"""Drafts of the prediction layer of a GGUF file, on llama.cpp. In PyTorch the same layers are `heads/mtp.py`.

B rows, A columns, V vocabulary, H hidden size. A pair is a token and the target's state after the token before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy
import torch
from torch import Generator

from specdemo.core.protocol import Budget, Progress, Target
from specdemo.core.sampling import Sampling
from specdemo.core.tree import Draft
from specdemo.methods.base import DraftOptions, Method
from specdemo.methods.heads.sampler import ChainBuilder, TokenSampler
from specdemo.models.llamacpp import BATCH_TOKENS
from specdemo.models.llamacpp_context import OUTPUT_TAP, Inputs
from specdemo.models.llamacpp_layers import Values
from specdemo.models.llamacpp_prediction import PredictionContext, PredictionLayer

AT_ONCE = 16  # pairs of a row that a draft begins with; a prompt has more


@dataclass(slots=True)
class _PairQueue:
    """Pairs of one row: the number that the layer has read, and the others. The last one stays, to draft from again."""

    read: int = 0
    tokens: list[int] = field(default_factory=list)
    states: list[Values] = field(default_factory=list)


class NextN(Method, method="mtp"):
    """Drafter of chains. The first token comes from the pairs of all committed tokens, each further one from the last
    draft token and the layer's own state."""

    summary = "A layer trained together with the target drafts from its last hidden state, one token after the other."
    needs_model = True
    requires: ClassVar = frozenset({"hidden_states"})
    Options = DraftOptions
    taps = (OUTPUT_TAP,)

    def __init__(self, target: Target, model: PredictionLayer, options: DraftOptions | None = None) -> None:
        self._target, self._layer = target, model
        self.options = options or DraftOptions()
        self.sampler = TokenSampler()
        self._context: PredictionContext | None = None
        self._rows: list[_PairQueue] = []

    @property
    def weight_bytes(self) -> int:
        """Return the size of the weights that the target does not use."""
        return self._layer.weight_bytes

    @property
    def history_bytes(self) -> int:
        return self._context.cells * self._layer.token_bytes if self._context else 0

    def start(self, batch: int, sampling: Sampling, rng: Generator) -> None:
        self.sampler = TokenSampler(sampling, rng)
        self._rows = [_PairQueue() for _ in range(batch)]

    def release(self) -> None:
        self._rows = []
        if self._context is not None:
            self._context.clear()

    def observe(self, progress: Progress) -> None:
        """Keep the pairs of new tokens, and read those of a prompt, all but the last."""
        hidden = progress.hidden[OUTPUT_TAP].numpy()
        for number, (row, tokens) in enumerate(zip(self._rows, progress.output_ids(), strict=True)):
            row.tokens += tokens
            row.states += [*hidden[number, : len(tokens)]]
        most = BATCH_TOKENS // len(self._rows)
        while any(len(row.tokens) > min(AT_ONCE, most) for row in self._rows):
            self._open_context().skip(*self._unread([min(len(row.tokens) - 1, most) for row in self._rows]))

    def propose(self, budget: Budget) -> Draft:
        depth = budget.chain
        if depth < 1:
            return Draft.empty(len(self._rows), self._target.device)
        builder = ChainBuilder(self.sampler, enough=budget.enough)
        ends = [row.read + len(row.tokens) for row in self._rows]
        kept = [(row.tokens[-1], row.states[-1]) for row in self._rows]
        last = numpy.cumsum([len(row.tokens) for row in self._rows]) - 1
        logits, states = (each[last] for each in self._open_context().read(*self._unread()))
        for row, (token, state) in zip(self._rows, kept, strict=True):
            row.read, row.tokens, row.states = row.read - 1, [token], [state]
        tokens = builder.append(torch.from_numpy(logits)[:, None])
        while len(builder) < depth and not builder.ended:
            ends = [end + 1 for end in ends]
            inputs = Inputs(tokens[:, 0].tolist(), ends, [(number,) for number in range(len(ends))])
            logits, states = self._open_context().read(inputs, states)
            tokens = builder.append(torch.from_numpy(logits)[:, None])
        return builder.build()

    def _unread(self, counts: Sequence[int] | None = None) -> tuple[Inputs, Values]:
        """Return pairs of every row that the layer is to read next, in place of its last draft. counts: None: all."""
        columns, states = [], []
        for number, row in enumerate(self._rows):
            count = len(row.tokens) if counts is None else counts[number]
            self._open_context().remove(number, row.read + 1)
            columns.append(Inputs.of_text(row.tokens[:count], row.read + 1, number))
            states += row.states[:count]
            row.read += count
            del row.tokens[:count], row.states[:count]
        inputs = Inputs(*([x for part in column for x in part] for column in zip(*columns, strict=True)))
        return inputs, numpy.stack(states)

    def _open_context(self) -> PredictionContext:
        """Return a context with as much room as the target's."""
        cells, rows = self._target.capacity, len(self._rows)
        if self._context is None or self._context.cells < cells or self._context.sequences != rows:
            self._context = None  # before the next one is allocated
            self._context = PredictionContext(self._layer, cells, rows)
        return self._context
