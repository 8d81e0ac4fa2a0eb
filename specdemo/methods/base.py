"""Base classes of drafting methods: `Method`, and `Head` for methods that read the target's hidden states.

B rows, A columns, N draft nodes, V vocabulary, H hidden size.
"""

from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Generator, Tensor, nn

from specdemo.core.protocol import Drafter, Progress, Target, Tensors
from specdemo.core.sampling import Sampling
from specdemo.core.tree import Draft
from specdemo.kv.graphs import GraphCache
from specdemo.methods import check_capabilities
from specdemo.methods.flags import EngineArgs
from specdemo.methods.heads.conventions import select_convention
from specdemo.methods.heads.network import Network
from specdemo.methods.heads.runtime import HeadHistory
from specdemo.methods.heads.sampler import TokenSampler, flatten_draft, unflatten_draft
from specdemo.models.checkpoints import Checkpoint, open_checkpoint
from specdemo.models.hub import LoadProgress, no_progress
from specdemo.models.packed import packed_bytes


@dataclass(frozen=True, slots=True)
class NoOptions:
    """Options of a method that has none."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A head that `specdemo train` can train."""

    title: str
    sizes: Mapping[str, object]  # keyword arguments of `Head.fresh`
    method: str = ""  # filled in by methods/recipes.py


class Method(Drafter):
    """A drafting method that can be chosen by name. Only `start`, `propose` and `observe` are required.

    `Options` is a frozen dataclass whose fields come from `knob`. By convention the option `nodes` is the size of the
    draft tree (0: a chain of k). A method that wraps another one names it in the option `drafter` and passes it the
    lane's model.
    """

    title: ClassVar[str]
    summary: ClassVar[str]  # one sentence, shown on the page
    needs_model: ClassVar[bool] = False
    exact: ClassVar[bool] = True  # False: output is not the target's even under a lossless rule
    learns: ClassVar[bool] = False  # True: improves with use, so a session reuses it in the next run
    Options: ClassVar[type[Any]] = NoOptions
    serves: ClassVar[Mapping[str, EngineArgs]] = {}  # engine -> its server arguments for this method

    def __init__(self, target: Target, model: object = None, options: object = None) -> None:
        """model: a source, or the result of `load`. Raises ValueError when the drafter does not fit the target."""

    @classmethod
    def recognises(cls, checkpoint: Checkpoint) -> bool:
        """Return True for checkpoints of this method. Only names and shapes may be read.

        `methods.detect_method` defines the order in which methods are tried.
        """
        return False

    @classmethod
    def load(cls, source: str, target: Target, progress: LoadProgress | None = None) -> object:
        """Load a name, folder or hub id. The result can be passed to `__init__` as `model`."""
        raise ValueError(f"{cls.title} takes no model; leave it out")


class Learner(Method):
    """A method with trainable weights."""

    head: nn.Module

    @abstractmethod
    def loss(self, batch: Progress) -> tuple[Tensor, dict[str, float]]:
        """Return the loss, and metrics agree_i: agreement with the target on the i-th token ahead."""


Net = TypeVar("Net", bound=Network)


class Head(Learner, Generic[Net]):
    """A method whose weights read the target's hidden states (`taps`).

    Subclasses define how checkpoints are recognised, read, initialised and written.
    """

    needs_model = True
    requires: ClassVar = frozenset({"hidden_states"})
    recipes: ClassVar[Mapping[str, Recipe]] = {}  # by name
    head: Net
    history: HeadHistory | None = None  # KV cache; None for heads without attention

    def __init__(self, target: Target, model: Net | str, options: Any = None) -> None:
        self.head = self.load(model, target) if isinstance(model, str) else model
        self.options = options or self.Options()
        self.note = self.head.note
        self.sampler = TokenSampler()
        capture = target.new_graph_capture()
        self.graph_cache = GraphCache(capture, self.head.dtype) if capture else None
        self._vocab_size, self.device = target.vocab_size, target.device

    @classmethod
    def load(cls, source: str, target: Target, progress: LoadProgress | None = None) -> Net:
        """Load a head. Raises ValueError for other files and for a head of another target.

        If the checkpoint allows several conventions, the one with the highest agreement on a short text sampled from
        the target is used.
        """
        check_capabilities(cls, target)
        report = progress or no_progress
        head = cls.read(cls.open(source, target, report), target)
        if len(head.conventions) > 1:
            report(0.9, f"detecting the convention of {source}")
            select_convention(head, target, lambda: cls(target, head))
        return head.fuse()

    @classmethod
    def open(cls, source: str, target: Target, progress: LoadProgress) -> Checkpoint:
        """Open the files of `source` without reading the tensors. Raises ValueError when that is impossible."""
        return open_checkpoint(source, progress)

    @classmethod
    @abstractmethod
    def read(cls, checkpoint: Checkpoint, target: Target) -> Net:
        """Build the network from a checkpoint. Raises ValueError when it does not fit the target."""

    @classmethod
    @abstractmethod
    def fresh(cls, target: Target, *sizes: Any, **named: Any) -> Net:
        """Return an untrained network for `target`."""

    @abstractmethod
    def save(self, folder: Path, target_name: str) -> None:
        """Write the head in the public format of its family."""

    def measure(self, batch: Progress) -> None:
        """Measure statistics on held-out text that `save` stores with the weights."""

    def start(self, batch: int, sampling: Sampling, rng: Generator) -> None:
        self.sampler = TokenSampler(sampling, rng)
        if self.history is not None:
            self.history.start(batch)

    def release(self) -> None:
        if self.history is not None:
            self.history.start(0)

    @property
    def graph_note(self) -> str:
        graph_cache = self.history.graph_cache if self.history is not None else self.graph_cache
        return graph_cache.note if graph_cache is not None else ""

    def release_graphs(self) -> None:
        if self.graph_cache is not None:
            self.graph_cache.clear()
        if self.history is not None:
            self.history.release_graphs()

    def run_draft(
        self,
        key: Hashable,
        depth: int,
        draft_fn: Callable[..., Draft],
        *inputs: Tensor,
        num_draws: int = 0,
        truncatable: bool = True,
    ) -> Draft:
        """Run `draft_fn(depth, *inputs)` as a CUDA graph if enabled, else eagerly.

        num_draws: sampled tokens per row. truncatable: a deeper draft may be computed and cut at `depth`.
        """
        graph_cache = self.graph_cache
        graph_depth = graph_cache.depth((key, self.sampler.sampling), depth, truncatable) if graph_cache else None
        if graph_cache is None or graph_depth is None:
            return draft_fn(depth, *inputs)
        noise = self.sampler.predraw_noise(len(inputs[0]), num_draws, self._vocab_size, self.device)
        tensors = (*inputs, *noise)
        run = partial(self._draft_tensors, draft_fn, len(inputs), graph_depth)
        outputs = graph_cache((key, self.sampler.sampling), graph_depth, run, tensors, [x.shape for x in tensors])
        return draft_fn(depth, *inputs) if outputs is None else unflatten_draft(outputs, depth)

    def run_draft_with_history(
        self,
        key: Hashable,
        depth: int,
        draft_fn: Callable[..., Draft],
        *inputs: Tensor,
        max_columns: int,
        reread: int = 0,
        tree: bool = False,
    ) -> Draft:
        """Run `draft_fn(depth, columns, *inputs)` as a CUDA graph if enabled, else eagerly.

        `columns` are the pending columns of the KV cache (None: no column is pending). The draft takes at most
        `max_columns` further columns. reread: see `HeadHistory.flush_pending`. tree: draw nothing, never cut.
        """
        history = self.history
        assert history is not None
        if history.graph_cache is not None and not history.graph_cache.disabled_reason:
            if (overflow := history.prefill_overflow(reread)) is not None:
                draft_fn(1, overflow, *inputs)
            noise = self.sampler.predraw_noise(history.rows, 0 if tree else depth, self._vocab_size, self.device)
            run = partial(self._draft_tensors, draft_fn, 1 + len(inputs))
            outputs = history.draft(
                (key, self.sampler.sampling), depth, run, (*inputs, *noise), not tree, max_columns, reread
            )
            if outputs is not None:
                return unflatten_draft(outputs, depth)
        return draft_fn(depth, history.flush_pending(reread), *inputs)

    def _draft_tensors(self, draft_fn: Callable[..., Draft], num_inputs: int, depth: int, *args: Any) -> Tensors:
        """Run `draft_fn` on the first `num_inputs` arguments, with the rest as sampling noise."""
        sampler, self.sampler = self.sampler, self.sampler.with_noise(args[num_inputs:])
        try:
            return flatten_draft(draft_fn(depth, *args[:num_inputs]))
        finally:
            self.sampler = sampler

    def target_features(self, progress: Progress, taps: tuple[int, ...] = ()) -> Tensor:
        """Return the target's hidden states [B, A, taps H], concatenated in the order of `taps` or self.taps."""
        hidden = [progress.hidden[tap] for tap in taps or self.taps]
        return (hidden[0] if len(hidden) == 1 else torch.cat(hidden, -1)).to(self.head.dtype)

    @property
    def weight_bytes(self) -> int:
        return packed_bytes(self.head) + sum(int(p.numel() * p.element_size()) for p in self.head.parameters())

    @property
    def history_bytes(self) -> int:
        return 0 if self.history is None else self.history.bytes
