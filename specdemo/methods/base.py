"""Base class of drafting methods, and plain decoding. Heads have a base class of their own, in heads/head.py."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import field_validator
from torch import Generator

from specdemo.core.protocol import Budget, Drafter, Progress, Target
from specdemo.core.sampling import Sampling
from specdemo.core.settings import settings
from specdemo.core.tree import Draft
from specdemo.costs.drafting import Drafting, Sizes
from specdemo.costs.shapes import Config, Shape
from specdemo.methods import BaseOptions, EngineArgs, method, setting
from specdemo.methods.facts import FACTS, Facts

if TYPE_CHECKING:
    from specdemo.models.checkpoints import Checkpoint
    from specdemo.models.sources import LoadProgress


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


MAX_CORPUS = 200_000  # characters, about 50,000 tokens: a second of work for the deepest index


class LookupOptions(BaseOptions):
    """Options of every method that copies from texts, itself or by the lookup that it wraps."""

    corpus: str = setting("", "text to draft from too: the files to edit, or an expected answer")

    @field_validator("corpus")
    @classmethod
    def _check_corpus(cls, text: str) -> str:
        if len(text) > MAX_CORPUS:
            raise ValueError(f"the corpus has {len(text):,} characters, the limit is {MAX_CORPUS:,}; give fewer files")
        return text

    def lookup_options(self, inner: str) -> dict[str, str]:
        """Return the options that a wrapper passes on to the method that it wraps. Raises ValueError for a corpus if
        that method does not copy from texts."""
        if self.corpus and "corpus" not in settings(method(inner).Options):
            raise ValueError(f"option 'corpus' is for 'suffix' and 'ngram', not for {inner!r}; leave it out")
        return {"corpus": self.corpus} if self.corpus else {}


def corpus_ids(options: object, target: Target) -> list[int]:
    """Return the token ids of the corpus; none for options without one. Raises ValueError for a target without a
    tokenizer."""
    corpus = getattr(options, "corpus", "")  # a method of another package has options of its own
    if not corpus:
        return []
    if target.tokenizer is None:
        raise ValueError(f"{target.name} has no tokenizer, which a corpus needs; leave the corpus out")
    return [*target.tokenizer(corpus, add_special_tokens=False, verbose=False)["input_ids"]]


class Method(Drafter):
    """A drafting method that can be chosen by name. Only `start`, `propose` and `observe` are required.

    method: its name in the table of facts, which then has its title, cost and marks. tree: its `tree_nodes`.

    `Options` is a `BaseOptions` whose fields come from `setting`. A method that wraps another one names it in the
    option `drafter` and passes it the lane's model.
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
    fits_tree: ClassVar[bool] = False  # True: where the costs of passes are known, they choose the number of nodes
    # keys of config.json that it reads; empty, as for a subclass that sets none: others are not named
    config_keys: ClassVar[frozenset[str]] = frozenset()
    serves: ClassVar[Mapping[str, EngineArgs]] = {}  # engine -> its server arguments for this method

    def __init_subclass__(cls, method: str = "", tree: Any = None, **named: object) -> None:
        super().__init_subclass__(**named)
        cls.tree_nodes = staticmethod(tree or cls.tree_nodes)  # type: ignore[method-assign]
        if method:
            cls.facts = FACTS[method]
            cls.title, cls.config_marks = cls.facts.title, cls.facts.marks

    @staticmethod
    def tree_nodes(options: Any) -> int | None:
        """Return the nodes of the draft tree with these options. 0: k nodes; None: it drafts a chain."""
        return None

    @staticmethod
    def least_k(options: Any) -> int:
        """Return the shortest draft length with which these options work."""
        return 0

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
    def recognises(cls, checkpoint: "Checkpoint") -> bool:
        """Return True for checkpoints of this method. Only names and shapes may be read.

        `methods.detect_method` defines the order in which methods are tried.
        """
        return False

    @classmethod
    def load(cls, source: str, target: Target, progress: "LoadProgress | None" = None) -> object:
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
