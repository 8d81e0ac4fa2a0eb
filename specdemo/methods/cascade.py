"""Cascade: the draft model verifies the guess of a cheaper drafter in one pass instead of drafting token by token
(staged speculative decoding, 2308.04623; the vertical cascade of 2312.11462).

B rows, G guessed tokens, k the depth of the draft, V vocabulary. The inner drafter drafts for the target's history. The
draft model verifies this guess by the lossless rule in its catch-up pass, then continues by itself. The draft therefore
equals that of the draft model alone: the same tokens when greedy, and the same q of every token when sampling. There is
one guess per draft, because a drafter cannot take back what it observed.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn

from specdemo.core.accept import Lossless
from specdemo.core.coupled import Coupled
from specdemo.core.host_copy import AsyncHostCopy, to_device
from specdemo.core.protocol import Budget, Progress, Target
from specdemo.core.sampling import Sampling, to_probs
from specdemo.core.tree import Draft, first_branch, is_chain
from specdemo.methods import load_drafter, setting, wrappable
from specdemo.methods.base import DraftOptions, LookupOptions
from specdemo.methods.draft_model import MAX_CATCH_UP, DraftModel
from specdemo.methods.heads.sampler import ChainBuilder
from specdemo.methods.wrapper import Wrapper
from specdemo.models.checkpoints import Checkpoint
from specdemo.models.shared import graph_target


class CascadeOptions(DraftOptions, LookupOptions):
    inner: str = setting("ngram", "the method that drafts for the draft model", choices=wrappable("cascade"))
    inner_model: str = setting("", "its model or head, if it needs one: a name, folder or hub id")


class Cascade(DraftModel, method="cascade"):
    summary = "A draft model verifies a cheap guess; the target verifies the result."

    cross_vocabulary: ClassVar[bool] = False

    Options = CascadeOptions

    def __init__(self, target: Target, model: object, options: CascadeOptions | None = None) -> None:
        options = options or self.Options()
        super().__init__(target, model)
        inner = load_drafter(
            options.inner, target, options.inner_model or None, **options.lookup_options(options.inner)
        )
        self._inner = Wrapper(inner)
        self.parts = (self.model, self._inner)
        self.note = "; ".join(filter(None, (self.note, self._inner.note)))
        self.taps = self._inner.taps

    @classmethod
    def recognises(cls, checkpoint: Checkpoint) -> bool:
        return False  # its model is a draft model

    def start(self, batch: int, sampling: Sampling, rng: Generator) -> None:
        super().start(batch, sampling, rng)
        self._inner.start(batch, sampling, rng)

    def release(self) -> None:
        super().release()
        self._inner.release()

    def observe(self, progress: Progress) -> None:
        super().observe(progress)
        self._inner.observe(progress)

    def _draft(self, depth: int, should_stop: Callable[[list[float]], bool] | None = None) -> Draft:
        """Draft up to `depth` tokens. Notes: passes, the number of draft model passes."""
        guess = self._inner.propose(Budget(depth - 1, depth - 1))
        guess = guess if is_chain(guess.parents) else first_branch(guess)  # [B, G]
        missing = self._crop_to_common()
        guessed: list[list[int]] = guess.tokens.tolist()
        logits = self._pad_to_target_vocab(self._read(missing, guessed))
        rule = Coupled() if self.sampler.coupled else Lossless()
        result = rule(guess, to_probs(logits, self.sampler.sampling), self.sampler.active_rng)
        outputs = result.output_tokens
        if outputs is None:
            rows = zip(result.path, guessed, result.next_token.tolist(), strict=True)
            outputs = [[*ids[: len(path) - 1], token] for path, ids, token in rows]
        shortest = min(map(len, outputs))  # a row with more accepted tokens needs as many passes as the others
        outputs = [row[:shortest] for row in outputs]
        self.model.commit([list(range(len(m) + shortest - 1)) for m in missing])
        builder, first = ChainBuilder(self.sampler), to_device(outputs, logits.device)
        builder.add(first, self.sampler.draft_distribution(logits[:, :shortest]))
        rest = None
        if shortest < depth:
            rest = self._draft_graphed([row[-1:] for row in outputs], depth - shortest, first=shortest)
        self._mark_cached()
        for cached, row in zip(self._cached_ids, outputs, strict=True):
            cached += row[:-1]
        if rest is None:
            builder.extend(lambda tokens: self._pad_to_target_vocab(self._decode_step(tokens)), depth)
            if shortest < depth:
                self._pending_draft = AsyncHostCopy(builder.tokens[:, shortest - 1 : -1])
            return replace(builder.build(), notes={"passes": 1 + len(builder) - shortest})
        self._pending_draft = AsyncHostCopy(torch.cat([first[:, -1:], rest.tokens[:, :-1]], 1))
        start = builder.build()
        both = [(start.tokens, rest.tokens), (start.probs, rest.probs), (start.confidence, rest.confidence)]
        drafted, probs, confidence = (None if b is None or a is None else torch.cat([a, b], 1) for a, b in both)
        assert drafted is not None
        return replace(Draft.chain(drafted, probs, confidence), notes={"passes": 2})

    def capture_graphs(self, budget: Budget) -> None:
        depth = budget.chain
        super()._draft(depth)
        if model := graph_target(self.model):
            model.capture_graphs(MAX_CATCH_UP + depth)
        self._inner.capture_graphs(budget)

    def _pad_to_target_vocab(self, logits: Tensor) -> Tensor:
        """Resize logits to the target's vocabulary; extra entries of either model are padding."""
        logits = logits[..., : self._draft_vocab.size]
        return nn.functional.pad(logits, (0, self._draft_vocab.size - logits.shape[-1]), value=float("-inf"))
