"""Suffix decoding: drafts the most frequent continuations of the text's suffixes (Oliaro et al. 2411.04975).

B rows, N draft nodes. There are up to three suffix trees: one over the row's prompt and output, with a corpus one over
it, and with option `remember` one over earlier answers of the same model. A matching suffix of n tokens may draft
max_spec_factor * n + max_spec_offset tokens. The suffix whose draft has the most expected tokens is used. Nothing is
sampled, so probs is None.
"""

from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush, nlargest
from itertools import count
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Generator, nn

from specdemo.core.host_copy import padded
from specdemo.core.protocol import Budget, Progress, Target
from specdemo.core.sampling import Sampling
from specdemo.core.tree import ABSENT, Draft
from specdemo.methods import setting
from specdemo.methods.base import LookupOptions, Method, corpus_ids

MAX_ANSWERS = 256  # answers per model; the oldest is dropped first
MIN_ANSWER_TOKENS = 16  # tokens of an answer to store; a lane's warm-up is shorter, so its text is not stored


class _SuffixNode:
    """A token sequence that occurred `count` times, including at the end of the text.

    After one occurrence no children are stored: they are read from the text, which may still grow.
    """

    __slots__ = ("_children", "_position", "_text", "count")

    def __init__(self, text: list[int], position: int) -> None:
        self.count = 1
        self._children: dict[int, _SuffixNode] = {}
        self._text = text
        self._position = position  # position of the next token

    @property
    def children(self) -> dict[int, "_SuffixNode"]:
        if self._position < len(self._text):
            self._children[self._text[self._position]] = _SuffixNode(self._text, self._position + 1)
            self._text, self._position = [], 0
        return self._children


@dataclass(slots=True)
class _GrowingText:
    """A growing text, and the nodes of its suffixes that occur elsewhere in a tree, longest first."""

    ids: list[int] = field(default_factory=list)
    endings: list[_SuffixNode] = field(default_factory=list)


class _SuffixTree:
    """Counts of all sequences of up to `depth` tokens of some texts."""

    def __init__(self, depth: int) -> None:
        self._root = _SuffixNode([], 0)
        self._depth = depth

    def extend(self, text: _GrowingText, token: int) -> None:
        """Append a token to a text of this tree."""
        text.ids.append(token)
        matched = []
        for node in (*text.endings[-self._depth + 1 :], self._root):
            child = node.children.get(token)
            if child is None:
                node.children[token] = _SuffixNode(text.ids, len(text.ids))
            else:
                child.count += 1
                matched.append(child)
        text.endings = matched

    def follow(self, endings: list[_SuffixNode], token: int) -> list[_SuffixNode]:
        """Advance the suffix nodes by one token of a text outside this tree."""
        steps = (node.children.get(token) for node in (*endings[-self._depth + 1 :], self._root))
        return [child for child in steps if child is not None]

    def add(self, ids: list[int]) -> list[int]:
        """Append a whole text. Return the copy to which the tree refers."""
        text = _GrowingText()
        for token in ids:
            self.extend(text, token)
        return text.ids

    def remove(self, ids: list[int]) -> None:
        for start in range(len(ids)):
            node = self._root
            for token in ids[start : start + self._depth]:
                child = node.children[token]
                child.count -= 1
                if not child.count:
                    del node.children[token]
                    break
                node = child


class _AnswerMemory:
    """The last MAX_ANSWERS answers of one model."""

    # by depth and the model's embedding module, which all its targets share, so that a memory is freed with its model
    of_models: ClassVar[WeakKeyDictionary[nn.Module, dict[int, "_AnswerMemory"]]] = WeakKeyDictionary()

    def __init__(self, depth: int) -> None:
        self.tree = _SuffixTree(depth)
        self._answers: deque[list[int]] = deque()

    def add(self, ids: list[int]) -> None:
        self._answers.append(self.tree.add(ids))
        if len(self._answers) > MAX_ANSWERS:
            self.tree.remove(self._answers.popleft())


@dataclass(slots=True)
class _SuffixRow:
    tree: _SuffixTree
    text: _GrowingText = field(default_factory=_GrowingText)
    endings: dict[_SuffixTree, list[_SuffixNode]] = field(default_factory=dict)  # like text.endings, in other trees
    prompt: int = 0  # prompt tokens


@dataclass(slots=True)
class _Candidate:
    """A candidate draft: parents are slots, `probs` are conditional on the parent, `score` the expected tokens."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)
    score: float = 0.0


class SuffixOptions(LookupOptions):
    max_depth: int = setting(24, "longest counted sequence, match plus draft, in tokens", low=2, high=64, step=1)
    max_spec_factor: float = setting(1.0, "draft tokens per matched token", low=0.0, high=8.0, step=0.25)
    max_spec_offset: float = setting(0.0, "draft tokens added for every match", low=0.0, high=16.0, step=0.5)
    min_token_prob: float = setting(0.1, "stop below this path probability", low=0.0, high=1.0, step=0.05)
    nodes: int = setting(0, "nodes of the draft tree; 0 drafts a chain", low=0, high=64, step=1)
    remember: bool = setting(
        False,
        "also draft from earlier answers of this model in this process; a repeated prompt is answered faster, and "
        "users of the same process may see traces of each other's text",
    )


class Suffix(Method, method="suffix", tree=lambda options: options.nodes or None):
    looks_up = True
    summary = "Drafts the most frequent continuation of the text's suffix; a longer match gives a longer draft."
    chooses_length = True  # by the length of the match

    Options = SuffixOptions

    def __init__(self, target: Target, model: object = None, options: SuffixOptions | None = None) -> None:
        self._options = options or self.Options()
        self._device = target.device
        self._rows: list[_SuffixRow] = []
        self._memory: _AnswerMemory | None = None
        self._corpus_ids = corpus_ids(self._options, target)
        if self._options.remember:
            depth = self._options.max_depth
            self._memory = _AnswerMemory.of_models.setdefault(target.embed, {}).setdefault(depth, _AnswerMemory(depth))

    def start(self, batch: int, sampling: Sampling, rng: Generator) -> None:
        self._others = [self._memory.tree] if self._memory is not None else []
        if self._corpus_ids:
            corpus = _SuffixTree(self._options.max_depth)
            corpus.add(self._corpus_ids)  # here, so that the lane's clock counts it
            self._others.insert(0, corpus)
        self._rows = [_SuffixRow(_SuffixTree(self._options.max_depth)) for _ in range(batch)]

    def release(self) -> None:
        """Store the answers in the memory, including those of cancelled generations."""
        if self._memory is not None:
            for row in self._rows:
                if len(row.text.ids) - row.prompt >= MIN_ANSWER_TOKENS:
                    self._memory.add(row.text.ids[row.prompt :])
        self._rows = []

    def observe(self, progress: Progress) -> None:
        if not self._rows[0].text.ids:
            for row, first, length in zip(self._rows, progress.inputs[:, :1].tolist(), progress.lengths, strict=True):
                row.prompt = length
                self._append(row, first)
        for row, new_ids in zip(self._rows, progress.output_ids(), strict=True):
            self._append(row, new_ids)

    def _append(self, row: _SuffixRow, tokens: list[int]) -> None:
        for token in tokens:
            row.tree.extend(row.text, token)
            for tree in self._others:
                row.endings[tree] = tree.follow(row.endings.get(tree, []), token)

    def propose(self, budget: Budget) -> Draft:
        candidates = [self._best(row, budget) for row in self._rows]
        tokens = padded([f.tokens for f in candidates], self._device, ABSENT)
        confidence = padded([f.probs for f in candidates], self._device, 0.0, torch.float32)
        if not self._options.nodes:
            return Draft.chain(tokens, confidence=confidence)
        return Draft(tokens, padded([f.parents for f in candidates], self._device, 0), confidence=confidence)

    def _best(self, row: _SuffixRow, budget: Budget) -> _Candidate:
        """Return the best candidate. Ties go to the longer match, and to the row's own text before other texts."""
        options = self._options
        best = _Candidate()
        for endings in (row.text.endings, *row.endings.values()):
            for length, node in zip(range(len(endings), 0, -1), endings, strict=True):
                max_tokens = int(options.max_spec_factor * length + options.max_spec_offset)
                depth = min(budget.depth, options.max_depth - length)
                if max_tokens <= best.score:
                    break  # shorter matches cannot score higher
                candidate = self._expand(node, min(max_tokens, budget.nodes), depth)
                if candidate.score > best.score:
                    best = candidate
        return best

    def _expand(self, ending: _SuffixNode, nodes: int, depth: int) -> _Candidate:
        """Return the most likely continuations of a suffix: a tree of at most `nodes` nodes, or the best chain."""
        options, candidate, order = self._options, _Candidate(), count()
        width = nodes if options.nodes else 1
        frontier: list[
            tuple[float, int, int, int, int, float, _SuffixNode]
        ] = []  # a heap: most likely first, then oldest

        def push_children(parent_node: _SuffixNode, slot: int, level: int, path_prob: float) -> None:
            children = parent_node.children if level <= depth else {}
            # ties go to the token that occurred first; ArcticInference leaves their order undefined
            for token, child in nlargest(width, children.items(), key=lambda pair: pair[1].count):
                prob = child.count / parent_node.count
                if path_prob * prob >= options.min_token_prob:
                    heappush(frontier, (-path_prob * prob, next(order), slot, level, token, prob, child))

        push_children(ending, 0, 1, 1.0)
        while frontier and len(candidate.tokens) < nodes:
            neg_prob, _, slot, level, token, token_prob, node = heappop(frontier)
            candidate.tokens.append(token)
            candidate.parents.append(slot)
            candidate.probs.append(token_prob)
            candidate.score -= neg_prob
            push_children(node, len(candidate.tokens), level + 1, -neg_prob)
        return candidate
