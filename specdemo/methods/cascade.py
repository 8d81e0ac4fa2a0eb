"""Cascade: a draft model that does not write its draft word by word, but checks the guess of a cheaper drafter in one
pass (staged speculative decoding, 2308.04623; the vertical cascade of 2312.11462).

B rows, G guessed tokens, k the depth of the draft, V vocabulary. The inner drafter guesses for the target as it would
alone; the draft model, in the pass in which it catches up, judges the guess by the lossless rule, then goes on by
itself. So the draft is what the draft model alone would have written: the same tokens when greedy, and when sampling
every token follows the draft model's own q, which is what the target tests it with. The guess is made once per draft: a
drafter cannot take back what it observed, and what follows the guess may yet be refused.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn

from specdemo.core.accept import Lossless
from specdemo.core.host import Reading, padded, to_device
from specdemo.core.protocol import Budget, Progress, Target
from specdemo.core.sampling import Sampling, draw, to_probs
from specdemo.core.tree import ABSENT, Draft, chain_parents, first_branch, is_chain
from specdemo.methods import knob, load_drafter
from specdemo.methods.draft_model import CATCHING_UP, DraftModel
from specdemo.methods.wrapper import Wrapper, wrappable
from specdemo.models.checkpoints import Checkpoint


class Cascade(DraftModel):
    title = "Cascade"
    summary = "A cheap guess is checked by a draft model, whose draft is checked by the target."

    serves: ClassVar = {}  # no server has it
    crosses: ClassVar[bool] = False

    @dataclass(frozen=True, slots=True)
    class Options:
        inner: str = knob("ngram", "the method that guesses for the draft model", choices=wrappable("cascade"))
        inner_model: str = knob("", "its model or head, where it needs one: a name, folder or hub id")

    def __init__(self, target: Target, model: object, options: Options | None = None) -> None:
        options = options or self.Options()
        super().__init__(target, model)
        self._inner = Wrapper(load_drafter(options.inner, target, options.inner_model or None))
        self.taps = self._inner.taps
        self._rule = Lossless()

    @classmethod
    def recognises(cls, checkpoint: Checkpoint) -> bool:
        return False  # what it reads is a draft model

    @property
    def weight_bytes(self) -> int:
        return super().weight_bytes + self._inner.weight_bytes

    @property
    def history_bytes(self) -> int:
        return super().history_bytes + self._inner.history_bytes

    def start(self, batch: int, sampling: Sampling, rng: Generator) -> None:
        super().start(batch, sampling, rng)
        self._inner.start(batch, sampling, rng)

    def release(self) -> None:
        super().release()
        self._inner.release()

    def observe(self, progress: Progress) -> None:
        super().observe(progress)
        self._inner.observe(progress)

    def _write(self, depth: int, enough: Callable[[list[float]], bool] | None = None) -> Draft:
        """Its notes have passes: how often the draft model was asked."""
        guess = self._inner.propose(Budget(depth - 1, depth - 1))
        guess = guess if is_chain(guess.parents) else first_branch(guess)  # [B, G]
        missing = self._missing()
        guessed: list[list[int]] = guess.tokens.tolist()
        logits = self._read_both(missing, guess, guessed)
        verdict = self._rule(guess, to_probs(logits, self.choice.sampling), self.choice.noise)
        self.model.commit([list(range(len(m) + len(p) - 1)) for m, p in zip(missing, verdict.path, strict=True)])
        tokens, seen = [], []
        ends = zip(verdict.path, guessed, verdict.bonus.tolist() if verdict.said is None else verdict.said, strict=True)
        for row, (path, words, end) in enumerate(ends):
            kept = words[: len(path) - 1]
            tokens.append([*kept, end[-1] if isinstance(end, list) else end])
            seen.append([*logits[row, : len(path)]])
            self._read[row] = self._history[row] + kept
            self._agreed[row] = len(self._history[row])
        return self._rest(tokens[0], logits, depth) or self._whole(tokens, seen, depth)

    def _rest(self, tokens: list[int], logits: Tensor, depth: int) -> Draft | None:
        """Behind the only row's tokens so far, which the logits [1, 1 + G, V] said; None: not as a recorded pass."""
        first = self.choice.chain(
            to_device([tokens], logits.device), self.choice.said(logits[:, : len(tokens)]), self._words
        )
        if len(tokens) >= depth or len(logits) > 1:
            return replace(first, notes={"passes": 1}) if len(logits) == 1 else None
        rest = self._replayed([tokens[-1:]], depth - len(tokens))
        if rest is None:
            return None
        self._written = Reading(torch.cat([first.tokens[:, -1:], rest.tokens[:, :-1]], 1))
        both = [(first.tokens, rest.tokens), (first.probs, rest.probs), (first.confidence, rest.confidence)]
        drafted, probs, sure = (None if b is None or a is None else torch.cat([a, b], 1) for a, b in both)
        assert drafted is not None
        return replace(Draft.chain(drafted, probs, sure), notes={"passes": 2})

    def unrecord(self) -> None:
        super().unrecord()
        self._inner.unrecord()

    def rehearse(self, budget: Budget) -> None:
        depth = min(budget.depth, budget.nodes)
        super()._write(depth)
        self.model.rehearse(CATCHING_UP + depth)
        self._inner.rehearse(budget)

    def _whole(self, tokens: list[list[int]], seen: list[list[Tensor]], depth: int) -> Draft:
        """Every row's tokens so far, one by one as deep as is asked."""
        passes = 1
        while min(map(len, tokens)) < depth:
            self._go_on(tokens, seen, depth)
            passes += 1
        logits = torch.stack([torch.stack(row) for row in seen])
        draft = self.choice.chain(to_device(tokens, logits.device), self.choice.said(logits))
        return replace(draft, notes={"passes": passes})

    def _read_both(self, missing: list[list[int]], guess: Draft, guessed: list[list[int]]) -> Tensor:
        """One pass over what is missing and the guess; logits [B, 1 + G, V] after the root and every guessed token."""
        fed = [m + [t for t in g if t != ABSENT] for m, g in zip(missing, guessed, strict=True)]
        tokens = padded(fed, self.model.device, ABSENT)
        logits = self.model.forward(tokens, chain_parents(len(fed), tokens.shape[1] - 1, tokens.device)).logits
        if len(fed) == 1:
            return self._widened(logits[:, len(missing[0]) - 1 :])
        rows = torch.arange(len(fed), device=logits.device)[:, None]
        roots = to_device([[len(m) - 1] for m in missing], logits.device)
        places = (roots + torch.arange(1 + guess.nodes, device=logits.device)).clamp_max(tokens.shape[1] - 1)
        return self._widened(logits[rows, places])

    def _go_on(self, tokens: list[list[int]], seen: list[list[Tensor]], depth: int) -> None:
        """One more token for every row that is shorter than `depth`."""
        short = [len(row) < depth for row in tokens]
        last = [row[-1] if goes_on else ABSENT for row, goes_on in zip(tokens, short, strict=True)]
        fed = to_device(last, self.model.device)[:, None]
        logits = self._widened(self.model.forward(fed, fed.new_empty(len(last), 0)).logits[:, -1])
        self.model.commit([[0] if goes_on else [] for goes_on in short])
        drawn = draw(to_probs(logits, self.choice.sampling), self.choice.noise).tolist()
        for row, goes_on in enumerate(short):
            if goes_on:
                self._read[row].append(last[row])
                tokens[row].append(drawn[row])
                seen[row].append(logits[row])

    def _widened(self, logits: Tensor) -> Tensor:
        """Logits over the draft model's vocabulary -> over the target's; the extra entries of either are padding."""
        logits = logits[..., : self._words.size]
        return nn.functional.pad(logits, (0, self._words.size - logits.shape[-1]), value=float("-inf"))
