"""Synthetic acceptance: measures the speed at chosen acceptance rates. Draft tokens are accepted at random, so the text
is meaningless (like `rejection_sample_method` "synthetic" of vLLM).

B rows, N draft tokens. Accepted draft tokens are output as drafted; at the first rejection follows the target's
correction token. Either another method drafts, at its own cost, or the draft is a free copy of the prompt.
"""

from dataclasses import dataclass, replace
from math import ceil
from typing import ClassVar, Self

import torch
from pydantic import model_validator
from torch import Generator, Tensor

from specdemo.core.accept import AcceptResult, AcceptRule, coins, end_probs
from specdemo.core.host_copy import to_device
from specdemo.core.protocol import Budget, Progress, Target
from specdemo.core.sampling import Sampling, draw
from specdemo.core.tree import ABSENT, Draft, first_branch, is_chain
from specdemo.methods import BASELINE, SYNTHETIC, BaseOptions, load_drafter, setting, wrappable
from specdemo.methods.wrapper import Wrapper

RATES = "0.8,0.75,0.7"


def rates_of_length(length: float) -> tuple[float, ...]:
    """Return the conditional rates with this mean accepted length and the smallest variance, as in vLLM: always accept
    all but the last of the tokens, and that one with the fractional probability."""
    whole, share = divmod(length - 1.0, 1.0)
    return *[1.0] * int(whole), share, 0.0


@dataclass(frozen=True, slots=True)
class SyntheticAcceptance:
    """Accepts tokens of a chain at random, independent of their values. Lossy: simulates a drafter with given
    acceptance rates. vLLM has the same option (config/speculative.py, 0.32).

    rates: probability that the token at a position is accepted if all before it are; the last entry repeats. The final
    token comes from the target. generator: of its own, since greedy decoding has none.
    """

    rates: tuple[float, ...]
    generator: Generator
    exact: ClassVar[bool] = False
    note: ClassVar[str] = ""

    def __call__(self, draft: Draft, target: Tensor, rng: Generator | None) -> AcceptResult:
        rates = [*self.rates, *self.rates[-1:] * (draft.nodes - len(self.rates))][: draft.nodes]
        accept_probs = to_device(rates, draft.tokens.device, torch.float32)
        accepted = (coins(draft, self.generator) < accept_probs) & (draft.tokens != ABSENT)
        path = [list(range(n + 1)) for n in accepted.int().cumprod(1).sum(1).tolist()]
        return AcceptResult(path, draw(end_probs(target, path), rng))


class SyntheticOptions(BaseOptions):
    rates: str = setting(RATES, "acceptance rate per position, given that the positions before are accepted")
    length: float = setting(
        0.0, "mean accepted length up to k + 1, instead of rates; 0: use rates", low=0.0, high=17.0, step=0.05
    )
    drafter: str = setting(
        BASELINE,
        "the method that drafts, at its own cost; none: a free draft",
        choices=(BASELINE, *wrappable(SYNTHETIC)),
    )

    @model_validator(mode="after")
    def _check_rates(self) -> Self:
        parse_rates(self.rates)
        if 0.0 < self.length < 1.0:
            raise ValueError(f"option 'length' must be 0 (use rates) or at least 1, not {self.length:g}")
        if self.length and self.rates != RATES:
            raise ValueError("option 'length' replaces 'rates'; give one of them")
        return self


class Synthetic(Wrapper, method="synthetic"):
    summary = "Accepts draft tokens at random with chosen rates, to measure the speed. The text is meaningless."
    exact: ClassVar[bool] = False

    Options = SyntheticOptions

    @staticmethod
    def least_k(options: SyntheticOptions) -> int:
        return ceil(options.length) - 1

    def __init__(self, target: Target, model: object = None, options: SyntheticOptions | None = None) -> None:
        options = options or self.Options()
        super().__init__(load_drafter(options.drafter, target, model))
        self._is_free, self._device = options.drafter == BASELINE, target.device
        self._rates = rates_of_length(options.length) if options.length else parse_rates(options.rates)
        words = f"mean accepted length {options.length:g}" if options.length else f"rates {options.rates}"
        self.note = f"Draft tokens are accepted at random, with {words}: only the speed is meaningful."

    def start(self, batch: int, sampling: Sampling, rng: Generator) -> None:
        super().start(batch, sampling, rng)
        self._rng, self._num_written = rng, [0] * batch  # output tokens per row
        self._prompts: list[list[int]] = []

    def accept_rule(self, default: AcceptRule) -> AcceptRule:
        return SyntheticAcceptance(self._rates, self._rng)

    def propose(self, budget: Budget) -> Draft:
        """Draft a chain. Notes: by_chance = 1, to mark the steps in a trace."""
        draft = self._copy_prompt(budget.chain) if self._is_free else super().propose(budget)
        chain = draft if is_chain(draft.parents) else first_branch(draft)
        return replace(chain, notes={**draft.notes, "by_chance": 1.0})

    def observe(self, progress: Progress) -> None:
        super().observe(progress)
        if self._prompts:
            self._num_written = [n + length for n, length in zip(self._num_written, progress.lengths, strict=True)]
        else:
            rows = zip(progress.inputs.tolist(), progress.lengths, strict=True)
            self._prompts = [tokens[:length] for tokens, length in rows]

    def _copy_prompt(self, depth: int) -> Draft:
        """Draft the prompt again, starting at the number of output tokens so far."""
        rows = zip(self._prompts, self._num_written, strict=True)
        tokens = [[prompt[(offset + i) % len(prompt)] for i in range(depth)] for prompt, offset in rows]
        return Draft.chain(to_device(tokens, self._device).view(len(tokens), depth))


def parse_rates(text: str) -> tuple[float, ...]:
    """Parse rates such as `0.8,0.75`. Raises ValueError for anything but probabilities."""
    try:
        rates = tuple(map(float, text.split(",")))
    except ValueError:
        rates = ()
    if not rates or not all(0.0 <= rate <= 1.0 for rate in rates):
        raise ValueError(
            f"option 'rates' must be numbers from 0 to 1 separated by commas, such as 0.8,0.75, not {text!r:.60}"
        )
    return rates
