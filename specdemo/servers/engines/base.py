"""Base classes of engines: how a server's answers are read, and how a server is found and started. A new engine is a
file in this package and a line in `specdemo.servers.engines`.
"""

import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar
from urllib.parse import urlsplit

from specdemo.methods import BASELINE, EngineArgs, Flags, MethodOptions, method, method_options
from specdemo.models.ref import ModelRef
from specdemo.servers.counters import Samples, ServerStats

GPU_ONLY = "on Linux with an NVIDIA GPU"


class UnsupportedByEngine(Exception):
    """Why an engine cannot run a lane, in one sentence."""


@dataclass(frozen=True, slots=True)
class Installed:
    """Facts about an installed engine."""

    version: str
    methods: Sequence[str]  # the engine's own names
    gpus: int


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What a server runs: the target, and a method with its model. model: None if the target contains the heads."""

    target: ModelRef
    address: str  # URL
    dtype: str
    quantization: str | None
    gpus: int
    method: str
    model: ModelRef | None
    k: int
    options: MethodOptions


class ReportingEngine(ABC):
    """An engine whose answers and metrics specdemo can read. Each method returns None for data of another engine."""

    name: ClassVar[str]  # on the command line and in links
    title: ClassVar[str]
    request: ClassVar[Mapping[str, object]] = {}  # fields of a request that make the answer report its drafts
    metrics: ClassVar[frozenset[str]] = frozenset()  # names in the metrics that `statistics` reads, without _total
    generated: ClassVar[str] = ""  # name of the counter of output tokens, without _total
    running: ClassVar[str] = ""  # name of the gauge of requests that are being decoded
    speed: ClassVar[str] = ""  # name of the gauge of output tokens per second
    drafts_with: ClassVar[frozenset[str]] = frozenset()  # methods of an engine that specdemo does not start
    counts_unverified: ClassVar[frozenset[str]] = frozenset()  # methods whose unverified tokens count as draft tokens
    full_draft_cache: ClassVar[str] = ""  # flags that keep the KV cache of the drafter in 16 bits
    # how a user writes k draft tokens, with {k} or {block} for k + 1, and how to turn speculation off
    draft_length: ClassVar[tuple[str, str]] = ("", "")

    def draft_request(self, model: str, k: int) -> dict[str, object]:
        """Return the fields of a request that drafts with a model; empty if the server decides at its start."""
        return {}

    def draft_length_setting(self, k: int, method: str = "", drafter: str = "") -> str:
        """Return the flags that make the engine draft k tokens, as a user writes them, or for k = 0 how to turn
        speculation off; an empty text if they are unknown."""
        return self.draft_length[not k].format(k=k, block=k + 1)

    def statistics(self, old: Samples, new: Samples) -> ServerStats | None:
        """Return the statistics between two readings of the metrics, None if they are not of this engine."""
        return None

    def acceptance(self, chunk: Mapping[str, object]) -> ServerStats | None:
        """Return the statistics of one answer from a chunk of its stream, None if it has none."""
        return None


class ServingEngine(ReportingEngine):
    """An engine that specdemo can start. Only `start` and the attributes without a default are required."""

    program: ClassVar[str]  # default program
    install: ClassVar[str]  # command that installs the engine
    methods: ClassVar[Mapping[str, EngineArgs]] = {}  # method -> its flags; other packages declare `Method.serves`
    unsupported: ClassVar[str] = ""  # reason for all other methods; "": the engine does not support them
    p_min: ClassVar[str] = ""  # flag for the least probability of a draft token; "": none
    corpus: ClassVar[str] = ""  # flag for a file that lookups draft from too; "": none
    parallel: ClassVar[str] = ""  # flag for the number of GPUs; "": specdemo starts the engine on the CPU
    same_bits: ClassVar[str] = ""  # the option for the same bits whatever else a pass computes, and what it gives
    quantization: ClassVar[Mapping[str, Flags]] = {}  # kinds of quantization while loading, and their flags
    environment: ClassVar[Mapping[str, str]] = {"DO_NOT_TRACK": "1"}  # defaults of environment variables

    def is_installed(self) -> bool:
        """Return whether the default program can run the engine."""
        return shutil.which(self.program) is not None

    def find(self, command: str | None = None) -> str:
        """Return the path of the program. command: a path or a name on PATH; None: the default program.

        Raises ValueError, with the command that installs the engine, if there is no such program.
        """
        if command is None and not self.is_installed():
            raise ValueError(f"{self.title} is not installed; run: {self.install}")
        path = shutil.which(command or self.program)
        if path is None:
            raise ValueError(
                f"there is no program {command or self.program}; install it or pass its path: --command PATH"
            )
        return path

    def probe(self, path: str) -> Installed | None:
        """Return facts about the program at `path`, None if they are unknown."""
        return None

    def served_name(self, target: ModelRef) -> str | None:
        """Return the name of the target in requests; None: as the server lists it."""
        return None

    @abstractmethod
    def start(self, config: ServerConfig) -> Flags:
        """Return the arguments that start a server without speculation and without prefix caching.

        All lanes read the same prompt, and a cached one costs nothing.
        """

    def command(self, config: ServerConfig) -> list[str]:
        """Return the command line of a server, the default program first. Raises UnsupportedByEngine."""
        if config.gpus > 1 and not self.parallel:
            raise UnsupportedByEngine(f"specdemo starts {self.title} on the CPU; omit --gpus")
        drafting = self.draft_flags(config)
        gpus = [self.parallel, str(config.gpus)] if config.gpus > 1 else []
        return [self.program, *self.start(config), *gpus, *drafting]

    def draft_flags(self, config: ServerConfig) -> Flags:
        """Return the flags of the method; none for plain decoding. Raises UnsupportedByEngine."""
        if config.method == BASELINE:
            return []
        flags = self.methods.get(config.method) or method(config.method).serves.get(self.name)
        if flags is None:
            raise UnsupportedByEngine(self.unsupported or f"{self.title} does not support this method")
        model = config.model.location if config.model else None
        if config.options.get("corpus") and not self.corpus:
            raise UnsupportedByEngine(f"{self.title} drafts from no corpus; leave the option out")
        if least := config.options.get("p_min"):
            if not self.p_min:
                raise UnsupportedByEngine(f"{self.title} does not end drafts by probability; set p_min to 0")
            return [*flags(model, config.k, config.options), self.p_min, f"{least:g}"]
        return flags(model, config.k, config.options)

    def note(self, config: ServerConfig) -> str:
        """Return what a printed command needs, an empty text for nothing. Raises UnsupportedByEngine."""
        return ""

    def rejection(self, command: Sequence[str], installed: Installed | None) -> str:
        """Return why the installed version cannot run the command, an empty text if it can."""
        return ""

    def fit(
        self, command: list[str], installed: Installed | None, place: int, servers: int, gpus: int
    ) -> tuple[list[str], dict[str, str]]:
        """Adapt the command of server `place` of `servers`, each with `gpus` GPUs, to this machine.

        Return the command and environment variables.
        """
        return command, {}


def default_options(name: str) -> MethodOptions:
    """Return the options of a method with their defaults."""
    return {option.name: option.default for option in method_options(name)}


def name_contains(model: str | None, *words: str) -> bool:
    """Return whether a model's name contains one of the words. Engines have a name per variant of a method."""
    return any(word in (model or "").lower() for word in words)


def split_revision(model: str) -> tuple[str, str]:
    """Split `organisation/model@revision`; the revision may be empty."""
    name, _, revision = model.partition("@")
    return name, revision


def target_flags(config: ServerConfig, quantization: Mapping[str, Flags]) -> tuple[str, Flags]:
    """Return the path of the target, and the flags that vLLM and SGLang share: name, revision and quantization."""
    name, revision = split_revision(config.target)
    path = ModelRef(name).location
    flags = ["--served-model-name", config.target] if path != config.target else []
    flags += ["--revision", revision] if revision else []
    return path, [*flags, *quantization.get(config.quantization or "", [])]


def address_flags(config: ServerConfig) -> Flags:
    """Return the flags for dtype and address. A GGUF file has its own dtype."""
    address = urlsplit(config.address)
    dtype = [] if config.target.is_gguf_file else ["--dtype", config.dtype]
    return [*dtype, "--host", address.hostname or "127.0.0.1", "--port", str(address.port or 8000)]
