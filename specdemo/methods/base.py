"""Base classes of drafting methods: `Method`, and `Head` for methods that read the target's hidden states.

B rows, A columns, N draft nodes, V vocabulary, H hidden size.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Generator, Tensor

from specdemo.core.protocol import Budget, Drafter, Progress, Target
from specdemo.core.sampling import Sampling
from specdemo.core.tree import Draft
from specdemo.costs.drafting import Drafting, Sizes
from specdemo.costs.shapes import Config, Shape
from specdemo.methods import BaseOptions, EngineArgs, check_capabilities, setting
from specdemo.methods.facts import FACTS, Facts
from specdemo.methods.heads.network import Network, select_convention
from specdemo.methods.heads.runtime import HeadRuntime
from specdemo.methods.heads.sampler import TokenSampler
from specdemo.models.checkpoints import Checkpoint, check_finite, open_checkpoint, training_note
from specdemo.models.packed import packed_bytes
from specdemo.models.sources import LoadProgress, no_progress
from specdemo.training.losses import Objective


class DraftOptions(BaseOptions):
    """Options of every method whose drafter gives its tokens probabilities."""

    p_min: float = setting(
        0.0,
        "end a draft before a token whose most likely candidate has less probability than this, as llama.cpp does; 0: "
        "never",
        low=0.0,
        high=1.0,
        step=0.05,
    )


@dataclass(frozen=True, slots=True)
class Recipe:
    """A head that `specdemo train` can train."""

    title: str
    sizes: Mapping[str, object]  # keyword arguments of `Head.fresh`
    method: str = ""  # filled in by methods/recipes.py


class Method(Drafter):
    """A drafting method that can be chosen by name. Only `start`, `propose` and `observe` are required.

    method: its name in the table of facts, which then has its title, cost and marks.

    `Options` is a `BaseOptions` whose fields come from `setting`. By convention the option `nodes` is the size of the
    draft tree (0: a chain of k). A method that wraps another one names it in the option `drafter` and passes it the
    lane's model.
    """

    facts: ClassVar[Facts] = Facts("")
    title: ClassVar[str]
    summary: ClassVar[str]  # one sentence, shown on the page
    config_marks: ClassVar[tuple[str, ...]] = ()  # lower-case strings that only configs of its drafters contain
    needs_model: ClassVar[bool] = False
    exact: ClassVar[bool] = True  # False: output is not the target's even under a lossless rule
    looks_up: ClassVar[bool] = False  # True: copies from texts at hardly any cost; a draft need not be verified
    learns: ClassVar[bool] = False  # True: improves with use, so a session reuses it in the next run
    Options: ClassVar[type[BaseOptions]] = BaseOptions
    # keys of config.json that it understands; empty, as for a subclass that sets none: they are not checked
    config_keys: ClassVar[frozenset[str]] = frozenset()
    serves: ClassVar[Mapping[str, EngineArgs]] = {}  # engine -> its server arguments for this method

    def __init_subclass__(cls, method: str = "", **named: object) -> None:
        super().__init_subclass__(**named)
        if method:
            cls.facts = FACTS[method]
            cls.title, cls.config_marks = cls.facts.title, cls.facts.marks

    @classmethod
    def drafting_cost(cls, target: Shape, config: Config, options: Sizes) -> Drafting | None:
        """Return the passes of a step. None: unknown, so the method cannot be predicted.

        config: the drafter's config.json; empty: use typical sizes for the target. options: whole numbers among the
        options of the method. Raises ValueError with one line.
        """
        return cls.facts.cost(target, config, options) if cls.facts.cost else None

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


class NoDraft(Method, method="none"):
    summary = "One token per target pass; the baseline of every comparison."

    def __init__(self, target: Target, model: object = None, options: BaseOptions | None = None) -> None:
        self._device = target.device

    def start(self, batch: int, sampling: Sampling, rng: Generator) -> None:
        self._empty_draft = Draft.empty(batch, self._device)

    def propose(self, budget: Budget) -> Draft:
        return self._empty_draft

    def observe(self, progress: Progress) -> None:
        pass


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
        checkpoint = cls.open(source, target, progress or no_progress)
        check_finite(checkpoint.name, checkpoint.tensors.items())
        head = cls.read(checkpoint, target)
        head.name = checkpoint.name
        if len(head.conventions) > 1:
            (progress or no_progress)(0.9, f"detecting the convention of {source}")
            select_convention(head, target, lambda: cls(target, head))
        return head

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
