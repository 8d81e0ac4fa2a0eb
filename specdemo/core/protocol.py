"""Interfaces between the decoding loop, targets and drafters.

B rows, T tokens, N draft nodes, S = N + 1 slots, A accepted columns, V vocabulary, H hidden size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Generator, Tensor, nn

from specdemo.core.accept import AcceptRule
from specdemo.core.sampling import Sampling, argmax
from specdemo.core.tree import Draft

UNLIMITED = 1 << 30
NO_HISTORY = "there is no history; call start() with the prompt first"

Enough = Callable[[list[float]], bool]  # highest probability in every row -> whether to end the draft


@dataclass(frozen=True, slots=True)
class Budget:
    """Upper limits of one draft: levels below the root, and nodes in all.

    enough: called by drafters that write a chain token by token, with the highest probability in every row. True stops
    the draft.
    """

    depth: int = 5
    nodes: int = 5
    enough: Enough | None = None

    def __post_init__(self) -> None:
        if self.depth < 0 or self.nodes < 0:
            raise ValueError(f"depth and nodes must be 0 or more, not {self.depth} and {self.nodes}")

    @property
    def chain(self) -> int:
        """Return the length of the longest chain."""
        return min(self.depth, self.nodes)


class GrammarState(Protocol):
    """Protocol of a grammar's state after some output tokens. V vocabulary."""

    def allowed(self) -> Tensor:
        """Return True for the tokens that may come next [V], on the host."""

    def forced(self) -> list[int]:
        """Return the tokens that must come next; empty if there is a choice."""

    def after(self, token: int) -> "GrammarState | None":
        """Return the state after one more token; None if it is not allowed or ends the text."""


Grammar = Callable[[], GrammarState]  # returns the state before the first output token


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """Settings of one generation."""

    max_new_tokens: int = 128
    sampling: Sampling = field(default_factory=Sampling)
    budget: Budget = field(default_factory=Budget)
    seed: int = 0
    stop_token_ids: tuple[int, ...] | None = None  # None: the target's; (): never stop early
    grammar: Grammar | None = None  # the output matches it; None: any output

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
    experts: Tensor | None = None  # [B, S, L, K] experts of every slot in L layers; None: unknown, or a dense model

    def argmax(self) -> Tensor:
        """Return the index [B, S] of the first largest logit of each slot."""
        return argmax(self.logits)

    def first(self, slots: int) -> "Forward":
        """Return the output of the first `slots` slots."""
        experts = None if self.experts is None else self.experts[:, :slots]
        return Forward(self.logits[:, :slots], {tap: x[:, :slots] for tap, x in self.hidden.items()}, experts)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Optional abilities of a target. `methods.load_drafter` compares them with what a drafter requires."""

    trees: bool = True  # False: the loop sends chains only
    hidden_states: frozenset[int] | Literal["all"] = frozenset()  # taps that a pass can return, see `Forward`
    layers: bool = False  # its first layers can run without the others, see models/shared.py
    shared_kv: bool = False  # a drafter may attend to its KV cache, see models/shared.py
    cuda_graphs: bool = False  # passes can run as CUDA graphs
    batch: int = 1  # maximum batch size


class MemoryOwner:
    """Base class of targets and drafters: the memory they use, by default that of their `parts`."""

    parts: "tuple[MemoryOwner, ...]" = ()  # targets and drafters that it is built from and does not share

    @property
    def weight_bytes(self) -> int:
        """Return the size of the weights; 0 if unknown."""
        return sum(part.weight_bytes for part in self.parts)

    @property
    def history_bytes(self) -> int:
        """Return the size of the KV cache and other state of the current generation; 0 if unknown."""
        return sum(part.history_bytes for part in self.parts)

    def release_graphs(self) -> None:
        """Free captured CUDA graphs. They are captured again when needed."""
        for part in self.parts:
            part.release_graphs()


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """Facts about a target's passes."""

    precision: str  # type of most weights in words
    kernels: str = ""  # implementation of the layers in words
    layout: str = ""  # layout of the weights in words; empty: there is only one
    pass_bytes: int = 0  # bytes of weights that a pass over one token reads; 0: unknown
    wall_time: bool = False  # passes use other threads too, so that the CPU time of the calling one does not suffice
    same_bits: bool = (
        False  # the logits of a chain's slot are the same bits in passes of every width, as checked at load
    )


class Target(MemoryOwner, ABC):
    """Causal language model with one history. `forward` is provisional, `commit` extends the history.

    Members with a default are optional.
    """

    capabilities: Capabilities
    name: str
    dtype: torch.dtype
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_length: int  # maximum number of positions
    stop_token_ids: tuple[int, ...]
    device: torch.device
    embed: nn.Module
    lm_head: nn.Module
    model: Any = None  # transformers model; None if the target is not one
    tokenizer: Any = None  # transformers tokenizer, if there is one
    notes: tuple[str, ...] = ()  # sentences about how it was loaded
    cached_tokens: int = 0  # tokens that the last `start` did not have to read
    num_experts: int = 0  # experts per layer; 0: a dense model
    layer_config: Mapping[str, Any] = MappingProxyType({})  # of a decoder layer, as transformers names its sizes
    kv_shapes: Mapping[str, tuple[int, int]] = MappingProxyType({})  # kind of layer -> key/value heads, their size

    @abstractmethod
    def start(self, tokens: Tensor, taps: tuple[int, ...] = (), reserve: int = 0) -> Forward:
        """Read tokens [B, T] as a new history; at most `reserve` more positions will follow."""

    @abstractmethod
    def forward(self, tokens: Tensor, parents: Tensor, taps: tuple[int, ...] = ()) -> Forward:
        """Read tokens [B, S] (slot 0 is the root, ABSENT allowed) with parents [B, N], without changing the history."""

    @abstractmethod
    def commit(self, path: list[list[int]]) -> None:
        """Append the accepted slots of the last forward, per row from the root down, to the history."""

    @abstractmethod
    def crop(self, lengths: list[int]) -> None:
        """Shorten every row to its first lengths[b] tokens."""

    @abstractmethod
    def release(self) -> None:
        """Free the history."""

    @property
    def facts(self) -> TargetFacts:
        """Return what a comparison states about the passes."""
        return TargetFacts(str(self.dtype).removeprefix("torch."))

    def check_length(self, length: int) -> None:
        """Raise ValueError if a history of this length exceeds the context."""
        if length > self.max_length:
            raise ValueError(
                f"the context of {self.name} is {self.max_length} tokens, not {length}; shorten the prompt"
            )

    @property
    def threads(self) -> int:
        """Return the number of CPU threads of a pass; 0: unknown, or on another device."""
        return 0

    @threads.setter
    def threads(self, count: int) -> None:
        """Set the number for all targets with the same weights."""

    @property
    def pass_ms(self) -> dict[int, float]:
        """Return slots -> milliseconds of a pass over a chain of that many, once they are measured
        (models/pass_cost.py). Targets with the same weights share it."""
        return {}

    @property
    def note(self) -> str:
        """Return why passes are slower than intended; empty if they are not."""
        return ""

    @property
    def capacity(self) -> int:
        """Return the number of tokens that the history can hold without a new allocation; 0 if unknown."""
        return 0

    def draft_greedy(self, tokens: list[int], depth: int, vocab_size: int) -> tuple[list[int], list[float]] | None:
        """Append tokens to the history of a single row, and all but the last of `depth` greedy tokens after them.

        Return the greedy tokens, chosen from the first vocab_size ids, and their probabilities. None if there is no
        fast way; nothing was read then.
        """
        return None


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

    def labels(self) -> Tensor:
        """Return what a head learns: `target_probs`, or without them the outputs [B, A]."""
        probs = self.target_probs()
        return self.outputs if probs is None else probs


class Drafter(MemoryOwner, ABC):
    """Source of drafts. It never changes the target's KV cache. The prompt arrives with the first `observe`.

    Only `start`, `propose` and `observe` are required.
    """

    requires: ClassVar[frozenset[str]] = frozenset()  # names of `Capabilities` without which it cannot draft
    taps: tuple[int, ...] = ()  # hidden states of the target that it reads, see `Forward`
    chooses_length: ClassVar[bool] = False  # True: k is only the limit of the lengths that it chooses
    note: str = ""  # one sentence for the user, such as a convention it had to detect
    name: str = ""  # of its model or file; empty if it has none

    @abstractmethod
    def start(self, batch: int, sampling: Sampling, rng: Generator) -> None:
        """Start a new generation and drop the state of the last one."""

    @abstractmethod
    def propose(self, budget: Budget) -> Draft:
        """Return a draft [B, N] below the current root, within the budget: chains or trees, one per row."""

    @abstractmethod
    def observe(self, progress: Progress) -> None:
        """Read committed tokens: first the prompt, then every step. `progress.outputs` ends in the new root."""

    def release(self) -> None:
        """Free the state of the generation."""

    def read_bytes(self, k: int) -> int:
        """Return the bytes of weights that drafting k tokens reads."""
        return k * self.weight_bytes

    def accept_rule(self, default: AcceptRule) -> AcceptRule:
        """Return the acceptance rule for this generation; `default` is the lane's."""
        return default

    def on_step_timed(self, ms: Mapping[str, float]) -> None:
        """Receive the device time of the last observed step, in ms per phase."""

    def capture_graphs(self, budget: Budget) -> None:
        """Propose drafts of all sizes that the budget allows, so that their CUDA graphs are captured in the warm-up."""

    @property
    def graph_note(self) -> str:
        """Reason why CUDA graphs were requested but are not used; empty otherwise."""
        return ""

    @property
    def max_length(self) -> int | None:
        """Context length of the drafter, in its own tokens; it drafts nothing past it. None: the target's."""
        return None
