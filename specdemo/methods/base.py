"""The contract: `Method`, one way of drafting, and `Head`, a method with weights that read the target's hidden states.

B rows, A columns, H hidden.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Generator, Tensor, nn

from specdemo.core.accept import AcceptRule
from specdemo.core.protocol import Budget, Progress, Target
from specdemo.core.sampling import Sampling
from specdemo.core.tree import Draft
from specdemo.methods.flags import EngineArgs
from specdemo.methods.heads.conventions import select_convention
from specdemo.methods.heads.network import Network
from specdemo.methods.heads.runtime import HeadHistory
from specdemo.methods.heads.sampler import TokenSampler, flatten_draft, unflatten_draft
from specdemo.models.checkpoints import Checkpoint, open_checkpoint
from specdemo.models.graphs import Tensors
from specdemo.models.hub import LoadProgress, no_progress
from specdemo.models.packed import packed_bytes
from specdemo.models.target import HFTarget


@dataclass(frozen=True, slots=True)
class NoOptions:
    """Nothing to choose."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A head that can be trained here: its name for people, what `fresh` is told, and the method whose it is."""

    title: str
    sizes: Mapping[str, object]
    method: str = ""  # in the list of all recipes


class Method(ABC):
    """One way of drafting, a `core.protocol.Drafter`. Subclasses say how; all else has a default.

    `Options` is a frozen dataclass whose fields are made by `knob`. By convention `nodes` is the size of the draft tree
    (0: a chain of k), and a method that wraps another names it in `drafter` and hands the model on.
    """

    title: ClassVar[str]
    summary: ClassVar[str]  # one sentence for people
    needs_model: ClassVar[bool] = False
    exact: ClassVar[bool] = True  # under an exact rule the text is the target's
    learns: ClassVar[bool] = False  # gets better with use, so that a session keeps it from run to run
    Options: ClassVar[type[Any]] = NoOptions
    serves: ClassVar[Mapping[str, EngineArgs]] = {}  # engine -> how its server is told to draft so
    taps: tuple[int, ...] = ()
    note = ""  # one sentence on what it decided for itself, such as a convention it had to probe for

    @property
    def graph_note(self) -> str:
        """Why what it runs on a GPU is not recorded, where that was to be."""
        return ""

    def __init__(self, target: Target, model: object = None, options: object = None) -> None:
        """model: a source, or what `load` makes of it. Raises ValueError, with the cure, when it does not fit."""

    @classmethod
    def recognises(cls, checkpoint: Checkpoint) -> bool:
        """Whether it reads such files; told from names and shapes alone. `methods.kind_of` says who is asked first."""
        return False

    @classmethod
    def load(cls, source: str, target: Target, progress: LoadProgress | None = None) -> object:
        """A name, folder or hub id -> what `__init__` takes as `model`, so that it need not be read again."""
        raise ValueError(f"{cls.title} takes no model; leave it out")

    @abstractmethod
    def start(self, batch: int, sampling: Sampling, rng: Generator) -> None:
        """A new history; everything remembered of the last one is gone."""

    def accept_rule(self, default: AcceptRule) -> AcceptRule:
        """The rule that its drafts are judged by in the text that has begun, given the one that was chosen."""
        return default

    @abstractmethod
    def propose(self, budget: Budget) -> Draft:
        """A draft [B, N] behind the last root, within the budget; B rows, N nodes."""

    @abstractmethod
    def observe(self, progress: Progress) -> None:
        """What became history: the prompt first, then every step; `progress.outputs` ends in the new root."""

    def on_step_timed(self, ms: Mapping[str, float]) -> None:
        """The device time of the step that was observed last, by lap; the lane's clock is read once it is over."""

    def release(self) -> None:
        """Free what is remembered of a text."""

    def capture_graphs(self, budget: Budget) -> None:
        """Off the clock, behind a prompt: propose what a budget may lead to and not every step does, so that it is
        recorded before a clock runs."""

    def release_graphs(self) -> None:
        """Free what was recorded of what it runs; that is made anew where it is needed."""

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
        self.sampler = TokenSampler()
        self.graph_cache = target.new_graph_cache(self.head.dtype) if isinstance(target, HFTarget) else None
        self._vocab_size, self.device = target.vocab_size, target.device

    @classmethod
    def load(cls, source: str, target: Target, progress: LoadProgress | None = None) -> Net:
        """Raises ValueError, one line, for other files and for a head of another target.

        Where the file leaves open how it is to be read, the target writes a short text and the reading whose guesses at
        it are right most often is kept.
        """
        report = progress or no_progress
        head = cls.read(cls.open(source, target, report), target)
        if len(head.conventions) > 1:
            report(0.9, f"finding out how to read {source}")
            select_convention(head, target, lambda: cls(target, head))
        return head.fuse()

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
        """`write(depth, *inputs)`, as a recorded pass where passes are recorded. draws: tokens of a row that are drawn;
        cut: what is deeper than `depth` can be left out."""
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
        """`write(depth, columns, *inputs)`, which drafts in at most `ahead` columns behind what the head has read.
        columns: those that wait, None: nothing does; again: as of `catch_up`; tree: nothing is drawn, nothing cut."""
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
        """What `write` says of its inputs; what follows these is noise."""
        sampler, self.sampler = self.sampler, self.sampler.with_noise(args[num_inputs:])
        try:
            return flatten_draft(draft_fn(depth, *args[:num_inputs]))
        finally:
            self.sampler = sampler

    def target_features(self, progress: Progress, taps: tuple[int, ...] = ()) -> Tensor:
        """What the target's layers say, [B, A, taps H]; those of `taps`, in that order, which may name some twice."""
        hidden = [progress.hidden[tap] for tap in taps or self.taps]
        return (hidden[0] if len(hidden) == 1 else torch.cat(hidden, -1)).to(self.head.dtype)

    @property
    def weight_bytes(self) -> int:
        return packed_bytes(self.head) + sum(int(p.numel() * p.element_size()) for p in self.head.parameters())

    @property
    def history_bytes(self) -> int:
        return 0 if self.history is None else self.history.bytes
