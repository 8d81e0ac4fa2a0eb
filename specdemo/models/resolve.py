"""Resolution of a model name to a folder: an embedded model ("stories"), a folder, or a Hugging Face id with or without
@revision.

Folders never use the network; ids are downloaded to the Hugging Face cache first (hub.py).
"""

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from safetensors import SafetensorError

from specdemo.core.json_limits import JsonLimits
from specdemo.core.safe_io import TOO_LARGE, check_regular, is_out_of_memory, read_json
from specdemo.models import hub
from specdemo.models.gguf_files import is_gguf
from specdemo.models.hub import LoadProgress, embedded_folder

SUMS = "SHA256SUMS"
WEIGHTS = (".safetensors", ".pt", ".bin", ".pth")
NO_GGUF = (
    "GGUF, which can only decode; name one file as the target or the draft model of a run (pip install "
    "llama-cpp-python gguf), run it with --engine llamacpp, or serve it with llama.cpp (llama-server -m FILE.gguf "
    "--port 8080), LM Studio or Ollama and pass the address with --server; for anything else choose the original model "
    "with safetensors weights"
)
CONFIG_LIMITS = JsonLimits(64_000_000, 2_000_000, 600_000)  # twice the largest public tokenizer or weight index


def resolve(name: str) -> str:
    """Return the folder of an embedded name, an expanded path, or an unchanged hub id."""
    folder = embedded_folder() / name
    if re.fullmatch(r"[\w.-]+", name) and (folder / "config.json").is_file():
        return str(folder)
    return str(Path(name).expanduser()) if _is_path(name) else name


def _is_path(name: str) -> bool:
    several = hub.split(name)[0].count("/") > 1
    return name.startswith((".", "/", "~")) or os.sep * 2 in name or several or Path(name).exists()


def locate(name: str, pickled: Sequence[str] = ()) -> Path | hub.Repository:
    """Return the folder of a model, or the hub's metadata of its repository. Downloads no weights. Raises ValueError,
    one line.

    pickled: patterns of weights to accept where there are no safetensors.
    """
    path = resolve(name)
    folder = Path(path)
    if not name.strip():
        raise ValueError("the model name is empty; use a folder, a Hugging Face id or an embedded model")
    if is_gguf(name):
        raise ValueError(f"{name} is {NO_GGUF}")
    if folder.is_file():
        raise ValueError(f"{name} is a file; use the folder that contains it")
    if folder.is_dir():
        _check_not_gguf(name, [file.name for file in folder.iterdir()])
        return _check_files(folder)
    if _is_path(name):
        raise ValueError(f"the folder {name} does not exist")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?", path):
        raise ValueError(f"{name!r} is neither a folder nor a Hugging Face id (organisation/model, or with @revision)")
    if hub.offline():
        return hub.cached_folder(path)
    info = hub.model_info(path)
    _check_not_gguf(name, [file.rfilename for file in info.siblings or []])
    repository = hub.select_files(path, info, pickled)
    if not pickled and "config.json" not in repository.files:
        raise ValueError(f"{name} has no config.json; it is not a transformers model")
    if not repository.weights:
        raise ValueError(f"{name} has no .safetensors weights; choose a model that has them")
    return repository


def _check_not_gguf(name: str, files: Sequence[str]) -> None:
    """Raise ValueError where the only weights among the files are GGUF."""
    if any(map(is_gguf, files)) and not any(file.endswith(WEIGHTS) for file in files):
        raise ValueError(f"{name} contains only {NO_GGUF}")


def _check_files(folder: Path) -> Path:
    """Return the folder. Raises ValueError if one of its files is not a regular file or is too large."""
    for file in folder.iterdir():
        described = file.suffix in (".json", ".txt", ".model", ".jinja")
        if file.exists() and (described or file.suffix in WEIGHTS):
            check_regular(file, CONFIG_LIMITS.bytes if described else None)
    return folder


def fetch_folder(source: Path | hub.Repository, report: LoadProgress) -> Path:
    """Return the folder of a source, downloaded if it is on the hub."""
    if isinstance(source, Path):
        check_embedded(source)
        return source
    return hub.fetch(source, lambda share, what: report(0.05 + 0.5 * share, what))


def check_embedded(folder: Path) -> None:
    """Raise ValueError, one line, if a weight file of an embedded model does not match its checksum in SHA256SUMS.

    Other folders pass. Every file is read once per process. To update the checksums after training, run `sha256sum
    */*.safetensors >SHA256SUMS` in the folder of the embedded models.
    """
    root = embedded_folder().resolve()
    if folder.resolve().parent != root or not (root / SUMS).is_file():
        return
    for line in (root / SUMS).read_text(encoding="ascii").splitlines():
        digest, _, name = line.partition("  ")
        file = root / name
        if file.parent.name == folder.resolve().name and file.is_file():
            info = file.stat()
            if _digest(file, info.st_size, info.st_mtime_ns) != digest:
                raise ValueError(
                    f"the checksum of {file} is not that in {SUMS}; fetch the file again, or update {SUMS}"
                )


@lru_cache(maxsize=256)
def _digest(file: Path, size: int, changed_ns: int) -> str:
    """Return the SHA-256 of a file. size, changed_ns: cache keys, so that a changed file is read again."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def config_folder(name: str) -> Path:
    """Return the folder with the config and the tokenizer of a model."""
    source = locate(name)
    return source if isinstance(source, Path) else hub.fetch_config(source)


def has_chat_template(name: str) -> bool | None:
    """Return True if a local model has a chat template; None if the model is not local."""
    folder = Path(resolve(name))
    if not (folder / "config.json").is_file():
        return None
    settings = folder / "tokenizer_config.json"
    has_template_file = (folder / "chat_template.jinja").is_file()
    return has_template_file or (settings.is_file() and "chat_template" in read_json(settings, CONFIG_LIMITS))


def check_folder(folder: Path, name: str) -> Path:
    """Return the folder if it holds a complete model. Raises ValueError, one line, that says how to fix it."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"{name} has no config.json; it is not a Hugging Face model folder")
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"{name} has no .safetensors weights; convert it with model.save_pretrained(folder)")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        with load_errors(name):
            shards = set(map(str, read_json(index, CONFIG_LIMITS)["weight_map"].values()))
        absent = sorted(shard for shard in shards if not (folder / shard).is_file())
        if absent:
            raise ValueError(f"{name} lacks {absent[0]}, one of {len(shards)} files of weights; fetch it again")
    return folder


@contextmanager
def load_errors(name: str) -> Iterator[None]:
    """Convert any error from loading to a ValueError with one line."""
    try:
        yield
    except Exception as error:
        raise ValueError(_explain(name, error)) from error


def _explain(name: str, error: Exception) -> str:
    if is_out_of_memory(error):
        return f"{name} {TOO_LARGE}"
    line = next((s for s in str(error).splitlines() if s.strip()), "")
    if "trust_remote_code" in str(error):
        return f"{name} needs code from its repository, which specdemo never runs; choose a model type of transformers"
    if isinstance(error, SafetensorError):
        return f"a file of {name} is damaged or cut short ({line}); delete it and fetch it again"
    return line if line.startswith(name) else f"{name} cannot be loaded: {line or type(error).__name__}"
