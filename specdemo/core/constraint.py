"""Decoding constrained by a grammar. B rows, N draft nodes, S = N + 1 slots, V vocabulary; p target, q draft.

The target's logits are masked after every slot, so the output follows the masked distribution with every exact rule.
Text that the grammar prescribes is drafted without a drafter: the forced tokens.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Generator, Tensor

from specdemo.core.host_copy import padded
from specdemo.core.protocol import Budget, Drafter, Forward, Grammar, GrammarState, Progress, Target
from specdemo.core.sampling import Sampling, draw
from specdemo.core.tree import ABSENT, Draft, first_branch, is_chain

MOST_FORCED = 32  # forced tokens of a row in one draft

States = list[GrammarState | None]  # by slot; None: unreachable, or the text has ended


class Constraint:
    """State of a grammar in the rows of one generation."""

    def __init__(self, grammar: Grammar, max_new_tokens: int, trees: bool) -> None:
        """trees: the target verifies trees."""
        self._grammar, self._max_new_tokens, self._trees = grammar, max_new_tokens, trees

    def start(self, rows: int, rng: Generator | None) -> None:
        """Start texts in `rows` rows. rng: None for greedy decoding."""
        self._states: States = [self._grammar() for _ in range(rows)]
        self._remaining = [self._max_new_tokens] * rows
        self._rng = rng
        self.slot_states: list[States] = [[state] for state in self._states]  # [B][S] of the last draft

    def mask(self, logits: Tensor) -> Tensor:
        """Return logits [B, S, V] with minus infinity for tokens that the grammar forbids after the last draft."""
        return mask(logits, self.slot_states)

    def advance(self, outputs: Sequence[Sequence[int]]) -> None:
        """Read the output tokens of a step."""
        for row, tokens in enumerate(outputs):
            self._remaining[row] -= len(tokens)
            for token in tokens:
                state = self._states[row]
                self._states[row] = state and state.after(token)

    def budget(self, budget: Budget) -> Budget:
        """Return the budget for the drafter: none if the forced tokens fill it in every row."""
        forced = min(len(state.forced()) if state else budget.depth for state in self._states)
        return Budget(0, 0) if forced >= budget.depth else budget

    def apply(self, draft: Draft, budget: Budget) -> Draft:
        """Draft under the mask: add the forced tokens, and draw the tokens of a sampled chain from the masked q.

        A one-hot chain ends at the first token that the grammar forbids, with the drafter's best allowed token in its
        place if it has a `ranking`. Trees keep their nodes; those that the grammar forbids have p = 0. Forced tokens
        may exceed the budget, but not the tokens that a row still needs besides the target's.
        """
        room = [max(left - 1, 0) if budget.depth else 0 for left in self._remaining]
        chain = is_chain(draft.parents)
        if not chain and not self._trees:
            draft, chain = first_branch(draft), True
        if chain:
            return self._of_chain(draft, room, self._rng)
        if draft.probs is not None or any(state is None for state in self._states):
            self.slot_states = self._tree_states(draft)
            return draft
        return self._of_tree(draft, room)

    def _of_chain(self, draft: Draft, room: Sequence[int], rng: Generator | None) -> Draft:
        rows = [
            ConstrainedRow(state, most, draft, row, rng)
            for row, (state, most) in enumerate(zip(self._states, room, strict=True))
        ]
        for row, tokens in zip(rows, draft.tokens.tolist(), strict=True):
            row.extend([token for token in tokens if token != ABSENT])
        ids = padded([row.tokens for row in rows], draft.tokens.device, ABSENT)
        built = Draft.chain(ids, _stacked(rows, ids.shape[1], draft), _confidence(rows, ids.shape[1], draft))
        self.slot_states = _padded_states(rows)
        return replace(built, notes=draft.notes, forced=[row.forced for row in rows])

    def _of_tree(self, draft: Draft, room: Sequence[int]) -> Draft:
        """Add forced tokens below every slot that the grammar allows and that has no such child."""
        nodes = zip(draft.tokens.tolist(), draft.parents.tolist(), self._tree_states(draft), room, strict=True)
        rows = [ConstrainedTree(*row) for row in nodes]
        for row in rows:
            row.add_forced()
        ids = padded([row.tokens for row in rows], draft.tokens.device, ABSENT)
        parents = padded([row.parents for row in rows], draft.tokens.device, 0)
        confidence = draft.confidence
        if confidence is not None:
            confidence = torch.cat([confidence, confidence.new_ones(len(rows), ids.shape[1] - draft.nodes)], 1)
        self.slot_states = _padded_states(rows)
        return Draft(ids, parents, None, confidence, draft.notes, forced=[row.forced for row in rows])

    def _tree_states(self, draft: Draft) -> list[States]:
        rows = []
        for state, tokens, parents in zip(self._states, draft.tokens.tolist(), draft.parents.tolist(), strict=True):
            states = [state]
            for token, parent in zip(tokens, parents, strict=True):
                above = states[parent]
                states.append(above.after(token) if above and token != ABSENT else None)
            rows.append(states)
        return rows


class _Around:
    """Wrapper of a target or a drafter that passes on everything it does not define."""

    def __init__(self, inner: Any, constraint: Constraint) -> None:
        self._inner, self._constraint = inner, constraint

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _ConstrainedTarget(_Around):
    def start(self, tokens: Tensor, taps: tuple[int, ...] = (), reserve: int = 0) -> Forward:
        forward: Forward = self._inner.start(tokens, taps, reserve + MOST_FORCED)
        return Forward(self._constraint.mask(forward.logits), forward.hidden, forward.experts)

    def forward(self, tokens: Tensor, parents: Tensor, taps: tuple[int, ...] = ()) -> Forward:
        forward: Forward = self._inner.forward(tokens, parents, taps)
        return Forward(self._constraint.mask(forward.logits), forward.hidden, forward.experts)


class _ConstrainedDrafter(_Around):
    def start(self, batch: int, sampling: Sampling, rng: Generator) -> None:
        self._constraint.start(batch, None if sampling.greedy else rng)
        self._is_prompt = True
        self._inner.start(batch, sampling, rng)

    def propose(self, budget: Budget) -> Draft:
        return self._constraint.apply(self._inner.propose(self._constraint.budget(budget)), budget)

    def observe(self, progress: Progress) -> None:
        outputs = progress.output_ids()
        self._constraint.advance([ids[-1:] for ids in outputs] if self._is_prompt else outputs)
        self._is_prompt = False
        self._inner.observe(progress)


def constrained(target: Target, drafter: Drafter, grammar: Grammar, max_new_tokens: int) -> tuple[Target, Drafter]:
    """Return target and drafter whose output in one generation matches the grammar."""
    constraint = Constraint(grammar, max_new_tokens, target.capabilities.trees)
    return cast(Target, _ConstrainedTarget(target, constraint)), cast(Drafter, _ConstrainedDrafter(drafter, constraint))


class ConstrainedRow:
    """One row of a chain, built token by token under the grammar."""

    def __init__(self, state: GrammarState | None, room: int, draft: Draft, row: int, rng: Generator | None) -> None:
        self.states: States = [state]
        self.tokens: list[int] = []
        self.forced: list[int] = []
        self.probs: list[Tensor | None] = []  # q of each token; None: one-hot
        self._room, self._draft, self._row, self._rng = room, draft, row, rng

    def extend(self, drafted: Sequence[int]) -> None:
        """Add the drafted tokens while they follow from the row, and forced tokens wherever there are any."""
        for place, token in enumerate(drafted):
            self._add_forced_until(place)
            if len(self.tokens) > place:
                if self.tokens[place] != token:  # a forced token instead: the rest follows from another text
                    break
                continue
            if not self._add_drafted(place, token):
                break
        self._add_forced_until(len(self.tokens) + MOST_FORCED)

    def _add_forced_until(self, place: int) -> None:
        """Add forced tokens up to and including this position."""
        while len(self.tokens) <= place and len(self.forced) < MOST_FORCED:
            state = self.states[-1]
            forced = state.forced() if state else []
            if not forced:
                return
            for token in forced[: min(place + 1 - len(self.tokens), MOST_FORCED - len(self.forced))]:
                if not self._add(token, None):
                    return
                self.forced.append(len(self.tokens))

    def _add_drafted(self, place: int, token: int) -> bool:
        """Add a drafted token, or another one from the masked q. Returns False if the draft cannot continue."""
        state, q = self.states[-1], self._draft.probs
        if state is None:
            return False
        if q is None:
            return self._add(token, None) or self._add_best(place, state)
        masked = q[self._row, place] * state.allowed().to(q.device)
        total = masked.sum()
        if not total > 0.0:
            return False
        valid = bool(masked[token] > 0.0)
        kept = token if valid else int(draw(masked, self._rng))
        return self._add(kept, masked / total) and valid

    def _add_best(self, place: int, state: GrammarState) -> bool:
        """Add the drafter's best allowed token. Returns False, because the rest follows from another text."""
        if self._draft.ranking is not None:
            ranking = self._draft.ranking()[self._row, place]
            best = (ranking * state.allowed().to(ranking.device)).argmax()
            self._add(int(best), None)
        return False

    def _add(self, token: int, probs: Tensor | None) -> bool:
        state = self.states[-1]
        after = state.after(token) if state else None
        if state is None or len(self.tokens) >= self._room or not bool(state.allowed()[token]):
            return False
        self.tokens.append(token)
        self.states.append(after)
        self.probs.append(probs)
        return True


class ConstrainedTree:
    """One row of a tree, to which forced tokens are added."""

    def __init__(self, tokens: list[int], parents: list[int], states: States, room: int) -> None:
        """tokens, parents: of every node. states: of every slot."""
        self.tokens, self.parents, self.states = tokens, parents, states
        self.forced: list[int] = []
        self._room, self._children = room, set(zip(parents, tokens, strict=True))
        self._depths = [0]
        for parent in parents:
            self._depths.append(self._depths[parent] + 1)

    def add_forced(self) -> None:
        """Append the forced tokens of every drafted slot as a chain below it."""
        for slot in range(len(self.tokens) + 1):
            self._append_run(slot)

    def _append_run(self, slot: int) -> None:
        state = self.states[slot]
        for token in state.forced() if state else ():
            after = state and state.after(token)
            full = self._depths[slot] >= self._room or len(self.forced) >= MOST_FORCED
            if after is None or full or (slot, token) in self._children:
                return
            self.tokens.append(token)
            self.parents.append(slot)
            self.states.append(after)
            self._depths.append(self._depths[slot] + 1)
            slot, state = len(self.tokens), after
            self.forced.append(slot)


def _padded_states(rows: Sequence[ConstrainedRow | ConstrainedTree]) -> list[States]:
    """Return the states of all rows, with None for the slots that shorter rows lack."""
    slots = max(len(row.states) for row in rows)
    return [[*row.states, *[None] * (slots - len(row.states))] for row in rows]


def mask(logits: Tensor, states: Sequence[States]) -> Tensor:
    """Return logits [B, S, V] with minus infinity for tokens that the state of their slot forbids."""
    size = logits.shape[-1]
    everything = torch.ones(size, dtype=torch.bool)
    allowed = torch.stack([torch.stack([state.allowed() if state else everything for state in row]) for row in states])
    return logits.masked_fill(~allowed.to(logits.device), float("-inf"))


def _stacked(rows: Sequence[ConstrainedRow], width: int, draft: Draft) -> Tensor | None:
    """Return q [B, N, V] of the rows; None if every token is one-hot."""
    if draft.probs is None:
        return None
    probs = draft.probs.new_zeros(len(rows), width, draft.probs.shape[-1])
    for number, row in enumerate(rows):
        for node, (token, q) in enumerate(zip(row.tokens, row.probs, strict=True)):
            if q is None:
                probs[number, node, token] = 1.0
            else:
                probs[number, node] = q
    return probs


def _confidence(rows: Sequence[ConstrainedRow], width: int, draft: Draft) -> Tensor | None:
    """Return the drafter's confidence [B, N], 1 for forced tokens."""
    if draft.confidence is None:
        return None
    confidence = draft.confidence.new_ones(len(rows), width)
    nodes = min(width, draft.nodes)
    confidence[:, :nodes] = draft.confidence[:, :nodes]
    for number, row in enumerate(rows):
        confidence[number, [slot - 1 for slot in row.forced]] = 1.0
    return confidence
