"""The seams: what the loop asks of a target and of a drafter. B rows, S slots, A accepted columns, V, H as ever."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Generator, Tensor, nn

from specdemo.core.sampling import Sampling
from specdemo.core.tree import Draft


@dataclass(frozen=True, slots=True)
class Budget:
    """A ceiling for one draft, never a promise: levels below the root, and nodes in all. Who writes a chain token by
    token may ask after each, with the chance of the likeliest there in every row, whether it is `enough`."""

    depth: int = 5
    nodes: int = 5
    enough: Callable[[list[float]], bool] | None = None

    def __post_init__(self) -> None:
        if self.depth < 0 or self.nodes < 0:
            raise ValueError(f"a budget cannot be negative: depth {self.depth}, nodes {self.nodes}")


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    max_new_tokens: int = 128
    sampling: Sampling = field(default_factory=Sampling)
    budget: Budget = field(default_factory=Budget)
    seed: int = 0
    stop_token_ids: tuple[int, ...] | None = None  # None: those of the target; (): never stop early

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be 1 or more, not {self.max_new_tokens}")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError("a seed must be from 0 to 2**63 - 1")


@dataclass(frozen=True, slots=True)
class Forward:
    """What one target forward says. Tap n is the residual stream after layer n (0: the embedding); tap -1 is what
    lm_head reads, after the final norm."""

    logits: Tensor  # [B, S, V]; after `start` only the last position, [B, 1, V]
    hidden: Mapping[int, Tensor] = field(default_factory=dict)  # tap -> [B, S, H]; after `start` [B, T, H]


@runtime_checkable
class Target(Protocol):
    """A causal language model with one history. `forward` is provisional, `commit` makes history."""

    name: str
    dtype: torch.dtype
    vocab_size: int
    hidden_size: int
    num_layers: int
    supports_trees: bool  # False: the loop sends chains only
    max_length: int  # positions the history can hold
    stop_token_ids: tuple[int, ...]
    device: torch.device
    embed: nn.Module
    lm_head: nn.Module

    def start(self, tokens: Tensor, taps: tuple[int, ...] = (), reserve: int = 0) -> Forward:
        """tokens [B, T] become a new history; `reserve` more positions will follow at most."""

    def forward(self, tokens: Tensor, parents: Tensor, taps: tuple[int, ...] = ()) -> Forward:
        """tokens [B, S] (slot 0 the root, ABSENT allowed), parents [B, N]; the history does not change."""

    def commit(self, path: list[list[int]]) -> None:
        """Per row the kept slots of the last forward, from the root down, become history."""

    def release(self) -> None:
        """Free the history and everything it holds."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What became history in one step, column a aligned everywhere; also the training example, offline and online."""

    inputs: Tensor  # [B, A] now in the target's cache; columns from lengths[b] on are padding
    outputs: Tensor  # [B, A] the token that follows each input; the last real one is the new root
    lengths: list[int]
    hidden: Mapping[int, Tensor] = field(default_factory=dict)  # tap -> [B, A, H]
    probs: Tensor | None = None  # [B, A, V] the target's distribution there, if someone worked it out
    forward: Forward | None = None  # the whole pass, refused slots included; None after prefill and offline
    slots: Tensor | None = None  # [B, A] which of its slots the columns are
    _said: list[list[list[int]]] = field(default_factory=list, init=False, repr=False, compare=False)

    def said(self) -> list[list[int]]:
        """Per row its real outputs, on the host. All who ask share one reading."""
        if not self._said:
            self.tell([o[:n] for o, n in zip(self.outputs.tolist(), self.lengths, strict=True)])
        return self._said[0]

    def tell(self, said: list[list[int]]) -> None:
        """What `said` would read, from one who knows it."""
        self._said.append(said)

    def target_probs(self) -> Tensor | None:
        """[B, A, V] the target's softmax behind every input, at temperature 1; None where nobody knows it."""
        if self.probs is not None or self.forward is None or self.slots is None:
            return self.probs
        rows = torch.arange(len(self.slots), device=self.slots.device)[:, None]
        return self.forward.logits[rows, self.slots].float().softmax(-1)


@runtime_checkable
class Drafter(Protocol):
    """Guesses; never touches the target's cache. The prompt arrives as the first `observe`."""

    taps: tuple[int, ...]

    def start(self, batch: int, sampling: Sampling, rng: Generator) -> None:
        """A new history; everything remembered of the last one is gone."""

    def propose(self, budget: Budget) -> Draft:
        """A draft behind the last root, within the budget: chains or trees, one row for each of the batch."""

    def observe(self, progress: Progress) -> None:
        """What became history: the prompt first, then every step, its last output the new root."""

    def release(self) -> None:
        """Free what is remembered of a text."""


class Trainable(Protocol):
    """What training asks of a drafter with a head."""

    taps: tuple[int, ...]

    @property
    def head(self) -> nn.Module:
        """The module whose weights are trained."""

    def loss(self, batch: Progress) -> tuple[Tensor, dict[str, float]]:
        """What to lower, and metrics."""

    def measure(self, batch: Progress) -> None:
        """Find out on held-out text what is saved beside the weights."""

    def save(self, folder: Path, target_name: str) -> None:
        """Write the head to `folder` in its family's public format."""
