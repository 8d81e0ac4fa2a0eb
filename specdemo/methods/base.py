"""The contract: `Method`, one way of drafting, and `Head`, a method with weights that read the target's hidden states.

B rows, A columns, H hidden.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Generator, Tensor, nn

from specdemo.core.protocol import Budget, Progress, Target
from specdemo.core.sampling import Sampling
from specdemo.core.tree import Draft
from specdemo.methods.flags import ServeLine
from specdemo.methods.heads.choose import Choice
from specdemo.methods.heads.network import Network
from specdemo.methods.heads.runtime import HeadHistory
from specdemo.methods.heads.settle import settle
from specdemo.models.checkpoints import Checkpoint, open_checkpoint
from specdemo.models.hub import LoadProgress, silent
from specdemo.models.packed import packed_bytes


@dataclass(frozen=True, slots=True)
class NoOptions:
    """Nothing to choose."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A head that can be trained here: its name for people, and what `fresh` is told."""

    title: str
    sizes: Mapping[str, Any]


class Method(ABC):
    """One way of drafting, a `core.protocol.Drafter`. Subclasses say how; all else has a default.

    `Options` is a frozen dataclass whose fields are made by `knob`. By convention `nodes` is the size of the draft tree
    (0: a chain of k), and a method that wraps another names it in `drafter` and hands the model on.
    """

    title: ClassVar[str]
    summary: ClassVar[str]  # one sentence for people
    needs_model: ClassVar[bool] = False
    learns: ClassVar[bool] = False  # gets better with use, so that a session keeps it from run to run
    Options: ClassVar[type[Any]] = NoOptions
    serves: ClassVar[Mapping[str, ServeLine]] = {}  # engine -> how its server is told to draft so
    taps: tuple[int, ...] = ()
    note = ""  # one sentence on what it decided for itself, such as a convention it had to probe for

    def __init__(self, target: Target, model: Any = None, options: Any = None) -> None:
        """model: a source, or what `load` makes of it. Raises ValueError, with the cure, when it does not fit."""

    @classmethod
    def recognises(cls, checkpoint: Checkpoint) -> bool:
        """Whether it reads such files; told from names and shapes alone. `methods.kind_of` says who is asked first."""
        return False

    @classmethod
    def load(cls, source: str, target: Target, progress: LoadProgress | None = None) -> Any:
        """A name, folder or hub id -> what `__init__` takes as `model`, so that it need not be read again."""
        raise ValueError(f"{cls.title} takes no model; leave it out")

    @abstractmethod
    def start(self, batch: int, sampling: Sampling, rng: Generator) -> None:
        """A new history; everything remembered of the last one is gone."""

    @abstractmethod
    def propose(self, budget: Budget) -> Draft:
        """A draft [B, N] behind the last root, within the budget; B rows, N nodes."""

    @abstractmethod
    def observe(self, progress: Progress) -> None:
        """What became history: the prompt first, then every step; `progress.outputs` ends in the new root."""

    def timed(self, ms: Mapping[str, float]) -> None:
        """The device time of the step that was observed last, by lap; the lane's clock is read once it is over."""

    def release(self) -> None:
        """Free what is remembered of a text."""

    @property
    def max_length(self) -> int | None:
        """The tokens it can read, behind which it drafts nothing; None: as many as the target."""
        return None

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights it holds beside the target's."""
        return 0

    @property
    def history_bytes(self) -> int:
        """Bytes of what it remembers of the text at hand."""
        return 0


class Learner(Method):
    """A method with weights of its own, which can be trained."""

    head: nn.Module

    @abstractmethod
    def loss(self, batch: Progress) -> tuple[Tensor, dict[str, float]]:
        """What to lower, and metrics: agree_i, how often the i-th token ahead is what the target says."""


Net = TypeVar("Net", bound=Network)


class Head(Learner, Generic[Net]):
    """A method whose weights read the target's hidden states (`taps`). Its class says how its files are recognised,
    read, made fresh and written."""

    needs_model = True
    recipes: ClassVar[Mapping[str, Recipe]] = {}  # name -> what is trained under it
    head: Net
    history: HeadHistory | None = None  # of heads with keys and values

    def __init__(self, target: Target, model: Net | str, options: Any = None) -> None:
        self.head = self.load(model, target) if isinstance(model, str) else model
        self.options = options or self.Options()
        self.note = self.head.note
        self.choice = Choice()

    @classmethod
    def load(cls, source: str, target: Target, progress: LoadProgress | None = None) -> Net:
        """Raises ValueError, one line, for other files and for a head of another target.

        Where the file leaves open how it is to be read, the target writes a short text and the reading whose guesses at
        it are right most often is kept.
        """
        report = progress or silent
        head = cls.read(cls.open(source, target, report), target)
        if len(head.readings) > 1:
            report(0.9, f"finding out how to read {source}")
            settle(head, target, lambda: cls(target, head))
        return head.hasten()

    @classmethod
    def open(cls, source: str, target: Target, progress: LoadProgress) -> Checkpoint:
        """The files of `source`, described and not yet read. Raises ValueError, one line, with the cure."""
        return open_checkpoint(source, progress)

    @classmethod
    @abstractmethod
    def read(cls, checkpoint: Checkpoint, target: Target) -> Net:
        """Its weights, which may be on the meta device. Raises ValueError, one line, where they do not fit."""

    @classmethod
    @abstractmethod
    def fresh(cls, target: Target, *sizes: Any, **named: Any) -> Net:
        """Untrained weights for `target`, as `load` would give them."""

    @abstractmethod
    def save(self, folder: Path, target_name: str) -> None:
        """Write the head in its family's public format."""

    def measure(self, batch: Progress) -> None:
        """Find out on held-out text what is saved beside the weights."""

    def start(self, batch: int, sampling: Sampling, rng: Generator) -> None:
        self.choice = Choice(sampling, rng)
        if self.history is not None:
            self.history.start(batch)

    def release(self) -> None:
        if self.history is not None:
            self.history.start(0)

    def tapped(self, progress: Progress, taps: tuple[int, ...] = ()) -> Tensor:
        """What the target's layers say, [B, A, taps H]; those of `taps`, in that order, which may name some twice."""
        hidden = [progress.hidden[tap] for tap in taps or self.taps]
        return (hidden[0] if len(hidden) == 1 else torch.cat(hidden, -1)).to(self.head.dtype)

    @property
    def weight_bytes(self) -> int:
        return packed_bytes(self.head) + sum(int(p.numel() * p.element_size()) for p in self.head.parameters())

    @property
    def history_bytes(self) -> int:
        return 0 if self.history is None else self.history.bytes
