"""Lookahead decoding: the target generates n-grams in parallel with verification (Fu et al. 2402.02057, sections 3.1
to 3.3).

B rows, W window columns, N tokens per n-gram, G n-grams per first token. Every draft is one tree with two kinds of
nodes. N-grams: those in the pool that begin with the root. The window: a chain of W tokens below the root, with a
column of N - 1 tokens below each, the state of Jacobi iteration at the following positions. The target's argmax at the
end of a column is appended to it. A full column becomes an n-gram of the pool and drops its oldest token. Window nodes
can be accepted as well. Nothing is sampled, so probs is None.
"""

from dataclasses import dataclass, field

from torch import Generator

from specdemo.core.host_copy import padded
from specdemo.core.protocol import Budget, Progress, Target
from specdemo.core.sampling import Sampling
from specdemo.core.tree import ABSENT, Draft
from specdemo.methods import BaseOptions, setting
from specdemo.methods.base import Method

Gram = tuple[int, ...]


class _TreeBuilder:
    """Builds the tree of one row. Equal siblings share a node."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._slots: dict[tuple[int, int], int] = {}

    def add(self, parent: int, token: int) -> int:
        """Add a token below a parent slot; return its slot."""
        slot = self._slots.setdefault((parent, token), len(self.tokens) + 1)
        if slot > len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
        return slot


@dataclass(slots=True)
class _WindowRow:
    root: int
    columns: list[list[int]]  # the window
    pool: dict[int, dict[Gram, None]] = field(default_factory=dict)  # first token -> other tokens, newest last
    end_slots: list[int] = field(default_factory=list)  # last slot of every column in the last draft

    def advance(self, argmax_ids: list[int], height: int, guesses: int) -> None:
        """Advance the window. argmax_ids [S]: the target's argmax at every slot of the last draft."""
        for column, slot in zip(
            self.columns, self.end_slots, strict=False
        ):  # a small budget includes only some columns
            column.append(argmax_ids[slot])
            if len(column) > height:
                first = column.pop(0)
                grams = self.pool.setdefault(first, {})
                grams.pop(tuple(column), None)
                grams[tuple(column)] = None
                if len(grams) > guesses:
                    del grams[next(iter(grams))]


class LookaheadOptions(BaseOptions):
    window: int = setting(7, "columns of the window; fewer if k is too small", low=1, high=32, step=1)
    ngram: int = setting(5, "tokens of an n-gram; fewer if k is too small", low=2, high=8, step=1)
    guesses: int = setting(7, "n-grams stored and verified per first token", low=1, high=32, step=1)
    nodes: int = setting(
        56, "total nodes: (window + guesses) * (ngram - 1); with fewer, both shrink", low=2, high=128, step=1
    )


class Lookahead(Method, method="lookahead", tree=lambda options: options.nodes):
    summary = "The target generates n-grams in the same pass that verifies earlier ones; needs no draft model."

    Options = LookaheadOptions

    def __init__(self, target: Target, model: object = None, options: LookaheadOptions | None = None) -> None:
        self._options = options or self.Options()
        self._supports_trees = target.capabilities.trees
        self._device = target.device

    def start(self, batch: int, sampling: Sampling, rng: Generator) -> None:
        self._rows: list[_WindowRow] = []
        self._height = self._nodes = 0  # column height and node count of the last draft

    def observe(self, progress: Progress) -> None:
        outputs = progress.output_ids()
        if not self._rows:
            # the initial window is arbitrary; use the end of the prompt
            for prompt, next_ids in zip(progress.inputs.tolist(), outputs, strict=True):
                columns = [[prompt[-1 - i % len(prompt)]] for i in reversed(range(self._options.window))]
                self._rows.append(_WindowRow(next_ids[-1], columns))
            return
        argmax_ids: list[list[int]] = []
        if progress.forward is not None and progress.forward.logits.shape[1] == self._nodes + 1:
            argmax_ids = progress.forward.logits.argmax(-1).tolist()
        for b, (row, length) in enumerate(zip(self._rows, progress.lengths, strict=True)):
            if length:
                row.root = outputs[b][length - 1]
                if argmax_ids:
                    row.advance(argmax_ids[b], self._height, self._options.guesses)

    def propose(self, budget: Budget) -> Draft:
        if budget.chain < 1:
            self._nodes = -1  # no window in this draft
            return Draft.empty(len(self._rows), self._device)
        trees = [self._build_tree(row, budget) for row in self._rows]
        tokens = padded([tree.tokens for tree in trees], self._device, ABSENT)
        self._nodes = tokens.shape[1]
        if not self._supports_trees:
            return Draft.chain(tokens)
        return Draft(tokens, padded([tree.parents for tree in trees], self._device, 0))

    def _build_tree(self, row: _WindowRow, budget: Budget) -> _TreeBuilder:
        tree = _TreeBuilder()
        columns = self._set_window_size(budget)
        grams = [gram[: budget.depth] for gram in reversed(row.pool.get(row.root, {}))]
        if not self._supports_trees:  # draft a chain, or the loop would cut the tree and renumber its slots
            grams, columns = grams[:1], 0 if grams else 1
        room = budget.nodes - columns * self._height
        for gram in grams:
            slot = 0
            for token in gram:
                if len(tree.tokens) < room:
                    slot = tree.add(slot, token)
        row.end_slots = []
        slot = 0
        for column in row.columns[:columns]:
            del column[: -self._height]
            slot = end_slot = tree.add(slot, column[0])
            for token in column[1:]:
                end_slot = tree.add(end_slot, token)
            row.end_slots.append(end_slot)
        return tree

    def _set_window_size(self, budget: Budget) -> int:
        """Set the column height and return the number of columns that fit. A small depth is split evenly."""
        options = self._options
        self._height = min(options.ngram - 1, (budget.depth + 1) // 2, (budget.nodes + 1) // 2)
        share = options.window / (options.window + options.guesses)
        max_columns = int(share * (budget.nodes // self._height))
        return max(1, min(options.window, budget.depth - self._height + 1, max_columns))
