"""Language models on this machine: those that specdemo downloaded, in the stores of LM Studio, Ollama, llama.cpp and
Hugging Face, and next to a GGUF file."""

import hashlib
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from pathlib import Path

from huggingface_hub import constants

from specdemo.core.safe_io import read_json
from specdemo.costs.drafting import MASK_TOKEN
from specdemo.costs.shapes import shape_of
from specdemo.models import packaged
from specdemo.models.gguf_files import (
    all_parts,
    is_language_model,
    models_in,
    name_on_hub,
    ollama_blob,
    ollama_folder,
    part_names,
)
from specdemo.models.gguf_header import read_header, token_bytes
from specdemo.models.ref import OLLAMA, ModelRef, quantisation_in
from specdemo.models.sources import size_text

GENERATES = re.compile(
    "^(?!.*(Assistant|Eagle|DFlash|Medusa|Speculator|Draft)).*(CausalLM|LMHeadModel|ConditionalGeneration)$"
)
LEAST_RATIO = 3.0  # below it a draft model pays only where many of its tokens are accepted
BEST_RATIO = 15.0  # the middle of the recommended 10 to 20


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine. path: a GGUF file, or the folder of a transformers model."""

    name: ModelRef  # as `--target` takes it
    store: str
    path: Path
    bytes: int

    @property
    def quantisation(self) -> str:
        """Return the type of most weights, such as Q4_K_M; empty if unknown."""
        if not self.path.is_dir():
            return read_header(self.path).quantisation or quantisation_in(self.path.name)
        config = read_json(self.path / "config.json")
        return str(config.get("dtype") or config.get("torch_dtype") or "")

    @property
    def token_bytes(self) -> int:
        """Return the bytes of weights that a pass over one token reads; of a transformers model an estimate."""
        if not self.path.is_dir():
            return token_bytes({part: read_header(part) for part in all_parts(self.path)})
        try:
            shape = shape_of(read_json(self.path / "config.json"))
        except ValueError:  # the config states no sizes
            return self.bytes
        unread = shape.embedding + shape.expert * (shape.experts - shape.experts_per_token) * shape.expert_layers
        return int(self.bytes * (1.0 - unread / shape.parameters))

    @property
    def drafts_with(self) -> str:
        """Return the method that drafts with the model."""
        parallel = self.path.is_dir() and read_json(self.path / "config.json").get(MASK_TOKEN) is not None
        return "pard" if parallel else "draft_model"

    @property
    def vocabulary(self) -> str:
        """Return a digest that is equal for models with the same vocabulary; empty if unknown."""
        if not self.path.is_dir():
            return read_header(self.path).vocabulary
        file = self.path / "tokenizer.json"
        return _vocabulary(file, file.stat().st_mtime_ns) if file.is_file() else ""


def local_models(target: ModelRef | None = None) -> list[LocalModel]:
    """Return all language models in known stores, by store and name, and damaged files. Reads headers.

    target: if a GGUF file, also itself and the models in its folder.
    """
    beside = [*_beside(target)] if target else []
    stores = (_downloaded, _lm_studio, _ollama, _llamacpp, _hugging_face)
    found = {model.name: model for store in stores for model in store()}
    known = {model.path.resolve() for model in beside}
    others = [model for model in found.values() if model.path.resolve() not in known]
    return sorted([*beside, *others], key=lambda model: (model.store, model.name))


@dataclass(frozen=True, slots=True)
class DrafterFit:
    """How a drafter fits a target. fits: None if that is unknown, as its files were not opened. place: its store, or
    where else it is. shares_text: with another vocabulary, which servers do not support."""

    drafter: ModelRef
    method: str
    fits: bool | None
    reason: str
    place: str = ""
    shares_text: bool = False


def size_words(ratio: float) -> str:
    """Return how much smaller a draft model is, with a warning if it is not much.

    A draft token costs 1 / ratio of a pass at least, so one that is accepted less often does not pay.
    """
    words = f"{ratio:.1f}x smaller".replace(".0x", "x")
    warning = f", pays only if over {100.0 / ratio:.0f} % of its tokens are accepted"
    return words if ratio >= LEAST_RATIO else words + warning


def draft_models(target: LocalModel, models: Iterable[LocalModel]) -> list[DrafterFit]:
    """Return how models fit a target as draft models: smaller ones of the same vocabulary do, the best size first."""
    fits: list[tuple[float, DrafterFit]] = []
    for model in models:
        if model.path == target.path:
            continue
        reason, distance = "", math.inf
        try:
            own, other = target.vocabulary, model.vocabulary
            ratio = target.token_bytes / max(model.token_bytes, 1)
            if not own or own != other:
                reason = "another vocabulary" if own and other else "unknown vocabulary"
            elif ratio <= 1.0:
                reason = "not smaller"
            else:
                distance = abs(math.log(ratio / BEST_RATIO))
        except ValueError:
            reason = "damaged"
        fit = DrafterFit(model.name, model.drafts_with, not reason, reason or size_words(ratio), model.store)
        fits.append((distance, fit))
    return [fit for _, fit in sorted(fits, key=itemgetter(0))]


def draft_beside(target: ModelRef) -> ModelRef | None:
    """Return the draft model in the folder of a GGUF file that fits it best; None if none does. Reads headers."""
    models = [*_beside(target)]
    own = next((model for model in models if model.path == Path(target).expanduser()), None)
    fits = draft_models(own, models) if own else []
    return next((fit.drafter for fit in fits if fit.fits), None)


def in_words(fits: Sequence[DrafterFit]) -> str:
    """Return the drafters that fit in words or, without any, what was considered."""
    names = [f"{fit.drafter} ({fit.reason})" for fit in fits if fit.fits]
    if names or not fits:
        return ", ".join(names)
    alike = {reason: [fit.drafter for fit in fits if fit.reason == reason] for reason in [fit.reason for fit in fits]}
    return "; ".join(["no draft model", *(f"{reason}: {', '.join(names)}" for reason, names in alike.items())])


def model_rows(models: Sequence[LocalModel]) -> list[dict[str, str]]:
    """Return a table of models: name, store, size, type of the weights, and draft models, the best size first."""
    rows = []
    for model in models:
        drafts = [fit for fit in draft_models(model, models) if fit.fits]
        try:
            kind = model.quantisation or "?"
        except ValueError:
            kind = "damaged"
        about = {"model": model.name, "store": model.store, "size": size_text(model.bytes), "weights": kind}
        rows.append(about | {"drafts": in_words(drafts)})
    return rows


def _beside(target: ModelRef) -> Iterator[LocalModel]:
    file = Path(target).expanduser()
    if target.gguf and file.is_file():
        yield from (
            _of_file(path, "its folder", str(Path(target).with_name(path.name))) for path in models_in(file.parent)
        )


def _downloaded() -> Iterator[LocalModel]:
    for name in packaged.DOWNLOADS:
        if made := packaged.local(name):
            files = made.glob("*.safetensors") if made.is_dir() else [made]
            yield LocalModel(ModelRef(name), "specdemo", made, sum(file.stat().st_size for file in files))
    named = {packaged.local(name) for name in packaged.DOWNLOADS}
    yield from (_of_file(path, "specdemo") for path in models_in(packaged.cache()) if path not in named)


def _lm_studio() -> Iterator[LocalModel]:
    for folder in (Path.home() / ".lmstudio" / "models", Path.home() / ".cache" / "lm-studio" / "models"):
        for repository in sorted(folder.glob("*/*/")):
            yield from (_of_file(path, "LM Studio") for path in models_in(repository))


def _llamacpp() -> Iterator[LocalModel]:
    caches = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    folder = Path(os.environ.get("LLAMA_CACHE") or caches / "llama.cpp").expanduser()
    return (_of_file(path, "llama.cpp") for path in models_in(folder))


def _of_file(path: Path, store: str, name: str = "") -> LocalModel:
    parts = [path.with_name(part) for part in part_names(path.name)]
    return LocalModel(ModelRef(name or path), store, path, sum(part.stat().st_size for part in parts if part.is_file()))


def _ollama() -> Iterator[LocalModel]:
    root = ollama_folder() / "manifests"
    for manifest in sorted(path for path in root.glob("*/*/*/*") if path.is_file()):
        host, group, model, tag = manifest.relative_to(root).parts
        prefix = [] if (host, group) == ("registry.ollama.ai", "library") else [host, group]
        prefix = [group] if host == "registry.ollama.ai" and prefix else prefix
        name = f"{'/'.join([*prefix, model])}:{tag}"
        try:
            blob = ollama_blob(name)
        except ValueError:  # a cloud model, or one that is not GGUF
            continue
        if is_language_model(blob):
            yield _of_file(blob, "Ollama", OLLAMA + name)


def _hugging_face() -> Iterator[LocalModel]:
    for repository in sorted(Path(constants.HF_HUB_CACHE).glob("models--*--*")):
        name = repository.name.removeprefix("models--").replace("--", "/", 1)
        revision = repository / "refs" / "main"
        if not revision.is_file():
            continue
        folder = repository / "snapshots" / revision.read_text(encoding="utf-8").strip()
        weights = [file for file in folder.glob("*.safetensors") if file.is_file()]
        has_tokenizer = (folder / "tokenizer.json").is_file()  # heads have none
        if weights and has_tokenizer and (folder / "config.json").is_file() and _generates(folder):
            yield LocalModel(ModelRef(name), "Hugging Face", folder, sum(file.stat().st_size for file in weights))
        files = {path.relative_to(folder).as_posix(): path for path in _gguf_below(folder)}
        for file, path in files.items():
            yield _of_file(path, "Hugging Face", name_on_hub(name, file, list(files)) or str(path))


def _generates(folder: Path) -> bool:
    """Return False for a transformers folder of another kind, such as an embedding model, a head or an encoder."""
    if (folder / "modules.json").is_file():  # of sentence-transformers
        return False
    stated = read_json(folder / "config.json").get("architectures") or ["ForCausalLM"]
    return isinstance(stated, list) and any(GENERATES.search(str(name)) for name in stated)


def _gguf_below(folder: Path) -> Iterator[Path]:
    for inner in (folder, *sorted(path for path in folder.glob("*/") if path.is_dir())):
        yield from models_in(inner)


@lru_cache(maxsize=64)
def _vocabulary(file: Path, changed_ns: int) -> str:
    """Return the digest of a tokenizer.json as `gguf_files.Header.vocabulary` has it. changed_ns: a cache key."""
    data = read_json(file)
    try:
        words = data["model"]["vocab"]
        pairs = words.items() if isinstance(words, dict) else ((word, i) for i, (word, _) in enumerate(words))
        tokens = {int(number): str(word) for word, number in pairs}
        tokens |= {int(entry["id"]): str(entry["content"]) for entry in data.get("added_tokens", ())}
    except (KeyError, TypeError, ValueError, AttributeError):
        return ""
    digest = hashlib.sha256()
    for _, word in sorted(tokens.items()):
        text = word.encode("utf-8", "replace")
        digest.update(b"%d:%b" % (len(text), text))
    return digest.hexdigest()
