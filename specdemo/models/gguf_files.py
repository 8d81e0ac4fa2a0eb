"""GGUF files: the files that a name states, headers, and checks before llama.cpp loads a file. Needs neither llama.cpp
nor torch.

A name is a file (`model.gguf`), a folder of one model as LM Studio stores it, `ollama:MODEL[:TAG]`, or
`organisation/repository[@revision]:QUANTISATION` on the hub. A split model is named by any of its parts.
"""

import json
import os
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path, PurePath

from huggingface_hub import constants, try_to_load_from_cache

from specdemo.core.deployment import public
from specdemo.core.safe_io import read_text
from specdemo.models import packaged, sources
from specdemo.models.errors import Unreachable
from specdemo.models.gguf_header import Header, other_kind, read_header
from specdemo.models.ref import HUB_GGUF, OLLAMA, SUFFIX, ModelRef, quantisation_in
from specdemo.models.sources import LoadProgress, Repository, cached_folder, fetch_folder, model_info, no_progress

ROPE_BASE = 10_000.0  # default of models without one in their config
CAPABILITIES = frozenset({"hidden_states"})  # of a target that llama.cpp runs (core/protocol.py)
DEFAULT_QUANTISATION = "Q4_K_M"  # as in llama.cpp
MANIFEST_BYTES = 1_000_000
SPLIT = re.compile(r"(.*-)(\d{5})(-of-)(\d{5})(\.gguf)", re.IGNORECASE)
OLLAMA_NAME = re.compile(r"(?:[\w.-]+/){0,3}[\w.-]+(?::[\w.-]+)?")
OTHER = re.compile(r"(?<![a-z])(mmproj|imatrix|mtp|eagle|dflash|dspark|assistant|lora|adapter)(?![a-z])")  # in names


def fetch_parts(name: ModelRef, report: LoadProgress = no_progress) -> tuple[Path, ...]:
    """Return the files of a model, its first part first, after a download if it is on the hub.

    Raises ValueError, one line, if there is no such model or a part is missing. Public pages load no GGUF model.
    """
    if public():
        raise ValueError("a public page loads no GGUF models; run specdemo on your machine")
    if name == packaged.SMOLLM2_GGUF:
        return (packaged.fetch_file(report),)
    source = _find(name)
    if isinstance(source, Repository):
        folder = fetch_folder(source, report)
        return tuple(folder / file for file in source.files)
    return all_parts(source)


def stored_bytes(name: ModelRef) -> int:
    """Return the size of a model's files without downloading them. Raises ValueError as `fetch_parts` does."""
    if name == packaged.SMOLLM2_GGUF:
        return packaged.BYTES
    source = _find(name)
    sizes = source.files.values() if isinstance(source, Repository) else (p.stat().st_size for p in all_parts(source))
    return sum(sizes)


def missing_bytes(name: ModelRef, pickled: Sequence[str] = ()) -> int:
    """Return the size of what loading a model, GGUF or not, downloads first; 0 for one on this machine. Asks the hub.

    pickled: as for `sources.locate`. Raises ValueError, one line, if there is no such model.
    """
    if packaged.local(name):
        return 0
    if name == packaged.SMOLLM2_GGUF:
        return packaged.BYTES
    try:
        on_hub = ModelRef(packaged.HUB_ID) if name == packaged.SMOLLM2 else name
        location = _find(name) if name.gguf else sources.locate(on_hub, pickled)
    except Unreachable:
        if name == packaged.SMOLLM2:
            return packaged.BYTES
        raise
    return location.missing_bytes() if isinstance(location, Repository) else 0


def local_header(name: ModelRef) -> Header | None:
    """Return the header of a model; None if it is not on this machine. Does not ask the hub. Raises ValueError, one
    line, if a file or a model of Ollama is missing or damaged."""
    if name == packaged.SMOLLM2_GGUF and packaged.local(name) is None:
        return None
    if name.path or name.is_gguf_file or name.startswith(OLLAMA):
        source = _find(name)
        assert isinstance(source, Path)
    else:
        try:
            repository = gguf_on_hub(name, cached=True)
        except ValueError:
            return None
        source = cached_folder(repository.name) / next(iter(repository.files))
    return read_header(all_parts(source)[0])


def is_here(model: ModelRef) -> bool:
    """Return whether the files of a model are on this machine. Does not ask the hub."""
    with suppress(ValueError):
        if model.path:
            return model.path.exists()
        return local_header(model) is not None if model.gguf else cached_folder(model).is_dir()
    return False


def has_chat_template(name: ModelRef) -> bool | None:
    """Return whether a model has a chat template; None if it is damaged or not on this machine."""
    if not name.gguf:
        return sources.has_chat_template(name.path) if name.path else None
    with suppress(ValueError):
        header = local_header(name)
        return None if header is None else "tokenizer.chat_template" in header.metadata
    return None


def _find(name: ModelRef) -> Path | Repository:
    """Return a file of the model, or the files to download. Raises ValueError if there is none."""
    if name.startswith(OLLAMA):
        return ollama_blob(name.removeprefix(OLLAMA))
    path = name.path
    if path is not None and path.is_dir():
        return _only_model(path)
    if name.is_gguf_file:
        if path is None or not path.is_file():
            raise ValueError(f"the file {name} does not exist")
        return path
    return gguf_on_hub(name)


def _only_model(folder: Path) -> Path:
    """Return the model in a folder. Raises ValueError unless there is exactly one."""
    models = models_in(folder)
    if not models:
        others = [f": {other} is {kind[0]}" for other in _gguf_in(folder)[:1] if (kind := _other_kind(other))]
        raise ValueError(f"{folder} has no GGUF model{''.join(others)}")
    if len(models) > 1:
        listing = f"{len(models)} GGUF models ({', '.join(path.name for path in models)})"
        raise ValueError(f"{folder} has {listing}; name one of the files")
    return models[0]


def models_in(folder: Path) -> list[Path]:
    """Return the language models of a folder, of a split model the first part, and damaged files. Reads headers."""
    return [file for file in _gguf_in(folder) if not _other_kind(file)]


def _gguf_in(folder: Path) -> list[Path]:
    return [folder / name for name in _first_parts([path.name for path in sorted(folder.glob("*.gguf"))])]


def _other_kind(file: Path) -> tuple[str, str] | None:
    """Return what a file is if it is no language model, and what runs it; None also if it cannot be read."""
    try:
        return other_kind([read_header(part) for part in _parts(file) if part.is_file()])
    except (OSError, ValueError):
        return None


def is_language_model(file: Path) -> bool:
    """Return False for a file that is readable and not a language model, such as a head or a projector."""
    return _other_kind(file) is None


def _first_parts(files: Sequence[str]) -> list[str]:
    """Return the files, of a split model the first part."""
    return [file for file in files if not (split := SPLIT.fullmatch(file)) or int(split[2]) == 1]


def _parts(file: Path) -> list[Path]:
    return [file.with_name(name) for name in part_names(file.name)]


def part_names(file: str) -> list[str]:
    """Return the names of all parts of a split model, or only this one."""
    split = SPLIT.fullmatch(file)
    if not split:
        return [file]
    return [f"{split[1]}{number:05}{split[3]}{split[4]}{split[5]}" for number in range(1, int(split[4]) + 1)]


def all_parts(file: Path) -> tuple[Path, ...]:
    """Return all parts of a split model. Raises ValueError if one is missing."""
    parts = tuple(_parts(file))
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ValueError(f"{file.name} lacks {missing[0]}, one of {len(parts)} parts; fetch the missing parts")
    return parts


def ollama_folder() -> Path:
    """Return Ollama's store."""
    return Path(os.environ.get("OLLAMA_MODELS") or Path.home() / ".ollama" / "models").expanduser()


def ollama_blob(name: str) -> Path:
    """Return the file of a model in Ollama's store. Raises ValueError if it is not there."""
    if not OLLAMA_NAME.fullmatch(name):
        raise ValueError(f"{OLLAMA}{name} is not a name of Ollama; use ollama:MODEL or ollama:MODEL:TAG")
    model, _, tag = name.partition(":")
    path = ["registry.ollama.ai", "library", *model.split("/")][-3:]
    path = path if model.count("/") != 1 else ["registry.ollama.ai", *model.split("/")]
    manifest = ollama_folder().joinpath("manifests", *path, tag or "latest")
    if ".." in path or not manifest.is_file():
        raise ValueError(f"{OLLAMA}{name} is not in {ollama_folder()}; run: ollama pull {name}")
    digest = _model_digest(manifest)
    blobs = ollama_folder() / "blobs"
    blob = next((blobs / file for file in (digest.replace(":", "-"), digest) if (blobs / file).is_file()), None)
    if blob is None:
        raise ValueError(f"{OLLAMA}{name} has no GGUF weights in {blobs}; run: ollama pull {name}")
    return blob


def _model_digest(manifest: Path) -> str:
    """Return the digest of a manifest's weights; empty if it has none."""
    try:
        layers = json.loads(read_text(manifest, MANIFEST_BYTES))["layers"]
        model = next((layer for layer in layers if layer["mediaType"].endswith("image.model")), {"digest": ""})
        return model["digest"] if re.fullmatch(r"sha256:[0-9a-f]{64}", model["digest"]) else ""
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{manifest} is not a manifest of Ollama; pull the model again") from None


def gguf_on_hub(name: ModelRef, cached: bool = False) -> Repository:
    """Return the files of a quantisation in a repository. cached: of those on this machine, without asking the hub.
    Raises ValueError if the repository has no such files."""
    repository, quantisation = ModelRef(name.partition(":")[0]), name.quantisation
    if cached or constants.HF_HUB_OFFLINE:
        folder = cached_folder(repository)
        files = {str(f.relative_to(folder)): f.stat().st_size for f in sorted(folder.rglob("*.gguf"))}
    else:
        siblings = model_info(repository).siblings or []
        files = {f.rfilename: f.size or 0 for f in siblings if f.rfilename.lower().endswith(SUFFIX)}
    candidates, checked = _candidates(repository, list(files), quantisation)
    file = _choose(name, candidates, quantisation, checked)
    absent = [part for part in part_names(file) if part not in files]
    if absent:
        raise ValueError(f"{repository} lacks {absent[0]}; choose another quantisation")
    return Repository(repository, {part: files[part] for part in part_names(file)}, {})


def _candidates(repository: ModelRef, files: Sequence[str], word: str) -> tuple[list[str], list[str]]:
    """Return the files that may be the model, and those of them that are on this machine, which come first and whose
    headers are those of language models. word: a quantisation, or the name of a file, which may be a head."""
    checked, remote = [], []
    for file in _first_parts(files):
        cached = try_to_load_from_cache(repository.repository, file, revision=repository.revision)
        if not isinstance(cached, str):
            remote.append(file)
        elif is_language_model(Path(cached)) or PurePath(file).stem == word:
            checked.append(file)
    return checked + remote, checked


def _choose(name: str, files: Sequence[str], word: str, checked: Collection[str] = ()) -> str:
    """Return the file of a name or a quantisation; without one, that of Q4_K_M or the first file, as llama.cpp does.

    The names of other files decide which are heads, projectors and so on, except those that are checked already, and
    words that the repository's name has too.
    """
    repository = name.partition(":")[0]
    own = {match[1] for match in OTHER.finditer(repository.lower())}
    others = {f for f in files if f not in checked and {match[1] for match in OTHER.finditer(f.lower())} - own}
    models = [file for file in files if file not in others] or list(files)
    if not models:
        raise ValueError(f"{name} has no GGUF files on this machine or on the hub")
    pattern = re.compile(rf"(?<![A-Z0-9_]){re.escape(word or DEFAULT_QUANTISATION)}(?![A-Z0-9_])", re.IGNORECASE)
    exact = (file for file in files if PurePath(file).stem == word)
    file = next(exact, None) or next(filter(pattern.search, models), None)
    if file is None and word:
        raise ValueError(f"{repository} has no {word}; choose one of {', '.join(models)}")
    return file or models[0]


def name_on_hub(repository: str, file: str, files: Sequence[str]) -> str:
    """Return a name of one of a repository's models that loads this file: by its quantisation if no other has the same,
    else by its own name; empty if there is none."""
    words = [word for word in (quantisation_in(file), PurePath(file).stem) if word]
    names = (f"{repository}:{word}" for word in words if _choose(repository, files, word, files) == file)
    return next(filter(HUB_GGUF.fullmatch, names), "")


def check_files(parts: Sequence[Path], name: str) -> Header:
    """Return the first header of a language model.

    Raises ValueError for another kind of file, for one that was cut short, and for a vocabulary at which llama.cpp ends
    the process (llama.cpp issue 25739).
    """
    headers = [check_file(part, name) for part in parts]
    if other := other_kind(headers):
        kind, program = other
        architecture = f" (architecture {headers[0].architecture})" if headers[0].architecture else ""
        fix = f"choose a language model; what runs this file: {program.replace('FILE', parts[0].name)}"
        raise ValueError(f"{name} is {kind}{architecture}, not a language model; {fix}")
    return headers[0]


def check_file(path: Path, name: str) -> Header:
    """Return the header of a part. Raises ValueError as `check_files` does."""
    header = read_header(path)
    if header.repeated:
        raise ValueError(f"{name} has {header.repeated} tokens twice, which llama.cpp cannot load; choose another file")
    size = path.stat().st_size
    if size < header.data_bytes:
        raise ValueError(
            f"{name} is incomplete: {path.name} has {size:,} of {header.data_bytes:,} bytes; fetch it again"
        )
    return header
