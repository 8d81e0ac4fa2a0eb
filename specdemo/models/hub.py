"""Repositories of the Hugging Face hub: their content, and download to the local cache.

A name is `organisation/model`, optionally with `@revision` (a branch, tag or commit). Only the files that a model needs
are downloaded. An interrupted download resumes; complete files are kept. With HF_HUB_OFFLINE=1 only the cache is used.
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

LoadProgress = Callable[[float, str], None]  # fraction done 0..1, current activity; may raise to stop loading

MASK_FILE = "mask_embedding.pt"  # embedding of a drafter's mask token
CONFIG_FILES = ("*.json", "*.txt", "*.model", "*.jinja", MASK_FILE)  # config, tokenizer, chat template
WEIGHTS = "*.safetensors"
LEFT_BY_TRAINERS = ("training_args.*", "optimizer.*", "scheduler.*", "rng_state*", "trainer_state.*")
POLL_S = 0.2
CONNECTION_ERRORS = {"LocalEntryNotFoundError", "ConnectError", "ConnectionError", "TransportError", "TimeoutException"}
SPARE_DISK = 500_000_000  # bytes to leave free


class Cancelled(ValueError):
    """Raised by a `LoadProgress` to stop loading."""


class Unreachable(ValueError):
    """The hub does not answer."""


@dataclass(frozen=True, slots=True)
class Repository:
    """Files of a repository that a model needs, at its top level."""

    name: str
    files: Mapping[str, int]  # bytes
    numbers: Mapping[str, int]  # stored dtype -> number of weights; empty if unknown

    @property
    def weights(self) -> list[str]:
        """Return the weight files."""
        return [file for file in self.files if not any(fnmatch(file, kind) for kind in CONFIG_FILES)]

    def missing(self) -> dict[str, int]:
        """Return the files that are not in the local cache."""
        repository, revision = split(self.name)
        local = {f for f in self.files if isinstance(try_to_load_from_cache(repository, f, revision=revision), str)}
        return {file: size for file, size in self.files.items() if file not in local}


def no_progress(share: float, what: str) -> None:
    """Ignore progress."""


def split(name: str) -> tuple[str, str | None]:
    """Split `organisation/model@revision`; None: the main branch."""
    repository, _, revision = name.partition("@")
    return repository, revision or None


def embedded_folder() -> Path:
    """Return the folder of the embedded models; SPECDEMO_MODELS overrides it."""
    return Path(os.environ.get("SPECDEMO_MODELS") or Path(__file__).parent / "embedded")


def is_embedded(folder: str | Path) -> bool:
    """Return True for the folder of an embedded model."""
    return Path(folder).resolve().is_relative_to(embedded_folder().resolve())


def embedded_models() -> list[str]:
    """Return the names of the embedded models that can be a target or a draft model: those with a tokenizer."""
    return sorted(
        config.parent.name for config in embedded_folder().glob("*/config.json") if _is_complete(config.parent)
    )


def embedded_heads() -> list[str]:
    """Return the names of the embedded heads."""
    return sorted(
        config.parent.name for config in embedded_folder().glob("*/config.json") if not _is_complete(config.parent)
    )


def _is_complete(folder: Path) -> bool:
    return (folder / "tokenizer.json").is_file()


def offline() -> bool:
    """Return True if the hub must not be contacted."""
    return bool(constants.HF_HUB_OFFLINE)


def model_info(name: str) -> ModelInfo:
    """Fetch the hub's metadata of a repository and its files.

    Raises ValueError, one line, if it is missing, gated or cannot be read, and Unreachable if the hub does not answer.
    """
    repository, revision = split(name)
    with hub_errors(name):
        return HfApi().model_info(repository, revision=revision, files_metadata=True)


def select_files(name: str, info: ModelInfo, pickled: Sequence[str] = ()) -> Repository:
    """Select the files of a repository that a model needs. pickled: patterns of weights to accept without
    safetensors."""
    top = {f.rfilename: f.size or 0 for f in info.siblings or [] if "/" not in f.rfilename}
    config_files = {f: size for f, size in top.items() if any(fnmatch(f, kind) for kind in CONFIG_FILES)}
    weights = [f for f in top if fnmatch(f, WEIGHTS)]
    # a second copy in the author's own format would double the download
    weights = [f for f in weights if f.startswith("model")] or weights
    weights = weights or [f for f in top if any(fnmatch(f, kind) for kind in pickled)]
    selected = {**config_files, **{f: top[f] for f in weights}}
    files = {f: size for f, size in selected.items() if not any(fnmatch(f, kind) for kind in LEFT_BY_TRAINERS)}
    return Repository(name, files, dict(info.safetensors.parameters) if info.safetensors else {})


def fetch(repo: Repository, report: LoadProgress = no_progress) -> Path:
    """Download the files. Raises ValueError, one line, if there is too little disk space, and any error of `report`."""
    missing = repo.missing()
    total, cache = sum(missing.values()), Path(constants.HF_HUB_CACHE)
    free = shutil.disk_usage(next(p for p in (cache, *cache.parents) if p.exists())).free
    if missing and total + SPARE_DISK > free:
        raise ValueError(
            f"{repo.name}: the download needs {_gb(total)} and {_gb(free)} of disk space are free; free some in "
            f"{cache}, or set HF_HOME to another folder"
        )
    return _snapshot(repo.name, list(repo.files), total, report)


def fetch_config(repo: Repository) -> Path:
    """Download the config and the tokenizer without weights; return their folder. Raises ValueError with one line."""
    return _snapshot(repo.name, [file for file in repo.files if file not in repo.weights], 0, no_progress)


def remote_headers(repo: Repository) -> Iterator[tuple[str, list[int], str]]:
    """Yield name, shape and stored dtype of every tensor. Downloads only the headers of its safetensors."""
    repository, revision = split(repo.name)
    for file in repo.weights:
        with hub_errors(repo.name):
            header = HfApi().parse_safetensors_file_metadata(repository, file, revision=revision)
        for name, tensor in header.tensors.items():
            yield name, list(tensor.shape), str(tensor.dtype)


def cached_folder(name: str) -> Path:
    """Return the folder of an earlier download. Raises ValueError, one line, if there is none."""
    # a single file: with a pattern, the client treats a folder that lacks any match as incomplete
    return _snapshot(name, ["config.json"], 0, no_progress, local=True)


def _snapshot(name: str, patterns: list[str], total: int, report: LoadProgress, local: bool = False) -> Path:
    repository, revision = split(name)
    counter = _Counter(total, name)
    download = partial(snapshot_download, repository, revision=revision, local_files_only=local)
    with hub_errors(name):
        return Path(
            _run_download(partial(download, allow_patterns=patterns, tqdm_class=counter.bar()), counter, report)
        )


class _Counter:
    """Downloaded bytes as a progress line. The download threads count, another thread reads."""

    def __init__(self, total: int, name: str) -> None:
        self.total, self.name, self.done, self.stopped = total, name, 0, False
        self._begin = time.monotonic()

    def bar(self) -> type[Any]:
        """Return the class that the downloader uses for its progress bars."""
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


def _run_download(download: Callable[[], str], counter: _Counter, report: LoadProgress) -> str:
    """Run the download in a thread, so that `report` is called, and can stop it, while the network is silent."""
    pool = ThreadPoolExecutor(1, "download")
    running: Future[str] = pool.submit(download)
    try:
        while True:
            report(counter.share(), counter.line())
            try:
                return running.result(timeout=POLL_S)
            except NotYet:
                if running.done():  # a timeout of the download itself, not of the wait
                    raise
    finally:
        counter.stopped = True
        pool.shutdown(wait=False)


@contextmanager
def hub_errors(name: str) -> Iterator[None]:
    """Convert any error of the hub's client to a ValueError with one line that says how to fix it."""
    try:
        yield
    except Cancelled:
        raise
    except Exception as error:  # the client raises errors of its transport, which are not OSErrors
        kinds = {kind.__name__ for kind in type(error).__mro__}
        unreachable = bool(kinds & CONNECTION_ERRORS) and not offline()
        raise (Unreachable if unreachable else ValueError)(_explain(name, error, kinds)) from error


def _explain(name: str, error: Exception, kinds: set[str]) -> str:
    repository, revision = split(name)
    hint = suggest(name, embedded_models(), embedded_heads())
    if "GatedRepoError" in kinds:
        return (
            f"{repository} is gated; accept its licence on huggingface.co/{repository} and log in with: hf auth login"
        )
    if "RevisionNotFoundError" in kinds:
        return f"{repository} has no revision {revision!r}; use a branch, a tag or a commit, or omit @{revision}"
    if kinds & {"RepositoryNotFoundError", "HFValidationError"}:
        return f"unknown model {name!r}; {hint}, or give a folder or a Hugging Face id (hf auth login for private ones)"
    if kinds & {"LocalEntryNotFoundError", "OfflineModeIsEnabled"} and offline():
        return f"{name!r} is not on this machine and HF_HUB_OFFLINE is set; unset it, or {hint}"
    if kinds & CONNECTION_ERRORS:
        return f"{name!r} is not on this machine and {constants.ENDPOINT} cannot be reached; {hint}"
    line = next((text for text in str(error).splitlines() if text.strip()), "") or type(error).__name__
    if "HfHubHTTPError" in kinds:
        return f"{constants.ENDPOINT} rejected the download of {name!r} ({line}); try again later"
    if "Consistency check failed" in line:
        return f"a file of {name} is incomplete; run the command again, which downloads only missing files"
    return f"{name} cannot be downloaded: {line}"


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 50_000_000 else f"{count / 1e6:.1f} MB"


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
