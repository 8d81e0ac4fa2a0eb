"""Repositories of the Hugging Face hub: what one holds, and its files on this machine.

A name is `organisation/model`, with `@revision` behind it where a branch, a tag or a commit is meant. Only what a model
needs is fetched, into the Hugging Face cache. A connection that is cut goes on where it broke off; files that are
complete are kept whatever happens to the rest. HF_HUB_OFFLINE=1 uses what is there.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelInfo, constants, snapshot_download, try_to_load_from_cache
from tqdm.auto import tqdm

from specdemo.core.suggest import suggest

LoadProgress = Callable[[float, str], None]  # share done 0..1, what is being done; it may raise to stop the loading

MASK = "mask_embedding.pt"  # of a drafter's mask token, beside its weights
DESCRIPTION = ("*.json", "*.txt", "*.model", "*.jinja", MASK)  # config, tokenizer, chat template
WEIGHTS = "*.safetensors"
LEFT_BY_TRAINERS = ("training_args.*", "optimizer.*", "scheduler.*", "rng_state*", "trainer_state.*")
POLL_S = 0.2
UNANSWERED = {"LocalEntryNotFoundError", "ConnectError", "ConnectionError", "TransportError", "TimeoutException"}
SPARE_DISK = 500_000_000  # bytes that stay free


class Cancelled(ValueError):
    """Raised by a `LoadProgress` that wants the loading to end."""


class Unreachable(ValueError):
    """Nobody answers where the hub should be."""


@dataclass(frozen=True, slots=True)
class Repository:
    """What the hub says of the files that a model needs. Files lie at the top of a repository, nowhere below."""

    name: str
    files: Mapping[str, int]  # bytes
    numbers: Mapping[str, int]  # how many, by the precision they are stored in; empty where the hub does not know

    @property
    def weights(self) -> list[str]:
        """The files that are not part of its description."""
        return [file for file in self.files if not any(fnmatch(file, kind) for kind in DESCRIPTION)]

    def missing(self) -> dict[str, int]:
        """The files that are not on this machine yet."""
        repository, revision = split(self.name)
        here = {f for f in self.files if isinstance(try_to_load_from_cache(repository, f, revision=revision), str)}
        return {file: size for file, size in self.files.items() if file not in here}


def silent(share: float, what: str) -> None:
    """Tell nobody of the progress."""


def split(name: str) -> tuple[str, str | None]:
    """`organisation/model@revision` -> both; None: the main branch."""
    repository, _, revision = name.partition("@")
    return repository, revision or None


def embedded_folder() -> Path:
    """Where the shipped models are; SPECDEMO_MODELS overrules it."""
    return Path(os.environ.get("SPECDEMO_MODELS") or Path(__file__).parent / "embedded")


def shipped(folder: str | Path) -> bool:
    """Whether the folder is that of an embedded model."""
    return Path(folder).resolve().is_relative_to(embedded_folder().resolve())


def embedded_names() -> list[str]:
    """The names of the models that come with the package."""
    return sorted(config.parent.name for config in embedded_folder().glob("*/config.json"))


def offline() -> bool:
    """Whether the hub may not be asked."""
    return bool(constants.HF_HUB_OFFLINE)


def ask(name: str) -> ModelInfo:
    """What the hub says of a repository and its files.

    Raises ValueError, one line, when it is missing, gated or out of reach, and Unreachable where nobody answers.
    """
    repository, revision = split(name)
    with one_line(name):
        return HfApi().model_info(repository, revision=revision, files_metadata=True)


def described(name: str, info: ModelInfo, pickled: Sequence[str] = ()) -> Repository:
    """Of all its files those that a model needs. pickled: patterns of weights that will do without safetensors."""
    top = {f.rfilename: f.size or 0 for f in info.siblings or [] if "/" not in f.rfilename}
    described = {f: size for f, size in top.items() if any(fnmatch(f, kind) for kind in DESCRIPTION)}
    weights = [f for f in top if fnmatch(f, WEIGHTS)]
    # a copy in its author's own format beside the one for transformers would double the download
    weights = [f for f in weights if f.startswith("model")] or weights
    weights = weights or [f for f in top if any(fnmatch(f, kind) for kind in pickled)]
    wanted = {**described, **{f: top[f] for f in weights}}
    files = {f: size for f, size in wanted.items() if not any(fnmatch(f, kind) for kind in LEFT_BY_TRAINERS)}
    return Repository(name, files, dict(info.safetensors.parameters) if info.safetensors else {})


def fetch(found: Repository, report: LoadProgress = silent) -> Path:
    """Bring its files here. Raises ValueError, one line, without space for them, and whatever `report` raises."""
    missing = found.missing()
    total, cache = sum(missing.values()), Path(constants.HF_HUB_CACHE)
    free = shutil.disk_usage(next(p for p in (cache, *cache.parents) if p.exists())).free
    if missing and total + SPARE_DISK > free:
        raise ValueError(
            f"{found.name}: {_gb(total)} are to be downloaded and {_gb(free)} of disk are free; make room in {cache}, "
            "or name another place with HF_HOME"
        )
    return _snapshot(found.name, list(found.files), total, report)


def describe(found: Repository) -> Path:
    """The folder with the repository's config and tokenizer, without its weights. Raises ValueError with one line."""
    return _snapshot(found.name, [file for file in found.files if file not in found.weights], 0, silent)


def remote_headers(found: Repository) -> Iterator[tuple[str, list[int], str]]:
    """Name, shape and stored precision of every tensor of its safetensors; only their first bytes are fetched."""
    repository, revision = split(found.name)
    for file in found.weights:
        with one_line(found.name):
            header = HfApi().parse_safetensors_file_metadata(repository, file, revision=revision)
        for name, tensor in header.tensors.items():
            yield name, list(tensor.shape), str(tensor.dtype)


def cached(name: str) -> Path:
    """The folder of what was fetched before. Raises ValueError, one line, when nothing was."""
    # one file's name: the client takes a folder for incomplete that lacks any file a pattern matches
    return _snapshot(name, ["config.json"], 0, silent, local=True)


def _snapshot(name: str, patterns: list[str], total: int, report: LoadProgress, local: bool = False) -> Path:
    repository, revision = split(name)
    counter = _Counter(total, name)
    download = partial(snapshot_download, repository, revision=revision, local_files_only=local)
    with one_line(name):
        return Path(_awaited(partial(download, allow_patterns=patterns, tqdm_class=counter.bar()), counter, report))


class _Counter:
    """Bytes that arrived, in the words of a progress line; the downloader's threads count, one other thread reads."""

    def __init__(self, total: int, name: str) -> None:
        self.total, self.name, self.done, self.stopped = total, name, 0, False
        self._begin = time.monotonic()

    def bar(self) -> type[Any]:
        """What the downloader takes for its progress bars."""
        counter = self

        class Bar(tqdm):  # type: ignore[type-arg]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                self._counts = "transfer" not in str(kwargs.pop("name", None)) and kwargs.get("unit") == "B"
                super().__init__(*args, **kwargs | {"file": StringIO()})

            def update(self, n: float | None = 1) -> bool | None:
                if counter.stopped:
                    raise Cancelled("stopped")
                shown: bool | None = super().update(n)
                if self._counts:
                    counter.done = int(self.n)
                return shown

        return Bar

    def line(self) -> str:
        if not self.total:
            return f"fetching {self.name}"
        speed = self.done / max(time.monotonic() - self._begin, 1e-3)
        text = f"downloading {self.name}: {_gb(self.done)} of {_gb(self.total)}"
        if not self.done:
            return text
        return f"{text}, {speed / 1e6:.1f} MB/s, {_duration((self.total - self.done) / speed)} left"

    def share(self) -> float:
        return min(self.done / self.total, 1.0) if self.total else 0.0


def _awaited(download: Callable[[], str], counter: _Counter, report: LoadProgress) -> str:
    """Run it in a thread of its own: `report` is called, and may stop, from here however long the network is silent."""
    pool = ThreadPoolExecutor(1, "download")
    running: Future[str] = pool.submit(download)
    try:
        while True:
            report(counter.share(), counter.line())
            try:
                return running.result(timeout=POLL_S)
            except NotYet:
                if running.done():  # its own timeout, not that of the wait
                    raise
    finally:
        counter.stopped = True
        pool.shutdown(wait=False)


@contextmanager
def one_line(name: str) -> Iterator[None]:
    """Whatever the hub's client raises -> one ValueError line that names the cure."""
    try:
        yield
    except Cancelled:
        raise
    except Exception as error:  # the client raises its transport's own errors, which share no base with OSError
        kinds = {kind.__name__ for kind in type(error).__mro__}
        silent = bool(kinds & UNANSWERED) and not offline()
        raise (Unreachable if silent else ValueError)(_explained(name, error, kinds)) from error


def _explained(name: str, error: Exception, kinds: set[str]) -> str:
    repository, revision = split(name)
    cure = suggest(name, embedded_names())
    if "GatedRepoError" in kinds:
        return (
            f"{repository} is gated; accept its licence on huggingface.co/{repository} and log in with: hf auth login"
        )
    if "RevisionNotFoundError" in kinds:
        return f"{repository} has no revision {revision!r}; name a branch, a tag or a commit, or leave @{revision} out"
    if kinds & {"RepositoryNotFoundError", "HFValidationError"}:
        return f"unknown model {name!r}; {cure}, or give a folder or a Hugging Face id (hf auth login for private ones)"
    if kinds & {"LocalEntryNotFoundError", "OfflineModeIsEnabled"} and offline():
        return f"{name!r} is not on this machine and HF_HUB_OFFLINE is set; unset it, or {cure}"
    if kinds & UNANSWERED:
        return f"{name!r} is not here and {constants.ENDPOINT} cannot be reached; {cure}"
    line = next((text for text in str(error).splitlines() if text.strip()), "") or type(error).__name__
    if "HfHubHTTPError" in kinds:
        return f"{constants.ENDPOINT} does not give out {name!r} ({line}); try again later"
    if "Consistency check failed" in line:
        return f"a file of {name} arrived incomplete; run it again, what is complete is kept"
    return f"{name} cannot be fetched: {line}"


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 50_000_000 else f"{count / 1e6:.1f} MB"


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
