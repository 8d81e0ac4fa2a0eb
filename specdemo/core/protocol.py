"""Interfaces between the decoding loop, targets and drafters. B rows, S slots, A accepted columns, V vocabulary, H
hidden."""

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
    """Upper limits of one draft: levels below the root, and nodes in all.

    enough: called by drafters that write a chain token by token, with the highest probability in every row. True stops
    the draft.
    """

    depth: int = 5
    nodes: int = 5
    enough: Callable[[list[float]], bool] | None = None

    def __post_init__(self) -> None:
        if self.depth < 0 or self.nodes < 0:
            raise ValueError(f"a budget cannot be negative: depth {self.depth}, nodes {self.nodes}")


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """Settings of one generation."""

    max_new_tokens: int = 128
    sampling: Sampling = field(default_factory=Sampling)
    budget: Budget = field(default_factory=Budget)
    seed: int = 0
    stop_token_ids: tuple[int, ...] | None = None  # None: the target's; (): never stop early

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be 1 or more, not {self.max_new_tokens}")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError("a seed must be from 0 to 2**63 - 1")


@dataclass(frozen=True, slots=True)
class Forward:
    """Output of one forward pass. Tap n is the residual stream after layer n (0: the embedding); tap -1 is the input of
    lm_head, after the final norm."""

    logits: Tensor  # [B, S, V]; of `start` only the last position, [B, 1, V]
    hidden: Mapping[int, Tensor] = field(default_factory=dict)  # tap -> [B, S, H]; of `start` [B, T, H]


@runtime_checkable
class Target(Protocol):
    """Protocol of a causal language model with one history. `forward` is provisional, `commit` extends the history."""

    name: str
    dtype: torch.dtype
    vocab_size: int
    hidden_size: int
    num_layers: int
    supports_trees: bool  # False: the loop sends chains only
    max_length: int  # most positions of a text
    stop_token_ids: tuple[int, ...]
    device: torch.device
    embed: nn.Module
    lm_head: nn.Module

    def start(self, tokens: Tensor, taps: tuple[int, ...] = (), reserve: int = 0) -> Forward:
        """Read tokens [B, T] as a new history; at most `reserve` more positions will follow."""

    def forward(self, tokens: Tensor, parents: Tensor, taps: tuple[int, ...] = ()) -> Forward:
        """Read tokens [B, S] (slot 0 is the root, ABSENT allowed) with parents [B, N], without changing the history."""

    def commit(self, path: list[list[int]]) -> None:
        """Append the accepted slots of the last forward, per row from the root down, to the history."""

    def release(self) -> None:
        """Free the history."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Tokens committed in one step; also a training example, offline and online."""

    inputs: Tensor  # [B, A] committed tokens; columns from lengths[b] on are padding
    outputs: Tensor  # [B, A] the token after each input; the last real one is the new root
    lengths: list[int]
    hidden: Mapping[int, Tensor] = field(default_factory=dict)  # tap -> [B, A, H]
    probs: Tensor | None = None  # [B, A, V] the target's distribution after each input, if known
    forward: Forward | None = None  # the full pass, with rejected slots; None for the prefill and offline
    slots: Tensor | None = None  # [B, A] the slot of `forward` of each column
    _output_ids: list[list[list[int]]] = field(default_factory=list, init=False, repr=False, compare=False)

    def output_ids(self) -> list[list[int]]:
        """Return the real outputs of every row, on the host. All callers share one copy."""
        if not self._output_ids:
            self.set_output_ids([o[:n] for o, n in zip(self.outputs.tolist(), self.lengths, strict=True)])
        return self._output_ids[0]

    def set_output_ids(self, output_ids: list[list[int]]) -> None:
        """Set the result of `output_ids` where it is known already."""
        self._output_ids.append(output_ids)

    def target_probs(self) -> Tensor | None:
        """Return the target's softmax [B, A, V] after every input, at temperature 1. None if unknown."""
        if self.probs is not None or self.forward is None or self.slots is None:
            return self.probs
        rows = torch.arange(len(self.slots), device=self.slots.device)[:, None]
        return self.forward.logits[rows, self.slots].float().softmax(-1)


@runtime_checkable
class Drafter(Protocol):
    """Protocol of a drafter. It never changes the target's cache. The prompt arrives with the first `observe`."""

    taps: tuple[int, ...]

    def start(self, batch: int, sampling: Sampling, rng: Generator) -> None:
        """Start a new text and drop the state of the last one."""

    def propose(self, budget: Budget) -> Draft:
        """Return a draft below the current root, within the budget: chains or trees, one per row."""

    def observe(self, progress: Progress) -> None:
        """Read what was committed: first the prompt, then every step. The last output is the new root."""

    def release(self) -> None:
        """Free the state of the text."""


class Trainable(Protocol):
    """Protocol of a drafter whose head can be trained."""

    taps: tuple[int, ...]

    @property
    def head(self) -> nn.Module:
        """Return the module to train."""

    def loss(self, batch: Progress) -> tuple[Tensor, dict[str, float]]:
        """Return the loss and metrics."""

    def measure(self, batch: Progress) -> None:
        """Measure on validation text what is saved with the weights."""

    def save(self, folder: Path, target_name: str) -> None:
        """Write the head to `folder` in the public format of its family."""
