"""Base class of heads: methods whose weights read the target's hidden states.

B rows, A columns, H hidden size.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Generator, Tensor

from specdemo.core.protocol import Progress, Target
from specdemo.core.sampling import Sampling
from specdemo.methods import BaseOptions, check_capabilities
from specdemo.methods.base import DraftOptions, Method
from specdemo.methods.heads.formats import unread_keys
from specdemo.methods.heads.network import Network, select_convention
from specdemo.methods.heads.runtime import HeadRuntime
from specdemo.methods.heads.sampler import TokenSampler
from specdemo.models.checkpoints import Checkpoint, check_finite, open_checkpoint, training_note
from specdemo.models.packed import packed_bytes
from specdemo.models.ref import ModelRef
from specdemo.models.sources import LoadProgress, no_progress
from specdemo.training.losses import Objective


@dataclass(frozen=True, slots=True)
class Recipe:
    """A head that `specdemo train` can train."""

    title: str
    sizes: Mapping[str, object]  # keyword arguments of `Head.fresh`
    method: str = ""  # filled in by methods/recipes.py


Net = TypeVar("Net", bound=Network)


class Head(Method, Generic[Net]):
    """A method whose weights read the target's hidden states (`taps`).

    Subclasses define how checkpoints are recognised, read, initialised and written. One with a `loss` is `Trainable`.
    """

    needs_model = True
    requires: ClassVar = frozenset({"hidden_states"})
    Options: ClassVar[type[BaseOptions]] = DraftOptions
    recipes: ClassVar[Mapping[str, Recipe]] = {}  # by name
    objective: Objective = Objective()
    head: Net
    runtime: HeadRuntime

    def __init__(self, target: Target, model: Net | str, options: Any = None) -> None:
        self.head = self.load(model, target) if isinstance(model, str) else model
        self.options = options or self.Options()
        self.name, self.note = self.head.name, self.head.note
        self.sampler = TokenSampler()
        self.device = target.device
        self.runtime = self.new_runtime(target)

    def new_runtime(self, target: Target) -> HeadRuntime:
        """Create what runs the drafts. Override it for a head with a KV cache."""
        return HeadRuntime(target, self.head.dtype)

    @classmethod
    def load(cls, source: str, target: Target, progress: LoadProgress | None = None) -> Net:
        """Load a head. Raises ValueError for other files and for a head of another target."""
        head = cls.load_trainable(source, target, progress).fuse()
        head.note = " ".join(filter(None, (head.note, training_note(source))))
        return head

    @classmethod
    def load_trainable(cls, source: str, target: Target, progress: LoadProgress | None = None) -> Net:
        """Load a head as `load` does, with the separate weights that training needs. If its file allows several
        conventions, use the one that agrees best with the target."""
        check_capabilities(cls, target)
        checkpoint = cls.open(ModelRef(source), target, progress or no_progress)
        check_finite(checkpoint.name, checkpoint.tensors.items())
        head = cls.read(checkpoint, target)
        head.name = checkpoint.name
        if config_keys := vars(cls).get("config_keys"):  # a subclass reads files of its own
            head.note = " ".join(filter(None, (head.note, unread_keys(checkpoint, config_keys))))
        if len(head.conventions) > 1:
            (progress or no_progress)(0.9, f"detecting the convention of {source}")
            select_convention(head, target, lambda: cls(target, head))
        return head

    @classmethod
    def open(cls, source: ModelRef, target: Target, progress: LoadProgress) -> Checkpoint:
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
        """See `Trainable.measure`."""

    def start(self, batch: int, sampling: Sampling, rng: Generator) -> None:
        self.sampler = TokenSampler(sampling, rng)
        self.runtime.start(batch)

    def release(self) -> None:
        self.runtime.start(0)

    @property
    def graph_note(self) -> str:
        return self.runtime.graph_note

    def release_graphs(self) -> None:
        self.runtime.release_graphs()

    def target_features(self, progress: Progress, taps: tuple[int, ...] = ()) -> Tensor:
        """Return the target's hidden states [B, A, taps H], concatenated in the order of `taps` or self.taps."""
        hidden = [progress.hidden[tap] for tap in taps or self.taps]
        return (hidden[0] if len(hidden) == 1 else torch.cat(hidden, -1)).to(self.head.dtype)

    @property
    def weight_bytes(self) -> int:
        return packed_bytes(self.head) + sum(int(p.numel() * p.element_size()) for p in self.head.parameters())

    @property
    def history_bytes(self) -> int:
        return self.runtime.bytes
